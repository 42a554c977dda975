"""Adapters in files: onnxruntime's, PEFT's, and the base that takes them when it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import ConfigError, ModelError, OrtflexError, OutputError, Trainer, Unsupported
from ortflex_plugins.adapters.lora import Lora
from tests import models
from tests.plugins.test_adapters import LORA, RNG, data, network, trainer, values

needs_adapters = pytest.mark.skipif(
    not hasattr(onnxruntime, "AdapterFormat"), reason="onnxruntime has no files of adapters"
)


def fitted(model: Any = None, **options: Any) -> Trainer:
    made = trainer(model, **options)
    made.fit(*data())
    return made


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(opened: Any, x: Any, adapter: Path | None = None) -> Any:
    """The first output, with an adapter as users of onnxruntime activate it."""
    options = onnxruntime.RunOptions()
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    return opened.run(None, {"X": x}, options)[0]


def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with W1 and W2 as int8 and a scale a column."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = []
    for tensor in [t for t in out.graph.initializer if t.name in ("W1", "W2")]:
        array, name = numpy_helper.to_array(tensor), tensor.name
        axis = 1 if name == "W1" else 0
        scale = (np.abs(array).max(1 - axis) / 127).astype(np.float32)
        whole = np.round(array / np.expand_dims(scale, 1 - axis)).astype(np.int8)
        out.graph.initializer.remove(tensor)
        out.graph.initializer.append(numpy_helper.from_array(whole, f"{name}_q"))
        out.graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
        zero = numpy_helper.from_array(np.zeros(len(scale), np.int8), f"{name}_zero")
        out.graph.initializer.append(zero)
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [name], axis=axis))
    whole_graph = [*nodes, *out.graph.node]
    del out.graph.node[:]
    out.graph.node.extend(whole_graph)
    return out


@needs_adapters
@pytest.mark.parametrize("base", [network, lambda: quantized(network())], ids=["float", "int8"])
def test_a_base_takes_adapters_of_several_ranks(base: Any, tmp_path: Path) -> None:
    x, _ = data()
    plain = trainer(base(), adapters=()).predict(x) if base is network else None
    made: dict[int, Trainer] = {}
    for rank in (4, 8):
        made[rank] = fitted(base(), adapters={**LORA, "rank": rank}, seed=rank, dropout="off")
        made[rank].export_adapter(tmp_path / f"{rank}.onnx_adapter")
    made[4].export_base(tmp_path / "base.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "base.onnx"), full_check=True)
    opened = session(tmp_path / "base.onnx")
    before = run(opened, x)
    if plain is not None:
        np.testing.assert_array_equal(before, plain)
    for rank in (4, 8, 4):
        got = run(opened, x, tmp_path / f"{rank}.onnx_adapter")
        np.testing.assert_allclose(got, made[rank].predict(x), rtol=1e-5, atol=1e-5)
        assert np.abs(got - before).max() > 0.05
    np.testing.assert_array_equal(run(opened, x), before)


def test_an_adapter_is_merged_into_a_weight_behind_a_cast() -> None:
    """A converter stores a weight in one type and computes its product in another one."""
    made = network()
    for tensor in made.graph.initializer:
        if tensor.name == "W1":
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, "W1"))
    made.graph.node.insert(0, helper.make_node("Cast", ["W1"], ["wide"], to=TensorProto.FLOAT))
    made.graph.node[1].input[1] = "wide"
    adapted = fitted(made, adapters={**LORA, "targets": ["q_proj"]})
    merged = adapted.export()
    assert values(merged)["W1"].dtype == np.float16
    got = run(onnxruntime.InferenceSession(merged.SerializeToString()), data()[0])
    np.testing.assert_allclose(got, adapted.predict(data()[0]), rtol=0.01, atol=0.01)


@needs_adapters
def test_the_base_has_what_was_trained_besides(tmp_path: Path) -> None:
    x, _ = data()
    made = fitted(params=["b"], adapters={**LORA, "targets": ["q_proj", "fc"]})
    made.export_base(tmp_path / "base.onnx")
    made.export_adapter(tmp_path / "one.onnx_adapter")
    opened = session(tmp_path / "base.onnx")
    got = run(opened, x, tmp_path / "one.onnx_adapter")
    np.testing.assert_allclose(got, made.predict(x), rtol=1e-5, atol=1e-5)
    inputs = {i.name: i.shape for i in opened.get_inputs()}
    assert set(inputs) == {"X"}, "inputs with defaults need not be given"
    assert {i.name for i in opened.get_overridable_initializers()} == {
        f"net.{m}.lora_{k}" for m in ("layers.0.q_proj", "fc") for k in "AB"
    }


@pytest.mark.skipif(
    onnxruntime.__version__.startswith("1.16."),
    reason="onnxruntime 1.16 transposes a DequantizeLinear and keeps its axis, with adapters or without",
)
def test_a_quantized_base_is_frozen_and_trained_as_the_rounded_one() -> None:
    x, y = data()
    model = quantized(network())
    made = trainer(model, epochs=6)
    losses = made.fit(x, y).losses
    assert losses[-1] < losses[0]
    assert made.get_state()["net.layers.0.q_proj.lora_A"].shape == (6, 2)
    # Steps are those of the float network with the rounded weights. onnxruntime multiplies int8 weights
    # with activations that it rounds as well (MatMulNBits), and its own predictions differ by 1 %.
    inside = values(model)
    rounded = onnx.ModelProto.FromString(network().SerializeToString())
    for tensor in rounded.graph.initializer:
        if tensor.name in ("W1", "W2"):
            axis = 1 if tensor.name == "W1" else 0
            scale = np.expand_dims(inside[f"{tensor.name}_scale"], 1 - axis)
            array = inside[f"{tensor.name}_q"].astype(np.float32) * scale
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    options = {"optimizer": "sgd", "learning_rate": 0.05, "epochs": 6}
    made, other = trainer(model, **options), trainer(rounded, **options)
    start = made.get_state()
    for one in (made, other):
        one.fit(x, y)
    for name, array in other.get_state().items():
        moved = np.abs(array - start[name]).max()
        np.testing.assert_allclose(made.get_state()[name], array, atol=0.06 * moved)


def test_a_folder_of_peft_has_its_layout(tmp_path: Path) -> None:
    """A and B are transposed, and of a convolution kernels, as PEFT's documentation has them."""
    from safetensors.numpy import load_file

    made = fitted(adapters={**LORA, "alpha": 3.5, "prefix": "net."})
    made.export_adapter(tmp_path / "peft")
    assert sorted(p.name for p in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    state = made.get_state()
    for module, axes in (("layers.0.q_proj", 0), ("conv", 1), ("fc", 0)):
        for letter in "AB":
            stored = tensors[f"base_model.model.{module}.lora_{letter}.weight"]
            wanted = state[f"net.{module}.lora_{letter}"].T
            np.testing.assert_array_equal(stored, wanted.reshape(wanted.shape + (1,) * axes))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert config["lora_alpha"] == 3.5
    assert config["target_modules"] == ["conv", "fc", "layers.0.q_proj"]


def folder(path: Path, pairs: dict[str, Any], **config: Any) -> Path:
    """A folder as PEFT writes it."""
    from safetensors.numpy import save_file

    path.mkdir()
    entries = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "lora_dropout": 0.0, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**entries, **config}))
    save_file(pairs, path / "adapter_model.safetensors")
    return path


def pairs(seed: int = 7, prefix: str = "base_model.model.net.") -> dict[str, Any]:
    rng = RNG(seed)
    shapes = {"layers.0.q_proj": (6, 8), "fc": (10, 3)}
    out = {}
    for module, (inputs, outputs) in shapes.items():
        out[f"{prefix}{module}.lora_A.weight"] = rng.normal(size=(2, inputs)).astype("f")
        out[f"{prefix}{module}.lora_B.weight"] = rng.normal(size=(outputs, 2)).astype("f")
    return out


@pytest.mark.parametrize("prefix", ["base_model.model.net.", "base_model.model."])
def test_a_folder_in_pefts_layout_is_read(prefix: str, tmp_path: Path) -> None:
    x, _ = data()
    tensors = pairs(prefix=prefix)
    made = trainer(adapters=Lora.from_peft(folder(tmp_path / "peft", tensors)))
    merged = onnx.ModelProto.FromString(network().SerializeToString())
    for tensor in merged.graph.initializer:
        module = {"W1": "layers.0.q_proj", "W2": "fc"}.get(tensor.name)
        if module is not None:
            down, up = (tensors[f"{prefix}{module}.lora_{k}.weight"] for k in "AB")
            change = 3.0 * (up @ down)
            change = change.T if tensor.name == "W1" else change / 0.5  # the Gemm has alpha = 0.5
            array = numpy_helper.to_array(tensor) + change
            tensor.CopyFrom(numpy_helper.from_array(array.astype("f"), tensor.name))
    wanted = trainer(merged, adapters=()).predict(x)
    np.testing.assert_allclose(made.predict(x), wanted, rtol=1e-5, atol=1e-5)
    table = {"name": "lora", "rank": 2, "alpha": 6, "source": str(tmp_path / "peft")}
    np.testing.assert_array_equal(trainer(adapters=table).predict(x), made.predict(x))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "more than A·B: bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"r": "two"}, "r: expected an integer >= 1"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
    ],
)
def test_what_is_no_low_rank_adapter_is_refused(change: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        Lora.from_peft(folder(tmp_path / "peft", pairs(), **change))


def with_header(pattern: str, new: str) -> Any:
    """What changes the header of a safetensors file at the first place that a pattern matches."""

    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        text = re.sub(pattern, new, content[8 : 8 + length].decode(), count=1).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


DAMAGE: dict[str, Any] = {
    "empty": lambda b: b"",
    "truncated header": lambda b: b[:100],
    "truncated data": lambda b: b[:-4],
    "longer": lambda b: b + bytes(4),
    "length of the header": lambda b: b"\xff" * 8 + b[8:],
    "no JSON": with_header("{", "["),
    "no offsets": with_header("data_offsets", "offsets"),
    "offsets of others": with_header(r"\[0,(\d+)\]", r"[4,\1]"),
    "NaN as an offset": with_header(r"\[0,", "[NaN,"),
    "NaN as a size": with_header(r'"shape":\[\d+', '"shape":[NaN'),
    "negative size": with_header(r'"shape":\[', '"shape":[-'),
    "unknown type": with_header("F32", "F33"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_found_when_it_is_named(damage: Any, tmp_path: Path) -> None:
    """Not only when a Trainer reads the values."""
    path = folder(tmp_path / "peft", pairs()) / "adapter_model.safetensors"
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    text = r"adapter_model\.safetensors' is damaged or cannot be read: "
    with pytest.raises(ConfigError, match=text):
        Lora.from_peft(path.parent)
    with pytest.raises(ConfigError, match=text):
        trainer(adapters={"name": "lora", "rank": 2, "alpha": 6, "source": str(path.parent)})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300], ids=str)
@pytest.mark.parametrize("letter", "AB")
def test_values_that_are_not_finite_are_refused(value: float, letter: str, tmp_path: Path) -> None:
    """Of a training that diverged, and of a type with larger numbers; the file and the tensor are named."""
    tensors = pairs()
    name = f"base_model.model.net.fc.lora_{letter}.weight"
    tensors[name] = tensors[name].astype(np.float64)
    tensors[name][1, 1] = value
    path = folder(tmp_path / "peft", tensors)
    with pytest.raises(ConfigError) as error:
        trainer(adapters=Lora.from_peft(path))
    assert f"{str(path / 'adapter_model.safetensors')!r}: the tensor {name!r}" in str(error.value)
    assert "not finite" in str(error.value)


def test_damaged_or_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a PEFT folder"):
        Lora.from_peft(tmp_path / "none")
    half = folder(tmp_path / "half", dict(list(pairs().items())[:3]))
    with pytest.raises(ConfigError, match=r"has only '.*net\.fc\.lora_A\.weight'; A and B"):
        Lora.from_peft(half)
    foreign = folder(tmp_path / "foreign", pairs(prefix="base_model.model.decoder."))
    with pytest.raises(ModelError, match=r"a different base model: its module 'decoder\.\S+'"):
        trainer(adapters=Lora.from_peft(foreign))
    with pytest.raises(ConfigError, match="created with other fields: pass rank = 2, alpha = 6"):
        trainer(adapters={"name": "lora", "source": str(foreign)})


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    ({}, "a.zip", {}, r"the ending '.zip' is unknown; known: .onnx_adapter"),
    ({}, "a", {"format": "pft"}, "unknown format 'pft'; did you mean 'peft'"),
    ({}, "a", {"label": "style"}, "no adapter is called 'style'"),
    ({"adapters": {**LORA, "prefix": "x."}}, "a", {}, "not a prefix of the module path"),
]


@pytest.mark.parametrize(("options", "file", "how", "text"), REFUSED, ids=lambda v: str(v)[:20])
def test_adapters_that_cannot_be_written_are_refused(
    options: Any, file: str, how: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        trainer(**options).export_adapter(tmp_path / file, **how)
    assert not list(tmp_path.iterdir())


def test_a_base_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OrtflexError, match="has no adapters"):
        trainer(adapters=()).export_base(tmp_path / "a.onnx")
    with pytest.raises(OutputError):
        trainer().export_base(tmp_path / "no" / "a.onnx")
    assert not list(tmp_path.iterdir())


def many_bits(bias: bool = False, k: int = 32, n: int = 8) -> onnx.ModelProto:
    """A MatMulNBits between two layers, as onnxruntime's quantizer writes it."""
    rng, node = RNG(2), helper.make_node
    tensors = {
        "W1": rng.normal(size=(6, k)),
        "Q": rng.integers(0, 256, (n, k // 32, 16), dtype=np.uint8),
        "S": rng.uniform(0.02, 0.05, n * (k // 32)),
        "W2": rng.normal(size=(n, 3)),
        **({"c": rng.normal(size=n)} if bias else {}),
    }
    given = ["t", "Q", "S", *(["", "", "c"] if bias else [])]
    sizes = {"K": k, "N": n, "bits": 4, "block_size": 32}
    nodes = [
        node("MatMul", ["X", "W1"], ["h"], name="/first/MatMul"),
        node("Tanh", ["h"], ["t"]),
        node("MatMulNBits", given, ["q"], "/mid/MatMul_Q4", domain="com.microsoft", **sizes),
        node("MatMul", ["q", "W2"], ["Y"], name="/last/MatMul"),
    ]
    ends = [models.floats("X", "N", 6)], [models.floats("Y", "N", 3)]
    return models.model(nodes, *ends, tensors, com_microsoft=1)


@needs_adapters
@pytest.mark.parametrize("bias", [False, True])
def test_a_base_of_four_bits_is_trained(bias: bool, tmp_path: Path) -> None:
    x, y = data()
    made = trainer(many_bits(bias), adapters={**LORA, "targets": ["mid", "last"]}, epochs=6)
    losses = made.fit(x, y).losses
    assert losses[-1] < losses[0]
    assert made.get_state()["mid.lora_A"].shape == (32, 2)
    with pytest.raises(Unsupported, match="cannot be merged"):
        made.export()
    made.export_base(tmp_path / "base.onnx")
    made.export_adapter(tmp_path / "one.onnx_adapter")
    got = run(session(tmp_path / "base.onnx"), x, tmp_path / "one.onnx_adapter")
    np.testing.assert_allclose(got, made.predict(x), rtol=1e-4, atol=1e-4)


@needs_adapters
def test_onnxruntime_reads_the_versions(tmp_path: Path) -> None:
    """Both versions are 1, which is what onnxruntime writes itself."""
    made = fitted()
    made.export_adapter(path := tmp_path / "a.onnx_adapter")
    file: Any = onnxruntime.AdapterFormat.read_adapter(str(path))
    assert (file.get_adapter_version(), file.get_model_version()) == (1, 1)
    assert sorted(file.get_parameters()) == sorted(made.get_state())

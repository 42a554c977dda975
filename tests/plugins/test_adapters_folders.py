"""Folders of PEFT: their layout, and those that nobody should trust, with every entry and pattern.

The class: a value of a foreign file that our code hands on unchecked, to an engine that takes
exponential time, or to a constructor whose errors name neither the file nor the key.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from ortflex_core import ConfigError, ModelError
from ortflex_plugins.adapters._patterns import Patterns, Refused
from ortflex_plugins.adapters.lora import Lora
from tests import models
from tests.plugins.test_adapters import LORA, RNG, data, fitted, network, trainer
from tests.training import make

ATOMS = ["a", "b", r"\.", ".", "[ab]", "[^a.]", r"\d", r"[\d_-]", r"\w", "0", "_", "[a-c0]", r"\D"]


def drawn(rng: random.Random, depth: int = 2) -> str:
    """A pattern in the syntax that both engines know."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(ATOMS)
        if depth and rng.random() < 0.4:
            part = f"({'?:' * rng.randint(0, 1)}{drawn(rng, depth - 1)})"
        times = ["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "*?", "+?", "{0}"]
        parts.append(part + rng.choice(times))
    out = "".join(parts)
    if rng.random() < 0.15:
        out = rng.choice(["^{}", "{}$"]).replace("{}", out)
    return f"{out}|{drawn(rng, 0)}" if rng.random() < 0.2 else out


def test_patterns_match_what_python_matches_as_peft_uses_it() -> None:
    """The oracle is ``re``, in the expression in which PEFT puts a pattern."""
    rng, hits = random.Random(0), 0
    for _ in range(600):
        pattern = drawn(rng)
        ours, wanted = Patterns([pattern]), re.compile(rf"(.*\.)?({pattern})$", re.ASCII)
        for _ in range(8):
            name = "".join(rng.choice("aabbc0._-") for _ in range(rng.randint(0, 7)))
            matched = wanted.match(name) is not None
            assert (ours.first(name) is not None) == matched, (pattern, name)
            hits += matched
    assert 400 < hits < 4400  # both answers occur


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("q_proj", "model.layers.0.q_proj", "model.layers.0.xq_proj"),
        (r".*\.layers\.[0-3]\..*(q|v)_proj", "m.layers.2.attn.v_proj", "m.layers.4.attn.v_proj"),
        (r"^model\.head$", "model.head", "base.model.head"),
        (r"(?P<part>encoder|decoder)\.block\.\d{1,2}\.fc", "x.decoder.block.12.fc", "block.123.fc"),
    ],
)
def test_patterns_that_people_write(pattern: str, yes: str, no: str) -> None:
    assert Patterns(["never", pattern]).first(yes) == pattern
    assert Patterns([pattern]).first(no) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(([a-z0-9_.])+)+!",
        "(a*)*b",
        "(a|a)*b",
        "(.*)*(.*)*(.*)*!",
        "((((a+)+)+)+)+!",
        "(a?){30}a{30}",
        "(.|.)*" * 20 + "!",
    ],
)
def test_time_is_linear_for_patterns_that_take_exponential_time_elsewhere(pattern: str) -> None:
    """Counted in visited states, not in seconds."""
    names = ["a" * n + "." + "a" * n for n in (50, 100, 200)]
    used = []
    for name in names:
        patterns = Patterns([pattern])
        before = patterns._work
        patterns.first(name)
        used.append(before - patterns._work)
    assert used[2] <= 2.5 * used[1] <= 6.5 * used[0]


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a", "a)", "[a", "*a", "a**", "a{3,1}", "a\\", "[b-a]", "(?=a)", "(?!a)b", "(?i)a"),
        *("(?<n", r"(a)\1", r"\bq", "(?P<1>a)", "(" * 60 + ")" * 60, "(a{1000}){1000}"),
        *("a{99999}", "x" * 5001),
    ],
)
def test_broken_and_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(Refused, match="pattern"):
        Patterns([pattern])


def test_many_patterns_have_one_budget() -> None:
    """A file may have any number of patterns, and a model any number of modules."""
    patterns = Patterns([f"{k}{'(.*a)*' * 60}" for k in range(50)])
    patterns._work = 100_000  # less, so that the test is short
    with pytest.raises(Refused, match="takes too long"):
        list(map(patterns.first, ["a" * 200] * 1000))


# Layout, and damage ------------------------------------------------------------------------------


def test_a_folder_of_peft_has_its_layout(tmp_path: Path) -> None:
    """A and B are transposed, and of a convolution kernels, as PEFT's documentation has them."""
    made = fitted(adapters={**LORA, "alpha": 3.5, "prefix": "net."})
    made.export_adapter(tmp_path / "peft")
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {p.name for p in (tmp_path / "peft").iterdir()} == names
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    state = made.get_state()
    for module, axes in (("layers.0.q_proj", 0), ("conv", 1), ("fc", 0)):
        for letter in "AB":
            stored = tensors[f"base_model.model.{module}.lora_{letter}.weight"]
            wanted = state[f"net.{module}.lora_{letter}"].T
            np.testing.assert_array_equal(stored, wanted.reshape(wanted.shape + (1,) * axes))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3.5)
    assert config["target_modules"] == ["conv", "fc", "layers.0.q_proj"]


def folder(path: Path, pairs: dict[str, Any], **config: Any) -> Path:
    """A folder as PEFT writes it."""
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


# Entries of the configuration ----------------------------------------------------------------------

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
NAN, INF = math.nan, math.inf


def written(folder: Path, entries: Any, tensors: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    rng = np.random.default_rng(0)
    pair = {
        "base_model.model.fc1.lora_A.weight": rng.normal(size=(2, 3)).astype(np.float32),
        "base_model.model.fc1.lora_B.weight": rng.normal(size=(4, 2)).astype(np.float32),
    }
    save_file(pair | (tensors or {}), folder / "adapter_model.safetensors")
    return folder


def trained(folder: Path) -> Any:
    model = models.renamed(models.mlp((3, 4, 1)), {"W1": "fc1.weight"})
    return make(model, adapters=Lora.from_peft(folder), loss="squared_error")


def test_a_good_folder_is_read(tmp_path: Path) -> None:
    found = trained(written(tmp_path / "a", GOOD)).get_state()
    assert any("lora_A" in name for name in found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", v) for v in (0, -1, 1.5, INF, NAN, "8", None, True, [4], 2**40)),
        *(("lora_alpha", v) for v in (0, -3, NAN, INF, -INF, "16", None, True, {}, 1e39, 10**400)),
        *(("lora_dropout", v) for v in (1, 1.0, -0.1, NAN, INF, "0", [0.1], True)),
        *(("use_rslora", v) for v in (1, "yes", [])),
        *(("alpha_pattern", v) for v in ([], "a", {"fc1": 0}, {"fc1": -1}, {"fc1": "x"})),
        *(("alpha_pattern", v) for v in ({"fc1": NAN}, {"(fc": 1}, {"(?=a)": 1}, {"(a)\\1": 2})),
        *(("rank_pattern", v) for v in ([], {"fc1": 0}, {"fc1": 2.5}, {"fc1": None})),
        *((k, 3) for k in ("target_modules", "exclude_modules", "layers_pattern")),
        *(("target_modules", v) for v in ([1], {"a": 1})),
        *(("peft_type", v) for v in ("IA3", 3, None, ["LORA"])),
    ],
)
def test_wrong_entries_are_errors_that_name_file_and_key(
    key: str, value: Any, tmp_path: Path
) -> None:
    folder = written(tmp_path / "a", {**GOOD, key: value})
    with pytest.raises(ConfigError, match=r"adapter_config\.json") as error:
        trained(folder)
    assert key in str(error.value)
    assert type(error.value) is ConfigError, "not an error of a plugin"


@pytest.mark.parametrize("content", ["[]", "3", "{", '"LORA"', "[" * 100_000, "{}", "\xff"])
def test_configurations_that_are_none(content: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a", GOOD)
    (folder / "adapter_config.json").write_text(content, "latin-1")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        trained(folder)


@pytest.mark.parametrize(
    "shape", [(0, 3), (2,), (2, 5), (2, 3, 2), ()], ids=["rank 0", "1d", "other", "3x3", "scalar"]
)
def test_tensors_that_do_not_fit(shape: tuple[int, ...], tmp_path: Path) -> None:
    name = "base_model.model.fc1.lora_A.weight"
    folder = written(tmp_path / "a", GOOD, {name: np.zeros(shape, np.float32)})
    with pytest.raises(ModelError, match="adapter"):
        trained(folder)
    folder = written(tmp_path / "a", GOOD, {name: np.zeros((2, 3), np.int64)})
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        trained(folder)


def test_the_factor_of_a_pattern_is_that_of_the_first_one_that_matches(tmp_path: Path) -> None:
    """By hand: the branch is alpha / rank · A·B, with the alpha of the pattern."""
    state = {}
    for name, patterns in {"plain": {}, "own": {"no": 9.0, "fc[0-9]": 2.0, "fc1": 64.0}}.items():
        folder = written(tmp_path / name, {**GOOD, "alpha_pattern": patterns})
        state[name] = trained(folder).get_state()
    for name, array in state["plain"].items():
        if "lora_B" in name:
            np.testing.assert_allclose(state["own"][name], array * (2.0 / 4.0), rtol=1e-6)

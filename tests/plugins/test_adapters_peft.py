"""Adapters of PEFT: loaded by us, ours loaded by PEFT, and the same training on both sides."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from ortflex_core import ModelError, Trainer  # noqa: E402
from ortflex_plugins.adapters.lora import Lora  # noqa: E402
from tests.training import plugins  # noqa: E402

nn = torch.nn
TARGETS = ["q_proj", "v_proj", "conv", "head.2"]


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        scores = torch.softmax(self.q_proj(x) @ x.transpose(1, 2), -1)
        return x + self.down(torch.tanh(self.up(scores @ self.v_proj(x))))


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Two blocks of attention, a 1×1 convolution and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.conv = nn.Conv1d(width, 8, 1)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2).mean(1))


def network() -> Any:
    torch.manual_seed(0)
    return Net().eval()


def export(net: Any, path: Path, dynamo: bool) -> Path:
    x = torch.randn(4, 5, 16)
    options: dict[str, Any] = {"dynamic_axes": {"X": {0: "N"}}}
    if dynamo:
        pytest.importorskip("onnxscript")
        options = {"dynamic_shapes": ({0: torch.export.Dim("N")},)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": ["X"], "output_names": ["Y"]}
        torch.onnx.export(net, (x,), path, dynamo=dynamo, **names, **options)
    return path


def adapted(net: Any, seed: int = 1, **options: Any) -> Any:
    """The network with adapters of PEFT whose A and B are both random."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options}
    made = peft.get_peft_model(net, peft.LoraConfig(**given))
    for name, weight in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.3)
    return made.eval()


def data(rows: int = 32) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 5, 16)).astype("f"), rng.normal(size=(rows, 3)).astype("f")


def trainer(model: Any, **options: Any) -> Trainer:
    given = {"loss": "squared_error", "progress": False, "plugins": plugins(), **options}
    return Trainer(model, **given)


def logits(net: Any, x: Any) -> Any:
    with torch.no_grad():
        return net(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"head.2": 2, "layers.1.q_proj": 7}, "alpha_pattern": {"conv": 3}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_an_adapter_of_peft_gives_the_same_logits(
    options: Any, dynamo: bool, tmp_path: Path
) -> None:
    x, _ = data()
    path = export(network(), tmp_path / "base.onnx", dynamo)
    net = adapted(network(), **options)
    net.save_pretrained(tmp_path / "peft")
    ours = trainer(path, adapters=Lora.from_peft(tmp_path / "peft"))
    wanted = logits(net, x)
    assert np.abs(wanted - logits(network(), x)).max() > 0.1
    np.testing.assert_allclose(ours.predict(x), wanted, rtol=1e-5, atol=1e-5)
    merged = trainer(ours.export(), adapters=())
    np.testing.assert_allclose(merged.predict(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamo", [False, True])
def test_peft_loads_what_we_trained(dynamo: bool, tmp_path: Path) -> None:
    x, y = data()
    path = export(network(), tmp_path / "base.onnx", dynamo)
    lora = {"name": "lora", "rank": 3, "alpha": 5.0, "rslora": dynamo, "targets": TARGETS}
    ours = trainer(path, adapters=lora, optimizer="adam", learning_rate=0.02, epochs=5)
    ours.fit(x, y)
    ours.export_adapter(tmp_path / "peft")
    net = peft.PeftModel.from_pretrained(network(), tmp_path / "peft").eval()
    np.testing.assert_allclose(logits(net, x), ours.predict(x), rtol=1e-5, atol=1e-5)
    again = trainer(path, adapters=Lora.from_peft(tmp_path / "peft"))
    np.testing.assert_array_equal(again.predict(x), ours.predict(x))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fifty_steps_are_those_of_torch_with_peft(optimizer: str, tmp_path: Path) -> None:
    x, y = data(64)
    path = export(network(), tmp_path / "base.onnx", False)
    net = adapted(network())
    rate = 0.01 if optimizer == "adam" else 0.05
    net.save_pretrained(tmp_path / "start")
    start = Lora.from_peft(tmp_path / "start")
    ours = trainer(path, adapters=start, optimizer=optimizer, learning_rate=rate)
    weights = [w for w in net.parameters() if w.requires_grad]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    steps = kinds[optimizer](weights, lr=rate)
    for k in range(50):
        rows = slice(8 * (k % 8), 8 * (k % 8) + 8)
        cost = ours.step((x[rows], y[rows]))
        steps.zero_grad()
        loss = ((net(torch.from_numpy(x[rows])) - torch.from_numpy(y[rows])) ** 2).mean()
        np.testing.assert_allclose(cost, float(loss.detach()), rtol=1e-4)
        loss.backward()
        steps.step()
    theirs = {n: w.detach().numpy() for n, w in net.named_parameters() if w.requires_grad}
    for name, array in ours.get_state().items():
        module, _, tensor = name.rpartition(".")
        other = theirs[f"base_model.model.{module}.{tensor}.default.weight"]
        wanted = other.reshape(other.shape[:2]).T
        np.testing.assert_allclose(array, wanted, rtol=1e-3, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(ours.predict(x), logits(net, x), rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    path = export(network(), tmp_path / "base.onnx", False)
    torch.manual_seed(0)
    adapted(Net(width=8)).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ModelError, match=r"to a different base model: .* expected \[rank, 16\]"):
        trainer(path, adapters=Lora.from_peft(tmp_path / "narrow"))
    other = nn.ModuleDict({"query": nn.Linear(16, 16)})
    adapted(other, target_modules=["query"]).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="to a different base model: its module 'query' matches"):
        trainer(path, adapters=Lora.from_peft(tmp_path / "other"))


class Logits(nn.Module):  # type: ignore[misc, name-defined]
    """The logits alone, as people export a language model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        # A mask of four axes is taken as it is; the one that transformers makes cannot be traced.
        length = ids.shape[1]
        mask = torch.triu(torch.full((length, length), -1e9), 1)[None, None]
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def language_model(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config).eval()


def export_language_model(model: Any, path: Path) -> Path:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            *(Logits(model), (ids,), path),
            **{"input_names": ["ids"], "output_names": ["logits"], "dynamo": False},
            dynamic_axes={"ids": {0: "N", 1: "T"}},
        )
    return path


TINY = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
CROSS_ENTROPY = {"name": "softmax_cross_entropy", "axis": -1}
EVERY = ["c_attn", "c_proj", "c_fc"]


def test_a_language_model_of_transformers_has_the_same_logits(tmp_path: Path) -> None:
    """GPT-2's weights are [inputs, outputs]; a wrapper adds a prefix to the paths of modules."""
    path = export_language_model(language_model(**TINY), tmp_path / "gpt2.onnx")
    net = adapted(language_model(**TINY), target_modules=EVERY, fan_in_fan_out=True)
    net.save_pretrained(tmp_path / "peft")
    ids = np.random.default_rng(0).integers(0, 50, (5, 6))
    with torch.no_grad():
        wanted = net(input_ids=torch.from_numpy(ids)).logits.numpy()
    adapters = Lora.from_peft(tmp_path / "peft")
    options = {"loss": CROSS_ENTROPY, "optimizer": "adam", "learning_rate": 0.01, "epochs": 2}
    ours = trainer(path, adapters=adapters, **options)
    np.testing.assert_allclose(ours.predict(ids), wanted, rtol=1e-5, atol=1e-5)
    assert len(ours.get_state()) == 2 * 4 * 2
    ours.fit(ids, np.roll(ids, -1, axis=1))
    prefixed = Lora(rank=4, alpha=8.0, targets=tuple(EVERY), prefix="model.")
    other = trainer(path, adapters=prefixed, loss=CROSS_ENTROPY)
    other.set_state(ours.get_state())
    other.export_adapter(tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(language_model(**TINY), tmp_path / "ours").eval()
    with torch.no_grad():
        theirs = again(input_ids=torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(theirs, ours.predict(ids), rtol=1e-5, atol=1e-5)
    merged = trainer(ours.export(), loss=CROSS_ENTROPY)
    np.testing.assert_allclose(merged.predict(ids), ours.predict(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["longer", "shorter"])
def test_an_adapter_of_peft_returns_to_the_model_it_came_from(
    tmp_path: Path, inner: bool, resumed: bool
) -> None:
    """The class of errors: names that were matched when a file was read, and are lost when it is written.

    The paths of the exported file are longer than PEFT's names (a wrapper), or shorter (a part).
    """

    class Wrapper(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.model = net

        def forward(self, x: Any) -> Any:
            return self.model(x)

    x, y = data()
    whole = Wrapper if inner else lambda net: net
    exported = network() if inner else Wrapper(network())
    path = export(exported, tmp_path / "base.onnx", False)
    adapted(whole(network())).save_pretrained(tmp_path / "peft")
    ours = trainer(path, adapters=Lora.from_peft(tmp_path / "peft"), optimizer="adam", epochs=2)
    ours.fit(x, y)
    if resumed:
        ours.save(tmp_path / "checkpoint")
        (tmp_path / "peft").rename(tmp_path / "gone")
        ours = Trainer.resume(tmp_path / "checkpoint", plugins=plugins())
    ours.export_adapter(tmp_path / "ours", format="peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of keys that are missing
        again = peft.PeftModel.from_pretrained(whole(network()), tmp_path / "ours").eval()
    np.testing.assert_allclose(logits(again, x), ours.predict(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_state_is_under_two_percent_of_a_file_of_twelve_layers(tmp_path: Path) -> None:
    path = export_language_model(language_model(), tmp_path / "gpt2.onnx")
    adapters = {"name": "lora", "rank": 8, "targets": ["*/h.*"]}
    ours = trainer(path, adapters=adapters, loss=CROSS_ENTROPY)
    size = sum(array.nbytes for array in ours.get_state().values())
    assert len(ours.get_state()) == 2 * 4 * 12
    assert size < 0.02 * path.stat().st_size
    ours.export_adapter(tmp_path / "peft")
    written = sum(p.stat().st_size for p in (tmp_path / "peft").iterdir())
    assert written < 0.02 * path.stat().st_size

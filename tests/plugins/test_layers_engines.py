"""What runs a layer: our gradient graph or onnxruntime's TrainingAgent, here or on another device."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex_core import (
    ConfigError,
    DataError,
    Entry,
    GraphError,
    ModelError,
    Registry,
    Unsupported,
    require_runtime,
)
from ortflex_plugins.devices import Cpu
from ortflex_plugins.layers import OnnxFunction
from ortflex_plugins.layers.graphs import split
from tests import models
from tests.plugins.test_layers_modes import dropping, layer, normalized, trained

RNG = np.random.default_rng(0)


def agent() -> str:
    """The name of the other engine, where it is installed."""
    if not require_runtime().has_training_agent:
        pytest.skip("no TrainingAgent")
    return "training_agent"


def looked_up() -> onnx.ModelProto:
    """A float, an integer and a boolean out of a table that is looked up by ids."""
    return models.of_text(
        """(int64[N] ids) => (float[N, 3] scores, int64[N] best, bool[N, 3] high) {
        rows = Gather(table, ids) scores = MatMul(rows, W)
        best = ArgMax<axis = 1, keepdims = 0>(scores) high = Greater(scores, limit) }""",
        {"table": RNG.standard_normal((5, 4)), "W": RNG.standard_normal((4, 3)), "limit": 0.0},
    )


MODELS = {
    "mlp": (models.mlp(), None),
    "two inputs and outputs": (models.two_headed(), None),
    "a convolution": (models.conv_net(), None),
    "batch statistics": (normalized(), True),
    "running statistics": (normalized(), False),
    "masks": (dropping(), True),
}


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_agree(name: str) -> None:
    model, training = MODELS[name]
    ours = OnnxFunction(model, training=training)
    theirs = OnnxFunction(model, training=training, engine=agent())
    shapes = {i.name: (i.shape or ())[1:] for i in ours.model.inputs}
    flights = []
    for rows in (3, 5):
        x = {
            n: RNG.standard_normal((rows, *s)).astype(np.float32)  # type: ignore[arg-type]
            for n, s in shapes.items()
        }
        flights.append((ours.forward(x, step=rows), theirs.forward(x, step=rows)))
    for (outputs, saved), (others, kept) in flights[::-1]:
        copies = {n: a.copy() for n, a in others.items()}
        c = {n: RNG.standard_normal(a.shape).astype(np.float32) for n, a in outputs.items()}
        wanted = ours.backward(c, saved)
        # The second time the forward pass is run again.
        for found in (theirs.backward(c, kept), theirs.backward(c, kept)):
            assert sorted(found) == sorted(wanted)
            for key, array in wanted.items():
                np.testing.assert_allclose(found[key], array, rtol=1e-4, atol=1e-5, err_msg=key)
        for key, array in outputs.items():
            np.testing.assert_allclose(others[key], array, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(others[key], copies[key])  # not reused by backward
        for key, array in saved.statistics.items():
            np.testing.assert_allclose(kept.statistics[key], array, rtol=1e-5)


def test_layers_of_both_engines_train_alike() -> None:
    engine = agent()
    pytest.importorskip("torch")
    model = normalized()
    one, two = layer(model, engine=engine), layer(model)
    np.testing.assert_allclose(trained(one, 10), trained(two, 10), rtol=1e-4)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("engine", ["fused", "training_agent"])
def test_integers_and_truth_values_come_out_without_gradients(engine: str, torch: Any) -> None:
    if engine == "training_agent":
        agent()
    net = layer(looked_up(), engine=engine)
    scores, best, high = net(torch.tensor([1, 1, 4]))
    assert (best.dtype, high.dtype) == (torch.int64, torch.bool)
    assert torch.equal(best, scores.argmax(1))
    assert torch.equal(high, scores > 0)
    assert not best.requires_grad
    assert not high.requires_grad
    scores.sum().backward()
    wanted = np.zeros((5, 4))
    wanted[1], wanted[4] = 2 * net.W.detach().numpy().sum(1), net.W.detach().numpy().sum(1)
    np.testing.assert_allclose(net.table.grad, wanted, rtol=1e-5)


def test_what_an_engine_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine='training_session' trains whole models"):
        OnnxFunction(models.mlp(), engine="training_session")
    with pytest.raises(ModelError, match=r"no output 'y' that can be differentiated; .*Known: Y"):
        OnnxFunction(models.mlp(), outputs=["y"])
    if not require_runtime().has_training_agent:
        with pytest.raises(Unsupported, match=r"has no TrainingAgent.*or use engine='fused'"):
            OnnxFunction(models.mlp(), engine="training_agent")
        return
    unknown = models.mlp(activation="Atan")
    with pytest.raises(Unsupported, match=r"(?s)engine='fused' may:\n.*Atan"):
        OnnxFunction(unknown, engine="training_agent")


@attrs.frozen(kw_only=True)
class Elsewhere(Cpu):
    """Stands in for a GPU: main memory, which it says the host cannot reach."""

    name: ClassVar[str] = "cuda"
    index: int = 0
    log: ClassVar[list[str]] = []

    def view(self, value: Any) -> Any:
        return None

    def put(self, array: Any) -> Any:
        self.log.append("put")
        return Cpu().put(np.asarray(array, order="C"))

    def read(self, value: Any) -> Any:
        self.log.append("read")
        return Cpu().read(value)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device ``cuda`` is the stand-in; returns its log."""
    plain = Registry.loaded

    def loaded(self: Registry, entry: Entry) -> Any:
        stands_in = (self.kind, entry.name) == ("devices", "cuda")
        return Elsewhere if stands_in else plain(self, entry)

    monkeypatch.setattr(Registry, "loaded", loaded)
    Elsewhere.log.clear()
    return Elsewhere.log


def test_arrays_go_to_a_device_and_come_back(elsewhere: list[str]) -> None:
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    here, there = (OnnxFunction(models.mlp(), device=d) for d in ("cpu", "cuda:1"))
    results = []
    for f in (here, there):
        outputs, saved = f.forward(x)
        results.append({**outputs, **f.backward(np.ones((4, 1), np.float32), saved)})
    for name, array in results[0].items():
        np.testing.assert_array_equal(results[1][name], array)
    assert elsewhere.count("put") == 1 + 6 + 1  # input, parameters, cotangent
    assert elsewhere.count("read") == 1 + 7  # output, gradients


def test_tensors_on_a_device_are_not_copied(
    elsewhere: list[str], monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    from ortflex_plugins.layers import torch_layer

    net = layer(normalized())
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    twin = layer(normalized())
    twin.load_state_dict(net.state_dict())
    wanted = net(x)
    wanted.sum().backward()
    gradient, x.grad = x.grad, None
    waited = []
    waiting = {"synchronize": lambda self: waited.append("cuda:1")}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: type("S", (), waiting)())
    monkeypatch.setattr(torch_layer, "_devices", lambda tensors: {"cuda:1"})
    found = twin(x)
    found.sum().backward()
    assert elsewhere == []
    assert waited == ["cuda:1", "cuda:1"]
    assert torch.equal(found, wanted)
    assert torch.equal(x.grad, gradient)
    assert torch.equal(twin.kernel.grad, net.kernel.grad)
    assert torch.equal(twin.get_buffer("mean"), net.get_buffer("mean"))


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    from ortflex_plugins.layers import torch_layer

    net = layer(models.mlp())
    with pytest.raises(DataError, match="'X' is on cpu, 'W1' on meta; move layer and inputs"):
        net.to("meta")(torch.ones(2, 6))
    with pytest.raises(Unsupported, match="'X' is on meta; OrtLayer computes on cpu and cuda"):
        net(torch.ones(2, 6, device="meta"))
    if "CUDAExecutionProvider" in require_runtime().providers:
        return
    monkeypatch.setattr(torch_layer, "_devices", lambda tensors: {"cuda:0"})
    with pytest.raises(Unsupported, match=r"device='cuda:0': .* has no CUDAExecutionProvider"):
        layer(models.mlp())(torch.ones(2, 6))


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    whole = OnnxFunction(models.conv_net()).graphs["gradient"]
    every, some, none = (split(whole, w) for w in (None, {"full"}, ()))
    assert [o.name for o in some.backward.graph.output] == ["gradient/full"]
    assert len(some.backward.graph.node) < len(every.backward.graph.node)
    operators = {n.op_type for n in some.backward.graph.node}
    assert not {"Conv", "ConvTranspose", "MaxUnpool"} & operators
    assert set(some.saved) < set(every.saved)
    assert (len(none.backward.graph.node), none.saved) == (0, ())
    assert [o.name for o in none.forward.graph.output] == ["scores"]


@pytest.mark.parametrize("frozen", [["full", "shift"], ["kernel", "bias"], []])
def test_frozen_parameters_are_what_they_are_now(frozen: list[str], torch: Any) -> None:
    net, twin = layer(models.conv_net()), layer(models.conv_net())
    x = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            a.mul_(2)
            b.mul_(2)
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    y, z = net(x), twin(x.clone().requires_grad_())
    torch.testing.assert_close(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    for name, parameter in net.named_parameters():
        if name in frozen:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)
    with torch.no_grad():
        torch.testing.assert_close(net(x), y.detach())


def test_a_tensor_without_a_type_cannot_be_saved() -> None:
    """An operator that nobody knows, between the input and a product."""
    graph = helper.make_graph(
        [
            helper.make_node("Unheard", ["x"], ["hidden"], domain="test"),
            helper.make_node("Mul", ["hidden", "cotangent/y"], ["gradient/x"]),
        ],
        "gradient",
        [models.floats("x", "N"), models.floats("cotangent/y", "N")],
        [models.floats("gradient/x", "N")],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("test", 1)]
    with pytest.raises(GraphError, match="'hidden'"):
        split(helper.make_model(graph, opset_imports=domains))

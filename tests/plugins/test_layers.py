"""ONNX graphs as functions on arrays and as layers of torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from ortflex_core import ConfigError, DataError, MissingKernel, ModelError, Unsupported
from ortflex_plugins.layers import OnnxFunction
from tests import models
from tests.plugins.test_layers_modes import layer


def mlp(x: Any, w: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The output of models.mlp() and its hidden layers."""
    h1 = np.tanh(x @ w["W1"] + w["b1"])
    h2 = np.tanh(h1 @ w["W2"] + w["b2"])
    return h2 @ w["W3"] + w["b3"], [h1, h2]


def test_forward_and_backward_are_what_numpy_says() -> None:
    model = models.in_float64(models.mlp())
    w = models.weights_of(model)
    f = OnnxFunction(model)
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal((7, 6)), rng.standard_normal((7, 1))
    outputs, saved = f.forward(x)
    y, (h1, h2) = mlp(x, w)
    np.testing.assert_allclose(outputs["Y"], y, rtol=1e-12)
    made = f.backward(c, saved)
    d2 = (c @ w["W3"].T) * (1 - h2**2)
    d1 = (d2 @ w["W2"].T) * (1 - h1**2)
    wanted = {"W3": h2.T @ c, "W2": h1.T @ d2, "W1": x.T @ d1, "X": d1 @ w["W1"].T}
    wanted |= {"b3": c.sum(0), "b2": d2.sum(0), "b1": d1.sum(0)}
    assert sorted(made) == sorted(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(made[name], array, rtol=1e-10, err_msg=name)


def test_the_backward_graph_computes_nothing_twice() -> None:
    f = OnnxFunction(models.mlp())
    operators = [n.op_type for n in f.graphs["backward"].graph.node]
    assert "Tanh" not in operators
    both = len(f.graphs["forward"].graph.node) + len(operators)
    assert both == len(f.graphs["gradient"].graph.node)


def test_several_forwards_are_in_flight_and_memory_stays_theirs() -> None:
    f = OnnxFunction(models.in_float64(models.mlp()))
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((rows, 6)) for rows in (3, 5, 1, 4)]
    flights = [f.forward(x) for x in xs]
    pairs = list(zip(xs, flights, strict=True))
    backward = [f.backward(np.ones((len(x), 1)), s)["X"] for x, (_, s) in pairs]
    for x, (outputs, _), gradient in zip(xs, flights, backward, strict=True):
        alone, saved = f.forward(x)
        np.testing.assert_array_equal(outputs["Y"], alone["Y"])
        np.testing.assert_array_equal(gradient, f.backward(np.ones((len(x), 1)), saved)["X"])


def test_arrays_may_be_written_into_while_a_forward_is_in_flight() -> None:
    f = OnnxFunction(models.in_float64(models.mlp()))
    rng = np.random.default_rng(2)
    x, w, c = rng.standard_normal((4, 6)), f.state, np.ones((4, 1))
    alone = f.backward(c, f.forward(x, w)[1])
    mine = {n: a.copy() for n, a in w.items()}
    outputs, saved = f.forward(x, mine)
    for array in (x, *mine.values(), *outputs.values()):
        array[:] = 7.0
    for name, gradient in f.backward(c, saved).items():
        np.testing.assert_array_equal(gradient, alone[name], err_msg=name)


def test_other_weights_several_outputs_and_absent_cotangents() -> None:
    f = OnnxFunction(models.two_headed())
    x = {i.name: np.ones((2, i.shape[1]), np.float32) for i in f.model.inputs}  # type: ignore[index]
    outputs, saved = f.forward(x)
    first, second = f.outputs
    whole = f.backward({n: np.ones_like(outputs[n]) for n in f.outputs}, saved)
    one = f.backward({first: np.ones_like(outputs[first])}, saved)
    two = f.backward({second: np.ones_like(outputs[second])}, saved)
    for name in whole:
        np.testing.assert_allclose(whole[name], one[name] + two[name], rtol=1e-5, atol=1e-6)
    doubled = {n: 2 * a for n, a in f.state.items()}
    assert not np.allclose(f.forward(x, doubled)[0][first], outputs[first])


def test_mistakes_are_named() -> None:
    f = OnnxFunction(models.mlp())
    good = np.ones((2, 6), np.float32)
    with pytest.raises(DataError, match=r"'X' expects X: float32\[N, 6\], got float64\[2, 6\]"):
        f.forward(np.ones((2, 6)))
    with pytest.raises(DataError, match=r"inputs has 'x'; .*Known: X"):
        f.forward({"x": good})
    with pytest.raises(DataError, match="unknown parameter 'W4'"):
        f.forward(good, {"W4": good})
    _, saved = f.forward(good)
    with pytest.raises(
        DataError, match=r"cotangent of 'Y' has shape \[3, 1\], the output has \[2, 1"
    ):
        f.backward(np.ones((3, 1), np.float32), saved)
    with pytest.raises(DataError, match=r"'X' expects X: float32\[N, 6\], got the shape \[2, 5\]"):
        f.forward(good[:, :5])
    with pytest.raises(DataError, match=r"'W1' expects W1: float32\[6, 8\], got the shape \[6, 4"):
        f.forward(good, {"W1": f.state["W1"][:, :4]})
    with pytest.raises(DataError, match="saved comes from the forward pass of another"):
        OnnxFunction(models.mlp()).backward(np.ones((2, 1), np.float32), saved)
    with pytest.raises(DataError, match="saved: expected the second result of forward"):
        f.backward(np.ones((2, 1), np.float32), good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads: expected an integer >= 1, got 'many'"):
        OnnxFunction(models.mlp(), threads="many")  # type: ignore[arg-type]
    text = [helper.make_tensor_value_info(n, TensorProto.STRING, ["N"]) for n in ("a", "b")]
    words = models.model([helper.make_node("Identity", ["a"], ["b"])], text[:1], text[1:], {})
    convolution = OnnxFunction(models.in_float64(models.conv_net()))
    with pytest.raises(MissingKernel, match=r"has no kernel .* convert the model to float32"):
        convolution.forward(np.ones((1, 1, 6, 6)))
    with pytest.raises(ModelError, match="cannot be differentiated: no input or parameter"):
        OnnxFunction(words)


def test_gradcheck(torch: Any) -> None:
    net = layer(models.in_float64(models.mlp()))
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    assert torch.autograd.gradcheck(net, (x,))
    parameters = tuple(net.parameters())

    def of_parameters(*values: Any) -> Any:
        named = dict(zip(net.names, values, strict=True))
        return torch.func.functional_call(net, named, (x.detach(),))

    assert torch.autograd.gradcheck(of_parameters, parameters)


def test_a_network_of_both_trains_as_one_of_torch_alone(torch: Any) -> None:
    # In float64: 100 steps of Adam can turn a rounding error of float32 into a visible difference.
    model = models.in_float64(models.mlp((5, 7, 4), "Tanh"))
    torch.manual_seed(0)
    first, last = (torch.nn.Linear(i, o, dtype=torch.float64) for i, o in ((6, 5), (4, 1)))
    mine = torch.nn.Sequential(first, layer(model), last)
    w = {n: torch.tensor(a) for n, a in models.weights_of(model).items()}

    class Same(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            parameters = {n: torch.nn.Parameter(a.clone()) for n, a in w.items()}
            self.w = torch.nn.ParameterDict(parameters)

        def forward(self, x: Any) -> Any:
            h = torch.tanh(x @ self.w["W1"] + self.w["b1"])
            return h @ self.w["W2"] + self.w["b2"]

    theirs = torch.nn.Sequential(copy.deepcopy(mine[0]), Same(), copy.deepcopy(mine[2]))
    x, y = (torch.randn(64, columns, dtype=torch.float64) for columns in (6, 1))
    losses: list[list[float]] = []
    for net in (mine, theirs):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        losses.append([])
        for _ in range(100):
            optimizer.zero_grad()
            loss = ((net(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)
    assert losses[0][-1] < losses[0][0]


def test_memory_is_shared_and_not_copied(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    net, x = layer(models.mlp()), torch.ones(3, 6, requires_grad=True)
    at: dict[str, int] = {}
    forward, backward = net.function.run_forward, net.function.run_backward

    def run_forward(feeds: Any, *rest: Any) -> Any:
        made = forward(feeds, *rest)
        at.update({n: b.pointer for n, b in (*feeds.items(), *made[0].items())})
        return made

    def run_backward(*given: Any) -> Any:
        made = backward(*given)
        at.update({f"gradient/{n}": b.pointer for n, b in made.items()})
        return made

    monkeypatch.setattr(net.function, "run_forward", run_forward)
    monkeypatch.setattr(net.function, "run_backward", run_backward)
    y = net(x)
    y.sum().backward()
    tensors = {"X": x, "Y": y, **dict(net.named_parameters())}
    tensors |= {f"gradient/{n}": t.grad for n, t in net.named_parameters()} | {"gradient/X": x.grad}
    assert at == {n: t.data_ptr() for n, t in tensors.items()}


def test_parameters_are_torchs(tmp_path: Path, torch: Any) -> None:
    model = models.renamed(models.mlp(), {"W1": "block.0/weight", "b1": "block_0_weight"})
    net = layer(model)
    assert net.names["block_0_weight"] != net.names["block_0_weight_"]
    torch.save(net.state_dict(), tmp_path / "s.pt")
    other = layer(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.ones(2, 6)
    assert not torch.equal(net(x), other(x))
    other.load_state_dict(torch.load(tmp_path / "s.pt"))
    assert torch.equal(net(x), other(x))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(net(x), twin(x))
    exported = net.to_onnx(tmp_path / "m.onnx")
    np.testing.assert_allclose(
        models.predict(exported, {"X": x.numpy()})["Y"], net(x).detach().numpy(), rtol=1e-6
    )


def test_no_grad_eval_frozen_parameters_and_the_second_derivative(torch: Any) -> None:
    net = layer(models.mlp())
    x = torch.ones(2, 6, requires_grad=True)
    with torch.no_grad():
        assert not net(x).requires_grad
    assert torch.equal(net.eval()(x), net.train()(x))
    net.W1.requires_grad_(False)
    net(x).sum().backward()
    assert net.W1.grad is None
    assert net.W2.grad is not None
    assert x.grad is not None
    y = net(x).sum()
    with pytest.raises(Unsupported, match="OrtLayer has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(DataError, match=r"'X' is torch\.float64, but the model expects float32"):
        net(x.double())
    with pytest.raises(DataError, match="expected the inputs X, got 2 by position"):
        net(x, x)
    with pytest.raises(DataError, match="got 1 by position and X by name"):
        net(x, X=x)
    with pytest.raises(DataError, match=r"'X' expects X: float32\[N, 6\], got the shape \[2, 7\]"):
        net(torch.ones(2, 7))
    with pytest.raises(DataError, match="'X' is a ndarray; a layer takes tensors of torch"):
        net(np.ones((2, 6), np.float32))
    with pytest.raises(DataError, match=r"'X' is sparse .*to_dense"):
        net(torch.ones(2, 6).to_sparse())
    y = net(x).sum()
    with torch.no_grad():
        net.W2.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
def test_compiled_networks_break_at_the_layer(torch: Any) -> None:

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.before, self.onnx = torch.nn.Linear(6, 6), layer(models.mlp())
            self.after = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.after(torch.tanh(self.onnx(torch.relu(self.before(x)))))

    graphs: list[list[str]] = []

    def compiler(module: Any, _: Any) -> Any:
        calls = [n for n in module.graph.nodes if n.op.startswith("call")]
        graphs.append([getattr(n.target, "__name__", str(n.target)) for n in calls])
        return module.forward

    x = torch.ones(2, 6)
    for net in (Net(), torch.nn.Sequential(torch.nn.Linear(6, 6), layer(models.mlp()))):
        torch._dynamo.reset()
        y = torch.compile(net, backend=compiler)(x)
        torch.testing.assert_close(y, net(x))
        y.sum().backward()
        compiled = {n: p.grad.clone() for n, p in net.named_parameters()}
        net.zero_grad()
        net(x).sum().backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(compiled[name], parameter.grad)
    # What is before the layer and what is after it; a Sequential is a loop, which torch gives up.
    assert graphs == [["linear", "relu"], ["tanh", "linear"]]

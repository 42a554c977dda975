"""Sparsity: which weights become zero, when, and what is refused.

The class of mistakes: masks other than those of the definition, a share at the wrong step, and weights
that can never train because they are zero.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, OrtflexError, hook, internals_of, shrink
from ortflex_plugins.constraints import Sparsity
from tests import models
from tests.plugins.sparse import CONV, DRAW, X, Y, trainer, zeros
from tests.training import plugins, same


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("shape", [(7,), (6, 8), CONV])
def test_magnitude_is_that_of_torch(share: float, shape: tuple[int, ...], torch: Any) -> None:
    from torch.nn.utils import prune

    weight = DRAW.standard_normal(shape)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.tensor(weight))
    prune.l1_unstructured(layer, "weight", amount=min(round(share * weight.size), weight.size - 1))
    got = Sparsity(share=share).project({"w": weight}, {}, share)["w"]
    np.testing.assert_array_equal(got, layer.weight.detach().numpy())


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 8), 0), ((6, 8), 1), (CONV, 0), ((3, 4, 2, 2), 1)]
)
def test_channels_are_those_of_torch(shape: tuple[int, ...], axis: int, torch: Any) -> None:
    from torch.nn.utils import prune

    weight = DRAW.standard_normal(shape)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.tensor(weight))
    prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=axis)
    got = Sparsity(method="channels").project({"w": weight}, {"w": (axis,)}, 0.5)["w"]
    np.testing.assert_array_equal(got, layer.weight.detach().numpy())


def test_global_magnitude_is_that_of_torch(torch: Any) -> None:
    from torch.nn.utils import prune

    weights = {"a": DRAW.standard_normal((6, 8)), "b": 2 * DRAW.standard_normal((8, 3))}
    layers = {n: torch.nn.Module() for n in weights}
    for name, layer in layers.items():
        layer.weight = torch.nn.Parameter(torch.tensor(weights[name]))
    pairs = [(layer, "weight") for layer in layers.values()]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6)
    got = Sparsity(scope="global", share=0.6).project(weights, {}, 0.6)
    for name, layer in layers.items():
        np.testing.assert_array_equal(got[name], layer.weight.detach().numpy())


@pytest.mark.parametrize(("method", "kept", "of"), [("2:4", 2, 4), ("1:4", 1, 4), ("4:8", 4, 8)])
@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_the_largest_of_neighbors_stay(method: str, kept: int, of: int, axes: Any) -> None:
    weight = DRAW.standard_normal((16, 24))
    constraint = Sparsity(method=method)
    assert constraint.final == 1 - kept / of
    got = constraint.project({"w": weight}, {"w": axes}, constraint.final)["w"]
    turned = weight if axes == (0,) else weight.T  # rows of neighbors
    expected = np.zeros_like(turned)
    for row in range(turned.shape[0]):
        for start in range(0, turned.shape[1], of):
            group = list(range(start, start + of))
            for place in sorted(group, key=lambda k: -abs(turned[row, k]))[:kept]:
                expected[row, place] = turned[row, place]
    np.testing.assert_array_equal(got, expected if axes == (0,) else expected.T)


def test_input_channels_of_a_convolution_are_the_neighbors() -> None:
    weight = DRAW.standard_normal((2, 8, 3, 3))
    got = Sparsity(method="2:4").project({"w": weight}, {"w": (0,)}, 0.5)["w"]
    assert (np.count_nonzero(got.reshape(2, 2, 4, 3, 3), axis=2) == 2).all()


def test_equal_sizes_are_ordered_by_position_and_something_stays() -> None:
    weight = np.ones((2, 4))
    for method in ("magnitude", "channels", "2:4"):
        constraint = Sparsity(method=method)
        got = constraint.project({"w": weight}, {"w": (0,)}, 0.5)["w"]
        assert np.count_nonzero(got) == 4
        assert got[-1, -1] == 1
    assert np.count_nonzero(Sparsity(share=0.999).project({"w": weight}, {}, 0.999)["w"]) == 1
    far = {"a": np.full(10, 1e-3), "b": np.ones(10)}
    both = Sparsity(scope="global", share=0.9).project(far, {}, 0.9)
    assert [np.count_nonzero(a) for a in both.values()] == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"share": s} for s in (1, -0.1, float("nan"), "0.5", True)),
        *({"method": m} for m in ("4:2", "2:2", "0:4", "l1", "2:4:8", None)),
        *({"begin": b} for b in (-1, 1.5, float("nan"), True, "0")),
        *({"every": e} for e in (-1, 2.5)),
        *({"initial": i} for i in (0.6, 1.0, -0.1)),
        {"begin": 5, "end": 3},
        {"begin": 0.9, "end": 0.1},
        {"method": "2:4", "share": 0.75},
        {"method": "channels", "scope": "global"},
        {"scope": "layer"},
        {"params": [3]},
    ],
    ids=str,
)
def test_wrong_parameters_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError, TypeError)):
        plugins().component("constraints", {"name": "sparsity", **wrong}, "constraint")


@pytest.mark.parametrize(
    ("fields", "steps", "moments"),
    [
        ({"begin": 10, "end": 50, "every": 10}, None, [10, 20, 30, 40, 50]),
        ({"begin": 10, "end": 50, "every": 15}, None, [10, 25, 40, 50]),
        ({"begin": 0.25, "end": 0.75, "every": 25}, 100, [25, 50, 75]),
        ({"begin": 7, "end": 7}, None, [7]),
        ({"begin": 0.5, "end": 3}, 20, [10]),
    ],
)
def test_shares_are_those_of_zhu_and_gupta(fields: Any, steps: int | None, moments: Any) -> None:
    constraint = Sparsity(share=0.8, initial=0.1, **fields)
    changes = constraint.changes(steps)
    assert [t for t, _ in changes] == moments
    first, last = moments[0], moments[-1]
    for t, share in changes:
        n = (t - first) / (last - first) if last > first else 1
        assert share == pytest.approx(0.8 + (0.1 - 0.8) * (1 - n) ** 3)
    assert changes[-1][1] == pytest.approx(0.8)


def test_the_default_has_twenty_changes_in_the_first_half() -> None:
    changes = Sparsity().changes(1000)
    assert [t for t, _ in changes] == list(range(0, 501, 25))


@pytest.mark.parametrize("backend", ["example_numpy", "fused"])
def test_shares_change_at_their_steps(backend: str) -> None:
    """Steps of a run of the backend are split: the zeros of each step are those of the schedule."""
    constraint = Sparsity(share=0.75, begin=3, end=15, every=4)
    seen: dict[int, float] = {}

    class Watches:
        @hook
        def step_end(self, trainer: Any, progress: Any) -> None:
            seen[progress.step] = float(np.mean(trainer.get_state()["W1"] == 0))

    made = trainer(constraint=constraint, backend=backend, epochs=3, callbacks=[Watches()])
    history = made.fit(X, Y)
    changes = dict(constraint.changes(None))
    share = 0.0
    for step in range(1, 19):
        share = changes.get(step, share)
        assert seen[step] == round(share * 48) / 48, step
    state = made.get_state()
    together = np.concatenate([state[n].ravel() for n in ("W1", "W2", "W3")])
    assert history["sparsity"][-1] == pytest.approx(np.mean(together == 0))
    plain = trainer(constraint=constraint, backend=backend, epochs=3)
    plain.fit(X, Y)
    same(plain.get_state(), state, 1e-6)
    same(zeros(plain.get_state()), zeros(state), 0)


def test_matrices_of_adapters_are_refused() -> None:
    for constraint in ("sparsity", {"name": "sparsity", "params": "*"}):
        with pytest.raises(ConfigError, match="adapters"):
            trainer(adapters={"name": "lora", "rank": 2}, constraint=constraint)


def test_a_weight_that_is_zero_everywhere_is_refused() -> None:
    made = trainer()
    made.set_state({"W2": np.zeros((8, 4), np.float32)})
    with pytest.raises(ConfigError, match="'W2' is zero everywhere"):
        made.fit(X, Y)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"name": "sparsity", "params": "V*"}, "no trained parameter matches 'V*'"),
        ({"name": "sparsity", "method": "2:4", "params": "W1"}, "'W1' cannot have such zeros: its"),
        ({"name": "sparsity", "method": "channels", "params": "b1"}, "'b1' cannot have such zeros"),
        ({"b*": "sparsity"}, "there is no weight to make sparse"),
    ],
)
def test_weights_that_cannot_are_errors(constraint: Any, words: str) -> None:
    with pytest.raises(OrtflexError, match=re.escape(words)):
        trainer(constraint=constraint)


def test_an_unknown_length_is_an_error() -> None:
    def endless() -> Any:
        while True:
            yield X[:8], Y[:8]

    with pytest.raises(ConfigError, match="length is not known"):
        trainer().step((X, Y))
    made = trainer(constraint=Sparsity(share=0.75, begin=1, end=2))
    for _ in range(3):
        made.step((X, Y))
    assert np.mean(made.get_state()["W1"] == 0) == 0.75
    made = trainer(epochs=2)
    made.fit(endless, steps_per_epoch=5)
    assert np.mean(made.get_state()["W1"] == 0) == 0.75


def test_single_steps_give_zeros_again_after_weights_are_replaced() -> None:
    """Class: a call between two steps moves weights, and the next one trains elements that should be 0."""
    changing = {"name": "sparsity", "share": 0.5, "begin": 1, "end": 4, "every": 1}
    made, twin = trainer(constraint=changing), trainer(constraint=changing)
    dense = {n: np.ones_like(a) for n, a in made.get_state().items()}

    def both(call: Any) -> None:
        for one in (made, twin):
            call(one)
        internals_of(twin).live.pruning = None  # its next step gives all zeros again

    def step() -> None:
        both(lambda one: one.step((X, Y)))
        same(made.get_state(), twin.get_state(), 0)

    for _ in range(6):
        step()
    assert all(0.4 < mask.mean() < 0.6 for mask in zeros(made.get_state()).values())
    for call in (
        lambda one: one.set_state(dense),
        lambda one: one.fit(X, Y),
        lambda one: one.step((X[:7], Y[:7])),
        lambda one: one.find_rate(X, Y),
    ):
        both(call)
        step()
        assert all(mask.mean() > 0.4 for mask in zeros(made.get_state()).values())


def test_a_training_that_ends_too_early_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer(constraint=Sparsity(share=0.75, begin=0, end=1000, every=10)).fit(X, Y)
    assert "should be zero at the end" in caplog.text
    caplog.clear()
    trainer().fit(X, Y)
    assert "should be zero" not in caplog.text


def test_weights_that_stay_dense_are_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer(constraint={"name": "sparsity", "method": "channels"})
    assert "'W3' stays dense: its channels are outputs" in caplog.text
    caplog.clear()
    trainer(constraint={"name": "sparsity", "method": "2:4"})
    assert "'W1' stays dense: its 6 inputs" in caplog.text


def test_channels_that_an_addition_joins_become_zero_together() -> None:
    """A residual sum has a zero channel only if all of its terms have one: their norms count together."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((6, 8)).astype(np.float32) for _ in range(2))
    model = models.of_text(
        "(float[N, 6] x) => (float[N, 2] y) { p = MatMul(x, a) q = MatMul(x, b) s = Add(p, q) "
        "r = Relu(s) y = MatMul(r, c) }",
        {"a": a, "b": b, "c": (8, 2)},
    )
    channels = {"name": "sparsity", "method": "channels", "begin": 0, "end": 0}
    made = trainer(model, channels, optimizer="sgd", learning_rate=1e-9, epochs=1)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    made.fit(x, np.zeros((4, 2), np.float32))
    norms = (np.concatenate([a, b]).astype(np.float64) ** 2).sum(axis=0)
    zero = np.argsort(norms)[:4]
    state = made.get_state()
    for name in "ab":
        assert sorted(np.flatnonzero(~state[name].any(axis=0))) == sorted(zero)
    small = shrink(made.export())
    assert [layer.after for layer in small.layers] == [4, 4, 2]

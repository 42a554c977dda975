"""Running statistics of BatchNormalization: whose they are, how training updates them, what is exported."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import Array, Columns, DataError, ModelError, OrtflexError, hook, run_ranks
from ortflex_core.training.data.columns import split
from tests import models
from tests.core.test_batches import Rows
from tests.core.test_derived_columns import categories, texts
from tests.training import every_backend, in_bytes, make, regression, same

EPSILON, MOMENTUM = 1e-5, 0.9
RNG = np.random.default_rng(8)
WEIGHTS = {
    "w": RNG.standard_normal((3, 4)).astype(np.float32),
    "gain": np.array([0.5, 1.5, 1.0, -1.0], np.float32),
    "bias": np.array([0.1, 0.2, -0.3, 0], np.float32),
    "ones": np.ones(4, np.float32),
    "zeros": np.zeros(4, np.float32),
    "v": RNG.standard_normal((4, 1)).astype(np.float32),
}
# As torch's old exporter writes a fresh network: equal tensors once, the others as copies of them.
COPIES = """
    mean1 = Identity (zeros)
    var1 = Identity (ones)
    mean2 = Identity (mean1)
    var2 = Identity (ones)
"""
LAYERS = """
    h = MatMul (x, w)
    n1 = BatchNormalization (h, gain, bias, mean1, var1)
    t = Tanh (n1)
    n2 = BatchNormalization (t, gain, bias, mean2, var2)
    y = MatMul (n2, v)
"""
TWICE = LAYERS.replace("mean1, var1", "zeros, ones").replace("mean2, var2", "zeros, ones")


def network(nodes: str = COPIES + LAYERS) -> onnx.ModelProto:
    weights = {name: array for name, array in WEIGHTS.items() if name in nodes}
    return models.parsed(nodes, weights, "float[N, 3] x", "float[N, 1] y")


def batches(count: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(4)
    return [
        (rng.standard_normal((6, 3)).astype(np.float32), np.ones((6, 1), np.float32))
        for _ in range(count)
    ]


def normalized(x: Array) -> tuple[Array, Array, Array]:
    mean, variance = x.mean(0), x.var(0)
    y = (x - mean) / np.sqrt(variance + EPSILON) * WEIGHTS["gain"] + WEIGHTS["bias"]
    return y, mean, x.var(0, ddof=1)


def test_copies_by_identity_are_statistics_of_their_own() -> None:
    options = {"params": ["v"], "optimizer": "sgd", "learning_rate": 1e-3, "backend": "fused"}
    trainer = make(network(), batch_norm="train", **options)
    x, y = batches(1)[0]
    before = trainer.predict(x)  # nothing is compiled for training yet
    same(models.predict(network(), {"x": x}), {"y": before})
    assert trainer.per_sample_losses(x, y).shape == (6, 1)
    statistics = {n: WEIGHTS["zeros" if "mean" in n else "ones"] for n in ("mean1", "var1")}
    statistics |= {"mean2": WEIGHTS["zeros"], "var2": WEIGHTS["ones"]}
    exact = {n: a.astype(np.float64) for n, a in statistics.items()}
    for x, y in batches(3):
        trainer.step((x, y))
        value = x.astype(np.float64) @ WEIGHTS["w"]
        for layer in "12":
            value, mean, variance = normalized(value)
            for name, new in ((f"mean{layer}", mean), (f"var{layer}", variance)):
                exact[name] = MOMENTUM * exact[name] + (1 - MOMENTUM) * new
            value = np.tanh(value)
    state = trainer.get_state(buffers=True)
    assert set(state) == {"v", *exact}
    same({name: state[name] for name in exact}, exact)

    out = trainer.export()
    onnx.checker.check_model(out, full_check=True)
    same(models.weights_of(out), {**WEIGHTS, **state}, 0)
    assert [n.op_type for n in out.graph.node if n.op_type == "Identity"] == []
    same(models.predict(out, {"x": x}), {"y": trainer.predict(x)})


def test_frozen_statistics_leave_the_copies_alone() -> None:
    trainer = make(network(), params=["v"], batch_norm="freeze", backend="fused")
    trainer.step(batches(1)[0])
    assert set(trainer.get_state(buffers=True)) == {"v"}
    out, model = trainer.export(), network()
    assert list(out.graph.node) == list(model.graph.node)


def test_a_layer_used_twice_updates_twice() -> None:
    """As torch does: the second use continues from the statistics of the first."""
    trainer = make(network(TWICE), params=["v"], batch_norm="train", backend="fused")
    x, y = batches(1)[0]
    trainer.step((x, y))
    first, mean1, variance1 = normalized(x.astype(np.float64) @ WEIGHTS["w"])
    _, mean2, variance2 = normalized(np.tanh(first))
    keep, new = MOMENTUM, 1 - MOMENTUM
    state = trainer.get_state(buffers=True)
    np.testing.assert_allclose(state["zeros"], keep * new * mean1 + new * mean2, rtol=1e-5)
    expected = keep * (keep + new * variance1) + new * variance2
    np.testing.assert_allclose(state["ones"], expected, rtol=1e-5)


@pytest.mark.parametrize("mode", ["train", "freeze"])
def test_a_file_in_training_mode_is_trained_like_any_other(mode: str) -> None:
    """Its nodes have three outputs, of which no one reads the last two."""
    training = TWICE.replace("BatchNormalization", "BatchNormalization<training_mode = 1>")
    training = training.replace("n1 =", "n1, m1, s1 =").replace("n2 =", "n2, m2, s2 =")
    states = []
    for nodes in (TWICE, training):
        trainer = make(network(nodes), batch_norm=mode, backend="fused")
        for pair in batches(2):
            trainer.step(pair)
        states.append(trainer.get_state(buffers=True))
    assert ("ones" in states[0]) == (mode == "train")
    same(states[1], states[0], 1e-6)


def test_a_statistic_that_is_also_a_weight_is_refused_with_a_way_out() -> None:
    """torch's exporter merges equal tensors: the ones and zeros of a new BatchNormalization."""
    proto = network("h = MatMul(x, w)  y = BatchNormalization(h, ones, zeros, zeros, ones)")
    proto.graph.output[0].CopyFrom(models.floats("y", "N", 4))
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    y = np.zeros((6, 4), np.float32)
    with pytest.raises(ModelError, match=r"'ones', 'zeros' are running statistics.*optimize=False"):
        make(proto, backend="fused").fit(x, y)
    with pytest.raises(ModelError, match="merged equal tensors"):  # the scale would move with them
        make(proto, backend="fused", batch_norm="train", params=["!ones", "!zeros"]).fit(x, y)
    options = {"params": ["!ones", "!zeros"], "batch_norm": "freeze", "epochs": 1}
    make(proto, backend="fused", **options).fit(x, y)


# Trainer.update_bn --------------------------------------------------------------------------------


# The class of errors: predictions that combine weights and statistics of different networks. The oracle is
# torch.optim.swa_utils.update_bn.
rng = np.random.default_rng(3)
X = rng.standard_normal((26, 3)).astype(np.float32)
Y = rng.standard_normal((26, 1)).astype(np.float32)
BATCH = 8  # the last batch has two rows
OWN = LAYERS.replace("mean1, var1", "ma, va").replace("mean2, var2", "mb, vb")
SHARED = LAYERS.replace("mean1, var1", "ma, va").replace("mean2, var2", "ma, va")


def added(model: Any, weights: dict[str, Any]) -> Any:
    tensors = [numpy_helper.from_array(np.asarray(array), n) for n, array in weights.items()]
    model.graph.initializer.extend(tensors)
    return model


def averaging(nodes: str, **options: Any) -> Any:
    names = [name for name in ("ma", "va", "mb", "vb") if name in nodes]
    starts = {name: np.full(4, name[0] == "v", np.float32) for name in names}
    model = added(network(nodes), starts)
    options = {"averaging": {"name": "ema", "decay": 0.8}, "backend": "fused"} | options
    return make(model, optimizer="sgd", learning_rate=0.1, epochs=3, batch_size=BATCH, **options)


def exact(state: dict[str, Any], *, shared: bool) -> tuple[dict[str, Any], Any]:
    """Statistics and predictions in float64: means over the batches, of the averages of the weights."""
    wide = {n: a.astype(np.float64) for n, a in state.items()}
    found: dict[str, list[Any]] = {}
    for start in range(0, len(X), BATCH):
        value = X[start : start + BATCH].astype(np.float64) @ wide["w"]
        for layer in "aa" if shared else "ab":
            mean, variance = value.mean(0), value.var(0)
            found.setdefault(f"m{layer}", []).append(mean)
            found.setdefault(f"v{layer}", []).append(value.var(0, ddof=1))
            value = np.tanh((value - mean) / np.sqrt(variance + 1e-5) * wide["gain"] + wide["bias"])
    means = {n: np.mean(arrays, axis=0) for n, arrays in found.items()}
    value = X.astype(np.float64) @ wide["w"]
    for k, layer in enumerate("aa" if shared else "ab"):
        value = (value - means[f"m{layer}"]) / np.sqrt(means[f"v{layer}"] + 1e-5)
        value = value * wide["gain"] + wide["bias"]
        value = value if k else np.tanh(value)
    return means, value @ wide["v"]


def test_the_reference_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    state = {n: WEIGHTS[n] for n in ("w", "v", "gain", "bias")}

    class Twin(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, *, shared: bool) -> None:
            super().__init__()
            self.one = torch.nn.BatchNorm1d(4).double()
            self.two = self.one if shared else torch.nn.BatchNorm1d(4).double()
            for norm in (self.one, self.two):
                norm.weight.data = torch.tensor(state["gain"], dtype=torch.float64)
                norm.bias.data = torch.tensor(state["bias"], dtype=torch.float64)

        def forward(self, x: Any) -> Any:
            w, v = (torch.tensor(state[n], dtype=torch.float64) for n in "wv")
            return self.two(torch.tanh(self.one(x @ w))) @ v

    rows = torch.tensor(X, dtype=torch.float64)
    for shared in (False, True):
        twin = Twin(shared=shared)
        torch.optim.swa_utils.update_bn(torch.utils.data.DataLoader(rows, batch_size=BATCH), twin)
        means, predicted = exact(state, shared=shared)
        for norm, layer in ((twin.one, "a"), (twin.two, "a" if shared else "b")):
            np.testing.assert_allclose(means[f"m{layer}"], norm.running_mean, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(means[f"v{layer}"], norm.running_var, rtol=1e-9)
        with torch.no_grad():
            np.testing.assert_allclose(predicted, twin.eval()(rows), rtol=1e-9, atol=1e-12)


@every_backend
@pytest.mark.parametrize("nodes", [OWN, SHARED], ids=["own", "shared"])
def test_the_statistics_are_those_of_the_averages(nodes: str, backend: str) -> None:
    if backend.startswith("training_"):
        pytest.skip("it does not train the statistics of the batch")
    trainer = averaging(nodes, backend=backend)
    trainer.fit(X, Y)
    before = trainer.get_state(buffers=True)
    trainer.update_bn(X)
    state = trainer.get_state(buffers=True)
    means, predicted = exact(trainer.get_state(averaged=True), shared=nodes == SHARED)
    same({name: state[name] for name in means}, means)
    assert not any(np.allclose(before[n], a, rtol=1e-2) for n, a in means.items())
    for name in ("w", "v", "gain", "bias"):
        np.testing.assert_array_equal(state[name], before[name])
    np.testing.assert_allclose(trainer.predict(X), predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(models.weights_of(trainer.export())["va"], state["va"])


def test_without_averages_or_training_the_weights_are_those_of_the_file() -> None:
    """It needs neither labels nor an engine, and the next training starts with its statistics."""
    trainer = averaging(OWN, averaging=None)
    trainer.update_bn({"x": X})
    state = trainer.get_state(buffers=True)
    np.testing.assert_allclose(state["vb"], exact(state, shared=False)[0]["vb"], rtol=2e-5)
    other = averaging(OWN, averaging=None)
    for one in (trainer, other):
        one.step((X[:BATCH], Y[:BATCH]))
    gap = trainer.get_state(buffers=True)["vb"] - other.get_state(buffers=True)["vb"]
    np.testing.assert_allclose(gap, 0.9 * (state["vb"] - 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("update", [False, True])
def test_predictions_before_any_data_use_the_statistics(tmp_path: Any, update: bool) -> None:
    """A Trainer that was resumed or copied knows no losses yet, but it has running statistics."""
    trainer = averaging(OWN)
    trainer.fit(X, Y)
    if update:
        trainer.update_bn(X)
    expected = trainer.predict(X)
    folder = trainer.save(tmp_path / "c")
    for other in (type(trainer).resume(folder), pickle.loads(pickle.dumps(trainer))):
        np.testing.assert_allclose(other.predict(X), expected, rtol=1e-6, atol=1e-7)
        other.update_bn(X)
        exact = trainer if update else copy.deepcopy(trainer)
        exact.update_bn(X)
        np.testing.assert_allclose(other.predict(X), exact.predict(X), rtol=1e-6, atol=1e-7)


def test_iterables_and_dropout_are_as_in_training() -> None:
    """Batches that the user makes are taken as they are; masks are drawn, and equal at every call."""
    trainer = averaging(OWN)
    trainer.fit(X, Y)
    trainer.update_bn(X)
    state = trainer.get_state(buffers=True)
    trainer.update_bn(lambda: iter([X[k : k + BATCH] for k in range(0, 26, BATCH)]))
    np.testing.assert_array_equal(trainer.get_state(buffers=True)["vb"], state["vb"])

    dropping = OWN.replace("Tanh (n1)", "Dropout (n1, ratio, yes)")
    model = network(dropping)
    extra = {"ratio": np.float32(0.5), "yes": np.array(True)}
    extra |= {n: np.full(4, n[0] == "v", np.float32) for n in ("ma", "va", "mb", "vb")}
    added(model, extra)
    wide = np.repeat(X, 400, axis=0)
    found = []
    for _ in range(2):
        trainer = make(model, batch_size=len(wide), backend="fused")
        trainer.update_bn(wide)
        found.append(trainer.get_state(buffers=True)["vb"])
    np.testing.assert_array_equal(*found)
    # n1 is normalized, then scaled by gain and masked with the ratio ½: E[(2mz)²] − E[z]² = 2g² + b².
    gain, bias = (numpy_helper.to_array(model.graph.initializer[k]) for k in (1, 2))
    np.testing.assert_allclose(found[0], 2 * gain**2 + bias**2, rtol=0.1)


def test_strings_are_encoded_first() -> None:
    """The part before everything that is trained is computed apart."""
    model = categories()
    model.graph.node[-1].output[0] = "z"
    names = ["z", "g", "c", "m", "v"]
    model.graph.node.add(op_type="BatchNormalization", input=names, output=["Y"])
    added(model, {name: np.full(1, name in "gv", np.float32) for name in names[1:]})
    x, y = texts()
    options = {"backend": "fused", "batch_size": 20, "learning_rate": 0.1, "batch_norm": "train"}
    trainer = make(model, averaging="ema", **options)
    trainer.fit(x, y)
    trainer.update_bn(x)
    state = trainer.get_state(buffers=True, averaged=True)
    encoded = (x[:, :, None] == np.array(["a", "b", "c"])).reshape(-1, 6)
    z = (encoded @ state["w"].astype(np.float64) + state["b"]).reshape(3, 20)
    np.testing.assert_allclose(state["m"], z.mean(), rtol=1e-5)
    np.testing.assert_allclose(state["v"], z.var(1, ddof=1).mean(), rtol=1e-5)


def test_what_it_refuses_changes_nothing() -> None:
    trainer = averaging(OWN)
    trainer.fit(X, Y)
    before = trainer.get_state(buffers=True)
    for rows in (X[:1], X[: BATCH + 1]):
        with pytest.raises(DataError, match="more than one value per channel"):
            trainer.update_bn(rows)
    with pytest.raises(DataError):
        trainer.update_bn(X[:, :2])
    same(trainer.get_state(buffers=True), before, 0)
    for other in (averaging(OWN, batch_norm="freeze"), make(models.linear())):
        with pytest.raises(ModelError, match="no BatchNormalization"):
            other.update_bn(X)

    def steps_end(trainer: Any) -> None:  # which only observes
        trainer.update_bn(X)

    with pytest.raises(OrtflexError, match="update_bn"):
        averaging(OWN, callbacks=[steps_end]).fit(X, Y)


def test_a_training_says_that_the_statistics_are_not_averaged(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "ortflex"):
        averaging(OWN, averaging=None).fit(X, Y)
        averaging(OWN, batch_norm="freeze").fit(X, Y)
        averaging(OWN, update_bn=True).fit(X, Y)
        assert "update_bn" not in caplog.text
        trainer = averaging(OWN)
        trainer.fit(X, Y)
        trainer.fit(X, Y)
    assert caplog.text.count("update_bn=True") == 1


@pytest.mark.parametrize("form", ["arrays", "pieces", "iterable", "split", "prefix"])
def test_the_argument_updates_when_fit_ends(form: str) -> None:
    """The same bits as the method after a fit without it, on the rows of the training."""
    cuts = [(X[k : k + BATCH], Y[k : k + BATCH]) for k in range(0, 26, BATCH)]
    data: Any = {"pieces": (Rows(X, Y, "x"),), "iterable": (cuts,)}.get(form, (X, Y))
    rows, fit = X, {"validation_data": 0.3} if form == "split" else {}
    prefix = {"params": ["gain", "bias", "v"], "cache": "memory"} if form == "prefix" else {}
    options: dict[str, Any] = {"shuffle": False, **prefix}
    one, two = averaging(OWN, update_bn=True, **options), averaging(OWN, **options)
    for trainer in (one, two):
        trainer.fit(*data, **fit)
    if form == "split":
        rows = split(Columns(inputs={"x": X}, labels={}), 0.3, two.seed)[0].inputs["x"]
    before = two.get_state(buffers=True)
    two.update_bn(rows)
    assert before["va"].tobytes() != two.get_state(buffers=True)["va"].tobytes()
    same(one.get_state(buffers=True), two.get_state(buffers=True), 0)


def test_early_stopping_and_stored_models_have_their_part() -> None:
    """After the best weights are restored, before a tracker stores the model."""
    stored: list[Any] = []

    class Store:
        @hook(trylast=True)
        def train_end(self, trainer: Any) -> None:
            stored.append(trainer.predict(X))

    early = {"name": "early_stopping", "patience": 1, "min_delta": 10.0}
    trainer = averaging(OWN, update_bn=True, callbacks=[early, Store()])
    history = trainer.fit(X, Y)
    assert len(history) == 2
    means, predicted = exact(trainer.get_state(averaged=True), shared=False)
    np.testing.assert_allclose(trainer.get_state(buffers=True)["vb"], means["vb"], rtol=2e-5)
    np.testing.assert_allclose(stored[0], predicted, rtol=1e-4, atol=1e-5)


def test_a_run_that_may_go_on_keeps_its_statistics(tmp_path: Any) -> None:
    """The resumed run ends with the bits of one that was not interrupted."""

    def step_end(progress: Any) -> bool:
        return bool(progress.step == 6)

    whole = averaging(OWN, update_bn=True)
    whole.fit(X, Y)
    first = averaging(OWN, update_bn=True, callbacks=[step_end])
    first.fit(X, Y)
    resumed = type(first).resume(first.save(tmp_path / "c"), callbacks=[])
    resumed.fit(X, Y)
    same(resumed.get_state(buffers=True), whole.get_state(buffers=True), 0)


def test_what_has_no_statistics_is_refused_before_the_training() -> None:
    frozen = averaging(OWN, batch_norm="freeze", update_bn=True)
    without = make(models.linear(), update_bn=True)
    for trainer, data in ((frozen, (X, Y)), (without, regression())):
        before = trainer.get_state()
        with pytest.raises(ModelError, match="update_bn"):
            trainer.fit(*data)
        same(trainer.get_state(), before, 0)


@pytest.mark.parametrize("form", ["arrays", "iterable"])
def test_several_processes_have_the_bits_of_one(form: str) -> None:
    """27 rows are batches of 8, 8, 8 and 3: the last round has fewer batches than processes."""
    x, y = np.concatenate([X, X[:1]]), np.concatenate([Y, Y[:1]])

    def batches(rank: int, size: int) -> Any:
        return [(x[k : k + 8], y[k : k + 8]) for k in range(8 * rank, 27, 8 * size)]

    def job(ranks: int, **options: Any) -> Any:
        trainer = averaging(OWN, update_bn=True, shuffle=False, threads=1, **options)
        cuts = batches if ranks > 1 else batches(0, 1)
        trainer.fit(*((cuts,) if form == "iterable" else (x, y)))
        return in_bytes(trainer.get_state(buffers=True))

    alone = job(1, accumulate=2)
    for state in run_ranks(2, lambda group: job(2, distributed=group)):
        assert state == alone


def test_drop_last_leaves_out_the_rows_that_no_step_had() -> None:
    trainer = averaging(OWN, update_bn=True, drop_last=True)
    trainer.fit(X[:17], Y[:17])
    found = trainer.get_state(buffers=True)["va"]
    trainer.update_bn(X[:16])
    np.testing.assert_array_equal(trainer.get_state(buffers=True)["va"], found)

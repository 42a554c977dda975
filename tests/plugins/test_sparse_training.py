"""Sparse trainings: zeros stay zero with everything else that a training has.

The class of mistakes: a zero that momentum, decay, averages or a backend move, a resumed training with
other bits, and a file without the zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex import Trainer, shrink
from ortflex_core import Unsupported, hook, internals_of, open_step, run_ranks
from ortflex_plugins.constraints import Sparsity
from tests import models
from tests.end_to_end.portable_cases import batches, compare_steps, fused
from tests.plugins.sparse import DRAW, X, Y, trainer, zeros
from tests.training import every_backend, make, plugins, same

OPTIMIZERS = [name for name in plugins()["optimizers"].names() if not name.startswith("example")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "method", [{"share": 0.75}, {"method": "channels"}], ids=["magnitude", "channels"]
)
def test_zeros_stay_with_every_optimizer(optimizer: str, method: dict[str, Any]) -> None:
    """With decay, clipping, averages, and steps of two batches."""
    options: dict[str, Any] = {"penalty": {"name": "l2", "l2": 0.01}, "clip_norm": 1.0}
    options |= {"accumulate": 2, "epochs": 3, "optimizer": optimizer, "learning_rate": None}
    constraint = {"name": "sparsity", "end": 6, "every": 2, **method}
    for averaging in ("ema", "swa"):
        made = trainer(constraint=constraint, averaging=averaging, **options)
        made.fit(X, Y)
        before = made.get_state()
        names = tuple(n for t in internals_of(made).problem.updating.prunings for n in t.parameters)
        masks = zeros(before, names)
        assert all(0.4 < mask.mean() < 0.8 for mask in masks.values())
        made.fit(X, Y)
        after, averages = made.get_state(), made.get_state(averaged=True)
        for name, mask in masks.items():
            np.testing.assert_array_equal(after[name] == 0, mask, err_msg=f"{name} {averaging}")
            assert not averages[name][mask].any(), (name, averaging)
            assert not np.array_equal(after[name], before[name]), name
        file = models.weights_of(made.export())
        for name, mask in masks.items():
            assert file[name][mask].tobytes() == bytes(4 * int(mask.sum()))


@every_backend
@pytest.mark.parametrize("method", [{"share": 0.75}, {"method": "2:4"}, {"method": "channels"}])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_backend_keeps_them_or_refuses(backend: str, method: Any, optimizer: str) -> None:
    given: dict[str, Any] = {"name": "sparsity", "end": 5, "every": 2, **method}
    options: dict[str, Any] = {"optimizer": optimizer, "epochs": 2}
    made = trainer(constraint=given, backend=backend, **options)
    if backend == "training_session":
        with pytest.raises(Unsupported, match="constraint"):
            made.fit(X, Y)
        return
    try:
        made.fit(X, Y)
    except Unsupported:
        trainer(constraint="non_negative", backend="fused").fit(X, Y)
        with pytest.raises(Unsupported):  # for a reason that has nothing to do with it
            make(models.mlp(), backend=backend, **options).fit(X, Y)
        return
    reference = trainer(constraint=given, backend="example_numpy", **options)
    reference.fit(X, Y)
    for name, array in reference.get_state().items():
        got = made.get_state()[name]
        np.testing.assert_allclose(got, array, rtol=1e-4, atol=1e-5)
        if name.startswith("W"):
            np.testing.assert_array_equal(got == 0, array == 0)
    slots = made.engine.slots()
    for name, array in reference.engine.slots().items():
        np.testing.assert_allclose(slots[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_training_is_that_of_torch(optimizer: str, clip: float | None, torch: Any) -> None:
    """torch multiplies the weight by the mask, so gradients of zeros are zero in norms and momenta."""
    from torch.nn.utils import prune

    proto = models.mlp()
    weights = models.weights_of(proto)
    options: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.02, "clip_norm": clip}
    options |= {"shuffle": False, "epochs": 2, "batch_size": 12}
    made = trainer(proto, Sparsity(share=0.5, begin=0, end=0), **options)
    made.fit(X, Y)
    layers = [torch.nn.Linear(*sizes).double() for sizes in ((6, 8), (8, 4), (4, 1))]
    for k, layer in enumerate(layers, 1):
        layer.weight.data = torch.tensor(np.ascontiguousarray(weights[f"W{k}"].T, np.float64))
        layer.bias.data = torch.tensor(weights[f"b{k}"].astype(np.float64))
        prune.l1_unstructured(layer, "weight", amount=0.5)
    module = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    descent = {
        "sgd": torch.optim.SGD(module.parameters(), lr=0.02),
        "momentum": torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9),
        "adam": torch.optim.Adam(module.parameters(), lr=0.02),
    }[optimizer]
    x, y = torch.tensor(X).double(), torch.tensor(Y).double()
    for _ in range(2):
        for start in range(0, 48, 12):
            descent.zero_grad()
            ((module(x[start : start + 12]) - y[start : start + 12]) ** 2).mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            descent.step()
    state = made.get_state()
    for k, layer in enumerate(layers, 1):
        mask = layer.weight_mask.numpy()
        expected = (layer.weight_orig.detach().numpy() * mask).T
        np.testing.assert_allclose(state[f"W{k}"], expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(state[f"b{k}"], layer.bias.detach(), rtol=2e-4, atol=2e-5)


def batch_normalized() -> onnx.ModelProto:
    """A convolution with a bias and BatchNormalization, another one, a linear head."""
    draw = np.random.default_rng(2)
    arrays = {"A": draw.normal(0, 0.5, (8, 1, 3, 3)), "B": draw.normal(0, 0.3, (4, 8, 3, 3))}
    arrays |= {"b": np.zeros(4), "C": draw.normal(0, 0.5, (3, 4)), "k": np.zeros(3)}
    arrays |= {"g": np.ones(8), "h": np.zeros(8), "m": np.zeros(8), "v": np.ones(8)}
    return models.of_text(
        "(float[N, 1, 6, 6] X) => (float[N, 3] y) { a = Conv(X, A) "
        "n = BatchNormalization(a, g, h, m, v) r = Relu(n) c = Conv(r, B, b) "
        "p = GlobalAveragePool(c) f = Flatten(p) y = Gemm<transB = 1>(f, C, k) }",
        arrays,
    )


def test_zero_channels_are_zero_with_their_biases_and_normalizations() -> None:
    """Vectors that start at zero train as long as their channel lives."""
    x = DRAW.standard_normal((32, 1, 6, 6)).astype(np.float32)
    options: dict[str, Any] = {"optimizer": {"name": "adam"}, "loss": "softmax_cross_entropy"}
    options |= {"epochs": 6, "batch_size": 8, "averaging": "ema"}
    made = trainer(batch_normalized(), {"name": "sparsity", "method": "channels"}, **options)
    made.fit(x, np.arange(32) % 3)
    for state in (made.get_state(), made.get_state(averaged=True)):
        dead, second = (np.asarray(~state[n].any(axis=(1, 2, 3))) for n in ("A", "B"))
        assert dead.sum() == 4
        assert second.sum() == 2
        for vector, mask in (("g", dead), ("h", dead), ("b", second)):
            np.testing.assert_array_equal(state[vector] == 0, mask, err_msg=vector)
        assert np.count_nonzero(state["C"]) == 12
        assert np.count_nonzero(state["k"]) == 3
    inner = made.export(inference=True)
    inner.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in ("r", "c"))
    found = models.predict(inner, {"X": x})
    r, c = found["r"], found["c"]
    assert not r[:, dead].any()
    assert not c[:, second].any()


ACTIVATIONS = [
    *("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Tanh", "Mish", "ThresholdedRelu"),
    *("Sigmoid", "HardSigmoid", "Softplus", "Exp", "Cos"),
    *(
        "Identity",
        "Dropout",
        "MaxPool<kernel_shape = [2, 2]>",
        "AveragePool<kernel_shape = [2, 2]>",
    ),
]


@pytest.mark.once
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_normalization_follows_a_channel_through_what_is_zero_at_zero(activation: str) -> None:
    draw = np.random.default_rng(2)
    arrays = {"A": draw.normal(0, 0.5, (8, 1, 3, 3)), "C": draw.normal(0, 0.5, (3, 8))}
    arrays |= {"g": np.ones(8), "h": np.zeros(8), "m": np.zeros(8), "v": np.ones(8)}
    model = models.of_text(
        f"(float[N, 1, 6, 6] X) => (float[N, 3] y) {{ a = Conv(X, A) r = {activation}(a) "
        "n = BatchNormalization(r, g, h, m, v) p = GlobalAveragePool(n) f = Flatten(p) "
        "y = Gemm<transB = 1>(f, C) }",
        arrays,
        opset=20,
    )
    alone = f"(float[1, 1, 2, 2] X) => (float[1, 1, a, b] y) {{ y = {activation}(X) }}"
    nothing = {"X": np.zeros((1, 1, 2, 2), np.float32)}
    at_zero = models.predict(models.of_text(alone, {}, opset=20), nothing)["y"]
    made = trainer(model, {"name": "sparsity", "method": "channels"}, loss="squared_error")
    [term] = internals_of(made).problem.updating.prunings
    assert ({"g", "h"} <= set(term.followers)) == (not at_zero.any())


@pytest.mark.parametrize("method", [{"share": 0.75}, {"method": "2:4"}, {"method": "channels"}])
@pytest.mark.parametrize("stop", [2, 5, 9, 13, 17])
def test_a_resumed_training_has_the_same_bits(method: Any, stop: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"name": "sparsity", "end": 15, "every": 4, "begin": 1, **method}
    options: dict[str, Any] = {"optimizer": "adam", "averaging": "ema", "backend": "fused"}

    class Ends:
        @hook
        def step_end(self, trainer: Any, progress: Any) -> Any:
            if progress.step == stop:
                trainer.save(tmp_path / "c")
                return True
            return None

    # A hook that is called after each step makes runs of one step, in both.
    class Steps:
        @hook
        def step_end(self) -> None:
            """Nothing."""

    whole = trainer(constraint=given, callbacks=[Steps()], **options)
    expected = whole.fit(X, Y)
    trainer(constraint=given, callbacks=[Ends()], **options).fit(X, Y)
    again = Trainer.resume(tmp_path / "c", plugins=plugins(), callbacks=[Steps()])
    history = again.fit(X, Y)
    assert history["loss"] == expected["loss"]
    assert history["sparsity"] == expected["sparsity"]
    for averaged in (False, True):
        same(again.get_state(averaged=averaged), whole.get_state(averaged=averaged), 0)


def test_a_second_fit_recovers() -> None:
    made = trainer()
    made.fit(X, Y)
    before = zeros(made.get_state())
    history = made.fit(X, Y)
    np.testing.assert_equal(zeros(made.get_state()), before)
    assert set(history["sparsity"]) == {0.75}


def test_a_recipe_makes_weights_sparse(tmp_path: Path) -> None:
    from ortflex_core import Recipe

    onnx.save(models.mlp(), str(tmp_path / "model.onnx"))
    np.savez(tmp_path / "data.npz", X=X, label=Y)
    (tmp_path / "train.toml").write_text(
        'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\nepochs = 3\n'
        'batch_size = 8\n[constraint]\nname = "sparsity"\nshare = 0.75\nend = 0.6\nparams = ["W1", "W2"]\n'
    )
    made = Trainer.from_recipe(Recipe.load(tmp_path / "train.toml"), plugins=plugins())
    made.fit(X, Y)
    shares = {n: float(m.mean()) for n, m in zeros(made.get_state()).items()}
    assert shares == {"W1": 0.75, "W2": 0.75, "W3": 0.0}


@pytest.mark.parametrize("method", [{"share": 0.75}, {"method": "channels"}])
def test_a_portable_step_keeps_zeros(method: dict[str, Any], tmp_path: Path) -> None:
    """Its steps are those of the Trainer, which has no changes to make any more."""
    given = {"name": "sparsity", **method}
    made = fused(models.mlp(), constraint=given, optimizer="adam", batch_size=8, epochs=2)
    folder = made.export_step(tmp_path / "early", X, Y)
    early = open_step(folder).manifest
    assert [m.name for m in early.not_portable if m.what == "constraint"] == ["sparsity"]
    made.fit(X, Y)
    before = zeros(made.get_state())
    step = compare_steps(made, tmp_path / "step", batches(X, Y, None, 8), 9, fixed=True)
    late = open_step(tmp_path / "step").manifest
    assert not [m for m in late.not_portable if m.what == "constraint"]
    np.testing.assert_equal(zeros(made.get_state()), before)
    assert step.state


def test_groups_that_start_later_get_the_share_of_then() -> None:
    constraint = Sparsity(share=0.75, begin=0, end=6, every=2)
    groups = [{"params": "W1", "start_epoch": 2}]
    shares = []

    class Watches:
        @hook
        def epoch_end(self, trainer: Any) -> None:
            shares.append(float(np.mean(trainer.get_state()["W1"] == 0)))

    made = trainer(constraint=constraint, groups=groups, epochs=3, callbacks=[Watches()])
    made.fit(X, Y)
    assert shares == [0, 0, 0.75]


def test_a_quantized_model_is_sparse_in_its_file() -> None:
    made = trainer(constraint={"name": "sparsity", "share": 0.75}, quantize="mse", optimizer="adam")
    made.fit(X, Y)
    file = models.weights_of(made.export())
    for name in ("W1", "W2", "W3"):
        assert file[name].dtype == np.int8
        assert np.mean(file[name] == 0) >= 0.75


@pytest.mark.parametrize("sync", [None, 3])
def test_processes_have_the_same_zeros(sync: int | None) -> None:
    constraint = Sparsity(share=0.75, begin=0, end=5, every=2)

    def job(group: Any) -> Any:
        options = {} if sync is None else {"sync_every": sync}
        made = trainer(constraint=constraint, distributed=group, batch_size=4, **options)
        made.fit(X, Y)
        return made.get_state()

    first, second = run_ranks(2, job)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    same(first, second, 0)
    assert {float(m.mean()) for m in zeros(first).values()} == {0.75}


def test_the_learning_rate_finder_leaves_weights_as_they_are() -> None:
    made = trainer()
    before = made.get_state()
    made.find_rate(X, Y, steps=5)
    np.testing.assert_equal(made.get_state(), before)


@pytest.mark.parametrize("normalized", [False, True])
def test_shrink_removes_the_zero_channels(normalized: bool, tmp_path: Path) -> None:
    """Half of the channels of each hidden layer are gone, and the outputs are those of the sparse file."""
    model = batch_normalized() if normalized else models.mlp((6, 8, 4, 1))
    x = DRAW.standard_normal((32, 1, 6, 6)).astype(np.float32) if normalized else X
    options = {"loss": "softmax_cross_entropy" if normalized else "squared_error"}
    channels = {"name": "sparsity", "method": "channels"}
    made = trainer(model, channels, optimizer="adam", **options)
    made.fit(x, np.arange(32) % 3 if normalized else Y)
    made.export(tmp_path / "sparse.onnx", inference=True)
    shrink(tmp_path / "sparse.onnx", tmp_path / "small.onnx")
    sparse, small = (onnx.load(tmp_path / f"{name}.onnx") for name in ("sparse", "small"))
    shapes = {name: array.shape for name, array in models.weights_of(small).items()}
    expected = (
        {"A": (4, 1, 3, 3), "B": (2, 4, 3, 3), "C": (3, 2)}
        if normalized
        else {"W1": (6, 4), "W2": (4, 2), "W3": (2, 1)}
    )
    assert {n: shapes[n] for n in expected} == expected
    outputs = [next(iter(models.predict(m, {"X": x}).values())) for m in (sparse, small)]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


def digits() -> Any:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


@pytest.mark.parametrize(
    ("method", "share"),
    [
        ({"share": 0.8}, 0.8),
        pytest.param({"share": 0.8, "scope": "global"}, 0.8, marks=pytest.mark.slow),
        pytest.param({"method": "1:4"}, 0.75, marks=pytest.mark.slow),
    ],
    ids=["magnitude", "global", "1:4"],
)
def test_a_network_of_digits_recovers(method: dict[str, Any], share: float, tmp_path: Path) -> None:
    """With labels and with a teacher, at most a point below the dense network: means of three seeds."""
    found = np.array([accuracies(method, share, seed, tmp_path) for seed in range(3)])
    dense, cut, labeled, taught = found.mean(axis=0)
    assert labeled >= dense - 0.01
    assert taught >= dense - 0.01
    assert cut < dense - 0.03


def accuracies(
    method: dict[str, Any], share: float, seed: int, folder: Path
) -> tuple[float, float, float, float]:
    """Of the dense network, with zeros and no training, trained with labels, and by the teacher."""
    rows, (held, classes) = digits()
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 32}
    options |= {"backend": "fused", "epochs": 30, "seed": seed}

    def score(trainer: Trainer) -> float:
        return float(np.mean(trainer.predict(held).argmax(1) == classes))

    network = models.mlp((64, 64, 32, 10), "Relu", seed)
    dense = make(network, loss="softmax_cross_entropy", **options)
    dense.fit(*rows)
    found = [score(dense)]
    teacher = str(folder / f"dense{seed}.onnx")
    dense.export(teacher)
    pruning, state = Sparsity(**method), dense.get_state()
    weights = {n: state[n] for n in ("W1", "W2", "W3")}
    dense.set_state(pruning.project(weights, dict.fromkeys(weights, (1,)), pruning.final))
    found.append(score(dense))
    distillation = {"name": "distillation", "teacher": teacher, "alpha": 1.0}
    for loss, labels in (("softmax_cross_entropy", rows[1]), (distillation, None)):
        sparse = make(teacher, loss=loss, constraint=pruning, **options)
        history = sparse.fit(rows[0], labels)
        assert history["sparsity"][-1] == pytest.approx(share, abs=0.002)
        found.append(score(sparse))
    return found[0], found[1], found[2], found[3]


@pytest.mark.slow
def test_convolutions_recover() -> None:
    """Convolutions and the last product at 80 %, with BatchNormalization between: means of three seeds."""
    dense, sparse = np.array([of_convolutions(seed) for seed in range(3)]).mean(axis=0)
    assert sparse >= dense - 0.01


def of_convolutions(seed: int) -> tuple[float, float]:
    """The accuracy of the dense and of the sparse network."""
    (x, y), (held, classes) = digits()
    x, held = x.reshape(-1, 1, 8, 8), held.reshape(-1, 1, 8, 8)
    draw = np.random.default_rng(seed)
    arrays = {"A": draw.normal(0, 0.5, (16, 1, 3, 3)), "B": draw.normal(0, 0.1, (16, 16, 3, 3))}
    arrays |= {"b": np.zeros(16), "C": draw.normal(0, 0.1, (256, 10)), "k": np.zeros(10)}
    arrays |= {"g": np.ones(16), "h": np.zeros(16), "m": np.zeros(16), "v": np.ones(16)}
    proto = models.of_text(
        "(float[N, 1, 8, 8] X) => (float[N, 10] y) { a = Conv<pads = [1, 1, 1, 1]>(X, A) "
        "n = BatchNormalization(a, g, h, m, v) r = Relu(n) "
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) "
        "c = Conv<pads = [1, 1, 1, 1]>(p, B, b) s = Relu(c) f = Flatten(s) y = Gemm(f, C, k) }",
        arrays,
    )
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 32}
    options |= {"backend": "fused", "loss": "softmax_cross_entropy", "seed": seed}
    dense = make(proto, epochs=30, **options)
    dense.fit(x, y)
    best = np.mean(dense.predict(held).argmax(1) == classes)
    sparse = make(dense.export(), epochs=60, constraint=Sparsity(share=0.8), **options)
    history = sparse.fit(x, y)
    assert history["sparsity"][-1] == pytest.approx(0.8, abs=0.002)
    accuracy = np.mean(sparse.predict(held).argmax(1) == classes)
    return float(best), float(accuracy)

"""``precision=``: short types in forward and backward pass, masters and updates in float32."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, shape_inference

from ortflex_core import Emulated, Trainer, Unsupported, internals_of, step_program
from tests import half_models, models
from tests.training import SaveAt, bits, make, plugins, regression, same, usable

FP16, BF16 = "fp16_mixed", "bf16_mixed"
STATIC = {"name": FP16, "dynamic": False, "loss_scale": 256.0}
STEP = {FP16: 2.0**-11, BF16: 2.0**-8}
"""Half the distance of neighboring numbers at 1."""
SCALE, COUNT, SKIPPED = (f"precision/{n}" for n in ("loss_scale", "finite_steps", "skipped_steps"))


def train(model: Any, x: Any, y: Any, **options: Any) -> Trainer:
    """One epoch of steps of 8 rows, in order."""
    settings = {"learning_rate": 0.05, "epochs": 1, "batch_size": 8, "shuffle": False}
    trainer = make(model, **(settings | {"backend": Emulated()} | options))
    trainer.fit(x, y)
    return trainer


def data(rows: int) -> tuple[Any, Any, Any]:
    return models.mlp((6, 8, 4)), *regression(rows=rows, features=6, outputs=4)


def moved(trainer: Trainer, model: Any) -> dict[str, Any]:
    before = half_models.widened(model)
    return {n: a - before[n] for n, a in trainer.get_state().items()}


def moves(model: Any, x: Any, y: Any, **options: Any) -> dict[str, Any]:
    return moved(train(model, x, y, **options), model)


def distance(mine: dict[str, Any], true: dict[str, Any]) -> float:
    """‖mine − true‖ / ‖true‖ over all tensors."""

    def size(tensors: Any) -> Any:
        return np.sqrt(sum((t.astype(np.float64) ** 2).sum() for t in tensors))

    return float(size(mine[n] - t for n, t in true.items()) / size(true.values()))


def by_hand(weights: dict[str, Any], x: Any, y: Any, kind: Any, scale: float) -> dict[str, Any]:
    """The gradients of ``mlp((6, 8, 4))`` with every tensor of the passes rounded to a type."""

    def cast(array: Any) -> Any:
        return array.astype(kind).astype(np.float32)

    w1, b1, w2, b2 = (cast(weights[n]) for n in ("W1", "b1", "W2", "b2"))
    h = cast(np.tanh(cast(cast(cast(x) @ w1) + b1)))
    out = cast(cast(h @ w2) + b2)
    error = cast(scale * 2 * (out - y) / out.size)
    inner = cast(cast(error @ w2.T) * cast(1 - cast(h * h)))
    made = {"W1": cast(cast(x).T @ inner), "W2": cast(h.T @ error)}
    made |= {"b1": inner.sum(axis=0), "b2": error.sum(axis=0)}
    return {n: g / scale for n, g in made.items()}


@pytest.mark.parametrize(("precision", "kind"), [(STATIC, np.float16), (BF16, ml_dtypes.bfloat16)])
def test_a_step_by_hand(precision: Any, kind: Any) -> None:
    """Rounding at every tensor of both passes; sums of biases, loss and update in float32."""
    model, x, y = data(8)
    got = moves(model, x, y, precision=precision, learning_rate=1.0)
    scale = 256.0 if kind is np.float16 else 1.0
    wanted = by_hand(half_models.widened(model), x, y, kind, scale)
    rounding = distance(wanted, by_hand(half_models.widened(model), x, y, np.float32, 1.0))
    # A product with 1 − h² is rounded in another place: much less than the rounding itself.
    assert (
        distance(got, {n: -g for n, g in wanted.items()})
        < 0.6 * rounding
        < 4 * STEP[FP16 if scale > 1 else BF16]
    )


@pytest.mark.parametrize("precision", [FP16, BF16])
@pytest.mark.parametrize("name", ["lenet", "transformer"])
def test_gradients_are_those_of_torch_in_autocast(name: str, precision: str) -> None:
    """As near to float32 as torch's are."""
    torch = pytest.importorskip("torch")
    model = half_models.network(name)
    x, y = half_models.data(name, 8)
    mine, true = (
        moves(model, x, y, precision=p, learning_rate=1.0) for p in (precision, "float32")
    )
    torch.manual_seed(3)
    module = half_models.NETWORKS[name]()
    kind = torch.float16 if precision == FP16 else torch.bfloat16
    exact = _torch(torch, module, x, y, None)
    torch_error = distance(_torch(torch, module, x, y, kind), exact)
    assert 0 < distance(mine, true) < 3 * torch_error + STEP[precision]


def _torch(torch: Any, module: Any, x: Any, y: Any, kind: Any) -> dict[str, Any]:
    module.zero_grad()
    with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
        out = module(torch.from_numpy(x))
        loss = torch.nn.functional.mse_loss(out.float(), torch.from_numpy(y))
    (256.0 * loss).backward()
    return {n: p.grad.numpy().copy() / 256.0 for n, p in module.named_parameters()}


@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm", "transformer"])
def test_float16_on_onnxruntime(name: str) -> None:
    """Weights are those of float32 up to the rounding of float16, which is visible."""
    if name != "mlp":
        pytest.importorskip("torch")
    model = half_models.network(name)
    x, y = half_models.data(name, 32)
    true = moves(model, x, y, precision="float32", backend="fused")
    for precision in ({"name": FP16, "loss_scale": 1024.0}, STATIC):
        mine = moves(model, x, y, precision=precision, backend="fused")
        assert STEP[FP16] / 8 < distance(mine, true) < 0.01


@pytest.mark.parametrize("precision", [STATIC, BF16])
@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_short_types_on_xla(name: str, precision: Any) -> None:
    """A backend whose kernels are not onnxruntime's runs the same graphs, bfloat16 too."""
    usable("xla")
    if name != "mlp":
        pytest.importorskip("torch")
    model = half_models.network(name)
    x, y = half_models.data(name, 16)
    settings: dict[str, Any] = {"precision": precision, "learning_rate": 1.0, "batch_size": 16}
    true = moves(model, x, y, **(settings | {"precision": "float32"}))
    emulated, mine = (moves(model, x, y, backend=b, **settings) for b in (Emulated(), "xla"))
    rounding = distance(emulated, true)
    assert 0.3 * rounding < distance(mine, true) < 3 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [FP16, STATIC, BF16])
def test_short_types_on_cuda(precision: Any) -> None:
    """As the emulation; skipped with the reason where there is no CUDA device."""
    model, x, y = data(16)
    emulated = moves(model, x, y, precision=precision)
    mine = moves(model, x, y, backend="fused", device="cuda", precision=precision)
    assert distance(mine, emulated) < 4 * STEP[BF16 if precision == BF16 else FP16]


def test_small_gradients_need_the_loss_scale() -> None:
    """A loss of 1e-8 has gradients below what float16 holds."""
    none = {"name": FP16, "dynamic": False, "loss_scale": 1.0}
    loss = [{"name": "squared_error", "factor": 1e-8}]
    true, lost, scaled = (
        moves(*data(8), precision=p, loss=loss, learning_rate=1e7) for p in ("float32", none, FP16)
    )
    assert not any(lost[n].any() for n in ("W1", "b1", "W2"))
    assert distance(scaled, true) < 0.01


def overflowing() -> tuple[Any, Any, Any]:
    """A network and rows of which the third batch of 8 has large gradients."""
    model, x, y = data(48)
    y[16:24] *= 1e4
    return model, x, y


def test_steps_with_infinite_gradients_are_left_out() -> None:
    """Weights and slots stay, the scale is halved; afterwards it is doubled every 2 steps."""
    model, x, y = overflowing()
    y[16:24] *= 1e2
    precision = {"name": FP16, "loss_scale": 1024.0, "growth_steps": 2}
    options: dict[str, Any] = {"precision": precision, "optimizer": "adam"}
    trainer = make(model, backend=Emulated(), learning_rate=1e-3, **options)
    known, scales = [], []
    for k in range(6):
        trainer.step((x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]))
        slots = trainer.engine.slots()
        known.append({**trainer.get_state(), **{n: a for n, a in slots.items() if n[1] == "/"}})
        scales.append((float(slots[SCALE]), float(slots[COUNT]), float(slots[SKIPPED])))
    # The scale, the finite steps since it changed, and the steps that were left out.
    assert scales[:3] == [(1024, 1, 0), (2048, 0, 0), (1024, 0, 1)]
    assert scales[3:] == [(1024, 1, 1), (2048, 0, 1), (2048, 1, 1)]
    same(known[2], known[1], 0)
    assert all((known[k]["W1"] != known[k - 1]["W1"]).any() for k in (1, 3, 4, 5))


def test_statistics_of_a_step_that_is_left_out_stay() -> None:
    """BatchNormalization's running statistics, and those that are not left out move."""
    weights = {n: np.full(6, v) for n, v in (("s", 1.0), ("b", 0.0), ("mean", 0.0), ("var", 1.0))}
    weights["W"] = np.random.default_rng(2).standard_normal((6, 4))
    body = "h = BatchNormalization(X, s, b, mean, var)  Y = MatMul(h, W)"
    model = models.parsed(body, weights, outputs="float[N, 4] Y")
    _, x, y = data(16)
    y[8:] *= 1e6
    trainer = make(model, backend=Emulated(), precision={"name": FP16, "loss_scale": 1024.0})
    seen = []
    for k in (0, 8):
        trainer.step((x[k : k + 8], y[k : k + 8]))
        seen.append(trainer.get_state(buffers=True))
    assert (seen[0]["mean"] != 0).any()
    same(seen[1], seen[0], 0)


@pytest.mark.parametrize("backend", ["fused", "emulated"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"averaging": "ema"}])
def test_a_resumed_training_ends_in_the_same_bits(
    backend: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The scale and its counters are state."""
    model, x, y = overflowing()
    chosen: Any = Emulated() if backend == "emulated" else backend
    precision = {"name": FP16, "loss_scale": 1024.0, "growth_steps": 3}
    options = {"precision": precision, "optimizer": "adam", "backend": chosen, **options}
    saver = SaveAt(tmp_path, 4)
    whole = train(model, x, y, epochs=3, callbacks=[saver], **options)
    again = Trainer.resume(saver.written[0], plugins=plugins(), callbacks=(), backend=chosen)
    again.fit(x, y)
    assert bits(whole) == bits(again)
    assert float(whole.engine.slots()[SKIPPED]) > 0


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"clip_norm": 0.5}, {"optimizer": "adam"}]
)
def test_several_steps_in_a_graph_are_single_steps(options: dict[str, Any]) -> None:
    """The loss scale goes from step to step within the graph."""
    precision = {"name": FP16, "growth_steps": 2}
    ends = []
    for steps in (1, 4):
        backend = {"name": "fused", "steps_per_run": steps}
        trainer = train(*data(64), backend=backend, precision=precision, **options)
        ends.append({**trainer.get_state(), **trainer.engine.slots()})
    same(ends[0], ends[1], 1e-5)
    assert ends[0][SCALE] > 65536


def test_types_in_the_graph() -> None:
    """Products are float16; sums, softmax, normalizations, the loss and the update are float32."""
    pytest.importorskip("torch")
    model = half_models.network("transformer")
    x, y = half_models.data("transformer", 8)
    trainer = train(model, x, y, precision=FP16, optimizer="adam")
    wide = {"ReduceSum", "Softmax", "LayerNormalization", "ReduceMean", "Pow", "Sqrt", "Exp"}
    for program in [step_program(internals_of(trainer).problem, rows=rows) for rows in (8, None)]:
        graph = shape_inference.infer_shapes(program.proto(), strict_mode=True).graph
        values = (*graph.input, *graph.value_info, *graph.output)
        types = {v.name: v.type.tensor_type.elem_type for v in values}
        types |= {t.name: t.data_type for t in graph.initializer}
        seen = set()
        for node in graph.node:
            half = TensorProto.FLOAT16 in {types.get(n) for n in (*node.input, *node.output)}
            if node.op_type in wide or node.doc_string in ("loss", "update", "penalty"):
                assert not half or node.op_type == "Cast", (node.op_type, node.doc_string)
            if node.op_type in ("MatMul", "Gemm") and node.doc_string in ("forward", "backward"):
                if any(t.name in node.input for t in graph.initializer):
                    continue  # a sum as a product with ones
                reads = {types[n] for n in node.input}
                assert reads == {TensorProto.FLOAT16}, node
            seen.add((node.op_type, half))
        assert {("MatMul", True), ("Softmax", False), ("Add", True)} <= seen
        taken = {types[i.name] for i in graph.input}
        assert TensorProto.FLOAT16 not in taken | {types[o.name] for o in graph.output}


def test_float32_changes_no_graph() -> None:
    model, x, y = models.mlp(), *regression(rows=16, features=6)
    graphs = [
        {n: p.model for n, p in train(model, x, y, backend="fused", **o).engine.programs().items()}
        for o in ({}, {"precision": "float32"})
    ]
    assert graphs[0] == graphs[1]


def test_float64_parts_stay() -> None:
    small, x, y = data(16)
    model = half_models.converted(small, TensorProto.DOUBLE)
    one, other = (train(model, x, y, backend="fused", precision=p) for p in ("float32", STATIC))
    same(one.get_state(), other.get_state(), 1e-14)


def test_float16_files_in_float16() -> None:
    """The two go together: the file's type is for storage, the precision for arithmetic."""
    model = half_models.converted(models.mlp((6, 8, 4)), TensorProto.FLOAT16)
    x, y = half_models.data("mlp")
    trainer = train(model, x, y, precision=STATIC)
    assert trainer.get_state()["W1"].dtype == np.float32
    assert half_models.without_values(trainer.export()) == half_models.without_values(model)


@pytest.mark.parametrize(
    ("backend", "precision", "reason"),
    [
        ("fused", BF16, r"no bfloat16 kernel of MatMul on cpu.*'bf16_mixed'"),
        ("training_agent", FP16, "itself, without the casts of precision"),
        ("training_session", FP16, "itself, without the casts of precision"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_reason(
    backend: str, precision: str, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        train(*data(16), backend=usable(backend), precision=precision)


def test_skipped_steps_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, x, y = overflowing()
    precision = {"name": FP16, "loss_scale": 65536.0}
    with caplog.at_level(logging.INFO, logger="ortflex"):
        trainer = train(model, x, y, precision=precision, learning_rate=1e-4)
    skipped = int(trainer.engine.slots()[SKIPPED])
    assert 0 < skipped < 6
    assert f"{skipped} of 6 steps were skipped" in caplog.text
    assert "precision" in trainer.summary().facts


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("fp16_mxied", "fp16_mixed"),
        ({"name": FP16, "loss_scale": 0.0}, "loss_scale"),
        ({"name": FP16, "growth_steps": 0}, "growth_steps: must be an integer >= 1"),
        ({"name": FP16, "dynamic": 1}, "dynamic: expected true or false"),
    ],
)
def test_wrong_values(precision: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        make(models.mlp(), precision=precision)


@pytest.mark.slow
def test_accuracy_on_digits_is_that_of_float32() -> None:
    """Within 0.3 points, in float16 as it is emulated and on fused."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    held, rest = order[:597], order[597:]
    model = models.mlp((64, 32, 10), "Relu")
    options: dict[str, Any] = {"loss": "softmax_cross_entropy", "optimizer": "adam"}
    options |= {"learning_rate": 3e-3, "batch_size": 32, "epochs": 30}
    shares = {}
    for precision in ("float32", FP16):
        options["precision"] = precision
        for backend in ("fused", Emulated()):
            trainer = train(model, x[rest], y[rest], backend=backend, **options)
            hits = trainer.predict(x[held]).argmax(axis=1) == y[held]
            shares[precision, getattr(backend, "name", backend)] = 100 * hits.mean()
    for backend in ("fused", "emulated"):
        assert abs(shares[FP16, backend] - shares["float32", backend]) <= 0.3, shares


def test_estimators_take_a_precision() -> None:
    pytest.importorskip("sklearn")
    from ortflex_plugins.estimators import OrtRegressor

    x, y = regression(rows=40, features=6)
    options = {"max_iter": 3, "batch_size": 8, "random_state": 1, "backend": Emulated()}
    plain, mixed = (
        OrtRegressor(precision=p, **options).fit(x, y.ravel()).coefs_[0]
        for p in ("float32", STATIC)
    )
    assert plain.dtype == mixed.dtype == np.float32
    assert 0 < np.abs(plain - mixed).max() < 0.01
    with pytest.raises(ValueError, match="float61"):
        OrtRegressor(precision="float61", **options).fit(x, y.ravel())

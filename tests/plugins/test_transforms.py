"""Transforms of gradients: short forms and lists, output axes, noise, checkpoints; torch and numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import onnx.parser
import pytest

from ortflex_core import (
    BrokenPlugin,
    CheckpointError,
    ConfigError,
    Model,
    PluginError,
    Recipe,
    Trainer,
    Transform,
    Unsupported,
    hyper,
    internals_of,
)
from ortflex_core.compiler.problem.output_axes import output_axes
from ortflex_plugins.pictures.step_parts import step_of
from tests import models
from tests.plugins.conformance_references import normal
from tests.training import every_backend, make, plugins, regression, same

STEPS = 12


def trainer(backend: Any, **options: Any) -> Trainer:
    if backend == "training_session":
        pytest.skip("TrainingSession updates the weights itself")
    settings = {"optimizer": "momentum", "learning_rate": 0.05, "epochs": 1, "batch_size": 8}
    return make(models.mlp(), backend=backend, shuffle=False, **(settings | options))


def fitted(made: Trainer, rows: int = 8 * STEPS) -> Trainer:
    made.fit(*regression(rows=rows, features=6))
    return made


def equal(first: Trainer, second: Trainer) -> bool:
    """Whether two trainings ended in the same bits."""
    a, b = first.get_state(), second.get_state()
    return all(a[n].tobytes() == b[n].tobytes() for n in a)


@every_backend
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_short_forms_are_transforms_by_value_first(backend: str, optimizer: str) -> None:
    value, norm = ({"name": f"clip_{n}", "bound": b} for n, b in (("value", 0.05), ("norm", 0.1)))
    short = fitted(trainer(backend, optimizer=optimizer, clip_norm=0.1, clip_value=0.05))
    listed = fitted(trainer(backend, optimizer=optimizer, transforms=[value, norm]))
    assert equal(short, listed)
    before = fitted(trainer(backend, optimizer=optimizer, clip_value=0.05, transforms=[norm]))
    assert equal(short, before)
    turned = fitted(trainer(backend, optimizer=optimizer, transforms=[norm, value]))
    assert not equal(short, turned)


def test_a_name_a_table_and_an_object_alone_are_a_list_of_one() -> None:
    made = plugins().component("transforms", {"name": "noise", "eta": 0.5})
    for given in ({"name": "noise", "eta": 0.5}, made, [made], ({"name": "noise", "eta": 0.5},)):
        terms = internals_of(trainer("fused", transforms=given)).problem.updating.transforms
        assert [term.transform for term in terms] == [made]


def test_describe_names_them_in_order_with_their_parameters() -> None:
    made = trainer("fused", clip_norm=2, transforms=["centralize", {"name": "noise", "eta": 0.5}])
    text = "clip_norm (bound 2.0), then centralize, then noise (eta 0.5, gamma 0.55)"
    assert made.describe().endswith(f"; transforms of gradients: {text}")
    assert "gradients" not in trainer("fused").describe()
    assert ("transforms", "clip_norm, centralize, noise") in made.summary().facts.items()


def test_another_value_needs_no_new_graph() -> None:
    graphs = [
        fitted(trainer("fused", clip_value=bound, transforms=[{"name": "noise", "eta": eta}]))
        for bound, eta in ((0.1, 0.01), (0.2, 0.5))
    ]
    first, second = ({n: p.key for n, p in made.engine.programs().items()} for made in graphs)
    assert first == second


def test_a_recipe_has_them_as_tables(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **dict(zip("Xy", regression(rows=16, features=6), strict=True)))
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nloss = "squared_error"\nclip_value = 0.5\n'
        '[[transforms]]\nname = "centralize"\n[[transforms]]\nname = "noise"\neta = 0.25\n'
    )
    recipe = Recipe.load(tmp_path / "train.toml", plugins=plugins())
    spelled = recipe.resolved(plugins())
    noise = {"name": "noise", "eta": 0.25, "gamma": 0.55}
    assert spelled.transforms == ({"name": "centralize"}, noise)
    (tmp_path / "again.toml").write_text(spelled.to_toml(tmp_path))
    assert Recipe.load(tmp_path / "again.toml", plugins=plugins()) == spelled
    with pytest.raises(ConfigError, match=r"transforms\[1\].et: unknown parameter; did you mean"):
        Recipe.load(tmp_path / "train.toml", ['transforms=["noise", {name="noise", et=1}]'])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["nois"], r"transforms\[0\]: unknown transform 'nois'; did you mean 'noise'"),
        ([{"name": "noise", "eta": -1}], r"transforms\[0\].eta: must be a number >= 0, got -1"),
        ([{"name": "clip_norm", "bound": 0}], r"transforms\[0\].bound: must be a number > 0"),
        (["noise", 3], r"transforms\[1\]: expected a name, a mapping with the key 'name', or an"),
        (7, r"transforms\[0\]: expected a name"),
    ],
)
def test_mistakes_are_named(given: Any, text: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=text):
        trainer("fused", transforms=given)


def test_training_session_says_which_it_cannot() -> None:
    made = make(models.mlp(), backend="training_session", optimizer="sgd", transforms=["noise"])
    with pytest.raises(Unsupported, match="updates the weights itself and has no noise"):
        made.fit(*regression(features=6))


@attrs.frozen(kw_only=True)
class Own(Transform):
    """``g ← sign(g)·bound``: neither linear nor aware of a scale."""

    name: ClassVar[str] = "own"
    bound: float = hyper(default=0.5)

    def apply(self, op: Any, gradients: Any, context: Any) -> Any:
        return {n: self.bound * op.Sign(g) for n, g in gradients.items()}


@every_backend
def test_a_transform_sees_gradients_without_the_rate(backend: str) -> None:
    x, y = regression(rows=8, features=6)
    made = trainer(backend, optimizer="sgd", transforms=[Own()])
    made.step((x, y))
    start = models.weights_of(models.mlp())
    for name, after in made.get_state().items():
        np.testing.assert_allclose(np.abs(after - start[name]), 0.05 * 0.5, rtol=1e-4)


@every_backend
def test_it_sees_the_sum_of_all_batches_and_the_penalty(backend: str) -> None:
    seen = {"transforms": [Own()], "optimizer": "sgd", "penalty": {"name": "l2", "l2": 0.1}}
    if backend == "example_numpy":
        pytest.skip("it does not accumulate")
    whole = trainer(backend, batch_size=16, **seen)
    parts = trainer(backend, batch_size=8, accumulate=2, **seen)
    alone = trainer(backend, batch_size=16, **seen | {"penalty": None})
    for made in (whole, parts, alone):
        fitted(made, 32)
    same(parts.get_state(), whole.get_state(), 1e-6)
    assert not equal(alone, whole)


@every_backend
def test_what_is_trained_later_is_not_among_the_gradients(backend: str) -> None:
    """The norm of all is the norm of those that are trained in the epoch."""
    groups = [{"params": "W1", "start_epoch": 1}]
    late = fitted(trainer(backend, groups=groups, clip_norm=0.05, epochs=1))
    never = fitted(trainer(backend, params=["*", "!W1"], clip_norm=0.05, epochs=1))
    same({n: a for n, a in late.get_state().items() if n != "W1"}, never.get_state(), 1e-6)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nothing": (lambda op, g: None, "returns None from apply, expected a mapping with a gradient"),
    "a tensor": (lambda op, g: g["W1"], "returns a tensor of .* expected a mapping"),
    "other names": (lambda op, g: {"w": g["W1"]}, "returns gradients for 'w' from apply, expected"),
    "another shape": (
        lambda op, g: {n: op.ReduceSum(t, keepdims=0) for n, t in g.items()},
        "returns a tensor of shape .* from apply, expected gradients with their types and shapes",
    ),
    "arrays": (
        lambda op, g: {n: np.zeros(t.shape) for n, t in g.items()},
        "returns a numpy array of shape .* from apply",
    ),
    "an error": (lambda op, g: 1 / 0, "fails in apply: ZeroDivisionError"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_a_formula_gives_wrongly_is_said_with_its_name(how: str) -> None:
    formula, text = WRONG[how]

    @attrs.frozen(kw_only=True)
    class Wrong(Transform):
        """Wrong."""

        name: ClassVar[str] = "wrong"

        def apply(self, op: Any, gradients: Any, context: Any) -> Any:
            return formula(op, gradients)

    with pytest.raises((BrokenPlugin, Unsupported), match=f"the transform .*Wrong {text}"):
        fitted(trainer("fused", transforms=[Wrong()]))


AXES = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N, 4] x, float[N, 2, 5, 5] i, float[7, N, 4] s, int64[N] k) => (
        float[N, 4] y, float[N, 3, 3, 3] c, float[N, 3, 7, 7] d, float[7, 1, N, 3] r, float[N, 6] e)
    <float[4, 3] plain, float[3, 3] left, float[4, 3] turned, float[4, 3] transposed,
     float[2, 3, 4] stack, float[3, 2, 3, 3] kernel, float[2, 3, 3, 3] back, float[1, 12, 4] w,
     float[1, 12, 3] h, float[9, 6] table, float[4] bias, float[4, 4] both>
    {
        a = MatMul(x, plain)
        b = Gemm<transB=1>(a, turned, bias)
        t = Transpose<perm=[1, 0]>(transposed)
        u = Gemm(a, t)
        v = MatMul(x, both)
        f = MatMul(v, both)
        bt = Transpose<perm=[1, 0]>(both)
        q = MatMul(f, bt)
        p = Transpose<perm=[1, 0]>(a)
        l = MatMul(left, p)
        z = MatMul(a, stack)
        y = Add(b, q)
        c = Conv(i, kernel)
        d = ConvTranspose(i, back)
        r, rh, rc = LSTM<hidden_size=3>(s, w, h)
        e = Gather(table, k)
    }
"""


def test_axes_of_outputs_come_from_the_graph() -> None:
    proto = onnx.parser.parse_model(AXES)
    for info in proto.graph.value_info:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        zeros = np.zeros(shape, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(zeros, info.name))
    del proto.graph.value_info[:]
    source = Model(proto)
    one_axis = {"plain": 1, "turned": 0, "transposed": 0, "left": 0, "kernel": 0, "back": 1}
    several = {"stack": (0, 2), "w": (0, 1), "h": (0, 1)}
    wanted = {name: (axis,) for name, axis in one_axis.items()} | several
    assert output_axes(source, source.initializers) == wanted


@every_backend
def test_centralize_is_that_of_its_paper_on_a_convolutional_network(backend: str) -> None:
    """With torch in float64, where the outputs of every layer are the first axis."""
    if backend == "training_session":
        pytest.skip("TrainingSession updates the weights itself")
    torch = pytest.importorskip("torch")
    proto = models.conv_net()
    rng = np.random.default_rng(2)
    x = rng.standard_normal((8, 1, 6, 6)).astype(np.float32)
    probe = make(proto, backend="fused", loss="softmax_cross_entropy", optimizer="sgd")
    y = rng.integers(0, 4, 8)
    options: dict[str, Any] = {"loss": "softmax_cross_entropy", "optimizer": "sgd"}
    options |= {"learning_rate": 1.0, "backend": backend}
    start = {n: a.astype(np.float64) for n, a in probe.get_state().items()}
    plain, made = (make(proto, transforms=t, **options) for t in ((), ("centralize",)))
    for each in (plain, made):
        each.step((x, y))
    axes = internals_of(made).problem.output_axes
    assert len(axes) >= 2
    for name, array in plain.get_state().items():
        gradient = torch.tensor(start[name] - array)
        if name in axes:
            (axis,) = axes[name]
            first = gradient.movedim(axis, 0)
            centered = first - first.mean(dim=tuple(range(1, first.dim())), keepdim=True)
            gradient = centered.movedim(0, axis)
        got = start[name] - made.get_state()[name]
        np.testing.assert_allclose(got, gradient.numpy(), atol=2e-5, err_msg=name)


def drawn(backend: str, steps: int = 3, **options: Any) -> dict[str, Any]:
    """The noise of each step of a network whose gradients are 0."""
    rate = {"optimizer": "sgd", "learning_rate": 1.0, "batch_size": 2, "seed": 5} | options
    made = trainer(backend, transforms=[{"name": "noise", "eta": 0.5, "gamma": 1.0}], **rate)
    zero = {n: np.zeros_like(a) for n, a in made.get_state().items()}
    out: dict[str, list[Any]] = {n: [] for n in zero}
    made.step((np.zeros((2, 6), np.float32), np.zeros((2, 1), np.float32)))
    for _ in range(steps):
        made.set_state(zero)
        made.step((np.zeros((2, 6), np.float32), np.zeros((2, 1), np.float32)))
        for name, array in made.get_state().items():
            out[name].append(array)
    return out


@every_backend
def test_noise_is_a_function_of_seed_parameter_and_step(backend: str) -> None:
    """With numpy's bits, rounded to float32, in its first step: nothing of a backend is in them."""
    for name, arrays in drawn(backend).items():
        for step, array in enumerate(arrays, start=2):
            noise = normal(5, name, step, array.shape)
            wanted = -np.sqrt(0.5 / step) * noise
            np.testing.assert_allclose(array, wanted, rtol=1e-6, err_msg=f"{name} in step {step}")
            if step == 2:
                exact = -(np.float32(np.sqrt(0.5 / 2)) * noise.astype(np.float32))
                assert array.tobytes() == exact.astype(np.float32).tobytes(), name


def test_noise_is_normal_and_independent_of_steps_names_and_seeds() -> None:
    stats = pytest.importorskip("scipy.stats")
    of = ((0, "w", 1), (0, "w", 2), (0, "v", 1), (1, "w", 1))
    draws = [normal(seed, name, step, (20000,)) for seed, name, step in of]
    for draw in draws:
        assert stats.kstest(draw, "norm").pvalue > 1e-3
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 0.03
    neighbors = np.corrcoef(draws[0][:-1], draws[0][1:])[0, 1]
    assert abs(neighbors) < 0.03


def test_noise_is_the_same_however_many_steps_a_run_has() -> None:
    backends = ({"name": "fused", "steps_per_run": k} for k in (1, 4))
    one, many = (fitted(trainer(b, transforms=["noise"], optimizer="adam")) for b in backends)
    assert equal(one, many)


LISTED = ["centralize", {"name": "noise", "eta": 0.05}, {"name": "clip_norm", "bound": 0.5}]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"transforms": []}, "transforms: was .*centralize.*, is"),
        ({"transforms": LISTED[:2]}, "transforms: was"),
        ({"transforms": LISTED[::-1]}, "transforms: was"),
        ({"transforms": LISTED, "clip_value": 0.1}, "clip_value: was None, is 0.1"),
    ],
)
def test_a_resume_with_other_transforms_is_refused_with_the_difference(
    other: dict[str, Any], text: str, tmp_path: Path
) -> None:
    half = fitted(trainer("fused", epochs=1, transforms=LISTED))
    half.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=text):
        trainer("fused", epochs=2, **other).restore(tmp_path / "c")


def test_pictures_have_transforms_as_a_part_of_the_step() -> None:
    for transforms in (["centralize"], []):
        made = fitted(trainer("fused", transforms=transforms))
        parts = set(step_of(internals_of(made).problem, 8).parts.values())
        assert ("transform" in parts) == bool(transforms)


@every_backend
@pytest.mark.parametrize(
    ("optimizer", "bound"), [("adafactor", 0.05), ("adafactor", 0.7), ("adam", 0.1), ("lion", 0.3)]
)
def test_equal_gradients_are_centralized_to_exactly_zero(
    bound: float, optimizer: str, backend: str
) -> None:
    """The class: a difference of equal numbers that is only rounding, which an optimizer makes large.

    clip_value makes all gradients of an output equal. In float64 their distance to the mean is below
    1e-16 of the bound, and adafactor divides by at least eps1 = 1e-7; in float32 it was 1e-7 of the bound.
    """
    rng = np.random.default_rng(0)
    model = models.of_text("(float[N, 7] X) => (float[N, 3] Y) { Y = MatMul(X, W) }", {"W": (7, 3)})
    options: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.01, "clip_value": bound}
    made = make(model, backend=backend, transforms=["centralize"], **options)
    before = made.get_state()["W"].astype(np.float64)
    x = rng.uniform(1, 2, (8, 7)).astype(np.float32)
    for _ in range(3):
        try:
            made.step((x, np.full((8, 3), 100, np.float32)))
        except Unsupported as error:
            pytest.skip(str(error))
    gradient = np.full((7, 3), -bound)
    centralized = gradient - gradient.mean(axis=0)
    assert np.abs(centralized / 1e-7).max() < 1e-8
    np.testing.assert_array_equal(made.get_state()["W"], before)

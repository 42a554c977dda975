"""Mistakes of callers: errors say which argument or part is meant, and tracebacks are short."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import ortflex
from ortflex import OnnxFunction, Recipe, Trainer, check_model, compare
from ortflex_core import (
    HOOKS,
    TABLES,
    Batches,
    BrokenPlugin,
    Component,
    DataError,
    OrtflexError,
    apply_state,
    hook,
    suggest,
)
from ortflex_core.kernel.errors import ArgumentError
from ortflex_core.kernel.signatures import explained
from tests import models
from tests.training import make, plugins, regression, same

X, Y = regression()


def raised(call: Callable[[], Any]) -> ArgumentError:
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, ArgumentError)
    return caught.value


LOSS = {"loss": "squared_error"}
# What is called, the arguments after a model or of a method, and what the error says.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("Trainer", (), {**LOSS, "lr": 0.1}, "has no argument 'lr'; did you mean 'learning_rate'?"),
    ("Trainer", (), {**LOSS, "epoch": 3}, "has no argument 'epoch'; did you mean 'epochs'?"),
    ("Trainer", (), {"criterion": "mse"}, "'criterion'; did you mean 'loss'?"),
    ("Trainer", (), {"criterion": "mse", "num_epochs": 3}, "'num_epochs'; did you mean 'epochs'?"),
    ("Trainer", (), {"criterion": "mse"}, "'loss' is missing"),
    ("Trainer", ("squared_error",), {}, "takes model by position, and got 2 values; by name it"),
    (
        "Trainer.fit",
        (X, Y),
        {"epochs": 5},
        "has no argument 'epochs'; it is an argument of Trainer: Trainer(…, epochs=…)",
    ),
    ("Trainer.fit", (X, Y), {"lr": 0.1}, "an argument of Trainer: Trainer(…, learning_rate=…)"),
    ("Trainer.fit", (X, Y), {"sample_weights": Y}, "did you mean 'sample_weight'?"),
    ("Trainer.fit", (X, Y), {"X": X}, ": 'X' is given twice, by position and by name"),
    ("Trainer.fit", (), {}, ": the argument 'X' is missing, as in Trainer.fit(…, X=…)"),
    ("Trainer.step", (X, Y), {}, "takes batch by position, and got 2 values;"),
    ("Trainer.step", (X, Y), {}, "one: Trainer.step((…, …))"),
    ("Trainer.step", (), {"X": X, "y": Y}, "one argument: (X, y) or (X, y, sample_weight)\n"),
    ("Trainer.calibrate", (X, Y), {}, "takes X by position, and got 2 values; by name it takes n"),
    ("gradient_model", (), {"wrt": ["x"], "output": "y"}, "'output'; did you mean 'outputs'?"),
    ("OnnxFunction", (), {"param": ["W"]}, "has no argument 'param'; did you mean 'params'?"),
]


@pytest.mark.parametrize(("name", "given", "named", "expected"), CALLS)
def test_the_error_says_which_argument_is_meant(
    name: str, given: Any, named: dict[str, Any], expected: str
) -> None:
    cls, _, method = name.partition(".")
    called = getattr(make(models.linear()), method) if method else getattr(ortflex, cls)
    arguments = given if method else (models.linear(), *given)
    error = raised(lambda: called(*arguments, **named))
    assert str(error).startswith(name)
    assert expected in str(error)
    frames = {f.name for f in traceback.extract_tb(error.__traceback__)}
    assert frames <= {"raised", "<lambda>"}
    assert error.__suppress_context__


def component_classes() -> list[Any]:
    return [
        pytest.param(cls, id=f"{registry.kind}/{cls.__name__}")
        for registry in plugins()
        if registry.kind != HOOKS and registry.kind not in TABLES
        for _, cls in registry.classes()
        if isinstance(cls, type) and issubclass(cls, Component)
    ]


@pytest.mark.parametrize("cls", component_classes())
def test_a_wrong_parameter_of_every_component_is_explained(cls: Any) -> None:
    fields = [f.alias or f.name for f in attrs.fields(cls) if f.init]
    error = raised(lambda: cls(no_such_thing_=1))
    assert f"{cls.__name__} has no argument 'no_such_thing_'" in str(error)
    for name in fields:
        text = str(raised(lambda n=name: cls(**{f"{n}_": 1})))
        assert "did you mean" in text
        assert repr(name) in text
    assert "by position" in str(raised(lambda: cls(*range(20))))
    assert list(inspect.signature(cls).parameters) == fields


def test_the_learning_rate_of_an_optimizer_is_an_argument_of_the_trainer() -> None:
    from ortflex_plugins.optimizers.adam import Adam

    for name in ("lr", "learning_rate"):
        error = raised(lambda n=name: Adam(**{n: 0.1}))
        assert "an argument of Trainer and a key of recipes: learning_rate=…" in str(error)
    made = Adam(beta1=0.8)
    assert pickle.loads(pickle.dumps(made)) == made == attrs.evolve(Adam(), beta1=0.8)


def test_a_component_of_a_user_is_explained() -> None:
    from ortflex_core import Loss

    @attrs.frozen(kw_only=True)
    class Cubic(Loss):
        name = "cubic"
        factor: float = 1.0

        def per_sample(self, trace: Any, predicted: Any, expected: Any) -> Any:
            raise NotImplementedError

    error = raised(lambda: Cubic(facter=2.0))  # type: ignore[call-arg]
    assert "Cubic has no argument 'facter'; did you mean 'factor'?" in str(error)


def test_estimators_name_their_own_arguments() -> None:
    pytest.importorskip("sklearn")
    meanings = {"epochs": "max_iter", "lr": "learning_rate", "hidden_layers": "hidden"}
    for given, meant in meanings.items():
        error = raised(lambda g=given: ortflex.OrtRegressor(**{g: 3}))
        assert f"OrtRegressor has no argument {given!r}; did you mean '{meant}" in str(error)


def test_a_layer_of_torch_has_short_tracebacks() -> None:
    torch = pytest.importorskip("torch")
    error = raised(lambda: ortflex.OrtLayer(models.linear(), param=["W"]))
    assert "did you mean 'params'?" in str(error)
    layer = ortflex.OrtLayer(models.linear())
    x = torch.zeros(3, X.shape[1])

    def second() -> None:
        loss = layer(x.requires_grad_()).sum()
        torch.autograd.grad(loss, x, create_graph=True)

    mistakes: list[Callable[[], Any]] = [
        lambda: ortflex.OrtLayer("no_such_file.onnx"),
        lambda: ortflex.OrtLayer(models.linear(), engine="no_such"),
        lambda: layer(X),
        lambda: layer(x, x),
        lambda: layer(x[:, :2]),
        second,
    ]
    for mistake in mistakes:
        with pytest.raises(OrtflexError) as caught:
            mistake()
        names = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
        assert not [n for n in names if "ortflex_" in n], names
        assert len(names) <= 6


def test_a_type_error_of_the_code_itself_stays() -> None:
    def broken(size: int) -> Any:
        return np.zeros(size) + "a"

    def calls_wrongly(size: int) -> Any:
        return broken(size, 2)  # type: ignore[call-arg]

    for function in (broken, calls_wrongly):
        with pytest.raises(TypeError) as caught:
            explained(function)(3)
        assert not isinstance(caught.value, ArgumentError)


@pytest.mark.parametrize("count", [1, 5, 50, 500])
def test_a_near_name_comes_without_a_long_list(count: int) -> None:
    names = [f"tensor_{k}" for k in range(count)]
    near = suggest("tensr_0", names, listing="`ortflex check` lists all")
    assert "did you mean 'tensor_0'" in near
    assert len(near) < 120
    assert ("lists all" in near) == (count > 5)
    far = suggest("qqqqqq", names)
    assert "did you mean" not in far
    assert far.count("tensor_") <= 40


def test_every_message_about_a_name_is_short() -> None:
    with pytest.raises(OrtflexError) as caught:
        make(models.linear(), loss="squard_error", optimizer="addam")
    for line in str(caught.value).splitlines():
        assert len(line) < 120
    assert "`ortflex plugins losses` lists all" in str(caught.value)


# Tracebacks ---------------------------------------------------------------------------------------


def caught(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException) -> list[str]:
    """The functions in a traceback, after the two of this module that every error passes."""
    names = [f.name for f in traceback.extract_tb(error.__traceback__)]
    return names[names.index("caught") + 2 :]


def text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


MISTAKES: dict[str, Callable[[], Any]] = {
    "an unknown loss": lambda: Trainer(models.linear(), loss="squard_error"),
    "several wrong arguments": lambda: make(models.linear(), optimizer="addam", device="gpu"),
    "labels of strings": lambda: make(models.linear()).fit(X, np.array(["a"] * len(X))),
    "a wrong number of columns": lambda: make(models.linear()).fit(X[:, :3], Y),
    "no labels": lambda: make(models.linear()).fit(X),
    "prediction on a wrong shape": lambda: make(models.linear()).predict(X[:, :3]),
    "a weight of another shape": lambda: make(models.linear()).set_state({"W": np.zeros(3)}),
    "a loss that diverges": lambda: make(models.linear(), learning_rate=1e20).fit(X, Y),
    "an engine before there is one": lambda: make(models.linear()).save_onnx_graph(),
    "a model that does not exist": lambda: check_model("no_such_file.onnx"),
    "a checkpoint that does not exist": lambda: Trainer.resume("no_such_folder"),
    "a recipe that does not exist": lambda: Recipe.load("no_such_file.toml"),
    "a comparison of nothing": lambda: compare(make(models.linear()), X, Y, backends=["no_such"]),
    "a state that does not exist": lambda: apply_state("no.onnx", "no.safetensors"),
    "a gradient by nothing": lambda: ortflex.gradient_model(models.linear(), wrt=["no_such"]),
    "parameters that are not there": lambda: OnnxFunction(models.linear(), params=["no_such"]),
    "a function of a wrong shape": lambda: OnnxFunction(models.linear()).forward(X[:, :2]),
    "a function of another input": lambda: OnnxFunction(models.linear()).forward({"no_such": X}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_no_frame_of_ours(mistake: str) -> None:
    error = caught(MISTAKES[mistake])
    assert isinstance(error, OrtflexError)
    assert frames(error) in ([], ["make"])
    assert "During handling" not in text(error)
    assert "direct cause" not in text(error)


def test_estimators_have_short_tracebacks() -> None:
    pytest.importorskip("sklearn")
    from ortflex import OrtClassifier, OrtRegressor

    for estimator in (OrtRegressor(optimizer="addam"), OrtClassifier(loss="hing")):
        error = caught(lambda e=estimator: e.fit(X, (Y[:, 0] > 0).astype(int)))
        assert isinstance(error, ValueError)
        assert frames(error) == []


def test_frames_of_the_users_callback_stay() -> None:
    class Changes:
        @hook
        def steps_end(self, trainer: Any) -> None:
            trainer.set_state({})

    error = caught(lambda: make(models.linear(), callbacks=[Changes()]).fit(X, Y))
    assert frames(error) == ["steps_end"]


def test_exceptions_of_the_user_stay() -> None:
    """One that is the cause, and one that is handled where ours is raised."""

    def read() -> Any:
        raise KeyError("no such column")
        yield X, Y

    error = caught(lambda: make(models.linear()).fit(Batches(read)))
    assert "no such column" in text(error)
    assert "read" in text(error)

    def handle() -> None:
        try:
            int("x")
        except ValueError:
            make(models.linear()).fit(X)

    assert "invalid literal for int()" in text(caught(handle))


def test_a_bug_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_core.training import fit

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(fit, "train", broken)
    whole = ["short", "fit", "fit", "_fit", "broken"]
    assert frames(caught(lambda: make(models.linear()).fit(X, Y))) == whole


def test_a_broken_plugin_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_plugins.schedules.decay import Constant

    def rate(*_: Any) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Constant, "rate", rate)
    error = caught(lambda: make(models.linear()).fit(X, Y))
    assert isinstance(error, BrokenPlugin)
    assert len(frames(error)) > 3
    assert "ZeroDivisionError" in text(error)


@pytest.mark.parametrize("how", ["environment", "logging"])
def test_whole_tracebacks_on_request(how: str, monkeypatch: Any, caplog: Any) -> None:
    if how == "environment":
        monkeypatch.setenv("ORTFLEX_DEBUG", "1")
    else:
        caplog.set_level(logging.DEBUG, "ortflex")
    assert len(frames(caught(MISTAKES["a wrong number of columns"]))) > 4
    assert "direct cause" in text(caught(MISTAKES["a model that does not exist"]))


def test_public_functions_keep_their_signatures_and_documentation() -> None:
    assert "learning_rate" in inspect.signature(Trainer).parameters
    assert list(inspect.signature(Trainer.fit).parameters)[:3] == ["self", "X", "y"]
    assert (Trainer.fit.__doc__ or "").startswith("Train on arrays")
    assert next(iter(inspect.signature(Trainer.resume).parameters)) == "folder"


def test_warnings_point_at_the_caller() -> None:
    sklearn = pytest.importorskip("sklearn.exceptions")
    from ortflex import OrtRegressor

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        OrtRegressor(max_iter=11, tol=0.0, learning_rate=1e-4).fit(X, Y[:, 0])
    [warning] = [w for w in seen if w.category is sklearn.ConvergenceWarning]
    assert Path(warning.filename) == Path(__file__)


# Rows and batches of three parts ------------------------------------------------------------------


# The third part is sample_weight, as in Keras; datasets of torch may differ. Only its place makes a part a
# weight, so a run says how it is read, and an error about labels or weights says it, too.
rng = np.random.default_rng(0)
INPUTS = rng.standard_normal((12, 5)).astype(np.float32)
LABELS = INPUTS[:, :1] * 2
THREE = re.compile(r"parts of a row or batch are read as \(X, y, sample_weight\)")
LINE = "is its sample_weight"


class Rows:
    """A dataset of rows, as torch has them."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(part[row] for part in self.parts)


FORMS: dict[str, Callable[..., Any]] = {
    "rows": Rows,
    "batches": lambda *parts: [parts, parts],
    "a generator": lambda *parts: (parts for _ in range(2)),
    "a buffer": lambda *parts: Batches([parts, parts], buffer=8),
}
READERS: dict[str, Callable[[Trainer, Any], Any]] = {
    "fit": Trainer.fit,
    "evaluate": Trainer.evaluate,
    "find_rate": lambda t, data: t.find_rate(data, steps=3),
}
WRONG = {
    "two inputs": (INPUTS, INPUTS, LABELS),
    "no weights": (INPUTS, LABELS, -np.abs(LABELS)),
    "a word": (INPUTS, LABELS, LABELS.astype(str)),
    "fewer": (INPUTS, LABELS, LABELS[:5]),
    "labels that do not fit": (INPUTS, LABELS[:, :, None], LABELS),
}


def made(**arguments: Any) -> Trainer:
    given = {"epochs": 1, "progress": None, "receipt": False, "batch_size": 6, **arguments}
    return Trainer(models.linear(), loss="squared_error", **given)


@pytest.mark.parametrize("call", READERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WRONG)
def test_an_error_about_labels_or_weights_says_how_three_parts_are_read(
    case: str, form: str, call: str
) -> None:
    if case == "fewer" and form == "rows":
        pytest.skip("each row has all parts")
    with pytest.raises(DataError) as error:
        READERS[call](made(), FORMS[form](*WRONG[case]))
    assert len(THREE.findall(str(error.value))) == 1
    with pytest.raises(DataError, match=THREE):
        made().step(WRONG[case])


@pytest.mark.parametrize("form", FORMS)
def test_a_run_says_that_the_third_part_is_a_weight(form: str, capsys: Any) -> None:
    weights = np.arange(12, dtype=np.float32)
    made().fit(FORMS[form](INPUTS, LABELS, weights))
    assert capsys.readouterr().err.count(LINE) == 1


@pytest.mark.parametrize("form", FORMS)
def test_two_parts_and_named_ones_need_no_line(form: str, capsys: Any) -> None:
    weights = np.ones(12, np.float32)
    made().fit(FORMS[form](INPUTS, LABELS))
    made().fit(INPUTS, LABELS, weights)
    made().fit([{"X": INPUTS, "y": LABELS, "sample_weight": weights}])
    assert LINE not in capsys.readouterr().err
    for call in (
        lambda: made().fit(INPUTS, INPUTS),
        lambda: made().fit(FORMS[form](INPUTS, INPUTS)),
    ):
        with pytest.raises(DataError) as error:
            call()
        assert not THREE.search(str(error.value))
    with pytest.raises(DataError) as error:  # not about labels or weights
        made().fit(FORMS[form](INPUTS[:, :4], LABELS, weights))
    assert not THREE.search(str(error.value))


def test_the_weights_are_those_of_the_rows() -> None:
    """The same training as with the argument, to the bit."""
    weights = np.linspace(0, 2, 12, dtype=np.float32)
    one, other = made(seed=3), made(seed=3)
    one.fit(Rows(INPUTS, LABELS, weights))
    other.fit(INPUTS, LABELS, weights)
    same(one.get_state(), other.get_state(), 0)

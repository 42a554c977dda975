"""Calls with wrong arguments: the error has the nearest argument, for every class that users call."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

import ortflex
from ortflex_core import HOOKS, TABLES, Component, OrtflexError, suggest
from ortflex_core.kernel.errors import ArgumentError
from ortflex_core.kernel.signatures import explained
from tests import models
from tests.training import make, plugins, regression

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
    """Every component that is installed."""
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


def test_functions_of_arrays_have_short_tracebacks() -> None:
    function = ortflex.OnnxFunction(models.linear())
    for mistake in (
        lambda: ortflex.gradient_model(models.linear(), wrt=["no_such"]),
        lambda: ortflex.OnnxFunction(models.linear(), params=["no_such"]),
        lambda: function.forward(X[:, :2]),
        lambda: function.forward({"no_such": X}),
    ):
        with pytest.raises(OrtflexError) as caught:
            mistake()
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 2


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

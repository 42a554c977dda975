"""Hooks: when each is called, with what, and what its answer does."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import ortflex_core
from ortflex_core import (
    Callback,
    ConfigError,
    Entry,
    HookManager,
    Hooks,
    OrtflexError,
    Plugins,
    Program,
    Progress,
    hook,
    internals_of,
)
from ortflex_core.kernel import hooks
from tests import models
from tests.training import EndAt, Recorder, every_backend, make, regression

HOOKS = [n for n in dir(Hooks) if not n.startswith("_")]


def trained(*callbacks: Any, **options: Any) -> Any:
    x, y = regression(rows=25)
    options = {"epochs": 2, "batch_size": 10} | options
    trainer = make(models.linear(), callbacks=list(callbacks), **options)
    trainer.fit(x, y, validation_data=(x, y))
    return trainer


@every_backend
def test_hooks_are_called_in_order(backend: str) -> None:
    recorder = Recorder()
    trained(recorder, backend=backend)
    epoch = ["epoch_start", *["step_end"] * 3, "validation_end", "epoch_end"]
    names = [n for n in recorder.names() if n != "graph_built"]
    assert names == ["train_start", *epoch, *epoch, "train_end"]
    first = recorder.names().index("train_start")
    assert "graph_built" in recorder.names()[:first]


@every_backend
def test_hooks_get_the_arguments_that_they_name(backend: str) -> None:
    recorder = Recorder()
    trainer = trained(recorder, backend=backend, learning_rate=0.05)
    assert all(values["trainer"] is trainer for _, values in recorder.calls)
    for built in recorder.all("graph_built"):
        assert isinstance(built["program"], Program | bytes)
        assert isinstance(built["name"], str)
    total = {"epochs": 2, "steps_per_epoch": 3, "rows_per_epoch": 25}
    assert recorder.all("train_start")[0]["progress"] == Progress(**total)
    starts = [c["progress"] for c in recorder.all("epoch_start")]
    assert starts == [Progress(**total), Progress(step=3, epoch=1, rows=25, **total)]
    steps = recorder.all("step_end")
    assert [s["progress"].step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert [s["progress"].rows for s in steps] == [10, 20, 25, 35, 45, 50]
    assert {s["rate"] for s in steps} == {0.05}
    ends = recorder.all("epoch_end")
    assert [e["progress"].epoch for e in ends] == [1, 2]
    for end, scores in zip(ends, recorder.all("validation_end"), strict=True):
        assert end["record"]["validation_loss"] == scores["scores"]["loss"]
    # The seconds of an epoch include its callbacks, so they are known after the hook.
    for record, end in zip(trainer.history_, ends, strict=True):
        assert dict(record) | {"seconds": 0.0} == end["record"] | {"seconds": 0.0}
    assert recorder.all("train_end")[0]["progress"].step == 6
    np.testing.assert_allclose(
        trainer.history_["loss"][0],
        np.average([s["loss"] for s in steps[:3]], weights=[10, 10, 5]),
        rtol=1e-9,
    )


@pytest.mark.parametrize(("at", "steps"), [(1, 1), (2, 2), (5, 5), (99, 6)])
def test_a_step_hook_that_says_true_ends_the_training(at: int, steps: int) -> None:
    def step_end(progress: Progress) -> bool:
        return progress.step >= at

    recorder = Recorder()
    trained(step_end, recorder)
    assert len(recorder.all("step_end")) == steps
    assert recorder.names()[-1] == "train_end"


def test_an_epoch_hook_that_says_true_ends_the_training() -> None:
    def epoch_end(record: Any) -> Any:
        return record["epoch"] == 2 or None

    assert len(trained(epoch_end, epochs=10).history_) == 2


class Nothing: ...


class OtherHook:
    @hook
    def epoch_ends(self) -> None: ...


class OtherArgument:
    @hook
    def epoch_end(self, recrod: Any) -> None: ...


def test_a_callback_by_name_and_mapping() -> None:
    recorder = Recorder()
    trained({"name": "example_stop", "steps": 4}, recorder)
    assert len(recorder.all("step_end")) == 4
    trained("example_stop")
    with pytest.raises(ConfigError, match=r"callbacks\[0\]\.stps: unknown parameter; did you mean"):
        trained({"name": "example_stop", "stps": 4})


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Nothing(), "callbacks.*Nothing.*no hook"),
        (OtherHook(), ".*".join(["epoch_ends.*the hooks are", *HOOKS])),
        (OtherArgument(), "recrod"),
    ],
)
def test_an_object_without_hooks_and_misspelt_hooks_are_errors(callback: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(models.linear(), callbacks=[callback])


@pytest.mark.parametrize("given", [Nothing(), "builtins:dict"])
def test_an_error_about_missing_hooks_names_a_public_decorator(given: Any) -> None:
    """A module of the core that moves must not be in the advice."""
    with pytest.raises(OrtflexError, match="has no hooks") as error:
        make(models.linear(), callbacks=[given])
    named = re.findall(r"\bortflex_core(?:\.\w+)+", str(error.value))
    assert named
    public = {f"ortflex_core.{n}" for names in ortflex_core.PUBLIC.values() for n in names.split()}
    assert set(named) <= public


def test_hooks_without_implementation_are_not_called() -> None:
    class One:
        @hook
        def epoch_end(self) -> None: ...

    # The fixture distribution has one hook of its own.
    for callbacks, names in (((), {"train_end"}), ((One(),), {"epoch_end", "train_end"})):
        assert set(HookManager(Plugins.discover(), callbacks).callables(None)) == names


def test_an_installed_plugin_with_bad_hooks_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Typo(OtherHook):
        @hook
        def epoch_end(self) -> None:
            raise AssertionError

    recorder = Recorder()
    monkeypatch.setattr(Entry, "load", lambda self: Typo())
    point = EntryPoint("hooks", "strange:hooks", "ortflex")
    strange = Entry("ortflex", "hooks", "strange:hooks", "strange", "1.0", point)
    manager = HookManager(Plugins([strange]), [recorder])
    assert manager.installed == []
    assert "the hooks of strange are skipped: " in caplog.text
    assert "epoch_ends" in caplog.text
    manager.callables(None)["epoch_end"](progress=Progress(), record={})
    assert recorder.names() == ["epoch_end"]


def test_installed_hook_plugins_are_active() -> None:
    from ortflex_example import log

    assert "ortflex-example" in internals_of(make(models.linear())).hooks.installed
    before = log.trainings["sgd"]
    trained()
    assert log.trainings["sgd"] == before + 1


def test_an_error_in_a_hook_is_passed_to_the_exception_hooks_and_raised() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError, match="mine"):
        trained(EndAt(2, ZeroDivisionError("mine")), recorder)
    assert recorder.names()[-2:] == ["exception", "train_end"]
    assert isinstance(recorder.all("exception")[0]["error"], ZeroDivisionError)


def test_every_hook_says_when_it_is_called() -> None:
    for name in HOOKS:
        assert (getattr(Hooks, name).__doc__ or "").strip().endswith("."), name
    assert hooks.PROJECT == "ortflex"


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_are_called_as_pluggy_calls_them(wrapped: bool) -> None:
    """The order, ``tryfirst``, ``trylast`` and answers that are None: the same as from pluggy itself."""
    calls: list[str] = []

    def answering(name: str, answer: Any, **options: bool) -> Any:
        class Callback:
            @hook(**options)
            def step_end(self, loss: float) -> Any:
                calls.append(f"{name} {loss}")
                return answer

        return Callback()

    class Around:
        @hook(wrapper=True)
        def step_end(self) -> Any:
            calls.append("around")
            answers = yield
            return [*answers, "around"]

    callbacks = [
        answering("a", None),
        answering("b", 0, trylast=True),
        answering("c", True, tryfirst=True),
        answering("d", False),
    ]
    manager = HookManager(Plugins(()), callbacks + [Around()] * wrapped)
    values = {"progress": Progress(), "loss": 1.0, "penalty": 0.0, "rate": 0.1}
    told = manager.callables("trainer")["step_end"]
    assert told.takes == {"loss"}
    ours = told(**values), calls.copy()
    calls.clear()
    theirs = manager._manager.hook.step_end(trainer="trainer", **values), calls
    assert ours == theirs
    assert ours[0] == [True, False, 0, *(["around"] * wrapped)]


def test_a_callback_that_was_refused_is_not_registered() -> None:
    """Its error is the same when it is given again, and another callback of the same name is taken."""
    manager = HookManager(Plugins(()), ())
    for plugin, reason in ((Nothing(), "has no hooks"), (OtherHook(), "unknown hook 'epoch_ends'")):
        for _ in range(2):
            with pytest.raises(ConfigError, match=reason):
                manager.register(plugin)
        assert not manager._manager.is_registered(plugin)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("further", [0, 1])
def test_an_error_names_the_callback_that_raised_it(wrapped: bool, further: int) -> None:
    """A wrapper is called by pluggy, which does not say whose an error is, unless it is alone."""

    class Plain:
        @hook
        def step_end(self) -> Any:
            raise ZeroDivisionError

    class Wrapping:
        @hook(wrapper=True)
        def step_end(self) -> Any:
            yield
            raise ZeroDivisionError

    broken = Wrapping() if wrapped else Plain()
    manager = HookManager(Plugins(()), [broken, *[Recorder()] * further])
    told = manager.callables("trainer")["step_end"]
    with pytest.raises(ZeroDivisionError) as error:
        told(progress=Progress(), loss=1.0, penalty=0.0, rate=0.1)
    notes = "\n".join(getattr(error.value, "__notes__", []))
    assert ("'step_end'" in notes and type(broken).__name__ in notes) == (
        not wrapped or not further
    )


def test_the_history_of_a_progress_ends_where_it_ended_when_the_hook_got_it() -> None:
    recorder = Recorder()
    trained(recorder, epochs=4)
    kept = [values["progress"].history for values in recorder.all("epoch_end")]
    losses = [record["loss"] for record in recorder.all("train_end")[0]["progress"].history]
    assert len(losses) == 4
    for k, history in enumerate(kept, 1):
        assert len(history) == k
        assert [record["loss"] for record in history] == losses[:k]
        assert history[-1]["loss"] == history[k - 1]["loss"] == losses[k - 1]
        assert [record["loss"] for record in history[-2:]] == losses[:k][-2:]
        with pytest.raises(IndexError):
            history[k]


def test_the_progress_is_that_of_the_step_for_whoever_asks() -> None:
    """A hook that does not take it finds it at the Trainer's loop, where checkpoints read it."""
    seen = []

    def step_end(trainer: Any) -> None:
        seen.append(internals_of(trainer).loop.progress)

    recorder = Recorder()
    trained(step_end, recorder)
    assert seen == [s["progress"] for s in recorder.all("step_end")]
    assert [p.step for p in seen] == [1, 2, 3, 4, 5, 6]


class Plain:
    """A callback of 0.2, which inherits from nothing."""

    @hook
    def epoch_end(self) -> None: ...


class Everywhere(Plain):
    every_rank = True


class Silent(Callback):
    prints_epochs = True

    @hook
    def epoch_end(self) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "flags"),
    [(Plain(), (False, False)), (Everywhere(), (True, False)), (Silent(), (False, True))],
)
def test_flags_of_callbacks_have_defaults_without_the_base_class(
    plugin: object, flags: tuple[bool, bool]
) -> None:
    assert (hooks.declares(plugin, "every_rank"), hooks.declares(plugin, "prints_epochs")) == flags
    assert isinstance(plugin, Callback)


def test_a_class_with_hooks_is_a_callback_but_not_one_of_another_class() -> None:
    assert issubclass(Silent, Callback)
    assert not isinstance(Plain(), Silent)
    assert not issubclass(type("Empty", (Callback,), {}), Callback)
    with pytest.raises(ConfigError, match="has no hooks"):
        make(models.linear(), callbacks=[type("Empty", (Callback,), {})()])

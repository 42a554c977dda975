"""The kit of callbacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import pytest

from ortflex_core import NAMES, ConfigError, History, Trainer, hook
from ortflex_core.kernel.construct import structure
from ortflex_core.testing import running
from ortflex_core.testing.component import ComponentKit
from ortflex_core.testing.running import close, require

EPOCHS = 4
Effect = Callable[[Any, Trainer, History], None]


class CallbackKit(ComponentKit):
    """Override ``component`` and ``effect``.

    ``effect(component, trainer, history)`` asserts what the callback has done in a run of up to four
    epochs of three steps each, with validation data; ``trainer.folder`` is where files go.
    """

    kind: ClassVar[str] = "callbacks"
    has_formula: ClassVar[bool] = False
    watches: ClassVar[bool] = True
    """False for a callback that changes the training: its length, or its weights."""

    @pytest.fixture
    def effect(self) -> Effect:
        """The assertion about the effect of the callback: override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture 'effect'")

    def test_is_frozen(self, component: Any) -> None:
        """A callback has a state, so its copies are tested: a copy of a new one is new, too."""
        equal = copy.deepcopy(component) == component
        require(equal, "a copy of a new callback is not equal to it")

    def test_bad_parameters_are_refused(self, component: Any) -> None:
        """An unknown parameter is an error that names it."""
        with pytest.raises(ConfigError, match="no_such_field"):
            structure(type(component), {"no_such_field": 1}, "callback", running.plugins())

    def test_hooks(self, component: Any) -> None:
        """It has at least one hook, and all hooks have known names and arguments."""
        marked = [n for n in dir(component) if hasattr(getattr(component, n), "ortflex_impl")]
        forgotten = [n for n in NAMES if callable(getattr(component, n, None)) and n not in marked]
        require(not forgotten, f"{', '.join(forgotten)}: the decorator @hook is missing")
        running.trainer(running.linear_model(), callbacks=[component])  # requests all of them

    def test_effect(self, component: Any, effect: Effect, tmp_path: Path) -> None:
        """A run has the effect of the callback, given as an object and as a table in a file."""
        trainer = make(component, tmp_path / "object")
        effect(component, trainer, fit(trainer))
        name = running.plugins()["callbacks"].name_of(component)
        if name is not None:
            table = {"name": name, **_parameters(component)}
            fresh = running.plugins().component("callbacks", table, "callbacks")
            trainer = make(fresh, tmp_path / "table")
            effect(fresh, trainer, fit(trainer))

    def test_a_second_training(self, component: Any, effect: Effect, tmp_path: Path) -> None:
        """A second run has the same result as the first."""
        first = make(component, tmp_path / "first")
        before = fit(first)
        again = make(component, tmp_path / "second")
        after = fit(again)
        effect(component, again, after)
        text = f"{after.losses} after another training, but {before.losses} before it"
        require(before.losses == after.losses, f"the same training has the losses {text}")

    def test_watching(self, component: Any, tmp_path: Path) -> None:
        """A callback that only watches changes neither losses nor weights."""
        if not self.watches:
            pytest.skip("the callback changes the training")

        def train(backend: str) -> None:
            runs = []
            for callbacks in ([], [copy.deepcopy(component)]):
                trainer = make(None, tmp_path / backend, backend=backend, callbacks=callbacks)
                runs.append((fit(trainer).losses, trainer.get_state()))
            require(runs[0][0] == runs[1][0], f"the losses change on {backend}: {runs}")
            running.same_bits(runs[0][1], runs[1][1], f"the weights on {backend}")

        running.on_every_backend(train, "the callback")

    def test_resume(self, component: Any, effect: Effect, tmp_path: Path) -> None:
        """A run resumed from a checkpoint ends like one without interruption, including the effect."""
        saver = _SaveOnce(tmp_path / "checkpoint", "epoch", 2)
        effect(*_check_resumed(component, saver, tmp_path / "whole"))

    def test_resume_in_mid_epoch(self, component: Any, tmp_path: Path) -> None:
        """The counters of a callback are in the checkpoint, also of a step that no small number divides."""
        saver = _SaveAtStep(tmp_path / "checkpoint", "step", 11)
        _check_resumed(component, saver, tmp_path / "whole", [attrs.evolve(saver)], rows=28)

    def test_steps_per_run(self, component: Any, tmp_path: Path) -> None:
        """The number of steps in a run of the backend does not change what the callback does."""
        if "fused" not in running.working_backends():
            pytest.skip("no backend here makes several steps at once")
        runs = []
        for count in ("auto", 1):
            backend = {"name": "fused", "steps_per_run": count}
            twin = copy.deepcopy(component)
            trainer = make(twin, tmp_path / str(count), backend=backend, epochs=3)
            runs.append((fit(trainer, rows=60), trainer.get_state()))
        (several, weights), (single, wanted) = runs
        what = "steps_per_run='auto' and steps_per_run=1"
        counts = len(several.losses), len(single.losses)
        require(counts[0] == counts[1], f"{what}: {counts[0]} and {counts[1]} epochs")
        for name, array in wanted.items():
            close(weights[name], array, 1e-4, f"{name} of {what}")


@attrs.define
class _SaveOnce:
    """Saves the training after a number of steps or epochs, the ``unit``."""

    place: Path
    unit: Literal["step", "epoch"]
    count: int
    saved: bool = False

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        """Write the checkpoint."""
        if getattr(progress, self.unit) == self.count and not self.saved:
            self.saved = True
            trainer.save(self.place)


class _SaveAtStep(_SaveOnce):
    """Saves the training after a number of steps; because of its hook, every step is a separate run."""

    @hook
    def step_end(self, trainer: Trainer) -> None:
        """Request single steps."""


def _check_resumed(
    component: Any, saver: _SaveOnce, folder: Path, others: Sequence[Any] = (), rows: int = 12
) -> tuple[Any, Trainer, History]:
    """The callback, Trainer and History of a resumed run, which must end like one without interruption."""
    fresh = copy.deepcopy(component)
    whole = make(component, folder, callbacks=[component, saver])
    history = fit(whole, rows)
    when = f"after {saver.unit} {saver.count}"
    if not saver.saved:
        pytest.skip(f"the training did not continue {when}")
    rest = Trainer.resume(
        saver.place, plugins=running.plugins(), callbacks=[fresh, *others], progress=False
    )
    rest.folder = whole.folder
    again = fit(rest, rows)
    losses = f"resumed {when}: losses {again.losses}, undisturbed {history.losses}"
    require(again.losses == history.losses, losses)
    running.same_bits(whole.get_state(), rest.get_state(), f"the weights of a run resumed {when}")
    return fresh, rest, again


def _parameters(component: Any) -> dict[str, Any]:
    fields = [f for f in attrs.fields(type(component)) if f.init]
    values = {f.alias or f.name: getattr(component, f.name) for f in fields}
    return {k: v for k, v in values.items() if v is not None}


def make(component: Any, folder: Path, **options: Any) -> Trainer:
    """A Trainer of four epochs that writes into its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"epochs": EPOCHS, "callbacks": [component], "learning_rate": 0.05} | options
    trainer = running.trainer(running.linear_model(), **given)
    trainer.folder = folder
    return trainer


def fit(trainer: Trainer, rows: int = 12) -> History:
    """Train on twelve rows, three steps an epoch by default, and validate."""
    x, y = running.regression(rows=rows)
    return trainer.fit(x, y, validation_data=(x, y))

"""Checkpoints of several runs and one folder: nothing of another run is touched, nothing is mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import CheckpointError, OutputError, Trainer, hook, internals_of, list_checkpoints
from tests import models
from tests.plugins.commands import content
from tests.training import EndAt, in_bytes, make, plugins, regression

pytestmark = pytest.mark.sampled

X, Y = regression(rows=24, features=6)


def trainer(folder: Path, *more: Any, seed: int = 0, epochs: int = 3, **settings: Any) -> Trainer:
    """A Trainer of three steps an epoch that writes checkpoints."""
    spec = {"name": "checkpoint", "folder": str(folder), **settings}
    return make(
        models.mlp(),
        backend={"name": "fused", "steps_per_run": 1},
        callbacks=[spec, *more],
        batch_size=8,
        epochs=epochs,
        seed=seed,
        optimizer="adam",
    )


def exported(trained: Trainer) -> bytes:
    return bytes(trained.export().SerializeToString())


def someones_work(folder: Path, path: Path, kind: str) -> dict[str, bytes | None]:
    """Something of a person that has one of our names; returns what is in the folder."""
    thesis = folder / "thesis"
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("years of work")
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        shutil.copytree(thesis, path)
    elif kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("years of work")
    else:
        path.symlink_to(thesis)
    return content(folder)


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("second", [1, 2, 4])
def test_a_second_run_into_the_folder_of_another_is_refused_and_touches_nothing(
    first: int, second: int, tmp_path: Path
) -> None:
    """Whatever the numbers of steps of the two: lower, equal or higher ones are all the other's."""
    place = tmp_path / "ck"
    trainer(place, epochs=first).fit(X, Y)
    before = content(place)
    with pytest.raises(CheckpointError, match=r"which this run did not write; .* --resume"):
        trainer(place, epochs=second, seed=7).fit(X, Y)
    assert content(place) == before
    # The way out that the message names.
    other = trainer(tmp_path / "other", epochs=second, seed=7)
    other.fit(X, Y)
    assert list_checkpoints(tmp_path / "other")


@pytest.mark.parametrize("name", ["step-1", "step-000000003", "step-99999999999", "best"])
@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_what_has_our_names_and_is_not_ours_is_never_touched(
    name: str, kind: str, tmp_path: Path
) -> None:
    place = tmp_path / "ck"
    before = someones_work(tmp_path, place / name, kind)
    with pytest.raises(CheckpointError, match=name):
        trainer(place).fit(X, Y)
    assert content(tmp_path) == before
    assert (place / name).is_symlink() == (kind == "link")


@pytest.mark.parametrize("name", ["step-000000001", "step-000009999"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_resumed_run_does_not_touch_what_it_did_not_write(
    name: str, kind: str, tmp_path: Path
) -> None:
    """A number above that of the checkpoint is no proof that this run wrote it."""
    place = tmp_path / "ck"
    trainer(place).fit(X, Y)
    before = someones_work(tmp_path, place / name, kind)
    again = Trainer.resume(place / "step-000000006", plugins=plugins(), progress=False)
    with pytest.raises(CheckpointError, match=name):
        again.fit(X, Y)
    assert content(tmp_path) == before
    assert (place / name).is_symlink() == (kind == "link")


def test_what_appears_during_the_training_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "ck"

    class Other:
        @hook
        def epoch_start(self, progress: Any) -> None:
            if progress.epoch == 1:
                (place / "step-000000006").mkdir()
                (place / "step-000000006" / "thesis.txt").write_text("years of work")

    with pytest.raises(OutputError, match="was not written by this run"):
        trainer(place, Other()).fit(X, Y)
    assert (place / "step-000000006" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("cut", [4, 5, 8])
def test_a_killed_second_run_is_resumed_to_its_own_bits(cut: int, tmp_path: Path) -> None:
    """The first run ends with higher numbers than the second has when it is killed."""
    trainer(tmp_path / "first", epochs=5).fit(X, Y)
    whole = trainer(tmp_path / "whole", seed=7)
    whole.fit(X, Y)
    place = tmp_path / "second"
    with pytest.raises(RuntimeError, match="killed"):
        trainer(place, EndAt(cut), seed=7).fit(X, Y)
    # The recorded callbacks have the folder; what cannot be named is left out.
    again = Trainer.resume(place, plugins=plugins(), progress=False)
    again.fit(X, Y)
    assert exported(whole) == exported(again)
    assert {p.name for p in list_checkpoints(place)} == {
        p.name for p in list_checkpoints(tmp_path / "whole")
    }


def test_a_resumed_training_removes_what_its_run_wrote_before(tmp_path: Path) -> None:
    place = tmp_path / "ck"
    with pytest.raises(RuntimeError, match="killed"):
        trainer(place, EndAt(8), epochs=9, steps=1, keep=3).fit(X, Y)
    assert [p.name[-1] for p in list_checkpoints(place)] == ["5", "6", "7"]
    Trainer.resume(place, plugins=plugins(), progress=False).fit(X, Y)
    assert [int(p.name[5:]) for p in list_checkpoints(place)] == [25, 26, 27]
    assert sorted(p.name for p in place.iterdir()) == [
        "best",
        *(f"step-{n:09d}" for n in (25, 26, 27)),
    ]


def test_resuming_from_an_older_checkpoint_keeps_the_newer_ones_apart(tmp_path: Path) -> None:
    """Or the next resume would continue those, and ``keep`` would remove the new ones at once."""
    place = tmp_path / "ck"
    trainer(place, epochs=4, keep=9).fit(X, Y)
    before = content(place / "step-000000012")
    again = Trainer.resume(place / "step-000000006", plugins=plugins(), learning_rate=0.5)
    internals_of(again).hooks.register(EndAt(10))
    with pytest.raises(RuntimeError, match="killed"):
        again.fit(X, Y)
    assert [int(p.name[5:]) for p in list_checkpoints(place)] == [3, 6, 9]
    assert content(place / "superseded-1" / "step-000000012") == before
    last = Trainer.resume(place, plugins=plugins())
    assert last.learning_rate == 0.5


def test_a_trainer_that_fits_twice_is_one_run(tmp_path: Path) -> None:
    """The second fit counts from 0; what the first one left must not be taken for newer."""
    place = tmp_path / "ck"
    one = trainer(place, epochs=4)
    one.fit(X, Y)
    one.epochs = 1
    one.fit(X, Y)
    assert [int(p.name[5:]) for p in list_checkpoints(place)] == [3]
    again = Trainer.resume(place, plugins=plugins())
    assert in_bytes(again.get_state()) == in_bytes(one.get_state())


def test_two_trainers_at_once_in_one_folder(tmp_path: Path) -> None:
    """One of them writes; the other is told so before its first step, whichever process it is in."""
    place, seen = tmp_path / "ck", []

    class Nested:
        @hook
        def epoch_start(self, progress: Any) -> None:
            with pytest.raises(CheckpointError, match=r"is in use: process \d+ writes"):
                trainer(place, seed=7).fit(X, Y)
            seen.append(progress.epoch)

    trainer(place, Nested()).fit(X, Y)
    assert seen == [0, 1, 2]
    assert not (place / ".checkpoints.lock").exists()


def test_a_damaged_checkpoint_is_kept_and_gets_out_of_the_way(tmp_path: Path) -> None:
    place = tmp_path / "ck"
    trainer(place, epochs=4, keep=9).fit(X, Y)
    (place / "step-000000012" / "checkpoint.json").write_text("{")
    Trainer.resume(place / "step-000000009", plugins=plugins(), progress=False).fit(X, Y)
    assert (place / "superseded-1" / "step-000000012" / "checkpoint.json").read_text() == "{"
    assert [int(p.name[5:]) for p in list_checkpoints(place)] == [3, 6, 9, 12]


@pytest.mark.parametrize("removed", range(6))
@pytest.mark.parametrize("step", [3, 9])
def test_a_removal_that_was_cut_short_does_not_end_the_training(
    step: int, removed: int, tmp_path: Path
) -> None:
    """A process may be killed after any file of a checkpoint that it removes, after the last one, too."""
    whole = trainer(tmp_path / "whole", epochs=4)
    whole.fit(X, Y)
    place = tmp_path / "ck"
    with pytest.raises(RuntimeError, match="killed"):
        trainer(place, EndAt(11), epochs=4, keep=9).fit(X, Y)
    old = place / f"step-{step:09}"
    paths = sorted(old.rglob("*"), key=lambda p: (-len(p.parts), p.name))
    for path in paths[: removed if removed < 5 else None]:
        path.rmdir() if path.is_dir() else path.unlink()
    again = Trainer.resume(place, plugins=plugins(), progress=False)
    again.fit(X, Y)
    assert exported(whole) == exported(again)


def test_a_checkpoint_says_which_run_it_is_of(tmp_path: Path) -> None:
    """A run and its resumes have one identifier, and two runs have two."""
    found = []
    for name in ("a", "b"):
        trainer(tmp_path / name, epochs=2).fit(X, Y)
        Trainer.resume(tmp_path / name, plugins=plugins(), epochs=4, progress=False).fit(X, Y)
        records = [
            json.loads((p / "checkpoint.json").read_text())
            for p in list_checkpoints(tmp_path / name)
        ]
        assert len(records) == 3
        found.append({r["callbacks"]["checkpoint"]["run"] for r in records})
    assert [len(f) for f in found] == [1, 1]
    assert found[0] != found[1]

"""Where checkpoints are saved: nothing that is not a checkpoint is replaced or removed.

The class of mistake: a name that stands for something else than a folder of ours, at the place itself,
at a temporary name or at ``.previous``, at the first save or at any later one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ortflex_core import OrtflexError, OutputError, Trainer
from ortflex_core.training.artifacts import artifact_folders as folders
from tests import models
from tests.training import make, plugins, regression, same

pytestmark = pytest.mark.sampled


@pytest.fixture(params=["one step", "two steps"])
def swapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How folders are exchanged: as on this system, or as on a system that cannot do it in one step."""
    if request.param == "two steps":
        monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    return str(request.param)


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder; links as what they are."""
    out: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            out[name] = os.readlink(path).encode()
        else:
            out[name] = path.read_bytes() if path.is_file() else None
    return out


def trained() -> Trainer:
    trainer = make(models.linear(), backend="fused", epochs=1)
    trainer.fit(*regression())
    return trainer


def put(place: Path, content: dict[str, str | None]) -> None:
    for name, text in content.items():
        path = place / name
        (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)


THESIS: dict[str, str | None] = {"thesis.txt": "the only copy"}
THEIRS: dict[str, str | None] = {"checkpoint.json": '{"step": 3}'}
FOREIGN: dict[str, Callable[[Path], object]] = {
    "a folder": lambda place: put(place, THESIS),
    "a folder of folders": lambda place: put(place, {"chapters/one": None}),
    "a hidden folder": lambda place: put(place, {".git": None}),
    "the record of another tool": lambda place: put(place, THEIRS),
    "record and state of another tool": lambda place: put(
        place, THEIRS | {"state.safetensors": "theirs"}
    ),
    "ours and a note": lambda place: put(trained().save(place), {"notes.txt": "the good one"}),
    "ours and another model": lambda place: put(trained().save(place), {"model/best.pt": "theirs"}),
    "ours without a record": lambda place: (trained().save(place) / "checkpoint.json").unlink(),
    "a file in place of the model": lambda place: put(
        place, {"checkpoint.json": "{}", "model": "theirs"}
    ),
    "a file": lambda place: place.write_text("a file"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_save_refuses_what_is_not_a_checkpoint(foreign: str, swapping: str, tmp_path: Path) -> None:
    place = tmp_path / "results"
    FOREIGN[foreign](place)
    before, trainer = content(tmp_path), trained()
    for _ in range(2):
        with pytest.raises(OutputError, match=r"results'.*Nothing was changed; use the name of a"):
            trainer.save(place)
        assert content(tmp_path) == before


@pytest.mark.parametrize("foreign", FOREIGN)
def test_save_leaves_what_is_at_other_names(foreign: str, swapping: str, tmp_path: Path) -> None:
    """``.previous`` and names like those of temporary folders may be taken by foreign files."""
    taken = [tmp_path / ".c.writing-0123456789abcdef", tmp_path / ".c.writing", tmp_path / ".c.old"]
    if swapping == "one step":
        taken.append(tmp_path / "c.previous")
    for place in taken:
        FOREIGN[foreign](place)
    before, trainer = content(tmp_path), trained()
    if foreign == "ours without a record":  # half of a checkpoint, as a killed process leaves it
        before = {k: v for k, v in before.items() if not k.startswith(taken[0].name)}
    for _ in range(3):
        trainer.save(tmp_path / "c")
        after = content(tmp_path)
        assert {k: v for k, v in after.items() if k != "c" and not k.startswith("c/")} == before
    Trainer.resume(tmp_path / "c", plugins=plugins())


@pytest.mark.parametrize("foreign", ["a folder", "a file", "ours and a note"])
def test_save_in_two_steps_refuses_where_previous_is_taken(
    foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    trainer = trained()
    trainer.save(tmp_path / "c")
    FOREIGN[foreign](tmp_path / "c.previous")
    before = content(tmp_path)
    with pytest.raises(OutputError, match=r"c\.previous'.*it would be lost"):
        trainer.save(tmp_path / "c")
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/..", "./", "a\0b", "a\0b/c"])
def test_save_refuses_names_that_name_no_folder_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    trainer, before = trained(), content(tmp_path)
    reason = r"cannot write .*(null character|name a folder for it)|expected a path, got ''"
    with pytest.raises(OrtflexError, match=reason):
        trainer.save(name)
    assert content(tmp_path) == before


@pytest.mark.parametrize("absolute", [False, True])
def test_save_refuses_the_current_folder_by_any_name(
    absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(OutputError, match="current folder"):
        trained().save(str(Path.cwd()) if absolute else "../work")
    assert Path.cwd() == tmp_path / "work"


def test_save_takes_an_empty_folder(swapping: str, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    trained().save(place)
    Trainer.resume(place, plugins=plugins())
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("target", ["there", "empty", "missing", "a checkpoint"])
def test_save_follows_a_link_every_time(target: str, swapping: str, tmp_path: Path) -> None:
    disk, link = tmp_path / "disk", tmp_path / "c"
    disk.mkdir()
    trainer = trained()
    if target == "a checkpoint":
        trainer.save(disk / "x")
    elif target != "missing":
        (disk / "x").mkdir()
    link.symlink_to(disk / "x", target_is_directory=True)
    for _ in range(3):
        trainer.fit(*regression())
        trainer.save(link)
        assert link.is_symlink()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "disk"]
        assert sorted(p.name for p in disk.iterdir()) == ["x"]
        again = Trainer.resume(link, plugins=plugins())
        assert (again.get_state()["coef"] == trainer.get_state()["coef"]).all()


def test_save_refuses_a_link_to_something_else(swapping: str, tmp_path: Path) -> None:
    put(tmp_path / "folder", THESIS)
    (tmp_path / "file").write_text("a file")
    trainer = trained()
    for name in ("folder", "file"):
        (tmp_path / "c").symlink_to(tmp_path / name)
        before = content(tmp_path)
        with pytest.raises(OutputError, match="it would be lost"):
            trainer.save(tmp_path / "c")
        assert content(tmp_path) == before
        (tmp_path / "c").unlink()
    (tmp_path / "c").symlink_to(tmp_path / "c")
    with pytest.raises(OutputError, match="c"):
        trainer.save(tmp_path / "c")


def test_save_puts_back_what_appeared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the place and the exchange another process may put its own things there."""
    trainer = trained()
    place = trainer.save(tmp_path / "c")
    real, calls = folders.exchange, []

    def exchange(a: Path, b: Path) -> bool:
        calls.append(a)
        if len(calls) == 1:
            shutil.rmtree(place)
            put(place, THESIS)
        return real(a, b)

    monkeypatch.setattr(folders, "exchange", exchange)
    with pytest.raises(OutputError, match=r"thesis\.txt"):
        trainer.save(place)
    assert content(tmp_path) == {"c": None, "c/thesis.txt": b"the only copy"}


def test_save_clears_what_killed_processes_left_and_nothing_that_is_in_use(tmp_path: Path) -> None:
    """Unfinished folders of this place, whose process does not hold them any more."""
    trainer = trained()
    trainer.save(tmp_path / "c")
    left, used, fresh = (tmp_path / f".c.writing-{k:016x}" for k in range(3))
    for place in (left, used):
        (place / "model").mkdir(parents=True)
        (place / "model" / ".model.onnx.x7").write_bytes(b"half")
    fresh.mkdir()  # just made by another process
    with folders._lock(used) as held:
        if not held:
            pytest.skip("no locks on folders here")
        trainer.save(tmp_path / "c")
        assert sorted(p.name for p in tmp_path.iterdir()) == [used.name, fresh.name, "c"]
    os.utime(fresh, (0, 0))
    trainer.save(tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_long_names_are_saved_as_well(tmp_path: Path) -> None:
    name = "c" * 250
    trainer = trained()
    for _ in range(2):
        trainer.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


class _Killed(BaseException):
    """A process that ends here: nothing it would do afterwards has an effect."""


def test_a_process_may_end_at_any_change_of_the_file_system(
    swapping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class: what a save leaves, at each of its steps, must not stop the next one.

    A folder is removed file by file; one without its checkpoint.json was taken for a user's.
    """
    trainer = make(models.linear(), backend="fused")
    ended = 0
    for steps in range(100):
        folder = trainer.save(tmp_path / str(steps) / "c")
        with monkeypatch.context() as patch:
            left = iter(range(steps))
            for place, name in _CHANGES:
                patch.setattr(place, name, _ending(getattr(place, name), left))
            try:
                trainer.save(folder)
            except _Killed:
                ended += 1
        Trainer.resume(folder, plugins=plugins())
        for path in folder.parent.iterdir():
            os.utime(path, (0, 0))  # an empty folder counts as left over after a while
        trainer.save(folder)
        trainer.save(folder)  # the first one has no old folder to exchange if there is none
        assert [p.name for p in folder.parent.iterdir()] == ["c"]
        if ended == steps:  # it was not killed
            break
    assert {"one step": 6, "two steps": 8}[swapping] < ended < 100


_CHANGES = [(os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (folders, "exchange")]


def _ending(change: Callable[..., object], left: Iterator[int]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if next(left, None) is None:
            raise _Killed
        return change(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", [".", "", "..", "/", "n" * 300, "n" * 300 + "/checkpoint"])
def test_a_path_that_names_nothing_is_not_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OrtflexError, match=r"is not a checkpoint|expected a path"):
        Trainer.resume(name)


@pytest.mark.parametrize(("name", "inside"), [(".", "."), ("..", "model")])
def test_the_current_folder_and_the_one_above_may_be_a_checkpoint(
    name: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    run.save(tmp_path / "saved")
    place = tmp_path / "saved" / inside
    place.mkdir(exist_ok=True)
    monkeypatch.chdir(place)
    same(Trainer.resume(name).get_state(), run.get_state(), tolerance=0)

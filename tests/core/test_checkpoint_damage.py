"""Damaged checkpoints and values that cannot be: an error that names file and key, never another training.

The class of mistake: a value of ``checkpoint.json`` that is used without having been looked at, and a file
whose bytes are trusted. Values are changed with the digests put right again, as an editor or an attacker
would; damage by the disk is in tests/fuzz.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Array, CheckpointError, OrtflexError, Saved, Trainer, internals_of
from ortflex_core.training.artifacts import checkpoint
from tests import edited_checkpoints, models
from tests.training import in_bytes, make, plugins, regression

pytestmark = pytest.mark.sampled

CALLBACKS = [{"name": "early_stopping", "monitor": "loss"}]
FILES = ("checkpoint.json", "state.safetensors", "model/model.onnx")
SETTINGS: dict[str, Any] = {
    "backend": "fused",
    "optimizer": "adam",
    "batch_size": 4,
    "epochs": 4,
    "callbacks": [*CALLBACKS, {"name": "checkpoint", "best": False}],
}


def write(folder: Path) -> list[Path]:
    def settled(trainer: Trainer, progress: Any) -> None:
        place = folder / f"step-{progress.step:09d}"
        if not place.exists():
            trainer.save(place)

    callbacks = [*SETTINGS["callbacks"], settled]
    trainer = make(models.mlp((3, 4, 1)), **SETTINGS | {"callbacks": callbacks})
    trainer.folder = folder
    trainer.fit(*regression(rows=12, features=3))
    return checkpoint.list_checkpoints(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def folder(written: list[Path], tmp_path: Path) -> Path:
    """A folder of three checkpoints of one training."""
    for place in written[:3]:
        shutil.copytree(place, tmp_path / "many" / place.name)
    return tmp_path / "many"


@pytest.fixture
def place(folder: Path) -> Path:
    return checkpoint.list_checkpoints(folder)[-1]


def resumed(place: Path) -> Trainer:
    """Goes on to the end of the training, so that every value is used."""
    callbacks = [plugins().component("callbacks", spec) for spec in SETTINGS["callbacks"]]
    trainer = Trainer.resume(place, plugins=plugins(), callbacks=callbacks)
    trainer.folder = place.parent.parent / "again"
    trainer.fit(*regression(rows=12, features=3))
    return trainer


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def zeros(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("region", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_flipped_bit_is_noticed_in_every_region(name: str, region: float, place: Path) -> None:
    path = place / name
    flip(path, int(region * (path.stat().st_size - 1)))
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.read(place)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, zeros, Path.unlink])
def test_the_newest_whole_checkpoint_is_read_and_the_damaged_are_named(
    name: str, damage: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, middle, last = checkpoint.list_checkpoints(folder)
    damage(last / name)
    with caplog.at_level(logging.WARNING, "ortflex"):
        assert checkpoint.read(folder).folder == middle
    assert last.name in caplog.text
    assert Path(name).name in caplog.text
    with pytest.raises(CheckpointError, match=rf"{first.name}.*{middle.name}") as error:
        checkpoint.read(last)
    assert "Complete checkpoints next to it: " in str(error.value)
    assert str(checkpoint.read(middle).folder) == str(middle)


@pytest.mark.parametrize("copied", [True, False])
def test_one_damaged_file_never_costs_the_newest_two_checkpoints(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redundancy must not share one failure: a damaged model leaves a checkpoint that can be resumed.

    Small models are copied into every checkpoint, of large ones there are two copies in turn.
    """
    if not copied:
        monkeypatch.setattr(checkpoint, "COPIED", 0)
    folder = tmp_path / "checkpoints"
    write(folder)
    places = checkpoint.list_checkpoints(folder)
    inodes = [place.joinpath("model", "model.onnx").stat().st_ino for place in places]
    assert len(set(inodes)) == (4 if copied else 2)
    assert all(one != other for one, other in pairwise(inodes))
    for damaged in places:
        model = damaged / "model" / "model.onnx"
        whole = model.read_bytes()
        flip(model)
        assert Trainer.resume(folder, plugins=plugins()).predict(regression(3, 3)[0]).size
        model.write_bytes(whole)


def test_a_model_that_is_damaged_everywhere_is_given_from_another_place(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says how; the model that is given must be that of the record, and restore needs none."""
    whole = folder.parent / "original.onnx"
    places = checkpoint.list_checkpoints(folder)
    expected = Trainer.resume(folder, plugins=plugins())
    shutil.copy(places[-1] / "model" / "model.onnx", whole)
    for place in places:
        flip(place / "model" / "model.onnx")
    with pytest.raises(CheckpointError, match="none of the checkpoints in") as error:
        Trainer.resume(folder, plugins=plugins())
    recorded = json.loads((places[-1] / "checkpoint.json").read_text())["files"]["model/model.onnx"]
    assert {recorded, "model=path", "--resume"} <= set(re.findall(r"[\w=-]+", str(error.value)))
    x, y = regression(rows=12, features=3)
    with caplog.at_level(logging.WARNING, "ortflex"):
        again = Trainer.resume(folder, model=whole, plugins=plugins(), epochs=6)
    assert "model.onnx" in caplog.text
    np.testing.assert_array_equal(again.predict(x), expected.predict(x))
    again.folder = folder.parent / "again"
    again.fit(x, y)
    saved = again.save(folder.parent / "later")  # which is not linked to a damaged one
    assert Trainer.resume(saved, plugins=plugins()).predict(x).size
    make(models.mlp((3, 4, 1)), **SETTINGS).restore(folder)  # as `ortflex train --resume`
    with pytest.raises(OrtflexError, match="different model"):
        Trainer.resume(folder, model=models.mlp((3, 5, 1)), plugins=plugins())


def test_other_folders_among_checkpoints_are_left_out(folder: Path) -> None:
    newest = checkpoint.list_checkpoints(folder)[-1]
    (folder / "step-999999999").mkdir()
    (folder / "step-999999999" / "weights.pt").write_bytes(b"of another tool")
    assert checkpoint.read(folder).folder == newest
    newest.rename(newest.with_name(f"{newest.name}.previous"))  # killed between two steps
    assert checkpoint.read(folder).folder.name == f"{newest.name}.previous"


def test_a_later_format_is_not_taken_for_damage(folder: Path, place: Path) -> None:
    edited_checkpoints.edit(place, lambda record: record.update(format=3))
    with pytest.raises(CheckpointError, match=r"has the format 3, but this version reads formats"):
        checkpoint.read(place)


# ---------------------------------------------------------------------- values

# What a value is replaced by, one after another; a key is found by the words on the way to it.
KEY = tuple[str | int, ...]
BAD: dict[str, list[Any]] = {
    "format": [True, "2"],
    "structure": [5],
    "arguments": [[]],
    "unnamed": ["callbacks", [3]],
    "versions": [{"ortflex": 1}],
    "runtime": [None],
    "backend": [[]],
    "size": [4],
    "size rows": [0, "4", 4.0],
    "size epoch_steps": [-1],
    "fits": [-1, True, 2**70],
    "manual": [None],
    "manual step": [-1],
    "manual history": [[{"epoch": 1}]],
    "position": [[]],
    "position progress step": ["9"],
    "position progress epoch": [3],
    "position progress epochs": [2.5],
    "position steps": [None],
    "position rows": [-4],
    "position loss": [float("nan"), "0"],
    "position penalty": [float("inf")],
    "position seconds": [-1.0],
    "position rate": [-0.5, None],
    "position records": [{}, []],
    "position records 0": [[], {"epoch": 0.0}],
    "position records 0 loss": ["low"],
    "position seed": [[], [-1, 0], [0.5]],
    "position at_once": [0],
    "position stopped": [0],
    "position data": [
        [],
        {"kind": "pieces"},
        {"kind": "pieces", "pieces": "1", "sizes": 0, "buffer": 1},
        {"kind": "batches", "buffer": 0, "spot": 3},
        {"kind": "batches", "buffer": 0, "spot": {"turn": 0}},
    ],
    "position data kind": [[], {}, "columns"],
    "position data columns": [3],
    "position data columns X": [None],
    "position data columns X shape": ["12"],
    "position data columns X digest": [0],
    "callbacks": [[]],
    "callbacks early_stopping": [[]],
    "callbacks early_stopping best": [{}, [], "low", True],
    "callbacks early_stopping best_epoch": [None],
    "callbacks early_stopping waited": [None],
    "callbacks early_stopping other": [3],
    "callbacks checkpoint best": [{}, [], "low", True],
    "callbacks checkpoint run": [3],
    "files": [None, []],
    "files state.safetensors": [0],
    "files ../../secret": ["0"],
    "files model/../checkpoint.json": ["0"],
    "frozen": [None, {"w": 3}],
    "more": [1],
}


def holder(record: Any, key: KEY) -> Any:
    """The table or list in which a key is."""
    for part in key[:-1]:
        record = record[part]
    return record


@pytest.mark.parametrize(("words", "value"), [(w, v) for w, values in BAD.items() for v in values])
def test_a_value_that_cannot_be_is_named(words: str, value: Any, place: Path) -> None:
    key: KEY = tuple(int(w) if w.isdecimal() else w for w in words.split())

    def change(record: dict[str, Any]) -> None:
        holder(record, key)[key[-1]] = value

    edited_checkpoints.edit(place, change)
    with pytest.raises(CheckpointError) as error:
        resumed(place)
    text = str(error.value)
    assert place.name in text
    assert str([k for k in key if isinstance(k, str)][-1]).rpartition("/")[2] in text


def leaves(value: Any, key: KEY = ()) -> Iterator[KEY]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*key, name)
            yield from leaves(inner, (*key, name))


def test_every_key_that_is_missing_is_an_error_or_makes_no_difference(folder: Path) -> None:
    """No key may be used without a look whether it is there; arguments have defaults."""
    place = checkpoint.list_checkpoints(folder)[-1]
    whole = (place / "checkpoint.json").read_text()
    wanted = in_bytes(resumed(place).get_state())
    free = 0
    for key in leaves(json.loads(whole)):
        if key == ("digest",) or key[0] == "arguments":
            continue
        (place / "checkpoint.json").write_text(whole)

        def change(record: dict[str, Any], key: KEY = key) -> None:
            del holder(record, key)[key[-1]]

        edited_checkpoints.edit(place, change)
        shutil.rmtree(place.parent.parent / "again", ignore_errors=True)
        try:
            trainer = resumed(place)
        except OrtflexError:
            continue
        free += 1
        assert in_bytes(trainer.get_state()) == wanted, key
    assert free < 30


# ---------------------------------------------------------------------- what callbacks keep

SHAPE: dict[str, Any] = {"count": int, "best": float | None}
SHAPE |= {"names": list[str], "worst": np.ndarray}


def kept(**changes: Any) -> Saved:
    saved = Saved("run/checkpoint.json")
    values = {"count": 3, "best": None, "names": ["a"], "worst": np.zeros(2), **changes}
    saved.put("mine", {k: v for k, v in values.items() if v is not ...})
    return saved


def test_what_a_callback_keeps_has_the_types_it_declares() -> None:
    values = kept(best=0.5).get("mine", SHAPE)
    assert values is not None
    assert (values["count"], values["best"], values["names"]) == (3, 0.5, ("a",))
    assert kept().get("nobody", SHAPE) is None
    values = kept().get("mine", SHAPE, optional={"later": int})
    assert values is not None
    assert values["later"] is None
    values = kept(more=np.ones(1)).get("mine", SHAPE, others=np.ndarray)
    assert values is not None
    assert values.pop("more") == 1
    assert "more" in (kept(more=1).get("mine") or {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"count": True}, "callbacks.mine.count: expected an integer, got True"),
        ({"count": 1.5}, "callbacks.mine.count: expected an integer, got 1.5"),
        ({"count": ...}, "callbacks.mine.count is missing"),
        ({"count": np.zeros(1)}, "callbacks.mine.count: expected no array"),
        ({"best": "low"}, "callbacks.mine.best: expected a number, got 'low'"),
        ({"names": "a"}, "callbacks.mine.names: expected a list of strings, got 'a'"),
        ({"names": [1]}, "callbacks.mine.names"),
        ({"worst": [1.0]}, "callbacks.mine.worst: expected an array, got list"),
        ({"other": 1}, "callbacks.mine.other is not known"),
    ],
)
def test_other_types_are_errors_that_name_file_and_key(changes: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=r"run/checkpoint\.json") as error:
        kept(**changes).get("mine", SHAPE)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "array", [np.zeros((3, 5), np.float32), np.zeros((3, 4)), np.zeros(0, np.float32)]
)
def test_kept_weights_that_do_not_fit_change_nothing(array: Array, place: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = place / "state.safetensors"
    arrays = load_file(path)
    arrays["callback/early_stopping/parameter/W1"] = array
    save_file(arrays, path)
    edited_checkpoints.seal(place)
    trainer = resumed(checkpoint.list_checkpoints(place.parent)[0])
    before, standing = trainer.get_state(), internals_of(trainer).live.standing
    with pytest.raises(CheckpointError, match=r"early_stopping\.parameter/W1"):
        trainer.restore(place)
    assert in_bytes(trainer.get_state()) == in_bytes(before)
    assert internals_of(trainer).live.standing is standing

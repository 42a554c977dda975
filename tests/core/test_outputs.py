"""What is written: a folder is replaced only if its content is ours, and a full disk loses no training.

Ownership is never judged by the name of a file. On a disk that gets full, what was trained is still there,
and the error says how to keep it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import CheckpointError, OutputError, Trainer, hook, internals_of
from ortflex_core.kernel import files
from ortflex_core.training.artifacts import step_assembly as assembly
from ortflex_core.training.artifacts import step_manifest as manifest
from tests import models
from tests.training import make, plugins, regression, same


def stepped() -> Any:
    out = make(models.mlp((3, 4, 1)), backend="fused", epochs=1)
    out.fit(*regression(rows=8, features=3))
    return out


FOREIGN: dict[str, bytes] = {
    "manifest.json": b'{"name": "An app", "start_url": ".", "icons": []}',
    "not JSON": b"hello",
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_manifest_is_not_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(OutputError, match=r"manifest\.json.*Nothing was changed"):
        stepped().export_step(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == content
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_foreign_state_is_not_replaced_and_ours_is(tmp_path: Path) -> None:
    made = stepped()
    step = tmp_path / "step"
    made.export_step(step)
    made.export_step(step)  # ours
    state = step / "state.safetensors"
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    foreign = len(header).to_bytes(8, "little") + header
    for content in (foreign, b"", b"\xff" * 64):
        state.write_bytes(content)
        with pytest.raises(OutputError, match=r"state\.safetensors"):
            made.export_step(step)
        assert state.read_bytes() == content


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "'0.txt', which"), (2, "'0.txt' and 1 more"), (3, "'0.txt' and 2 more")],
)
def test_the_files_of_others_are_counted(count: int, words: str, tmp_path: Path) -> None:
    for k in range(count):
        (tmp_path / f"{k}.txt").write_text("notes")
    with pytest.raises(OutputError) as error:
        stepped().export_step(tmp_path)
    assert words in str(error.value)
    assert len(os.listdir(tmp_path)) == count


@pytest.mark.parametrize(
    ("names", "default", "lacks"),
    [("abc", False, ""), ("ac", True, ""), ("ac", False, "input 'b'"), ("ab", True, "output 'c'")],
)
def test_a_manifest_has_all_inputs_without_a_default_and_all_outputs(
    names: str, default: bool, lacks: str
) -> None:
    weights = {"b": np.ones(2)} if default else {}
    graph = models.parsed("c = Add(a, b)", weights, "float[2] a, float[2] b", "float[2] c")
    usual: dict[str, Any] = {"role": "data", "dtype": "float32", "shape": (2,)}
    usual |= dict.fromkeys(("name", "new", "of", "slot", "batch"))
    items = [manifest.Item(**usual | {"new" if n == "c" else "name": n}) for n in names]
    lacking = pytest.raises(CheckpointError, match=f"lacks the {lacks} of the graph")
    with lacking if lacks else nullcontext():
        manifest.check(items, graph, "this graph")


def test_a_file_is_flushed_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut brings the earlier file back: the folder is flushed after the rename."""
    calls: list[str] = []
    replace, flush = os.replace, files.flush_folder

    def replacing(source: Any, target: Any) -> None:
        calls.append(f"rename {Path(target).name}")
        replace(source, target)

    def flushing(folder: Path) -> None:
        calls.append(f"flush {folder.name}")
        flush(folder)

    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(files, "flush_folder", flushing)
    make(models.mlp((3, 4, 1)), backend="fused").export(tmp_path / "a.onnx")
    assert calls[-2:] == ["rename a.onnx", f"flush {tmp_path.name}"]


def test_names_in_the_bodies_of_control_flow_are_known_at_any_depth() -> None:
    """A step must not give one of them to a tensor of its own: an inner name would hide it."""
    deep = "() => (float[2] deep) <float[2] deep_constant = {1, 1}> { deep = Neg(deep_constant) }"
    outer = onnx.parser.parse_graph(
        "g (int64 n, bool c, float[2] x) => () { y = Loop(n, c, x) <body = b "
        "(int64 turn, bool go, float[2] state) => (bool still, float[2] next) { "
        f"next = If(go) <then_branch = t {deep}, else_branch = e {deep}> still = Identity(go) }}> }}"
    )
    names = {"turn", "go", "state", "next", "still", "deep", "deep_constant"}
    assert assembly.inner_names(outer) == names


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_every_file_of_a_checkpoint_is_flushed_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the exchange must not leave a checkpoint with files that are empty."""
    flushed: set[str] = set()
    flush = os.fsync

    def flushing(handle: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        flush(handle)

    made = stepped()
    monkeypatch.setattr(os, "fsync", flushing)
    made.save(tmp_path / "saved")
    content = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {path.name for path in content} >= {"checkpoint.json", "state.safetensors", "model.onnx"}
    assert flushed >= {path.name for path in content} | {"model"}
    assert len(flushed) >= len(content) + 3  # the folder itself, and the one in which it is


X, Y = regression(rows=40, features=6)


def trainer(*callbacks: Any) -> Trainer:
    backend = {"name": "fused", "steps_per_run": 1}
    options: dict[str, Any] = {"backend": backend, "optimizer": "adam", "batch_size": 8}
    return make(models.mlp(), epochs=4, callbacks=list(callbacks), **options)


@contextmanager
def full() -> Iterator[None]:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Fill:
    def __init__(self, step: int) -> None:
        self.step, self.stack = step, ExitStack()

    @hook
    def step_end(self, progress: Any) -> None:
        if progress.step == self.step:
            self.stack.enter_context(full())


@pytest.mark.once
@pytest.mark.parametrize("step", [3, 5, 12, 20])
@pytest.mark.parametrize(
    "settings", [{"steps": 1}, {"epochs": 1}, {"minutes": 60.0, "best": False}]
)
def test_an_unwritable_checkpoint(step: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """In the middle of an epoch, at its end, and at the end of all: saved elsewhere, it continues."""
    whole = trainer()
    whole.fit(X, Y)
    place, fill = {"name": "checkpoint", "folder": str(tmp_path / "ck"), **settings}, Fill(step)
    one = trainer(place, fill)
    with fill.stack, pytest.raises(OutputError, match="File too large") as caught:
        one.fit(X, Y)
    assert str(caught.value).count("cannot write") == 1
    assert ".." not in str(caught.value).replace("...", "")
    assert sum("trainer.save(another_folder)" in note for note in caught.value.__notes__) == 1
    now = internals_of(one).live.standing.manual
    assert len(one.history_) == now.epoch
    one.export(tmp_path / "trained.onnx")
    one.save(tmp_path / "elsewhere")
    again = Trainer.resume(tmp_path / "elsewhere", plugins=plugins(), callbacks=[])
    if now.step < 20:
        again.fit(X, Y)
    same(again.get_state(), whole.get_state(), 0)


@pytest.mark.once
def test_a_log_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill = Fill(7)
    one = trainer({"name": "csv_log", "path": str(tmp_path / "log.csv")}, fill)
    with fill.stack, caplog.at_level(logging.WARNING):
        history = one.fit(X, Y)
    assert len(history) == 4
    warnings = [r.getMessage() for r in caplog.records if "File too large" in r.getMessage()]
    assert [text[:16] for text in warnings] == [f"csv_log, epoch {k}:"[:16] for k in (2, 3, 4)]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


@pytest.mark.once
@pytest.mark.parametrize("name", ["checkpoint", "csv_log"])
def test_a_folder_that_cannot_be_created_is_an_early_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    key = {"checkpoint": "folder", "csv_log": "path"}[name]
    one = trainer({"name": name, key: str(tmp_path / "file" / "x" / "y")})
    before = one.get_state()
    with pytest.raises(OutputError, match="cannot create the folder"):
        one.fit(X, Y)
    same(one.get_state(), before, 0)


@pytest.mark.once
def test_an_export_that_cannot_be_written_leaves_the_trainer_as_it_is(tmp_path: Path) -> None:
    one = trainer()
    one.fit(X, Y)
    with full(), pytest.raises(OutputError, match="File too large") as caught:
        one.export(tmp_path / "out.onnx")
    assert str(caught.value).count("cannot write") == 1
    assert os.listdir(tmp_path) == []
    one.export(tmp_path / "out.onnx")

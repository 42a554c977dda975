"""A folder is replaced only if its content is ours: ownership is never judged by the name of a file."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import CheckpointError, OutputError
from ortflex_core.kernel import files
from ortflex_core.training.artifacts import step_assembly as assembly
from ortflex_core.training.artifacts import step_manifest as manifest
from tests import models
from tests.training import make, regression


def trainer() -> Any:
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
    web = tmp_path / "web"
    web.mkdir()
    (web / "manifest.json").write_bytes(content)
    with pytest.raises(OutputError, match=r"manifest\.json.*Nothing was changed"):
        trainer().export_step(web)
    assert (web / "manifest.json").read_bytes() == content
    assert os.listdir(web) == ["manifest.json"]


def test_a_foreign_state_is_not_replaced_and_ours_is(tmp_path: Path) -> None:
    made = trainer()
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
        trainer().export_step(tmp_path)
    assert words in str(error.value)
    assert len(os.listdir(tmp_path)) == count


@pytest.mark.parametrize(
    ("names", "default", "lacks"),
    [("abc", False, ""), ("ac", True, ""), ("ac", False, "input 'b'"), ("ab", True, "output 'c'")],
)
def test_a_manifest_has_all_inputs_without_a_default_and_all_outputs(
    names: str, default: bool, lacks: str
) -> None:
    graph = models.parsed(
        "c = Add(a, b)",
        {"b": np.ones(2)} if default else {},
        "float[2] a, float[2] b",
        "float[2] c",
    )
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

    made = trainer()
    monkeypatch.setattr(os, "fsync", flushing)
    made.save(tmp_path / "saved")
    content = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {path.name for path in content} >= {"checkpoint.json", "state.safetensors", "model.onnx"}
    assert flushed >= {path.name for path in content} | {"model"}
    assert len(flushed) >= len(content) + 3  # the folder itself, and the one in which it is

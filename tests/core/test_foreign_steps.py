"""A folder is replaced only if its content is ours: ownership is never judged by the name of a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import OutputError
from ortflex_core.kernel import files
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

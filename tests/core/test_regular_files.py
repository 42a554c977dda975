"""Files of strangers are opened in one place, which takes regular files only, of a known size.

The class: a reader that opens a path itself waits for a pipe without a writer, reads a device without
an end, or follows a file that grows. The first test finds readers that do so in the source. The second
one runs every reader, with special files in the place of each file that it opens, and compares the
places in the source that open files with those that were reached, so that no reader can be forgotten.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import (
    PUBLIC,
    FolderLock,
    NotRegular,
    RegularFile,
    open_regular,
    open_text,
    read_bytes,
)
from ortflex_core.kernel import regular_files

pytestmark = pytest.mark.once
posix = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")
ROOT = Path(__file__).parents[2]
OPENERS = {"open_regular", "RegularFile", "read_bytes", "read_text", "read_json", "open_text"}
SILENCE = 60

# What opens a path, wherever it comes from; ``load`` only of these modules.
ANY = {
    *("open", "read_bytes", "read_text", "memmap", "mmap", "open_memmap", "fromfile", "loadtxt"),
    *("genfromtxt", "safe_open", "load_file", "load_model", "ParquetFile", "read_table"),
    *("read_schema", "OSFile", "memory_map", "from_file", "FileIO", "open_code", "copyfile"),
    *("copy2", "copytree", "ZipFile", "read_csv", "read_parquet"),
    *("spec_from_file_location", "run_path", "sendfile"),
    *("load_external_data_for_model", "fdopen", "open_file", "InferenceSession", "read_feather"),
}
LOADING = {"numpy", "np", "onnx", "json", "tomllib", "pickle", "marshal", "torch", "joblib", "yaml"}

OWN = "a file that this process has just written into a new folder of its own"
OUT = "it is opened to be written"
PART = "a part of ortflex itself"
METHOD = "a method of our own"
FOLDER = "a folder, which is locked or flushed"
GIVEN = "bytes in memory, or a file that the one opener opened"
COMPARED = "a file of a folder of this user alone, whose digest has been compared"
SHARED = "memory that another rank of this run shares, whose token _token has read"
ALLOWED = {
    "ortflex_core.kernel.regular_files.RegularFile": ("FileIO", "the one opener"),
    "ortflex_core.kernel.regular_files._open": ("open", "the one opener"),
    "ortflex_core.kernel.locks._open": ("open", "links and special files are refused there"),
    "ortflex_core.kernel.files.write_flushed": ("open", OUT),
    "ortflex_core.kernel.files.flush_folder": ("open", FOLDER),
    "ortflex_core.training.artifacts.artifact_folders.flush": (
        "open",
        "files and folders just written",
    ),
    "ortflex_core.training.artifacts.array_file.write_arrays": ("open", OUT),
    "ortflex_core.training.artifacts.artifact_folders._open": ("open", FOLDER),
    "ortflex_core.compiler.onnx_files.export._write_pair": ("open", OUT),
    "ortflex_core.training.artifacts.step_export._write_graphs": ("open", OUT),
    "ortflex_core.training.artifacts.hub._place": ("open", OUT),
    "ortflex_core.compiler.onnx_files.export._has": ("mmap", GIVEN),
    "ortflex_core.compiler.onnx_files.model_file._read": ("mmap", GIVEN),
    "ortflex_core.compiler.onnx_files.external_data._File.array": ("mmap", GIVEN),
    "ortflex_core.compiler.onnx_files.external_data._File.release": ("mmap", GIVEN),
    "ortflex_core.kernel.synonyms.names_elsewhere": ("read_text", PART),
    "ortflex_core.training.data.column_files.ColumnFiles.making": ("open memmap", OWN),
    "ortflex_core.training.data.column_files._mapped": ("memmap", COMPARED),
    "ortflex_core.kernel.path_entries._run": ("spec_from_file_location", "code, which may run"),
    "ortflex_core.training.engines.mailbox._mapped": ("open mmap", SHARED),
    "ortflex_core.training.engines.peers.unpack": ("load", GIVEN),
    "ortflex_core.compiler.runtime.installation._probe": ("InferenceSession", GIVEN),
    "ortflex_core.compiler.runtime.memory_limits._text": ("read_text", "files of the kernel"),
    "ortflex_core.compiler.runtime.session.cpu_session": ("InferenceSession", GIVEN),
    "ortflex_core.compiler.runtime.session.open_session": ("InferenceSession", GIVEN),
    "ortflex_core.compiler.runtime.session.make_schedule": ("load", OWN),
    "ortflex_core.testing.adapter.AdapterKit.test_run_time": ("InferenceSession", GIVEN),
    "ortflex_core.testing.process_group.ProcessGroupKit.members.run": ("read_text", OWN),
    "ortflex_core.tools.times.some_columns": ("open", METHOD),
    "ortflex_core.training.fit._step": ("open", METHOD),
    "ortflex_core.training.trainer.Trainer._feed": ("open", METHOD),
    "ortflex_core.training.trainer.Trainer.per_sample_losses": ("open", METHOD),
    "ortflex_plugins.callbacks._tracking.Tracker.train_start": ("open", METHOD),
    "ortflex_plugins.flower.client.Client.of": ("open", METHOD),
    "ortflex_plugins.flower.client._count": ("open", METHOD),
    "ortflex_plugins.pictures.figures._box": ("open", "a variable"),
    "ortflex_plugins.pictures.svg._box": ("open", "a variable"),
    "ortflex_plugins.backends.training_agent.Agent.__init__": ("InferenceSession", GIVEN),
    "ortflex_plugins.pictures.measure.profiled": ("read_text InferenceSession", OWN),
    "ortflex_plugins.cli.predict._encode": ("ZipFile open", "bytes in memory"),
    "ortflex_plugins.cli.new_flower_app.project.filled": ("read_text", PART),
    "ortflex_plugins.cli.new_plugin.package.filled": ("read_text", PART),
    "ortflex_plugins.cli.reference.main": ("read_text", "the pages of this project"),
    "ortflex_plugins.pictures.html.page": ("read_text", PART),
    "ortflex_plugins.data.arrow.Arrow.look": ("open_file", GIVEN),
    "ortflex_plugins.data.arrow.Arrow.batches": ("open_file", GIVEN),
    "ortflex_plugins.data.image_folder.ImagePieces._pixels": ("open", GIVEN),
    "ortflex_plugins.data.npy.map_file": ("memmap", GIVEN),
    "ortflex_plugins.data.npz._array": ("open", GIVEN),
    "ortflex_plugins.data.npz._read": ("ZipFile", GIVEN),
    "ortflex_plugins.data.parquet.Parquet.look": ("ParquetFile", GIVEN),
    "ortflex_plugins.data.parquet.Parquet.batches": ("ParquetFile", GIVEN),
    "ortflex_plugins.data.tokenized._columns": ("ParquetFile", GIVEN),
    "ortflex_core.kernel.install_command.origin": ("read_text", "what the installer wrote"),
    "ortflex_plugins.c.export._Source._generated": ("load", OWN),
    "ortflex_plugins.c.export._Source.files": ("read_bytes", OWN),
    "ortflex_plugins.c.export._Source._state_header": ("read_bytes", OWN),
    "ortflex_plugins.c.export._filled": ("read_text", PART),
    "ortflex_plugins.cli.data_preview.check_recipe": ("open", METHOD),
    "ortflex_plugins.cli.quantize.model_inputs": ("open", METHOD),
    "ortflex_plugins.cli.quantize._times": ("InferenceSession", OWN),
    "ortflex_plugins.cli.quantize._saturation": ("InferenceSession", OWN),
}
"""What may open files elsewhere: the names, and the reason."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted([*ROOT.glob("ortflex_*/**/*.py"), ROOT / "ortflex.py"]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text("utf-8"))


def used(tree: ast.AST, place: str) -> Iterator[tuple[str, ast.expr]]:
    """Every name and attribute that is read, with the function in which it is; annotations open nothing."""
    annotations = (getattr(tree, "annotation", None), getattr(tree, "returns", None))
    for node in ast.iter_child_nodes(tree):
        if node in annotations:
            continue
        inner = place
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            inner = f"{place}.{node.name}"
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield place, node
        yield from used(node, inner)


def opens(node: ast.expr, ours: set[str]) -> str | None:
    """The name of what opens a path; ``ours`` are names that a module has from the one opener."""
    if isinstance(node, ast.Name):
        return node.id if node.id in ANY and node.id not in ours else None
    assert isinstance(node, ast.Attribute)
    base = node.value.id if isinstance(node.value, ast.Name) else ""
    if node.attr in ("load", "load_model") and base.lower() in LOADING:
        return node.attr
    return node.attr if node.attr in ANY else None


def imported(tree: ast.Module) -> set[str]:
    """The names that a module imports from the one opener."""
    public = PUBLIC["kernel.regular_files"].split()
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == regular_files.__name__
        or (node.module == "ortflex_core" and alias.name in public)
    }


def test_nothing_else_opens_files() -> None:
    found: dict[str, set[str]] = {}
    for module, tree in modules():
        own = {"read_bytes", "read_text"} if module.endswith("regular_files") else set()
        ours = imported(tree) | own
        for place, node in used(tree, module):
            if name := opens(node, ours):
                found.setdefault(place, set()).add(name)
    allowed = {place: set(names.split()) for place, (names, _) in ALLOWED.items()}
    assert found == allowed


def called() -> set[str]:
    """The functions of all modules that call the one opener."""
    out = set()
    for module, tree in modules():
        ours = imported(tree) & OPENERS
        out |= {p for p, n in used(tree, module) if isinstance(n, ast.Name) and n.id in ours}
    return out


class Worker:
    """``python -m tests.readers``, whose silence is noticed."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.readers", str(folder)]
        options: Any = {"cwd": ROOT, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **options, **pipes)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        listeners = (self._listen, self._keep)
        self.threads = [threading.Thread(target=each, daemon=True) for each in listeners]
        for thread in self.threads:
            thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _keep(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def said(self) -> Iterator[dict[str, Any]]:
        try:
            while (line := self.lines.get(timeout=SILENCE)) is not None:
                yield json.loads(line)
            self.process.wait(timeout=SILENCE)  # its output has ended
        except queue.Empty:
            yield {"end": "waits for ever", "text": "", "mib": 0}
        finally:
            self.process.kill()
            self.process.wait()
            for thread in self.threads:
                thread.join()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_no_reader_waits_for_a_special_file_or_reads_it_without_an_end(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    worker = Worker(tmp_path)
    places, bad, current, ends = set(), [], "", []
    for event in worker.said():
        places |= set(event.get("places", ()))
        current = event.get("begin", current)
        if "end" in event:
            ends.append(event["end"])
            if event["end"] not in ("fine", "refused") or event["mib"] > 700:
                bad.append((current, event))
        elif "reader" in event:
            assert event["opened"], event
    assert not bad
    assert worker.process.wait() == 0, "".join(worker.errors[-20:])
    assert ends.count("refused") > 300
    assert called() - places == set()


# The opener itself ------------------------------------------------------------------------------------


def test_a_file_that_grows_ends_where_it_ended_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n")
    with open_regular(path) as file, open_text(path) as text, RegularFile(path) as raw:
        with path.open("ab") as more:
            more.write(b"two\n" * 100_000)
        assert file.read() == b"one\n"
        assert list(text) == ["one\n"]
        assert raw.readall() == b"one\n"
        assert file.seek(-4, os.SEEK_END) == 0
        assert (file.read(100), file.read(100)) == (b"one\n", b"")
        assert raw.seek(2) == 2
        assert raw.readinto(bytearray(10)) == 2


def test_a_file_above_the_bound_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(11))
    assert read_bytes(path, 11) == bytes(11)
    with pytest.raises(NotRegular, match="it has 11 bytes, more than the 10"):
        read_bytes(path, 10)


def test_a_line_without_an_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "LINE", 100)
    path = tmp_path / "a"
    path.write_text("a" * 99 + "\n" + "b" * 100 + "\n")
    with open_text(path) as file:
        lines = regular_files.lines(file, path)
        assert next(lines) == "a" * 99 + "\n"
        with pytest.raises(NotRegular, match="line of 100 characters"):
            next(lines)


@posix
def test_what_counts_is_the_file_that_was_opened_not_the_one_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces the path between the check of the path and the opening."""
    path, stat = tmp_path / "a", os.stat
    path.write_bytes(b"harmless")

    def replaced(*given: Any, **options: Any) -> os.stat_result:
        out = stat(*given, **options)
        path.unlink()
        os.mkfifo(path)
        return out

    monkeypatch.setattr(os, "stat", replaced)
    with pytest.raises(NotRegular, match="it is a pipe"):
        open_regular(path)


@posix
def test_the_file_of_a_lock_is_never_a_link_to_a_file_that_it_would_overwrite(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(NotRegular, match="must not be a link"):
        FolderLock().acquire(tmp_path / "run")
    assert victim.read_text() == "precious"

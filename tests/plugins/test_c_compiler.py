"""The C compiler of the system: how it is found, and how its libraries are kept."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ortflex_core import OutputError, Unsupported
from ortflex_plugins.c import compiler
from ortflex_plugins.c.compiler import CompileError, compile_library, find_compiler, load_library

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle())),
]

SOURCE = '__attribute__((visibility("default"))) int twice(int x) { return 2 * x; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv(compiler.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "c"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiler behind a script that writes a line for each library that it makes."""
    log, script = tmp_path / "log", tmp_path / "my cc"
    real = find_compiler().command[0]
    log.touch()
    noting = f'case "$*" in *-shared*) echo x >> "{log}"; sleep 0.1;; esac'
    script.write_text(f'#!/bin/sh\n{noting}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}' -DX=1")
    return log


def count(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_a_library_is_compiled_once(calls: Path, folder: Path) -> None:
    assert load_library(SOURCE).twice(21) == 42
    assert load_library(SOURCE).twice(-3) == -6
    assert count(calls) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.suffix for p in folder.iterdir()] == [".so"], "locks and temporary files are left"


def test_source_flags_and_compiler_are_parts_of_the_key(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        compile_library(SOURCE),
        compile_library(SOURCE + " "),
        compile_library(SOURCE, ["-O1"]),
    ]
    monkeypatch.setenv("CC", os.environ["CC"] + " -DY=2")
    paths.append(compile_library(SOURCE))
    assert len(set(paths)) == count(calls) == 4


def test_threads_and_processes_wait_for_one_another(calls: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(compile_library, [SOURCE] * 4))
    assert len(paths) == count(calls) == 1


@pytest.mark.parametrize("damage", ["truncated", "changed", "link", "of another source"])
def test_a_damaged_or_foreign_library_is_compiled_again(
    damage: str, calls: Path, tmp_path: Path
) -> None:
    path = compile_library(SOURCE)
    content = path.read_bytes()
    if damage == "link":
        shutil.copy(path, tmp_path / "foreign")
        path.unlink()
        path.symlink_to(tmp_path / "foreign")
    elif damage == "of another source":
        other = compile_library(SOURCE.replace("2", "3"))
        path.unlink()
        shutil.copy(other, path)
    else:
        path.unlink()  # it may be mapped into this process
        path.write_bytes(content[:-1000] if damage == "truncated" else content[:-1] + b"?")
    before = count(calls)
    assert load_library(SOURCE).twice(4) == 8
    assert count(calls) == before + 1
    assert not path.is_symlink()


def test_the_libraries_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    paths = [compile_library(SOURCE + " " * k) for k in range(3)]
    for k, path in enumerate(paths):
        os.utime(path, (1000 + k, 1000 + k))
    compile_library(SOURCE)  # used again
    monkeypatch.setattr(compiler, "_MOST_BYTES", 3 * paths[0].stat().st_size + 100)
    last = compile_library(SOURCE + "\n")
    assert set(folder.iterdir()) == {paths[0], paths[2], last}


def test_an_error_has_the_first_lines_of_the_compiler(folder: Path) -> None:
    with pytest.raises(CompileError, match=r"source\.c:1:9"):
        load_library("int x = ;" + "int y = ;" * 100)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-compiler -O2", "'no-such-compiler'"),
        ("'", "CC"),
        ("true", "neither gcc nor clang"),
        ("false", "does not work"),
        ("{cc} -ffast-math", "-ffast-math"),
        ("{cc} -DNO -include no_such_header.h", "no_such_header.h"),
    ],
)
def test_a_compiler_that_does_not_work_is_a_reason(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command.format(cc=find_compiler().command[0]))
    with pytest.raises(Unsupported) as caught:
        load_library(SOURCE)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert compiler.obstacle() == str(caught.value)


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc" in str(compiler.obstacle())


@pytest.mark.parametrize("kind", ["file", "link", "others write", "below a file"])
def test_a_folder_that_is_not_the_users_own_is_refused(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir()
    if kind == "file":
        folder.touch()
    elif kind == "link":
        (tmp_path / "other").mkdir()
        folder.symlink_to(tmp_path / "other")
    elif kind == "others write":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        monkeypatch.setenv(compiler.CACHE, str(folder / "f"))
        folder.touch()
    with pytest.raises(OutputError, match=compiler.CACHE):
        compile_library(SOURCE)
    assert compiler.obstacle() is not None

"""The system's C compiler, and the libraries that it has made, kept in the user's cache folder.

A library is kept under a digest of its source, of the compiler (its version and the CPU for which it
compiles) and of the flags. The name of its file also has a digest of its content, so a damaged file
is noticed and compiled again. The folder belongs to the user, and no other user may write to it,
because what it holds is executed.

The flags leave the bits of a result to the source: no contraction to a fused multiply-add, no other
order of sums. ``-march=native`` then only decides how many numbers an instruction has. ``sqrt`` would
not be vectorized if it had to set ``errno``, nor a choice between two results if it could trap.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from ortflex_core import FolderLock, OrtflexError, OutputError, Unsupported, read_bytes, write_bytes

FLAGS = (
    *("-std=c99", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-w"),
)
"""The flags of every library. None of them changes the bits of a result."""
CACHE = "ORTFLEX_CACHE_FOLDER"
"""The environment variable with the folder for compiled libraries; default: the user's cache folder."""
_OTHER = f"The environment variable {CACHE} chooses another folder"
_LIBRARIES = ("-lm",)
_NAMES = ("cc", "gcc", "clang")
_MACHINES = {
    **dict.fromkeys(("x86_64", "AMD64"), "__x86_64__"),
    **dict.fromkeys(("aarch64", "arm64"), "__aarch64__"),
}
_ABILITIES = frozenset({"__AVX__", "__AVX512F__", "__FMA__", "__aarch64__"})
_PROBE = "#include <math.h>\n#include <stdint.h>\n"
_MOST_BYTES = 256 << 20
"""The bytes of all libraries together; the ones that were not used for the longest time are removed."""
_SECONDS = 300.0
"""The longest time of a compilation."""
_LINES = 6
"""The lines of the compiler's output in an error."""
_ENTRY = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.so")
_TEMPORARY = ".compile-"


class CompileError(OrtflexError, RuntimeError):
    """The C compiler did not accept a source, or the library cannot be loaded."""


@attrs.frozen
class Compiler:
    """A C compiler of this system.

    Attributes:
        command: its path and the arguments that ``$CC`` has.
        version: as it describes itself, for messages.
        target: the flags that choose the CPU of this machine.
        identity: a digest of everything that the compiler declares about itself and that CPU.
        abilities: those of the CPU that decide how products are written, as macros.
    """

    command: tuple[str, ...]
    version: str
    target: tuple[str, ...]
    identity: str
    abilities: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} ({self.version})"


def find_compiler() -> Compiler:
    """The compiler that ``$CC`` names, else the first of ``cc``, ``gcc`` and ``clang``.

    Raises:
        Unsupported: no compiler makes libraries for this machine; the message is one line.
    """
    found = _find(os.environ.get("CC", ""), os.environ.get("PATH", ""))
    if isinstance(found, Compiler):
        return found
    raise Unsupported(found)


def obstacle() -> str | None:
    """Why no library can be compiled here: no compiler, or no folder to keep it; None if it can."""
    try:
        find_compiler()
        _prepare(cache_folder())
    except OrtflexError as error:
        return str(error)
    return None


def cache_folder() -> Path:
    """The folder of compiled libraries: ``$ORTFLEX_CACHE_FOLDER``, else in the user's cache folder.

    Raises:
        OutputError: the user has no home folder.
    """
    if named := os.environ.get(CACHE):
        return Path(named) / "c"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise OutputError(f"there is no home folder; set {CACHE} to a folder") from error
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "ortflex" / "c"
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path is ignored.
    caches = Path(named) if os.path.isabs(named) else home / ".cache"
    return caches / "ortflex" / "c"


def load_library(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a source in C99, unless its library is kept, and load it into this process.

    Exported functions need ``__attribute__((visibility("default")))``. A library that is loaded twice
    is the same one, with the same static variables, so state belongs into memory that the caller
    passes. ctypes releases the lock of the interpreter while a function runs.

    Args:
        source: the text of the file.
        flags: for the compiler, after :data:`FLAGS`.

    Raises:
        Unsupported: there is no compiler.
        OutputError: the cache folder cannot be used.
        CompileError: the compiler refuses the source, or the library cannot be loaded.

    Example:
        >>> export = '__attribute__((visibility("default"))) '
        >>> load_library(export + "int twice(int x) { return 2 * x; }").twice(21)
        42
    """
    compiler = find_compiler()
    for attempt in (True, False):
        path = compile_library(source, flags)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            # Another process may have removed it between the two lines, as the oldest one.
            if attempt and not path.exists():
                continue
            raise CompileError(
                f"the library that {compiler} made cannot be loaded: {error}. If programs may not run "
                f"from {str(path.parent)!r}, set {CACHE} to another folder"
            ) from error
    raise AssertionError


def compile_library(source: str, flags: Sequence[str] = ()) -> Path:
    """The path of the compiled library of a source; see :func:`load_library`."""
    compiler = find_compiler()
    folder = cache_folder()
    _prepare(folder)
    arguments = (*FLAGS, *compiler.target, *flags)
    content = "\0".join((source, compiler.identity, *compiler.command, *arguments))
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    if (path := _kept(folder, key)) is not None:
        return path
    with _locked(folder, key):
        # The process that had the lock before may have compiled it.
        return _kept(folder, key) or _compile(compiler, source, arguments, folder, key)


@functools.lru_cache(maxsize=16)
def _find(chosen: str, path: str) -> Compiler | str:
    """The compiler for values of ``$CC`` and ``$PATH``, or why there is no compiler."""
    if sys.platform == "win32":  # pragma: no cover
        return "C compilers are used on Linux and macOS only"
    try:
        commands = [shlex.split(chosen)] if chosen.strip() else [[name] for name in _NAMES]
    except ValueError as error:
        return f"the environment variable CC is not a command ({error}): {chosen!r}"
    for name, *arguments in commands:
        if (found := shutil.which(name, path=path)) is not None:
            return _probe((os.path.abspath(found), *arguments))  # it runs in another folder
    if chosen.strip():
        missing = commands[0][0]
        return f"no C compiler: the environment variable CC names {missing!r}, which is not found"
    return "no C compiler: none of cc, gcc and clang is on the PATH; install one, or set CC"


def _probe(command: tuple[str, ...]) -> Compiler | str:
    """Ask a compiler for its macros, which have its version and the abilities of the CPU."""
    machine = platform.machine()
    native = "-march=native" if machine in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    why = ""
    for target in ((native,), ()):
        try:
            done = subprocess.run(
                [*command, *target, "-x", "c", "-E", "-dM", "-"],
                input=_PROBE.encode(),
                capture_output=True,
                timeout=60,
                env=_environment(),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C compiler {command[0]} does not run: {error}"
        if done.returncode == 0:
            return _described(command, target, done.stdout.decode("utf-8", "replace"), machine)
        why = why or _first_lines(done.stderr, 1)
    return f"the C compiler {command[0]} does not work: {why}"


def _described(
    command: tuple[str, ...], target: tuple[str, ...], macros: str, machine: str
) -> Compiler | str:
    defined = dict(line.split(" ", 2)[1:] for line in macros.splitlines() if line.count(" ") >= 2)
    name = command[0]
    if "__GNUC__" not in defined:
        return f"the C compiler {name} is neither gcc nor clang"
    if "__FAST_MATH__" in defined:
        return f"the C compiler {name} is called with -ffast-math, which changes results; remove it from CC"
    expected = _MACHINES.get(machine)
    pointer = defined.get("__SIZEOF_POINTER__")
    if (expected and expected not in defined) or pointer != str(struct.calcsize("P")):
        return f"the C compiler {name} makes programs for another machine than this one ({machine})"
    version = defined.get("__VERSION__", "").strip('"')
    version = version if "__clang__" in defined else f"gcc {version}"
    digest = hashlib.sha256("\n".join(sorted(macros.splitlines())).encode()).hexdigest()
    return Compiler(command, version, target, digest, frozenset(defined) & _ABILITIES)


def _prepare(folder: Path) -> None:
    """Make the folder, to which no other user can write."""
    then = f"{_OTHER} for compiled libraries"
    what = f"keep compiled libraries in {str(folder)!r}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except (OSError, ValueError) as error:  # of a path with a null character
        raise OutputError.of(what, error, then) from error
    if not stat.S_ISDIR(status.st_mode):
        raise OutputError(f"cannot {what}: it is not a folder. {then}")
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise OutputError(f"cannot {what}: it belongs to another user. {then}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OutputError(f"cannot {what}: other users can write to it (chmod 700). {then}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot {what}: it cannot be written to. {then}")


def _kept(folder: Path, key: str) -> Path | None:
    """The library of a key, if it is there and as it was written; a damaged one is removed."""
    for path in folder.glob(f"{key}-*.so"):
        if (named := _ENTRY.fullmatch(path.name)) is None:
            continue
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            sound = stat.S_ISREG(status.st_mode) and own
            if sound and _digest(read_bytes(path, _MOST_BYTES)) == named[2]:
                os.utime(path)  # it was used now
                return path
            path.unlink()
    return None


def _compile(
    compiler: Compiler, source: str, arguments: Sequence[str], folder: Path, key: str
) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as name:
            place = Path(name)
            (place / "source.c").write_text(source, "utf-8")
            library = _call(compiler, arguments, place)
    except OSError as error:
        raise OutputError.of(f"compile in {str(folder)!r}", error, _OTHER) from error
    path = folder / f"{key}-{_digest(library)}.so"
    write_bytes(path, library)
    _bound(folder, path)
    return path


def _call(compiler: Compiler, arguments: Sequence[str], place: Path) -> bytes:
    """The library that the compiler makes of ``source.c``."""
    command = [*compiler.command, *arguments, "source.c", "-o", "library.so", *_LIBRARIES]
    # In the folder, so that names in errors are short; temporary files of the compiler are removed with it.
    environment = {**_environment(), "TMPDIR": str(place)}
    try:
        done = subprocess.run(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the C compiler {compiler} does not run: {error}") from error
    if done.returncode:
        lines = _first_lines(done.stderr or done.stdout, _LINES)
        raise CompileError(
            f"the C compiler {compiler} failed with the exit status {done.returncode}: {lines}"
        )
    return read_bytes(place / "library.so")


@contextlib.contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    """Compile a source in one process or thread at a time.

    A lock that is held for longer than a compilation is ignored: two processes that compile the same
    source write the same file, each as a whole.
    """
    lock = FolderLock(f".{key}.lock")
    end = time.monotonic() + _SECONDS
    try:
        while not lock.acquire(folder) and time.monotonic() < end:
            time.sleep(0.02)
    except OSError as error:
        raise OutputError.of(f"lock {str(folder)!r}", error, _OTHER) from error
    try:
        yield
    finally:
        lock.release()


def _bound(folder: Path, newest: Path) -> None:
    """Remove the libraries that were not used for the longest time, and what killed processes left."""
    with contextlib.suppress(OSError):
        entries = [e for e in os.scandir(folder) if not e.is_symlink()]
        used = {}
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith(_TEMPORARY) and entry.is_dir():
                    if time.time() - status.st_mtime > 2 * _SECONDS:
                        shutil.rmtree(entry.path, ignore_errors=True)
                elif _ENTRY.fullmatch(entry.name):
                    used[Path(entry.path)] = (status.st_mtime, status.st_size)
        total = sum(size for _, size in used.values())
        for path, (_, size) in sorted(used.items(), key=lambda item: item[1]):
            if total <= _MOST_BYTES:
                return
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _environment() -> dict[str, str]:
    """The environment with messages in English."""
    return {**os.environ, "LC_ALL": "C"}


def _first_lines(output: bytes, count: int) -> str:
    lines = [line.rstrip() for line in output.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line.strip()]
    return "\n".join(lines[:count]) or "it printed no reason"

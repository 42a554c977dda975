"""The classes of class paths and of folders of Python files: what imports the user's own code.

A file is imported once per process, under a name derived from its path, and its folder is not added to
``sys.path``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.kernel.class_paths import PREFIX, of_class
from ortflex_core.kernel.entries import Entry, singular
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    ConfigError,
    PluginError,
    describe_error,
    suggest,
)
from ortflex_core.kernel.regular_files import TEXT, read_bytes

if TYPE_CHECKING:
    from ortflex_core.kernel.kinds import Kinds

_importing = threading.RLock()


@attrs.frozen
class PathEntry(Entry):
    """A class that is found by its path. Its "distribution" is its module, its version a checksum."""

    @property
    def qualified(self) -> str:
        """The path of the class, which is its name everywhere."""
        return self.target

    @property
    def described(self) -> str:
        """The plugin in a sentence: ``the loss 'my_module:MyLoss'``."""
        return f"the {singular(self.kind)} {self.target!r}"

    @property
    def remedy(self) -> str:
        """What to do if the class is broken."""
        return f"Correct {self.distribution}"

    def load(self) -> Any:
        """Import the class."""
        module = _import_code(self.distribution, self.described)
        cls: Any = module
        name = self.target.rpartition(":")[2]
        for part in name.split("."):
            cls = getattr(cls, part, None)
        if cls is None:
            known = [n for n, member in vars(module).items() if _is_own(member, module)]
            raise PluginError(
                f"{self.distribution} has no class {name!r}"
                + (f"; {suggest(name, known)}" if known else "; it defines no component")
            )
        if getattr(cls, "name", None) == "":
            cls.name = cls.__name__  # messages and files call it by its class
        return cls

    def stands_for(self, cls: type) -> bool:
        """Whether this is the entry of a class; nothing is imported."""
        return of_class(cls) == self.target


def path_entry(kind: str, path: str, name: str = "") -> PathEntry:
    """The entry of a class path; nothing is imported."""
    module, _, cls = path.rpartition(":")
    version = ""
    if module.endswith(".py"):
        file = Path(module).resolve()
        module = str(file)
        version = f"{zlib.crc32(read_bytes(file, TEXT)):08x}" if file.is_file() else ""
    place = f"{module}:{cls}"
    point = importlib.metadata.EntryPoint(name or place, place, f"ortflex.{kind}")
    return PathEntry(kind, name or place, place, module, version, point)


def in_folder(folder: Path, kinds: Kinds) -> Iterator[PathEntry]:
    """The components in the files of a folder: classes of a kind that have a ``name``.

    Files whose names begin with ``_`` are left out; the others are imported. One class must be found.
    """
    if not folder.is_dir():
        raise ConfigError(f"plugins: the folder {str(folder)!r} does not exist")
    has_component = False
    for file in sorted(folder.glob("[!_]*.py")):
        module = _import_code(str(file.resolve()), f"plugins: the file {str(file)!r}")
        for cls in vars(module).values():
            if not _is_own(cls, module) or inspect.isabstract(cls) or not getattr(cls, "name", ""):
                continue
            kind = kinds.of(cls)
            if kind or issubclass(cls, kinds["callbacks"]):
                has_component = True
                yield path_entry(
                    kind or "callbacks", f"{module.__file__}:{cls.__qualname__}", cls.name
                )
    if not has_component:
        raise ConfigError(
            f"plugins: no file in {str(folder)!r} has a component: a class of a kind (Loss, Optimizer, …), "
            "or a callback, with a name"
        )


def _is_own(cls: object, module: ModuleType) -> bool:
    return isinstance(cls, type) and cls.__module__ == module.__name__


def _module_name(file: Path) -> str:
    return f"{PREFIX}{zlib.crc32(str(file).encode()):08x}_{file.stem}"


def _import_code(module: str, what: str) -> ModuleType:
    """Import a module by its name, or a file by its path."""
    try:
        if module.endswith(".py"):
            return _run(Path(module), what)
        return importlib.import_module(module)
    except (KeyboardInterrupt, PluginError):
        raise
    except BaseException as error:  # a module may end in sys.exit()
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise PluginError(
                f"{what}: Python finds no module {missing!r}, and there is no file {missing}.py in the "
                "folder of the recipe; write 'folder/file.py:Class' for a file, or install the module"
            ) from error
        raise BrokenPlugin(
            f"{what}: {module} cannot be imported: {describe_error(error)}. Correct it"
        ) from error


def _run(file: Path, what: str) -> ModuleType:
    if not file.is_file():
        folder = file.parent
        known = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        hint = suggest(file.name, known) if known else f"{str(folder)!r} has no .py files"
        raise PluginError(f"{what}: the file {str(file)!r} does not exist; {hint}")
    name = _module_name(file)
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"no loader for {str(file)!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # attrs and dataclasses look up annotations there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

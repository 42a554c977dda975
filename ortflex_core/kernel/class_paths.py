"""Components by the path of their class: ``"my_module:MyLoss"`` or ``"my_losses.py:MyLoss"``.

The part before the last colon is an importable module or a file that ends in ``.py``; the part
after it is a class in that module or file. A file is imported once per process, under a name
derived from its path, and its folder is not added to ``sys.path``.

A module is code: it runs only if a user names it, in Python or in a recipe. A file that is data (a
checkpoint, a run folder, the header of a state) names installed plugins only, except for classes
that the caller passes (:class:`DataFile`, ``SECURITY.md``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from ortflex_core.kernel.entries import Entry, singular
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    ConfigError,
    PluginError,
    describe_error,
    suggest,
)

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*|[^\0]*\.py")
_PREFIX = "ortflex_file_"
_importing = threading.RLock()


def is_class_path(text: object) -> bool:
    """Whether a string is the path of a class.

    >>> is_class_path("my_module:MyLoss"), is_class_path("runs/losses.py:MyLoss")
    (True, True)
    >>> is_class_path("adam"), is_class_path("cuda:1"), is_class_path("http://a")
    (False, False, False)
    """
    if not isinstance(text, str):
        return False
    module, colon, name = text.rpartition(":")
    return bool(colon and _CLASS.fullmatch(name) and _MODULE.fullmatch(module))


def with_name(spec: Any) -> Any:
    """A table with the key ``target`` as one with the key ``name``, at any depth.

    >>> with_name({"target": "my_module:MyLoss", "factor": 2})
    {'name': 'my_module:MyLoss', 'factor': 2}

    Raises:
        ConfigError: a table has both keys.
    """
    if isinstance(spec, list | tuple) and type(spec) in (list, tuple):
        return type(spec)(with_name(part) for part in spec)
    if not isinstance(spec, Mapping):
        return spec
    if is_class_path(spec.get("target")):
        if "name" in spec:
            raise ConfigError(
                f"give name or target, not both: the name is {spec['name']!r}, the target "
                f"{spec['target']!r}"
            )
        rest = {key: value for key, value in spec.items() if key != "target"}
        spec = {"name": spec["target"], **rest}
    return {key: with_name(value) for key, value in spec.items()}


def named(spec: Any) -> Iterator[str]:
    """The class paths of a value: of strings and of the classes of objects, at any depth.

    >>> list(named({"loss": ["adam", {"name": "my_module:MyLoss"}]}))
    ['my_module:MyLoss']
    """
    if isinstance(spec, Mapping | list | tuple):
        for value in spec.values() if isinstance(spec, Mapping) else spec:
            yield from named(value)
    elif is_class_path(spec):
        yield target(spec)
    elif type(spec).__module__ != "builtins":
        if path := of_class(type(spec)):
            yield path
        if attrs.has(type(spec)):
            for field in attrs.fields(type(spec)):
                yield from named(getattr(spec, field.name, None))


def target(path: str) -> str:
    """A class path with the absolute path of its file; a module is not changed.

    >>> target("my_module:MyLoss")
    'my_module:MyLoss'
    """
    module, _, cls = path.rpartition(":")
    return f"{Path(module).resolve()}:{cls}" if module.endswith(".py") else path


@attrs.frozen
class DataFile:
    """A file that is data: its names select installed plugins only.

    Attributes:
        label: the file in a sentence: ``the checkpoint 'runs/1'``.
        way_out: how a caller passes an object instead; ``{key}`` stands for the key.
        passed: the class paths, and the folders of plugins, that the caller gave.
    """

    label: str
    way_out: str
    passed: frozenset[str] = frozenset()

    def allows(self, path: str) -> bool:
        """Whether the caller gave this class path."""
        return target(path) in self.passed

    def refusal(self, what: str, key: str) -> str:
        """The error about code that the file names as the value of a key."""
        return (
            f"{self.label} names {what}, which is code; a file that is data names installed plugins "
            f"only. {self.way_out.format(key=key)}; or, if you trust all code that the file names, "
            "load it with trust_code=True (--trust-code)"
        )


def of_class(cls: type) -> str | None:
    """The path of a class; None if another process could not find it there.

    >>> from fractions import Fraction
    >>> of_class(Fraction)
    'fractions:Fraction'
    """
    module, name = sys.modules.get(cls.__module__), cls.__qualname__
    member: Any = module
    for part in name.split("."):
        member = getattr(member, part, None)
    if module is None or member is not cls or cls.__module__ == "__main__":
        return None
    if cls.__module__.startswith(_PREFIX):
        return f"{module.__file__}:{name}"
    return f"{cls.__module__}:{name}"


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
        """Import the class.

        Raises:
            PluginError: there is no such module, or no such class in it.
            BrokenPlugin: the module raises an error.
        """
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


def entry(kind: str, path: str, name: str = "") -> PathEntry:
    """The entry of a class path; nothing is imported."""
    module, _, cls = path.rpartition(":")
    version = ""
    if module.endswith(".py"):
        from ortflex_core.kernel.regular_files import TEXT, read_bytes

        file = Path(module).resolve()
        module = str(file)
        version = f"{zlib.crc32(read_bytes(file, TEXT)):08x}" if file.is_file() else ""
    place = f"{module}:{cls}"
    point = importlib.metadata.EntryPoint(name or place, place, f"ortflex.{kind}")
    return PathEntry(kind, name or place, place, module, version, point)


def in_folder(folder: Path, kinds: Mapping[str, type]) -> Iterator[PathEntry]:
    """The components in the files of a folder: classes of a kind that have a ``name``.

    Files whose names begin with ``_`` are left out; the others are imported.

    Raises:
        ConfigError: the folder does not exist or has no such class.
        BrokenPlugin: a file raises an error.
    """
    if not folder.is_dir():
        raise ConfigError(f"plugins: the folder {str(folder)!r} does not exist")
    has_component = False
    for file in sorted(folder.glob("[!_]*.py")):
        module = _import_code(str(file.resolve()), f"plugins: the file {str(file)!r}")
        for cls in vars(module).values():
            if not _is_own(cls, module) or inspect.isabstract(cls) or not getattr(cls, "name", ""):
                continue
            kind = next((k for k, base in kinds.items() if issubclass(cls, base)), "")
            if kind:
                has_component = True
                yield entry(kind, f"{module.__file__}:{cls.__qualname__}", cls.name)
    if not has_component:
        raise ConfigError(
            f"plugins: no file in {str(folder)!r} has a component: a class of a kind (Loss, Optimizer, …), "
            "or a callback, with a name"
        )


def _is_own(cls: object, module: ModuleType) -> bool:
    return isinstance(cls, type) and cls.__module__ == module.__name__


def _module_name(file: Path) -> str:
    return f"{_PREFIX}{zlib.crc32(str(file).encode()):08x}_{file.stem}"


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

"""Components by the path of their class: ``"my_module:MyLoss"`` or ``"my_losses.py:MyLoss"``.

The part before the last colon is an importable module or a file that ends in ``.py``; the part
after it is a class in that module or file. :mod:`~ortflex_core.kernel.path_entries` imports it.

A module is code: it runs only if a user names it, in Python or in a recipe. A file that is data (a
checkpoint, a run folder, the header of a state) names installed plugins only, except for classes
that the caller passes (:class:`DataFile`, ``SECURITY.md``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.kernel.errors import ConfigError

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*|[^\0]*\.py")
PREFIX = "ortflex_file_"
"""The beginning of the names of modules that are files."""


def is_class_path(text: object) -> bool:
    """Whether a string is the path of a class.

    >>> is_class_path("my_module:MyLoss"), is_class_path("runs/losses.py:MyLoss")
    (True, True)
    >>> is_class_path("adam"), is_class_path("cuda:1"), is_class_path("http://a")
    (False, False, False)
    """
    module, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    return bool(colon and _CLASS.fullmatch(name) and _MODULE.fullmatch(module))


def with_name(spec: Any) -> Any:
    """A table with the key ``target`` as one with the key ``name``, at any depth; not with both.

    >>> with_name({"target": "my_module:MyLoss", "factor": 2})
    {'name': 'my_module:MyLoss', 'factor': 2}
    """
    if isinstance(spec, list | tuple) and type(spec) in (list, tuple):
        return type(spec)(with_name(part) for part in spec)
    if not isinstance(spec, Mapping):
        return spec
    if is_class_path(spec.get("target")):
        if "name" in spec:
            raise ConfigError(
                f"set name or target, not both: the name is {spec['name']!r}, the target "
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

    ``label`` is the file in a sentence: ``the checkpoint 'runs/1'``; ``way_out`` how a caller passes an
    object instead, with ``{key}`` for the key; ``passed`` are the class paths, and the folders of plugins,
    that the caller gave.
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
    if cls.__module__.startswith(PREFIX):
        return f"{module.__file__}:{name}"
    return f"{cls.__module__}:{name}"

"""Every error that ortflex raises on purpose, the reasons in those of onnxruntime, and suggested names.

All of them derive from :class:`OrtflexError`, so that a caller can catch the project's
errors as one family; each also derives from the built-in exception a Python user expects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


class OrtflexError(Exception):
    """The base class of all errors of ortflex."""


class RuntimeUnavailable(OrtflexError, RuntimeError):
    """onnxruntime is missing, installed twice, or broken; the message says how to repair it."""


class ModelError(OrtflexError, ValueError):
    """The .onnx file cannot be read, or cannot be trained as it is."""


class DataError(OrtflexError, ValueError):
    """Data does not fit the model or the loss: its names, shapes, types, lengths or values."""


class ConfigError(OrtflexError, ValueError):
    """One or several errors of a recipe; ``problems`` lists them, one line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ArgumentError(OrtflexError, TypeError):
    """A call does not fit the function: an argument is unknown, missing, or given twice."""


class PluginError(OrtflexError, LookupError):
    """A plugin is unknown or broken, or two plugins have the same name."""


class BrokenPlugin(PluginError):
    """A plugin cannot be imported, its code raised, or it returned a value its kind does not allow.

    ``culprit`` is the object whose code failed, if there is one.
    """

    def __init__(self, text: str, culprit: object = None) -> None:
        super().__init__(text)
        self.culprit = culprit


class Unsupported(OrtflexError, RuntimeError):
    """No backend (or not the requested one) can train this problem in this environment."""


class GraphError(OrtflexError, ValueError):
    """A formula or a graph is ill-formed: it has wrong types, shapes, operators or cycles."""


class MissingKernel(GraphError):
    """The installed onnxruntime lacks an operator of a graph, or lacks it for these types."""


class NoGradientRule(OrtflexError, LookupError):
    """An operator between a parameter and the loss has no gradient rule.

    A rule raises it with a short reason, for a form of its operator that it does not support; the
    reverse walk adds the node, the path and the ways out (``complete``).
    """

    def __init__(self, text: str, *, complete: bool = False) -> None:
        super().__init__(text)
        self.complete = complete


class NotDecomposed(OrtflexError, LookupError):
    """A node has a form that the decomposition of its operator does not compute.

    A decomposition raises it with a short reason, such as "with past keys".
    """


class NotDifferentiable(OrtflexError, ValueError):
    """A gradient was requested through an operator that is declared not differentiable."""


class CheckpointError(OrtflexError, ValueError):
    """A checkpoint is missing, incomplete, or belongs to a different model or run."""


MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What code that trusts a node raises when the node does not fit its operator's definition."""


class TrainingDiverged(OrtflexError, ArithmeticError):
    """The loss is no longer finite; the last good state was kept."""


def describe_error(error: BaseException) -> str:
    """The type and message of a third-party error, for a message: ``ValueError: no such card``.

    >>> describe_error(SystemExit(9))
    'SystemExit: 9'
    """
    try:
        text = printable(str(error))[:_LONGEST_LINE]
    except Exception:  # __str__ is code of a plugin, too
        text = "(an error whose message cannot be read)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


LONG = 10**300
"""Larger integers are not written to files or messages: Python converts at most 4300 digits."""


def short_repr(thing: object) -> str:
    """The repr of an object for a message, shortened; it works even if the object's repr fails.

    >>> short_repr(1.5), short_repr(10**5000)
    ('1.5', 'an integer of more than 300 digits')
    """
    if isinstance(thing, int) and abs(thing) >= LONG:
        return "an integer of more than 300 digits"
    try:
        return repr(thing)[:_COMPARED].replace("\n", " ")
    except Exception:  # code of a plugin
        return f"an object of {type(thing).__name__}"


def suggest(
    name: object,
    known: Iterable[object],
    synonyms: Mapping[str, str] | None = None,
    listing: str = "",
) -> str:
    """Return the end of an error message: the nearest names, or the known ones if none is near.

    A name that is no string is shown as Python writes it. ``synonyms`` maps names that are used elsewhere
    to known ones; ``listing`` says where all are listed.

    >>> suggest("adm", ["sgd", "adam"])
    "did you mean 'adam'? Known: adam, sgd"
    >>> suggest(-1, ["loss", b"loss"])
    "Known: b'loss', loss"
    >>> suggest("lr", ["rate"], {"lr": "rate"})
    "did you mean 'rate'? Known: rate"
    >>> suggest("w1", [f"w{k}" for k in range(20)], listing="`ortflex check` lists all")
    "did you mean 'w1'? `ortflex check` lists all"
    """
    # Names come from files and callers, so that some are no strings: history[-1], bytes of a damaged file.
    name = name if isinstance(name, str) else short_repr(name)
    names = sorted({n if isinstance(n, str) else short_repr(n) for n in known})
    listed = f"Known: {_listed(names)}"
    close = _near(name, names, (synonyms or {}).get(name.lower()))
    if not close:
        return listing if listing and len(names) > MANY else listed
    meant = f"did you mean {' or '.join(map(repr, close))}?"
    if len(listed) <= _SHORT:
        return f"{meant} {listed}"
    return f"{meant} {listing}".rstrip()


def _near(name: str, names: list[str], meant: str | None) -> list[str]:
    """At most two names that were probably meant."""
    if meant in names:
        return [meant]
    if len(name) > _COMPARED:
        # A file may have names of any length; the comparison takes time in its square.
        return []
    import difflib  # only mistakes need it

    close = difflib.get_close_matches(name, [n for n in names if len(n) <= _COMPARED], 2, 0.6)
    # "AdamW" is nearer to adamw than to adam.
    same = [n for n in names if n.lower() == name.lower()]
    close = same or close
    if len(close) == 2:
        # Name the second only if it is about as likely as the first.
        first, second = (difflib.SequenceMatcher(None, c, name).ratio() for c in close)
        close = close if second >= first - 0.1 else close[:1]
    return close


_COMPARED = 200
_SHOWN = 40
MANY = 32
"""More names than these are not listed where a listing of all has a place of its own."""
_SHORT = 60
"""Characters of a list of known names that is shown in addition to the nearest ones."""
_LONGEST_LINE = 2000


def _listed(names: list[str]) -> str:
    """The names for a message, shortened if there are very many or very long ones."""
    parts = [n if len(n) <= _COMPARED else f"{n[:_COMPARED]}…" for n in names[:_SHOWN]]
    rest = f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(parts) or "none") + rest


def printable(text: str, *, lines: bool = True) -> str:
    r"""Return a string for a terminal: control characters become dots, very long lines lose their middle.

    Names come from files, and a terminal obeys control characters. ``lines=False`` is for a string
    that has to stay on one line, such as a comment.

    >>> printable("a\x1b[2Jb\nc"), printable("a\nb = 1", lines=False)
    ('a·[2Jb\nc', 'a·b = 1')
    """
    if lines:
        return "\n".join(printable(line, lines=False) for line in text.split("\n"))
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"
    return "".join(c if c.isprintable() else "·" for c in text)


_BOUND_REACHED = re.compile(r"more than \d+ iterations of the Loop '[^']*'")
"""The node that fails when a loop reaches the bound of ``ortflex_core.compiler.operators.loop_bounds``."""
_GROWN = re.compile(r"a state of more than \d+ elements of the Loop '[^']*'")
"""The node that fails when a state grows beyond the bound of runs that measure a model."""
_RUNNING = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_PLACE = re.compile(r"^(/\S+ .*?\) (?=\S)|\S+\.(h|cc|cu):\d+ )")


def error_reason(error: BaseException) -> str:
    """The first line of onnxruntime's message: node and reason, without the location in its source code."""
    if endless := _BOUND_REACHED.search(str(error)):
        return f"{endless[0]}; it does not end on these data, or needs a larger bound"
    if grown := _GROWN.search(str(error)):
        return f"{grown[0]}, in a run that only measures the model"
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    node = _RUNNING.search(first)
    for marker in ("Status Message: ", "[ONNXRuntimeError] : "):
        if marker in first:
            first = first.rsplit(marker, 1)[1]
    first = _PLACE.sub("", first)
    if node:
        first = f"{node[1]} node {node[2]!r}: {first}"
    return first[:500]

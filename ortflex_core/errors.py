"""Every error that ortflex raises on purpose, and the one function that suggests names.

All of them derive from :class:`OrtflexError`, so that a caller can catch the project's
errors as one family; each also derives from the built-in exception a Python user expects.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class OrtflexError(Exception):
    """Root of the tree."""


class RuntimeUnavailable(OrtflexError, RuntimeError):
    """onnxruntime is missing, installed twice, or broken; the text says how to mend it."""


class ModelError(OrtflexError, ValueError):
    """The .onnx file cannot be read, or cannot be trained as it is."""


class DataError(OrtflexError, ValueError):
    """Data do not fit the model or the loss: names, shapes, types, lengths, values."""


class ConfigError(OrtflexError, ValueError):
    """One or several errors of a recipe; ``problems`` lists them, one line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class PluginError(OrtflexError, LookupError):
    """A plugin is unknown, broken, or there are two of the same name."""


class Unsupported(OrtflexError, RuntimeError):
    """No backend (or not the one asked for) can train this problem here."""


class GraphError(OrtflexError, ValueError):
    """A formula or a graph is ill-formed: types, shapes, operators, cycles."""


class MissingKernel(GraphError):
    """The installed onnxruntime lacks an operator of a graph, or lacks it for these types."""


class NoGradientRule(OrtflexError, LookupError):
    """An operator between a parameter and the loss has no gradient rule.

    A rule raises it with a few words, for a form of its operator that it does not know; the engine
    adds node, path and ways out (``complete``).
    """

    def __init__(self, text: str, *, complete: bool = False) -> None:
        super().__init__(text)
        self.complete = complete


class NotDifferentiable(OrtflexError, ValueError):
    """A gradient was asked for through an operator that is declared to have none."""


class CheckpointError(OrtflexError, ValueError):
    """A checkpoint is missing, incomplete, or belongs to something else than what is here."""


MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What code that trusts a node raises where the node is not what its operator asks for."""


class TrainingDiverged(OrtflexError, ArithmeticError):
    """The loss is not finite any more; the last good state was kept."""


class Problems:
    """Collects errors, so that all of them are reported at once.

    >>> problems = Problems()
    >>> problems.collect(lambda: int("one"))
    >>> problems.extend(["epochs: expected an integer >= 1, got 0"])
    >>> len(problems.lines)
    2
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._last: Exception | None = None

    def extend(self, lines: Iterable[str]) -> None:
        """Add problems that were found without an exception."""
        self.lines.extend(lines)

    def collect(self, make: Callable[[], Any]) -> Any:
        """The result of ``make``; None, for use until :meth:`raise_all`, where it failed."""
        try:
            return make()
        except ConfigError as error:
            self.lines.extend(error.problems)
            self._last = error
        except (OrtflexError, ValueError, TypeError) as error:
            self.lines.append(str(error))
            self._last = error
        return None

    def raise_all(self) -> None:
        """Raise what was found, if anything.

        Raises:
            ConfigError: all problems; a single one of a kind of its own (ModelError, PluginError)
                is raised as it is.
        """
        if len(self.lines) == 1 and self._last is not None:
            raise self._last
        if self.lines:
            raise ConfigError(self.lines) from self._last


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: what was probably meant, and what there is.

    >>> nearest("adm", ["sgd", "adam"])
    "did you mean 'adam'? Known: adam, sgd"
    """
    names = sorted(set(known))
    if len(name) > _COMPARED:
        # A file may have names of any length; to compare them takes the square of it.
        return f"Known: {_listed(names)}"
    close = difflib.get_close_matches(name, [n for n in names if len(n) <= _COMPARED], 2, 0.6)
    same = [
        n for n in names if n.lower() == name.lower()
    ]  # "AdamW" is nearer to adamw than to adam
    close = same or close
    if len(close) == 2:
        # The second is worth a word only where it is about as likely as the first.
        first, second = (difflib.SequenceMatcher(None, c, name).ratio() for c in close)
        close = close if second >= first - 0.1 else close[:1]
    listed = f"Known: {_listed(names)}"
    if not close:
        return listed
    return f"did you mean {' or '.join(map(repr, close))}? {listed}"


_COMPARED = 200
_SHOWN = 100
_LONGEST_LINE = 2000


def _listed(names: list[str]) -> str:
    """The names for a message; of very many, or very long ones, the beginning."""
    shown = [n if len(n) <= _COMPARED else f"{n[:_COMPARED]}…" for n in names[:_SHOWN]]
    more = f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(shown) or "none") + more


def printable(text: str, *, lines: bool = True) -> str:
    r"""Text for a terminal: control characters become dots, very long lines lose their middle.

    Names come out of files, and a terminal obeys control characters. ``lines=False`` is for a text
    that has to stay on its line, such as a comment.

    >>> printable("a\x1b[2Jb\nc"), printable("a\nb = 1", lines=False)
    ('a·[2Jb\nc', 'a·b = 1')
    """
    if lines:
        return "\n".join(printable(line, lines=False) for line in text.split("\n"))
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"
    return "".join(c if c.isprintable() else "·" for c in text)

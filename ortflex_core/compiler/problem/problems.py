"""The mistakes in the settings of a run, collected so that one error reports them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ortflex_core.kernel.errors import ConfigError, OrtflexError


class Problems:
    """Collects errors, so that all of them are reported at once.

    >>> problems = Problems()
    >>> problems.collect(int, "one")
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

    def collect(self, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of a call, or None if it failed; :meth:`raise_all` reports the failure later."""
        try:
            return make(*args, **options)
        except ConfigError as error:
            self.lines.extend(error.problems)
            self._last = error
        except (OrtflexError, ValueError, TypeError) as error:
            self.lines.append(str(error))
            self._last = error
        return None

    def raise_all(self) -> None:
        """Raise the collected problems as one ConfigError; a single ModelError or PluginError as it is."""
        if len(self.lines) == 1 and self._last is not None:
            raise self._last
        if self.lines:
            raise ConfigError(self.lines) from self._last

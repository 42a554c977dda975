"""Regular expressions of PEFT's configurations, matched in linear time.

A file may have any pattern, and Python's engine takes exponential time for some (``((a+)+)+!``). Here
a pattern becomes an automaton whose states are followed together, so that matching takes time in
(states of the pattern) · (characters of the name). Everything that people write in such patterns is
supported: characters, ``.``, classes, groups, ``|``, ``*``, ``+``, ``?``, ``{m,n}``, ``^`` and ``$``.
References, lookarounds and flags need another engine and are refused.

Source: Thompson, "Regular Expression Search Algorithm", CACM 11 (1968).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ortflex_core import short_repr

_LONGEST = 5_000
_MOST_STATES = 5_000
"""Of one pattern."""
_MOST_WORK = 3_000_000
"""States that are visited while the patterns of one file are matched: about a second."""
_END = 1
_DEEPEST = 50
_ESCAPES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Test = Callable[[str], bool]


class Refused(Exception):
    """The problem of a pattern, to which the caller adds file and key."""


@attrs.define
class _State:
    """A character to read (``test``), a place to be at (``at``), or neither; and the states after it."""

    test: Test | None = None
    at: str | None = None
    after: list[int] = attrs.field(factory=list)


@attrs.define
class Patterns:
    r"""Compiled patterns, each for the end of a module's path: after a dot, or from its start.

    Names are read from their last character to the first, because most patterns differ there.

    >>> Patterns([r"layers\.[0-9]+\.(q|v)_proj", "fc"]).first("model.layers.10.q_proj")
    'layers\\.[0-9]+\\.(q|v)_proj'
    """

    _texts: Sequence[str]
    _states: list[list[_State]] = attrs.field(init=False, factory=list)
    _work: int = attrs.field(init=False, default=_MOST_WORK)

    def __attrs_post_init__(self) -> None:
        """Compile the patterns.

        Raises:
            Refused: one is not closed or not supported, or has too many states.
        """
        for text in self._texts:
            try:
                if len(text) > _LONGEST:
                    raise Refused(f"it has more than {_LONGEST} characters")
                self._states.append(_Builder(text).automaton())
            except Refused as error:
                raise Refused(f"the pattern {short_repr(text)} cannot be used: {error}") from error

    def first(self, name: str) -> str | None:
        """The first pattern that matches a name; None if no pattern does.

        Raises:
            Refused: the patterns have taken too many steps.
        """
        for text, states in zip(self._texts, self._states, strict=True):
            if self._matches(states, name):
                return text
        return None

    def _matches(self, states: list[_State], name: str) -> bool:
        length = len(name)
        now = self._closure(states, [0], length, length)
        for place in range(length, 0, -1):
            char = name[place - 1]
            reached = [
                follower
                for number in now
                if (test := states[number].test) is not None and test(char)
                for follower in states[number].after
            ]
            now = self._closure(states, reached, place - 1, length)
            if not now:
                return False
        return _END in now

    def _closure(self, states: list[_State], begin: list[int], place: int, length: int) -> set[int]:
        """All states that are reached without a character."""
        seen, waiting = set[int](), begin
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            state = states[number]
            here = state.at is None or place == (0 if state.at == "^" else length)
            if state.test is None and here:
                waiting.extend(state.after)
        self._work -= len(seen)
        if self._work < 0:
            raise Refused("matching its patterns takes too long; use simpler ones")
        return seen


class _Builder:
    """Reads a pattern by recursive descent; every part has a first and a last state."""

    def __init__(self, text: str) -> None:
        self.states = [_State(), _State()]
        self._text, self._at, self._depth = text, 0, 0

    def automaton(self) -> list[_State]:
        r"""The states of ``(.*\\.)?(pattern)$`` from the end: state 0 is the start, and _END is reached."""
        first, last = self._choice()
        if self._at < len(self._text):
            raise self._refused("the group that ends here was not opened")
        self.states[0].after.append(first)
        dot, rest = self._new(_is(".")), self._new(lambda char: True)
        self.states[last].after += [_END, dot]
        self.states[dot].after += [rest, _END]
        self.states[rest].after += [rest, _END]
        return self.states

    def _refused(self, what: str) -> Refused:
        return Refused(f"{what} (character {self._at + 1})")

    def _next(self) -> str:
        """The next character, or "" at the end."""
        return self._text[self._at : self._at + 1]

    def _taken(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _new(self, test: Test | None = None, at: str | None = None) -> int:
        if len(self.states) >= _MOST_STATES:
            raise Refused(f"it needs more than {_MOST_STATES} states; repeat less")
        self.states.append(_State(test, at))
        return len(self.states) - 1

    def _choice(self) -> tuple[int, int]:
        start, end = self._new(), self._new()
        while True:
            first, last = self._sequence()
            self.states[start].after.append(first)
            self.states[last].after.append(end)
            if not self._taken("|"):
                return start, end

    def _sequence(self) -> tuple[int, int]:
        start = end = self._new()
        while self._next() not in ("", "|", ")"):
            first, last = self._repeated()
            self.states[last].after.append(start)  # the text is read from its end
            start = first
        return start, end

    def _repeated(self) -> tuple[int, int]:
        begin = self._at
        part = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return part
        after = self._at
        least, most = bounds
        # Copies are read again, because states cannot be shared.
        start = end = self._new()
        for count in range(max(least, 1) if most is None else most):
            if count:
                self._at = begin
                part = self._atom()
            first, last = part
            self.states[end].after.append(first)
            fresh = self._new()
            self.states[last].after.append(fresh)
            if most is None and count == max(least, 1) - 1:
                self.states[last].after.append(first)
            if count >= least:
                self.states[end].after.append(fresh)
            end = fresh
        self._at = after
        return start, end

    def _bounds(self) -> tuple[int, int | None] | None:
        """The least and the largest number of repetitions, if any are given here."""
        char = self._next()
        if char and char in "*+?":
            self._at += 1
            out: tuple[int, int | None] | None = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        else:
            out = self._counts()
            if out is None:
                return None
        self._taken("?")  # the shortest match is a match, too
        if self._next() in ("*", "+", "?"):
            raise self._refused("two repetitions follow one another")
        return out

    def _counts(self) -> tuple[int, int | None] | None:
        """``{m}``, ``{m,}``, ``{,n}`` or ``{m,n}``; anything else in braces is characters."""
        close = self._text.find("}", self._at)
        if self._next() != "{" or close < 0:
            return None
        low, comma, high = self._text[self._at + 1 : close].partition(",")
        numbers = [n for n in (low, high) if n]
        if not all(n.isascii() and n.isdigit() for n in numbers) or not (low or comma):
            return None
        if any(len(n) > 4 for n in numbers):
            raise self._refused("it repeats too often")
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise self._refused("the least number of repetitions is above the largest")
        self._at = close + 1
        return least, most

    def _atom(self) -> tuple[int, int]:
        char = self._next()
        self._at += 1
        if char == "(":
            return self._group()
        if char in ("^", "$"):
            state = self._new(at=char)
        elif char == "[":
            state = self._new(self._class())
        elif char == ".":
            state = self._new(lambda c: c != "\n")
        elif char == "\\":
            state = self._new(self._escaped())
        elif char in ("*", "+", "?"):
            self._at -= 1
            raise self._refused("there is nothing to repeat")
        else:
            state = self._new(_is(char))
        end = self._new()
        self.states[state].after.append(end)
        return state, end

    def _group(self) -> tuple[int, int]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._refused(f"more than {_DEEPEST} groups are inside one another")
        if self._taken("?"):
            if self._taken("P<"):
                close = self._text.find(">", self._at)
                if not self._text[self._at : max(close, self._at)].isidentifier():
                    raise self._refused("the name of a group is broken")
                self._at = close + 1
            elif not self._taken(":"):
                raise self._refused("lookarounds, references and flags are not supported")
        out = self._choice()
        if not self._taken(")"):
            raise self._refused("a group is not closed")
        self._depth -= 1
        return out

    def _escaped(self) -> Test:
        char = self._next()
        self._at += 1
        if not char:
            raise self._refused("the backslash at the end escapes nothing")
        test = _ESCAPES.get(char.lower())
        if test is not None:
            return test if char.islower() else _not(test)
        if char in _CONTROLS:
            return _is(_CONTROLS[char])
        if char.isalnum():
            raise self._refused(f"\\{char} is not supported")
        return _is(char)

    def _class(self) -> Test:
        negated = self._taken("^")
        tests: list[Test] = []
        begin = self._at
        while self._next() != "]" or self._at == begin:
            if not self._next():
                raise self._refused("a class is not closed")
            tests.append(self._member())
        self._at += 1

        def one(char: str) -> bool:
            return any(test(char) for test in tests)

        return _not(one) if negated else one

    def _member(self) -> Test:
        """A character, an escape, or a range of characters in a class."""
        low = self._next()
        self._at += 1
        if low == "\\":
            if self._next().lower() in _ESCAPES:
                return self._escaped()
            low = self._literal()
        following = self._text[self._at : self._at + 2]
        if len(following) < 2 or following[0] != "-" or following[1] == "]":
            return _is(low)
        self._at += 2
        high = self._literal() if following[1] == "\\" else following[1]
        if high < low:
            raise self._refused("the range of characters is empty")
        return lambda char: low <= char <= high

    def _literal(self) -> str:
        """The character that an escape stands for."""
        char = self._next()
        self._at += 1
        if not char or (char.isalnum() and char not in _CONTROLS):
            raise self._refused(f"\\{char} is not supported here")
        return _CONTROLS.get(char, char)


def _is(char: str) -> Test:
    return lambda other: other == char


def _not(test: Test) -> Test:
    return lambda char: not test(char)

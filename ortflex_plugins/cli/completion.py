"""Completion in a shell: names of plugins, keys of recipes and their values.

Only what lists names is imported, because the shell waits for each answer.
"""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

_Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names_of(*kinds: str, words: bool = False) -> _Complete:
    """Complete the names of plugins of the given kinds; with ``words``, also the names of the kinds."""

    def complete(
        _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        own = _kinds() if not kinds else list(kinds)
        return _items([*(own if words else ()), *_names(own)], incomplete)

    return complete


def kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the kinds of plugins, in the singular."""
    return _items([word(kind) for kind in _kinds()], incomplete)


def word(kind: str) -> str:
    """The name of a kind on the command line.

    >>> word("losses"), word("process_groups"), word("gradients")
    ('loss', 'process_group', 'gradient')
    """
    from ortflex_core import TABLES, singular

    regular = kind.removesuffix("s") if kind in TABLES else singular(kind).replace(" ", "_")
    return "data" if kind == "data" else regular


def overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete KEY=VALUE: the keys of recipes, then the values that are names.

    bash divides ``optimizer=ad`` into three words and completes the last one; other shells pass it as
    one word.
    """
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _items([f"{key}={name}" for name in _values(key)], incomplete)
    before = list(ctx.params.get(param.name or "") or ())
    while before and before[-1] == "=":
        before.pop()
    # In other shells, earlier words are complete, such as epochs=3.
    if before and "=" not in before[-1] and before[-1] in _keys():
        return _items(_values(before[-1]), incomplete)
    return _items([f"{name}=" for name in _keys()], incomplete)


def _keys() -> list[str]:
    import attrs

    from ortflex_core import Recipe

    return [field.name for field in attrs.fields(Recipe)]


def _values(key: str) -> list[str]:
    """The names that a key accepts; a key for a number has none."""
    from ortflex_core import key_choices, kinds_of_plugins

    if key not in _keys():
        return []
    kind = {**kinds_of_plugins(), "data": "", "validation": ""}.get(key)
    return sorted({*key_choices(key), *(_names([kind]) if kind else ())})


def _kinds() -> list[str]:
    from ortflex_core import Plugins

    return list(Plugins.discover().kinds)


def _names(kinds: list[str]) -> list[str]:
    from ortflex_core import Plugins

    plugins = Plugins.discover()
    return [name for kind in kinds for name in plugins[kind].names()]


def _items(names: list[str], incomplete: str) -> list[CompletionItem]:
    low = incomplete.lower()
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.lower().startswith(low)]

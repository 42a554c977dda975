"""The values that callbacks store in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortflex_core.kernel.construct import converter, explain
from ortflex_core.kernel.errors import CheckpointError, printable, short_repr
from ortflex_core.kernel.types import Array


class Saved:
    """The values that callbacks store in a checkpoint: numbers, strings, lists and arrays, by owner.

    >>> saved = Saved()
    >>> saved.put("counter", {"steps": 3, "worst": None})
    >>> saved.get("counter", {"steps": int, "worst": float | None})
    {'steps': 3, 'worst': None}

    Args:
        source: the file that the values are from, for messages.
    """

    def __init__(self, source: str = "checkpoint.json") -> None:
        self._source = source
        self._values: dict[str, dict[str, Any]] = {}

    def put(self, owner: str, values: Mapping[str, Any]) -> None:
        """Store ``values`` under the name of their owner.

        Raises:
            CheckpointError: the name is taken, or a value is not JSON and not an array.
        """
        if owner in self._values:
            raise CheckpointError(f"two callbacks keep their state under the name {owner!r}")
        for key, value in values.items():
            if not isinstance(value, np.ndarray):
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"the callback {owner!r} stores {key!r} = {short_repr(value)}, which is neither "
                        f"an array nor JSON: {error}"
                    ) from error
        self._values[owner] = dict(values)

    def get(
        self,
        owner: str,
        shape: Mapping[str, Any] | None = None,
        *,
        optional: Mapping[str, Any] | None = None,
        others: Any = None,
    ) -> dict[str, Any] | None:
        """The values that :meth:`put` stored under that name, or None.

        Any user can edit the file of a checkpoint, so declare its keys and types: with
        ``shape`` every value has the type that is declared for its key.

        Args:
            owner: the name.
            shape: the type of the value of every key, such as ``int``, ``float | None``, ``list[int]``
                or ``np.ndarray``; None returns the values unchanged. A list is returned as a tuple.
            optional: the same for keys that may be missing, in a checkpoint of an older version for
                example; they are None then.
            others: the type of the values of all other keys; None if there may be no others.

        Raises:
            CheckpointError: a key is missing, not known or of another type; names file and key.
        """
        values = self._values.get(owner)
        if values is None or shape is None:
            return None if values is None else dict(values)
        problems = [f"{key} is missing" for key in shape if key not in values]
        out: dict[str, Any] = dict.fromkeys(optional or ())
        types = {**(optional or {}), **shape}
        for key, value in values.items():
            wanted = types.get(key, others)
            if wanted is None:
                problems.append(f"{key} is not known")
            else:
                problems += _convert(value, wanted, key, out)
        if problems:
            lines = "; ".join(
                f"callbacks.{owner}.{printable(problem[:200], lines=False)}"
                for problem in problems[:5]
            )
            raise CheckpointError(f"{self._source!r} is broken: {lines}")
        return out

    def split(self) -> tuple[dict[str, dict[str, Any]], dict[str, Array]]:
        """The JSON part, and the arrays by ``callback/<owner>/<key>``."""
        plain: dict[str, dict[str, Any]] = {}
        arrays: dict[str, Array] = {}
        for owner, values in self._values.items():
            plain[owner] = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
            arrays |= {
                f"callback/{owner}/{k}": v for k, v in values.items() if isinstance(v, np.ndarray)
            }
        return plain, arrays


def _convert(value: Any, wanted: Any, key: str, out: dict[str, Any]) -> list[str]:
    if wanted is np.ndarray or isinstance(value, np.ndarray):
        if wanted is not np.ndarray or not isinstance(value, np.ndarray):
            what = "an array" if wanted is np.ndarray else "no array"
            return [f"{key}: expected {what}, got {type(value).__name__}"]
        out[key] = value
        return []
    try:
        out[key] = converter(tuple).structure(value, wanted)
    except Exception as error:  # cattrs raises groups
        return explain(error, key)
    return []

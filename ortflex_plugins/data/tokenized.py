"""The data source ``tokenized``: a column of strings as token ids."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    TABLE,
    Array,
    Columns,
    DataError,
    DataSource,
    expected_count,
    install_command,
    is_count,
    lines,
    open_regular,
    open_text,
    read_text,
    reason,
    setting,
    suggest,
)
from ortflex_plugins.data._tables import pyarrow

_MADE = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
_LONGEST_NAME = 1000


def _length(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not is_count(value):
        raise ValueError(f"Tokenized.length: {expected_count(value)}")


def _inputs(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    odd = [name for name in value if name not in _MADE]
    if odd or not value:
        raise ValueError(f"Tokenized.inputs must be some of {', '.join(_MADE)}, got {list(value)}")


@attrs.frozen(kw_only=True)
class Tokenized(DataSource):
    """Token ids of the strings in a CSV, JSON Lines or Parquet file.

    The tokenizer is read from a tokenizer.json file. The inputs ``input_ids``, ``attention_mask`` and
    ``token_type_ids`` are int64 arrays of shape [rows, length]. Shorter strings are padded, and longer
    strings are truncated. ``pair`` is the column of the second string of each row. If ``target`` is a
    name, the labels have the shape [rows]; they are int64 if all of them are integers, float32 if all
    are numbers, and strings otherwise. If ``target`` is a mapping, each key is the name of a label and
    each value is its column; ``{}`` means that there are no labels. All rows are kept in memory, where
    each token takes 8 bytes per input.

    Raises:
        DataError: tokenizers (or pyarrow) is not installed, the file or a column does not exist, or a row
            has no string; the error names the line or the row.

    >>> Tokenized(path="reviews.csv", tokenizer="tokenizer.json").length
    128

    Source: the ``tokenizers`` package and its file format; the ids are the results of ``encode_batch``.
    """

    name: ClassVar[str] = "tokenized"

    path: str = setting(help="a .csv (with a header), .jsonl or .parquet file")
    tokenizer: str = setting(
        help="the tokenizer.json file; a relative path is relative to the folder of ``path``"
    )
    text: str = setting(default="text", help="the column of strings")
    pair: str | None = setting(default=None, help="the column of the second strings")
    target: str | Mapping[str, str] | None = setting(
        default="label", help="the label column, or {label = column}; {} means no labels"
    )
    length: int = setting(default=128, validator=_length, help="the number of tokens per row")
    inputs: Sequence[str] = setting(
        default=tuple(_MADE), validator=_inputs, help="the inputs to create"
    )
    pad: str | None = setting(
        default=None,
        help="the padding token; by default, the tokenizer.json file determines it, or, if the file "
        "names none, it is a common token such as [PAD]",
    )

    def load(self) -> Columns:
        """Read the file and tokenize its strings."""
        if not os.path.lexists(self.path):
            raise DataError(f"{self.path}: no such file")
        tokenizer = self._tokenizer()
        target = self.target if self.target is not None else {}
        labels = {"y": target} if isinstance(target, str) else dict(target)
        strings = [self.text] if self.pair is None else [self.text, self.pair]
        columns = _columns(Path(self.path), [*strings, *labels.values()])
        for name in strings:
            _check_strings(columns[name], f"{self.path}, column {name!r}")
        rows = columns[self.text]
        if self.pair is not None:
            rows = list(zip(rows, columns[self.pair], strict=True))
        encoded = tokenizer.encode_batch(rows)
        out = {
            name: np.array([getattr(one, _MADE[name]) for one in encoded], np.int64)
            for name in self.inputs
        }
        return Columns(
            inputs=out,
            labels={
                n: _labels(columns[c], f"{self.path}, column {c!r}") for n, c in labels.items()
            },
        )

    def _tokenizer(self) -> Any:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"strings are read by tokenizers, which cannot be imported ({error}); "
                f"{install_command('text')}"
            ) from error
        file = Path(self.path).parent / self.tokenizer
        try:
            tokenizer = tokenizers.Tokenizer.from_str(read_text(file, TABLE))
        except FileNotFoundError:
            raise DataError(f"tokenizer: the file {str(file)!r} does not exist") from None
        except Exception as error:  # the package raises Exception itself
            raise DataError(f"{file}: cannot be read as a tokenizer: {error}") from error
        known = tokenizer.padding or {}
        token = self.pad or known.get("pad_token")
        token = token or next((p for p in _PADS if tokenizer.token_to_id(p) is not None), None)
        if token is None or tokenizer.token_to_id(token) is None:
            what = "it has none of the usual padding tokens" if token is None else f"no {token!r}"
            raise DataError(f"{file}: {what}; name a token of its vocabulary: pad = …")
        tokenizer.enable_truncation(self.length)
        tokenizer.enable_padding(
            length=self.length,
            pad_id=tokenizer.token_to_id(token),
            pad_token=token,
            direction=known.get("direction", "right"),
        )
        return tokenizer


def _columns(file: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Some columns of a file, by name."""
    ending = file.suffix.lower()
    if ending == ".parquet":
        pyarrow()
        import pyarrow.parquet as parquet

        try:
            with open_regular(file) as raw, parquet.ParquetFile(raw) as opened:
                _check_names(file, names, opened.schema_arrow.names)
                table = opened.read(columns=list(dict.fromkeys(names)))
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{file}: cannot be read: {error}") from error
        out: dict[str, list[Any]] = {name: table[name].to_pylist() for name in names}
    else:
        readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".json": _jsonl_rows}
        if ending not in readers:
            raise DataError(f"{file}: expected a .csv, .jsonl or .parquet file")
        try:
            out = {name: [] for name in names}
            for row in readers[ending](file):
                _check_names(file, names, row)
                for name in out:
                    out[name].append(row[name])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{file}: cannot be read: {reason(error)}") from error
    if names and not out[names[0]]:
        raise DataError(f"{file}: the data are empty: 0 rows")
    return out


def _check_names(file: Path, names: Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise DataError(f"{file}: no column {name!r}; {suggest(name, list(known))}")


def _csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    with open_text(file, newline="", encoding="utf-8-sig") as text:
        reader = csv.DictReader(lines(text, file))
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{file}, line {reader.line_num}: expected {len(reader.fieldnames or ())} fields"
                )
            yield row


def _jsonl_rows(file: Path) -> Iterator[dict[str, Any]]:
    with open_text(file, encoding="utf-8-sig") as text:
        for number, line in enumerate(lines(text, file), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number}: expected an object, {{…}}")
            yield row


def _check_strings(values: Sequence[Any], where: str) -> None:
    odd = next((k for k, value in enumerate(values) if not isinstance(value, str)), None)
    if odd is not None:
        raise DataError(f"{where}: row {odd} has {values[odd]!r}, expected a string")


def _labels(values: Sequence[Any], where: str) -> Array:
    """int64 if all are integers, float32 if all are numbers, else strings."""
    missing = next((k for k, value in enumerate(values) if value in (None, "")), None)
    if missing is not None:
        raise DataError(f"{where}: row {missing} has no label")
    for convert, kind in ((int, np.int64), (float, np.float32)):
        try:
            if convert is int and any(isinstance(v, float) for v in values):
                continue
            return np.array([convert(value) for value in values], kind)
        except (TypeError, ValueError, OverflowError):
            continue
    strings = [str(value) for value in values]
    longest = max(map(len, strings))
    if longest > _LONGEST_NAME:
        raise DataError(
            f"{where}: row {[len(t) for t in strings].index(longest)} has a label of {longest} "
            "characters; the label column may be a column of strings"
        )
    return np.array(strings)

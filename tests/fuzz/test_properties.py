"""Readers on anything at all, drawn by hypothesis, which looks for the smallest that fails."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, OperatorSetIdProto, TensorProto

from ortflex_core import Model, OrtflexError, printable, suggest, to_toml
from ortflex_core.compiler.onnx_files.model_file import array_of
from ortflex_core.compiler.onnx_files.vetting import check_tensor
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.artifacts import checkpoint_record as record
from ortflex_core.training.config.toml import parse_override, read_toml
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.npz import Npz
from ortflex_plugins.pictures.html import text as escaped

pytestmark = pytest.mark.once

some = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def answered(read: Callable[[], Any]) -> Any:
    """The result, or None where ortflex refuses; anything else is an error of the test."""
    try:
        return read()
    except OrtflexError:
        return None


def in_file(content: bytes, read: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        return answered(lambda: read(str(path)))


@some
@given(st.binary(max_size=300))
def test_any_bytes(content: bytes) -> None:
    answered(lambda: Model(content))
    in_file(content, lambda path: Npz(path=path).load())
    in_file(b"PK\x03\x04" + content, lambda path: Npz(path=path).load())
    in_file(content, lambda path: Csv(path=path).load())
    in_file(content, read_toml)


def saved_as(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checkpoint.json").write_text(text, "utf-8", "replace")
        Path(folder, "state.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        return answered(lambda: checkpoint.read(folder))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@some
@given(json_values)
def test_any_record_of_a_checkpoint(value: Any) -> None:
    import json

    saved_as(json.dumps(value))
    known = {"format": checkpoint.FORMAT, "structure": value, "arguments": value}
    saved_as(json.dumps(known))
    saved_as(json.dumps(record.seal({**known, "position": value, "files": value})))
    saved_as(json.dumps({**known, "format": 1, "position": value, "callbacks": value}))


@some
@given(st.text(max_size=60))
@example("[" * 2000)
@example("9" * 5000)
def test_any_text_as_a_recipe_or_an_override(text: str) -> None:
    in_file(text.encode("utf-8", "replace"), read_toml)
    answered(lambda: parse_override(text))
    answered(lambda: parse_override(f"key = {text}"))


@some
@given(st.text(), st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3))
def test_any_text_survives_toml(text: str, table: dict[str, str]) -> None:
    """Whatever a name is, a written recipe says the same."""
    try:
        (text + "".join([*table, *table.values()])).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no text that any file could hold
    written = f"text = {to_toml(text)}\ntable = {to_toml(table)}"
    assert tomllib.loads(written) == {"text": text, "table": table}


@some
@given(st.text())
def test_any_text_on_a_terminal_and_in_a_page(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown.count("\n") == text.count("\n")
    assert printable(shown) == shown
    page = escaped(text)
    assert not set(page) & set("<>\"'")
    assert suggest(text, ["adam", text])


tensors = st.builds(
    TensorProto,
    name=st.just("t"),
    dims=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=4),
    data_type=st.integers(0, 25),
    raw_data=st.none() | st.binary(max_size=40),
    float_data=st.lists(st.floats(width=32), max_size=4),
    int32_data=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    string_data=st.lists(st.binary(max_size=3), max_size=3),
)


@some
@given(tensors)
def test_any_tensor_that_is_let_in_can_be_read(tensor: TensorProto) -> None:
    """What was vetted has as many elements as it says, or is refused with a word."""
    try:
        check_tensor(tensor, "the model", "the initializer")
    except OrtflexError:
        return
    array = answered(lambda: array_of(tensor, None))
    if array is not None:
        assert list(array.shape) == list(tensor.dims)
    model = ModelProto(ir_version=8, graph=GraphProto(name="g", initializer=[tensor]))
    model.opset_import.append(OperatorSetIdProto(version=17))
    assert answered(lambda: Model(model)) is None  # there are no nodes

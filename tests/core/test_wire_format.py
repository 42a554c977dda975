"""Models are counted before they are parsed: an object of protobuf takes a hundred times its bytes.

The class: a bound that is checked after the memory was taken.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper

from ortflex_core import Model, ModelError
from ortflex_core.compiler.onnx_files import model_file, wire_format
from ortflex_core.compiler.onnx_files.vetting import MOST_NODES
from tests.fuzz import protobufs, seeds
from tests.fuzz.values import scrambled

pytestmark = pytest.mark.once


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where protobuf is asked for objects."""
    monkeypatch.setattr(onnx, "load_model_from_string", None)


GRAPH, NODE, INITIALIZER = b"\x3a", b"\x0a", b"\x2a"
"""Tags of a model and of its graph."""


def message(tag: bytes, content: bytes) -> bytes:
    """A field with a message, whose length is written in groups of seven bits."""
    number, length = len(content), b""
    while number > 127:
        length += bytes([number & 127 | 128])
        number >>= 7
    return tag + length + bytes([number]) + content


def empty(field: bytes, count: int, *around: bytes) -> bytes:
    """Empty messages of a field of the graph, inside of messages ``around``."""
    content = (field + b"\0") * count
    for tag in reversed(around or (GRAPH,)):
        content = message(tag, content)
    return content


BOMBS = {
    "nodes": empty(NODE, 1_000_000),
    # The graph's first node has an attribute (field 5) whose graph (field 6) has the nodes.
    "nodes of a branch": empty(NODE, 1_000_000, GRAPH, NODE, b"\x2a", b"\x32"),
    "nodes of a function": empty(b"\x3a", 1_000_000, b"\xca\x01"),
    "tensors": empty(INITIALIZER, wire_format.MOST_PARTS + 1),
    "nodes before bytes that are no message": empty(NODE, 600_000)[:-1] + b"\xff" * 12,
}


@pytest.mark.parametrize("what", BOMBS)
@pytest.mark.usefixtures("unparsed")
def test_too_many_messages_are_refused_before_they_are_objects(what: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(BOMBS[what])
    with pytest.raises(ModelError, match=r"m\.onnx"):
        Model(path)
    if what == "nodes":
        with pytest.raises(ModelError):
            Model(BOMBS[what])


@pytest.mark.parametrize("where", ["model", "graph", "node", "tensor", "metadata"])
@pytest.mark.usefixtures("unparsed")
def test_documentation_of_200_mb_is_refused_before_it_is_copied(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound of 2 MB here, so that the test is fast."""
    monkeypatch.setattr(wire_format, "MOST_PROSE", 2 << 20)
    model = ModelProto.FromString(seeds.all_models()["mlp"])
    text = "x" * (3 << 20)
    if where == "metadata":
        model.metadata_props.add(key="a", value=text)
    else:
        graph = model.graph
        parts = {"model": model, "graph": graph, "node": graph.node[1]}
        parts["tensor"] = graph.initializer[0]
        parts[where].doc_string = text
    with pytest.raises(ModelError, match="documentation"):
        Model(model.SerializeToString())


def test_the_number_of_nodes_that_pass_is_that_of_the_other_check() -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], name="n")
    model = ModelProto(graph={"name": "g"})
    model.graph.node.extend([relu] * MOST_NODES)
    check(model.SerializeToString())
    model.graph.node.append(relu)
    with pytest.raises(ModelError, match=f"more than {MOST_NODES} nodes"):
        check(model.SerializeToString())


def check(content: bytes) -> None:
    wire_format.check(content, "the model", MOST_NODES)


def parts(proto: Any) -> int:
    """Messages and strings in a message, counted by protobuf's own objects."""
    count = 0
    for _, value in proto.ListFields():
        for item in value if hasattr(value, "append") or hasattr(value, "add") else [value]:
            if hasattr(item, "ListFields"):
                count += 1 + parts(item)
            elif isinstance(item, str | bytes):
                count += 1
    return count


@pytest.mark.parametrize("name", seeds.all_models())
def test_the_count_is_that_of_the_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every sort of model, to the last entry: the count passes, one less is refused."""
    monkeypatch.setattr(wire_format, "SMALL", 0)
    content = seeds.all_models()[name]
    count = parts(ModelProto.FromString(content))
    monkeypatch.setattr(wire_format, "MOST_PARTS", count)
    check(content)
    monkeypatch.setattr(wire_format, "MOST_PARTS", count - 1)
    with pytest.raises(ModelError, match="entries"):
        check(content)


def test_what_protobuf_reads_is_never_called_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated fields and bytes: the walk refuses only what protobuf refuses."""
    monkeypatch.setattr(wire_format, "SMALL", 0)
    rng = Random(5)
    sources = list(seeds.all_models().values())
    read = refused = 0
    for _ in range(1500):
        content = rng.choice(sources)
        if rng.random() < 0.5:
            model = ModelProto.FromString(content)
            protobufs.mutate(rng, model)
            content = model.SerializeToString()
        else:
            content = scrambled(rng, content)
        try:
            ModelProto.FromString(content)
        except (DecodeError, RecursionError):
            refused += 1
            continue
        read += 1
        check(content)
    assert read > 500
    assert refused > 100


def test_the_graph_of_a_step_may_have_more_nodes(tmp_path: Path) -> None:
    model = ModelProto(graph={"name": "g"})
    node = helper.make_node("Relu", ["x"], ["y"], name="n", doc_string="0123456789")
    model.graph.node.extend([node] * (MOST_NODES + 1))
    path = tmp_path / "step.onnx"
    path.write_bytes(model.SerializeToString())
    assert len(model_file.read_proto(path).graph.node) == MOST_NODES + 1


@pytest.mark.parametrize("name", seeds.all_models())
def test_values_that_are_split_off_are_those_of_the_file(name: str) -> None:
    """With the values at their places again, it is the message of the whole file."""
    content = seeds.all_models()[name]
    bare, found = wire_format.split(content, 16)
    model, whole = ModelProto.FromString(bare), ModelProto.FromString(content)
    apart = [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]
    assert len(apart) >= len(found)
    values = {tensor.name: content[at : at + size] for tensor, at, size in found}
    for tensor in apart:
        if tensor.name in values:
            tensor.raw_data = values[tensor.name]
            tensor.ClearField("data_location")
    assert model == whole
    assert not any(len(t.raw_data) >= 16 for t in ModelProto.FromString(bare).graph.initializer)


def test_forms_that_onnx_does_not_write_are_read_whole() -> None:
    tensor = onnx.numpy_helper.from_array(np.arange(8.0), "w")
    field = message(GRAPH, onnx.GraphProto(initializer=[tensor]).SerializeToString())
    for content in (field * 2, field[:-1], b"\x3b" + field):
        assert wire_format.split(content, 16) == (content, [])
    bare, found = wire_format.split(field, 16)
    assert [(t.name, field[at : at + size]) for t, at, size in found] == [("w", tensor.raw_data)]
    assert len(bare) == len(field) - len(tensor.raw_data)  # two bytes go, two say where it is
    twice = tensor.SerializeToString() + b"\x4a\x01a"
    both = onnx.TensorProto(name="w", raw_data=bytes(32), float_data=[1]).SerializeToString()
    for odd in (twice, both):
        content = message(GRAPH, message(INITIALIZER, odd))
        assert wire_format.split(content, 16) == (content, [])

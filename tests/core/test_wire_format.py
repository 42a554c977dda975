"""Files of strangers: models are counted before they are parsed, values checked before they are used."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import ModelProto, helper
from safetensors.numpy import load_file, save_file

from ortflex_core import CheckpointError, Model, ModelError, Trainer, apply_state, suggest
from ortflex_core.compiler.onnx_files import model_file, wire_format
from ortflex_core.compiler.onnx_files.vetting import MOST_NODES
from ortflex_core.training.artifacts import hub as repository
from ortflex_plugins.cli import predict
from tests import edited_checkpoints, models
from tests.fuzz import seeds
from tests.fuzz.values import mutate, scrambled
from tests.training import make, plugins, regression

pytestmark = pytest.mark.once


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where protobuf is asked for objects."""
    monkeypatch.setattr(onnx, "load_model_from_string", None)


# The class: a bound that is checked after the memory was taken. An object of protobuf takes a hundred times
# its bytes.
# The class: a bound that is checked after the memory was taken; an object of protobuf takes a hundred times
# its bytes.
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
            mutate(rng, model)
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


# Values: a count, a name, a path ------------------------------------------------------------------


@pytest.mark.parametrize("name", [-1, None, b"a", 1.5, ("a",), slice(2)])
def test_a_name_that_is_no_string_is_not_known(name: Any) -> None:
    assert suggest(name, ["loss", b"loss", 3, None]).endswith("Known: 3, None, b'loss', loss")


@pytest.mark.parametrize("step", [np.zeros(3, np.int64), np.array(-1), np.array(np.nan)])
def test_a_step_that_is_no_count_is_an_error_of_the_checkpoint(step: Any, tmp_path: Path) -> None:
    trainer = make(models.mlp((3, 4, 1)), epochs=1, optimizer="adam")
    trainer.fit(*regression(rows=8, features=3))
    place = trainer.save(tmp_path / "c")
    arrays = load_file(place / "state.safetensors")
    save_file({**arrays, "slot/step": step}, place / "state.safetensors")
    edited_checkpoints.seal(place)
    with pytest.raises(CheckpointError, match="slot/step"):
        Trainer.resume(place, plugins=plugins()).fit(*regression(rows=8, features=3))


@pytest.mark.parametrize(
    "locations",
    [["m.onnx"], ["."], [""], ["./m.onnx"], ["a/../b"], ["/a"], ["a", "a/b"], ["m.onnx/b"]],
)
def test_data_files_of_the_hub_whose_names_are_none(locations: list[str], tmp_path: Path) -> None:
    """Two spellings of one name are one file."""
    with pytest.raises(ModelError, match=r"m\.onnx"):
        opened(locations, tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(10_000))
    assert opened(["w.bin", "./w.bin"], tmp_path) == ["m.onnx", "w.bin"]


def opened(locations: list[str], folder: Path) -> list[str]:
    """The files of a model of the Hub whose tensors are at these locations."""
    model = models.mlp((3, 4, 1))
    for k, tensor in enumerate(model.graph.initializer):
        location = locations[k % len(locations)]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        tensor.ClearField("raw_data")
    (folder / "m.onnx").write_bytes(model.SerializeToString())

    class Hub:
        def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None) -> str:
            return str(folder / filename)

    with repository.open_model("a/b", "m.onnx", None, Hub()) as (path, _):
        return sorted(p.name for p in path.parent.iterdir())


def test_a_spreadsheet_does_not_compute_names_and_strings_of_a_model() -> None:
    arrays = {
        "=cmd|' /C calc'!A0": np.array([[1.0, -2.0]]),
        "@sum": np.array(["+1+1", "-5", "fine"])[:1],
        "y": np.array([-0.5]),
    }
    text = predict._encode(arrays, ".csv").decode()
    heads, cells = list(csv.reader(io.StringIO(text)))
    assert all(cell[0] not in "=+@\t\r" for cell in (*heads, *cells))
    assert [float(cells[k]) for k in (0, 1, 3)] == [1, -2, -0.5]
    assert predict._plain("-5") == "-5"
    assert predict._plain("-5+1") == "'-5+1"


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("averaging", [None, "ema"])
def test_a_state_with_values_that_are_not_finite_is_not_applied(
    value: float, averaging: str | None, tmp_path: Path
) -> None:
    """Of a runner that diverged: the file and the tensor are named, and no model is written."""
    trainer = make(models.linear(), averaging=averaging)
    place = trainer.export_step(tmp_path / "step", *regression(rows=8))
    path = place / "state.safetensors"
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    arrays = load_file(path)
    key = next(k for k in arrays if "average" in k) if averaging else "coef"
    arrays[key] = arrays[key].copy()
    arrays[key].flat[0] = value
    save_file(arrays, path, header["__metadata__"])
    with pytest.raises(CheckpointError, match="not finite") as error:
        apply_state(models.linear(), path, tmp_path / "out.onnx", plugins=plugins())
    assert repr(str(path)) in str(error.value)
    assert "'coef'" in str(error.value)
    assert not (tmp_path / "out.onnx").exists()

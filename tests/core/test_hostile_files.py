"""Models from strangers: nothing outside their folder is read, nothing is taken on trust."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex_core import Model, ModelError
from ortflex_core.compiler.onnx_files import model_file
from tests import models
from tests.training import make, regression, same

node = helper.make_node
posix = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")


# Data outside of the file -------------------------------------------------------------------------


def outside(location: str, offset: int = 0, length: int | None = None) -> ModelProto:
    """``linear()`` whose matrix, of 20 bytes, is in another file."""
    model = models.linear()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    said = {"location": location, "offset": str(offset)}
    said |= {} if length is None else {"length": str(length)}
    for key, value in said.items():
        tensor.external_data.add(key=key, value=value)
    return model


def in_attribute(location: str) -> ModelProto:
    """The same matrix as the value of a Constant."""
    model = outside(location)
    tensor = model.graph.initializer[0]
    model.graph.node.insert(0, node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[0]
    return model


def in_branch(location: str) -> ModelProto:
    """The same matrix as an initializer of a subgraph."""
    model = outside(location)
    tensor = model.graph.initializer[0]
    tensor.name = "matrix"
    shape = [models.floats("inner", 5, 1)]
    branch = helper.make_graph([node("Identity", ["matrix"], ["inner"])], "b", [], shape, [tensor])
    made = node("If", ["yes"], ["coef"], then_branch=branch, else_branch=branch)
    model.graph.node.insert(0, made)
    del model.graph.initializer[0]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    return model


PLACES = [outside, in_attribute, in_branch]
OUTSIDE = "is outside the model's folder; put the data next to the model"
SECRET = np.arange(5, dtype=np.float32).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a model, next to a file that is none of its business."""
    (tmp_path / "secret.bin").write_bytes(SECRET)
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def saved(folder: Path, model: ModelProto) -> Path:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.fixture(params=[2**30, 0], ids=["read", "mapped"])
def huge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the data of a model are read into memory, or stay in their file."""
    monkeypatch.setattr(model_file, "HUGE", request.param)


@pytest.mark.usefixtures("huge")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../secret.bin", "{}/../secret.bin", "x/../../secret.bin"])
def test_external_data_stay_in_the_folder(
    folder: Path, place: Callable[[str], ModelProto], location: str
) -> None:
    path = saved(folder, place(location.format(folder)))
    with pytest.raises(ModelError, match=f"{OUTSIDE}|bytes in other files"):
        Model(path)


LINKS = {
    "file": {"link": "../secret.bin"},
    "folder": {"link": ".."},
    "chain": {"link": "other", "other": "../secret.bin"},
    "circle": {"link": "link"},
}


@posix
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", LINKS)
def test_links_that_lead_out_of_the_folder(
    folder: Path, place: Callable[[str], ModelProto], what: str
) -> None:
    location = "link/secret.bin" if what == "folder" else "link"
    for name, target in LINKS[what].items():
        (folder / name).symlink_to(target)
    path = saved(folder, place(location))
    with pytest.raises(ModelError, match=f"{OUTSIDE}|link"):
        Model(path)


@posix
def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "w.bin").write_bytes(SECRET)
    (folder / "link").symlink_to("w.bin")
    for place in PLACES:
        model = Model(saved(folder, place("link")))
        assert SECRET in model.proto.SerializeToString()


@pytest.mark.usefixtures("huge")
@pytest.mark.parametrize(
    ("location", "offset", "length", "text"),
    [
        ("w.bin", -4, None, "'coef' needs 20 from offset -4|the location is not valid"),
        ("w.bin", 4, None, "lacks its external data: .*but 'coef' needs 20 from offset 4"),
        ("w.bin", 2**62, None, "'coef' needs 20 from offset 4611686018427387904"),
        ("w.bin", 0, 8, "and declares 8"),
        ("w.bin", 0, -1, "and declares -1|the location is not valid"),
        ("", 0, None, "is not a regular file"),
        (".", 0, None, "is not a regular file"),
        ("nothing.bin", 0, None, "lacks its external data.*No such file"),
        ("w.bin\0.txt", 0, None, "null"),
        ("n" * 65536, 0, None, "too long|the location is not valid"),
    ],
)
def test_places_that_make_no_sense(
    folder: Path, location: str, offset: int, length: int | None, text: str
) -> None:
    (folder / "w.bin").write_bytes(SECRET)
    with pytest.raises(ModelError, match=text):
        Model(saved(folder, outside(location, offset, length)))


@pytest.mark.parametrize("place", PLACES)
def test_without_a_path_nothing_is_read_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[str], ModelProto]
) -> None:
    monkeypatch.chdir(folder.parent)
    for source in (place("secret.bin"), place("secret.bin").SerializeToString()):
        with pytest.raises(ModelError, match=r"of '(coef|matrix)' are in another file; pass"):
            Model(source)


def test_external_data_are_trained_as_before(folder: Path) -> None:
    whole = models.linear()
    (folder / "w.bin").write_bytes(b"head" + whole.graph.initializer[0].raw_data + b"tail")
    x, y = regression(rows=20)
    trainers = [make(m, epochs=1) for m in (whole, saved(folder, outside("w.bin", 4, 20)))]
    for trainer in trainers:
        trainer.fit(x, y)
    same(trainers[1].get_state(), trainers[0].get_state(), 0)


# Sizes --------------------------------------------------------------------------------------------


def claimed(*dims: int, **fields: Any) -> TensorProto:
    """A tensor that says it has a shape, whatever its data."""
    return TensorProto(**{"name": "coef", "data_type": TensorProto.FLOAT, "dims": dims} | fields)


def holding(tensor: TensorProto, place: Callable[[str], ModelProto]) -> ModelProto:
    made = place("none")
    attributes = made.graph.node[0].attribute
    if place is outside:
        held = [made.graph.initializer[0]]
    else:
        held = [a.t if place is in_attribute else a.g.initializer[0] for a in attributes]
    for one in held:
        name = one.name
        one.CopyFrom(tensor)
        one.name = name
    return made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (claimed(2**40, raw_data=b"1234"), "which needs 4398046511104 bytes, but 4 are given"),
        (claimed(2**40, float_data=[1.0]), "which needs 1099511627776 values, but 1 are given"),
        (claimed(2**40), "which needs 1099511627776 values, but 0 are given"),
        # Their product is 0 in 64 bits.
        (claimed(2**32, 2**32, raw_data=b""), f"which needs {2**66} bytes, but 0 are given"),
        (claimed(-1, raw_data=b"1234"), "has a negative size"),
        (claimed(5, 1, raw_data=bytes(24)), "which needs 20 bytes, but 24 are given"),
        (claimed(5, 1, data_type=99, raw_data=bytes(20)), "the type 99, but ONNX does not define"),
    ],
)
def test_tensors_that_claim_more_than_they_bring(
    tensor: TensorProto, text: str, place: Callable[[str], ModelProto]
) -> None:
    with pytest.raises(ModelError, match=text):
        Model(holding(tensor, place))


def test_large_tensors_are_compared_without_being_copied() -> None:
    """Their bytes are counted, which is enough to know that there are not fewer."""
    model = models.linear(300, 200)
    Model(model)
    model.graph.initializer[0].dims[0] = 301
    with pytest.raises(ModelError, match="which needs 240800 bytes"):
        Model(model)


def computed(much: str, weights: dict[str, Any]) -> ModelProto:
    """``Y = X @ coef``, plus what a node makes of almost nothing, added up."""
    return models.parsed(
        f"XW = MatMul(X, coef)  much = {much}  most = ReduceMax<keepdims = 0>(much)  Y = Add(XW, most)",
        {"coef": np.ones((5, 1)), **weights},
        "float[N, 5] X",
        "float[N, 1] Y",
    )


ONE, SQUARE = np.ones((1, 1)), np.array([2**20, 2**20])
NUMBERS = {"zero": np.float32(0), "n": np.float32(2**40), "step": np.float32(1)}
BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "fill": ("ConstantOfShape<value = float[1] {0.5}>(n)", {"n": SQUARE}),
    "expand": ("Expand(one, n)", {"one": ONE, "n": np.array([2**40])}),
    "tile": ("Tile(one, n)", {"one": ONE, "n": SQUARE}),
    "range": ("Range(zero, n, step)", NUMBERS),
    "pad": ("Pad(one, n)", {"one": ONE[0], "n": np.array([2**39, 2**39])}),
    "random": (f"RandomNormal<shape = [{2**40}]>()", {}),
    "product": ("MatMul(a, b)", {"a": np.ones((40000, 1)), "b": np.ones((1, 40000))}),
}


@pytest.mark.parametrize("what", BOMBS)
def test_tensors_out_of_all_proportion_are_never_made(what: str) -> None:
    with pytest.raises(ModelError, match=r"the tensor 'much' would take \d+ bytes"):
        Model(computed(*BOMBS[what]))


def test_an_input_of_any_size_is_nobodys_memory() -> None:
    """Old models are run once to compare them; nobody makes up a terabyte for that."""
    model = models.linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**40
    model.opset_import[0].version = 11
    with pytest.raises(ModelError, match="test values cannot be made for the input X"):
        Model(model)

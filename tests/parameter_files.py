"""Files of networks of torchvision, timm and transformers, without their weights.

``pack`` takes from an exported file what decides about parameters: the graph, names, shapes, what the
exporter says, and the values of what is no weight. Weights are drawn again when a file is read: those of
the networks are random, too. The collection is ``fixtures/parameter_networks.zip``, made by::

    python -m tests.parameter_files FOLDER

where FOLDER has files ``NAME.onnx`` and ``NAME.json``: {"truth": {initializer: whether it is trained},
"trained": [names of parameters that have a gradient]}, see :mod:`tests.parameter_truth`.
"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

STORE = Path(__file__).parent / "fixtures" / "parameter_networks.zip"
_KEPT = ("InputSpec.kind", "ExportedProgram.graph_signature")
_LARGEST = 4096


def pack(model: ModelProto, truth: dict[str, bool]) -> bytes:
    """A file without the values of its weights.

    Raises:
        ValueError: a constant is too large for a fixture.
    """
    for tensor in model.graph.initializer:
        if truth.get(tensor.name, False):
            tensor.ClearField("raw_data")
        elif np.prod(tensor.dims) > _LARGEST:
            raise ValueError(f"{tensor.name} has {np.prod(tensor.dims)} elements")
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        node.ClearField("name")
    initializers = {t.name for t in model.graph.initializer}
    values = [v for v in model.graph.value_info if v.name in initializers]
    del model.graph.value_info[:]
    model.graph.value_info.extend(values)
    for holder in (model.graph, *values):
        kept = [m for m in holder.metadata_props if m.key.endswith(_KEPT)]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)
    return model.SerializeToString()


def unpack(data: bytes, truth: dict[str, bool]) -> ModelProto:
    """The file with random weights."""
    model = onnx.load_model_from_string(data)
    for tensor in model.graph.initializer:
        if truth.get(tensor.name, False):
            rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
            values = 0.1 * rng.standard_normal(tuple(tensor.dims))
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(kind), tensor.name))
    return model


def names() -> list[str]:
    """The networks of the collection."""
    with zipfile.ZipFile(STORE) as store:
        return sorted(n.removesuffix(".onnx") for n in store.namelist() if n.endswith(".onnx"))


def stored(name: str) -> tuple[ModelProto, dict[str, bool]]:
    """One network, and whether torch trains each of its initializers."""
    with zipfile.ZipFile(STORE) as store:
        truth: dict[str, bool] = json.loads(store.read(f"{name}.json"))
        return unpack(store.read(f"{name}.onnx"), truth), truth


def _collected(folder: Path) -> Iterator[tuple[str, bytes, dict[str, bool]]]:
    for path in sorted(folder.glob("*.onnx")):
        told = json.loads(path.with_suffix(".json").read_text())
        truth = {
            n: (t or n in told["trained"]) and not n.endswith(("running_mean", "running_var"))
            for n, t in told["truth"].items()
        }
        try:
            yield path.stem, pack(onnx.load(path), truth), truth
        except ValueError as error:
            print(f"{path.stem} is left out: {error}")


if __name__ == "__main__":
    with zipfile.ZipFile(STORE, "w", zipfile.ZIP_LZMA) as made:
        for stem, model_bytes, expected in _collected(Path(sys.argv[1])):
            # A fixed date: the same networks make the same bytes.
            made.writestr(zipfile.ZipInfo(f"{stem}.onnx"), model_bytes, zipfile.ZIP_LZMA)
            made.writestr(zipfile.ZipInfo(f"{stem}.json"), json.dumps(expected), zipfile.ZIP_LZMA)

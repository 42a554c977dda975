"""The callback ``tensorboard``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import onnx
from onnx import ModelProto, TensorProto

from ortflex_core import Callback, hook, number, setting
from ortflex_plugins.callbacks._extras import require

if TYPE_CHECKING:
    from ortflex_core import Progress, Trainer


# Without slots, so that an object can drop one of its hooks.
@attrs.define(kw_only=True, slots=False)
class Tensorboard(Callback):
    """Writes event files for TensorBoard: the History, histograms of the weights and the model's graph.

    ``epoch/<column>`` shows the History, and ``weights/<parameter>`` shows the weights. The horizontal
    axis of both is the number of finished steps. If ``steps`` is set, the callback also writes
    ``step/loss``, ``step/penalty`` and ``step/rate`` every ``steps`` steps. A resumed run continues in
    the same folder, and TensorBoard hides the earlier entries of repeated steps.
    ``tensorboard --logdir`` displays the files.

    Raises:
        ConfigError: tensorboardX is not installed (extra ``tensorboard``).
        ValueError: a number is negative.

    >>> Tensorboard(folder="logs", steps=100).folder  # doctest: +SKIP
    'logs'

    Source: tensorboardX.SummaryWriter.
    """

    folder: str = setting(
        default="tensorboard", help="the folder, relative to the run folder if there is one"
    )
    steps: int = setting(
        default=0,
        validator=number(ge=0),
        help="the number of steps between two entries of the loss, the penalty and the learning rate; "
        "0 means never",
    )
    histograms: int = setting(
        default=1,
        validator=number(ge=0),
        help="the number of epochs between two histograms of the weights; 0 means never",
    )
    graph: bool = setting(default=True, help="whether to also write the model's graph")
    _writer: Any = attrs.field(default=None, init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Check that the package is installed; drop the hook of steps if it is not used."""
        require("tensorboard", "tensorboardX")
        if not self.steps:
            self.steps_end = None  # type: ignore[assignment,method-assign]

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Open the files, and write the graph and the first weights."""
        from tensorboardX import SummaryWriter

        fresh = progress.step == 0 and progress.epoch == 0
        place = str(trainer.folder / self.folder)
        # Names of files have the time in seconds; two runs in the same second must not share a file.
        suffix = f".{time.time_ns() % 10**9:09d}"
        purge = None if fresh else progress.step + 1
        self._writer = SummaryWriter(place, purge_step=purge, filename_suffix=suffix)
        if fresh:
            if self.graph:
                self._writer.file_writer.add_onnx_graph(_graph_def(trainer.model.proto))
            self._weights(trainer, 0)

    @hook
    def steps_end(
        self,
        progress: Progress,
        losses: Sequence[float],
        penalties: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """Write costs and rate of every ``steps``-th step."""
        first = progress.step - len(losses) + 1
        for k, values in enumerate(zip(losses, penalties, rates, strict=True)):
            if (first + k) % self.steps == 0:
                for name, value in zip(("loss", "penalty", "rate"), values, strict=True):
                    self._writer.add_scalar(f"step/{name}", value, first + k)

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress, record: Mapping[str, float]) -> None:
        """Write the epoch's line of the History, and the weights."""
        for column, value in record.items():
            if column != "epoch":
                self._writer.add_scalar(f"epoch/{column}", value, progress.step)
        if self.histograms and progress.epoch % self.histograms == 0:
            self._weights(trainer, progress.step)
        self._writer.flush()

    @hook
    def train_end(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _weights(self, trainer: Trainer, step: int) -> None:
        for name, array in trainer.get_state().items() if self.histograms else ():
            self._writer.add_histogram(f"weights/{name}", array, step)


# TensorFlow's numbers for ONNX's element types.
_TYPES: dict[int, int] = {
    TensorProto.FLOAT: 1,
    TensorProto.DOUBLE: 2,
    TensorProto.INT32: 3,
    TensorProto.UINT8: 4,
    TensorProto.INT8: 6,
    TensorProto.STRING: 7,
    TensorProto.INT64: 9,
    TensorProto.BOOL: 10,
    TensorProto.BFLOAT16: 14,
    TensorProto.FLOAT16: 19,
}
_LONGEST = 200  # characters of an attribute


def _graph_def(model: ModelProto) -> Any:
    """Inputs, initializers, nodes and outputs of a model, without the values of tensors.

    Source: tensorflow/core/framework/graph.proto, in tensorboardX.
    """
    from tensorboardX.proto.attr_value_pb2 import AttrValue
    from tensorboardX.proto.graph_pb2 import GraphDef
    from tensorboardX.proto.node_def_pb2 import NodeDef
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.proto.versions_pb2 import VersionDef

    graph, names, sources, nodes = model.graph, _Names(), dict[str, str](), list[Any]()

    def tensor(name: str, op: str, dtype: int, sizes: Iterable[int]) -> None:
        sources[name] = names.unused(name)
        dims = [TensorShapeProto.Dim(size=size) for size in sizes]
        attributes = {"shape": AttrValue(shape=TensorShapeProto(dim=dims))}
        if dtype in _TYPES:
            attributes["dtype"] = AttrValue(type=_TYPES[dtype])
        nodes.append(NodeDef(name=sources[name], op=op, attr=attributes))

    constants = {t.name for t in graph.initializer}
    for value in graph.input:
        if value.name not in constants:
            kind = value.type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
            tensor(value.name, "Placeholder", kind.elem_type, dims)
    for initializer in graph.initializer:
        tensor(initializer.name, "Const", initializer.data_type, initializer.dims)
    for node in graph.node:
        name = names.unused(node.name or node.op_type)
        for k, output in enumerate(node.output):
            sources[output] = f"{name}:{k}" if k else name
        inputs = [sources[i] for i in node.input if i in sources]
        texts = {a.name: AttrValue(s=_text(a).encode()) for a in node.attribute}
        nodes.append(NodeDef(name=name, op=node.op_type, input=inputs, attr=texts))
    for value in graph.output:
        source = sources.get(value.name)
        inputs = [source] if source else []
        nodes.append(NodeDef(name=names.unused(value.name), op="Output", input=inputs))
    return GraphDef(node=nodes, versions=VersionDef(producer=22))


class _Names:
    """Unique names that TensorBoard accepts."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unused(self, name: str) -> str:
        clean = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name).strip("/") or "_"
        clean = clean if clean[0].isalnum() else f"x{clean}"
        new, k = clean, 1
        while new in self._taken:
            new, k = f"{clean}_{k}", k + 1
        self._taken.add(new)
        return new


def _text(attribute: onnx.AttributeProto) -> str:
    if attribute.HasField("t") or attribute.HasField("g"):
        return "a graph" if attribute.HasField("g") else "a tensor"
    text = str(onnx.helper.get_attribute_value(attribute))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

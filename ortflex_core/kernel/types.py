"""Frozen descriptions that modules exchange: tensors, sizes and progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import attrs
import numpy as np

from ortflex_core.kernel.errors import GraphError

if TYPE_CHECKING:
    import onnx

Shape = tuple[int | str | None, ...]
"""Sizes; a string is a symbolic dimension, None an unknown one."""

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
"""Arrays by the names of tensors."""


def onnx_dtype(dtype: Any) -> int:
    """The ONNX element type of a numpy dtype (or of anything that numpy accepts as one), in any byte order.

    Raises:
        GraphError: ONNX does not have the type (dates, records, complex numbers of other sizes).
    """
    import onnx

    try:
        return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype).newbyteorder("=")))
    except (KeyError, ValueError) as error:
        raise GraphError(
            f"ONNX has no tensors of type {np.dtype(dtype)}; convert the array, for example with "
            ".astype(numpy.float32)"
        ) from error


def numpy_dtype(elem_type: int) -> np.dtype[Any]:
    """The numpy dtype of an ONNX element type.

    Raises:
        GraphError: ONNX does not define the type.
    """
    import onnx

    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
    except KeyError:
        raise GraphError(f"ONNX does not define an element type {elem_type}") from None


def dtype_name(elem_type: int) -> str:
    """A name for messages: 'float32', 'int64', 'bfloat16'."""
    import onnx

    if elem_type == onnx.TensorProto.UNDEFINED:
        return "unknown"
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    known = elem_type in onnx.TensorProto.DataType.values()
    return numpy_dtype(elem_type).name if known else f"type {elem_type}"


def shape_text(shape: Shape | None) -> str:
    """``[N, 10]`` for messages; unknown sizes are question marks."""
    if shape is None:
        return "[…]"
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def shape_of(tensor: onnx.TypeProto.Tensor) -> Shape | None:
    """The shape in a tensor's type; None without a shape."""
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    """Whether two shapes are known to be equal while the graph is built."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(same_dim(x, y) for x, y in zip(a, b, strict=True))


def same_dim(a: int | str | None, b: int | str | None) -> bool:
    """Whether two sizes are known to be equal while the graph is built."""
    return a is not None and a == b


@attrs.frozen
class TensorSpec:
    """Name, element type (of ONNX) and shape of a tensor."""

    name: str
    dtype: int
    shape: Shape | None = None

    @property
    def numpy(self) -> np.dtype[Any]:
        """The element type in numpy."""
        return numpy_dtype(self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {dtype_name(self.dtype)}{shape_text(self.shape)}"

    def to_proto(self, doc: str = "") -> onnx.ValueInfoProto:
        """The ONNX form of this specification."""
        import onnx

        shape = None if self.shape is None else list(self.shape)
        return onnx.helper.make_tensor_value_info(self.name, self.dtype, shape, doc)

    @classmethod
    def from_proto(cls, info: onnx.ValueInfoProto) -> TensorSpec:
        """Read a graph's input, output or value information."""
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value") or "no type"
            raise GraphError(f"{info.name!r} must be a tensor; its type is {kind}")
        return cls(info.name, info.type.tensor_type.elem_type, shape_of(info.type.tensor_type))


Specs = Mapping[str, TensorSpec]
"""The types and shapes of tensors by their names."""


@attrs.frozen(kw_only=True)
class Size:
    """The usual batch size, and the full batches per epoch if known; the compilation depends on them."""

    rows: int
    epoch_steps: int | None


class PastEpochs(Sequence[Mapping[str, float]]):
    """The results of the epochs so far: the first entries of a list that only grows.

    A copy of the list would take longer in each epoch than in the one before.

    >>> lines = [{"loss": 2.0}, {"loss": 1.0}]
    >>> first = PastEpochs(lines)
    >>> lines.append({"loss": 0.5})
    >>> len(first), first[-1], first[1:]
    (2, {'loss': 1.0}, ({'loss': 1.0},))
    """

    __slots__ = ("_length", "_lines")

    def __init__(self, lines: Sequence[Mapping[str, float]]) -> None:
        self._lines, self._length = lines, len(lines)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return islice(self._lines, self._length)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, float]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> Mapping[str, float] | Sequence[Mapping[str, float]]:
        """An entry, or a tuple of entries."""
        places = range(self._length)[index]
        if isinstance(places, int):
            return self._lines[places]
        return tuple(self._lines[k] for k in places)


@attrs.frozen
class Progress:
    """The progress of a run: its finished steps, epochs and rows, from which schedules compute the rate.

    ``step``, ``epoch`` and ``rows`` start at 0; ``rows`` counts a row once in every epoch. The lengths
    ``epochs``, ``steps_per_epoch`` and ``rows_per_epoch`` are None if they are not known, as for endless
    data. ``history`` contains the finished entries of the :class:`~ortflex_core.History`, one per epoch.

    >>> Progress(step=5, epoch=1, rows=50, epochs=3, steps_per_epoch=4, rows_per_epoch=40).total_steps
    12
    """

    step: int = 0
    epoch: int = 0
    rows: int = 0
    epochs: int | None = None
    steps_per_epoch: int | None = None
    rows_per_epoch: int | None = None
    history: Sequence[Mapping[str, float]] = attrs.field(default=(), eq=False, repr=False)

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run, or None if it is not known."""
        if self.steps_per_epoch is None or self.epochs is None:
            return None
        return self.steps_per_epoch * self.epochs

    @property
    def total_rows(self) -> int | None:
        """The number of rows of the whole run, each counted once per epoch, or None if it is not known."""
        if self.rows_per_epoch is None or self.epochs is None:
            return None
        return self.rows_per_epoch * self.epochs

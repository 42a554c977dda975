"""Types and shapes that cannot be inferred, measured by runs of the model on test inputs.

Operators outside the standard (skl2onnx's Scaler, a runtime's own, a user's) have no shape inference.
The installed onnxruntime can run them: runs with different batch sizes show which dimensions are the
batch and which are fixed. Sizes that a graph computes (N // 2, max(N, 3)) may agree in a few runs by
chance, so further sizes lie on both sides of each constant of that arithmetic; what these runs
cannot show stays unknown. Large tensors are fed, so that they are not copied. Where no size depends on
values, products by large constants are replaced by nodes whose outputs have the same sizes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.control_flow import constant_of
from ortflex_core.compiler.graph.nodes import ancestor_nodes, plain_domain, reads
from ortflex_core.compiler.graph.protos import all_nodes, copied, refill, subgraphs_of
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.operators.equivalence import Runner, check_size
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.kernel.errors import (
    MALFORMED,
    GraphError,
    NoGradientRule,
    OrtflexError,
    Unsupported,
)
from ortflex_core.kernel.types import (
    Array,
    Arrays,
    TensorSpec,
    dtype_name,
    numpy_dtype,
    onnx_dtype,
    shape_text,
)

_log = logging.getLogger("ortflex")
_BATCHES = (2, 3)
_FURTHER = (5, 7, 16)
"""Batches that are run, too, if their inputs are small or the graph computes sizes."""
_SMALL, _LARGEST = 2**20, 2**24
"""Bytes of the inputs of further runs, usually and if the graph computes sizes."""
_LARGE_PRODUCT = 2**16
"""Products by constants of more elements are not computed in these runs."""
# Operators that copy elements of a shape; others compute new sizes from them.
_COPYING = frozenset(
    {"Cast", "Concat", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape"}
    | {"Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Output sizes of these operators depend on the values, so a measured size proves nothing.
_BY_VALUE = frozenset(
    {"NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "StringSplit"}
)
# The inputs whose values determine the output shape.
_STEERING: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Split", "TopK"), (1,)),
    **dict.fromkeys(("SplitToSequence", "SequenceAt", "OneHot", "AffineGrid"), (1,)),
    **dict.fromkeys(("CenterCropPad", "Upsample"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), (1,)),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare"), (1,)),
    **dict.fromkeys(("ConstantOfShape", "If"), (0,)),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), (0,)),
    **dict.fromkeys(("Col2Im", "DFT", "Pad"), (1, 2, 3)),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
}
# Sizes for other symbolic dimensions in the two runs: large enough for most kernels, and unlikely
# to be the size of a layer.
_PRIMES = ((17, 37), (19, 41), (23, 43), (29, 47), (31, 53))
_ANONYMOUS = (5, 7)
# A single size for all of them, which is tried if the model fails with the others.
_TOGETHER = ((8, 16), (16, 32), (32, 64), (8, 8), (16, 16), (32, 32), (64, 64), (1, 1))
# numpy has these types, but onnxruntime does not accept arrays of them.
_NOT_FED = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name.startswith(("BFLOAT", "FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))
)
_SUMMED = (TensorProto.FLOAT, TensorProto.DOUBLE)
_PREFIX = "ortflex.probe/"
_WHOLE = frozenset(
    value for name, value in TensorProto.DataType.items() if name in ("BOOL", "INT32", "INT64")
)

Sizes = tuple[int, int]
"""A size in the first run and in the second."""


@attrs.frozen
class _Symbols:
    """Sizes of the symbolic dimensions that are not the batch."""

    named: Mapping[str, Sizes]
    anonymous: Sizes

    def meaning(self, runs: Sequence[_Point], seen: Sequence[int]) -> int | str | None:
        """The meaning of a dimension in some runs: the batch, a symbol, a fixed size, or unknown."""
        if all(size == run.rows for run, size in zip(runs, seen, strict=True)):
            return "batch"

        def is_symbol(sizes: Sizes) -> bool:
            return all(s == sizes[run.turn] + run.longer for run, s in zip(runs, seen, strict=True))

        names = [name for name, sizes in self.named.items() if is_symbol(sizes)]
        if names or is_symbol(self.anonymous):
            return names[0] if len(names) == 1 and not is_symbol(self.anonymous) else None
        return seen[0] if len(set(seen)) == 1 else None


@attrs.frozen
class _Point:
    """A run.

    ``rows`` are its batch; the other symbols have their first or second size (``turn``) and ``longer``
    more; integers are all ``whole``.
    """

    rows: int
    turn: int
    longer: int = 0
    whole: int = 0


def complete_shapes(model: Model) -> None:
    """Add to a model the types and shapes that inference lacks.

    If the model cannot be run, the reason is kept in ``model.unlearned`` and becomes part of errors
    that follow from unknown types and ranks. If none follows, it is only logged for debugging.
    """
    unknown = model.unknown()
    if not unknown:
        return
    before, model.unlearned = model.unlearned, ""
    try:
        require_runtime()
        model.learn(_learned(model, unknown))
    except (OrtflexError, *MALFORMED) as error:
        own = isinstance(error, OrtflexError)
        model.unlearned = str(error) if own else f"{type(error).__name__}: {error}"
        if model.unlearned != before:
            _log.debug("%s: %s", model.label, explanation(model))


def explanation(model: Model) -> str:
    """The tensors that are unknown after a failed run, and the reason; empty without a failure."""
    if not model.unlearned:
        return ""
    names = model.unknown()
    few = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
    return (
        f"the types or shapes of {len(names)} tensors ({few}) cannot be inferred; running the model "
        f"to measure them failed: {model.unlearned}"
    )


@contextlib.contextmanager
def explain_unknown(model: Model) -> Iterator[None]:
    """The context that adds unknown shapes and operators without a decomposition to errors."""
    try:
        yield
    except OrtflexError as error:
        added = (
            [explanation(model)] if model.unlearned and model.unlearned not in str(error) else []
        )
        if isinstance(error, NoGradientRule | Unsupported):
            added += model.decomposed.explanations()
        if added:
            error.args = ("\n".join([str(error), *added]), *error.args[1:])
        raise


def _learned(model: Model, unknown: Sequence[str]) -> list[TensorSpec]:
    run = _Run(model, unknown)
    inner = [d for spec in model.inputs for d in (spec.shape or ())[1:] if not isinstance(d, int)]
    names = dict.fromkeys(d for d in inner if d is not None)
    tried = [_Symbols(dict(zip(names, _PRIMES, strict=False)), _ANONYMOUS)]
    tried += [_Symbols(dict.fromkeys(names, sizes), sizes) for sizes in _TOGETHER if inner]
    computed, constants = _computed_sizes(model)
    failure: GraphError | None = None
    for symbols in tried:
        points = [_Point(rows, turn) for turn, rows in enumerate(_BATCHES)]
        try:
            runs = [run(point, symbols) for point in points]
        except GraphError as error:
            failure = failure or error
            continue
        unproven = False
        wanted = [*_FURTHER, *constants] if computed else [*_FURTHER]
        for turn, rows in enumerate(sorted(set(wanted)), start=2):
            for longer in (rows, 0) if inner else (0,):
                point = _Point(rows, turn % 2, longer)
                try:
                    if run.bytes_of(point, symbols) > (_LARGEST if computed else _SMALL):
                        raise GraphError("the inputs of this run are too large")
                    runs.append(run(point, symbols))
                    points.append(point)
                    break
                except GraphError:
                    unproven = True
        last = _Point(_BATCHES[1], 1, whole=1)
        with contextlib.suppress(GraphError):  # 1 may be an invalid index
            if run.counts:
                runs.append(run(last, symbols))
                points.append(last)
        return _specs(model, unknown, runs, points, symbols, computed if unproven else set())
    assert failure is not None
    raise failure


def _specs(
    model: Model,
    unknown: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    points: Sequence[_Point],
    symbols: _Symbols,
    unproven: Collection[str],
) -> list[TensorSpec]:
    """Types and shapes on which all runs agree; the sizes of ``unproven`` tensors stay unknown."""
    nodes, inputs = model.internal.graph.node, [spec.name for spec in model.inputs]
    fixed = not any(node.op_type in _BY_VALUE for node in nodes)
    # Then test inputs prove nothing.
    steered = _decide_sizes(nodes, inputs, certainly=True)
    specs = []
    for name in unknown:
        runs = [values[name] for values in found]
        if not all(isinstance(array, np.ndarray) for array in runs):
            continue  # a sequence or a map
        if len({array.ndim for array in runs}) == 1:
            sizes = list(zip(*(array.shape for array in runs), strict=True))
            meanings = (symbols.meaning(points, seen) for seen in sizes)
            shape = tuple(
                meaning
                if not steered and name not in unproven and (fixed or not isinstance(meaning, int))
                else None
                for meaning in meanings
            )
            specs.append(TensorSpec(name, onnx_dtype(runs[0].dtype), shape))
    return specs


def _computed_sizes(model: Model) -> tuple[set[str], list[int]]:
    """The tensors that depend on sizes which the graph computes from sizes, and batches to try.

    The batches lie above each constant of that arithmetic and above their product, so
    that a division, a remainder, a minimum or a maximum changes from one to the other.
    """
    graph = model.internal.graph
    known = {n: model.initializer(n) for n, spec in model.initializers.items() if _is_small(spec)}
    sizes: set[str] = set()
    computed: set[str] = set()
    constants: set[int] = set()
    for node in graph.node:
        inner = [n for part in subgraphs_of(node) for n in all_nodes(part.node)]
        for each in (node, *inner):
            if each.op_type == "Constant" and (value := constant_of(each)) is not None:
                known[each.output[0]] = value
        names = set(reads(node))
        standard = not plain_domain(node.domain)
        steering = {node.input[k] for k in _steering(node) if k < len(node.input)}
        if standard and node.op_type in ("Shape", "Size"):
            sizes.update(node.output)
            continue
        by_rows = standard and node.op_type == "Slice" and _slices_rows(node, known)
        inside = any(n.op_type in ("Shape", "Size") for n in inner)
        if (names - steering) & sizes or inside:
            sizes.update(node.output)
        copies = standard and node.op_type in _COPYING
        arithmetic = inside or ((names - steering) & sizes and not copies)
        if arithmetic or by_rows:
            computed.update(node.output)
            read = {*names, *(name for n in inner for name in (*n.input, *n.output))}
            values = [known[name] for name in read if name in known]
            constants.update(_limits(values))
        elif names & computed:
            computed.update(node.output)
    product = math.prod(constants)
    return computed, sorted({k * c + 1 for c in {*constants, product} - {1} for k in (1, 2)})


def _limits(values: Iterable[Array]) -> Iterator[int]:
    """Numbers at which arithmetic with some constants can change."""
    for array in values:
        if array.dtype.kind in "if" and array.size <= 16:
            wide = np.abs(array[np.isfinite(array)] if array.dtype.kind == "f" else array)
            yield from (int(v) for v in wide.ravel() if 2 <= v < 2**31 - 1)


def _slices_rows(node: NodeProto, known: Arrays) -> bool:
    """Whether a Slice takes some of the rows, as its constants say."""
    names = [*node.input[1:], "", "", ""]
    axes = known.get(names[2]) if names[2] else np.zeros(1)
    return axes is None or bool(np.any(axes == 0))


def _steering(node: NodeProto) -> Sequence[int]:
    """The inputs whose values determine the shape of the output."""
    return () if plain_domain(node.domain) else _STEERING.get(node.op_type, ())


def _is_small(spec: TensorSpec) -> bool:
    """Whether an initializer may be constants of arithmetic with sizes."""
    elements = math.prod(d for d in spec.shape or () if isinstance(d, int))
    return elements <= 16 and spec.dtype in (*_WHOLE, TensorProto.FLOAT)


def _large_products(model: Model, nodes: Iterable[NodeProto]) -> dict[str, int]:
    """The products of data by large constants: their outputs, with the number of columns."""
    varying = {spec.name for spec in model.inputs}
    out = {}
    for node in nodes:
        if varying.isdisjoint(reads(node)):
            continue
        varying.update(node.output)
        if columns := _columns(model, node, varying):
            out[node.output[0]] = columns
    return out


def _decide_sizes(
    nodes: Iterable[NodeProto], names: Iterable[str], *, certainly: bool = False
) -> bool:
    """Whether the values of some tensors decide the sizes of others, perhaps or ``certainly``."""
    varying = set(names)
    for node in nodes:
        if node.op_type in ("Shape", "Size") or varying.isdisjoint(reads(node)):
            continue
        if not certainly and (node.op_type in _BY_VALUE or any(subgraphs_of(node))):
            return True
        if any(k < len(node.input) and node.input[k] in varying for k in _steering(node)):
            return True
        varying.update(node.output)
    return False


def _without_products(
    nodes: Iterable[NodeProto], products: Mapping[str, int]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """The nodes without the products by large constants, and the constants of those that take their place.

    The new nodes have outputs of the same sizes.
    """
    axes = onnx.numpy_helper.from_array(np.asarray([-1]), f"{_PREFIX}axes")
    constants = {axes.name: axes}
    out: list[NodeProto] = []
    for node in nodes:
        columns = products.get(node.output[0])
        if columns is None:
            out.append(node)
            continue
        size = onnx.numpy_helper.from_array(np.asarray([columns]), f"{_PREFIX}{columns}")
        constants[size.name] = size
        column = f"{_PREFIX}{node.output[0]}"
        out.append(helper.make_node("ReduceSum", [node.input[0], axes.name], [column], keepdims=1))
        out.append(helper.make_node("Expand", [column, size.name], [node.output[0]]))
    return out, list(constants.values())


def _without_refusal(node: NodeProto) -> NodeProto:
    """A OneHotEncoder that takes any category, with the same shape; other nodes as they are."""
    if node.op_type != "OneHotEncoder":
        return node
    out = copied(node)
    kept = [a for a in node.attribute if a.name != "zeros"]
    refill(out.attribute, [*kept, helper.make_attribute("zeros", 1)])
    return out


def _columns(model: Model, node: NodeProto, varying: Collection[str]) -> int | None:
    """The columns of a product of data by a large constant matrix; None for other nodes."""
    if plain_domain(node.domain) or node.op_type not in ("MatMul", "Gemm"):
        return None
    settings = {attribute.name: attribute.i for attribute in node.attribute}
    weight = model.value(node.input[1])
    if node.input[1] in varying or settings.get("transA") or weight.dtype not in _SUMMED:
        return None
    sizes = [d for d in weight.shape or () if isinstance(d, int)]
    if len(sizes) != 2 or len(weight.shape or ()) != 2 or math.prod(sizes) <= _LARGE_PRODUCT:
        return None
    return sizes[0] if settings.get("transB") else sizes[1]


class _Run:
    """A session of the part of a model that some tensors depend on."""

    def __init__(self, model: Model, outputs: Sequence[str]) -> None:
        internal, nodes = model.internal, model.ancestors(outputs)
        added: list[TensorProto] = []
        products = _large_products(model, nodes)
        if products and not _decide_sizes(nodes, products):
            nodes, added = _without_products(nodes, products)
            nodes = ancestor_nodes(nodes, outputs)
        read = {name for node in nodes for name in reads(node)}
        part = ModelProto(ir_version=internal.ir_version)
        part.opset_import.extend(internal.opset_import)
        part.graph.name = "probe"
        part.graph.node.extend(map(_without_refusal, nodes))
        inside = {t.name for t in internal.graph.initializer}
        large = {n: s for n, s in model.initializers.items() if n in read and n not in inside}
        part.graph.initializer.extend(t for t in internal.graph.initializer if t.name in read)
        part.graph.initializer.extend(t for t in added if t.name in read)
        given = {n: model.initializer(n) for n, s in large.items() if s.dtype not in _NOT_FED}
        copied = [n for n in large if n not in given]
        if sum(model.initializer(n).nbytes for n in copied) > model_file.HUGE:
            raise GraphError(
                f"{copied[0]!r} is {dtype_name(large[copied[0]].dtype)}, which onnxruntime "
                "accepts only inside a model, and these tensors are too large for that"
            )
        part.graph.initializer.extend(
            onnx.numpy_helper.from_array(model.initializer(n), n) for n in copied
        )
        part.graph.input.extend(
            i for i in internal.graph.input if i.name in read and i.name not in copied
        )
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        self._inputs = [spec for spec in model.inputs if spec.name in read]
        self._runner = Runner(part, given)
        self.counts = any(s.dtype in _WHOLE for s in self._inputs)
        """Whether any input has integers."""

    def __call__(self, point: _Point, symbols: _Symbols) -> dict[str, Any]:
        """The outputs for zeros and empty strings, or other integers: arrays without their values."""
        feeds: dict[str, Array] = {}
        for spec, shape in self._shapes(point, symbols):
            check_size(spec, shape)
            text = spec.dtype == TensorProto.STRING
            feeds[spec.name] = np.zeros(shape, dtype=object if text else numpy_dtype(spec.dtype))
            if text:
                feeds[spec.name].fill("")
            elif spec.dtype in _WHOLE:
                feeds[spec.name].fill(point.whole)
        try:
            return {name: _without_values(value) for name, value in self._runner(feeds).items()}
        except GraphError as error:
            fed = ", ".join(f"{n} {shape_text(a.shape)}" for n, a in feeds.items())
            raise GraphError(f"{error} (on zeros of the shapes {fed})") from error

    def bytes_of(self, point: _Point, symbols: _Symbols) -> int:
        """The bytes of the inputs of a run."""
        return sum(8 * math.prod(shape) for _, shape in self._shapes(point, symbols))

    def _shapes(self, point: _Point, symbols: _Symbols) -> Iterator[tuple[TensorSpec, list[int]]]:
        """The inputs and their shapes in a run."""
        for spec in self._inputs:
            shape = [
                d
                if isinstance(d, int)
                else symbols.named.get(d or "", symbols.anonymous)[point.turn] + point.longer
                for d in spec.shape or ()
            ]
            if spec.shape and not isinstance(spec.shape[0], int):
                shape[0] = point.rows
            yield spec, shape


def _without_values(value: Any) -> Any:
    """An array of the same shape and type that takes no memory; other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)

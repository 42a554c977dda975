"""The evidence that an initializer is a weight or a constant: one table of points, which are summed.

An initializer is trained if the sum is above 0. Each piece of evidence has a name, its points and
the words that ``ortflex check`` prints for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core.kernel.types import Array

POINTS: Mapping[str, int] = {
    # From the file: torch's newer exporter records the kind of each tensor.
    "parameter": 12,
    "buffer": -12,
    "frozen": -12,
    # The place where it is used; the best place counts.
    "product": 5,
    "bias": 4,
    "joined": 1,
    "other": -3,
    "shift": -3,
    "early": -4,
    "setting": -8,
    # Its name.
    "state": 6,
    "weight name": 3,
    "buffer name": -8,
    "constant name": -3,
    "made up": -2,
    # Its values, and the values that are computed from them before they meet the data.
    "random": 2,
    "equal": -1,
    "regular": -3,
    "state of steps": -10,
    "unit": -2,
    "single": -5,
    "filler": -6,
    "computed": -7,
    "turned": -8,
    "sines": -20,
    "mask": -20,
}
"""The points of each piece of evidence; positive ones indicate a weight."""

Kind = Literal["parameter", "buffer", "state", "frozen", "made up", ""]

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_SIGNED = re.compile(r": (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'")
_TELLS: Mapping[str, Kind] = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "buffer",
}
# Names that exporters generate for computed or lifted tensors: onnx::MatMul_12, val_3, 128, _v_45,
# /a/Add.
_MADE_UP = re.compile(
    r"onnx::\w+|_?v(al)?_\d+|\d+|const(ant)?(_fold\w*)?[_\d]*|/.*|_to_copy(_\d+)?", re.I
)
_WEIGHT_NAMES = re.compile(
    r"(.*_)?(weights?|bias(es)?|gamma|beta|tokens?|embed(dings?)?|latents?|quer(y|ies)|gain|"
    r"pos(itions?)?|original[01]|coefs?|temperature|lambda|alpha)\d*(_.*)?"
)
_BUFFER_NAMES = re.compile(
    r"(running_(mean|var)|num_batches_tracked|(original_)?inv_freqs?|\w*freqs?(_cis)?|mask\w*|\w+_mask|"
    r"masked_bias|\w*coords?(_table)?|\w*relative_(position|coords)_(index|table)|mean|std|var|"
    r"_[uv]|weight_u|window|filters?|mel_\w+|embed_scale|normalizer|cos|sin|\w+_(cos|sin)|"
    r"cos_cached|sin_cached|blur\w*|anchors?|grid|slopes|alibi|pe|table|position_ids|epsilon|eps)"
)
_SAMPLE = 65_536
_MASKED = -1e4


@attrs.frozen
class Fact:
    """One piece of evidence, and its words."""

    name: str
    words: str

    @property
    def points(self) -> int:
        """Its points."""
        return POINTS[self.name]


def kinds(proto: ModelProto) -> dict[str, Kind]:
    """The kind of each initializer, if the exporter recorded it.

    torch's newer exporter writes the kind of every tensor; its older one names parameters and
    buffers after their modules, and computed tensors by a number.
    """
    graph = proto.graph
    known_kinds: dict[str, Kind] = {}
    for entry in graph.metadata_props:
        if entry.key == _SIGNATURE:
            known_kinds |= {name: _TELLS[kind] for kind, name in _SIGNED.findall(entry.value)}
    for value in graph.value_info:
        for entry in value.metadata_props:
            if entry.key == _KIND and entry.value in _TELLS:
                known_kinds[value.name] = _TELLS[entry.value]
    older = proto.producer_name == "pytorch" and not known_kinds
    out: dict[str, Kind] = {}
    for tensor in graph.initializer:
        if tensor.name in known_kinds:
            out[tensor.name] = known_kinds[tensor.name]
        elif known_kinds or _MADE_UP.fullmatch(tensor.name):
            # The newer exporter records nothing about computed tensors.
            out[tensor.name] = "made up"
        elif older:
            out[tensor.name] = "state"
    return out


def frozen(kinds: Mapping[str, Kind], moving: Collection[str]) -> dict[str, Kind]:
    """Scale and bias of normalizations with constant running statistics, computed by Add and Mul.

    An example is torchvision's FrozenBatchNorm2d, where all four tensors are buffers.
    """
    still = [n for n in kinds if n.endswith(".running_mean") and n not in moving]
    prefixes = {n.removesuffix("running_mean") for n in still}
    return {
        prefix + last: "frozen"
        for prefix in prefixes
        for last in ("weight", "bias", "running_mean", "running_var")
        if kinds.get(prefix + last) == "state"
    }


def of_name(name: str, kind: Kind = "state") -> Iterator[Fact]:
    """The evidence of the last part of a name, ``weight`` of ``encoder.0.weight``.

    Names of buffers are torch's: in another file ``table`` or ``filters`` may be anything.
    """
    parts = [p for p in re.split(r"[./:]", name) if p and not p.isdigit()]
    last = parts[-1].lower() if parts else ""
    if _BUFFER_NAMES.fullmatch(last):
        yield Fact("buffer name" if kind else "constant name", f"it is called {last!r}")
    elif _WEIGHT_NAMES.fullmatch(last):
        yield Fact("weight name", f"it is called {last!r}")


def of_values(array: Array) -> Iterator[Fact]:
    """The evidence of values: masks, tables of sines, steps and repetitions are rarely weights."""
    low, high = array.min(), array.max()
    if np.isnan(low):
        return  # a broken weight, which ``fit`` reports; masks may be infinite
    if np.isinf(low) or np.isinf(high) or (low <= _MASKED and high <= 0):
        yield Fact("mask", "its values are those of a mask")
        return
    if array.size == 1:
        return
    if low == high:
        yield Fact("equal", f"every value is {float(low):g}")
        return
    if _has_sines(array):
        yield Fact("sines", "its values are sines and cosines")
        return
    flat = array.ravel()
    sample = flat[:: max(1, flat.size // _SAMPLE)].astype(np.float64)
    if _is_regular(sample):
        yield Fact("regular", "its values are steps or repeat")
    elif array.ndim == 1 and flat.size > 2 and abs(np.linalg.norm(sample) - 1) < 1e-5:
        yield Fact("unit", "its norm is 1")
    elif flat.size >= 16 and np.unique(sample).size > 0.9 * sample.size:
        yield Fact("random", "its values look like weights: nearly all different, no pattern")


def _is_regular(values: Array) -> bool:
    """Whether the values are an arithmetic or geometric sequence, or a few repeated values."""
    if values.size < 4:
        return False
    differences = np.diff(values)
    scale = np.abs(differences).max()
    if np.ptp(differences) <= 1e-4 * scale:
        return True
    if (values > 0).all() and np.ptp(np.diff(np.log(values))) < 1e-4:
        return True
    return values.size >= 16 and np.unique(values).size <= min(16, values.size / 4)


def _has_sines(array: Array) -> bool:
    """Whether each row consists of pairs sin, cos, in any order: Σ x² is half its length.

    Rows of only sines or only cosines also count: in rotary positions each value occurs twice, and
    cosines begin with a row of 1.
    """
    if array.ndim < 2 or array.shape[-1] < 4 or array.size // array.shape[-1] < 2:
        return False
    rows = array.reshape(-1, array.shape[-1])[:256].astype(np.float64)
    if np.abs(rows).max() > 1 + 1e-5:
        return False
    half = rows.shape[1] // 2
    twice = np.array_equal(rows[:, :half], rows[:, half : 2 * half])
    if (rows[0] == 1).all() or twice or np.array_equal(rows[:, ::2], rows[:, 1::2]):
        return True
    squares = (rows**2).sum(1)
    squares = squares[squares > 0]
    return bool(np.allclose(squares, rows.shape[1] / 2, rtol=1e-3))

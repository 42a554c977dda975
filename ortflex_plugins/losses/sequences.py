"""Losses of sequences: labels without an alignment (CTC), the next token of a string."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import attrs
import numpy as np
import onnx.parser
from onnx import GraphProto, TensorProto

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_scores,
    integer_labels,
    number,
    one_of,
    prefix_names,
    require_range,
    setting,
)
from ortflex_plugins.losses._classes import Specs, Tensors

_NEVER = -1e30  # the logarithm of an impossible path: finite, so that no difference is NaN
_IMPOSSIBLE = 1e29


def _step(dtype: int) -> GraphProto:
    """The recursion of one time step, the body of a Scan over time.

    ``a'(s) = log(exp a(s) + exp a(s−1) + exp (a(s−2) + skip(s))) + emit(s)`` while the row is active.
    """
    kind = "double" if dtype == TensorProto.DOUBLE else "float"
    text = (
        f"step ({kind}[B, S] a, {kind}[B, S] skip, {kind}[B, S] emit, bool[B, 1] active) "
        f"=> ({kind}[B, S] after, {kind}[B, S] same) "
        f"<{kind} never = {{{_NEVER}}}, int64[4] one_left = {{0, 1, 0, 0}}, "
        "int64[4] two_left = {0, 2, 0, 0}, int64[1] zero = {0}, int64[1] minus_one = {-1}, "
        "int64[1] minus_two = {-2}, int64[1] axis = {1}> {"
        "cut1 = Slice(a, zero, minus_one, axis) a1 = Pad(cut1, one_left, never) "
        "cut2 = Slice(a, zero, minus_two, axis) a2 = Pad(cut2, two_left, never) "
        "a3 = Add(a2, skip) largest = Max(a, a1, a3) "
        "d0 = Sub(a, largest) e0 = Exp(d0) d1 = Sub(a1, largest) e1 = Exp(d1) "
        "d3 = Sub(a3, largest) e3 = Exp(d3) sum = Sum(e0, e1, e3) logs = Log(sum) "
        "moved = Add(logs, largest) next = Add(moved, emit) after = Where(active, next, a) "
        "same = Identity(skip) }"
    )
    body = onnx.parser.parse_graph(text)
    # Names of a body must differ from those of the graph around it.
    prefix_names(body, "ctc_step_", set())
    return body


@attrs.frozen(kw_only=True)
class Ctc(Loss[Tensors, Specs]):
    """Connectionist temporal classification: ``l = −log Σ_π Π_t p_t(π_t)`` over the alignments π of y.

    ``scores`` are logits or log probabilities [B, T, C], or [B, C, T] with ``axis=1``, and
    ``p_t = softmax(scores_t)``. An alignment of the labels y assigns a class or the ``blank`` to every
    time step. If you merge its repeated classes and then remove its blanks, you get y. Labels are class
    indices [B, S], where S is the largest number of labels in a row; shorter rows are padded at the end
    with ``padding``. The loss values have the shape [B]. With ``per_label``, the loss of each row is
    divided by the number of labels in the row, as in torch with ``reduction="mean"``, or by 1 if the row
    has no labels.

    Identical adjacent labels must be separated by a blank. A row needs one time step for each label and
    for each of these blanks; if it has fewer, it has no alignment. Its loss is then infinite; with
    ``zero_infinity``, its loss and gradient are 0. If T is fixed and you set none of
    ``zero_infinity``, ``input_lengths`` and ``target_lengths``, ortflex raises an error that names such
    a row.

    ``predicted={"scores": "logits", "input_lengths": "n", "target_lengths": "m"}`` sets the number of
    time steps and the number of labels that count in each row. ``n`` and ``m`` are integer columns [B]
    that are stored with the inputs, or tensors of the model. If you do not set them, all time steps and
    all labels except the padding count. A row with m > S has an infinite loss, even with
    ``zero_infinity``.

    Raises:
        ValueError: ``blank`` is negative, or ``axis`` is neither 1 nor −1.
        DataError: scores or labels have another shape; a label is the blank or no class; padding between
            labels; more labels than time steps, or ``input_lengths`` longer than the scores.

    >>> Ctc(zero_infinity=True).describe()["zero_infinity"]
    True

    Source: torch.nn.CTCLoss(reduction="none"); A. Graves et al., "Connectionist temporal
    classification", ICML 2006, eqs. 6-8.
    """

    name: ClassVar[str] = "ctc"
    aliases: ClassVar[tuple[str, ...]] = ("ctc_loss", "ctcloss")
    tensors: ClassVar[tuple[str, ...]] = ("scores", "input_lengths", "target_lengths")
    columns: ClassVar[tuple[str, ...]] = ("input_lengths", "target_lengths")

    blank: int = setting(default=0, validator=number(ge=0), help="the index of the blank class")
    padding: int = setting(default=-1, help="the value that fills a row after its last label")
    axis: int = setting(
        default=-1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1"
    )
    per_label: bool = setting(
        default=False, help="whether the loss of a row is divided by its number of labels"
    )
    zero_infinity: bool = setting(
        default=False, help="whether rows without an alignment have a loss of 0"
    )

    def label(self, predicted: Specs, given: TensorSpec | None) -> TensorSpec:
        """Class indices [B, S]."""
        scores = predicted["scores"]
        float_scores(self.name, scores)
        if scores.shape is None or len(scores.shape) != 3:
            form = "[B, T, C]" if self.axis == -1 else "[B, C, T]"
            raise DataError(f"{self.name} expects scores {form}, got {scores}")
        if given is not None and given.shape is not None and len(given.shape) != 2:
            raise DataError(
                f"{self.name}: labels must be class indices [B, S], one row per sample, filled at the "
                f"end with {self.padding} (padding), got {given}"
            )
        shape = (scores.shape[0], "ctc/labels")
        if given is None:
            return TensorSpec("expected", TensorProto.INT64, shape)
        return integer_labels(self.name, shape, given)

    def check_labels(self, predicted: Specs, labels: Array) -> None:
        """Refuse labels that are the blank or no class, padding between labels, and too many labels."""
        _, steps, classes = self._sizes(predicted["scores"])
        last = classes - 1 if classes is not None else None
        if last is not None and self.blank > last:
            raise DataError(
                f"{self.name}: blank={self.blank}, but the scores have {classes} classes"
            )
        lengths = "target_lengths" in predicted
        filled = labels == self.padding
        hint = f"{self.padding} fills a row (padding), {self.blank} is the blank (blank)."
        allowed = np.asarray(filled | (labels == self.blank) if lengths else filled)
        require_range(self.name, labels, 0, last, allowed=allowed, hint=hint)
        if lengths:
            return
        blanks = (labels == self.blank) & ~filled
        gaps = filled[:, :-1] & ~filled[:, 1:]
        for wrong, what in ((blanks, f"the blank {self.blank}"), (gaps, "padding before a label")):
            if wrong.any():
                raise DataError(
                    f"{self.name}: row {int(wrong.any(1).argmax())} of the labels has {what}. {hint} "
                    "Rows filled with other numbers need target_lengths"
                )
        if steps is None or "input_lengths" in predicted or self.zero_infinity:
            return
        needed = (~filled).sum(1) + ((labels[:, 1:] == labels[:, :-1]) & ~filled[:, 1:]).sum(1)
        if (needed > steps).any():
            row = int((needed > steps).argmax())
            raise DataError(
                f"{self.name}: the labels of row {row} need {int(needed[row])} time steps (one per "
                f"label, one between equal ones), but the scores have {steps}; leave the row out, give "
                "wider inputs, or set zero_infinity=True"
            )

    def check_column(self, predicted: Specs, name: str, values: Array) -> None:
        """Refuse lengths below 0 or above the number of time steps."""
        steps = self._sizes(predicted["scores"])[1] if name == "input_lengths" else None
        hint = f"They are {name}."
        if steps is not None:
            hint = f"They are {name}; the scores have {steps} time steps."
        require_range(self.name, values, 0, steps, hint=hint)

    def _sizes(self, scores: TensorSpec) -> list[int | None]:
        """Rows, time steps and classes, where they are known."""
        shape = scores.shape or (None, None, None)
        order = shape if self.axis == -1 else (shape[0], shape[2], shape[1])
        return [d if isinstance(d, int) else None for d in order]

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor) -> Tensor:
        """The recursion over time, in logarithms."""
        scores = predicted["scores"]
        if self.axis == 1:
            scores = op.Transpose(scores, perm=[0, 2, 1])
        dtype = scores.dtype
        logs = op.LogSoftmax(scores, axis=-1)
        places = op.Unsqueeze(_range(op, op.Shape(expected, start=1, end=2)), axes=[0])  # [1, S]
        if "target_lengths" in predicted:
            counted = op.Less(places, op.Unsqueeze(predicted["target_lengths"], axes=[1]))
        else:
            counted = op.Not(op.Equal(expected, self.padding))
        lengths = op.ReduceSum(op.Cast(counted, to=TensorProto.INT64), axes=[1], keepdims=1)
        # Labels with a blank before each and after the last: [B, 2S + 1].
        labels = op.Unsqueeze(op.Where(counted, expected, self.blank), axes=[2])
        blanks = op.Where(op.Equal(labels, labels), self.blank, labels)
        rows = op.Flatten(op.Concat(blanks, labels, axis=2), axis=1)
        first = op.Slice(rows, [0], [1], [1])
        states = op.Concat(rows, op.Where(op.Equal(first, first), self.blank, first), axis=1)
        before = op.Pad(
            op.Slice(states, [0], [-2], [1]), op.constant(np.array([0, 2, 0, 0])), self.blank
        )
        jumps = op.And(op.Not(op.Equal(states, self.blank)), op.Not(op.Equal(states, before)))
        zero, never, infinite = (op.constant(v, dtype) for v in (0.0, _NEVER, math.inf))
        skip = op.Where(jumps, zero, never)
        count = op.Unsqueeze(_range(op, op.Shape(states, start=1, end=2)), axes=[0])  # [1, 2S + 1]
        start = op.Where(op.Equal(count + states * 0, 0), zero, never)
        # What each state emits, [T, B, 2S + 1], and whether the time step counts, [T, B, 1].
        by_time = op.Transpose(logs, perm=[1, 0, 2])
        times = op.Shape(by_time, start=0, end=1)
        wide = op.Expand(op.Unsqueeze(states, axes=[0]), op.Concat(times, op.Shape(states), axis=0))
        emits = op.GatherElements(by_time, wide, axis=2)
        time = op.Unsqueeze(_range(op, times), axes=[1, 2])
        ends = op.Unsqueeze(times, axes=[0])
        if "input_lengths" in predicted:
            ends = op.Unsqueeze(predicted["input_lengths"], axes=[1])
        active = op.Less(time, op.Unsqueeze(ends + lengths * 0, axes=[0]))
        after, _ = op.Scan(
            start, skip, emits, active, outputs=2, body=_step(dtype), num_scan_inputs=2
        )
        final = op.Or(op.Equal(count, 2 * lengths), op.Equal(count, 2 * lengths - 1))
        reached = op.Where(final, after, never)
        largest = op.ReduceMax(reached, axes=[1], keepdims=1)
        sums = op.ReduceSum(op.Exp(reached - largest), axes=[1], keepdims=1)
        value = -op.Squeeze(op.Log(sums) + largest, axes=[1])
        if self.per_label:
            value = value / op.Cast(op.Max(op.Squeeze(lengths, axes=[1]), 1), to=dtype)
        other = zero if self.zero_infinity else infinite
        value = op.Where(op.Less(value, _IMPOSSIBLE / 1e6), value, other)
        if "target_lengths" in predicted:
            labels_given = op.Shape(expected, start=1, end=2)
            value = op.Where(op.Greater(predicted["target_lengths"], labels_given), infinite, value)
        return value


def _range(op: Ops, size: Tensor) -> Tensor:
    """0, 1, … below the only element of a tensor."""
    return op.Range(op.constant(np.int64(0)), op.Squeeze(size), op.constant(np.int64(1)))


@attrs.frozen(kw_only=True)
class CausalLm(Loss):
    """Cross-entropy of the next token: ``l_t = −log softmax(s_t)_y`` with the label y of position t + 1.

    The logits s have the shape [B, T, V], where V is the size of the vocabulary, and the labels are
    token ids [B, T]. The loss shifts the labels, as Hugging Face's models do, so you can pass the inputs
    as labels (``labels = input_ids``). The loss values have the shape [B, T − 1]. Positions whose label
    is ``ignore_index``, or ``padding`` if it is set, have a loss of 0 and do not count in the mean. If
    your labels are already shifted, set ``shift=False``; the loss values then have the shape [B, T].

    Raises:
        TypeError: ``ignore_index`` is not an integer.
        DataError: the labels have another shape, or are no tokens.

    >>> CausalLm(padding=0).padding
    0

    Source: ForCausalLMLoss of transformers (loss/loss_utils.py).
    """

    name: ClassVar[str] = "causal_lm"
    aliases: ClassVar[tuple[str, ...]] = ("next_token", "language_model", "forcausallmloss")
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    ignore_index: int = setting(
        default=-100,
        validator=attrs.validators.instance_of(int),
        help="the label that marks ignored positions",
    )
    padding: int | None = setting(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(int)),
        help="the id of the padding token, which is also ignored",
    )
    shift: bool = setting(
        default=True, help="whether position t predicts the label of position t + 1"
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Token ids [B, T]."""
        float_scores(self.name, predicted)
        shape = predicted.shape
        if shape is None or len(shape) != 3:
            raise DataError(
                f"{self.name} expects scores [B, T, V] of a language model, got {predicted}; name the "
                "tensor of the scores: predicted=…"
            )
        if given is None:
            return TensorSpec("expected", TensorProto.INT64, shape[:2])
        return integer_labels(self.name, shape[:2], given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse numbers that are no tokens, and labels that are all ignored."""
        size = predicted.shape[2] if predicted.shape is not None else None
        ignored = labels == self.ignore_index
        if self.padding is not None:
            ignored = ignored | (labels == self.padding)
        hint = f"The model has {size} tokens, and {self.ignore_index} is ignored (ignore_index)"
        last = size - 1 if isinstance(size, int) else None
        require_range(self.name, labels, 0, last, allowed=np.asarray(ignored), hint=hint)
        counted = ignored[:, 1:] if self.shift else ignored
        if counted.size and counted.all():
            raise DataError(
                f"{self.name}: all labels are ignored ({self.ignore_index}, padding {self.padding}), so "
                "there is nothing to learn; labels are usually the input_ids"
            )

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``−log softmax(s_t)`` at each next token, 0 where it is ignored."""
        if self.shift:
            predicted = op.Slice(predicted, [0], [-1], [1])
        kept, tokens = self._kept(op, expected), self._targets(op, expected)
        logs = op.LogSoftmax(predicted, axis=-1)
        places = op.Unsqueeze(op.Where(kept, tokens, 0), axes=[2])
        return op.Where(kept, -op.Squeeze(op.GatherElements(logs, places, axis=2), axes=[2]), 0.0)

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Booleans: False where the label is ignored."""
        return self._kept(op, expected)

    def _targets(self, op: Ops, expected: Tensor) -> Tensor:
        return op.Slice(expected, [1], [2**31 - 1], [1]) if self.shift else expected

    def _kept(self, op: Ops, expected: Tensor) -> Tensor:
        tokens = self._targets(op, expected)
        kept: Tensor = op.Not(op.Equal(tokens, self.ignore_index))
        if self.padding is not None:
            kept = op.And(kept, op.Not(op.Equal(tokens, self.padding)))
        return kept

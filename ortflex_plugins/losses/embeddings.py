"""Losses of embeddings: triplets, contrast within a batch, margins between classes, cosines of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    float_scores,
    hyper,
    integer_labels,
    number,
    numpy_dtype,
    one_of,
    require_range,
    setting,
    shape_mismatch,
    shape_text,
)
from ortflex_plugins.losses._classes import Specs, Tensors

_EPS = 1e-6  # torch's, added to differences
_NORM = 1e-12  # torch's smallest norm, and what it adds to squared lengths
_MAX_SCALE = math.log(100)  # CLIP's largest logit_scale


def _embeddings(loss: str, predicted: Specs) -> None:
    """Refuse tensors that are not embeddings [B, D] of one size."""
    sizes = {}
    for role, spec in predicted.items():
        float_scores(loss, spec)
        if spec.shape is None or len(spec.shape) != 2:
            raise DataError(
                f"{loss} expects embeddings [B, D], but {role} is {spec}; name a tensor with one vector "
                "per row: predicted=…"
            )
        if isinstance(spec.shape[1], int):
            sizes[role] = spec.shape[1]
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{role} has {size}" for role, size in sizes.items())
        raise DataError(f"{loss} expects embeddings of one size: {text}")


def _normalized(op: Ops, x: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays so."""
    squares = op.ReduceSum(x * x, axes=[1], keepdims=1)
    return x / op.Sqrt(op.Max(squares, _NORM**2))


def _diagonal(op: Ops, square: Tensor) -> Tensor:
    """Booleans [B, B]: True on the diagonal."""
    rows = op.Range(op.constant(np.int64(0)), op.Squeeze(op.Shape(square, start=0, end=1)), 1)
    return _same(op, rows)


@attrs.frozen(kw_only=True)
class _OfRoles(Loss[Tensors, Specs]):
    """A loss of several embeddings of each row, without labels."""

    one_model: ClassVar[bool] = True
    needs_labels = False

    def label(self, predicted: Specs, given: TensorSpec | None) -> TensorSpec:
        """The given labels, for metrics."""
        return given or TensorSpec("expected", TensorProto.INT64, ("batch",))

    def embeddings(self, predicted: Tensors) -> Iterator[Tensor]:
        """The embeddings in the order of ``tensors``."""
        own = {role: predicted[role] for role in self.tensors}
        _embeddings(self.name, {r: TensorSpec(r, t.dtype, t.shape) for r, t in own.items()})
        yield from own.values()


def _same(op: Ops, labels: Tensor) -> Tensor:
    """Booleans [B, B]: whether two rows have one label."""
    return op.Equal(op.Unsqueeze(labels, axes=[1]), op.Unsqueeze(labels, axes=[0]))


@attrs.frozen(kw_only=True)
class Triplet(_OfRoles):
    """Hinge loss of the distances in triplets: ``l = max(0, d(a, p) − d(a, n) + margin)``.

    ``anchor`` a, ``positive`` p and ``negative`` n are embeddings [B, D], and
    ``d(x, y) = (Σ_j |x_j − y_j + 1e-6|^r)^(1/r)``, where r is the parameter ``p``. With ``swap``,
    d(a, n) is replaced by the smaller of d(a, n) and d(p, n). The loss values have the shape [B]. No
    labels are needed.

    If the model computes only one embedding, the model is applied to the anchors, the positives and the
    negatives. For an input ``x``, the column ``x`` then contains the anchors, and the columns
    ``positive/x`` and ``negative/x`` contain the positives and the negatives.

    Raises:
        ValueError: ``p`` is below 1.
        DataError: a tensor is not of shape [B, D].

    >>> Triplet(margin=0.3).describe()
    {'name': 'triplet', 'margin': 0.3, 'p': 2.0, 'swap': False}

    Source: torch.nn.TripletMarginLoss(reduction="none"); V. Balntas et al., "Learning local feature
    descriptors with triplets and shallow convolutional neural networks", BMVC 2016.
    """

    name: ClassVar[str] = "triplet"
    aliases: ClassVar[tuple[str, ...]] = ("triplet_margin", "tripletmarginloss")
    tensors: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")

    margin: float = hyper(
        default=1.0,
        validator=number(ge=0),
        help="how much farther away the negatives must be than the positives",
    )
    p: float = setting(
        default=2.0, validator=number(ge=1), help="the degree of the norm that defines the distance"
    )
    swap: bool = setting(
        default=False, help="whether d(a, n) is replaced by d(p, n) if the latter is smaller"
    )

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor | None) -> Tensor:
        """``max(0, d(a, p) − d(a, n) + margin)``."""
        a, p, n = self.embeddings(predicted)
        near, far = self._distance(op, a, p), self._distance(op, a, n)
        if self.swap:
            far = op.Min(far, self._distance(op, p, n))
        return op.Relu(near - far + self.margin)

    def _distance(self, op: Ops, x: Tensor, y: Tensor) -> Tensor:
        difference = op.Abs(x - y + _EPS)
        if self.p == 1:
            return op.ReduceSum(difference, axes=[1], keepdims=0)
        if self.p == 2:
            return op.Sqrt(op.ReduceSum(difference * difference, axes=[1], keepdims=0))
        # The exponent of a Pow may have another type than its base.
        dtype = numpy_dtype(x.dtype)
        power, root = (op.constant(np.asarray(n, dtype)) for n in (self.p, 1 / self.p))
        return op.Pow(op.ReduceSum(op.Pow(difference, power), axes=[1], keepdims=0), root)


@attrs.frozen(kw_only=True)
class MinedTriplet(Loss):
    """Triplet loss with positives and negatives that are mined from the batch by their labels.

    Predictions are embeddings e [B, D], labels are class indices y [B], and d is the Euclidean distance
    between two embeddings. With ``mining="hard"``, each row uses its farthest positive and its nearest
    negative: ``l_i = max(0, max_{y_j = y_i} d_ij − min_{y_j ≠ y_i} d_ij + margin)``. With
    ``mining="semi_hard"``, each positive of row i forms a triplet with the nearest negative that is
    farther away than this positive, or with the farthest negative if no negative is farther away. The
    loss of row i is the mean of the losses of these triplets. A row without a positive or without a
    negative has a loss of 0 but still counts in the mean. With ``normalize``, each embedding is first
    divided by its norm.

    Raises:
        ValueError: ``mining`` is neither "hard" nor "semi_hard".
        DataError: the predictions are not of shape [B, D], or the labels not class indices [B].

    >>> MinedTriplet().mining
    'hard'

    Source: A. Hermans, L. Beyer and B. Leibe, "In defense of the triplet loss for person
    re-identification", 2017 (hard); F. Schroff, D. Kalenichenko and J. Philbin, "FaceNet", CVPR 2015,
    sec. 3.2 (semi_hard).
    """

    name: ClassVar[str] = "mined_triplet"
    aliases: ClassVar[tuple[str, ...]] = ("batch_hard_triplet", "online_triplet")

    margin: float = hyper(
        default=0.2,
        validator=number(ge=0),
        help="how much farther away the negatives must be than the positives",
    )
    mining: str = setting(
        default="hard",
        validator=one_of("hard", "semi_hard"),
        help="how positives and negatives are chosen: ``hard`` or ``semi_hard``",
    )
    normalize: bool = setting(
        default=True, help="whether embeddings are first normalized to length 1"
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        return _class_numbers(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        x = _normalized(op, predicted) if self.normalize else predicted
        difference = op.Unsqueeze(x, axes=[1]) - op.Unsqueeze(x, axes=[0])
        squares = op.ReduceSum(difference * difference, axes=[2], keepdims=0)
        d = op.Sqrt(op.Max(squares, 1e-12))
        same = _same(op, expected)
        positive = op.And(same, op.Not(_diagonal(op, d)))
        other = op.Not(same)
        far = 1e9
        valid = op.And(
            op.Greater(op.ReduceSum(op.Cast(positive, to=d.dtype), axes=[1], keepdims=0), 0.5),
            op.Greater(op.ReduceSum(op.Cast(other, to=d.dtype), axes=[1], keepdims=0), 0.5),
        )
        if self.mining == "hard":
            near = op.ReduceMax(op.Where(positive, d, 0.0), axes=[1], keepdims=0)
            away = op.ReduceMin(op.Where(other, d, far), axes=[1], keepdims=0)
            return op.Where(valid, op.Relu(near - away + self.margin), 0.0)
        # [anchor, positive, negative]
        beyond = op.And(
            op.Unsqueeze(other, axes=[1]),
            op.Greater(op.Unsqueeze(d, axes=[1]), op.Unsqueeze(d, axes=[2])),
        )
        least = op.ReduceMin(op.Where(beyond, op.Unsqueeze(d, axes=[1]), far), axes=[2], keepdims=0)
        largest = op.ReduceMax(op.Where(other, d, 0.0), axes=[1], keepdims=1)
        away = op.Where(op.Less(least, far / 2), least, largest)
        count = op.ReduceSum(op.Cast(positive, to=d.dtype), axes=[1], keepdims=0)
        each = op.Where(positive, op.Relu(d - away + self.margin), 0.0)
        mean = op.ReduceSum(each, axes=[1], keepdims=0) / op.Max(count, 1.0)
        return op.Where(valid, mean, 0.0)


def _class_numbers(loss: str, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
    _embeddings(loss, {"the prediction": predicted})
    shape = (predicted.shape or ("batch",))[:1]
    if given is None:
        return TensorSpec("expected", TensorProto.INT64, shape)
    return integer_labels(loss, shape, given)


@attrs.frozen(kw_only=True)
class Contrastive(_OfRoles):
    """InfoNCE over the pairs of a batch: each anchor is contrasted with the positives of all other rows.

    ``anchor`` a and ``positive`` p are the embeddings [B, D] of the pairs. With
    ``s_ij = cos(a_i, p_j) / τ`` and the ``temperature`` τ, the loss is
    ``l_i = −log softmax_j(s_ij)_i``. With ``symmetric``, the loss is the mean of this value and
    ``−log softmax_j(s_ji)_i``, as in CLIP. The loss values have the shape [B]. No labels are needed.

    With ``trained_temperature``, the scalar ``contrastive.logit_scale`` = log(1/τ) is trained. The
    loss clips it at log 100, as in CLIP. Checkpoints contain it, but exports do not.
    ``normalize=False`` uses dot products instead of cosines.

    For a model with two towers, name both embeddings:
    ``predicted={"anchor": "image", "positive": "text"}``. If the model computes only one embedding, the
    model is applied to the anchors and to the positives: for an input ``x``, the column ``x`` contains
    the anchors, and the column ``positive/x`` contains the positives.

    The other rows of a batch are the negatives, so large batches and shuffled rows help. If a positive
    occurs twice in a batch, its copy counts as a negative.

    Raises:
        ValueError: ``temperature`` is not positive.
        DataError: a tensor is not of shape [B, D], or their sizes differ.

    >>> Contrastive(temperature=0.05).temperature
    0.05

    Source: A. van den Oord, Y. Li and O. Vinyals, "Representation learning with contrastive predictive
    coding", 2018; A. Radford et al., "Learning transferable visual models from natural language
    supervision" (CLIP), ICML 2021, fig. 3; MultipleNegativesRankingLoss of sentence-transformers.
    """

    name: ClassVar[str] = "contrastive"
    aliases: ClassVar[tuple[str, ...]] = (
        "info_nce",
        "infonce",
        "clip",
        "nt_xent",
        "multiple_negatives_ranking",
    )
    tensors: ClassVar[tuple[str, ...]] = ("anchor", "positive")

    temperature: float = hyper(
        default=0.07,
        validator=number(gt=0),
        help="the divisor of the cosines; the initial value if the temperature is trained",
    )
    trained_temperature: bool = setting(default=False, help="whether the temperature is trained")
    symmetric: bool = setting(
        default=True, help="whether the loss averages both directions, as in CLIP"
    )
    normalize: bool = setting(
        default=True, help="whether the loss uses cosines instead of dot products"
    )

    def parameters(self, predicted: Specs, generator: np.random.Generator) -> Mapping[str, Array]:
        """``logit_scale`` = log(1/τ), if the temperature is trained."""
        if not self.trained_temperature:
            return {}
        return {"logit_scale": np.array(-math.log(self.temperature))}

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor | None) -> Tensor:
        """``−log softmax`` of the similarity of each pair."""
        a, p = self.embeddings(predicted)
        if self.normalize:
            a, p = _normalized(op, a), _normalized(op, p)
        pairs = op.ReduceSum(a * p, axes=[1], keepdims=0)
        products = op.MatMul(a, op.Transpose(p, perm=[1, 0]))
        if self.trained_temperature:
            scale = op.Exp(op.Min(predicted["logit_scale"], _MAX_SCALE))
            pairs, products = pairs * scale, products * scale
        else:
            pairs, products = pairs / self.temperature, products / self.temperature
        value = op.ReduceLogSumExp(products, axes=[1], keepdims=0) - pairs
        if not self.symmetric:
            return value
        return 0.5 * (value + op.ReduceLogSumExp(products, axes=[0], keepdims=0) - pairs)


@attrs.frozen(kw_only=True)
class SupervisedContrastive(Loss):
    """Contrastive loss with labels, which pulls the embeddings of rows of the same class together.

    Predictions are embeddings e [B, D], labels are class indices y [B], and
    ``s_ij = cos(e_i, e_j) / τ``. The loss is
    ``l_i = −(1/|P_i|)·Σ_{j ∈ P_i} log (exp s_ij / Σ_{k ≠ i} exp s_ik)``, where P_i is the set of the
    other rows in the batch that have the same class as row i. If P_i is empty, row i has a loss of 0 but
    still counts in the mean.

    Raises:
        ValueError: ``temperature`` is not positive.
        DataError: the predictions are not of shape [B, D], or the labels not class indices [B].

    >>> SupervisedContrastive().temperature
    0.07

    Source: P. Khosla et al., "Supervised contrastive learning", NeurIPS 2020, eq. 2.
    """

    name: ClassVar[str] = "supervised_contrastive"
    aliases: ClassVar[tuple[str, ...]] = ("supcon",)

    temperature: float = hyper(
        default=0.07,
        validator=number(gt=0),
        help="the temperature τ, by which the cosines are divided",
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        return _class_numbers(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        x = _normalized(op, predicted)
        s = op.MatMul(x, op.Transpose(x, perm=[1, 0])) / self.temperature
        itself = _diagonal(op, s)
        same = _same(op, expected)
        positive = op.And(same, op.Not(itself))
        total = op.ReduceLogSumExp(op.Where(itself, -1e9, s), axes=[1], keepdims=1)
        count = op.ReduceSum(op.Cast(positive, to=s.dtype), axes=[1], keepdims=0)
        terms = op.Where(positive, total - s, 0.0)
        return op.ReduceSum(terms, axes=[1], keepdims=0) / op.Max(count, 1.0)


@attrs.frozen(kw_only=True)
class MarginSoftmax(Loss[Tensors, Specs]):
    """Softmax cross-entropy of scaled cosines with a margin, as in ArcFace and CosFace.

    ``cos θ_c = e·w_c / (‖e‖·‖w_c‖)`` is the cosine between the ``embedding`` e [B, D] and row c of a
    matrix w [classes, D], which has one direction per class. The matrix is a trained parameter of the
    loss. Checkpoints contain it as ``margin_softmax.weight``, but exports contain only the embedding
    model.

    The logit of the label's class is ``scale·cos(θ_y + margin)`` for ``kind="arcface"`` and
    ``scale·(cos θ_y − margin)`` for ``kind="cosface"``. The logits of the other classes are
    ``scale·cos θ_c``. The loss is the softmax cross-entropy of these logits. Labels are class indices
    [B], and the loss values have the shape [B].

    Raises:
        ValueError: ``classes`` is below 2, ``kind`` unknown, or ``margin`` negative.
        DataError: the tensor is not of shape [B, D] with a known D, or labels are outside of 0 … classes−1.

    >>> MarginSoftmax(classes=10, kind="cosface", margin=0.35).kind
    'cosface'

    Source: J. Deng et al., "ArcFace: additive angular margin loss for deep face recognition", CVPR
    2019; H. Wang et al., "CosFace: large margin cosine loss for deep face recognition", CVPR 2018. The
    initial values, scale and margin are those of insightface (recognition/arcface_torch).
    """

    name: ClassVar[str] = "margin_softmax"
    aliases: ClassVar[tuple[str, ...]] = ("arcface", "cosface", "additive_angular_margin")
    tensors: ClassVar[tuple[str, ...]] = ("embedding",)

    classes: int = setting(validator=number(ge=2), help="the number of classes")
    kind: str = setting(
        default="arcface",
        validator=one_of("arcface", "cosface"),
        help="how the margin is applied: ``arcface`` or ``cosface``",
    )
    margin: float = setting(
        default=0.5,
        validator=number(ge=0),
        help="the margin: an angle in radians for ``arcface``, a cosine for ``cosface``",
    )
    scale: float = hyper(default=64.0, validator=number(gt=0), help="the factor of the cosines")

    def parameters(self, predicted: Specs, generator: np.random.Generator) -> Mapping[str, Array]:
        """The directions of the classes, drawn with a standard deviation of 0.01."""
        _embeddings(self.name, predicted)
        shape = predicted["embedding"].shape
        size = shape[1] if shape is not None else None
        if not isinstance(size, int):
            raise DataError(
                f"{self.name}: the size of the embedding {shape_text(shape)} is unknown; export the "
                "model with a fixed size of its last axis"
            )
        return {"weight": generator.normal(scale=0.01, size=(self.classes, size))}

    def label(self, predicted: Specs, given: TensorSpec | None) -> TensorSpec:
        return _class_numbers(self.name, predicted["embedding"], given)

    def check_labels(self, predicted: Specs, labels: Array) -> None:
        """Refuse class indices outside 0 … classes−1."""
        hint = f"The loss has classes={self.classes}"
        require_range(self.name, labels, 0, self.classes - 1, hint=hint)

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor) -> Tensor:
        """``−log softmax`` of the scores with the margin."""
        e, w = _normalized(op, predicted["embedding"]), _normalized(op, predicted["weight"])
        cosines = op.MatMul(e, op.Transpose(w, perm=[1, 0]))
        numbers = op.constant(np.arange(self.classes, dtype=np.int64)[None])
        own = op.Equal(op.Unsqueeze(expected, axes=[1]), numbers)
        if self.kind == "cosface":
            moved = cosines - self.margin
        else:
            sines = op.Sqrt(op.Max(1.0 - cosines * cosines, 1e-9))
            moved = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        scores = op.Where(own, moved, cosines) * self.scale
        logs = op.LogSoftmax(scores, axis=1)
        return -op.ReduceSum(op.Where(own, logs, 0.0), axes=[1], keepdims=0)


@attrs.frozen(kw_only=True)
class CosineEmbedding(Loss):
    """Cosine embedding loss: ``1 − cos`` for similar pairs, ``max(0, cos − margin)`` for dissimilar ones.

    For predictions [B, D], the labels [B, D] are the target embeddings, and ``l = 1 − cos(p, y)``.
    Predictions [B, 2, D] are pairs of embeddings, such as two outputs that the model stacks. Their
    labels [B] are 1 for similar pairs, with ``l = 1 − cos``, and −1 for dissimilar pairs, with
    ``l = max(0, cos − margin)``. The loss values have the shape [B], and
    ``cos(a, b) = a·b / √((‖a‖² + 1e-12)·(‖b‖² + 1e-12))``.

    Raises:
        ValueError: ``margin`` is not in [−1, 1].
        DataError: the labels have another shape or, for pairs, other values than −1 and 1.

    >>> CosineEmbedding(margin=0.5).describe()
    {'name': 'cosine_embedding', 'margin': 0.5}

    Source: torch.nn.CosineEmbeddingLoss(reduction="none").
    """

    name: ClassVar[str] = "cosine_embedding"

    margin: float = hyper(
        default=0.0,
        validator=number(ge=-1, le=1),
        help="the cosine above which dissimilar pairs have a positive loss",
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Embeddings of the prediction's shape, or a number for each pair."""
        float_scores(self.name, predicted)
        shape = predicted.shape
        if shape is not None and len(shape) == 2:
            return float_labels(self.name, predicted, given)
        if shape is None or len(shape) != 3 or (isinstance(shape[1], int) and shape[1] != 2):
            raise DataError(
                "cosine_embedding expects embeddings [B, D] or pairs of embeddings [B, 2, D], "
                f"got {predicted}"
            )
        wanted = TensorSpec("expected", predicted.dtype, shape[:1])
        if given is not None and given.shape is not None and len(given.shape) != 1:
            raise DataError(shape_mismatch(self.name, wanted, given))
        return float_labels(self.name, wanted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels other than −1 and 1 for pairs."""
        if labels.ndim == 1:
            hint = "1 marks similar pairs, -1 dissimilar ones."
            dissimilar = np.asarray(labels == -1)
            require_range(self.name, labels, 1, 1, allowed=dissimilar, hint=hint)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        if predicted.rank == 2:
            return 1 - _cosine(op, predicted, expected)
        one, other = (op.Gather(predicted, op.constant(k), axis=1) for k in (0, 1))
        cosine = _cosine(op, one, other)
        return op.Where(expected > 0, 1 - cosine, op.Relu(cosine - self.margin))


def _cosine(op: Ops, one: Tensor, other: Tensor) -> Tensor:
    """The cosine of each row of a tensor [B, D] with the row of another one."""
    product, *lengths = (
        op.ReduceSum(a * b, axes=[1], keepdims=0)
        for a, b in ((one, other), (one, one), (other, other))
    )
    # A root of each length: the product of two squared lengths could exceed 1e38, the end of float32.
    return product / (op.Sqrt(lengths[0] + _NORM) * op.Sqrt(lengths[1] + _NORM))

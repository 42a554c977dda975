"""Heads: the last product before the outputs, which gives one number per class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    ConfigError,
    Edit,
    Editor,
    Head,
    ModelError,
    Ops,
    Tensor,
    TensorSpec,
    is_count,
    setting,
)
from ortflex_plugins.edits.tokens import count


def _labels(instance: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    texts = all(isinstance(v, str) for v in value)
    if not texts and not all(is_count(v, -(2**63), 2**63 - 1) for v in value):
        raise ValueError(f"{attribute.name}: expected strings only or integers only, got {value!r}")
    if len(set(value)) < len(value):
        twice = next(v for v in value if value.count(v) > 1)
        raise ValueError(f"{attribute.name}: {twice!r} is there twice")


def _check_count(name: str, given: int | None, what: str, classes: Sequence[Any]) -> None:
    """Refuse a field that has neither a number nor labels, or another number than labels."""
    if given is None and not classes:
        raise ValueError(f"{name}: set the {what}, or their labels as classes")
    if classes and given not in (None, len(classes)):
        raise ValueError(f"{name}: expected {len(classes)}, the number of classes, got {given}")


_AT = (
    "the name of an output, a module, a node or a weight of the head, or a glob pattern for it; by "
    "default, the only head of the model"
)


@attrs.frozen(kw_only=True)
class _Classes(Edit):
    """The new classes of a head."""

    at: str = setting(default="", help=_AT)

    def drawn(self, editor: Editor, key: str, inputs: int, outputs: int) -> tuple[Array, Array]:
        """M [inputs, outputs] and b [outputs], uniform in ±1/√inputs."""
        editor.check_room(inputs, outputs)
        generator = editor.generator(key)
        bound = 1 / math.sqrt(inputs)
        matrix = generator.uniform(-bound, bound, (outputs, inputs)).T
        return matrix, generator.uniform(-bound, bound, outputs)

    def drawn_layers(
        self, editor: Editor, head: Head, count: int
    ) -> list[tuple[Array, Array | None]]:
        """New values for each layer of a head."""
        out = []
        for layer in head.layers:
            matrix, bias = self.drawn(editor, layer.product.module, layer.inputs, count)
            out.append((matrix, None if layer.bias is None else bias))
        return out


@attrs.frozen(kw_only=True)
class NewHead(_Classes):
    """Replaces the last layer with a new one for a different set of classes: ``y = x·M + b``.

    The features x have the shape [N, …, features], the weight M [features, outputs], the bias b
    [outputs], and the result y [N, …, outputs]. For a 1×1 convolution, x is [N, features, …] and y is
    [N, outputs, …]. If the old layer has no bias, there is no b. M and b are drawn uniformly from
    [−1/√features, 1/√features], as in torch's Linear and Conv2d layers (Kaiming initialization with a =
    √5); the values depend only on the seed of the Trainer and the name of the layer. M and b keep the
    names and element types of the old weights. Nodes after the layer, such as Softmax, Reshape, ArgMax
    or ZipMap, stay in the graph, and the class labels become ``classes``. With ``on``, the new layer is
    added on top of a feature tensor, and its result, ``scores``, becomes the only output.

    Raises:
        ValueError: neither ``outputs`` nor ``classes`` is given, or they do not fit each other.
        ModelError: when a model is edited: it has no head, or several, and ``at`` does not name one of
            them; a node after the head depends on the number of classes in a way that is not known; or
            ``on`` is not a tensor [N, …, features] that is computed from an input.
        ConfigError: when a model is edited: its classes have strings as labels, and ``classes`` is missing.

    Example:
        >>> from onnx import parser
        >>> from ortflex_core import edited_model
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) '
        ...     "<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
        ... )
        >>> edited = edited_model(model, edits=NewHead(classes=("cat", "dog", "bird")))
        >>> str(edited.outputs[0]), edited.new_head
        ('y: float32[N, 3]', ('w',))

    Source: He et al., "Delving Deep into Rectifiers" (2015), with a = √5 as in torch.nn.Linear.
    """

    name: ClassVar[str] = "new_head"
    stability = "experimental"
    needs: ClassVar[str] = (
        "a product by a constant matrix before an output, or a tensor of features"
    )

    outputs: int | None = setting(
        default=None,
        validator=attrs.validators.optional(count),
        help="the number of classes; by default, the length of `classes`",
    )
    classes: tuple[str | int, ...] = setting(
        default=(), validator=_labels, help="the labels of the classes, in the order of the logits"
    )
    on: str = setting(default="", help="the feature tensor to which the new layer is added")

    def __attrs_post_init__(self) -> None:
        _check_count("outputs", self.outputs, "number of classes", self.classes)

    @property
    def count(self) -> int:
        """The number of classes."""
        return len(self.classes) if self.outputs is None else self.outputs

    def apply(self, editor: Editor) -> None:
        """Replace the head, or put one on a tensor."""
        if self.on:
            self._append(editor)
            return
        head = editor.head(self.at)
        values = self.drawn_layers(editor, head, self.count)
        editor.resize(head, values, self.classes or None)

    def _append(self, editor: Editor) -> None:
        spec = editor.tensor(self.on)
        features = spec.shape[-1] if spec.shape else None
        if not isinstance(features, int) or not spec.shape or len(spec.shape) < 2:
            raise ModelError(
                f"{editor.where}.on: expected a tensor [N, …, features] with a known number of features, "
                f"got {spec}; {_fitting(editor, spec)}"
            )
        if len(spec.shape) > 2 and _has_channels(editor, self.on):
            raise ModelError(
                f"{editor.where}.on: expected a tensor [N, …, features], got {spec}, which has its "
                f"features (channels) in axis 1; {_fitting(editor, spec)}. For scores of every pixel leave "
                "'on' out, which replaces the last 1x1 convolution"
            )
        matrix, bias = self.drawn(editor, self.on, features, self.count)

        def formula(op: Ops, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return op.MatMul(x, weight) + bias

        editor.append("scores", formula, [self.on], {"weight": matrix, "bias": bias})
        editor.label_classes(self.classes or None)


_CHANNELS = frozenset(
    {
        "AveragePool",
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "GlobalAveragePool",
        "GlobalMaxPool",
    }
    | {"GroupNormalization", "InstanceNormalization", "LpPool", "MaxPool", "QLinearConv", "Resize"}
)
"""Operators of tensors [N, channels, …]."""
_ELEMENTWISE = frozenset(
    {"Add", "Cast", "Clip", "Concat", "Div", "Dropout", "Elu", "Gelu", "HardSigmoid", "HardSwish"}
    | {"Identity", "LeakyRelu", "Max", "Min", "Mish", "Mul", "PRelu", "Relu", "Selu", "Sigmoid"}
    | {"Softplus", "Sub", "Tanh"}
)
"""Operators that keep the order of the axes."""
_LISTED = 5


def _has_channels(editor: Editor, name: str) -> bool:
    """Whether axis 1 of a tensor has channels, because a convolution or pooling gives or reads it."""
    if any(reader.op_type in _CHANNELS for reader in editor.readers(name)):
        return True
    producers = {out: node for node in editor.graph.node for out in node.output}
    node = producers.get(name)
    while node is not None and node.op_type in _ELEMENTWISE:
        node = next((producers[n] for n in node.input if n in producers), None)
    return node is not None and node.op_type in _CHANNELS


def _fitting(editor: Editor, given: TensorSpec) -> str:
    """The tensors [N, features] on which a head can be put, those near the outputs first."""
    found = []
    for name in (out for node in reversed(editor.graph.node) for out in node.output if out):
        shape = editor.tensor(name).shape
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            continue
        if not isinstance(shape[0], int) or (given.shape or shape)[:1] == shape[:1]:
            found.append(f"{name} [N, {shape[1]}]")
    if not found:
        return "the model has no tensor [N, features]"
    return f"these fit: {', '.join(found[:_LISTED])}" + ", …" * (len(found) > _LISTED)


@attrs.frozen(kw_only=True)
class MoreClasses(_Classes):
    """Adds classes to an existing head and keeps the weights of its old classes.

    The weight M [features, old] becomes [features, old + new], and the bias b [old] becomes [old +
    new]. The new values are appended and are initialized as in ``new_head``. If a head computes a single
    score for two classes and applies a sigmoid to it, the head is first converted to an equivalent head
    with one score per class. If the model has integer labels and ``classes`` is not set, the new labels
    are the integers after the largest existing label.

    Raises:
        ValueError: neither ``add`` nor ``classes`` is given, or they do not fit each other.
        ModelError: when a model is edited: as for ``new_head``, or the old matrix is quantized or computed.
        ConfigError: when a model is edited: the model has labels of another type, or one of ``classes``.

    Example:
        >>> from onnx import parser
        >>> from ortflex_core import edited_model
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) '
        ...     "<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
        ... )
        >>> edited = edited_model(model, edits=MoreClasses(add=2))
        >>> edited.initializer("w")[:, :2].tolist(), edited.initializer("w").shape
        ([[1.0, 2.0], [3.0, 4.0]], (2, 4))

    Source: the initialization of torch.nn.Linear, for the new values.
    """

    name: ClassVar[str] = "more_classes"
    stability = "experimental"
    needs: ClassVar[str] = "a product by a float matrix before an output"

    add: int | None = setting(
        default=None,
        validator=attrs.validators.optional(count),
        help="the number of new classes; by default, the length of `classes`",
    )
    classes: tuple[str | int, ...] = setting(
        default=(), validator=_labels, help="the labels of the new classes"
    )

    def __attrs_post_init__(self) -> None:
        _check_count("add", self.add, "number of new classes", self.classes)

    @property
    def count(self) -> int:
        """The number of new classes."""
        return len(self.classes) if self.add is None else self.add

    def apply(self, editor: Editor) -> None:
        """Add columns to the matrix and elements to the bias."""
        head = editor.head(self.at)
        values: list[tuple[Array, Array | None]] = []
        new = self.drawn_layers(editor, head, self.count)
        for (old, first), (matrix, bias) in zip(editor.values(head), new, strict=True):
            both = None if bias is None or first is None else np.concatenate([first, bias])
            values.append((np.concatenate([old, matrix], axis=1), both))
        editor.resize(head, values, self._all_labels(editor, head.classes))

    def _all_labels(self, editor: Editor, old: int) -> Sequence[Any] | None:
        """The labels of all classes; None if neither the model nor the user has any."""
        known = editor.classes
        if known is None and self.classes:
            known = list(range(old))
        if known is None:
            return None
        if not self.classes and isinstance(known[0], int):
            return [*known, *(max(known) + 1 + k for k in range(self.count))]
        if not self.classes or isinstance(known[0], str) != isinstance(self.classes[0], str):
            raise ConfigError(
                f"{editor.where}.classes: the model has the labels {', '.join(map(str, known[:5]))}, …; "
                f"pass the labels of {self.count} new classes, of the same type"
            )
        if both := set(known) & set(self.classes):
            raise ConfigError(f"{editor.where}.classes: the model already has {sorted(both)[0]!r}")
        return [*known, *self.classes]

"""Recipes that combine features of a run, drawn at random, for the kit of backends."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import onnx

from ortflex_core import Array
from ortflex_core.testing import running

ROWS, BATCH = 26, 4
"""The rows of the data and of a batch; the last batch has two rows."""


@attrs.define(kw_only=True)
class Composition:
    """A model, arguments of a Trainer, and data."""

    model: onnx.ModelProto
    options: dict[str, Any]
    x: Array
    y: Any
    weight: Array | None

    def describe(self) -> str:
        """The combined features, for messages."""
        return ", ".join(f"{key}={value!r}" for key, value in self.options.items())


def draw(feature: str, seed: int, alone: bool = False) -> Composition:
    """A recipe with a feature and, unless ``alone``, other features that are drawn at random."""
    rng = random.Random(f"{feature} {seed}")
    chosen = {feature} | {f for f in FEATURES if rng.random() < 0.3 and not alone}
    x, y = running.regression(rows=ROWS)
    made = Composition(
        model=running.network_model(),
        options={
            "optimizer": rng.choice(["sgd", "momentum", "nesterov", "rmsprop", "adagrad"]),
            "learning_rate": rng.choice([0.02, 0.05]),
            "reduction": "mean",
            "epochs": 3,
            "batch_size": BATCH,
            "shuffle": rng.random() < 0.5,
            "seed": rng.randrange(1000),
        },
        x=x,
        y=y,
        weight=None,
    )
    for name, apply in FEATURES.items():
        if name in chosen:
            apply(made, rng)
    # If two features replace the model or the labels, the requested one is applied last.
    FEATURES[feature](made, rng)
    return made


def _numbers(made: Composition) -> None:
    """Restore the regression after a feature that needs classes."""
    made.x, made.y = running.regression(rows=ROWS)
    made.options.pop("loss", None)


def _several_losses(made: Composition, rng: random.Random) -> None:
    _numbers(made)
    made.model = two_outputs()
    made.options["loss"] = [
        {"name": "squared_error", "predicted": "Y", "expected": "y", "factor": 0.7},
        {"name": "huber", "predicted": "Z", "expected": "z", "factor": 1.5},
    ]
    made.y = {"y": made.y, "z": -made.y}


def _class_weight(made: Composition, rng: random.Random) -> None:
    made.model = classifier()
    weights = [0.5, 2.0, 1.0]
    made.options["loss"] = {"name": "softmax_cross_entropy", "class_weight": weights}
    made.y = np.random.default_rng(rng.randrange(99)).integers(0, 3, ROWS)


def _ignore_index(made: Composition, rng: random.Random) -> None:
    _class_weight(made, rng)
    made.options["loss"] = {"name": "softmax_cross_entropy", "ignore_index": 2}


def _weights(made: Composition, rng: random.Random) -> None:
    made.weight = np.random.default_rng(rng.randrange(99)).uniform(0.2, 2, ROWS).astype("f")


def _batch_without_weight(made: Composition, rng: random.Random) -> None:
    _weights(made, rng)
    assert made.weight is not None
    made.options["shuffle"] = False
    made.weight[BATCH : 2 * BATCH] = 0


def _batch_norm(made: Composition, rng: random.Random) -> None:
    _numbers(made)
    made.model = normalized()


def _dropout(made: Composition, rng: random.Random) -> None:
    _numbers(made)
    made.model = dropping()


def _set(**options: Any) -> Callable[[Composition, random.Random], None]:
    """A feature that consists of arguments; from a list, one element is drawn."""

    def apply(made: Composition, rng: random.Random) -> None:
        for key, value in options.items():
            made.options[key] = rng.choice(value) if isinstance(value, list) else value

    return apply


FEATURES: Mapping[str, Callable[[Composition, random.Random], None]] = {
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "several_losses": _several_losses,
    "class_weight": _class_weight,
    "ignore_index": _ignore_index,
    "sample_weight": _weights,
    "batch_without_weight": _batch_without_weight,
    "sum": _set(reduction="sum", learning_rate=0.01),
    "adam": _set(optimizer=["adam", "adamw", "nadam", "adamax"]),
    "norms": _set(optimizer=["lamb", "lars", "adafactor", "prodigy"]),
    "schedule": _set(schedule=["cosine", {"name": "exponential", "gamma": 0.8}, "invscaling"]),
    "penalty": _set(penalty=["l2", {"name": "elastic", "l1": 0.01, "l2": 0.1}]),
    "clip_norm": _set(clip_norm=[0.02, 0.05]),
    "clip_value": _set(clip_value=[0.005, 0.02]),
    "transforms": _set(
        transforms=[("centralize",), ({"name": "noise", "eta": 0.01}, "centralize"), ("noise",)]
    ),
    "accumulate": _set(accumulate=[2, 3]),
    "averaging": _set(averaging=[{"name": "ema", "decay": 0.8}, "swa"]),
    "constraint": _set(constraint=[{"name": "max_norm", "bound": 0.5}, "non_negative"]),
    "group_rate": _set(groups=[({"params": "*2", "rate": 0.1},)]),
    "group_optimizer": _set(groups=[({"params": "*1", "optimizer": "momentum"},)]),
    "group_penalty": _set(groups=[({"params": "W*", "penalty": "l1"},)]),
    "group_frozen": _set(groups=[({"params": "b*", "frozen": True},)]),
    "group_start_epoch": _set(groups=[({"params": "*1", "start_epoch": 1},)]),
}
"""The features of a run; each adds itself to a recipe."""


# Models ------------------------------------------------------------------------------------------


def two_outputs() -> onnx.ModelProto:
    """The network with a second output, ``Z = tanh(Y)``."""
    model = running.network_model()
    model.graph.node.append(onnx.helper.make_node("Tanh", ["Y"], ["Z"]))
    kind = onnx.TensorProto.FLOAT
    model.graph.output.append(onnx.helper.make_tensor_value_info("Z", kind, ["N", 1]))
    return model


def classifier() -> onnx.ModelProto:
    """The network with three scores."""
    model = running.network_model()
    rng = np.random.default_rng(6)
    for tensor in model.graph.initializer:
        if tensor.name in ("W2", "b2"):
            shape = (4, 3) if tensor.name == "W2" else (3,)
            array = rng.standard_normal(shape).astype(np.float32) / 2
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3
    return model


def normalized() -> onnx.ModelProto:
    """The network with BatchNormalization in training mode before its activation."""
    model = running.network_model()
    model.graph.node[2].input[0] = "n1"
    node = onnx.helper.make_node(
        "BatchNormalization",
        ["s1", "scale1", "shift1", "mean1", "var1"],
        ["n1"],
        name="norm",
        momentum=0.8,
    )
    model.graph.node.insert(2, node)
    values = {"scale1": 1.1, "shift1": 0.2, "mean1": 0.1, "var1": 1.3}
    for name, value in values.items():
        array = np.linspace(value, value + 0.3, 4, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def dropping() -> onnx.ModelProto:
    """The network with Dropout in training mode after its activation."""
    model = running.network_model()
    model.graph.node[3].input[0] = "d1"
    node = onnx.helper.make_node("Dropout", ["h1", "ratio", "training"], ["d1"], name="drop")
    model.graph.node.insert(3, node)
    for name, array in (("ratio", np.array(0.3, "f")), ("training", np.array(True))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model

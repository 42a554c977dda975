"""Every module of torch.nn: how it is made, and what goes into it.

``MODULES`` have arguments and the shape of a row; a Linear layer on the last axis comes before each, so
that a gradient has to pass through. ``LEFT_OUT`` has the modules that are not there, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")

from tests import torch_files  # noqa: E402

nn = torch.nn

ROWS = 3


@attrs.frozen
class Case:
    """A module: arguments, the shape of a row of its input, and how it is called."""

    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    shape: tuple[int, ...] = (4,)
    call: Callable[[Any, Any], Any] = lambda module, x: module(x)
    whole: bool = False
    """Whether its input are whole numbers: nothing is before it."""


def case(*arguments: Any, shape: tuple[int, ...] = (4,), **options: Any) -> Case:
    """A module that is called with one tensor."""
    return Case(arguments, options, shape)


SEQUENCE, PLANE, SPACE = (4, 6), (4, 6, 6), (4, 6, 6, 6)


def numbers(*arguments: Any, rows: tuple[int, ...] = (4,), **options: Any) -> Case:
    """A module that is called with whole numbers."""
    return Case(arguments, options, rows, whole=True)


MODULES: dict[str, Case] = {
    **{
        name: case()
        for name in (
            "CELU",
            "ELU",
            "GELU",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "Hardshrink",
            "Identity",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "PReLU",
            "RReLU",
            "ReLU",
            "ReLU6",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Softshrink",
            "Softsign",
            "Tanh",
            "Tanhshrink",
            "Dropout",
            "AlphaDropout",
            "FeatureAlphaDropout",
            "Flatten",
        )
    },
    **{name: case(1) for name in ("Softmax", "Softmin", "LogSoftmax", "GLU")},
    "AdaptiveAvgPool1d": case(2, shape=SEQUENCE),
    "AdaptiveAvgPool2d": case(2, shape=PLANE),
    "AdaptiveAvgPool3d": case(2, shape=SPACE),
    "AdaptiveMaxPool1d": case(2, shape=SEQUENCE),
    "AdaptiveMaxPool2d": case(2, shape=PLANE),
    "AdaptiveMaxPool3d": case(2, shape=SPACE),
    "AvgPool1d": case(2, shape=SEQUENCE),
    "AvgPool2d": case(2, shape=PLANE),
    "AvgPool3d": case(2, shape=SPACE),
    "BatchNorm1d": case(4, shape=SEQUENCE),
    "BatchNorm2d": case(4, shape=PLANE),
    "BatchNorm3d": case(4, shape=SPACE),
    "Bilinear": Case((4, 4, 2), call=lambda module, x: module(x, x * x)),
    "ChannelShuffle": case(2, shape=PLANE),
    "CircularPad1d": case(1, shape=SEQUENCE),
    "CircularPad2d": case(1, shape=PLANE),
    "CircularPad3d": case(1, shape=SPACE),
    "ConstantPad1d": case(1, 0.5, shape=SEQUENCE),
    "ConstantPad2d": case(1, 0.5, shape=PLANE),
    "ConstantPad3d": case(1, 0.5, shape=SPACE),
    "Conv1d": case(4, 2, 3, shape=SEQUENCE),
    "Conv2d": case(4, 2, 3, shape=PLANE, groups=2),
    "Conv3d": case(4, 2, 3, shape=SPACE),
    "ConvTranspose1d": case(4, 2, 3, shape=SEQUENCE, stride=2),
    "ConvTranspose2d": case(4, 2, 3, shape=PLANE, stride=2),
    "ConvTranspose3d": case(4, 2, 3, shape=SPACE),
    "CosineSimilarity": Case((), call=lambda module, x: module(x, x[:, [1, 0, 3, 2]])[:, None]),
    "Dropout1d": case(shape=SEQUENCE),
    "Dropout2d": case(shape=PLANE),
    "Dropout3d": case(shape=SPACE),
    "Embedding": numbers(7, 3),
    "EmbeddingBag": numbers(7, 3),
    "Fold": case((4, 4), 2, shape=(4, 9)),
    "FractionalMaxPool2d": case(2, 3, shape=PLANE),
    "FractionalMaxPool3d": case(2, 3, shape=SPACE),
    "GRU": case(4, 3, shape=(5, 4), batch_first=True),
    "GRUCell": case(4, 3),
    "GroupNorm": case(2, 4, shape=PLANE),
    "InstanceNorm1d": case(4, shape=SEQUENCE, affine=True),
    "InstanceNorm2d": case(4, shape=PLANE, affine=True),
    "InstanceNorm3d": case(4, shape=SPACE),
    "LPPool1d": case(2, 2, shape=SEQUENCE),
    "LPPool2d": case(2, 2, shape=PLANE),
    "LPPool3d": case(2, 2, shape=SPACE),
    "LSTM": case(4, 3, shape=(5, 4), batch_first=True, bidirectional=True),
    "LSTMCell": case(4, 3),
    "LayerNorm": case(4),
    "Linear": case(4, 3),
    "LocalResponseNorm": case(2, shape=PLANE),
    "MaxPool1d": case(2, shape=SEQUENCE),
    "MaxPool2d": case(2, shape=PLANE),
    "MaxPool3d": case(2, shape=SPACE),
    "MaxUnpool1d": Case(
        (2,),
        shape=SEQUENCE,
        call=lambda m, x: m(*nn.functional.max_pool1d(x, 2, return_indices=True)),
    ),
    "MaxUnpool2d": Case(
        (2,),
        shape=PLANE,
        call=lambda m, x: m(*nn.functional.max_pool2d(x, 2, return_indices=True)),
    ),
    "MaxUnpool3d": Case(
        (2,),
        shape=SPACE,
        call=lambda m, x: m(*nn.functional.max_pool3d(x, 2, return_indices=True)),
    ),
    "MultiheadAttention": Case(
        (4, 2), {"batch_first": True}, (5, 4), call=lambda module, x: module(x, x, x)
    ),
    "PairwiseDistance": Case((), call=lambda module, x: module(x, x * x)[:, None]),
    "PixelShuffle": case(2, shape=PLANE),
    "PixelUnshuffle": case(2, shape=PLANE),
    "RMSNorm": case(4),
    "RNN": case(4, 3, shape=(5, 4), batch_first=True),
    "RNNCell": case(4, 3),
    "ReflectionPad1d": case(1, shape=SEQUENCE),
    "ReflectionPad2d": case(1, shape=PLANE),
    "ReflectionPad3d": case(1, shape=SPACE),
    "ReplicationPad1d": case(1, shape=SEQUENCE),
    "ReplicationPad2d": case(1, shape=PLANE),
    "ReplicationPad3d": case(1, shape=SPACE),
    "Softmax2d": case(shape=PLANE),
    "Threshold": case(0.1, 0.5),
    "Transformer": Case(
        (4, 2, 1, 1, 8), {"batch_first": True}, (5, 4), call=lambda module, x: module(x, x * x)
    ),
    "TransformerDecoder": Case(shape=(5, 4), call=lambda module, x: module(x, x * x)),
    "TransformerDecoderLayer": Case(
        (4, 2, 8), {"batch_first": True}, (5, 4), call=lambda module, x: module(x, x * x)
    ),
    "TransformerEncoder": case(shape=(5, 4)),
    "TransformerEncoderLayer": case(4, 2, 8, shape=(5, 4), batch_first=True),
    "Unflatten": case(1, (2, 2)),
    "Unfold": case(2, shape=PLANE),
    "Upsample": case(shape=PLANE, scale_factor=2, mode="bilinear"),
    "UpsamplingBilinear2d": case(shape=PLANE, scale_factor=2),
    "UpsamplingNearest2d": case(shape=PLANE, scale_factor=2),
    "ZeroPad1d": case(1, shape=SEQUENCE),
    "ZeroPad2d": case(1, shape=PLANE),
    "ZeroPad3d": case(1, shape=SPACE),
}


TRAINS, UNKNOWN = "trains", "exporter fails"

# What does not train, by exporter: it fails, or ortflex refuses an operator.
NOT_BY_TORCHSCRIPT = {
    **dict.fromkeys(("Bilinear", "ChannelShuffle", "Fold", "RMSNorm", "Threshold"), UNKNOWN),
    **dict.fromkeys(("FractionalMaxPool2d", "FractionalMaxPool3d"), UNKNOWN),
    **dict.fromkeys(("MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"), UNKNOWN),
}
NOT_BY_DYNAMO = {
    **dict.fromkeys(
        ("AdaptiveAvgPool3d", "FractionalMaxPool2d", "FractionalMaxPool3d", "RReLU"), UNKNOWN
    ),
}


def outcome(name: str, dynamo: bool) -> str:
    """What becomes of a module: "trains", "exporter fails", or "refused: " and an operator."""
    return (NOT_BY_DYNAMO if dynamo else NOT_BY_TORCHSCRIPT).get(name, TRAINS)


def left_out() -> dict[str, str]:
    reasons = {
        "AdaptiveLogSoftmaxWithLoss": "it is a loss, which takes labels",
        "Container": "it has no forward pass",
        "DataParallel": "it spreads another module over GPUs",
        "CrossMapLRN2d": "it is a function of torch's own that no exporter knows",
        "Module": "it has no forward pass",
        "ModuleDict": "it has no forward pass",
        "ModuleList": "it has no forward pass",
        "NLLLoss2d": "it is a loss, which takes labels",
        "ParameterDict": "it has no forward pass",
        "ParameterList": "it has no forward pass",
        "RNNBase": "it has no forward pass of its own",
        "RNNCellBase": "it has no forward pass",
        "Sequential": "every case is one",
        "SyncBatchNorm": "it works on a GPU only",
    }
    for name in dir(nn):
        if name.startswith("Lazy"):
            reasons[name] = "it is the module without Lazy after its first call"
        elif name.endswith("Loss"):
            reasons[name] = "it is a loss, which takes labels"
    return reasons


class Net(nn.Module):
    """A Linear layer, a module, and the first tensor that it gives, a row for each row."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__()
        inner = {
            "TransformerEncoder": lambda: (
                nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
                1,
            ),
            "TransformerDecoder": lambda: (
                nn.TransformerDecoderLayer(4, 2, 8, batch_first=True),
                1,
            ),
        }
        arguments = inner[name]() if name in inner else case.arguments
        self.first = None if case.whole else nn.Linear(case.shape[-1], case.shape[-1])
        self.module = getattr(nn, name)(*arguments, **case.options)
        self.case = case

    def forward(self, x: Any) -> Any:
        y = self.case.call(self.module, x if self.first is None else self.first(x))
        while isinstance(y, tuple):
            y = y[0]
        return y.flatten(1)


def exported(name: str, case: Case, dynamo: bool) -> tuple[Any, Any, Any]:
    """The network, a batch, and the ModelProto of an exporter.

    Raises:
        Exception: whatever the exporter raises where it does not know the module.
    """
    torch.manual_seed(0)
    net = Net(name, case).eval()
    shape = (ROWS, *case.shape)
    x = torch.randint(0, 7, shape) if case.whole else torch.randn(shape)
    model = torch_files.exported(net, x, dynamo=dynamo)
    return net, x.numpy(), model

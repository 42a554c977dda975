"""What torch's users bring: every module of torch.nn through both exporters, and the life of a model.

The class: a module that an exporter writes in a form that ortflex refuses without a way out, or trains
wrongly. Each predicts what torch does, is trained, exported, run and read again; or is refused by an error
that says what to do. ``outcome`` has which of these, or that the exporter itself fails: another
outcome than that is a failure.
`make test` runs a sample, `make test-all` all of it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import Model, OrtflexError, require_runtime
from tests.training import make

pytestmark = pytest.mark.sampled

torch = pytest.importorskip("torch")

from tests import models, torch_files  # noqa: E402

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
SPACES = {1: SEQUENCE, 2: PLANE, 3: SPACE}


def in_each_space(names: str, *arguments: Any) -> dict[str, Case]:
    """The modules of each name for sequences, planes and spaces, by their names."""
    return {
        f"{name}{k}d": case(*arguments, shape=shape)
        for name in names.split()
        for k, shape in SPACES.items()
    }


def unpooled(axes: int) -> Callable[[Any, Any], Any]:
    pool = getattr(nn.functional, f"max_pool{axes}d")
    return lambda module, x: module(*pool(x, 2, return_indices=True))


def numbers(*arguments: Any, rows: tuple[int, ...] = (4,), **options: Any) -> Case:
    """A module that is called with whole numbers."""
    return Case(arguments, options, rows, whole=True)


ON_ELEMENTS = """
CELU ELU GELU Hardsigmoid Hardswish Hardtanh Hardshrink Identity LeakyReLU LogSigmoid Mish PReLU
RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout
AlphaDropout FeatureAlphaDropout Flatten
"""
# Arguments and the shape of a row; a Linear layer on the last axis comes before each, so that a gradient
# has to pass through.
MODULES: dict[str, Case] = {
    **{name: case() for name in ON_ELEMENTS.split()},
    **in_each_space("AdaptiveAvgPool AdaptiveMaxPool AvgPool MaxPool", 2),
    **in_each_space("CircularPad ReflectionPad ReplicationPad ZeroPad", 1),
    **in_each_space("ConstantPad", 1, 0.5),
    **in_each_space("BatchNorm", 4),
    **in_each_space("Dropout"),
    **in_each_space("LPPool", 2, 2),
    **{f"MaxUnpool{k}d": Case((2,), {}, shape, unpooled(k)) for k, shape in SPACES.items()},
    **{name: case(1) for name in ("Softmax", "Softmin", "LogSoftmax", "GLU")},
    "Bilinear": Case((4, 4, 2), call=lambda module, x: module(x, x * x)),
    "ChannelShuffle": case(2, shape=PLANE),
    "Conv1d": case(4, 2, 3, shape=SEQUENCE),
    "Conv2d": case(4, 2, 3, shape=PLANE, groups=2),
    "Conv3d": case(4, 2, 3, shape=SPACE),
    "ConvTranspose1d": case(4, 2, 3, shape=SEQUENCE, stride=2),
    "ConvTranspose2d": case(4, 2, 3, shape=PLANE, stride=2),
    "ConvTranspose3d": case(4, 2, 3, shape=SPACE),
    "CosineSimilarity": Case((), call=lambda module, x: module(x, x[:, [1, 0, 3, 2]])[:, None]),
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
    "LSTM": case(4, 3, shape=(5, 4), batch_first=True, bidirectional=True),
    "LSTMCell": case(4, 3),
    "LayerNorm": case(4),
    "Linear": case(4, 3),
    "LocalResponseNorm": case(2, shape=PLANE),
    "MultiheadAttention": Case(
        (4, 2), {"batch_first": True}, (5, 4), call=lambda module, x: module(x, x, x)
    ),
    "PairwiseDistance": Case((), call=lambda module, x: module(x, x * x)[:, None]),
    "PixelShuffle": case(2, shape=PLANE),
    "PixelUnshuffle": case(2, shape=PLANE),
    "RMSNorm": case(4),
    "RNN": case(4, 3, shape=(5, 4), batch_first=True),
    "RNNCell": case(4, 3),
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
}


TRAINS, UNKNOWN = "trains", "exporter fails"
LOSS = "it is a loss, which takes labels"

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
    parts = ("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList")
    reasons = {
        **dict.fromkeys((*parts, "RNNBase", "RNNCellBase"), "it has no forward pass of its own"),
        **dict.fromkeys(("AdaptiveLogSoftmaxWithLoss", "NLLLoss2d"), LOSS),
        "DataParallel": "it spreads another module over GPUs",
        "CrossMapLRN2d": "it is a function of torch's own that no exporter knows",
        "Sequential": "every case is one",
        "SyncBatchNorm": "it works on a GPU only",
    }
    for name in dir(nn):
        if name.startswith("Lazy"):
            reasons[name] = "it is the module without Lazy after its first call"
        elif name.endswith("Loss"):
            reasons[name] = LOSS
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


# The matrix ---------------------------------------------------------------------------------------

WAYS_OUT = r"Ways out:|params=\[|export the model again|Freeze the parameters|fit a network"
DYNAMO_SAMPLE = frozenset({"GroupNorm", "LSTM", "PReLU", "TransformerEncoderLayer"})


def combinations() -> list[Any]:
    """Every module and exporter; those that `make test` leaves out are slow."""
    marked = []
    for name in sorted(MODULES):
        for dynamo in (False, True):
            legacy = zlib.crc32(name.encode()) % 4 == 0
            chosen = name in DYNAMO_SAMPLE if dynamo else legacy
            label = f"{name}-{'dynamo' if dynamo else 'torchscript'}"
            marks = [] if chosen else [pytest.mark.slow]
            marked.append(pytest.param(name, dynamo, marks=marks, id=label))
    return marked


def test_every_module_is_in_the_matrix_or_left_out_for_a_reason() -> None:
    modules = {
        name
        for name in dir(nn)
        if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    }
    reasons = left_out()
    assert modules <= set(MODULES) | set(reasons)
    assert not set(MODULES) & set(reasons)


@pytest.mark.parametrize(("name", "dynamo"), combinations())
def test_a_module(name: str, dynamo: bool, tmp_path: Path) -> None:
    expected = outcome(name, dynamo)
    try:
        net, x, proto = exported(name, MODULES[name], dynamo)
    except Exception as error:  # of the exporter, which has many kinds
        if expected != UNKNOWN:
            raise
        pytest.skip(f"the exporter: {type(error).__name__}: {str(error)[:200]}")
    newest = require_runtime().max_opset
    if proto.opset_import[0].version > newest:
        pytest.skip(f"the exporter writes opset {proto.opset_import[0].version}, over {newest}")
    if expected == TRAINS:
        live(net, x, proto, tmp_path)
        return
    with pytest.raises(OrtflexError) as caught:
        live(net, x, proto, tmp_path)
    operator = expected.removeprefix("refused: ")
    assert operator in {n.op_type for n in Model(proto).internal.graph.node}
    assert operator in str(caught.value)
    assert re.search(WAYS_OUT, str(caught.value))


def live(net: Any, x: Any, proto: Any, folder: Path) -> None:
    options = {"loss": {"y": "squared_error"}, "backend": "fused", "batch_norm": "freeze"}
    trainer = make(proto, epochs=5, learning_rate=1e-3, batch_size=ROWS, **options)
    before = trainer.predict(x, "y")
    with torch.no_grad():
        np.testing.assert_allclose(before, net(torch.tensor(x)).numpy(), rtol=1e-4, atol=1e-5)
    weights = trainer.get_state()
    target = np.random.default_rng(0).standard_normal(before.shape).astype(np.float32)
    trainer.fit(x, target)
    losses = trainer.train_losses_
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert any(not np.array_equal(weights[n], a) for n, a in trainer.get_state().items())
    after = trainer.predict(x, "y")
    trainer.export(folder / "trained.onnx")
    served = models.predict(onnx.load(folder / "trained.onnx"), {"x": x})["y"]
    np.testing.assert_allclose(served, after, rtol=1e-4, atol=1e-5)
    again = make(folder / "trained.onnx", **options)
    np.testing.assert_allclose(again.predict(x, "y"), after, rtol=1e-5, atol=1e-6)

"""The networks by torch's newer exporter, at opset 18 and at a new one: every gradient against torch's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import require_runtime
from tests.end_to_end import test_networks_sequence as sequence
from tests.end_to_end import test_networks_vision as vision
from tests.training import make

pytestmark = pytest.mark.once

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript", reason="torch's newer exporter needs onnxscript")

from tests import torch_files  # noqa: E402

# torch 2.13 writes Gelu into files that it calls opset 18 when asked for more than 23.
NEWEST = 26
# An export takes seconds; one network of each kind is tried in every run.
QUICK = {("mlp", NEWEST), ("mobilenet", 18), ("gru", 23), ("encoder", 18)}
GELU = {"encoder", "decoder", "vision"}


def cases(networks: Any) -> list[Any]:
    out = []
    for name in networks:
        for opset in (18, 23) if name in GELU else (18, 23, NEWEST):
            marks = () if (name, opset) in QUICK else (pytest.mark.slow,)
            out.append(pytest.param(name, opset, marks=marks))
    return out


@functools.cache
def exported(name: str, opset: int, training: bool = True) -> tuple[Any, onnx.ModelProto, Any]:
    """A network, its file with a dynamic batch, and an input."""
    if opset > require_runtime().max_opset:
        pytest.skip(f"this onnxruntime runs opsets up to {require_runtime().max_opset}")
    torch.manual_seed(3)
    if name in vision.NETWORKS:
        build, shape = vision.NETWORKS[name]
        network, x = build(), torch.randn(2, *shape)
    else:
        network = sequence.NETWORKS[name]()
        shape = sequence.SHAPES.get(name)
        x = torch.randn(shape) if shape else torch.randint(0, 11, (3, 7))
    # Optimized, weights are folded into others, which no longer have torch's names.
    options = {"opset_version": opset, "optimize": False}
    model = torch_files.exported(network.train(training), x, dynamo=True, **options)
    # It writes version 10; what is in these files was there before.
    model.ir_version = min(model.ir_version, require_runtime().max_ir)
    assert {o.domain: o.version for o in model.opset_import}[""] == opset
    return network, model, x


@pytest.mark.parametrize(("name", "opset"), cases(vision.NETWORKS))
def test_convolutional_networks(name: str, opset: int) -> None:
    network, model, _ = exported(name, opset)
    vision.check(network, model, name)


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_statistics_equal_torchs(training: bool) -> None:
    """Of files that were written in inference mode, and in training mode."""
    _, model, _ = exported("mobilenet", 18, training)
    trainer = make(model, loss="softmax_cross_entropy", backend="fused", batch_norm="train")
    twin = vision.NETWORKS["mobilenet"][0]().train()
    # The initializers, not the network: exports in training mode may touch its statistics.
    stored = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    twin.load_state_dict(
        {n: torch.tensor(stored[n]) for n in twin.state_dict() if n in stored}, strict=False
    )
    x, y = vision.batch("mobilenet", 6)
    trainer.step((x, y))
    twin(torch.tensor(x))
    expected = {n: b.numpy() for n, b in twin.named_buffers() if "running" in n}
    got = trainer.get_state(buffers=True)
    assert set(expected) <= set(got)
    for n, array in expected.items():
        np.testing.assert_allclose(got[n], array, rtol=1e-4, atol=1e-6, err_msg=n)


@pytest.mark.parametrize(("name", "opset"), cases(sequence.NETWORKS))
def test_sequences_and_images(name: str, opset: int) -> None:
    network, model, x = exported(name, opset)
    sequence.check(network, model, x)

"""What torch's users bring: every module of torch.nn through both exporters, and the life of a model.

The class: a module that an exporter writes in a form that ortflex refuses without a way out, or trains
wrongly. Each predicts what torch does, is trained, exported, run and read again; or is refused by an error
that says what to do. ``cases.outcome`` has which of these, or that the exporter itself fails: another
outcome than that is a failure.
`make test` runs a sample, `make test-all` all of it.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortflex_core import Model, OrtflexError, require_runtime
from tests.end_to_end import torch_cases as cases
from tests.training import make

pytestmark = pytest.mark.sampled

torch = cases.torch
WAYS_OUT = r"Ways out:|params=\[|export the model again|Freeze the parameters|fit a network"
DYNAMO_SAMPLE = frozenset({"GroupNorm", "LSTM", "PReLU", "TransformerEncoderLayer"})


def combinations() -> list[Any]:
    """Every module and exporter; those that `make test` leaves out are slow."""
    marked = []
    for name in sorted(cases.MODULES):
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
        for name in dir(cases.nn)
        if isinstance(getattr(cases.nn, name), type)
        and issubclass(getattr(cases.nn, name), cases.nn.Module)
    }
    reasons = cases.left_out()
    assert modules <= set(cases.MODULES) | set(reasons)
    assert not set(cases.MODULES) & set(reasons)


@pytest.mark.parametrize(("name", "dynamo"), combinations())
def test_a_module(name: str, dynamo: bool, tmp_path: Path) -> None:
    expected = cases.outcome(name, dynamo)
    try:
        net, x, proto = cases.exported(name, cases.MODULES[name], dynamo)
    except Exception as error:  # of the exporter, which has many kinds
        if expected != cases.UNKNOWN:
            raise
        pytest.skip(f"the exporter: {type(error).__name__}: {str(error)[:200]}")
    newest = require_runtime().max_opset
    if proto.opset_import[0].version > newest:
        pytest.skip(f"the exporter writes opset {proto.opset_import[0].version}, over {newest}")
    if expected == cases.TRAINS:
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
    trainer = make(proto, epochs=5, learning_rate=1e-3, batch_size=cases.ROWS, **options)
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
    session = onnxruntime.InferenceSession(
        str(folder / "trained.onnx"), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], after, rtol=1e-4, atol=1e-5)
    again = make(folder / "trained.onnx", **options)
    np.testing.assert_allclose(again.predict(x, "y"), after, rtol=1e-5, atol=1e-6)

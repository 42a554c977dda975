"""Step programs of the kit of backends: they find a wrong mask at 0, a stale slot and a wrong rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import HostEngine, Unsupported
from ortflex_core.testing import step_programs
from ortflex_core.testing.backend import check_program
from ortflex_core.testing.running import plugins
from tests import models
from tests.core.test_testing_backends import Good, by_onnxruntime

pytestmark = pytest.mark.once

PROGRAM = ("mlp", "momentum", "squared_error")


class HalfAtZero(Good):
    """Its mask of a Relu is 0.5 at 0, as OpenVINO's HardSigmoid with a huge slope is."""

    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        # A slope that leaves 0 where the mistake has 0.5, next to 1 above and 0 below.
        proto = program.proto()
        for node in proto.graph.node:
            if node.op_type == "Sign":
                node.op_type = "HardSigmoid"
                for name, value in (("alpha", 3e38), ("beta", 0.5)):
                    node.attribute.append(onnx.helper.make_attribute(name, value))
        return by_onnxruntime(attrs.evolve(program, model=proto.SerializeToString()), feeds)


class StaleSlot(Good):
    """Every second step reads the slots of the step before."""

    class engine(HostEngine):
        def _one(self, batches: Any, rate: Any) -> Any:
            before = dict(self._slots)
            made = super()._one(batches, rate)
            if self._step % 2:
                self._slots = before
            return made


class WrongRate(Good):
    """Steps of a run after the first take the rate of the first, a hundredth too small."""

    class engine(HostEngine):
        def run(self, batches: Any, rates: Any) -> Any:
            return super().run(batches, [0.99 * rate for rate in rates])


@pytest.mark.parametrize("mistake", [HalfAtZero(), StaleSlot(), WrongRate()])
def test_step_programs_reject_planted_mistakes(mistake: Any) -> None:
    check_program(Good(), *PROGRAM)
    with pytest.raises(AssertionError, match=r"is off|after a training"):
        check_program(mistake, *PROGRAM)


def test_step_programs_have_every_optimizer_and_loss_that_is_ours() -> None:
    ours = {
        kind: {e.name for e in plugins()[kind] if e.distribution == "ortflex"}
        for kind in ("optimizers", "losses")
    }
    assert ours["optimizers"] == set(step_programs.OPTIMIZERS)
    # Of pairs, without labels, of several tensors or of sequences, with a teacher.
    others = {
        *("cosine_embedding", "entropy", "consistency", "distillation", "feature_matching"),
        *("triplet", "mined_triplet", "contrastive", "supervised_contrastive", "margin_softmax"),
        *("ctc", "causal_lm", "ssd", "retinanet", "task_aligned"),
    }
    assert ours["losses"] - set(step_programs.LOSSES) == others
    turns = zip(*step_programs.sample(17), strict=True)
    names = (step_programs.NETWORKS, step_programs.OPTIMIZERS, step_programs.LOSSES)
    assert all(set(found) == set(known) for found, known in zip(turns, names, strict=True))


def test_relus_of_step_programs_get_exact_zeros() -> None:
    made = step_programs.draw("mlp", "sgd", "squared_error", alone=True)
    weights = models.weights_of(made.model)
    assert (made.x[1] @ weights["W1"] + weights["b1"] == 0).all()
    assert np.count_nonzero(made.x) > made.x.size / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "c", "xla", "openvino"])
@pytest.mark.parametrize("program", [*step_programs.every()][::11], ids="-".join)
def test_every_kind_of_step_program(name: str, program: tuple[str, str, str]) -> None:
    if name not in ("fused", "c"):
        pytest.importorskip({"xla": "jax"}.get(name, name))
    try:
        check_program(plugins().component("backends", name), *program)
    except Unsupported as error:
        pytest.skip(str(error))

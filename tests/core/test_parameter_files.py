"""What is trained by default in files of torchvision's, timm's and transformers' networks.

It is what torch trains, no tensor more and none less. The files are without weights, in
``fixtures/parameter_networks.zip``; see :mod:`tests.parameter_files`.
"""

from __future__ import annotations

import pytest

from ortflex_core import FLOATS, Model, choose_parameters
from tests import parameter_files

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("name", parameter_files.names())
def test_what_torch_trains_is_trained(name: str) -> None:
    proto, weights = parameter_files.stored(name)
    model = Model(proto)
    outputs = [o.name for o in model.outputs if o.dtype in FLOATS]
    used = {i for node in model.ancestors(outputs) for i in node.input}
    expected = {n for n, is_weight in weights.items() if is_weight and n in used}
    choices = choose_parameters(model, outputs, None)
    reasons = {c.name: c.reason for c in choices}
    chosen = {c.name for c in choices if c.trained}
    assert chosen == expected, {n: reasons.get(n) for n in chosen ^ expected}
    assert all(reasons.values()), "every choice has a reason"


def test_the_collection_is_of_some_size() -> None:
    """A sample of each package and of both exporters."""
    names = parameter_files.names()
    assert len(names) >= 50
    for part in ("transformers.", "timm.", ".script-train", ".script-eval", ".dynamo-train"):
        assert any(part in name for name in names)

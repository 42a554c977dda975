"""Pictures of the graphs of the backend training_agent, in the environments that have it."""

from __future__ import annotations

from ortflex_core import internals_of
from ortflex_plugins.pictures import draw
from tests import models
from tests.training import make, regression


def test_the_four_graphs_of_forward_backward() -> None:
    trainer = make(models.mlp(), backend="training_agent", epochs=1, penalty="l2")
    trainer.fit(*regression(8, 6))
    names = internals_of(trainer).problem.parameters
    graphs = trainer.save_onnx_graph()
    levels = {n: draw(g, params=names, fold=False).level for n, g in graphs.items()}
    assert {name: {i.kind for i in level.items} for name, level in levels.items()} == {
        "forward": {"io", "forward"},
        "gradient": {"io", "forward", "backward"},
        "loss": {"io", "loss", "backward"},
        "update": {"io", "penalty", "backward", "update"},
    }
    for name in ("forward", "update"):
        items = levels[name].items
        trained = {c.text.split(" ")[0] for i in items for c in i.chips if c.kind == "parameter"}
        assert trained == set(names), name

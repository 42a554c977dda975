"""Optimizers, schedulers and losses of torch, wherever a component may stand: their name and place here."""

from __future__ import annotations

from typing import Any

import pytest

from ortflex_core import ConfigError, Trainer
from tests import models

torch = pytest.importorskip("torch")

ADAM = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
STEP = torch.optim.lr_scheduler.StepLR(ADAM, 3)
MSE = torch.nn.MSELoss()
PLACES = {
    "groups[0].optimizer": lambda part: {"groups": {"params": "*", "optimizer": part}},
    "groups[1].optimizer": lambda part: {
        "groups": [
            {"params": "coef"},
            {"params": "intercept", "optimizer": {"name": part, "beta1": 0.8}},
        ]
    },
    "groups[0].penalty": lambda part: {"groups": {"params": "*", "penalty": part}},
    "groups[0].penalty.coef": lambda part: {"groups": {"params": "*", "penalty": {"coef": part}}},
    "penalty.coef": lambda part: {"penalty": {"coef": part}},
    "constraint.coef": lambda part: {"constraint": {"coef": part}},
    "constraint": lambda part: {"constraint": part},
    "loss.Y": lambda part: {"loss": {"Y": part}},
    "loss[0]": lambda part: {"loss": [{"name": part, "predicted": "Y"}]},
    "loss": lambda part: {"loss": {"name": part}},
    "callbacks[0]": lambda part: {"callbacks": [part]},
    "metrics[0]": lambda part: {"metrics": {"Y": [part]}},
    "metrics[1]": lambda part: {"metrics": ["r2", {"name": part}]},
    "optimizer": lambda part: {"optimizer": {"name": part}},
    "schedule": lambda part: {"schedule": {"name": part}},
    "transforms[0]": lambda part: {"transforms": part},
    "averaging": lambda part: {"averaging": part},
}
PARTS: dict[str, tuple[Any, str, str]] = {
    "an optimizer": (ADAM, "'adam'", "optimizer"),
    "a class of optimizers": (torch.optim.SGD, "'sgd'", "optimizer"),
    "a scheduler": (STEP, "'step'", "schedule"),
    "a class of schedulers": (torch.optim.lr_scheduler.CosineAnnealingLR, "'cosine'", "schedule"),
    "a loss": (MSE, "'squared_error'", "loss"),
    "a function of a loss": (torch.nn.functional.cross_entropy, "'softmax_cross_entropy'", "loss"),
}


@pytest.mark.once
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_part_of_torch_has_its_name_and_its_place(place: str, part: str) -> None:
    """The path of the value, the name in ortflex, and where it belongs, if that is another argument."""
    given, name, argument = PARTS[part]
    with pytest.raises(ConfigError) as error:
        Trainer(models.linear(), **{"loss": "squared_error", **PLACES[place](given)})
    text = str(error.value)
    assert text.startswith(f"{place}: ")
    assert " of torch; " in text
    assert name in text
    own = place.rpartition(".")[2] if place.endswith(("optimizer", "schedule")) else place
    assert (f"it belongs to {argument}=" in text) == (not own.startswith(argument))
    assert "\n" not in text


@pytest.mark.once
def test_the_parameter_groups_of_torch_have_their_keys_here() -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(models.linear(), loss="squared_error", groups=ADAM.param_groups)
    lines = str(error.value).splitlines()
    assert any(line.startswith("groups[0].lr: ") and "'rate'" in line for line in lines)
    assert any("weight_decay" in line and "'penalty'" in line for line in lines)

"""Components of torch: ours have its defaults; a part of torch that stands anywhere has its name here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ortflex_core import ConfigError, Trainer
from tests import models
from tests.training import plugins

torch = pytest.importorskip("torch")

# How torch runs it, not what it computes.
MEANS = {"foreach", "fused", "capturable", "differentiable", "last_epoch", "size_average", "reduce"}

BETAS, MINIMUM = ("beta1", "beta2"), {"eta_min": "minimum"}

# By kind and name of ours: torch's name, and ours for each of torch's parameters.
TWINS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "optimizers": {
        "sgd": ("SGD", {"weight_decay": "weight_decay"}),
        "adam": ("Adam", {"betas": ("beta1", "beta2"), "eps": "eps"}),
        "adamw": ("AdamW", {"betas": BETAS, "eps": "eps", "weight_decay": "weight_decay"}),
        "adagrad": ("Adagrad", {"lr_decay": "rate_decay", "eps": "eps"}),
        "rmsprop": ("RMSprop", {"alpha": "alpha", "eps": "eps"}),
        "adadelta": ("Adadelta", {"rho": "rho", "eps": "eps"}),
        "adamax": ("Adamax", {"betas": ("beta1", "beta2"), "eps": "eps"}),
        "nadam": ("NAdam", {"betas": ("beta1", "beta2"), "eps": "eps", "momentum_decay": "decay"}),
        "radam": ("RAdam", {"betas": ("beta1", "beta2"), "eps": "eps"}),
    },
    "schedules": {
        "step": ("StepLR", {"gamma": "gamma"}),
        "multi_step": ("MultiStepLR", {"gamma": "gamma"}),
        "polynomial": ("PolynomialLR", {"power": "power"}),
        "cosine": ("CosineAnnealingLR", {"eta_min": "minimum"}),
        "cosine_restarts": ("CosineAnnealingWarmRestarts", {"T_mult": "factor", **MINIMUM}),
        "one_cycle": (
            "OneCycleLR",
            {"pct_start": "up", "div_factor": "start_divisor", "final_div_factor": "end_divisor"},
        ),
        "warmup": ("LinearLR", {"start_factor": "start", "total_iters": "length"}),
        "plateau": (
            "ReduceLROnPlateau",
            {"min_lr": "minimum"}
            | {name: name for name in ("factor", "patience", "threshold", "cooldown")},
        ),
    },
    "losses": {
        "huber": ("HuberLoss", {"delta": "delta"}),
        "cosine_embedding": ("CosineEmbeddingLoss", {"margin": "margin"}),
        "softmax_cross_entropy": (
            "CrossEntropyLoss",
            {"weight": "class_weight"} | {n: n for n in ("ignore_index", "label_smoothing")},
        ),
        "log_loss": ("BCEWithLogitsLoss", {}),
        "poisson": ("PoissonNLLLoss", {}),
        "kullback_leibler": ("KLDivLoss", {}),
        "squared_error": ("MSELoss", {}),
        "absolute_error": ("L1Loss", {}),
    },
}

# What torch asks for and ours says in another way, with torch's default next to it.
OTHERWISE = {
    ("OneCycleLR", "anneal_strategy"): "cos",
    ("OneCycleLR", "cycle_momentum"): True,  # no optimizer of ours has a momentum that is scheduled
    ("OneCycleLR", "base_momentum"): 0.85,
    ("OneCycleLR", "max_momentum"): 0.95,
    ("PolynomialLR", "total_iters"): 5,  # None is the whole training here, as of cosine
    ("LinearLR", "end_factor"): 1.0,
    ("ReduceLROnPlateau", "mode"): "min",  # "auto", which is "min" unless a metric says otherwise
    ("ReduceLROnPlateau", "threshold_mode"): "rel",  # "relative"
    ("ReduceLROnPlateau", "eps"): 1e-8,  # a constant
    ("PoissonNLLLoss", "log_input"): True,  # scores are logarithms
    ("PoissonNLLLoss", "eps"): 1e-8,  # of what log_input=False computes
    **{(twin, "reduction"): "mean" for twin, _ in TWINS["losses"].values()},  # the Trainer's
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in TWINS.items() for name in table]
)
def test_every_default_is_torch_s(kind: str, name: str) -> None:
    home = {"optimizers": torch.optim, "schedules": torch.optim.lr_scheduler}.get(kind, torch.nn)
    ours = plugins()[kind].load(name)
    twin, names = TWINS[kind][name]
    known = {f.alias: f.default for f in ours.__attrs_attrs__}
    parameters = inspect.signature(getattr(home, twin)).parameters
    assert set(names) <= set(parameters)
    for label, parameter in parameters.items():
        default = parameter.default
        if default is parameter.empty or label in MEANS:
            continue
        if label in names:
            own = names[label]
            got = tuple(known[n] for n in own) if isinstance(own, tuple) else known[own]
            assert got == default, f"{name}.{own} is {got}, torch's {twin}({label}=) {default}"
        elif label == "lr":
            assert ours.default_rate == default
        elif (twin, label) in OTHERWISE:
            assert OTHERWISE[twin, label] == default
        else:  # an option that we do not have is one that torch leaves off
            assert default in (0, False, None), f"torch's {twin}({label}={default!r})"


def test_what_has_no_signature_of_its_own_is_torch_s_too() -> None:
    averages = inspect.signature(torch.optim.swa_utils.get_ema_multi_avg_fn).parameters
    assert plugins()["averages"].load("ema")().decay == averages["decay"].default
    clip = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters
    assert clip["norm_type"].default == 2.0
    for name in ("momentum", "nesterov"):  # SGD with a momentum, whose rate is SGD's
        rate = inspect.signature(torch.optim.SGD).parameters["lr"].default
        assert plugins()["optimizers"].load(name).default_rate == rate


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

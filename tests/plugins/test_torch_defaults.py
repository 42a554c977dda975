"""Where torch has a component, ours has its defaults: compared name by name with torch's signatures."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.training import plugins

# How torch runs it, not what it computes.
MEANS = {"foreach", "fused", "capturable", "differentiable", "last_epoch", "size_average", "reduce"}

# By kind and name of ours: torch's name, and ours for each of torch's parameters.
TWINS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "optimizers": {
        "sgd": ("SGD", {"weight_decay": "weight_decay"}),
        "adam": ("Adam", {"betas": ("beta1", "beta2"), "eps": "eps"}),
        "adamw": (
            "AdamW",
            {"betas": ("beta1", "beta2"), "eps": "eps", "weight_decay": "weight_decay"},
        ),
        "adagrad": ("Adagrad", {"lr_decay": "rate_decay", "eps": "eps"}),
        "rmsprop": ("RMSprop", {"alpha": "alpha", "eps": "eps"}),
        "adadelta": ("Adadelta", {"rho": "rho", "eps": "eps"}),
        "adamax": ("Adamax", {"betas": ("beta1", "beta2"), "eps": "eps"}),
        "nadam": (
            "NAdam",
            {"betas": ("beta1", "beta2"), "eps": "eps", "momentum_decay": "decay"},
        ),
        "radam": ("RAdam", {"betas": ("beta1", "beta2"), "eps": "eps"}),
    },
    "schedules": {
        "step": ("StepLR", {"gamma": "gamma"}),
        "multi_step": ("MultiStepLR", {"gamma": "gamma"}),
        "polynomial": ("PolynomialLR", {"power": "power"}),
        "cosine": ("CosineAnnealingLR", {"eta_min": "minimum"}),
        "cosine_restarts": (
            "CosineAnnealingWarmRestarts",
            {"T_mult": "factor", "eta_min": "minimum"},
        ),
        "one_cycle": (
            "OneCycleLR",
            {"pct_start": "up", "div_factor": "start_divisor", "final_div_factor": "end_divisor"},
        ),
        "warmup": ("LinearLR", {"start_factor": "start", "total_iters": "length"}),
        "plateau": (
            "ReduceLROnPlateau",
            {
                "factor": "factor",
                "patience": "patience",
                "threshold": "threshold",
                "cooldown": "cooldown",
                "min_lr": "minimum",
            },
        ),
    },
    "losses": {
        "huber": ("HuberLoss", {"delta": "delta"}),
        "cosine_embedding": ("CosineEmbeddingLoss", {"margin": "margin"}),
        "softmax_cross_entropy": (
            "CrossEntropyLoss",
            {
                "weight": "class_weight",
                "ignore_index": "ignore_index",
                "label_smoothing": "label_smoothing",
            },
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
    torch = pytest.importorskip("torch")
    home = {
        "optimizers": torch.optim,
        "schedules": torch.optim.lr_scheduler,
        "losses": torch.nn,
    }[kind]
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
    torch = pytest.importorskip("torch")
    averages = inspect.signature(torch.optim.swa_utils.get_ema_multi_avg_fn).parameters
    assert plugins()["averages"].load("ema")().decay == averages["decay"].default
    clip = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters
    assert clip["norm_type"].default == 2.0
    for name in ("momentum", "nesterov"):  # SGD with a momentum, whose rate is SGD's
        rate = inspect.signature(torch.optim.SGD).parameters["lr"].default
        assert plugins()["optimizers"].load(name).default_rate == rate

"""What a drawn recipe has to give: the same training a second time, with torch, in any float type.

Independent on purpose: the networks, losses, penalties, transforms, schedules and averages are written here
for torch, and the optimizers are those of torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.end_to_end.recipe_cases import EPSILON, MOMENTUM, OPTIMIZERS, Array, Recipe

F = torch.nn.functional
Tensors = dict[str, Any]


def train(recipe: Recipe, dtype: Any = torch.float64) -> dict[str, Array]:
    """The trained weights (their averages, if there are any) and statistics after the training."""
    values = {**recipe.network.weights, **recipe.network.constants, **recipe.adapters}
    w = {n: torch.tensor(np.asarray(a), dtype=dtype) for n, a in values.items()}
    trained = {n: w[n].requires_grad_() for n in (*recipe.trained, *recipe.adapters)}
    settings = dict(OPTIMIZERS[recipe.optimizer])
    base = settings.pop("rate")
    groups = [
        {"params": [t for n, t in trained.items() if (n in recipe.slow) == slow], "factor": factor}
        for slow, factor in ((False, 1.0), (True, 0.25))
    ]
    optimizer = _optimizer(recipe.optimizer, [g for g in groups if g["params"]], base, settings)
    averages: Tensors = {}
    step = counted = 0
    for epoch in range(recipe.epochs):
        for batches in _steps(recipe):
            _set_gradients(recipe, w, trained, batches, dtype)
            rate = base * _factor(recipe, step, epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.step()
            step += 1
            with torch.no_grad():
                counted = _average(recipe, trained, averages, step, counted)
    out = {n: (averages or trained)[n].detach().numpy() for n in trained}
    if recipe.norm == "train":
        out |= {n: w[n].numpy() for n in recipe.network.constants if n in ("mean", "var")}
    return out


def _optimizer(name: str, groups: Any, rate: float, settings: dict[str, float]) -> Any:
    s, optim = settings, torch.optim
    betas = {"betas": (s["beta1"], s["beta2"])} if "beta1" in s else {}
    eps = {"eps": s["eps"]} if "eps" in s else {}
    made = {
        "sgd": lambda: optim.SGD(groups, rate),
        "momentum": lambda: optim.SGD(groups, rate, momentum=s["beta"]),
        "nesterov": lambda: optim.SGD(groups, rate, momentum=s["beta"], nesterov=True),
        "adam": lambda: optim.Adam(groups, rate, **betas, **eps),
        "adamw": lambda: optim.AdamW(groups, rate, **betas, **eps, weight_decay=s["weight_decay"]),
        "rmsprop": lambda: optim.RMSprop(groups, rate, alpha=s["alpha"], **eps),
        "adagrad": lambda: optim.Adagrad(groups, rate, **eps),
        "adadelta": lambda: optim.Adadelta(groups, rate, rho=s["rho"], **eps),
        "adamax": lambda: optim.Adamax(groups, rate, **betas, **eps),
        "nadam": lambda: optim.NAdam(groups, rate, **betas, **eps, momentum_decay=s["decay"]),
        "radam": lambda: optim.RAdam(groups, rate, **betas, **eps),
    }
    return made[name]()


def _steps(recipe: Recipe) -> Iterator[list[slice]]:
    """The batches of each step of an epoch; the last step and the last batch may be smaller."""
    starts = range(0, len(recipe.label), recipe.batch)
    batches = [slice(k, min(k + recipe.batch, len(recipe.label))) for k in starts]
    for k in range(0, len(batches), recipe.accumulate):
        yield batches[k : k + recipe.accumulate]


def _set_gradients(
    recipe: Recipe, w: Tensors, trained: Tensors, batches: list[slice], dtype: Any
) -> None:
    total, count = torch.zeros((), dtype=dtype), 0.0
    for rows in batches:
        data = {n: torch.tensor(a[rows]) for n, a in recipe.data.items()}
        data = {n: t.to(dtype) if t.is_floating_point() else t for n, t in data.items()}
        losses = _loss(recipe, _forward(recipe, w, data), recipe.label[rows], dtype)
        if recipe.weight is None:
            total, count = total + losses.sum(), count + losses.numel()
        else:
            weight = torch.tensor(recipe.weight[rows], dtype=dtype)
            weight = weight.reshape(-1, *[1] * (losses.ndim - 1)).expand_as(losses)
            total, count = total + (losses * weight).sum(), count + float(weight.sum())
    cost = total / count
    for tensor in trained.values():
        cost = cost + recipe.penalty.get("l1", 0.0) * tensor.abs().sum()
        cost = cost + recipe.penalty.get("l2", 0.0) * tensor.square().sum()
    for tensor in trained.values():
        tensor.grad = None
    cost.backward()
    for name, tensor in trained.items():
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        if "centralize" in recipe.transforms and tensor.ndim > 1 and name not in ("E", "P"):
            axes = [0] if tensor.ndim == 2 else list(range(1, tensor.ndim))
            tensor.grad -= tensor.grad.mean(axes, keepdim=True)
    if bound := recipe.transforms.get("clip_value"):
        torch.nn.utils.clip_grad_value_(list(trained.values()), bound)
    if bound := recipe.transforms.get("clip_norm"):
        torch.nn.utils.clip_grad_norm_(list(trained.values()), bound)


def _loss(recipe: Recipe, y: Any, label: Array, dtype: Any) -> Any:
    """The values for each element, or, of classes, for each row."""
    if recipe.loss == "cross_entropy":
        return F.cross_entropy(y, torch.tensor(label), reduction="none")
    wanted = torch.tensor(label, dtype=dtype)
    error = y - wanted
    return {
        "squared_error": lambda: error.square(),
        "absolute_error": lambda: error.abs(),
        "huber": lambda: F.huber_loss(y, wanted, reduction="none"),
        "log_cosh": lambda: torch.log(torch.cosh(error)),
        "log_loss": lambda: F.binary_cross_entropy_with_logits(y, wanted, reduction="none"),
    }[recipe.loss]()


def _factor(recipe: Recipe, step: int, epoch: int) -> float:
    s = recipe.schedule
    t = epoch if s.get("by") == "epoch" else step
    name = s.get("name")
    if name == "exponential":
        return float(s["gamma"] ** t)
    if name == "cosine":
        return (1 + math.cos(math.pi * t / s["period"])) / 2
    if name == "polynomial":
        return float((1 - min(t, s["length"]) / s["length"]) ** s["power"])
    if name == "warmup":
        return float(min(1.0, s["start"] + (1 - s["start"]) * t / s["length"]))
    return float(s["gamma"] ** (t // s["size"])) if name == "step" else 1.0


def _average(recipe: Recipe, now: Tensors, averages: Tensors, step: int, counted: int) -> int:
    """Move the averages after a step; returns how many weights are in an equal mean."""
    if not (given := recipe.averaging):
        return 0
    first = step <= given.get("start", 1.0)
    due = first or (step - given.get("start", 1.0)) % given.get("every", 1.0) == 0
    counted = 1 if first else counted + bool(due)
    share = 1.0 if first else 1 - given["decay"] if "decay" in given else due / counted
    for name, tensor in now.items():
        before = averages.get(name, tensor)
        averages[name] = before + share * (tensor.detach() - before)
    return counted


# ---------------------------------------------------------------------- networks


def _forward(recipe: Recipe, w: Tensors, data: Tensors) -> Any:
    """The output of the network; running statistics move if it is in training mode."""
    act = {"Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu}[recipe.activation]

    def times(x: Any, name: str) -> Any:
        y = x @ w[name]
        if f"{name}.lora_A" in w:
            y = y + recipe.alpha / recipe.rank * (x @ w[f"{name}.lora_A"] @ w[f"{name}.lora_B"])
        return y

    def norm(x: Any) -> Any:
        axes = [k for k in range(x.ndim) if k != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        mean, var = w["mean"], w["var"]
        if recipe.norm == "train":
            mean, var = x.mean(axes), x.var(axes, correction=0)
            for name, value in (("mean", mean), ("var", x.var(axes, correction=1))):
                w[name] = MOMENTUM * w[name] + (1 - MOMENTUM) * value.detach()
        y = (x - mean.reshape(shape)) / torch.sqrt(var.reshape(shape) + EPSILON)
        return y * w["g"].reshape(shape) + w["c"].reshape(shape)

    def attend(x: Any, causal: bool) -> Any:
        q, k, v = (times(x, n) for n in ("Wq", "Wk", "Wv"))
        return times(F.scaled_dot_product_attention(q, k, v, is_causal=causal), "Wo")

    x = data.get("X")
    if recipe.kind == "mlp":
        h = act(times(x, "W1") + w["b1"])
        return times(act(times(h, "W2") + w["b2"]), "W3") + w["b3"]
    if recipe.kind == "mlp_norm":
        return times(act(norm(times(x, "W1"))), "W2") + w["b2"]
    if recipe.kind == "conv_norm":
        h = act(norm(F.conv2d(x, w["K1"], padding=1)))
        h = act(F.conv2d(h, w["K2"], w["d"]))
        return times(h.mean((2, 3)), "W") + w["e"]
    if recipe.kind == "attention":
        return times((attend(x, causal=False) + x).mean(1), "W") + w["b"]
    if recipe.kind == "shared":
        h = act(times(x, "W1"))
        for _ in range(2):
            h = act(h @ w["W2"] + w["b2"])
        return times(h, "W3") + w["b3"]
    if recipe.kind == "two_inputs":
        h = act(times(data["A"], "W1") + times(data["B"], "W2") + w["b1"])
        return times(h, "W3") + w["b3"]
    e = F.embedding(data["I"], w["E"])
    if recipe.kind == "embedding":
        return times(act(times(e.mean(1), "W1") + w["b1"]), "W2") + w["b2"]
    e = e + w["P"]
    width = e.shape[-1:]
    r = e + attend(F.layer_norm(e, width, w["g1"], w["c1"], EPSILON), causal=True)
    h = act(times(F.layer_norm(r, width, w["g2"], w["c2"], EPSILON), "W1") + w["b1"])
    return (r + times(h, "W2") + w["b2"]).mean(1) @ w["E"].T

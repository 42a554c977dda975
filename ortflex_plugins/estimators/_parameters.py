"""Parameters of the estimators, checked when they are used, as scikit-learn does."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import (
    Arguments,
    Model,
    Parts,
    Plugins,
    Precision,
    apply_edits,
    loss_tables,
    suggest,
)
from ortflex_plugins.estimators._networks import ACTIVATIONS


def check(estimator: Any) -> None:
    """Refuse invalid values; the Trainer checks the names of components."""
    e = estimator
    wanted: dict[str, tuple[bool, str]] = {
        "max_iter": (_count(e.max_iter), "an integer >= 1"),
        "n_iter_no_change": (_count(e.n_iter_no_change), "an integer >= 1"),
        "batch_size": (e.batch_size == "auto" or _count(e.batch_size), "'auto' or >= 1"),
        "alpha": (_number(e.alpha) and e.alpha >= 0, "a number >= 0"),
        "tol": (_number(e.tol), "a number"),
        "validation_fraction": (
            _number(e.validation_fraction) and 0 < e.validation_fraction < 1,
            "a number > 0 and < 1",
        ),
        "precision": (
            isinstance(e.precision, str | Mapping | Precision),
            "'auto', 'float32', 'float64' or a precision of the Trainer",
        ),
        "activation": (e.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
        "hidden_layer_sizes": (
            all(_count(n) for n in np.atleast_1d(np.asarray(e.hidden_layer_sizes))),
            "integers >= 1",
        ),
        "options": (
            e.options is None or isinstance(e.options, Mapping),
            "a mapping of arguments of the Trainer",
        ),
    }
    for name in ("shuffle", "early_stopping", "warm_start"):
        wanted[name] = (isinstance(getattr(e, name), bool | np.bool_), "True or False")
    for name, (good, text) in wanted.items():
        if not good:
            raise ValueError(f"{_class(e)}.{name}: expected {text}, got {getattr(e, name)!r}")


def trainers(estimator: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as arguments of the Trainer, in addition to ``own``."""
    options = dict(estimator.options or {})
    known = {"plugins", *(f.name for f in attrs.fields(Arguments))} - {"epochs", *own}
    for name in options:
        if name in own or name == "epochs":
            raise ValueError(
                f"{_class(estimator)}.options: {name!r} is set by the estimator's own parameters"
            )
        if name not in known:
            raise ValueError(
                f"{_class(estimator)}.options: unknown argument {name!r}; {suggest(name, known)}"
            )
    return {name: value for name, value in options.items() if name not in _EDITING}


_EDITING = ("edits", "head")
"""Options that change the model; they are applied before training, once."""


def edited(estimator: Any, model: ModelProto, random: np.random.RandomState) -> ModelProto:
    """The model of an estimator after the options ``edits`` and ``head``, with first values of its seed."""
    options = dict(estimator.options or {})
    if not any(options.get(name) for name in _EDITING):
        return model
    arguments = Arguments(loss="squared_error", **{n: options[n] for n in _EDITING if n in options})
    plugins = Plugins.given(options.get("plugins"))
    parts = Parts(plugins)
    found = {f"edits[{k}]": e for k, e in enumerate(parts.build("edits", arguments.edits))}
    found |= {} if arguments.head is None else {"head": parts.build("head", arguments.head)}
    seed = int(random.randint(2**31 - 1))
    source = Model(model, plugins=plugins)
    return apply_edits(source, list(found.values()), seed, list(found)).export({})


def asked_loss(loss: Any) -> tuple[str | None, dict[str, Any]]:
    """The tensor that ``loss=`` names, if any, and the loss as a table."""
    if loss is None:
        return None, {}
    tables = loss_tables(loss)
    if len(tables) != 1:
        raise ValueError(
            f"loss: an estimator has one loss, got {len(tables)}; train with ortflex_core.Trainer"
        )
    output, table = tables[0]
    return table.pop("predicted", None) or output, table


def _class(estimator: Any) -> str:
    return type(estimator).__name__


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1

"""Names of arguments in other libraries, for messages."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from ortflex_core.kernel.errors import MANY, suggest

_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        **dict.fromkeys(
            ("state_dict", "parameters", "named_parameters", "weights", "get_weights"),
            "get_state()",
        ),
        **dict.fromkeys(("load_state_dict", "set_weights"), "set_state(state)"),
        **dict.fromkeys(("train", "learn", "fine_tune", "run"), "fit(X, y)"),
        **dict.fromkeys(
            ("train_on_batch", "partial_fit", "training_step", "train_step"), "step((X, y))"
        ),
        **dict.fromkeys(("predict_proba", "transform", "forward", "infer"), "predict(X)"),
        **dict.fromkeys(("score", "test", "validate"), "evaluate(X, y)"),
        **dict.fromkeys(("save_model", "save_pretrained", "to_onnx"), "export('model.onnx')"),
        **dict.fromkeys(("save_weights", "save_checkpoint"), "save(folder)"),
        **dict.fromkeys(("load_checkpoint", "load_weights"), "restore(folder)"),
        **dict.fromkeys(("history", "log_history"), "history_"),
        **dict.fromkeys(("loss_curve_", "losses"), "train_losses_"),
        "push": "push_to_hub(repo_id)",
    },
    "History": {
        "history": "history['loss'] for a column, and history.columns for their names",
        "keys": "history.columns",
        "epoch": "history['epoch']",
        **dict.fromkeys(("to_pandas", "to_df", "to_dataframe"), "history.to_frame()"),
    },
}
"""Attributes of the classes of other libraries, and how the same is written here, by our class."""


class Word(NamedTuple):
    """What a name of another library is called here."""

    meaning: str
    hint: str = ""
    """How the same is written, if the name alone does not say it."""


@functools.cache
def names_elsewhere() -> Mapping[str, Word]:
    """The table in words.toml, by the names in lower case."""
    text = resources.files(__package__).joinpath("words.toml").read_text("utf-8")
    return {
        name: Word(row["meaning"], row.get("hint", "").replace("{name}", name))
        for row in tomllib.loads(text)["words"]
        for name in row["names"]
    }


def translate_key(name: str) -> str:
    """The key that other libraries call ``name``; other names are returned as they are.

    >>> translate_key("lr"), translate_key("epochs")
    ('learning_rate', 'epochs')
    """
    return names_elsewhere().get(name.lower(), Word(name)).meaning


def suggest_argument(
    name: str, known: Mapping[str, Any], owner: type | None = None, listing: str = ""
) -> str:
    """The end of a message about an unknown argument, by its names in other libraries, too.

    ``owner`` is the class of a method, whose constructor may have the argument, and ``listing`` the place
    where all arguments are listed.

    >>> suggest_argument("epochs", {"alpha": 0, "max_iter": 0})
    "did you mean 'max_iter'? Known: alpha, max_iter"
    """
    meant, hint = names_elsewhere().get(name.lower(), Word(name))
    if owner is not None:
        for own in (name, meant):
            if own in inspect.signature(owner).parameters:
                more = f"; {hint}" if hint and own == meant != name else ""
                return f"it is an argument of {owner.__name__}: {owner.__name__}(…, {own}=…){more}"
    if list(known) == ["batch"]:
        return "it is a part of the batch, which is one argument: (X, y) or (X, y, sample_weight)"
    alike = {name.lower(): key for key in known if translate_key(key) == meant}
    if hint and (meant in known or not alike):
        return f"did you mean {meant!r}? {hint}" if meant in known else f"here, {hint}"
    text = suggest(name, known, alike, listing)
    if text.startswith("Known:") and len(known) > MANY:
        return f"help() lists all {len(known)} arguments"
    return text


def no_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that an object lacks; those of other libraries have their name here.

    >>> class Trainer: pass
    >>> print(no_attribute(Trainer(), "state_dict"))
    'Trainer' object has no attribute 'state_dict'; here it is get_state()
    """
    kind = type(owner).__name__
    here = _ATTRIBUTES.get(kind, {}).get(name)
    hint = "" if here is None else f"; here it is {here}"
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=owner)

"""The core knows no plugin by its name: a default is data in the list of arguments, all else is asked."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import KINDS, Arguments, ConfigError, PluginError, Plugins, Unsupported
from ortflex_core.compiler.problem.losses import penalty_terms, read_penalties
from ortflex_core.training.config.arguments import ASSUMED_LOSS, PLAIN_DESCENT, short_forms
from tests.training import plugins

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
POINTS = PROJECT["project"]["entry-points"]
DATA = "training/config/arguments.py"
"""The one module in which a name may stand: the defaults of the arguments."""

# Words that are also something else in the core: what the literal is there.
OTHERWISE = {
    "constant": "a kind of node or tensor",
    "losses": "a kind of plugin",
    "momentum": "an attribute of BatchNormalization",
    "none": "nothing, in a message",
    "reduction": "an argument",
    "shape": "an attribute of tensors",
    "step": "the counter of steps",
}
# What stands elsewhere, and looks no plugin up.
ALLOWED = {
    ("kernel/tracebacks.py", "torch"),  # the package, whose frames are left out
    ("compiler/problem/labels.py", "softmax_cross_entropy"),  # advice to the user
    ("training/engines/failures.py", "causal_lm"),  # the same
    ("training/config/functions.py", "torch"),  # the package, whose components are refused
    ("training/config/functions.py", "entropy"),  # a word in the names of losses of other packages
    ("training/receipt.py", "cpu"),  # a key of receipts: the processor
    ("training/fit.py", "sparsity"),  # a column of the History, for every pruning
    ("compiler/runtime/installation.py", "training_session"),  # a module of onnxruntime
}


def names() -> set[str]:
    return {name for group in POINTS.values() for name in group}


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, docstrings left out."""
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) not in documentation:
            yield node.value


def named(source: str) -> set[str]:
    """The plugins that a module names: texts that are a name, and names in texts that are no other word."""
    found = set()
    distinct = {n for n in names() if "_" in n}
    for text in literals(ast.parse(source)):
        found |= {text} & names() - set(OTHERWISE)
        found |= set(re.findall(r"\w+", text)) & distinct
    return found


SIGNATURE = "training/trainer.py"
"""It repeats the defaults of the list, which test_arguments.py compares."""
MODULES = {
    path.relative_to(ROOT / "ortflex_core").as_posix(): path
    for path in sorted((ROOT / "ortflex_core").rglob("*.py"))
    if "testing" not in path.parts
}


def test_no_module_names_a_plugin() -> None:
    others = {place: path for place, path in MODULES.items() if place not in (DATA, SIGNATURE)}
    assert {(p, name) for p, path in others.items() for name in named(path.read_text())} == ALLOWED


def test_the_list_names_its_defaults_alone() -> None:
    """A default of the Trainer, what is assumed without one, or an argument that is short for a plugin."""
    fields = Arguments.__attrs_attrs__
    defaults = {field.default for field in fields if isinstance(field.default, str)}
    short = {plugin for kind in KINDS for plugin in short_forms(kind).values()}
    short |= {field.metadata["plugin"] for field in fields}
    for place, more in ((DATA, {ASSUMED_LOSS, PLAIN_DESCENT, *short}), (SIGNATURE, set[str]())):
        assert named(MODULES[place].read_text("utf-8")) <= defaults | more, place


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = get("optimizers", "sgd")', {"sgd"}),
        ('"""sgd"""', set()),
        ('def f():\n    "takes sgd"\n    return {"name": "elastic"}', {"elastic"}),
        ('raise E(f"{x}: use squared_error")', {"squared_error"}),
        ('x = "step"', set()),
    ],
)
def test_what_counts_as_a_name(source: str, found: set[str]) -> None:
    assert named(source) == found


def test_words_with_another_meaning_are_names_of_plugins() -> None:
    assert set(OTHERWISE) <= names()


# ---------------------------------------------------------------------- what is asked instead


def test_a_table_without_a_name_means_the_penalty_that_says_so(monkeypatch: Any) -> None:
    """Where no penalty says so, the name is missing."""
    (term,) = penalty_terms(read_penalties({"coef": {"l2": 0.5}}, plugins()), ["coef"])
    assert term.penalty.describe() == {"name": "elastic", "l1": 0.0, "l2": 0.5}
    said = [n for n, cls in plugins()["penalties"].classes() if cls.unnamed is not None]
    assert said == ["elastic"]
    monkeypatch.setattr(type(term.penalty), "unnamed", None)
    with pytest.raises(ConfigError, match=r"penalty\.coef: the key 'name' is missing"):
        read_penalties({"coef": {"l2": 0.5}}, plugins())


def test_comparisons_see_gradients_in_the_steps_of_plain_descent() -> None:
    """w − rate · gradient, without state: what a comparison's probe takes it for."""
    made = plugins().component("optimizers", PLAIN_DESCENT)
    assert made.slots == ()
    assert made.elementwise
    assert made.update(None, 3.0, 2.0, 0.5, {}, 1) == (2.0, {})


def test_without_any_backend_the_error_names_disabled_ones(monkeypatch: Any) -> None:
    from ortflex_core.training.engines import backend_choice

    owners = {entry.owner for entry in Plugins.discover()["backends"]}
    monkeypatch.setenv("ORTFLEX_DISABLE_PLUGINS", ",".join(owners))
    off = Plugins.discover()
    assert not off["backends"].names()
    with pytest.raises(PluginError, match="ORTFLEX_DISABLE_PLUGINS switches off"):
        backend_choice.load_candidates(off, "auto")
    with pytest.raises(Unsupported, match="no backend is installed"):
        backend_choice.load_candidates(Plugins([]), "auto")

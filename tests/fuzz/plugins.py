"""Broken plugins: every kind, broken in every way that code can be.

A training that does not ask for one ends in the same bits; one that asks gets an OrtflexError with the
name of the distribution (tests/core/test_broken_plugins.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import KINDS, OrtflexError, Plugins, Trainer
from tests import models
from tests.fuzz.numbers import ARGUMENTS, LISTED
from tests.installing import module_of

HEAD = """
import sys
import attrs
import numpy as np
from ortflex_core import (
    Adapter, Average, Backend, Constraint, DataSource, Decompositions, Device, Edit, Loss, Metric,
    Optimizer, Penalty, ProcessGroup, Quantizer, Rules, Schedule, Transform, hook,
)

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

class Own(BaseException):
    pass

def whole(cls):
    missing = cls.__abstractmethods__
    for name in missing:
        setattr(cls, name, lambda self, *args: None)
    cls.__abstractmethods__ = frozenset()
    return attrs.frozen(kw_only=True)(cls)
"""

CLASSES = {
    "losses": (
        "class Plugin(Loss):\n    def per_sample(self, op, predicted, expected):\n        {body}"
    ),
    "edits": "class Plugin(Edit):\n    def apply(self, editor):\n        {body}",
    "quantizers": (
        "class Plugin(Quantizer):\n    def limits(self, values, codes, *, symmetric):\n        {body}"
    ),
    "penalties": "class Plugin(Penalty):\n    def per_element(self, op, weight):\n        {body}",
    "schedules": "class Plugin(Schedule):\n    def rate(self, base, progress):\n        {body}",
    "optimizers": (
        "class Plugin(Optimizer):\n"
        "    def update(self, op, weight, gradient, rate, step, slots):\n        {body}"
    ),
    "adapters": (
        "class Plugin(Adapter):\n"
        "    def initial(self, product, generator):\n"
        "        return {{'change': generator.normal(size=(product.inputs, product.outputs))}}\n"
        "    def merge(self, matrix, tensors, product):\n        return matrix\n"
        "    def apply(self, op, x, y, tensors, product):\n        {body}"
    ),
    "transforms": (
        "class Plugin(Transform):\n    def apply(self, op, gradients, context):\n        {body}"
    ),
    "constraints": "class Plugin(Constraint):\n    def apply(self, op, weight):\n        {body}",
    "averages": (
        "class Plugin(Average):\n    def update(self, op, average, weight, step):\n        {body}"
    ),
    "devices": (
        "class Plugin(Device):\n    @classmethod\n    def available(cls, runtime):\n        {body}"
    ),
    "backends": (
        "class Plugin(Backend):\n    priority = 1000\n    @classmethod\n"
        "    def available(cls, runtime):\n        return []\n"
        "    def supports(self, problem, device, runtime):\n        {body}"
    ),
    "process_groups": (
        "class Plugin(ProcessGroup):\n    @classmethod\n    def unavailable(cls, environ):\n"
        "        return []\n    def join(self):\n        {body}"
    ),
    "precisions": (
        "class Plugin(Precision):\n    dtype = 10\n    def place(self, op_type):\n        {body}"
    ),
    "data": "class Plugin(DataSource):\n    def load(self):\n        {body}",
    "metrics": (
        "class Plugin(Metric):\n    better = 'lower'\n    def start(self):\n        return self\n"
        "    def update(self, expected, predicted, weight):\n        pass\n"
        "    def result(self):\n        {body}"
    ),
}
"""The method of each kind that the core calls, with a hole in it."""

AT_IMPORT = {
    "raises": "raise RuntimeError('no such card')",
    "ends the process": "import sys; sys.exit()",
    "exits with a code": "raise SystemExit(9)",
    "raises what is no Exception": "class Own(BaseException): pass\nraise Own('mine')",
    "closes a generator": "raise GeneratorExit",
    "raises an error without a text": f"{HEAD}\nraise Unprintable",
    "is no Python": "def (:",
    "imports what is not there": "import no_such_library_at_all",
    "recurses": "def f(): f()\nf()",
    "has no such attribute": "Plug = 1",
    "is None": "Plugin = None",
    "is a number": "Plugin = 3",
    "is a function": "def Plugin(): ...",
    "is a class of nothing": "class Plugin: ...",
    "is an object": "class Other: ...\nPlugin = Other()",
    "has an object without a text": (
        "class Other:\n    def __repr__(self): raise ValueError\nPlugin = Other()"
    ),
}
"""Modules."""

BODIES = {
    "raises": "raise ZeroDivisionError('planted')",
    "exits": "sys.exit(9)",
    "raises an error without a text": "raise Unprintable",
    "raises what is no Exception": "raise Own",
    "gives None": "return None",
    "gives an array": "return np.ones(3, np.float32)",
    "gives a text": "return 'planted'",
    "gives an object": "return object()",
}
"""What the method of a class does."""

FINE = {
    ("penalties", "gives None when it is called"),  # it costs nothing
    ("edits", "gives None when it is called"),  # it changes nothing
}
"""What is allowed."""

SHAPES = {
    "losses": "return op.ReduceMean(predicted - expected, keepdims=0)",
    "edits": "return editor",
    "quantizers": "return values, values",
    "penalties": "return op.ReduceSum(weight, keepdims=0)",
    "optimizers": "return op.Reshape(weight, [-1]), {{}}",
    "adapters": "return op.ReduceSum(y, keepdims=0)",
    "transforms": ("return {{n: op.ReduceSum(g, keepdims=0) for n, g in gradients.items()}}"),
    "constraints": "return op.Reshape(weight, [1, -1, 1])",
    "averages": "return op.ReduceSum(weight, keepdims=0)",
    "schedules": "return -1.0",
    "metrics": "return [1.0, 2.0]",
    "devices": "return [1, 2]",
    "backends": "return True",
    "data": "return [object()]",
    "process_groups": "return 3",
    "precisions": "return 'half'",
}
"""Results of the right type that are wrong otherwise."""

RULES = {
    "has a table of something else": "Plugin = Rules(table={('', 'Tanh'): [3]})",
    "has no table": "Plugin = Rules(table=None)",
    "has kernels that are not there": "Plugin = Rules(); Plugin.kernels('/no/such/library.so')",
    "fails at its kernels": "Plugin = Rules(); Plugin.kernels(lambda: 1 // 0)",
    "has a rule twice": "Plugin = Rules()\n"
    "for k in (1, 2): Plugin.rule('Tanh')(lambda op, node, g: [g])",
    "has a rule that raises": (
        "Plugin = Rules()\n@Plugin.rule('Tanh')\ndef rule(op, node, g): 1 // 0"
    ),
    "has a rule that gives None": (
        "Plugin = Rules()\n@Plugin.rule('Tanh')\ndef rule(op, node, g): return None"
    ),
    "has a rule without a text": (
        "Plugin = Rules()\n@Plugin.rule('Tanh')\ndef rule(op, node, g): raise Unprintable"
    ),
}

_ODD = "Plugin = Decompositions()\n@Plugin.operator('Odd', domain='nowhere')\ndef odd(op, node):"
DECOMPOSITIONS = {
    "has a table of something else": "Plugin = Decompositions(table={('', 'Tanh'): 3})",
    "has no table": "Plugin = Decompositions(table=None)",
    "has an operator twice": "Plugin = Decompositions()\n"
    "for k in (1, 2): Plugin.operator('Odd')(lambda op, node: [])",
    "has a formula that raises": f"{_ODD} 1 // 0",
    "has a formula that exits": f"{_ODD} sys.exit()",
    "has a formula that gives None": f"{_ODD} return None",
    "has a formula that gives a number": f"{_ODD} return [3]",
    "has a formula without a text": f"{_ODD} raise Unprintable",
}

HOOKS = {
    "is a class": "class Plugin:\n    @hook\n    def epoch_end(self): ...",
    "has a misspelt hook": "class A:\n    @hook\n    def epoch_ends(self): ...\nPlugin = A()",
    "has a misspelt argument": "class A:\n    @hook\n    def epoch_end(self, recrod): ...\nPlugin = A()",
    "has no hooks": "class A: ...\nPlugin = A()",
    "equals everything": (
        "class A:\n    def __eq__(self, other): return True\n    @hook\n"
        "    def epoch_end(self): ...\nPlugin = A()"
    ),
    "cannot be compared": (
        "class A:\n    def __eq__(self, other): raise ValueError\n    @hook\n"
        "    def epoch_end(self): ...\nPlugin = A()"
    ),
    "fails to be looked at": (
        "class A:\n    def __dir__(self): raise RuntimeError('no')\nPlugin = A()"
    ),
}

CONSTRUCTORS = {
    "fails when it is made": "def __attrs_post_init__(self): raise ZeroDivisionError('planted')",
    "exits when it is made": "def __attrs_post_init__(self): sys.exit()",
    "has another constructor": "def __init__(self, much): ...",
}


@attrs.frozen(kw_only=True)
class Broken:
    """A broken plugin: its kind, how it is broken, its module and what the entry point names."""

    kind: str
    how: str
    code: str


def every() -> Iterator[Broken]:
    for kind in (*KINDS, "ortflex"):
        for how, code in AT_IMPORT.items():
            if kind == "callbacks" and how == "is a class of nothing":
                code = "Plugin = type('Plugin', (), {})"
            yield Broken(kind=kind, how=how, code=code)
    for kind, text in CLASSES.items():
        for how, body in {**BODIES, "gives something else": SHAPES[kind]}.items():
            how = f"{how} when it is called"
            if (kind, how) not in FINE:
                code = f"{HEAD}\n@whole\n{text.format(body=body.replace('{{}}', '{}'))}\n"
                yield Broken(kind=kind, how=how, code=code)
        for how, line in CONSTRUCTORS.items():
            code = f"{HEAD}\n@whole\n{text.format(body='return []')}\n    {line}\n"
            if how == "has another constructor":
                code = code.replace("@whole", "")
            yield Broken(kind=kind, how=how, code=code)
        if kind == "precisions":
            continue  # its base class is complete: float32
        yield Broken(
            kind=kind,
            how="is abstract",
            code=f"{HEAD}\nclass Plugin({text.split('(')[1].split(')')[0]}): pass",
        )
    for how in ("raises", "exits", "raises an error without a text", "gives None"):
        for method in ("build", "available"):
            text = CLASSES["backends"].replace("{body}", "return []")
            if method == "build":
                text += f"\n    def build(self, problem, device, runtime):\n        {BODIES[how]}"
            else:
                text = text.replace("return []", BODIES[how], 1)
            yield Broken(
                kind="backends", how=f"{how} in {method}", code=f"{HEAD}\n@whole\n{text}\n"
            )
    for how, code in RULES.items():
        yield Broken(kind="gradients", how=how, code=f"{HEAD}\n{code}\n")
    for how, code in DECOMPOSITIONS.items():
        yield Broken(kind="decompositions", how=how, code=f"{HEAD}\n{code}\n")
    for how, code in HOOKS.items():
        yield Broken(kind="ortflex", how=how, code=f"{HEAD}\n{code}\n")


# ---------------------------------------------------------------------- trainings


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return (
        rng.standard_normal((8, 5)).astype(np.float32),
        rng.standard_normal((8, 1)).astype(np.float32),
    )


def trained(plugins: Plugins, model: Any = None, **options: Any) -> tuple[bytes, ...]:
    """The bits of the weights after two epochs."""
    x, y = data()
    given = {"loss": "squared_error", "epochs": 2, "progress": False, "batch_size": 4} | options
    source = given.pop("data", None)
    trainer = Trainer(model or models.linear(), plugins=plugins, **given)
    if source is not None:
        trainer.fit(plugins.component("data", source))
    else:
        trainer.fit(x, y, validation_data=(x, y))
    return tuple(a.tobytes() for a in trainer.get_state().values())


def odd() -> Any:
    """A model with an operator that only a broken decomposition has."""
    model = models.mlp((5, 3, 1))
    (tanh,) = [node for node in model.graph.node if node.op_type == "Tanh"]
    tanh.op_type, tanh.domain = "Odd", "nowhere"
    model.opset_import.append(models.helper.make_opsetid("nowhere", 1))
    return model


_SPECIAL: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "quantizers": lambda name: {"quantize": {"name": name, "activations": "none"}},
    "gradients": lambda name: {
        "gradients": [name],
        "model": models.mlp((5, 3, 1)),
        "backend": "fused",
    },
    "decompositions": lambda name: {"model": odd()},  # it is used without being asked for
}
_MORE = {"edits": "edits", "backends": "backend", "process_groups": "distributed", "data": "data"}


def _asks(kind: str, name: Any) -> dict[str, Any]:
    """The arguments of a Trainer that ask for a plugin."""
    if kind in _SPECIAL:
        return _SPECIAL[kind](name)
    argument = (ARGUMENTS | _MORE)[kind]
    return {argument: [name] if kind in (*LISTED, "edits") else name}


def asking(broken: Broken, name: Any, plugins: Plugins) -> str | None:
    """The text of the OrtflexError that a training with the plugin ends in; None if it trains."""
    if broken.kind == "ortflex":  # which no recipe asks for
        from ortflex_core import HookManager

        (entry,) = [e for e in plugins["ortflex"] if e.name == name]
        try:
            HookManager.check(entry)
        except OrtflexError as error:
            return str(error)
        return None
    if broken.kind == "decompositions" and isinstance(name, str):  # one alone
        others = (e for r in plugins for e in r if e.kind != broken.kind)
        bare = name.rpartition("/")[2]
        plugins = Plugins([*others, *(e for e in plugins[broken.kind] if e.name == bare)])
    try:
        trained(plugins, **_asks(broken.kind, name))
    except OrtflexError as error:
        return str(error)
    return None


@contextlib.contextmanager
def on_path(folders: Mapping[str, Path]) -> Iterator[Plugins]:
    """With some distributions on sys.path."""
    sys.path[:0] = [str(folder) for folder in folders.values()]
    importlib.invalidate_caches()
    try:
        yield Plugins.discover()
    finally:
        for name, folder in folders.items():
            sys.path.remove(str(folder))
            sys.modules.pop(module_of(name), None)

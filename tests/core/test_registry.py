"""Plugins: found without imports, isolated when broken, refused when ambiguous."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from onnx import TensorProto

from ortflex_core import (
    KINDS,
    ConfigError,
    GraphError,
    Loss,
    NoGradientRule,
    PluginError,
    Plugins,
    Trace,
    gradients,
    load_rules,
    suggest,
)
from tests import children, models
from tests.installing import GOOD, Install
from tests.installing import install as install
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python


def test_listing_names_imports_no_plugin() -> None:
    code = (
        "import sys\n"
        "from ortflex_core import Plugins\n"
        "plugins = Plugins.discover()\n"
        "assert 'elastic' in plugins['losses'] and 'example_cauchy' in plugins['losses']\n"
        "for registry in plugins:\n"
        "    for entry in registry: str(entry)\n"
        "bad = [m for m in sys.modules if m.startswith(('ortflex_plugins', 'ortflex_example'))]\n"
        "bad += [m for m in ('onnxruntime', 'onnx', 'torch', 'sklearn') if m in sys.modules]\n"
        "print(bad)\n"
    )
    out = children.run([sys.executable, "-c", code])
    assert (out.stdout.strip(), out.returncode) == ("[]", 0), out.stderr


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_everything_installed_loads_and_is_what_its_kind_asks_for(kind: str) -> None:
    registry = plugins()[kind]
    assert registry.names() == sorted(registry.names())
    for name in registry.names():
        loaded = registry.load(name)
        if isinstance(loaded, type) and attrs.has(loaded) and hasattr(loaded, "name"):
            assert loaded.name == name


def test_plugins_of_other_distributions_are_found_like_built_in_ones(install: Install) -> None:
    install("cube", GOOD, {"ortflex.losses": {"cubed": "cube_module:Cubed"}})
    found = Plugins.discover()
    entry = found["losses"].entry("cubed")
    assert (entry.distribution, entry.version) == ("cube", "1.0")
    trainer = make(models.linear(), loss="cubed", plugins=found, epochs=3)
    history = trainer.fit(*regression())
    assert history.losses[-1] < history.losses[0]


def test_a_broken_plugin_is_an_error_only_if_it_is_requested(install: Install) -> None:
    groups = {"ortflex.losses": "wreck_module:Loss", "ortflex.backends": "wreck_module:Backend"}
    groups |= {"ortflex": "wreck_module"}
    entries = {group: {"wrecked": place} for group, place in groups.items()}
    install("wreck", "raise RuntimeError('no such card')", entries)
    found = Plugins.discover()
    assert "wrecked" in found["losses"]
    text = (
        r"the loss 'wrecked' \(wreck_module:Loss, from wreck 1.0\) cannot be imported: RuntimeError: "
        r"no such card\. Repair or uninstall wreck, or set ORTFLEX_DISABLE_PLUGINS=wreck"
    )
    with pytest.raises(PluginError, match=text):
        make(models.linear(), loss="wrecked", plugins=found)
    # Its hook and its backend are left out of "auto", with a warning, and the others train.
    trainer = make(models.linear(), plugins=found, backend="auto", epochs=1)
    assert len(trainer.fit(*regression())) == 1


def test_a_name_of_two_distributions_is_refused_with_both_owners(install: Install) -> None:
    for owner in ("first", "second"):
        install(owner, GOOD, {"ortflex.losses": {"cubed": f"{owner}_module:Cubed"}})
    found = Plugins.discover()
    with pytest.raises(PluginError, match=r"two plugins of .* losses .*'cubed'") as caught:
        found.component("losses", "cubed")
    for part in ("first (first_module:Cubed)", "second (second_module:Cubed)", "DISABLE_PLUGINS="):
        assert part in str(caught.value)
    # The others are as good as before, and switching one off leaves the other.
    assert found.component("losses", "huber").name == "huber"
    assert Plugins.discover(["first"]).component("losses", "cubed").name == "cubed"


def test_one_distribution_seen_twice_is_one(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cube", GOOD, {"ortflex.losses": {"cubed": "cube_module:Cubed"}})
    shutil.copytree(tmp_path / "cube", tmp_path / "copy")
    monkeypatch.syspath_prepend(tmp_path / "copy")
    assert Plugins.discover().component("losses", "cubed").name == "cubed"


@pytest.mark.parametrize("written", ["cube", "other, Cube ", "CUBE,"])
def test_distributions_can_be_switched_off(
    install: Install, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    install("cube", GOOD, {"ortflex.losses": {"cubed": "cube_module:Cubed"}})
    assert "cubed" in Plugins.discover()["losses"]
    monkeypatch.setenv("ORTFLEX_DISABLE_PLUGINS", written)
    assert "cubed" not in Plugins.discover()["losses"]
    assert "huber" in Plugins.discover()["losses"]


OF_WRONG_TYPE = r"the loss 'odd' of wrong 1.0 is .*expected a subclass.*Loss"


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("class Odd: ...", "losses", OF_WRONG_TYPE),
        ("Odd = 3", "losses", OF_WRONG_TYPE),
        ("def Odd(): ...", "losses", OF_WRONG_TYPE),
        ("from ortflex_core import Penalty as Odd", "losses", OF_WRONG_TYPE),
        ("Even = 3", "losses", "AttributeError: .*Odd"),
        ("Odd = {}", "gradients", r"the gradient family 'odd' of wrong .*Rules"),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(
    install: Install, code: str, kind: str, text: str
) -> None:
    install("wrong", code, {f"ortflex.{kind}": {"odd": "wrong_module:Odd"}})
    with pytest.raises(PluginError, match=text):
        Plugins.discover()[kind].load("odd")


def test_a_broken_family_is_an_error_only_for_models_with_its_operators(install: Install) -> None:
    install("wreck", "raise RuntimeError('no')", {"ortflex.gradients": {"odd": "wreck_module:R"}})
    found = Plugins.discover()
    make(models.linear(), plugins=found, epochs=1).fit(*regression())
    with pytest.raises(PluginError, match=r"the gradient family 'odd' .* cannot be imported"):
        make(models.linear(), plugins=found, gradients=["odd"])
    rules, trace = load_rules(found), Trace({"": 17, "mine": 1})
    x = trace.input("x", TensorProto.FLOAT, (3,))
    (y,) = trace.node("Cube", [x], {}, domain="mine", types=[(x.dtype, x.shape)])
    with pytest.raises(NoGradientRule, match=r"Cube.*not loaded may have it.*'odd' .*no\. Repair"):
        gradients([(y, y)], [x], rules)


def test_our_rule_is_used_unless_another_family_is_named(install: Install) -> None:
    code = (
        "from ortflex_core.compiler.operators.reverse_mode import Rules\n"
        "RULES = Rules()\n"
        "@RULES.rule('MatMul')\n"
        "def matmul(op, node, g): raise ZeroDivisionError('ours')\n"
    )
    install("mine", code, {"ortflex.gradients": {"mine": "mine_module:RULES"}})
    found = Plugins.discover()
    make(models.linear(), plugins=found, epochs=1).fit(*regression())
    with pytest.raises(GraphError, match=r"MatMul of the family 'mine' .*ZeroDivisionError: ours"):
        make(models.linear(), plugins=found, gradients=["mine"]).fit(*regression())
    make(models.linear(), plugins=found, gradients=["matmul"], epochs=1).fit(*regression())
    with pytest.raises(PluginError, match=r"unknown gradient family 'mime'; did you mean 'mine'"):
        make(models.linear(), plugins=found, gradients=["mime"])


def test_families_of_others_with_one_operator_are_an_error_unless_ordered(install: Install) -> None:
    code = (
        "from ortflex_core import Rules\n"
        "RULES = Rules()\n"
        "@RULES.rule('Cube', domain='cubes')\n"
        "def cube(op, node, g): return [3 * node.inputs[0] * node.inputs[0] * g]\n"
    )
    for name in ("one", "two"):
        install(name, code, {"ortflex.gradients": {name: f"{name}_module:RULES"}})
    found = Plugins.discover()
    text = r"two gradient rules for Cube.*'one' \(from one 1\.0\) and 'two' \(from two 1\.0\)"
    with pytest.raises(PluginError, match=text):
        load_rules(found).lookup("cubes", "Cube", 1)
    assert load_rules(found).lookup("cubes", "Other", 1) == (False, None)
    for name in ("one", "two"):
        assert load_rules(found, [name]).family("cubes", "Cube") == name
        assert load_rules(found.preferring([name])).family("cubes", "Cube") == name


def test_unknown_names_are_answered_with_the_nearest() -> None:
    """The case of letters is the smallest mistake."""
    for given, meant in (("AdamW", "adamw"), ("RMSProp", "rmsprop")):
        near = suggest(given, ["adam", "adamw", "radam", "rmsprop"])
        assert near.startswith(f"did you mean '{meant}'?")
    with pytest.raises(PluginError, match="unknown optimizer 'adm'; did you mean 'adam'"):
        plugins().component("optimizers", "adm")
    with pytest.raises(PluginError, match="unknown kind of plugin 'loses'; did you mean 'losses'"):
        plugins()["loses"]


def test_name_mapping_and_object_are_the_same_component() -> None:
    by_mapping = plugins().component("losses", {"name": "elastic", "l1_weight": 0.1})
    assert plugins().component("losses", by_mapping) is by_mapping
    assert by_mapping == type(by_mapping)(l1_weight=0.1)
    assert plugins().component("losses", "elastic") == type(by_mapping)()
    assert plugins().component("losses", by_mapping.describe()) == by_mapping


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (3, "loss: expected a name, a mapping with the key 'name', or an object, got 3"),
        ({"l1_weight": 0.1}, "loss: the key 'name' is missing"),
        ({"name": "elastic", "l1_wait": 1}, "loss.l1_wait: unknown parameter; did you mean 'l1_w"),
        ({"name": "elastic", "l1_weight": "1"}, "loss.l1_weight: expected a number, got '1'"),
        ({"name": "elastic", "l1_weight": True}, "loss.l1_weight: expected a number, got True"),
        ({"name": "elastic", "l1_weight": -1}, "l1_weight:? must be a number >= 0, got -1"),
    ],
)
def test_parameters_are_checked_strictly(spec: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plugins().component("losses", spec)


def test_one_error_lists_all_problems_of_a_component() -> None:
    spec = {"name": "adam", "bta1": 0.9, "beta2": "0.9", "epz": 1}
    with pytest.raises(ConfigError) as caught:
        plugins().component("optimizers", spec)
    keys = {problem.partition(":")[0] for problem in caught.value.problems}
    assert keys == {"optimizer.bta1", "optimizer.beta2", "optimizer.epz"}


def test_a_class_instead_of_an_object_has_its_own_hint() -> None:
    cls = plugins()["losses"].load("huber")
    assert issubclass(cls, Loss)
    with pytest.raises(ConfigError, match=r"expected an instance: Huber\(\)"):
        plugins().component("losses", cls)

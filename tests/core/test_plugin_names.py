"""Names that two distributions have: refused where they are asked for bare, and only there.

The class: whatever takes a name takes a qualified one, whatever writes a name writes one that means the
same class when it is read again, and a preference decides all names alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortflex_core import (
    ConfigError,
    OrtflexError,
    PluginError,
    Plugins,
    Recipe,
    Trainer,
    internals_of,
)
from tests import models
from tests.installing import Install
from tests.installing import install as install
from tests.plugins.commands import prepare, refused, works
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python

RIVAL = '''
import attrs
from ortflex_core import (
    Adapter, Average, Backend, Constraint, DataSource, Decompositions, Device, Loss, Metric, Optimizer,
    Penalty, Precision, ProcessGroup, Rules, Schedule, Transform, hyper,
)

@attrs.frozen(kw_only=True)
class Adam(Optimizer):
    """Plain steps of the sign of the gradient: nothing like ours."""
    name = "adam"
    beta1: float = hyper(default=0.5)
    slots = ("last",)
    def update(self, op, weight, gradient, rate, step, slots):
        last = self.beta1 * slots["last"] + gradient
        return weight - rate * op.Sign(last), {"last": last}

@attrs.frozen(kw_only=True)
class Squared(Loss):
    name = "squared_error"
    def per_sample(self, op, predicted, expected):
        return 3 * (predicted - expected) ** 2

@attrs.frozen(kw_only=True)
class Constant(Schedule):
    name = "constant"
    def rate(self, base, progress):
        return base / 2

@attrs.frozen(kw_only=True)
class L2(Penalty):
    name = "l2"
    def per_element(self, op, weight):
        return 7 * weight * weight

class Line:
    pass

RULES = Rules()
@RULES.rule("Tanh")
def tanh(op, node, g):
    return [5 * g * (1 - node.outputs[0] * node.outputs[0])]
'''

GROUPS = {
    "ortflex.optimizers": {"adam": "my_package_module:Adam"},
    "ortflex.losses": {"squared_error": "my_package_module:Squared"},
    "ortflex.schedules": {"constant": "my_package_module:Constant"},
    "ortflex.penalties": {"l2": "my_package_module:L2"},
}
SPEC = {"loss": "ortflex/squared_error", "schedule": "ortflex/constant", "backend": "fused"}


@pytest.fixture
def rival(install: Install) -> Plugins:
    install("my-package", RIVAL, GROUPS)
    return Plugins.discover()


def bits(trainer: Trainer) -> list[bytes]:
    return [array.tobytes() for array in trainer.get_state().values()]


def fitted(found: Plugins, **options: Any) -> Trainer:
    trainer = make(models.linear(), plugins=found, **{**SPEC, "epochs": 3, **options})
    trainer.fit(*regression())
    return trainer


def test_a_name_of_two_distributions_is_an_error_only_if_it_is_requested(rival: Plugins) -> None:
    fitted(rival, optimizer="momentum", penalty="l1")
    with pytest.raises(PluginError) as caught:
        fitted(rival, optimizer="adam")
    text = str(caught.value)
    for part in ("Use a qualified name, '", "'my-package/adam'", "'ortflex/adam'"):
        assert part in text
    assert "prefer=['my-package']; or switch my-package off: ORTFLEX_DISABLE_PLUGINS=my-" in text
    assert "DISABLE_PLUGINS=ortflex" not in text


@pytest.mark.parametrize("first", ["my-package", "zz"])
def test_the_built_in_is_never_to_be_switched_off(install: Install, first: str) -> None:
    """Wherever on sys.path it is, and however many there are."""
    module = f"{first.replace('-', '_')}_module"
    install(first, RIVAL, {"ortflex.optimizers": {"adam": f"{module}:Adam"}})
    with pytest.raises(PluginError, match=f"switch {first} off: ORTFLEX_DISABLE_PLUGINS={first}"):
        Plugins.discover().component("optimizers", "adam")


@pytest.mark.parametrize("written", ["my-package/adam", "My_Package/adam", "my.package/adam"])
def test_a_qualified_name_works_wherever_a_name_does(rival: Plugins, written: str) -> None:
    theirs = rival.component("optimizers", written)
    assert type(theirs).__module__ == "my_package_module"
    assert rival.component("optimizers", {"name": written, "beta1": 0.25}).beta1 == 0.25
    ours = rival.component("optimizers", "ortflex/adam")
    assert type(ours).__module__.startswith("ortflex_plugins")
    by_name = fitted(rival, optimizer=written)
    assert bits(by_name) == bits(fitted(rival, optimizer=theirs))
    assert bits(by_name) != bits(fitted(rival, optimizer="ortflex/adam"))
    groups = [{"params": "coef", "optimizer": written}]
    assert bits(fitted(rival, groups=groups)) != bits(fitted(rival))


def test_an_unknown_qualified_name_is_answered_with_the_nearest(rival: Plugins) -> None:
    with pytest.raises(PluginError, match="did you mean 'my-package/adam'"):
        rival.component("optimizers", "my-packag/adam")
    with pytest.raises(PluginError, match="unknown optimizer 'my-package/sgd'"):
        rival.component("optimizers", "my-package/sgd")


def test_a_member_of_a_qualified_family() -> None:
    pytest.importorskip("sklearn")
    spelled = plugins().component("metrics", "ortflex/sklearn.r2_score")
    assert spelled == plugins().component("metrics", "sklearn.r2_score")


def test_a_preference_decides_all_bare_names(rival: Plugins) -> None:
    given = {"loss": "squared_error", "schedule": "constant", "penalty": "l2", "optimizer": "adam"}
    mine = fitted(rival, **given, prefer=["My_Package"])
    qualified = {key: f"my-package/{name}" for key, name in given.items()}
    assert bits(mine) == bits(fitted(rival, **qualified))
    ours = fitted(rival, **given, prefer="ortflex")
    assert bits(ours) != bits(mine)
    assert bits(ours) == bits(fitted(rival, **{k: f"ortflex/{n}" for k, n in given.items()}))
    # The first that has the name; what one has alone is found as ever.
    assert bits(fitted(rival, **given, prefer=["my-package", "ortflex"])) == bits(mine)
    with pytest.raises(ConfigError, match=r"prefer: no installed .* 'my-packge'.*'my-package'"):
        fitted(rival, prefer=["my-packge"])
    with pytest.raises(ConfigError, match="prefer: expected a name or a list of names"):
        fitted(rival, prefer=3)


# ---------------------------------------------------------------------- files


def interrupted(folder: Path, found: Plugins, **options: Any) -> tuple[Trainer, Path]:
    """A training of four epochs, and the checkpoint of another one after two."""
    whole = fitted(found, epochs=4, **options)
    callbacks = [{"name": "checkpoint", "folder": str(folder / "ck"), "epochs": 1}]
    fitted(found, epochs=2, callbacks=callbacks, **options)
    return whole, sorted((folder / "ck").glob("step-*"))[-1]


@pytest.mark.parametrize("prefer", [(), ("my-package",), ("ortflex",)])
@pytest.mark.parametrize("owner", ["my-package", "ortflex"])
def test_an_object_of_a_doubled_name_is_saved_and_resumed(
    rival: Plugins, tmp_path: Path, owner: str, prefer: tuple[str, ...]
) -> None:
    """To the same bits, from the callback's checkpoints, whatever is preferred."""
    cls = rival["optimizers"].load(f"{owner}/adam")
    options = {**SPEC, "optimizer": cls(beta1=0.75), "prefer": prefer}
    whole, newest = interrupted(tmp_path, rival, **options)
    again = Trainer.resume(newest, plugins=rival, epochs=4, callbacks=[])
    assert again.optimizer == cls(beta1=0.75)
    again.fit(*regression())
    assert bits(again) == bits(whole)


def test_nested_components_are_written_with_their_own_names(rival: Plugins) -> None:
    parts = [{"name": f"{owner}/constant", "by": "step"} for owner in ("my-package", "ortflex")]
    outer = rival.component("schedules", {"name": "chained", "schedules": parts})
    table = rival.described("schedules", outer)
    assert [part["name"] for part in table["schedules"]] == [part["name"] for part in parts]
    assert rival.component("schedules", table) == outer


def test_a_checkpoint_from_before_the_second_distribution(install: Install, tmp_path: Path) -> None:
    whole, newest = interrupted(tmp_path, Plugins.discover(), optimizer="adam")
    install("my-package", RIVAL, GROUPS)
    found = Plugins.discover()
    with pytest.raises(OrtflexError, match="two plugins of the kind optimizers are named 'adam'"):
        Trainer.resume(newest, plugins=found, epochs=4, callbacks=[])
    again = Trainer.resume(newest, plugins=found, epochs=4, callbacks=[], prefer=["ortflex"])
    again.fit(*regression())
    assert bits(again) == bits(whole)


def test_recipes_and_the_command_line(rival: Plugins, tmp_path: Path) -> None:
    head = (
        'model = "model.onnx"\ndata = "data.npz"\nepochs = 2\nbackend = "fused"\nprogress = false\n'
    )
    recipe = f'{head}prefer = ["my-package"]\nloss = "squared_error"\n'
    recipe += 'optimizer = {name = "ortflex/adam", beta1 = 0.75}\n'
    file = prepare(tmp_path, recipe) / "train.toml"
    loaded = Recipe.load(file, plugins=rival)
    assert loaded.prefer == ("my-package",)
    resolved = loaded.resolved(rival)
    assert resolved.optimizer["name"] == "ortflex/adam"
    assert resolved.loss["name"] == "my-package/squared_error"
    (tmp_path / "r.toml").write_text(resolved.to_toml(tmp_path))
    assert Recipe.load(tmp_path / "r.toml", plugins=rival) == resolved
    overridden = Recipe.load(
        file, ["optimizer=my-package/adam", "optimizer.beta1=0.25", "prefer=ortflex"], rival
    )
    assert overridden.optimizer == {"name": "my-package/adam", "beta1": 0.25}
    assert overridden.resolved(rival).loss["name"] == "ortflex/squared_error"
    with pytest.raises(ConfigError, match="prefer: no installed distribution named 'nobody'"):
        Recipe.load(file, ["prefer=nobody"], rival)

    out = tmp_path / "run"
    chosen = ("schedule=ortflex/constant", "prefer=ortflex")
    works("train", str(file), f"output={out}", *chosen)
    text = (out / "recipe.toml").read_text()
    assert 'name = "ortflex/adam"' in text
    assert 'name = "ortflex/squared_error"' in text
    file.write_text(f'{head}loss = "squared_error"\n')
    assert "Use a qualified name" in refused("train", str(file), f"output={out}2").output


# ---------------------------------------------------------------------- gradient rules


def test_a_rule_of_another_family_is_used_where_the_family_is_chosen(install: Install) -> None:
    install("my-package", RIVAL, {"ortflex.gradients": {"elementwise": "my_package_module:RULES"}})
    found = Plugins.discover()
    net = models.mlp((5, 3, 1))
    x, y = regression()

    def weights(**options: Any) -> list[bytes]:
        trainer = make(net, **{"plugins": found, "backend": "fused", "epochs": 1, **options})
        trainer.fit(x, y)
        return bits(trainer)

    alone = weights(plugins=Plugins.discover(["my-package"]))
    assert weights(gradients=["ortflex/elementwise"]) == alone
    theirs = weights(gradients=["my-package/elementwise"])
    assert theirs != alone
    assert weights(prefer=["my-package"]) == theirs
    assert weights(prefer=["my-package"], gradients="ortflex/elementwise") == alone
    # Programs are shared by structure: what was decided before decides nothing now.
    assert weights() == alone


# ---------------------------------------------------------------------- other


def test_a_backend_that_knows_adam_by_name_does_not_take_another_for_it(rival: Plugins) -> None:
    theirs = make(models.linear(), plugins=rival, **{**SPEC, "optimizer": "my-package/adam"})
    ours = make(models.linear(), plugins=rival, **{**SPEC, "optimizer": "ortflex/adam"})
    assert internals_of(theirs).setup.problem.optimizer_name == "my-package/adam"
    assert internals_of(ours).setup.problem.optimizer_name == "adam"


def test_disabling_ortflex_itself_gives_an_error_that_says_so(monkeypatch: Any) -> None:
    monkeypatch.setenv("ORTFLEX_DISABLE_PLUGINS", "ortflex")
    text = (
        r"unknown optimizer 'adam': it is a plugin of ortflex .*, which ORTFLEX_DISABLE_PLUGINS switches "
        "off together with all built-in plugins; remove ortflex from ORTFLEX_DISABLE_PLUGINS"
    )
    with pytest.raises(OrtflexError, match=text):
        Trainer(models.linear(), loss="squared_error")
    with pytest.raises(ConfigError, match=r"prefer: .*'ortflex' has plugins; .* switches it off"):
        Plugins.discover().preferring(["ortflex"])


def test_one_distribution_that_has_a_name_twice(install: Install) -> None:
    group = {"adamant": "twice_module:Adam", "adamant ": "twice_module:Squared"}
    install("twice", RIVAL, {"ortflex.optimizers": group})
    with pytest.raises(PluginError, match="Both belong to one distribution: repair or uninstall t"):
        Plugins.discover().component("optimizers", "adamant")


def test_a_class_that_an_entry_point_names_by_another_path_is_found(install: Install) -> None:
    """Packages export classes from their top: the entry point's module is not the class's."""
    install("inner", RIVAL, {})
    group = {"ortflex.optimizers": {"theirs": "outer_module:Adam"}}
    install("outer", "from inner_module import Adam", group)
    found = Plugins.discover()
    made = found.component("optimizers", "theirs")
    assert found["optimizers"].name_of(made) == "theirs"

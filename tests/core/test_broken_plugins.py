"""Plugins that cannot hurt: every kind, broken in every way, next to trainings that do not ask for them.

The class: third-party code runs at import, at registration, when a component is made, while graphs are
built and during a training. At each of these places it may raise anything (SystemExit and other
BaseExceptions included) or give anything, and only Ctrl-C passes.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from ortflex_core import (
    KINDS,
    BrokenPlugin,
    ConfigError,
    GraphError,
    Loss,
    OrtflexError,
    PluginError,
    Plugins,
    Unsupported,
    check_model,
    hook,
    internals_of,
)
from ortflex_core.compiler.graph import formula_calls as formulas
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.entries import warn_once
from ortflex_plugins.cli.main import main
from tests import children, models
from tests.fuzz.plugins import HEAD, Broken, asking, every, on_path, trained
from tests.installing import Install, module_of, write
from tests.installing import install as install
from tests.training import make, regression

pytestmark = pytest.mark.once


def several(root: Path, table: list[Broken]) -> dict[str, Path]:
    out = {}
    for k, broken in enumerate(table):
        group = "ortflex" if broken.kind == "ortflex" else f"ortflex.{broken.kind}"
        name = f"broken-{broken.kind}-{k}"
        point = {f"plugin{k}": f"{module_of(name)}:Plugin"}
        out[name] = write(root, name, broken.code, {group: point})
    return out


@pytest.mark.parametrize("kind", [*KINDS, "ortflex"])
def test_broken_plugins_are_errors_only_if_they_are_requested(kind: str, tmp_path: Path) -> None:
    table = [b for b in every() if b.kind == kind]
    assert len({b.how for b in table}) == len(table) > 15
    before = trained(Plugins.discover(), backend="auto")
    with on_path(several(tmp_path, table)) as plugins:
        assert trained(plugins, backend="auto") == before
        for k, broken in enumerate(table):
            text = asking(broken, f"plugin{k}", plugins)
            if (broken.kind, broken.how) == ("callbacks", "is a class of nothing"):
                assert text is not None
                assert "has no hooks" in text
                continue
            assert text is not None, f"{kind} that {broken.how} was taken"
            assert f"broken-{kind}-{k} 1.0" in text, f"{kind} that {broken.how}: {text}"
    assert issubclass(BrokenPlugin, PluginError)
    assert issubclass(PluginError, OrtflexError)


@pytest.mark.parametrize("kind", ["losses", "gradients", "backends", "ortflex"])
def test_ctrl_c_at_import_is_ctrl_c(kind: str, install: Install) -> None:
    group = "ortflex" if kind == "ortflex" else f"ortflex.{kind}"
    code = "import signal\nsignal.raise_signal(signal.SIGINT)"
    install("wreck", code, {group: {"wrecked": "wreck_module:Plugin"}})
    asked = {"losses": {"loss": "wrecked"}, "ortflex": {}}.get(kind, {"prefer": ["wreck"]})
    with pytest.raises(KeyboardInterrupt):
        trained(Plugins.discover(), **{"loss": "huber", "backend": "auto", **asked})


def train_with(install: Install, *per_sample: str) -> None:
    """Train with the loss 'mine' of the distribution mine, whose formula has these lines."""
    head = f"{HEAD}\nkept = []\n@whole\nclass Plugin(Loss):\n    def per_sample"
    body = "".join(f"\n        {line}" for line in per_sample)
    code = f"{head}(self, op, predicted, expected):{body}"
    install("mine", code, {"ortflex.losses": {"mine": "mine_module:Plugin"}})
    trained(Plugins.discover(), loss="mine")


def test_ctrl_c_in_a_formula_is_ctrl_c(install: Install) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_with(install, "raise KeyboardInterrupt")


def test_a_module_that_takes_long_is_not_imported_unless_asked(install: Install) -> None:
    code = "open(__file__ + '.seen', 'w').close()\nraise RuntimeError"
    install("slow", code, {f"ortflex.{kind}": {"slow": "slow_module:Plugin"} for kind in KINDS})
    found = Plugins.discover()
    trained(found, backend="auto")
    (folder,) = [p for p in sys.path if p.endswith("slow")]
    assert not list(Path(folder).glob("*.seen"))
    with pytest.raises(BrokenPlugin):
        found["losses"].load("slow")
    assert list(Path(folder).glob("*.seen"))


def test_one_warning_a_process(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    groups = ("ortflex", "ortflex.gradients", "ortflex.backends")
    install("once", "raise SystemExit(9)", {g: {"bad": "once_module:P"} for g in groups})
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "ortflex"):
        for _ in range(5):
            make(models.linear(), plugins=Plugins.discover(), backend="auto", prefer=["once"])
    texts = [r.getMessage() for r in caplog.records if "once 1.0" in r.getMessage()]
    assert len(texts) == 3
    told = "SystemExit: 9. Repair or uninstall once, or set ORTFLEX_DISABLE_PLUGINS=once"
    assert all(told in text for text in texts)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("entry_points.txt", b"[ortflex.losses]\nx = caf\xe9:X\n"),
        ("entry_points.txt", b"[ortflex.losses]\nno sign of equality\n"),
        ("METADATA", b"Name: caf\xe9\n"),
        ("METADATA", b""),
        ("METADATA", None),
    ],
)
def test_unreadable_metadata_of_another_distribution(
    install: Install, tmp_path: Path, file: str, content: bytes | None
) -> None:
    before = trained(Plugins.discover())
    install("odd", "Plugin = 3", {"ortflex.losses": {"odd": "odd_module:Plugin"}})
    place = tmp_path / "odd" / "odd-1.0.dist-info" / file
    place.unlink()
    if content is not None:
        place.write_bytes(content)
    found = Plugins.discover()
    assert trained(found) == before
    with pytest.raises(PluginError):
        found.component("losses", "odd")


# ---------------------------------------------------------------------- backends and devices

BACKEND = """
@whole
class Plugin(Backend):
    name = "first"
    priority = 1000
    @classmethod
    def available(cls, runtime):
        return []
    def supports(self, problem, device, runtime):
        return []
    def build(self, problem, device, runtime):
        {body}
"""


def builder(install: Install) -> Plugins:
    """What is installed, with a backend that comes first and cannot build."""
    code = HEAD + BACKEND.format(body="raise ZeroDivisionError('planted')")
    install("builder", code, {"ortflex.backends": {"first": "builder_module:Plugin"}})
    return Plugins.discover()


def test_a_backend_that_cannot_build_is_passed_over_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    before, found = trained(Plugins.discover(), backend="auto"), builder(install)
    warn_once.cache_clear()
    assert trained(found, backend="auto") == before
    assert "skipped" not in caplog.text  # ours can train it
    assert trained(found, backend="auto", prefer=["builder"]) == before
    first = "the backend 'first' (builder_module:Plugin, from builder 1.0)"
    assert f"a backend is skipped: {first} fails" in caplog.text
    with pytest.raises(BrokenPlugin, match=r"from builder 1\.0\) fails in build: Zero") as caught:
        trained(found, backend="first")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_if_no_backend_is_left_the_error_has_the_reasons_of_all(install: Install) -> None:
    """Those of one that fails as well: nothing else says why the training cannot run."""
    alone = make(models.linear(), plugins=builder(install), backend="auto", prefer=["builder"])
    setup = internals_of(alone).setup
    assert setup.backends[0].name == "first"
    object.__setattr__(setup, "backends", (setup.backends[0],) * 2)
    with pytest.raises(Unsupported, match=r"first: .*from builder 1\.0\) fails in build"):
        alone.fit(*regression())


def test_errors_of_ortflex_stay_and_a_foreign_formula_is_named() -> None:
    """Only an ill-formed formula of others gets a name; what a component says itself is its own."""

    class Foreign:
        name = "foreign"

    ours = Plugins.discover()["optimizers"].load("adam")()
    for component, error, stays in (
        (Foreign(), Unsupported("no such device"), True),
        (Foreign(), GraphError("no such operator"), False),
        (ours, GraphError("no such operator"), True),
    ):
        with pytest.raises(type(error)) as caught, calling(component, "update"):
            raise error
        assert (caught.value is error) == stays
        assert ("Foreign fails in update" in str(caught.value)) == (not stays)


def test_check_tells_a_broken_backend_as_a_reason(install: Install) -> None:
    code = HEAD + BACKEND.format(body="return None").replace(
        "runtime):\n        return []\n    def build", "runtime):\n        1 // 0\n    def build"
    )
    install("says", code, {"ortflex.backends": {"first": "says_module:Plugin"}})
    report = check_model(models.linear(), plugins=Plugins.discover())
    assert "from says 1.0) fails in supports: ZeroDivisionError" in report.backends["first"][0]
    assert report.trainable


# ---------------------------------------------------------------------- hooks


def test_an_error_of_a_hook_stays_what_it_is_and_says_whose_it_is(install: Install) -> None:
    code = f"{HEAD}\nclass A:\n    @hook\n    def epoch_end(self, record): raise Own('mine')\nPlugin = A()"
    code = code.replace("class Own(BaseException)", "class Own(Exception)")
    install("noisy", code, {"ortflex": {"noisy": "noisy_module:Plugin"}})

    def epoch_end(record: Any) -> None: ...

    trainer = make(models.linear(), plugins=Plugins.discover(), callbacks=[epoch_end], epochs=1)
    with pytest.raises(Exception, match="mine") as caught:
        trainer.fit(*regression())
    assert type(caught.value).__name__ == "Own"
    plugin = "the hook plugin 'noisy' (noisy_module:Plugin, from noisy 1.0)"
    assert caught.value.__notes__ == [f"raised by the hook 'epoch_end' of {plugin}"]


def test_of_two_callbacks_of_a_class_the_right_one_is_named() -> None:
    class Fails:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        @hook
        def step_end(self) -> None:
            if self.fails:
                raise ZeroDivisionError("mine")

    one, other = Fails(False), Fails(True)
    trainer = make(models.linear(), callbacks=[other, one], epochs=1)
    told = []
    internals_of(trainer).hooks._whose = lambda plugin: told.append(plugin) or "x"  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(ZeroDivisionError):
        trainer.fit(*regression())
    assert told == [other]


def test_a_class_in_place_of_a_callback_is_refused_at_once() -> None:
    class Stop:
        @hook
        def epoch_end(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Stop is a class; pass an instance: .*Stop\(\)"):
        make(models.linear(), callbacks=[Stop])


# ---------------------------------------------------------------------- formulas


def test_formulas_cost_nothing_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guard of a formula is met while graphs are built, none of them in a step."""
    calls: list[str] = []
    real = formulas.calling
    monkeypatch.setattr(formulas, "calling", lambda c, m: calls.append(m) or real(c, m))  # type: ignore[func-returns-value]
    x, y = regression(rows=64)
    counts = []
    for epochs in (2, 20):
        calls.clear()
        options: dict[str, Any] = {"penalty": "l2", "optimizer": "adam", "seed": epochs}
        trainer = make(models.linear(), backend="fused", epochs=epochs, batch_size=8, **options)
        trainer.fit(x, y)
        assert {"per_sample", "per_element", "update"} <= set(calls)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_the_message_about_a_formula_is_complete(install: Install) -> None:
    with pytest.raises(BrokenPlugin) as caught:
        train_with(install, "return np.ones((3, 1))")
    assert str(caught.value) == (
        "the loss 'mine' (mine_module:Plugin, from mine 1.0) returns a numpy array of shape [3, 1] from "
        "per_sample, expected a float tensor with at least one value per sample, [batch, …], made by "
        "the operators of op"
    )


def test_a_class_that_no_distribution_has_is_named_by_its_module() -> None:
    @attrs.frozen(kw_only=True)
    class Mine(Loss):
        def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
            return None

    with pytest.raises(BrokenPlugin, match=r"the loss tests\.core\..*Mine returns None from"):
        trained(Plugins.discover(), loss=Mine())


def test_a_tensor_of_an_older_graph_is_refused(install: Install) -> None:
    with pytest.raises(BrokenPlugin, match=r"from mine 1\.0\).*of the graph that is being built"):
        train_with(install, "kept.append(op.Abs(predicted - expected))", "return kept[0]")


# ---------------------------------------------------------------------- the command line


def test_the_command_line_shows_no_trace_and_no_control_characters(tmp_path: Path) -> None:
    groups = {
        "ortflex": {"a\x1b[31mred": "esc_module:X"},
        "ortflex.losses": {"lo\x1b]0;title\x07ss": "esc_module:X"},
    }
    folder = write(tmp_path, "esc", "import sys; sys.exit(9)", groups)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from ortflex_plugins.cli.main import main\nmain(sys.argv[1:])"
    )
    for arguments, status in ((["plugins"], 0), (["plugins", "--check"], 1)):
        out = children.run([sys.executable, "-c", code, *arguments])
        assert out.returncode == status, out.stderr
        assert "Traceback" not in out.stderr
        assert "esc 1.0" in out.stdout
        assert not [c for c in out.stdout + out.stderr if not c.isprintable() and c != "\n"]
    assert "SystemExit: 9" in out.stdout


def test_epoch_line_of_the_recipe_wins_over_the_automatic_one(tmp_path: Path) -> None:
    onnx.save(models.linear(), tmp_path / "m.onnx")
    x, y = regression()
    np.savez(tmp_path / "d.npz", X=x, y=y)
    text = 'model = "m.onnx"\ndata = "d.npz"\nloss = "squared_error"\nepochs = 2\n'
    (tmp_path / "t.toml").write_text(text)
    for spec in ('"epoch_line"', '{ name = "ortflex/epoch_line" }', ""):
        arguments = ["train", str(tmp_path / "t.toml"), f"output={tmp_path / f'run{len(spec)}'}"]
        result = CliRunner().invoke(main, [*arguments, f"callbacks=[{spec}]"])
        assert result.exit_code == 0, result.output
        assert result.output.count("epoch 1: loss") == 1


@pytest.mark.parametrize("parameters", [{}, {"scale": 2.0}])
def test_a_class_without_the_decorator_says_so(parameters: dict[str, Any], tmp_path: Path) -> None:
    """Its fields would be objects of attrs, and its parameters unknown."""
    code = (
        "from ortflex_core import Loss, hyper\n\n\n"
        "class Mine(Loss):\n    name = 'mine'\n    scale: float = hyper(default=1.0)\n\n"
        "    def per_sample(self, op, predicted, expected):\n"
        "        return self.scale * op.Abs(predicted - expected)\n"
    )
    decorated = code.replace("class Mine", "@attrs.frozen(kw_only=True)\nclass Mine")
    for name, text in (("bare", code), ("good", f"import attrs\n{decorated}")):
        (tmp_path / f"{name}.py").write_text(text)
    loss = {"target": f"{tmp_path}/bare.py:Mine", **parameters}
    with pytest.raises(BrokenPlugin, match=r"declares scale without the decorator @attrs\.frozen"):
        make(models.linear(), loss=loss)
    make(models.linear(), loss={**loss, "target": f"{tmp_path}/good.py:Mine"}).fit(*regression())

"""When the code of plugins runs, and that none of it ends a process without a message."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import KINDS, NAMES, BrokenPlugin, Plugins
from ortflex_core.kernel.entries import noting_interrupts, warn_once
from ortflex_plugins.gradients import OPERATORS
from tests import children, installing, models
from tests.installing import Install
from tests.installing import install as install
from tests.training import make, plugins, regression

pytestmark = pytest.mark.once

# The class: the code of an installed distribution runs in trainings of people who do not use it.
HOOKED = "open(__file__ + '.imported', 'a').write('x')\n"
CODE = """
import json, sys
import numpy as np
from ortflex import Trainer
model, options = sys.argv[1], json.loads(sys.argv[2])
rows = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
try:
    trainer = Trainer(model, loss="squared_error", epochs=1, progress=False, **options)
    trainer.fit(rows, rows[:, :1])
    trainer.predict(rows)
except Exception as error:
    print(type(error).__name__)
print(json.dumps(sorted(sys.modules)))
"""


def imported(tmp_path: Path, **options: object) -> tuple[set[str], int]:
    """The modules after a training in a fresh process, and how often those of a stranger were run."""
    groups = {f"ortflex.{kind}": {"far": "far_module:Plugin"} for kind in KINDS}
    folder = installing.write(tmp_path, "far", HOOKED + "Plugin = None", groups)
    (tmp_path / "m.onnx").write_bytes(models.mlp((3, 4, 1), "Relu").SerializeToString())
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = children.run(
        [sys.executable, "-c", CODE, f"{tmp_path}/m.onnx", json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    seen = folder / "far_module.py.imported"
    return set(
        json.loads(done.stdout.splitlines()[-1])
    ), seen.stat().st_size if seen.exists() else 0


def test_a_training_imports_the_families_of_its_operators_alone(tmp_path: Path) -> None:
    modules, strangers = imported(tmp_path)
    families = {name for name in OPERATORS if f"ortflex_plugins.gradients.{name}" in modules}
    assert {"elementwise", "matmul"} <= families
    assert not families & {"attention", "control", "convolution", "recurrent", "signal", "sampling"}
    assert strangers == 0
    own = "ortflex_plugins."
    kinds = (f"{own}optimizers.", f"{own}losses.")
    others = {m for m in modules if m.startswith(kinds) and "._" not in m}
    assert others == {f"{own}optimizers.adam", f"{own}losses.regression"}


@pytest.mark.parametrize(
    "options", [{"prefer": ["far"]}, {"gradients": ["far"]}, {"backend": "fastest"}]
)
def test_what_is_asked_for_is_imported(options: dict[str, object], tmp_path: Path) -> None:
    """The family that cannot be used is an error where it is named."""
    _, strangers = imported(tmp_path, **options)
    assert strangers > 0


def test_the_list_of_operators_is_that_of_the_families() -> None:
    """Of every family of ours: what it has a rule for, or passes integers through."""
    registry = plugins()["gradients"]
    found = {}
    for entry in registry:
        if entry.owner == "ortflex":
            family = registry.loaded(entry)
            found[entry.name] = {*family.table, *family.rounding, *family.carrying}
    assert found == {name: set(keys) for name, keys in OPERATORS.items()}


def test_no_operator_has_rules_in_two_of_our_families() -> None:
    registry = plugins()["gradients"]
    keys = [k for e in registry if e.owner == "ortflex" for k in registry.loaded(e).table]
    assert len(keys) == len(set(keys))
    assert len(keys) > 180


# Plugins that exit --------------------------------------------------------------------------------


# The class: SystemExit and KeyboardInterrupt that plugin code raises itself, at import and in hooks. A real
# Ctrl-C arrives as a signal, and still ends everything.
EXITING = """
import sys
from ortflex_core import hook
class Plugin:
    @hook
    def {name}(self{arguments}):
        sys.exit(3)
Plugin = Plugin()
"""


@pytest.mark.parametrize(
    "name", ["train_start", "batch_drawn", "step_end", "epoch_end", "train_end"]
)
def test_a_hook_plugin_that_exits_is_named(install: Install, name: str) -> None:
    assert name in NAMES
    arguments = ", batch" if name == "batch_drawn" else ""
    code = EXITING.format(name=name, arguments=arguments)
    install("leaving", code, {"ortflex": {"leaver": "leaving_module:Plugin"}})
    trainer = make(models.mlp((3, 4, 1)), plugins=Plugins.discover(), backend="fused", epochs=1)
    with pytest.raises(BrokenPlugin, match=rf"{name}.*leaver.*leaving 1\.0.*exit\(3\)") as error:
        trainer.fit(*regression(rows=8, features=3))
    assert isinstance(error.value.__cause__, SystemExit)


def test_a_callback_of_the_user_may_end_the_process() -> None:
    def step_end(progress: Any) -> None:
        raise SystemExit(4)

    trainer = make(models.mlp((3, 4, 1)), backend="fused", epochs=1, callbacks=[step_end])
    with pytest.raises(SystemExit):
        trainer.fit(*regression(rows=8, features=3))


@pytest.mark.parametrize("group", ["ortflex", "ortflex.gradients", "ortflex.backends"])
def test_an_import_that_raises_keyboard_interrupt_is_a_broken_plugin(
    install: Install, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the main thread and in another one; others train as before, with one warning."""
    install("stopping", "raise KeyboardInterrupt", {group: {"stop": "stopping_module:Plugin"}})
    plugins = Plugins.discover()
    registry = plugins[group.removeprefix("ortflex.")]
    entry = next(e for e in registry if e.name == "stop")
    found: list[Any] = []

    def load() -> None:
        with pytest.raises(BrokenPlugin, match=r"stopping 1\.0.*KeyboardInterrupt"):
            entry.load()
        found.append(True)

    load()
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert len(found) == 2
    warn_once.cache_clear()
    before = signal.getsignal(signal.SIGINT)
    with caplog.at_level(logging.WARNING, "ortflex"):
        options = {"plugins": plugins, "backend": "auto", "prefer": ["stopping"]}
        trainer = make(models.mlp((3, 4, 1)), epochs=1, **options)
        trainer.fit(*regression(rows=8, features=3))
    assert "stopping 1.0" in caplog.text
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_an_import_ends_the_process(install: Install) -> None:
    """It is a signal: here one that arrives while the module of a plugin runs."""
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)"
    install("slow", code, {"ortflex.losses": {"slow": "slow_module:Plugin"}})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(e for e in Plugins.discover()["losses"] if e.name == "slow").load()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_the_user_has_set_is_called() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with noting_interrupts() as arrived:
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.01)
        assert arrived == seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

"""A plugin that exits never ends a process without a message.

The class: SystemExit and KeyboardInterrupt that plugin code raises itself, at import and in hooks. A real
Ctrl-C arrives as a signal, and still ends everything.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import pytest

from ortflex_core import NAMES, BrokenPlugin, Plugins
from ortflex_core.kernel.entries import noting_interrupts, warn_once
from tests import models
from tests.installing import Install
from tests.installing import install as install
from tests.training import make, regression

pytestmark = pytest.mark.once

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

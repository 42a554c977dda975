"""What a command prints and where: results, warnings, and a status where there is something to say."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from rich.console import Console

from ortflex_plugins.cli import plugins
from ortflex_plugins.cli.train import echoed_messages

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("level", "out", "err"),
    [
        (logging.DEBUG, "", ""),
        (logging.INFO, "a message\n", ""),
        (logging.WARNING, "", "warning: a message\n"),
        (logging.ERROR, "", "warning: a message\n"),
    ],
)
def test_a_message_goes_where_its_level_says(
    level: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("ortflex")
    before = logger.level, logger.propagate, list(logger.handlers)
    with echoed_messages():
        logger.log(level, "a %s", "message")
    assert tuple(capsys.readouterr()) == (out, err)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize("status", ["ok", "not loaded", "does not import"])
@pytest.mark.parametrize("check", [False, True])
def test_the_table_of_plugins_has_a_status_if_one_is_broken_or_asked_for(
    check: bool, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "kind": "losses",
        "ask_for": "mine",
        "target": "m:X",
        "distribution": "d",
        "version": "1",
    }
    rows: Any = [{**row, "status": "ok"}, {**row, "ask_for": "other", "status": status}]
    plugins._show_table(Console(width=200), rows, check)
    said = capsys.readouterr().out
    shown = check or status == "does not import"
    assert ("status" in said) == shown
    assert (status in said.replace("status", "")) == shown

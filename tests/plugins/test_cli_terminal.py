"""What users see on their terminals: narrow ones, and what is said to a slip of the fingers.

Results, warnings, and a status where there is something to say, each where it belongs.
"""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from ortflex_core import KINDS
from ortflex_plugins.cli import terminal
from ortflex_plugins.cli.main import main
from ortflex_plugins.cli.plugins import _show_table
from ortflex_plugins.cli.terminal import show_table
from ortflex_plugins.cli.train import echoed_messages
from tests.training import plugins

pytestmark = pytest.mark.per_python

ROWS = [
    ["losses", "softmax_cross_entropy", "[green]ok[/]", "a reason of several words, and its end"],
    ["", "log_loss", "[green]ok[/]", "short"],
]


def shown(width: int) -> list[str]:
    out = io.StringIO()
    show_table(Console(width=width, file=out), ["kind", "name", "state", "why"], ROWS)
    return out.getvalue().splitlines()


def test_a_wide_terminal_has_a_row_a_line() -> None:
    lines = shown(100)
    assert len(lines) == 3
    assert "ok     a reason of several words, and its end" in lines[1]


NAMES = ["adam", "warmup", "checkpoint", "csv", "elastic", "cosine_restarts", "lora", "f1"]


def test_short_columns_are_aligned_where_sentences_are_below() -> None:
    console = Console(width=30, record=True, file=io.StringIO())
    rows = [["a_convolution", "Conv", "it is frozen"], ["b", "Gemm", "it is frozen"]]
    show_table(console, ["node", "operator", "why"], rows)
    lines = console.export_text().splitlines()
    starts = [
        line.index(word) for line in lines for word in ("operator", "Conv", "Gemm") if word in line
    ]
    assert len(starts) == 3
    assert len(set(starts)) == 1


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("what", ["", *KINDS, *NAMES])
def test_tables_of_plugins_fit_into_a_terminal(
    what: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "terminal_columns", lambda: width)
    result = CliRunner().invoke(main, ["plugins", what] if what else ["plugins"])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert [line for line in lines if len(line) > width] == []
    if not what:
        for registry in plugins():
            for name in registry.names():
                assert re.search(rf"\b{re.escape(name)}\b", result.output), name
        first = next(k for k, line in enumerate(lines) if line.startswith("losses"))
        assert lines[first + 1].startswith("   ")  # one paragraph for each kind
        assert len(lines) < 70


@pytest.mark.parametrize("width", [60, 50, 40])
def test_sentences_stand_below_their_row_on_a_narrow_terminal(width: int) -> None:
    lines = shown(width)
    assert lines[1].split() == ["losses", "softmax_cross_entropy", "ok"]
    text = " ".join(line.strip() for line in lines)
    assert "a reason of several words, and its end" in text
    assert max(map(len, lines)) <= width
    assert len(lines) <= 6


@pytest.mark.parametrize("command", ["train", "compare"])
def test_keys_given_as_options(command: str) -> None:
    batch, rate = "batch_size", "learning_rate"
    options = {"--batch-size": batch, "--batch_size": batch, "--batch-size=3": batch, "--lr": rate}
    for given, key in options.items():
        result = CliRunner().invoke(main, [command, "train.toml", given, "3"])
        assert result.exit_code == 2
        assert f"is not an option but a key: write {key}=" in result.output
    result = CliRunner().invoke(main, [command, "train.toml", "--nonsense"])
    assert "No such option" in result.output


@pytest.mark.once
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


@pytest.mark.once
@pytest.mark.parametrize("status", ["ok", "not loaded", "does not import"])
@pytest.mark.parametrize("check", [False, True])
def test_the_table_of_plugins_has_a_status_if_one_is_broken_or_asked_for(
    check: bool, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = dict.fromkeys(("kind", "ask_for", "target", "distribution", "version"), "mine")
    rows: Any = [{**row, "status": "ok"}, {**row, "ask_for": "other", "status": status}]
    _show_table(Console(width=200), rows, check)
    said = capsys.readouterr().out
    shown = check or status == "does not import"
    assert ("status" in said) == shown
    assert (status in said.replace("status", "")) == shown

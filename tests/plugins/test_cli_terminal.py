"""What users see on their terminals: narrow ones, and what is said to a slip of the fingers."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ortflex_core import KINDS
from ortflex_plugins.cli import terminal
from ortflex_plugins.cli.main import main
from ortflex_plugins.cli.terminal import show_table
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
    for given in ("--batch-size", "--batch_size", "--batch-size=3"):
        result = CliRunner().invoke(main, [command, "train.toml", given, "3"])
        assert result.exit_code == 2
        assert "is not an option but a key: write batch_size=…" in result.output
    result = CliRunner().invoke(main, [command, "train.toml", "--nonsense"])
    assert "No such option" in result.output


def test_missing_files_and_their_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text('model = "mdel.onnx"\n', "utf-8")
    Path("model.onnx").touch()
    for arguments, text in (
        (
            ["train", "tran.toml"],
            "file 'tran.toml' does not exist; did you mean 'train.toml'? Known: train.t",
        ),
        (
            ["check", "modl.onnx"],
            "file 'modl.onnx' does not exist; did you mean 'model.onnx'? Known: model.o",
        ),
        (
            ["train", "train.toml"],
            "mdel.onnx' does not exist; did you mean 'model.onnx'? Known: model",
        ),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert text in result.output

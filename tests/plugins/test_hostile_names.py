"""Names out of files are harmless: on terminals, in pages, in recipes, in the names of files."""

from __future__ import annotations

import tomllib
import unicodedata
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto

from ortflex_core import OrtflexError, printable, suggest
from ortflex_plugins.cli.main import main
from tests import models
from tests.training import make, plugins

pytestmark = pytest.mark.once

EVIL = {
    "coef": "../../up/\x1b]0;title\x07\x1b[2J\r\n[red]<script>alert(1)</script>\u202e",
    "intercept": "/etc/passwd\nepochs = 77\noutput = '/tmp'",
    "XW": "w" * 65536,
    "Y": "</title><img src=x onerror=alert(2)>\"'&\x07",
    "X": "con\x00x\x9b31m",
}


def evil() -> ModelProto:
    """A linear model with names that mean something to another author."""
    model = models.renamed(models.linear(), EVIL)
    for node, name in zip(model.graph.node, EVIL.values(), strict=False):
        node.name = name
    model.graph.name = model.producer_name = model.graph.doc_string = EVIL["coef"]
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, inside another, with the model in it."""
    home = tmp_path / "home"
    home.mkdir()
    onnx.save(evil(), home / "m.onnx")
    monkeypatch.chdir(home)
    return home


def run(*arguments: str) -> str:
    """A command, which may fail but only as ortflex does; all that it writes to the terminal."""
    result = CliRunner().invoke(main, arguments)
    assert isinstance(result.exception, SystemExit | type(None)), result.exception
    return str(result.output)


def harmless(text: str) -> None:
    """No control characters, no marks that turn the direction of a text, no endless lines."""
    odd = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"}
    assert not odd
    assert max(map(len, text.split("\n"))) < 5000


def test_what_commands_print_is_harmless(folder: Path) -> None:
    x = np.zeros((6, 5), np.float32)
    np.savez("data.npz", X=x, y=np.zeros((6, 1), np.float32))
    Path("train.toml").write_text(
        'model = "m.onnx"\ndata = "data.npz"\nloss = "squared_error"\nepochs = 1\noutput = "run"\n'
    )
    said = [
        run("check", "m.onnx", "--all"),
        run("check", "m.onnx", "--json"),
        run("init", "m.onnx", "-o", "init.toml"),
        run("train", "train.toml"),
        run("train", "train.toml", "params=nothing"),
        run("train", "train.toml", "loss.predicted=nothing"),
        run("compare", "train.toml"),
        run("graph", "m.onnx", "-o", "m.svg"),
        run("report", "run"),
    ]
    assert "trainable" in said[0]
    assert Path("run", "trained.onnx").is_file()
    for text in said[:1] + said[2:]:
        harmless(text)
    assert said[1].isascii()


def test_errors_that_repeat_what_files_say_are_harmless(folder: Path) -> None:
    Path("train.toml").write_text(
        'model = "m.onnx"\ndata = "\\u001b[2J.npz"\n"\\u001b[31m" = 1\n'
        f'loss = "\\u009b{"n" * 65536}"\n'
    )
    text = run("train", "train.toml")
    assert "error" in text
    harmless(text)


def test_a_written_recipe_says_what_it_would_with_harmless_names(folder: Path) -> None:
    run("init", "m.onnx", "-o", "evil.toml")
    onnx.save(models.linear(), "m.onnx")
    run("init", "m.onnx", "-o", "good.toml")
    evil, good = (tomllib.loads(Path(f"{n}.toml").read_text("utf-8")) for n in ("evil", "good"))
    assert evil == good


def test_no_name_becomes_a_path(folder: Path) -> None:
    trainer = make(folder / "m.onnx", backend="fused", epochs=1)
    trainer.fit(np.zeros((6, 5), np.float32), np.zeros((6, 1), np.float32))
    trainer.save_onnx_graph(folder / "graphs")
    trainer.save(folder / "checkpoint")
    trainer.export(folder / "out.onnx")
    outside = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(evil(), folder / "m.onnx", **outside)
    make(folder / "m.onnx").export(folder / "external.onnx")
    assert [p.name for p in folder.parent.iterdir()] == ["home"]
    for path in folder.rglob("*"):
        assert path.name.isprintable()
        assert len(path.name) < 100
    again = type(trainer).resume(folder / "checkpoint", plugins=plugins())
    assert set(again.get_state()) == {EVIL["coef"], EVIL["intercept"]}


def test_suggestions_do_not_compare_endless_names() -> None:
    """Comparing takes the square of the length: a minute for names of 64 KiB."""
    known = [f"{k}{'n' * 65536}" for k in range(200)]
    assert len(suggest("n" * 65536, known)) < 25_000
    assert len(suggest("nn", known)) < 25_000
    assert suggest("adm", ["adam", *known]).startswith("did you mean 'adam'?")
    assert suggest("x", map(str, range(150))).endswith("and 110 more")
    with pytest.raises(OrtflexError, match="unknown parameter"):
        make(evil(), params=["n" * 65536])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\x1b[0m\x07\x9b1m", "a·b·[0m··1m"),
        ("\u202eab\u200b", "·ab·"),
        ("one\ntwo", "one\ntwo"),
        ("Größe 层 ✓", "Größe 层 ✓"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown

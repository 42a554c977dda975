"""What the shell offers after TAB, in the forms in which bash and zsh give the line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from click.shell_completion import BashComplete, ZshComplete

from ortflex_core import KINDS, Recipe
from ortflex_plugins.cli.main import main
from tests.training import plugins

pytestmark = pytest.mark.once


def offered(*words: str, shell: type[BashComplete | ZshComplete] = ZshComplete) -> set[str]:
    """What completes the last word."""
    complete = shell(main, {}, "ortflex", "_ORTFLEX_COMPLETE")
    return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}


def names(kind: str) -> set[str]:
    return set(plugins()[kind].names())


def test_commands() -> None:
    assert offered("pl") == {"plugins"}


def test_plugins_takes_kinds_and_names() -> None:
    found = offered("plugins", "")
    assert set(KINDS) <= found
    for kind in KINDS:
        assert names(kind) <= found
    assert offered("plugins", "adam") == {"adam", "adamax", "adamw"}
    assert offered("plugins", "ADAMA") == {"adamax"}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("check", "m.onnx", "--optimizer"), "optimizers"),
        (("check", "m.onnx", "--loss"), "losses"),
        (("graph", "m.onnx", "--loss"), "losses"),
        (("compare", "t.toml", "--backend"), "backends"),
        (("evaluate", "run", "--metric"), "metrics"),
    ],
)
def test_options_that_take_a_plugin(words: tuple[str, ...], kind: str) -> None:
    assert offered(*words, "") == names(kind)
    assert offered(*words, "zzz") == set()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_keys_of_a_recipe_and_their_values(command: str) -> None:
    keys = {f"{f.name}=" for f in attrs.fields(Recipe)}
    assert offered(command, "t.toml", "") == keys
    assert offered(command, "t.toml", "epochs=3", "learn") == {"learning_rate="}
    assert offered(command, "t.toml", "optimizer=ada") == {
        f"optimizer={n}" for n in names("optimizers") if n.startswith("ada")
    }
    assert offered(command, "t.toml", "reduction=") == {"reduction=mean", "reduction=sum"}
    assert offered(command, "t.toml", "epochs=") == set()
    assert offered(command, "t.toml", "no_such=") == set()


@pytest.mark.parametrize(
    "words", [("optimizer", "=", "ada"), ("epochs", "=", "3", "loss", "=", "h")]
)
def test_bash_divides_the_word_at_the_equals_sign(words: tuple[str, ...]) -> None:
    kind = "optimizers" if "optimizer" in words else "losses"
    expected = {n for n in names(kind) if n.startswith(words[-1])}
    assert expected
    assert offered("train", "t.toml", *words, shell=BashComplete) == expected


def test_a_shell_gets_the_answer(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "_ORTFLEX_COMPLETE": "bash_complete",
        "COMP_WORDS": "ortflex train t.toml optimizer = adam",
        "COMP_CWORD": "5",
    }
    code = "from ortflex_plugins.cli.main import main; main(prog_name='ortflex')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert {line.split(",")[1] for line in done.stdout.split()} == {"adam", "adamax", "adamw"}
    assert done.stderr == ""

"""What the commands say: on narrow terminals, where messages go, and to a slip of the fingers.

The class of mistyped names: a mistake in the name, in its ending, in both, in its case, or in a folder
above it, in every command that reads a file. What is to be written may exist already.
"""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from rich.console import Console

from ortflex_core import KINDS, no_file
from ortflex_plugins.cli import terminal
from ortflex_plugins.cli.main import main
from ortflex_plugins.cli.plugins import _show_table
from ortflex_plugins.cli.terminal import show_table
from ortflex_plugins.cli.train import echoed_messages
from tests import models
from tests.plugins.commands import ortflex, prepare, project, refused, works
from tests.training import make, plugins, regression

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


def test_a_key_in_place_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("model=m.onnx", "lr=0.1"):
        result = CliRunner().invoke(main, ["train", given, "epochs=3"])
        assert result.exit_code == 2
        assert "ortflex init" in result.output
    assert "ortflex init" not in CliRunner().invoke(main, ["train", "no_key=1"]).output
    Path("epochs=3").write_text("epochs = 3\n")
    assert "ortflex init" not in CliRunner().invoke(main, ["train", "epochs=3"]).output


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


# ---------------------------------------------------------------------- words that fit the command line

ROOT = Path(__file__).parents[2]
RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 1
callbacks = ["checkpoint"]
output = "runs/first"
"""


folder = project(RECIPE)


@pytest.fixture
def run(folder: Path) -> Path:
    """A finished run with checkpoints."""
    works("train", "train.toml")
    return folder


@pytest.mark.once
def test_resuming_speaks_of_the_command_line(run: Path) -> None:
    said = refused("train", "train.toml", "batch_size=5", "--resume", "runs/first")
    assert "--no-strict" in said.output
    assert "strict=False" not in said.output
    assert "Trainer." not in said.output
    assert (
        "nothing is left to train" in works("train", "train.toml", "--resume", "runs/first").output
    )
    more = works("train", "train.toml", "epochs=3", "--resume", "runs/first")
    assert "nothing is left" not in more.output


@pytest.mark.once
def test_pages_say_all_where_check_needs_it(run: Path) -> None:
    """Reasons of tensors and the table of nodes are printed with --all only."""
    short, whole = (ortflex("check", "model.onnx", *all_).output for all_ in ((), ("--all",)))
    for part in ("trained: coef", "node     operator"):
        assert part in whole
        assert part not in short
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text("utf-8")
        for place in re.finditer(r"^ *node +operator +status", text, re.MULTILINE):
            assert "--all" in text[max(0, place.start() - 400) : place.start()], page
        for line in re.findall(r".*reason for each tensor.*", text):
            assert "--all" in line, page


@pytest.mark.once
def test_a_fixed_batch_takes_any_number_of_rows(run: Path) -> None:
    """predict and evaluate of a model that was exported with a batch of 4."""
    model = models.linear()
    x, y = regression(rows=10)
    expected = models.predict(model, {"X": x})["Y"]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, "fixed.onnx")
    np.save("X.npy", x)
    np.savez("ten.npz", X=x, y=y)
    said = works("predict", "fixed.onnx", "X.npy", "-o", "p.npy")
    assert "fixed.onnx (as the file is)" in said.output
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-5, atol=1e-6)
    found = json.loads(works("evaluate", "fixed.onnx", "ten.npz", "--json").stdout)["loss"]
    assert found == pytest.approx(np.square(expected - y).mean(), rel=1e-5)


@pytest.mark.once
def test_several_inputs_are_a_list_as_in_keras() -> None:
    ends = "float[N, 3] D, float[N, 3] E", "float[N, 3] Y"
    model = models.parsed("P = Mul(D, E) Y = Mul(P, w)", {"w": np.ones((1, 3))}, *ends)
    rng = np.random.default_rng(0)
    d, e, y = (rng.standard_normal((12, 3)).astype(np.float32) for _ in range(3))
    one, other = (make(model, backend="fused", epochs=2, params=["w"]) for _ in range(2))
    one.fit([d, e], y)
    other.fit({"D": d, "E": e}, y)
    np.testing.assert_array_equal(one.get_state()["w"], other.get_state()["w"])
    np.testing.assert_array_equal(one.predict([d, e]), other.predict({"E": e, "D": d}))
    assert one.evaluate([d, e], y) == other.evaluate({"D": d, "E": e}, y)


# ---------------------------------------------------------------------- mistyped names of files

OUT = ("-o", "out.onnx")
# The words of a call; the placeholder is a recipe, a model, data, or a run folder.
CALLS: dict[str, tuple[str, ...]] = {
    "train": ("train", "RECIPE"),
    "predict, recipe": ("predict", "RECIPE"),
    "evaluate, recipe": ("evaluate", "RECIPE"),
    "train, model": ("train", "train.toml", "model=MODEL"),
    "train, data": ("train", "train.toml", "data=DATA"),
    "train, validation": ("train", "train.toml", "validation=DATA"),
    "train, resume": ("train", "train.toml", "--resume", "RUN"),
    "find-rate": ("find-rate", "RECIPE"),
    "compare": ("compare", "RECIPE"),
    "export-step": ("export-step", "RECIPE"),
    "graph": ("graph", "MODEL"),
    "graph, recipe": ("graph", "RECIPE"),
    "check": ("check", "MODEL"),
    "init": ("init", "MODEL"),
    "init, data": ("init", "model.onnx", "--data", "DATA"),
    "diff": ("diff", "MODEL", "model.onnx"),
    "diff, second": ("diff", "model.onnx", "MODEL"),
    "verify": ("verify", "MODEL"),
    "quantize": ("quantize", "MODEL", "--data", "data.npz"),
    "quantize, data": ("quantize", "model.onnx", "--data", "DATA"),
    "shrink": ("shrink", "MODEL"),
    "apply-state": ("apply-state", "MODEL", "step", *OUT),
    "predict": ("predict", "RUN"),
    "predict, model": ("predict", "MODEL", "data.npz"),
    "predict, data": ("predict", "model.onnx", "DATA"),
    "evaluate": ("evaluate", "RUN"),
    "evaluate, data": ("evaluate", "runs/first", "DATA"),
    "export": ("export", "RUN", *OUT),
    "report": ("report", "RUN"),
}
NAMES = {
    "RECIPE": ("train.toml", ("trian.toml", "train.tml", "trian.tml", "Train.TOML", "train")),
    "MODEL": ("model.onnx", ("modle.onnx", "model.onx", "modle.onxn", "Model.ONNX", "model")),
    "DATA": ("data.npz", ("dta.npz", "data.nzp", "dta.nzp", "Data.NPZ")),
    "RUN": ("first", ("runs/firxt", "runs/First", "runs/fist")),
}
CASES = [
    (call, word, wrong)
    for call, words in CALLS.items()
    for word, (_, mistakes) in NAMES.items()
    for wrong in mistakes
    if any(word in text for text in words)
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and files that commands would write."""
    folder = tmp_path_factory.mktemp("mistyped")
    prepare(folder, RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        works("train", "train.toml")
        works("export-step", "train.toml")
    for name in ("predictions.npz", "out.onnx", "model.svg", "model-int8.onnx", "model-small.onnx"):
        (folder / name).write_bytes(b"mine")
    return folder


@pytest.mark.once
@pytest.mark.parametrize(("call", "word", "wrong"), CASES)
def test_the_nearest_name_is_in_the_error(
    call: str, word: str, wrong: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    result = ortflex(*(text.replace(word, wrong) for text in CALLS[call]))
    assert result.exit_code == 1, result.output
    assert f"'{NAMES[word][0]}'" in result.stderr.partition("did you mean")[2], result.stderr
    assert "Traceback" not in result.output
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


@pytest.mark.once
@pytest.mark.parametrize("call", [c for c, words in CALLS.items() if "RUN" in words])
def test_a_mistyped_folder_above_is_named(
    call: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    result = ortflex(*(text.replace("RUN", "rnus/first") for text in CALLS[call]))
    assert result.exit_code == 1
    assert "did you mean 'runs'?" in result.stderr


@pytest.mark.once
def test_a_name_like_no_other_and_a_large_folder(tmp_path: Path) -> None:
    """Nothing is guessed, and the number of names that are compared is bounded."""
    for k in range(300):
        (tmp_path / f"row-{k}.txt").touch()
    np.savez(tmp_path / "data.npz", X=np.zeros(3))
    assert no_file(tmp_path / "qqqqq.toml").endswith("does not exist")
    assert no_file(tmp_path / "a" / "b" / "c.toml").endswith("does not exist")
    assert "'data.npz'" in no_file(tmp_path / "dta.nzp")

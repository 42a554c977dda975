"""New projects: what ``new-plugin`` and ``new-flower-app`` write, and docs/howto/write-a-*.md word by word.

Packages pass the kits of their kinds as they stand; of a page, commands run, files are written, tests pass.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

from ortflex_core import KINDS as REGISTRIES
from ortflex_core import ConfigError, Recipe
from ortflex_plugins.cli.completion import word
from tests.plugins.commands import prepare, refused, works
from tests.plugins.conformance_installed import PYTEST, ROOT, install, run

pytestmark = pytest.mark.once

KINDS = [word(kind) for kind in REGISTRIES]
QUICK = ["penalty", "metric", "edit"]
"""Those whose kits are fast; what people write most is in the pages, too."""


def written(kind: str, folder: Path, name: str = "") -> Path:
    name = name or f"fresh_{kind}"
    done = works("new-plugin", kind, name, "--output", str(folder))
    assert f"wrote {folder / name}" in done.output
    return folder / name


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(KINDS, marks=pytest.mark.slow)])
def test_packages_pass_their_own_tests_and_a_wrong_one_does_not(
    tmp_path: Path, kinds: list[str]
) -> None:
    site = tmp_path / "site"
    for kind in KINDS:
        install(written(kind, tmp_path), site)
    wrong = written("loss", tmp_path, "wrong_loss")
    module = wrong / "wrong_loss" / "loss.py"
    text = module.read_text("utf-8")
    module.write_text(text.replace("1 + error * error", "1 + op.Abs(error)"), "utf-8")
    install(wrong, site)
    tests = [str(p) for p in sorted(tmp_path.glob("*/tests/test_*.py"))]
    assert len(tests) == len(KINDS) + 1
    # Of the other kinds only whether the package is found.
    chosen = ["wrong_loss", "entry_point", *(f"fresh_{kind}" for kind in kinds)]
    call = [*PYTEST, "--import-mode=importlib", "-k", " or ".join(chosen), *tests]
    done = run(call, tmp_path, site)
    failed = re.findall(r"^FAILED \S+?::(\w+)::(\w+)", done.stdout, re.M)
    named = [("TestWrongLoss", n) for n in ("test_value", "test_scores_of_0_and_100")]
    assert failed == named, done.stdout[-5000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])  # type: ignore[index]
    assert passed >= 10 * len(kinds)
    # No skip hides that a kit had nothing to check: two of a callback that ends the training early, one of
    # data that are read at once, two of a transform that takes every gradient as it is.
    skipped = re.search(r"(\d+) skipped", done.stdout)
    assert skipped is None or int(skipped[1]) <= 5
    listed = run(["ortflex_plugins.cli.main", "plugins"], tmp_path, site).stdout
    assert {kind for kind in KINDS if f"fresh_{kind}" in listed} == set(KINDS)


def test_the_code_follows_the_rules_of_ruff(tmp_path: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    for kind in KINDS:
        written(kind, tmp_path)
    source = f"src = {[str(p) for p in tmp_path.iterdir()]}"
    rules = ["--isolated", "--select", "E,F,I,W,UP,B", "--line-length", "100", "--config", source]
    checked = run(["ruff", "check", *rules, "."], tmp_path, tmp_path)
    assert checked.returncode == 0, checked.stdout
    formatted = ["format", "--isolated", "--check", "--line-length", "100", "."]
    assert run(["ruff", *formatted], tmp_path, tmp_path).returncode == 0


def test_what_is_written(tmp_path: Path) -> None:
    package = written("gradient", tmp_path)
    files = sorted(p.relative_to(package).as_posix() for p in package.rglob("*.*"))
    assert files == [
        "README.md",
        "fresh_gradient/__init__.py",
        "fresh_gradient/gradient.py",
        "pyproject.toml",
        "tests/test_fresh_gradient.py",
    ]
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == "fresh-gradient"
    points = {"ortflex.gradients": {"fresh_gradient": "fresh_gradient.gradient:RULES"}}
    assert project["entry-points"] == points
    for path in package.rglob("*.*"):
        assert "$" not in path.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["los", "mine"], "unknown kind of plugin 'los'; did you mean 'loss'?"),
        (["loss", "My-Loss"], "'My-Loss' cannot be the name of a package; .* example 'my_loss'"),
        (["loss", "class"], "'class' cannot be the name of a package; .* example 'my_loss'"),
        (["loss", "json"], "a module 'json' is already installed"),
        (["loss", "huber"], "a loss 'huber' is already installed, from ortflex"),
    ],
)
def test_what_it_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, refused("new-plugin", *arguments, "--output", str(tmp_path)).output)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fresh_loss").mkdir()
    done = refused("new-plugin", "loss", "fresh_loss", "--output", str(tmp_path))
    assert "exists and was not changed" in done.output
    assert not list((tmp_path / "fresh_loss").iterdir())


@pytest.mark.slow
def test_pip_installs_what_is_written(tmp_path: Path) -> None:
    for module in ("pip", "hatchling"):
        pytest.importorskip(module)
    package = written("loss", tmp_path)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    done = run(["pip", "install", *options, str(package)], tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(PYTEST, package, tmp_path / "site")
    assert done.returncode == 0, done.stdout[-3000:]


# ---------------------------------------------------------------------- new-flower-app, without Flower

RECIPE = 'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\n'


def test_the_project_has_a_client_a_server_and_the_recipe(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE + 'callbacks = ["csv_log"]\noutput = "run"\nlearning_rate = 0.5\n')
    folder = tmp_path / "my-app"
    done = works("new-flower-app", str(tmp_path / "train.toml"), "--output", str(folder))
    assert "flwr run" in done.output
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "my_app.server_app:app",
        "clientapp": "my_app.client_app:app",
    }
    assert app["config"]["output"] == str(folder / "trained.onnx")
    for name in ("client_app", "server_app"):
        tree = ast.parse((folder / "my_app" / f"{name}.py").read_text())
        assert any(isinstance(n, ast.Assign) and n.targets[0].id == "app" for n in tree.body)  # type: ignore[attr-defined]
    recipe = Recipe.load(folder / "my_app" / "train.toml")
    assert (recipe.model, recipe.data) == (str(tmp_path / "model.onnx"), str(tmp_path / "data.npz"))
    assert (recipe.learning_rate, recipe.callbacks, recipe.output) == (0.5, (), None)
    again = refused("new-flower-app", str(tmp_path / "train.toml"), "--output", str(folder))
    assert "exists and was not changed" in again.output


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (RECIPE + "epoch = 3\n", "app", "did you mean 'epochs'"),
        (RECIPE + 'averaging = "ema"\n', "app", "averaging: the averages of a client"),
        (RECIPE + 'distributed = "torch"\n', "app", "distributed: a client trains in one process"),
        (RECIPE, "my_app", "cannot be the name of a project"),
        (RECIPE, "a" * 40, "at most 32"),
    ],
)
def test_wrong_recipes_and_names_write_nothing(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    prepare(tmp_path, text)
    done = refused("new-flower-app", str(tmp_path / "train.toml"), "-o", str(tmp_path / name))
    assert words in done.output
    assert not (tmp_path / name).exists()


def test_without_flower_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_plugins.flower import client_app, server_app

    monkeypatch.setitem(sys.modules, "flwr", None)
    for make in (lambda: client_app(lambda context: ()), lambda: server_app("model.onnx")):
        with pytest.raises(ConfigError, match=r"Flower is not installed: pip install .*\["):
            make()


# ---------------------------------------------------------------------- pages, followed

PAGES = sorted((ROOT / "docs" / "howto").glob("write-a*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\S+/\S+\.py)\n")
EXTENSIONS = "onnxruntime_extensions"


@attrs.define
class Reader:
    """Somebody who does what a page says, in a folder of their own."""

    folder: Path
    tested: list[str] = attrs.field(factory=list)
    without: bool = False
    """Whether the rest of the page needs something that is not installed here."""

    def read(self, page: Path) -> None:
        self.without = False
        for language, text in BLOCK.findall(page.read_text("utf-8")):
            if language == "bash":
                for line in text.splitlines():
                    if not self.without:
                        self.type(line)
            elif self.without:
                continue
            elif language == "python" and (found := FILE.match(text)):
                path = self.folder / found[1]
                # Files of the package take the place of what new-plugin wrote.
                assert path.exists(), f"{page.name}: {found[1]} is none of the files there are"
                path.write_text(text, "utf-8")

    def type(self, line: str) -> None:
        command, *words = shlex.split(line)
        if command == "ortflex":
            works(*words)
        elif [command, *words] == ["pip", "install", "onnxruntime-extensions"]:
            self.without = importlib.util.find_spec(EXTENSIONS) is None
        elif [command, *words[:2]] == ["pip", "install", "-e"]:
            assert (self.folder / words[2].removesuffix("[test]") / "pyproject.toml").is_file()
        elif command == "pytest":
            self.tested += words
        else:
            raise AssertionError(f"nobody knows how to run {line!r}")


def test_there_is_a_page_for_what_people_write() -> None:
    names = {p.stem.removeprefix("write-a-").removeprefix("write-an-") for p in PAGES}
    formulas = {"loss", "optimizer", "transform", "gradient-rule", "penalty", "constraint"}
    formulas |= {"schedule", "average"}
    assert names >= formulas | {"backend", "callback", "metric", "data-source", "device"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_formula_is_longer_than_fifteen_lines(page: Path) -> None:
    for text in (t for kind, t in BLOCK.findall(page.read_text("utf-8")) if kind == "python"):
        bodies = r"^ *def (?:(?!test_)\w)+\(.*?(?=^\S|^ *@|^ *def |\Z)"
        for body in re.findall(bodies, text, re.M | re.S):
            assert len(body.strip().splitlines()) <= 15, body


def test_followed_word_by_word_every_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    for page in PAGES:
        reader.read(page)
    # The page about the checks themselves is a module of tests.
    blocks = BLOCK.findall((PAGES[0].parent / "test-a-plugin.md").read_text("utf-8"))
    code = "\n".join(text for language, text in blocks if language == "python")
    (tmp_path / "test_page.py").write_text(code, "utf-8")
    reader.tested.append("test_page.py")
    packages = sorted({p.parent for p in tmp_path.glob("*/pyproject.toml")})
    for package in packages:
        assert package.name in reader.tested, f"{package.name} is never tested"
        install(package, tmp_path / "site")
    call = [*PYTEST, "--import-mode=importlib", *sorted(set(reader.tested))]
    done = run(call, tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert len(packages) >= 11
    assert re.search(r"\d+ passed", done.stdout)

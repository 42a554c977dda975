"""``ortflex new-plugin`` writes packages that pass the kits of their kinds as they stand."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from ortflex_core import KINDS as REGISTRIES
from ortflex_plugins.cli.completion import word
from tests.plugins.commands import refused, works
from tests.plugins.conformance_installed import PYTEST, install, run

pytestmark = pytest.mark.once

KINDS = [word(kind) for kind in REGISTRIES]
QUICK = ["penalty", "metric", "edit"]
"""Those whose kits are fast; what people write most is in test_conformance_howtos.py, too."""


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

"""The code in README and docs runs as it stands, and the links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core.config import Recipe
from ortflex_core.registry import Plugins
from ortflex_core.runtime import require_runtime

ROOT = Path(__file__).parents[2]
# The reference is generated, its examples are doctests.
REFERENCE = ROOT / "docs" / "reference"
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if REFERENCE not in p.parents),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
ROWS = 40


def network(outputs: int, head: str) -> onnx.ModelProto:
    """X [N, 4] -> 8 tanh units -> ``head``."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] X) => (float[N, {outputs}] Y)
        {{ p0 = MatMul(X, w0)  s0 = Add(p0, b0)  hidden = Tanh(s0)
           p1 = MatMul(hidden, w1)  {head} }}"""
    )
    rng = np.random.default_rng(0)
    shapes = {"w0": (4, 8), "b0": (8,), "w1": (8, outputs), "b1": (outputs,)}
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) / 2).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The current folder with the files that the pages speak of; returns the names they use."""
    registry = Plugins.discover()["backends"]
    runtime = require_runtime()
    if all(registry.load(name).available(runtime) for name in registry.names()):
        pytest.skip(f"no backend works with {runtime}")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    onnx.save(network(1, "Y = Add(p1, b1)"), "model.onnx")
    head = "scores = Add(p1, b1)  Y = Softmax<axis=-1>(scores)"
    onnx.save(network(3, head), "classifier.onnx")
    np.savez("data.npz", X=x, y=y)
    kinds = rng.integers(0, 3, ROWS)
    return {"X": x, "y": y, "kinds": kinds, "hidden": np.zeros((ROWS, 8), np.float32)}


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def needs(page: Path) -> None:
    text = "".join(blocks(page, "python"))
    for module in ("sklearn", "skl2onnx", "torch", "onnxruntime_extensions"):
        if re.search(rf"^(import|from) {module}\b", text, re.M):
            pytest.importorskip(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_runs_and_toml_trains(page: Path, workplace: dict[str, object]) -> None:
    needs(page)
    names = dict(workplace)
    for code in blocks(page, "python"):
        if re.match(r"# \S+/tests/\S+\.py\n", code):
            continue  # of a package that is not installed: tests/plugins/test_conformance_howtos.py
        exec(compile(code, str(page), "exec"), names)
    plugins = Plugins.discover()
    for text in blocks(page, "toml"):
        if "model" not in tomllib.loads(text):
            continue  # a part of a pyproject.toml
        Path("page.toml").write_text(text, "utf-8")
        recipe = Recipe.load("page.toml", ["epochs=2"], plugins)
        assert len(recipe.run(recipe.trainer(plugins))) == 2


def test_the_example_file_is_the_demo(tmp_path: Path) -> None:
    # What it names is made by the demo; in a clean clone there is nothing yet.
    copy = tmp_path / "docs" / "examples" / "digits.toml"
    copy.parent.mkdir(parents=True)
    text = (ROOT / "docs" / "examples" / "digits.toml").read_text("utf-8")
    copy.write_text(text, "utf-8")
    for name in ("model", "data", "validation"):
        made = copy.parent / tomllib.loads(text)[name]
        made.resolve().parent.mkdir(parents=True, exist_ok=True)
        made.touch()
    recipe = Recipe.load(copy)
    assert (recipe.loss, recipe.optimizer, recipe.epochs) == ("softmax_cross_entropy", "adam", 60)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_example_has_its_place_and_says_its_versions() -> None:
    order = re.findall(
        r'^    "(plot_\w+\.py)",$', (ROOT / "docs" / "conf.py").read_text("utf-8"), re.M
    )
    examples = {p.name: p.read_text("utf-8") for p in (ROOT / "docs/examples").glob("plot_*.py")}
    assert sorted(order) == sorted(examples)
    for name, text in examples.items():
        assert re.search(r"^show_versions\(.*\)\n\Z", text, re.M), name
        assert "plt." in text, name


def test_readme_names_what_there_is() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    ours = [
        (registry.kind, entry.name)
        for registry in Plugins.discover()
        for entry in registry
        if entry.distribution == "ortflex" and registry.kind not in ("gradients", "callbacks")
    ]
    assert [pair for pair in ours if not re.search(rf"\b{pair[1]}\b", readme)] == []


def cells(line: str) -> list[str]:
    """A row of a table, without bold, slant and what was to be reached."""
    return [re.sub(r" ≥ .*|[*]| ×", "", cell).strip() for cell in line.strip("| ").split("|")]


def test_figures_in_readme_are_those_of_the_page_about_performance() -> None:
    measured = {}
    for line in (ROOT / "docs/explanation/performance.md").read_text("utf-8").splitlines():
        if re.match(r"\| W\d \S", line) and len(found := cells(line)) == 8:
            name, ours, torch, _, sklearn, _, _, jax = found
            measured[name[:2]] = [ours, torch, sklearn, jax]
    shown = {
        line[2:4]: cells(line)[1:]
        for line in (ROOT / "README.md").read_text("utf-8").splitlines()
        if re.match(r"\| W\d: ", line)
    }
    assert len(shown) >= 4
    assert shown == {name: measured[name] for name in shown}

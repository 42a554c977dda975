"""The code in README and docs runs as it stands, the links lead somewhere, and so does the demo."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import Plugins, Recipe, Trainer, require_runtime
from tests import models
from tests.core import public_names

pytestmark = pytest.mark.per_python

ROOT = Path(__file__).parents[2]
# The reference is generated, its examples are doctests.
REFERENCE = ROOT / "docs" / "reference"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if REFERENCE not in p.parents),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
ROWS = 40


def network(outputs: int, head: str) -> onnx.ModelProto:
    """X [N, 4] -> 8 tanh units -> ``head``."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (4, 8), "b0": (8,), "w1": (8, outputs), "b1": (outputs,)}
    return models.parsed(
        f"p0 = MatMul(X, w0)  s0 = Add(p0, b0)  hidden = Tanh(s0)  p1 = MatMul(hidden, w1)  {head}",
        {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()},
        "float[N, 4] X",
        f"float[N, {outputs}] Y",
    )


def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the weight w0 in int8, as quantizers write it."""
    (tensor,) = [t for t in model.graph.initializer if t.name == "w0"]
    scale = np.float32(np.abs(numpy_helper.to_array(tensor)).max() / 127)
    codes = np.rint(numpy_helper.to_array(tensor) / scale).astype(np.int8)
    node = onnx.helper.make_node("DequantizeLinear", ["w0_quantized", "w0_scale"], ["w0"])
    model.graph.initializer.remove(tensor)
    model.graph.initializer.append(numpy_helper.from_array(codes, "w0_quantized"))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(scale), "w0_scale"))
    model.graph.node.insert(0, node)
    return model


@pytest.fixture(scope="module")
def some_backend() -> None:
    registry, runtime = Plugins.discover()["backends"], require_runtime()
    if all(registry.load(name).available(runtime) for name in registry.names()):
        pytest.skip(f"no backend works with {runtime}")


@pytest.fixture
def workplace(
    some_backend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """The current folder with the files that the pages speak of; returns the names they use."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    onnx.save(network(1, "Y = Add(p1, b1)"), "model.onnx")
    head = "scores = Add(p1, b1)  Y = Softmax<axis=-1>(scores)"
    onnx.save(network(3, head), "classifier.onnx")
    onnx.save(quantized(network(3, head)), "classifier.int8.onnx")
    np.savez("data.npz", X=x, y=y)
    kinds = rng.integers(0, 3, ROWS)
    return {"X": x, "y": y, "kinds": kinds, "hidden": np.zeros((ROWS, 8), np.float32)}


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def needs(page: Path) -> None:
    text = "".join(blocks(page, "python"))
    for module in ("sklearn", "skl2onnx", "torch", "onnxruntime_extensions", "optuna"):
        if re.search(rf"^(import|from) {module}\b", text, re.M):
            pytest.importorskip(module)
    if "ortflex_plugins.flower" in text:
        pytest.importorskip("flwr")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_runs_and_toml_trains(page: Path, workplace: dict[str, object]) -> None:
    needs(page)
    names = dict(workplace)
    for code in blocks(page, "python"):
        if re.match(r"# \S+/tests/\S+\.py\n", code):
            continue  # of a package that is not installed: tests/plugins/test_cli_new_projects.py
        if file := re.match(r"# (\w+\.py)\n", code):
            Path(file[1]).write_text(code, "utf-8")
        exec(compile(code, str(page), "exec"), names)
    plugins = Plugins.discover()
    for text in blocks(page, "toml"):
        if "model" not in tomllib.loads(text):
            continue  # a part of a pyproject.toml
        Path("page.toml").write_text(text, "utf-8")
        recipe = Recipe.load("page.toml", ["epochs=2"], plugins)
        assert len(recipe.run(Trainer.from_recipe(recipe, plugins))) == 2


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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_fits_next_to_the_navigation(page: Path) -> None:
    """In 72 columns, without a scrollbar; what programs print (text, console) is as wide as it is."""
    if page.parent.name == "development":
        return
    fence = r"^```(?:\{code-block\} )?(?:python|py|toml|bash|sh|c|cpp|csharp)\n(.*?)^```$"
    code = re.findall(fence, page.read_text("utf-8"), re.M | re.S)
    wide = [line for block in code for line in block.splitlines() if len(line) > 72]
    assert not wide


def script(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / f"{name}.py")))


def test_the_picture_of_packages_has_every_package_and_runs_one_way() -> None:
    """A package that is added, or an import that turns around, cannot be left out of the picture."""
    level = script("draw_architecture").packages()
    titles = [item.title for item in level.items]
    folders = {p.parent.name for p in (ROOT / "ortflex_core").glob("*/__init__.py")}
    assert folders <= set(titles)
    assert len(titles) == len(set(titles))
    assert all(above < below for above, below in level.edges)
    assert (titles.index("kernel"), titles.index("compiler")) in level.edges
    assert titles[-1] == "ortflex"


def test_the_reference_describes_every_public_name() -> None:
    """By signature and docstring, which a name without a directive would lack; a class on its own page."""
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    pages = script("api_pages")
    for modules in public_names.MODULES.values():
        for module, names in modules.items():
            files = pages.page(module, names)
            loaded = importlib.import_module(module)
            known = set(names or loaded.__all__) - {"__version__"}
            text = "".join(files.values())
            missing = [name for name in known if not re.search(rf"\.{name}[`\n]", text)]
            assert missing == [], module
            for name in known if module != "ortflex" else ():
                if pages.has_page(module, getattr(loaded, name)):
                    assert f".. autoclass:: {module}.{name}\n" in files[f"{module}/{name}.md"]


@pytest.mark.slow
def test_the_pictures_are_those_of_the_code() -> None:
    drawn = script("draw_architecture")
    for name, text in drawn.pictures().items():
        written = (drawn.FOLDER / name).read_text("utf-8")
        assert written == text, "run python docs/draw_architecture.py"


def test_every_example_has_its_place_and_runs_where_it_is_copied_to() -> None:
    """Those of the older package, and the comparison of backends, share a helper."""
    order = re.findall(
        r'^    "(plot_\w+\.py)",$', (ROOT / "docs" / "conf.py").read_text("utf-8"), re.M
    )
    paths = list((ROOT / "docs/examples").rglob("plot_*.py"))
    assert sorted(order) == sorted(path.name for path in paths)
    for path in paths:
        text = path.read_text("utf-8")
        assert "plt." in text, path.name
        if path.parent.name != "onnxcustom" and path.name != "plot_benchmark_backends.py":
            assert "example_tools" not in text, path.name


def test_every_page_is_in_a_table_and_in_the_navigation() -> None:
    """Of "Use" or of "Extend", so that a reader who does not search finds it."""
    docs = ROOT / "docs"
    tables, navigation = set(), set()
    for index in (docs / "howto" / "index.md", docs / "extend" / "index.md"):
        text = index.read_text("utf-8")
        trees = re.findall(r"```\{toctree\}.*?```", text, re.S)
        entries = [line.split("<")[-1].rstrip(">") for tree in trees for line in tree.splitlines()]
        navigation |= {(index.parent / entry).resolve().stem for entry in entries}
        links = re.findall(r"\]\(([^)#]+)", re.sub(r"```\{toctree\}.*?```", "", text, flags=re.S))
        tables |= {Path(link).stem for link in links}
    for folder, in_tables in (("howto", True), ("explanation", False), ("development", False)):
        pages = {p.stem for p in (docs / folder).glob("*.md")} - {"index"}
        assert pages - navigation == set()
        assert not in_tables or pages - tables == set()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_figures_in_readme_are_those_of_the_page_about_performance() -> None:
    shown, measured = (
        [
            cells(line)
            for line in (ROOT / page).read_text("utf-8").splitlines()
            if re.match(r"\| W\d \S", line)
        ]
        for page in ("README.md", "docs/explanation/performance.md")
    )
    assert len(shown) >= 8
    assert [row for row in shown if row not in measured] == []


def test_readme_is_short_and_has_one_picture() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 100
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert [path for path in pictures if (ROOT / path).is_file()] == pictures
    assert len(pictures) == 1


def test_pages_that_grow_stay_short() -> None:
    pages = ROOT / "docs" / "explanation"
    assert len((pages / "performance.md").read_text("utf-8").split()) <= 1200
    assert len((pages / "architecture.md").read_text("utf-8").splitlines()) <= 200


def test_the_glossary_is_in_order_and_names_a_word_once() -> None:
    text = (REFERENCE / "glossary.md").read_text("utf-8")
    words = re.findall(r"^\| ([A-Za-z][\w -]*) \|", text, re.M)[1:]
    assert words == sorted(set(words), key=str.lower)
    assert len(words) > 30


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    """A message that was reworded would not be found by who searches for it."""
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text("utf-8")
    packages = [ROOT / "ortflex_core", ROOT / "ortflex_plugins"]
    code = "\n".join(p.read_text("utf-8") for top in packages for p in top.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    quoted = [q for row in re.findall(r"^\| `(.+?)` \|", page, re.M) for q in row.split("`, `")]
    assert len(quoted) > 8
    for text in quoted:
        pieces = [p.strip() for p in re.split(r"…|'\w+'|\d+", text)]
        assert all(piece in code for piece in pieces), text


# The demo: better on what it is fine-tuned for ----------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def accuracies(some_backend: None, folder: Path) -> dict[str, float]:
    for module in ("sklearn", "skl2onnx", "matplotlib"):
        pytest.importorskip(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        demo = runpy.run_path(str(ROOT / "docs" / "examples" / "demo.py"))
        return dict(demo["main"](["--folder", str(folder), "--epochs", "15"]))


def test_fine_tuning_brings_back_what_the_scanner_took(accuracies: dict[str, float]) -> None:
    assert accuracies["before"] < 0.5
    assert accuracies["after"] > 0.85
    assert accuracies["clean_after"] > 0.9


def test_the_exported_file_is_as_good_in_onnxruntime(
    folder: Path, accuracies: dict[str, float]
) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        folder / "trained.onnx", providers=["CPUExecutionProvider"]
    )
    with np.load(folder / "test.npz") as test:
        [label] = session.run(["label"], {session.get_inputs()[0].name: test["X"]})
        assert np.mean(label == test["y"]) == pytest.approx(accuracies["after"])


def test_the_history_has_one_line_an_epoch(folder: Path, accuracies: dict[str, float]) -> None:
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) / 2
    assert {"validation_loss", "validation_accuracy", "rate"} <= set(rows[0])


def test_the_picture_is_there(folder: Path, accuracies: dict[str, float]) -> None:
    picture = (folder / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000

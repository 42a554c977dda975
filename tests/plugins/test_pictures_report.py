"""The page of a run folder and of a Trainer, and the measures that it shows."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import History, OrtflexError, Trainer
from ortflex import report as write_report
from ortflex_core import ConfigError, run_ranks
from ortflex_plugins.pictures import charts
from ortflex_plugins.pictures.measure import Measures, histogram
from ortflex_plugins.pictures.pages import page_of_folder as report
from tests import models
from tests.plugins.commands import ortflex, prepare, works
from tests.training import make, regression, results, same

pytestmark = pytest.mark.once

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
penalty = { name = "l2", l2 = 0.1 }
validation = 0.25
metrics = ["rmse"]
epochs = 4
batch_size = 8
output = "run"
progress = false
"""
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b" + "n/" * 40_000


class Page(HTMLParser):
    """Tags and texts of a page, as a browser takes them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a finished training in ``run``."""
    prepare(tmp_path, RECIPE)
    monkeypatch.chdir(tmp_path)
    result = ortflex("train", "train.toml")
    if "no backend" in result.output:
        pytest.skip(result.output)
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def test_the_page_shows_what_was_trained(folder: Path) -> None:
    works("report", str(folder))
    page = Page((folder / "report.html").read_text("utf-8"))
    words = "\n".join(page.words)
    for heading in (
        "Loss", "Validation: rmse", "Learning rate", "Gradient norm", "Seconds per epoch",
        "Time of the parts of a step", "coef 5×1", "Graph", "Recipe", "Versions",
    ):  # fmt: skip
        assert heading in words, heading
    assert 'penalty = { name = "l2", l2 = 0.1 }' in words
    for part in ("forward", "loss", "backward", "penalty", "update"):
        assert part in page.words
    assert "MatMul" in words or "Gemm" in words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.03195, "31.95 ms, 75%"), (2.5e-5, "25 µs, 75%"), (1.5, "1.5 s, 75%")]
)
def test_times_of_the_parts_have_a_unit_that_fits(folder: Path, seconds: float, words: str) -> None:
    measures = json.loads((folder / "measures.json").read_text())
    measures["parts"] = {"forward": seconds, "loss": seconds / 3}
    (folder / "measures.json").write_text(json.dumps(measures))
    assert words in Page(report(folder)).words


def test_the_page_loads_nothing(folder: Path) -> None:
    page = Page(report(folder))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    styles = [w for w in page.words if "url(" in w or "@import" in w]
    assert not styles


def test_texts_of_files_are_escaped(folder: Path) -> None:
    clean_tags = [tag for tag, _ in Page(report(folder)).tags]
    names = {"coef": NASTY + "c", "X": NASTY + "x"}
    model = models.renamed(onnx.load(folder / "trained.onnx"), names)
    onnx.save(model, folder / "trained.onnx")
    measures = json.loads((folder / "measures.json").read_text())
    measures["weights"][0]["name"] = NASTY
    measures["notes"] = [NASTY]
    (folder / "measures.json").write_text(json.dumps(measures))
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps({**versions, NASTY: {NASTY: NASTY}}))
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe + f"\nname = '{NASTY}'\n")
    text = report(folder)
    tags = [tag for tag, _ in Page(text).tags]
    assert tags.count("script") == clean_tags.count("script")
    assert "img" not in tags
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert len(text) < 200_000


def test_missing_measures_and_models_are_left_out(folder: Path) -> None:
    for name in ("measures.json", "trained.onnx", "versions.json"):
        (folder / name).unlink()
    (folder.parent / "model.onnx").unlink()
    words = Page(report(folder)).words
    assert "Loss" in words
    assert "Gradient norm" not in words
    assert "Graph" not in words


def test_measures_of_later_epochs_stand_at_their_epochs(folder: Path) -> None:
    path = folder / "measures.json"
    measures = json.loads(path.read_text())
    whole = report(folder).count("<circle")
    path.write_text(json.dumps({**measures, "epochs": measures["epochs"][2:]}))
    # Two points fewer of the gradient norms, two of the seconds of validation.
    assert report(folder).count("<circle") == whole - 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("history.csv", "epoch,loss\n1,much\n", "is not a History: could not convert"),
        ("measures.json", "{", "is not JSON"),
        ("measures.json", "[]", "expected an object, got list"),
        ("measures.json", '{"weights": [{"name": 1}]}', "a histogram is broken: KeyError"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str, says: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        report(folder)
    assert name in str(caught.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    result = ortflex("report", str(tmp_path))
    assert result.exit_code == 1
    assert "is not a run folder: expected a folder with recipe.toml" in result.output


def measured(**options: Any) -> tuple[dict[str, Any], Any, Any]:
    x, y = regression()
    measures = Measures()
    settings = {"backend": "fused", "batch_size": 8, "epochs": 3, "learning_rate": 0.05}
    trainer = make(models.linear(), callbacks=[measures], **settings, **options)
    trainer.fit(x, y)
    return measures.content(), trainer, (x, y)


def test_the_gradient_norm_is_that_of_the_first_batch() -> None:
    content, trainer, (x, y) = measured(penalty={"name": "l2", "l2": 0.25})
    weights = {n: a.astype(np.float64) for n, a in trainer.get_state().items()}
    x, y = x[:8].astype(np.float64), y[:8].astype(np.float64)
    error = 2 * (x @ weights["coef"] + weights["intercept"] - y) / 8
    coef = x.T @ error + 0.5 * weights["coef"]
    intercept = error.sum(axis=0) + 0.5 * weights["intercept"].reshape(-1)
    norm = np.sqrt((coef**2).sum() + (intercept**2).sum())
    assert content["epochs"][-1]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("shard", [False, True])
def test_one_of_several_processes_measures(shard: bool) -> None:
    """The same norms as in one process, without the parts of the state that the others keep."""

    def job(group: Any) -> dict[str, Any]:
        return measured(distributed=group, shard_state=shard, optimizer="adam")[0]

    first, second = results(run_ranks(2, job))
    alone = measured(accumulate=2, optimizer="adam")[0]
    assert first["epochs"] == alone["epochs"]
    assert first["parts"].keys() == alone["parts"].keys()
    assert not second["epochs"]


def test_every_part_of_the_step_takes_time() -> None:
    content, _, _ = measured(penalty="l2")
    assert list(content["parts"]) == ["forward", "loss", "backward", "penalty", "update"]
    assert all(0 < seconds < 1 for seconds in content["parts"].values())
    assert [e["epoch"] for e in content["epochs"]] == [1, 2, 3]


def test_histograms_count_every_weight_before_and_after() -> None:
    content, trainer, _ = measured()
    first = trainer.model.initializer("coef")
    (entry,) = [w for w in content["weights"] if w["name"] == "coef"]
    for key, array in (("before", first), ("after", trainer.get_state()["coef"])):
        assert sum(entry[key]) == array.size
        expected, _ = np.histogram(array, len(entry[key]), (entry["low"], entry["high"]))
        assert entry[key] == expected.tolist()


def test_weights_that_are_all_the_same_have_a_histogram() -> None:
    made = histogram("w", np.full(9, 2.0), np.full(9, 2.0))
    assert sum(made["before"]) == sum(made["after"]) == 9


def test_a_line_goes_through_its_values() -> None:
    made = charts.lines({"a": [0.0, 1.0, 0.5]}, log=False)
    y = [float(v) for v in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', made)]
    assert y[0] > y[2] > y[1]
    assert y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.1)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1.0), (3e-7, 2e5), (1e-300, 1e300), (0.9, 11)])
def test_a_logarithmic_axis_has_a_few_powers_of_ten(low: float, high: float) -> None:
    ticks = charts._Scale(low, high, log=True).ticks
    assert 2 <= len(ticks) <= 7
    powers = np.log10(ticks)
    np.testing.assert_allclose(powers, powers.round(), atol=1e-9)
    steps = np.diff(powers).round()
    assert set(steps) == {steps[0]}
    assert low * 0.99 <= ticks[0] < low * 10.01 ** steps[0]
    assert high / 10.01 ** steps[0] < ticks[-1] <= high * 1.01


@pytest.mark.parametrize(
    "values", [[], [float("nan")], [None, 1.0, None], [0.0], [1e300, 1e-300], [-3.0, 5.0] * 900]
)
def test_charts_of_odd_values_stay_in_their_frame(values: list[float | None]) -> None:
    made = charts.lines({"a": values, "b": values})
    assert "nan" not in made
    for y in re.findall(r'cy="(-?[\d.]+)"', made):
        assert 0 <= float(y) <= 230


def test_every_line_of_a_comparison_has_its_own_style_and_the_legend_has_them_all() -> None:
    names = [f"run {k}" for k in range(20)]
    chart = charts.lines({n: [float(k), k + 1.0] for k, n in enumerate(names)}, legend=False)
    drawn = re.findall(r'<path d="M[^"]*" fill="none" (stroke="[^>]*?) stroke-width', chart)
    legend = charts.legend(names)
    named = re.findall(r'<path d="M0 4H24" stroke-width="3" (stroke="[^>]*?)/></svg>', legend)
    assert drawn == named
    assert len(set(named)) == len(names)
    assert [n for n in names if f"{n}</span>" not in legend] == []
    assert not [n for n in names if n in chart]


def test_a_line_that_hides_another_is_dashed_so_that_both_show() -> None:
    chart = charts.lines({"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [1.0, 1.5], "d": [None, 2.0]})
    drawn = re.findall(r'<path d="M[^"]*" fill="none" [^>]*>', chart)
    dashed = ["dasharray" in line for line in drawn]
    assert dashed == [False, True, False, True]


def test_the_results_before_the_training_are_those_of_the_untrained_model(folder: Path) -> None:
    measured = json.loads((folder / "measures.json").read_text())["begun"]
    assert set(measured) == {"validation_loss", "validation_rmse"}
    # The rows that were held out, by a run that learns nothing.
    still = ("learning_rate=1e-30", "penalty=none", "output=still")
    assert ortflex("train", "train.toml", *still).exit_code == 0
    assert json.loads(Path("still/measures.json").read_text())["begun"] == measured
    text = Path("still/history.csv").read_text().splitlines()
    last = dict(zip(text[0].split(","), text[-1].split(","), strict=True))
    for name, value in measured.items():
        assert float(last[name]) == pytest.approx(value, rel=1e-6)
    words = Page(report(folder)).words
    place = words.index("validation rmse before the training")
    assert float(words[place - 1]) == pytest.approx(measured["validation_rmse"], rel=1e-4)


def test_measuring_changes_no_bit() -> None:
    x, y = regression()
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "metrics": ["rmse"]}
    options |= {"backend": "fused", "optimizer": "adam", "learning_rate": 0.05}
    weights = []
    for callbacks in ([], [Measures()]):
        trainer = make(models.linear(), callbacks=callbacks, **options)
        trainer.fit(x, y, validation_data=0.25)
        weights.append(trainer.get_state())
    same(weights[0], weights[1], 0)


@pytest.mark.parametrize(
    ("seconds", "logarithmic"),
    [([2.0, 0.01, 0.012], False), ([0.5, 0.4], False), ([0.1, 0.001, 5.0], True), ([1.0], False)],
)
def test_seconds_have_a_linear_axis_unless_they_differ_by_far(
    seconds: list[float], logarithmic: bool
) -> None:
    from ortflex_plugins.pictures.pages import _wide

    assert _wide({"steps": seconds, "validation": [None] * len(seconds)}) == logarithmic


def test_settings_are_written_as_a_person_writes_them(folder: Path) -> None:
    other = 'callbacks=[{name="early_stopping", patience=7, monitor="loss"}, "csv_log"]'
    assert ortflex("train", "train.toml", other, "output=other").exit_code == 0
    works("report", "run", "other", "-o", "both.html")
    words = "\n".join(Page(Path("both.html").read_text("utf-8")).words)
    assert "early_stopping (" in words
    assert "patience 7" in words
    page = "\n".join(w for w in Page(report(folder)).words if "numpy" in w and "{" in w)
    for text in (words.split("Where the recipes differ")[1], page):
        assert "{'" not in text
        assert "['" not in text


@pytest.fixture(scope="module")
def reported() -> Trainer:
    made = make(models.mlp(), backend="fused", epochs=3, callbacks=[Measures()], metrics=["mae"])
    made.fit(*regression(features=6), validation_data=0.2)
    return made


def test_the_page_of_a_trainer_has_what_is_known(reported: Trainer, tmp_path: Path) -> None:
    page = write_report(reported, tmp_path / "run.html", title="<My run>")
    assert (tmp_path / "run.html").read_text("utf-8") == page.html
    for part in ("Loss", "Validation: mae", "Gradient norm", "Weights, before and after", "Graph"):
        assert part in page.html
    assert "&lt;My run&gt;" in page.html
    assert "epochs = 3" in page.html
    assert "fused" in page.html
    kept = page.html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in kept


def test_the_page_of_a_history_has_the_curves(reported: Trainer) -> None:
    page = write_report(reported.history_)
    assert "Validation: mae" in page.html
    assert "Graph" not in page.html
    assert "No epoch was finished." in write_report(History()).html
    large = History(({"epoch": 1, "loss": float("inf")}, {"epoch": 2, "loss": 1e300}))
    assert "<svg" in write_report(large).html


def test_a_notebook_shows_the_page_in_a_frame(reported: Trainer) -> None:
    page = write_report(reported.history_)
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert html.unescape(shown.split('srcdoc="')[1].removesuffix('"></iframe>')) == page.html


@pytest.mark.parametrize("what", [3, None, [3], "not-there", []])
def test_other_things_are_refused(what: Any, reported: Trainer, tmp_path: Path) -> None:
    with pytest.raises(OrtflexError):
        write_report(what)
    with pytest.raises(OrtflexError, match="html"):
        write_report(reported.history_, tmp_path / "run.txt")
    assert not list(tmp_path.iterdir())

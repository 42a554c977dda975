"""Families of models and forms of data: what `ortflex init` writes trains, or it refuses with a reason."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.plugins.commands import ortflex, works

pytestmark = pytest.mark.per_python

ROWS = 60
RNG = np.random.default_rng(0)


def model(text: str) -> onnx.ModelProto:
    """A model of onnx's text form; the inputs W, V and bias are random weights of their shapes."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    rng = np.random.default_rng(1)
    for value in [v for v in made.graph.input if v.name in ("W", "V", "bias")]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = (rng.standard_normal(shape) / 2).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, value.name))
        made.graph.input.remove(value)
    return made


HIDDEN = "p = MatMul(x, W) h = Tanh(p) q = MatMul(h, V)"
CONV = "c = Conv(x, W) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p)"
MODELS: dict[str, str] = {
    "linear": "(float[n,4] x, float[4,1] W, float[1] bias) => (float[n,1] y) "
    "{ p = MatMul(x, W) y = Add(p, bias) }",
    "mlp": "(float[n,4] x, float[4,5] W, float[5,1] V, float[1] bias) => (float[n,1] y) "
    f"{{ {HIDDEN} y = Add(q, bias) }}",
    "sigmoid": "(float[n,4] x, float[4,1] W) => (float[n,1] y) { p = MatMul(x, W) y = Sigmoid(p) }",
    "softmax": "(float[n,4] x, float[4,5] W, float[5,3] V) => (float[n,3] y) "
    f"{{ {HIDDEN} y = Softmax(q) }}",
    "scores": "(float[n,4] x, float[4,5] W, float[5,3] V, float[3] bias) => (float[n,3] scores) "
    f"{{ {HIDDEN} scores = Add(q, bias) }}",
    "many scores": "(float[n,4] x, float[4,20] W, float[20] bias) => (float[n,20] y) "
    "{ y = Gemm(x, W, bias) }",
    "fixed batch": "(float[2,4] x, float[4,3] W, float[3] bias) => (float[2,3] logits) "
    "{ logits = Gemm(x, W, bias) }",
    "colors": "(float[n,3,8,8] x, float[4,3,3,3] W, float[4,3] V, float[3] bias) => (float[n,3] y) "
    f"{{ {CONV} s = Gemm(f, V, bias) y = Softmax(s) }}",
    "gray": "(float[n,1,8,8] x, float[4,1,3,3] W, float[4,2] V, float[2] bias) => (float[n,2] y) "
    f"{{ {CONV} y = Gemm(f, V, bias) }}",
    "tokens": "(int64[n,6] input_ids, float[40,5] W, float[5,3] V, float[3] bias) "
    "=> (float[n,3] logits) { e = Gather(W, input_ids) "
    "m = ReduceMean<axes=[1], keepdims=0>(e) logits = Gemm(m, V, bias) }",
    "language": "(int64[n,t] input_ids, float[40,5] W, float[5,40] V) => (float[n,t,40] logits) "
    "{ e = Gather(W, input_ids) h = Tanh(e) logits = MatMul(h, V) }",
    "two inputs": "(float[n,4] a, float[n,4] b, float[4,1] W, float[4,1] V) => (float[n,1] y) "
    "{ p = MatMul(a, W) q = MatMul(b, V) y = Add(p, q) }",
}


def arrays(name: str) -> dict[str, np.ndarray]:
    """Inputs and labels that fit a family of models."""
    flat = RNG.normal(size=(ROWS, 4)).astype(np.float32)
    classes = np.arange(ROWS) % 3
    own: dict[str, Any] = {
        "linear": {"X": flat, "y": flat.sum(1)},
        "mlp": {"X": flat, "y": flat.sum(1)},
        "sigmoid": {"X": flat, "y": (flat.sum(1) > 0).astype(np.int64)},
        "colors": {"X": RNG.normal(size=(ROWS, 3, 8, 8)).astype(np.float32), "y": classes},
        "gray": {"X": RNG.normal(size=(ROWS, 1, 8, 8)).astype(np.float32), "y": classes % 2},
        "tokens": {"X": RNG.integers(0, 40, (ROWS, 6)), "y": classes},
        "two inputs": {"a": flat, "b": flat[:, ::-1], "y": flat.sum(1)},
    }
    ids = RNG.integers(0, 40, (ROWS, 6))
    own["language"] = {"X": ids, "y": (ids * 7 + 1) % 40}
    return own.get(name, {"X": flat, "y": classes})


def npz(folder: Path, given: dict[str, np.ndarray]) -> str:
    np.savez(folder / "d.npz", **given)
    return "d.npz"


def npy(folder: Path, given: dict[str, np.ndarray]) -> str:
    (folder / "d").mkdir()
    for name, array in given.items():
        np.save(folder / "d" / f"{name}.npy", array)
    return "d"


def rows_of(given: dict[str, np.ndarray]) -> tuple[list[str], list[list[Any]]]:
    """The columns side by side, as a table has them."""
    parts = {name: array.reshape(ROWS, -1) for name, array in given.items() if name != "y"}
    names = [f"{name}{k}" for name, part in parts.items() for k in range(part.shape[1])]
    labels = given["y"].reshape(ROWS, -1)
    names += ["y"] if labels.shape[1] == 1 else [f"y{k}" for k in range(labels.shape[1])]
    return names, [list(row) for row in np.hstack([*parts.values(), labels]).tolist()]


def table(folder: Path, given: dict[str, np.ndarray], header: bool, delimiter: str) -> str:
    names, rows = rows_of(given)
    whole = given["y"].dtype.kind in "iu"
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    if header:
        writer.writerow(names)
    for row in rows:
        label = int(row[-1]) if whole else row[-1]
        first = (
            [["Bern", "Oslo", "Rom"][int(abs(row[0]) * 10) % 3]] if delimiter == ";" else row[:1]
        )
        writer.writerow([*first, *row[1:-1], label])
    text = out.getvalue()
    (folder / "d.csv").write_text(text.replace(".", ",") if delimiter == ";" else text)
    return "d.csv"


def plain(folder: Path, given: dict[str, np.ndarray]) -> str:
    return table(folder, given, True, ",")


def headless(folder: Path, given: dict[str, np.ndarray]) -> str:
    return table(folder, given, False, ",")


def semicolons(folder: Path, given: dict[str, np.ndarray]) -> str:
    return table(folder, given, True, ";")


def parquet(folder: Path, given: dict[str, np.ndarray]) -> str:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {}
    for name, array in given.items():
        of_tokens = array.dtype.kind in "iu" and array.ndim == 2
        if name == "y" or of_tokens:
            columns[name] = array.tolist()
        else:
            flat = array.reshape(ROWS, -1)
            columns |= {f"{name}{k}": flat[:, k] for k in range(flat.shape[1])}
    arrow.parquet.write_table(arrow.table(columns), folder / "d.parquet")
    return "d.parquet"


def images(folder: Path, given: dict[str, np.ndarray]) -> str:
    image = pytest.importorskip("PIL.Image")
    for name in ("ant", "bee", "cat"):
        (folder / "photos" / name).mkdir(parents=True)
        for k in range(20):
            pixels = RNG.integers(0, 256, (9, 10, 3), np.uint8)
            image.fromarray(pixels).save(folder / "photos" / name / f"{k}.png")
    return "photos"


def ragged(folder: Path, given: dict[str, np.ndarray]) -> str:
    """Lists of tokens of different lengths, in an arrow file."""
    arrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    lists = [RNG.integers(1, 40, 6 - k % 4).tolist() for k in range(ROWS)]
    feather.write_feather(
        arrow.table({"tokens": lists, "y": (np.arange(ROWS) % 3).tolist()}), folder / "d.arrow"
    )
    return "d.arrow"


FORMS = {
    "npz": npz,
    "npy": npy,
    "csv": plain,
    "headless": headless,
    "semicolons": semicolons,
    "parquet": parquet,
    "images": images,
    "ragged": ragged,
}
FLAT = ("linear", "mlp", "sigmoid", "softmax", "scores", "many scores", "fixed batch")
TRAINS = {
    "npz": tuple(MODELS),
    "npy": tuple(MODELS),
    **dict.fromkeys(("csv", "headless", "semicolons"), FLAT),
    "parquet": (*FLAT, "tokens", "language"),
    "images": ("colors", "gray"),
    "ragged": ("tokens",),
}
"""The families that train with a form; `init` refuses the others, and says why."""
CASES = [(name, form) for name in MODELS for form in FORMS]
DIAGONAL = [
    (name, form) for k, form in enumerate(FORMS) for name in [TRAINS[form][k % len(TRAINS[form])]]
]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(*case, marks=() if case in DIAGONAL else pytest.mark.slow, id="-".join(case))
        for case in CASES
    ],
)
def test_what_init_writes_trains_without_a_warning(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(MODELS[name]), "m.onnx")
    data = FORMS[form](tmp_path, arrays(name))
    target = [] if form != "headless" else ["--target", str(len(rows_of(arrays(name))[0]) - 1)]
    made = ortflex("init", "m.onnx", "--data", data, *target)
    trains = name in TRAINS[form]
    if not trains:
        assert made.exit_code == 1, Path("train.toml").read_text()
        assert not Path("train.toml").exists()
        words = made.output.strip()
        assert words.startswith("error: ")
        assert len(words) > 40
        return
    assert made.exit_code == 0, made.output
    done = works("train", "train.toml", "output=run", "epochs=2")
    assert "warning" not in done.output.lower(), done.output
    assert Path("run/trained.onnx").is_file()

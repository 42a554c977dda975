"""The exported step in C: in several languages, on a microcontroller, and its way back."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import ModelError, Unsupported, apply_state, open_step
from ortflex_plugins.c import compiler
from ortflex_plugins.c.export import export_c
from ortflex_plugins.c.products import Machine
from tests import children, models
from tests.plugins.commands import works
from tests.training import make

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle())),
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "portable_c"
ROWS, STEPS = 8, 9
RNG = np.random.default_rng(5)
X = RNG.standard_normal((ROWS * STEPS, 6)).astype(np.float32)
CLASSES = (X[:, :3].argmax(1)).astype(np.int64)
TARGETS = (X @ RNG.standard_normal((6, 1))).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, ROWS * STEPS).astype(np.float32)
CASES: dict[str, dict[str, Any]] = {
    "classes, adam, schedule": {"optimizer": "adam", "schedule": "cosine"},
    "momentum, penalty, clip_norm": {"optimizer": "momentum", "penalty": "l2", "clip_norm": 0.5},
    "average, weights": {"averaging": "ema", "weights": True},
    "regression, constraint": {"loss": "huber", "constraint": "non_negative", "optimizer": "adamw"},
    "statistics": {"normalized": True, "optimizer": "momentum"},
    "dropout": {"dropout": True, "optimizer": "adam"},
}


def network(outputs: int, normalized: bool = False, dropout: bool = False) -> onnx.ModelProto:
    """Two layers, perhaps with BatchNormalization or Dropout between them, and a Softmax for classes."""
    middle = "H = Relu(A)"
    if normalized:
        middle = "N = BatchNormalization <training_mode = 0> (A, s, o, m, v)\n H = Relu(N)"
    if dropout:
        middle = "D = Relu(A)\n t = Constant <value = bool {1}> ()\n r = Constant <value = float {0.25}> ()"
        middle += "\n H = Dropout (D, r, t)"
    last = "Y = Softmax <axis = 1> (Z)" if outputs > 1 else "Y = Identity (Z)"
    rng = np.random.default_rng(3)
    values = {"W0": rng.standard_normal((6, 8)) / 2, "b0": np.zeros(8)}
    values |= {"W1": rng.standard_normal((8, outputs)) / 2, "b1": np.zeros(outputs)}
    if normalized:
        values |= {"s": np.ones(8), "o": np.zeros(8), "m": np.zeros(8), "v": np.ones(8)}
    body = f"P = MatMul (X, W0) A = Add (P, b0) {middle} Q = MatMul (H, W1) Z = Add (Q, b1) {last}"
    return models.parsed(body, values, outputs=f"float[N, {outputs}] Y")


@functools.cache
def exported(case: str, root: Path) -> tuple[onnx.ModelProto, Path, Path]:
    """The model of a case, its portable step, and its folder of C with a library and a program."""
    options = dict(CASES[case])
    weights = WEIGHTS if options.pop("weights", False) else None
    flags = {k: options.pop(k) for k in ("normalized", "dropout") if k in options}
    classes = options.get("loss") != "huber"
    model = network(3 if classes else 1, **flags)
    defaults = {"loss": "softmax_cross_entropy", "learning_rate": 0.02, "epochs": 2}
    trainer = make(model, **defaults | {"batch_size": ROWS} | options)
    step, folder = root / f"{len(case)}-step", root / f"{len(case)}-c"
    trainer.export_step(step, X, CLASSES if classes else TARGETS, weights, rows=ROWS)
    export_c(step, folder)
    subprocess.run(["make", "-C", folder, "CFLAGS=-O1 -Wall"], check=True, capture_output=True)
    return model, step, folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


def address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Library:
    """The functions of a folder, and a state."""

    def __init__(self, folder: Path) -> None:
        self.functions = ctypes.CDLL(str(folder / "libstep.so"))
        sizes = [self.functions.step_state_bytes, self.functions.step_memory_bytes]
        for size in sizes:
            size.restype = ctypes.c_int64
        self.state, self.memory = (np.zeros(size(), np.uint8) for size in sizes)
        self.functions.step_start(address(self.state))

    def train(self, columns: list[Any], rows: Any, steps: int, settings: Any = None) -> Any:
        losses = np.zeros(steps)
        wrong = self.functions.step_train(
            address(self.state),
            address(self.memory),
            *map(address, columns),
            None if rows is None else address(rows),
            ctypes.c_int64(steps),
            None if settings is None else address(settings),
            address(losses),
        )
        assert not wrong
        return losses

    def predict(self, x: Any, outputs: int) -> Any:
        out = np.zeros((len(x), outputs), np.float32)
        arrays = map(address, (self.state, self.memory, x))
        assert not self.functions.step_predict(*arrays, ctypes.c_int64(len(x)), address(out))
        return out

    def save(self) -> bytes:
        parts: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

        def write(_: Any, start: int, count: int) -> int:
            parts.append(ctypes.string_at(start, count))
            return 0

        assert self.functions.step_save(address(self.state), kind(write), None) == 0
        return b"".join(parts)

    def load(self, content: bytes) -> int:
        place = [0]

        def read(_: Any, start: int, count: int) -> int:
            piece = content[place[0] : place[0] + count]
            ctypes.memmove(start, piece, len(piece))
            place[0] += count
            return len(piece) != count

        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        return int(self.functions.step_load(address(self.state), kind(read), None))


def onnxruntime_steps(
    step: Path, columns: list[Any], rows: Any
) -> tuple[list[float], dict[str, Any]]:
    """The losses of steps on onnxruntime, and the state after them."""
    portable = open_step(step)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(portable.step), options)
    names = [o.name for o in session.get_outputs()]
    state = {n: a for n, a in portable.state.arrays.items() if n in portable.manifest.state}
    items = [i for i in portable.manifest.step if i.role in ("data", "label", "sample_weight")]
    losses = []
    for batch in rows.reshape(-1, ROWS):
        given = {
            str(i.name): c[batch].reshape(i.shape) for i, c in zip(items, columns, strict=True)
        }
        found = dict(zip(names, session.run(None, {**state, **given}), strict=True))
        state = {n: found[str(i.new)] for n, i in portable.manifest.state.items()}
        losses.append(float(found["loss"]))
    return losses, state


def columns_of(case: str) -> list[Any]:
    labels = TARGETS if CASES[case].get("loss") == "huber" else CLASSES
    return [X, labels, *([WEIGHTS] if CASES[case].get("weights") else [])]


@pytest.mark.parametrize("case", CASES)
def test_the_steps_are_those_of_onnxruntime(case: str, root: Path, tmp_path: Path) -> None:
    model, step, folder = exported(case, root)
    library, columns = Library(folder), columns_of(case)
    rows = np.random.default_rng(0).permutation(len(X))
    losses = library.train(columns, rows, STEPS)
    expected, state = onnxruntime_steps(step, columns, rows)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    (tmp_path / "state.safetensors").write_bytes(library.save())
    # The file is that of a runner: its tensors, and a model with its weights.
    shutil.copytree(step, tmp_path / "step")
    shutil.copy(tmp_path / "state.safetensors", tmp_path / "step")
    found = open_step(tmp_path / "step").state.arrays
    for name, array in state.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-6, err_msg=name)
    assert found["step"] == STEPS
    onnx.save(model, tmp_path / "model.onnx")
    apply_state(tmp_path / "model.onnx", tmp_path / "state.safetensors", tmp_path / "trained.onnx")
    trained = models.predict(onnx.load(tmp_path / "trained.onnx"), {"X": X})["Y"]
    predicted = library.predict(X, trained.shape[1])
    if "dropout" not in case:
        np.testing.assert_allclose(predicted, trained, rtol=1e-5, atol=1e-6)
    assert not np.allclose(predicted, models.predict(model, {"X": X})["Y"], atol=1e-3)


BUILDS = [
    ("gcc", "-O3 -march=native", 16),
    ("gcc", "-O0", 1),
    ("clang", "-O3", 8),
    ("clang-14", "-O1", 1),
    ("clang-14", "-O3 -march=native", 4),
]
"""Compilers, options, and the numbers in a vector for which the products are written."""


@pytest.mark.slow
def test_every_compiler_and_option_gives_the_same_bits(root: Path, tmp_path: Path) -> None:
    _, step, folder = exported("dropout", root)
    native = Library(folder)
    native.train([X, CLASSES], None, STEPS)
    expected, tried = native.save(), 0
    for k, (program, flags, lanes) in enumerate(BUILDS):
        if shutil.which(program) is None:
            continue
        other = export_c(step, tmp_path / f"{k}", Machine(lanes=lanes))
        made = ["make", "-C", other, f"CC={program}", f"CFLAGS={flags}", "libstep.so"]
        subprocess.run(made, check=True, capture_output=True)
        library = Library(other)
        library.train([X, CLASSES], None, STEPS)
        assert library.save() == expected, BUILDS[k]
        tried += 1
    assert tried


def test_rows_settings_and_labels_are_arguments(root: Path) -> None:
    _, _, folder = exported("classes, adam, schedule", root)
    first, second = Library(folder), Library(folder)
    in_order = np.arange(len(X), dtype=np.int64)
    assert (first.train([X, CLASSES], None, 4) == second.train([X, CLASSES], in_order, 4)).all()
    assert first.save() == second.save()
    settings = np.zeros(16)
    first.functions.step_defaults(address(settings))
    assert np.isnan(settings[0])  # the rate of the schedule
    settings[0] = 0.0
    before = first.predict(X, 3)
    first.train([X, CLASSES], None, 2, settings)
    assert (first.predict(X, 3) == before).all()
    wrong = CLASSES + 7
    pointers = map(address, (first.state, first.memory, X, wrong))
    assert first.functions.step_train(*pointers, None, ctypes.c_int64(1), None, None) in (0, 1)


def test_a_state_continues_where_it_was_saved(root: Path) -> None:
    _, _, folder = exported("classes, adam, schedule", root)
    _, _, other = exported("momentum, penalty, clip_norm", root)
    first, second = Library(folder), Library(folder)
    first.train([X, CLASSES], None, 4)
    content = first.save()
    assert second.load(content) == 0
    assert second.save() == content
    assert second.load(Library(other).save()) == -1
    assert Library(folder).load(content[:-3]) == 1
    assert (first.train([X, CLASSES], None, 3) == second.train([X, CLASSES], None, 3)).all()


def reference(folder: Path, place: Path) -> bytes:
    """The state after two epochs in order, as the examples train, and the columns as files."""
    X.tofile(place / "x.bin")
    CLASSES.tofile(place / "label.bin")
    library = Library(folder)
    for _ in range(2):
        library.train([X, CLASSES], None, STEPS)
    return library.save()


GO_ENVIRONMENT = {"GO111MODULE": "off", "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local"}
LANGUAGES = {
    "Python": (
        "python",
        "{python} {examples}/train_ctypes.py {folder}/libstep.so 2 x.bin label.bin",
    ),
    "C++": (
        "c++",
        "c++ {examples}/train.cpp -I {folder} {folder}/libstep.so -Wl,-rpath,{folder} -o t && "
        "./t 2 x.bin label.bin",
    ),
    "Rust": (
        "rustc",
        "rustc --edition 2021 {examples}/train.rs -L {folder} -o t && "
        "LD_LIBRARY_PATH={folder} ./t 2 x.bin label.bin",
    ),
    "Go": (
        "go",
        "CGO_CFLAGS=-I{folder} CGO_LDFLAGS='{folder}/libstep.so -Wl,-rpath,{folder}' "
        "go run {examples}/train.go 2 x.bin label.bin",
    ),
}


@pytest.mark.parametrize(
    "language", [pytest.param(n, marks=[pytest.mark.slow] * (n == "Go")) for n in LANGUAGES]
)
def test_an_example_trains_to_the_same_bits(language: str, root: Path, tmp_path: Path) -> None:
    program, command = LANGUAGES[language]
    if language != "Python" and shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    _, _, folder = exported("classes, adam, schedule", root)
    expected = reference(folder, tmp_path)
    text = command.format(python=sys.executable, examples=EXAMPLES, folder=folder)
    env = {**os.environ, **GO_ENVIRONMENT, "GOCACHE": str(tmp_path / "go")}
    done = children.run(["sh", "-c", text], cwd=tmp_path, env=env, check=True)
    assert "epoch 2: loss" in done.stdout
    assert (tmp_path / "state.safetensors").read_bytes() == expected


def test_the_program_of_the_folder_trains(root: Path, tmp_path: Path) -> None:
    """With every warning, and with the sanitizers of addresses and undefined behavior."""
    model, _, folder = exported("classes, adam, schedule", root)
    reference(folder, tmp_path)
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Wpedantic"
    copy = tmp_path / "source"
    shutil.copytree(folder, copy)
    subprocess.run(["make", "-C", copy, "clean"], check=True, capture_output=True)
    make_it = ["make", "-C", str(copy), "train", f"CFLAGS={flags} -Werror"]
    children.run(make_it, check=True)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # it ends without free
    call = [str(copy / "train"), "30", "x.bin", "label.bin"]
    done = children.run(call, cwd=tmp_path, env=environment, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    apply_state(model, tmp_path / "state.safetensors", tmp_path / "trained.onnx")
    assert len((folder / "main.c").read_text().splitlines()) <= 50


def test_names_of_a_model_are_never_text_in_c(tmp_path: Path) -> None:
    hostile = ['"); system("touch bad', "*/ int main", "int", "W\\\n#include", "x\0y"]
    names = dict(zip(("X", "W0", "b0", "W1", "Y"), hostile, strict=True))
    model = models.renamed(network(3), names)
    try:
        trainer = make(model, loss="softmax_cross_entropy", optimizer="adam", batch_size=ROWS)
    except ModelError:
        pytest.skip("the model is refused")
    trainer.export_step(tmp_path / "step", X, CLASSES, rows=ROWS)
    folder = export_c(tmp_path / "step", tmp_path / "c")
    for name in ("step.c", "predict.c", "step.h", "state.h", "main.c", "Makefile"):
        text = (folder / name).read_text()
        assert not [bad for bad in ("system(", *hostile[:2], *hostile[3:]) if bad in text], name
    subprocess.run(["make", "-C", folder], check=True, capture_output=True)
    assert Library(folder).train([X, CLASSES], None, STEPS).all()


@pytest.mark.parametrize(
    ("options", "rows", "words"),
    [({}, None, "rows="), ({"accumulate": 2}, ROWS, "accumulate=1")],
)
def test_a_step_without_a_form_in_c_is_refused(
    options: dict[str, Any], rows: int | None, words: str, tmp_path: Path
) -> None:
    trainer = make(network(3), loss="softmax_cross_entropy", batch_size=ROWS, **options)
    trainer.export_step(tmp_path / "step", X, CLASSES, rows=rows)
    with pytest.raises(Unsupported, match=words):
        export_c(tmp_path / "step", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_command_writes_the_folder(tmp_path: Path) -> None:
    onnx.save(network(3), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=X, y=CLASSES)
    recipe = tmp_path / "train.toml"
    recipe.write_text(
        'model = "model.onnx"\nloss = "softmax_cross_entropy"\noptimizer = "adam"\n'
        f'batch_size = {ROWS}\nepochs = 2\n[data]\nname = "npz"\npath = "data.npz"\n'
    )
    works("export-step", str(recipe), "--c", "-o", str(tmp_path / "c"))
    assert f"#define STEP_ROWS {ROWS}" in (tmp_path / "c" / "step.h").read_text()
    assert not (tmp_path / "c" / "step.onnx").exists()


# An emulated microcontroller, a Cortex-M4 in qemu -------------------------------------------------


NEEDED = ("make", "arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm")
MISSING = [name for name in NEEDED if shutil.which(name) is None]

BOARD = Path(__file__).parents[2] / "docs" / "examples" / "portable_c" / "board"
CPU = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"]
FLAGS = ["-Os", "-std=gnu99", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
LINKING = [
    "-nostartfiles",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--gc-sections",
    "-T",
    "board.ld",
]
SOURCES = ("board.c", "step.c", "predict.c")
EPOCHS, SAMPLES = 12, 160
CODE = 24_000


def digits_network() -> onnx.ModelProto:
    """The digits classifier of the documentation: 64-64-10."""
    rng = np.random.default_rng(0)
    values = {"W0": rng.standard_normal((64, 64)) / 6, "b0": np.zeros(64)}
    values |= {"W1": rng.standard_normal((64, 10)) / 6, "b1": np.zeros(10)}
    body = "A = MatMul (X, W0) B = Add (A, b0) H = Relu (B) C = MatMul (H, W1) D = Add (C, b1) "
    ends = "float[N, 64] X", "float[N, 10] P"
    return models.parsed(body + "P = Softmax <axis = 1> (D)", values, *ends)


def sizes(program: Path) -> dict[str, int]:
    """The bytes of each section."""
    text = subprocess.run(
        ["arm-none-eabi-size", "-A", program], check=True, capture_output=True, text=True
    ).stdout
    return {name: int(size) for name, size in re.findall(r"^(\.\w+)\s+(\d+)", text, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    ("optimizer", "rows", "memory"), [("adam", 32, 100_000), ("momentum", 16, 64_000)]
)
def test_the_digits_train_on_a_microcontroller(
    optimizer: str, rows: int, memory: int, tmp_path: Path
) -> None:
    """The link fails if weights, slots, intermediate results and 2 kB of stack need more memory."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data[:SAMPLES] / 16).astype(np.float32)
    label = digits.target[:SAMPLES].astype(np.int64)
    options: dict[str, Any] = {"batch_size": rows, "epochs": EPOCHS, "schedule": "cosine"}
    trainer = make(digits_network(), loss="softmax_cross_entropy", optimizer=optimizer, **options)
    trainer.export_step(tmp_path / "step", x, label, rows=rows)
    folder = export_c(tmp_path / "step", tmp_path / "c")
    subprocess.run(["make", "-C", folder], check=True, capture_output=True)
    library, steps = Library(folder), SAMPLES // rows
    expected = [library.train([x, label], None, steps) for _ in range(EPOCHS)]

    for path in BOARD.iterdir():
        shutil.copy(path, folder)
    numbers = {"float x": (float(v).hex() + "f" for v in x.ravel())}
    numbers["int64_t label"] = map(str, label)
    arrays = [f"static const {n}[] = {{ {', '.join(v)} }};" for n, v in numbers.items()]
    head = ["#include <stdint.h>", f"#define STEPS {steps}", f"#define EPOCHS {EPOCHS}"]
    (folder / "samples.h").write_text("\n".join([*head, *arrays]))
    command = ["arm-none-eabi-gcc", *CPU, *FLAGS, *LINKING, f"-Wl,--defsym=RAM={memory}", *SOURCES]
    made = subprocess.run(
        [*command, "-lm", "-o", "board.elf"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert sizes(folder / "board.elf")[".text"] <= CODE
    machine = (
        "-M mps2-an386 -nographic -semihosting-config enable=on,target=native -kernel board.elf"
    )
    done = subprocess.run(
        ["qemu-system-arm", *machine.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = re.findall("^[0-9a-f]{16}$", done.stdout + done.stderr, re.MULTILINE)
    losses = np.array([int(line, 16) for line in lines], np.uint64).view(np.float64)
    np.testing.assert_array_equal(losses, np.concatenate(expected))
    assert (folder / "state.safetensors").read_bytes() == library.save()
    assert losses[-1] < losses[0]

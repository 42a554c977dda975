"""The exported step on an emulated microcontroller, a Cortex-M4 in qemu: the bits of this computer."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_plugins.c import compiler
from ortflex_plugins.c.export import export_c
from tests import models
from tests.end_to_end.test_step_in_c import Library
from tests.training import make

NEEDED = ("make", "arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.once,
    pytest.mark.slow,
    pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle())),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

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


def network() -> onnx.ModelProto:
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
    trainer = make(network(), loss="softmax_cross_entropy", optimizer=optimizer, **options)
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

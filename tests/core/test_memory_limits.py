"""A graph that cannot be in memory is an error before the first step, not the end of the process.

What the system says comes from files like those of Linux, as machines, containers of both versions of
control groups, and limits of a process have them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import OrtflexError, Unsupported
from ortflex_core.compiler.runtime import memory_limits
from tests import models
from tests.training import every_backend, make, same

MIB = 2**20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMORY = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapFree: 10 kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


GROUP = "proc/self/cgroup"
CURRENT = f"{V2}/a/memory.current"
# A group without a limit inside one with a limit.
NESTED = {GROUP: "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "5\n"}
NESTED |= {f"{V2}/a/memory.max": "3000000\n", CURRENT: "2000000"}
NESTED |= {f"{V2}/a/memory.stat": "anon 7\ninactive_file 9\n"}
# A container sees its own group as the root.
CONTAINER = {GROUP: "0::/x\n", f"{V2}/memory.max": "700", f"{V2}/memory.current": "800"}
OLD = {GROUP: "5:cpu,cpuacct:/c\n4:memory:/m\n0::/\n", f"{V1}/m/memory.limit_in_bytes": "900"}
OLD |= {f"{V1}/m/memory.usage_in_bytes": "200", f"{V1}/memory.usage_in_bytes": "300"}
OLD |= {f"{V1}/memory.limit_in_bytes": str(2**63 - 4096)}
SYSTEMS: dict[str, tuple[dict[str, str], int | None]] = {
    "unknown": ({}, None),
    "machine": (MEMORY, 8010 * 1024),
    "nested groups": (MEMORY | NESTED, 1000009),
    "container": (CONTAINER, 0),
    "version 1": (MEMORY | OLD, 700),
}


@pytest.mark.once
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_smallest_of_all_limits(tmp_path: Path, name: str) -> None:
    files, expected = SYSTEMS[name]
    assert memory_limits.available(system(tmp_path, files)) == expected


@pytest.mark.once
def test_the_limit_of_the_process() -> None:
    resource = pytest.importorskip("resource")
    if memory_limits.available() is None:
        pytest.skip("the system does not say it")
    used = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * MIB, hard))
    try:
        left = memory_limits.available()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert left is not None
    assert 200 * MIB < left <= 300 * MIB


@every_backend
@pytest.mark.parametrize("changed", [{}, {"recompute": True}, {"accumulate": 2}], ids=str)
def test_a_step_that_cannot_be_in_memory_is_an_error_before_it(
    monkeypatch: Any, caplog: Any, changed: dict[str, Any], backend: str
) -> None:
    """300,000 rows of 16 hidden values are 18 MiB for each tensor."""
    rows = 300_000 * changed.get("accumulate", 1)
    x, y = np.ones((rows, 6), np.float32), np.ones((rows, 1), np.float32)
    options: dict[str, Any] = {"batch_size": 300_000, "epochs": 1, "backend": backend, **changed}

    def fit(left: int | None) -> Any:
        monkeypatch.setattr(memory_limits, "available", lambda: left)
        trainer = make(models.mlp((6, 16, 16, 1)), **options)
        before = trainer.get_state()
        try:
            trainer.fit(x, y)
        except Unsupported as error:
            pytest.skip(str(error))
        except OrtflexError as error:
            same(trainer.get_state(), before, 0)
            return str(error)
        return ""

    refused = fit(10 * MIB)
    for word in (" graph", "10 MiB", "batch_size", "recompute=True", "check MODEL --memory"):
        assert word in refused
    assert "needs about" not in caplog.text
    with caplog.at_level(logging.WARNING, "ortflex"):
        needed = int(fit(MIB).split("about ")[1].split(" MiB")[0])
        assert not fit((needed - 2) * MIB)
    assert "needs about" in caplog.text
    caplog.clear()
    for enough in (1000 * MIB, None):
        assert not fit(enough)
    assert "needs about" not in caplog.text


WINDOWS = """
    n = Shape <start = 0, end = 1> (x)
    h = Shape <start = 1, end = 2> (x)
    v = Shape <start = 2, end = 3> (x)
    half = Div(h, two)
    wide = Div(v, two)
    parts = Concat <axis = 0> (n, half, two, wide, two, c)
    split = Reshape(x, parts)
    turned = Transpose <perm = [0, 1, 3, 2, 4, 5]> (split)
    bent = Tanh(turned)
    flat = Reshape(bent, back)
    scores = MatMul(flat, w)
    y = ReduceMean <axes = [1], keepdims = 0> (scores)
"""


def test_sizes_that_no_one_knows_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of images of any size: a guess for each axis counted a Reshape as gigabytes.

    The class: an estimate above all that a run can take refuses a model that runs.
    """
    weights = {"w": np.array([[1, -1], [2, 0], [0, 1], [3, 1.0]]), "two": np.array([2])}
    weights |= {"back": np.array([0, -1, 4]), "c": np.array([4])}
    model = models.parsed(WINDOWS, weights, "float[N, H, W, 4] x", "float[N, 2] y")
    monkeypatch.setattr(memory_limits, "available", lambda: 100 * MIB)
    trainer = make(model, backend="fused", loss="softmax_cross_entropy")
    x = np.random.default_rng(0).standard_normal((3, 8, 6, 4)).astype(np.float32)
    assert np.isfinite(trainer.step((x, np.arange(3) % 2)))
    assert trainer.predict(x).shape == (3, 2)

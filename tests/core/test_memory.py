"""estimate_memory and `ortflex check --memory`, compared with sums by hand and with measured peaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from ortflex_core import ConfigError, estimate_memory
from ortflex_plugins.cli.main import main
from tests import models

WIDTH, ROWS = 64, 512
ONE = WIDTH * ROWS * 4


def sequences() -> onnx.ModelProto:
    """A model with two axes that its file does not give, one of them without a name."""
    inputs, body = "float[N, S, 8] x, float[N, ?, 8] z", "h = MatMul(x, w)  y = Add(h, z)"
    return models.parsed(body, {"w": np.eye(8)}, inputs, "float[N, S, 8] y")


def test_the_parts_of_a_chain_are_those_of_paper_and_pencil() -> None:
    layers = 12
    model = models.mlp((WIDTH,) * (layers + 1))
    numbers = sum(int(np.prod(t.dims)) for t in model.graph.initializer) * 4
    found = estimate_memory(model, batch_size=ROWS, optimizer="adam")
    assert found.parts["weights, two versions"] == 2 * numbers
    assert found.parts["optimizer state, two versions"] == 4 * numbers
    assert found.parts["a batch of data"] == 2 * ONE
    assert "frozen tensors" not in found.parts
    # One tensor a layer for the backward pass, one or two more at a time, and gradients of weights.
    step = found.parts["tensors of the step at its peak"]
    assert (layers - 1) * ONE <= step <= (layers + 2) * ONE + numbers
    assert found.total == sum(found.parts.values())
    assert found.recomputed < found.total
    assert found.largest[0].size == ONE


def test_large_weights_and_their_optimizer_state_have_one_version() -> None:
    model = models.mlp((512, 512, 64))
    large, small = 4 * 512 * 512, 4 * (512 * 64 + 512 + 64)
    parts = estimate_memory(model, batch_size=ROWS, optimizer="adam").parts
    assert parts["weights, two versions of the small ones"] == large + 2 * small
    assert parts["optimizer state, two versions of the small ones"] == 2 * large + 4 * small
    assert parts["gradients of the large ones"] == large
    again = estimate_memory(model, batch_size=ROWS, optimizer="adam", recompute=True).parts
    assert again["weights"] == large + small
    # The update of SGD is short, and stays in the graph.
    parts = estimate_memory(model, batch_size=ROWS, optimizer="sgd").parts
    assert parts["weights, two versions"] == 2 * (large + small)


def test_more_rows_take_more_and_fewer_weights_less() -> None:
    model = models.mlp((WIDTH,) * 7)
    step = "tensors of the step at its peak"
    small, large = (estimate_memory(model, batch_size=n).parts[step] for n in (256, 1024))
    assert 3.5 < large / small <= 4
    frozen = estimate_memory(model, batch_size=256, params=["W6"])
    assert frozen.parts[step] < small / 2
    assert frozen.parts["frozen tensors"] > frozen.parts["weights, two versions"]


def test_the_estimate_with_recompute_is_what_the_plain_one_foretells() -> None:
    model = models.mlp((WIDTH,) * 30)
    plain = estimate_memory(model, batch_size=ROWS)
    again = estimate_memory(model, batch_size=ROWS, recompute=True)
    assert again.total == plain.recomputed == again.recomputed
    assert plain.total - again.total > 10 * ONE


def test_sizes_that_the_file_lacks_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError) as raised:
        estimate_memory(sequences(), batch_size=4)
    assert [line.split("'")[1] for line in raised.value.problems] == ["S", "z[1]"]
    found = estimate_memory(sequences(), {"S": 10, "z[1]": 10}, batch_size=4)
    assert found.parts["a batch of data"] == 3 * 4 * 10 * 8 * 4


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(models.mlp((WIDTH,) * 5), path)
    given = ["check", path, "--memory", "--batch-size", "512", "--optimizer", "adam"]
    told = CliRunner().invoke(main, given)
    assert told.exit_code == 0, told.output
    wanted = estimate_memory(path, batch_size=512, optimizer="adam")
    assert wanted.summary in told.output
    for what in wanted.parts:
        assert what in told.output
    found = json.loads(CliRunner().invoke(main, [*given, "--json"]).output)["memory"]
    assert found == wanted.to_dict()
    onnx.save(sequences(), path)
    told = CliRunner().invoke(main, ["check", path, "--memory"])
    assert "--size S=128" in str(told.output) + str(told.exception)
    sized = ["check", path, "--memory", "--size", "S=3", "--size", "z[1]=3", "--json"]
    assert json.loads(CliRunner().invoke(main, sized).output)["memory"]["batch_size"] == 32


SIZES = {"W4": 4096, "W7": 1024, "W8": 256, "resnet": 8, "gpt2": 8}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", SIZES)
def test_estimates_are_near_measured_peaks(name: str, tmp_path: Path) -> None:
    """Within a fifth, up to 15 MiB of the libraries; convolutions also need working memory."""
    pytest.importorskip("torch")
    from tests.benchmarks import memory

    size = {"width": 192, "heads": 6, "words": 1000} if name == "gpt2" else {}
    path = str(memory.write(name, SIZES[name], tmp_path, **size))
    least = 0.6 if name == "resnet" else 0.8
    for recompute in ("False", "True"):
        measured = memory.fresh("peak", name, path, recompute)["mib"]
        estimated = memory.fresh("estimate", name, path, recompute)["mib"]
        assert least * measured - 15 <= estimated <= 1.2 * measured + 15


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_recompute_takes_less_memory_in_a_process(tmp_path: Path) -> None:
    """A block with planned places: onnxruntime's allocator would lose a quarter of the memory."""
    pytest.importorskip("torch")
    from tests.benchmarks import memory

    path = str(memory.write("W8", 256, tmp_path))
    plain, again = (memory.fresh("peak", "W8", path, way)["mib"] for way in ("False", "True"))
    assert again < 0.5 * plain

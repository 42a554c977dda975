"""Recorded runs give the steps of plain runs and keep their addresses; refusals have a reason.

No GPU is needed: a session that stands in for a recording one compares the addresses of every run
with those of the first, and runs the first twice, as onnxruntime does.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Array, GraphError, Value, get_session, require_runtime
from ortflex_plugins.backends import device_graphs
from ortflex_plugins.backends.device_graphs import PLAIN, DeviceGraphs
from ortflex_plugins.backends.fused import FusedBackend
from ortflex_plugins.devices import Cpu, Cuda
from tests import models
from tests.training import make, regression


@attrs.frozen(kw_only=True)
class Far(Cpu):
    """Main memory that the host cannot read, on a device that records runs."""

    name: ClassVar[str] = "far"

    def graph_providers(self) -> list[Any]:
        return [("CPUExecutionProvider", {})]

    def write(self, value: Value, array: Array) -> None:
        Cpu().view(value)[...] = array

    def read(self, value: Value) -> Array:
        return Cpu().view(value).copy()

    def view(self, value: Value) -> None:  # type: ignore[override]
        return

    def room(self) -> int:
        return 2**20


class Bindings:
    """Bindings of onnxruntime, with the addresses that are bound."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.places: dict[str, tuple[Any, ...]] = {}

    @property
    def _iobinding(self) -> Bindings:
        return self

    def bind_input(self, name: str, device: Any, dtype: Any, shape: Any, pointer: int) -> None:
        self.places[name] = (pointer, tuple(shape))
        self.real.bind_input(name, device, dtype, shape, pointer)

    def bind_output(self, name: str, device: Any, dtype: Any, shape: Any, pointer: int) -> None:
        self.places[name] = (pointer, tuple(shape))
        self.real.bind_output(name, device, dtype, shape, pointer)


class Recording:
    """A session that replays: every run under a number has the addresses of the first one."""

    all: ClassVar[list[Recording]] = []

    def __init__(self, real: Any, fails_at: int | None = None) -> None:
        self._real = getattr(real, "_sess", real)
        self._python = real
        self._fails_at = fails_at
        self.recorded: dict[int, dict[str, Any]] = {}
        self.runs: list[int] = []
        Recording.all.append(self)

    def get_provider_options(self) -> dict[str, Any]:
        return {"CPUExecutionProvider": {}}

    def io_binding(self) -> Bindings:
        return Bindings(self._python.io_binding()._iobinding)

    def run_with_iobinding(self, bindings: Bindings, options: Any) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if len(self.runs) == self._fails_at:
            # Outputs are written before it fails.
            self._real.run_with_iobinding(bindings.real, None)
            raise RuntimeError("the stream is not capturing")
        self.runs.append(number)
        if number != PLAIN:
            if number not in self.recorded:
                self.recorded[number] = dict(bindings.places)
                self._real.run_with_iobinding(bindings.real, None)
            assert bindings.places == self.recorded[number], "a replay has the old addresses"
        self._real.run_with_iobinding(bindings.real, None)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The sessions that were made, which record."""
    return record(monkeypatch)


def record(monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> list[Recording]:
    """Sessions record from here on, until one of their runs fails."""

    def made(program: Any, device: Any, threads: int, providers: Any) -> Recording:
        return Recording(get_session(program, device, threads), fails_at)

    monkeypatch.setattr(device_graphs, "new_session", made)
    monkeypatch.setattr(Recording, "all", [])
    return Recording.all


_OPTIONS: dict[str, Any] = {"batch_size": 16, "epochs": 3, "validation_data": 0.2, "seed": 3}


def _trained(cuda_graph: Any, rows: int = 70, **options: Any) -> tuple[Any, Any, Any]:
    x, y = regression(rows=rows)
    given = {k: v for k, v in {**_OPTIONS, **options}.items() if k != "validation_data"}
    backend = {"name": "fused", "cuda_graph": cuda_graph, "steps_per_run": given.pop("steps", 1)}
    trainer = make(models.linear(), backend=backend, device=Far(), **given)
    trainer.fit(x, y, validation_data=0.2)
    return trainer.train_losses_, trainer.validation_losses_, trainer.predict(x)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adam", "penalty": "l2"},
        {"optimizer": "momentum", "steps": 3},
        {"optimizer": "adam", "averaging": "ema", "schedule": "cosine"},
        {"optimizer": "adam", "accumulate": 2, "steps": 2, "batch_size": 8},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_recorded_runs_train_as_plain_ones_do(
    options: dict[str, Any], recording: list[Recording]
) -> None:
    plain, recorded = _trained(False, **options), _trained(True, **options)
    for one, other in zip(plain, recorded, strict=True):
        np.testing.assert_array_equal(one, other)
    assert recording
    assert min(len(session.runs) for session in recording) > 2, "they were replayed"


def test_recordings_have_numbers_of_their_own_and_a_shorter_batch_another(
    recording: list[Recording],
) -> None:
    _trained("auto", rows=88)
    numbers = [n for session in recording for n in session.recorded]
    assert len(numbers) == len(set(numbers)) == 4, "two directions of two sizes of batches"
    whole, shorter = recording
    assert len(whole.runs) == 12
    assert len(shorter.runs) == 3
    shapes = [{place[1] for place in s.recorded[min(s.recorded)].values()} for s in recording]
    assert any(shape[:1] == (16,) for shape in shapes[0])
    assert any(shape[:1] == (6,) for shape in shapes[1])


def test_engines_share_no_recording(recording: list[Recording]) -> None:
    _trained("auto")
    first = len(recording)
    _trained("auto")
    assert len(recording) == 2 * first


@pytest.mark.parametrize("wanted", ["auto", True])
def test_session_that_refuses_to_record(
    wanted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise GraphError("the model has control flow nodes")

    plain = _trained(False)
    monkeypatch.setattr(device_graphs, "new_session", refuse)
    if wanted is True:
        with pytest.raises(GraphError, match=r"cuda_graph=True.*control flow nodes.*'auto'"):
            _trained(wanted)
        return
    with caplog.at_level(logging.INFO, logger="ortflex"):
        other = _trained(wanted)
    np.testing.assert_array_equal(plain[0], other[0])
    told = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert told == ["steps run without CUDA graphs: the model has control flow nodes"]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_first_run_that_cannot_be_recorded_is_repeated(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of either direction, after its outputs have been written."""
    plain = _trained(False, optimizer="adam")
    record(monkeypatch, fails_at)
    with caplog.at_level(logging.INFO, logger="ortflex"):
        other = _trained("auto", optimizer="adam")
    for one, two in zip(plain, other, strict=True):
        np.testing.assert_array_equal(one, two)
    told = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert len(told) == 1
    assert "the stream is not capturing" in told[0]


def test_replay_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, fails_at=4)
    with pytest.raises(GraphError, match="the stream is not capturing"):
        _trained("auto")


def test_recordings_of_an_engine_are_bounded() -> None:
    graphs = DeviceGraphs(Far(), "auto", 1)
    numbers = [graphs.number() for _ in range(20)]
    assert numbers[:16] == list(range(1, 17))
    assert set(numbers[16:]) == {PLAIN}


def test_options_that_onnxruntime_drops_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python class makes a session without the provider if the provider fails."""
    wanted = [("CPUExecutionProvider", {"enable_cuda_graph": "1"})]
    monkeypatch.setattr(Far, "graph_providers", lambda self: wanted)
    x, y = regression(rows=32)
    backend = {"name": "fused", "cuda_graph": True}
    trainer = make(models.linear(), backend=backend, device=Far(), batch_size=16)
    with pytest.raises(GraphError, match="enable_cuda_graph=None instead of 1"):
        trainer.fit(x, y)


def test_cuda_records_with_the_option_of_its_provider() -> None:
    ((name, options),) = Cuda(index=2).graph_providers()
    assert name == "CUDAExecutionProvider"
    assert options == {"device_id": 2, "enable_cuda_graph": "1"}
    assert Cpu().graph_providers() is None


def test_cuda_graph_needs_a_device_that_records() -> None:
    x, y = regression(rows=32)
    backend = {"name": "fused", "cuda_graph": True}
    with pytest.raises(Exception, match="cuda_graph=True needs device='cuda'"):
        make(models.linear(), backend=backend, batch_size=16).fit(x, y)
    graphs = DeviceGraphs(Cpu(), "auto", 1)
    assert graphs.reason == "the device cpu cannot record runs"
    assert FusedBackend(cuda_graph="auto").available(require_runtime()) == []
    with pytest.raises(ValueError, match="cuda_graph must be True, False or 'auto', got 1"):
        FusedBackend(cuda_graph=1)

"""Sessions on programs: created once per structure, shared, with one thread by default.

The cache of programs and sessions is the only process-wide state of ortflex, apart from the list of
libraries that sessions load. It is bounded and locked, its entries are immutable (weights and
bindings belong to engines), and a forked child makes new sessions, because the threads of a session
do not survive a fork.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np
import onnx

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.graph.protos import copied
from ortflex_core.compiler.runtime import liveness, memory_limits, recompute
from ortflex_core.compiler.runtime.installation import version_tuple
from ortflex_core.compiler.runtime.memory_plan import Schedule, plan_memory
from ortflex_core.compiler.runtime.missing_kernels import missing_kernel
from ortflex_core.kernel.binder import Binder
from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.errors import (
    GraphError,
    MissingKernel,
    OrtflexError,
    PluginError,
    error_reason,
)
from ortflex_core.kernel.types import Array, TensorSpec

_LIMIT = 128
# Above these numbers of nodes, onnxruntime's fusions, or also its simplifications, are disabled,
# because their time grows with the square of the number of nodes (minutes at 40,000). Fusions take 0.3 s
# at 5,000 nodes, and MobileNetV2's step of 3,800 nodes takes 0.88 of its time with them.
_NO_FUSION = 5000
_NO_BASICS = 6000
# Above this number of bytes of all tensors, memory matters more than the time to allocate it.
_LARGE = 2**26
_TENSOR = re.compile(r"tensor\((?!string)(\w+)\)")
"""The types of onnxruntime that can be bound to memory."""
_cache: OrderedDict[Hashable, Any] = OrderedDict()
T = TypeVar("T")
_lock = threading.Lock()
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_orphans: list[Any] = []


def keep_alive(session: Any) -> Any:
    """Register a session for a fork of the process; returns it."""
    _alive.add(session)
    return session


def _after_fork() -> None:
    """In a forked child, replace the locks and keep the sessions of the parent forever.

    Their threads do not exist in the child, and destroying a session waits for its threads.
    """
    global _lock
    _lock = threading.Lock()
    _orphans.extend(_alive)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
_libraries: dict[str, None] = {}


def use_library(path: str | os.PathLike[str]) -> None:
    """Load a custom-operator library of onnxruntime in every session created from now on.

    A library is code: only code can name one, never a model or a recipe. A family of gradient rules
    declares it with ``RULES.kernels(path)``.

    Raises:
        PluginError: onnxruntime cannot load it.
    """
    import onnxruntime

    name = os.fspath(path)
    if name in _libraries:
        return
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(name)
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        raise PluginError(
            f"onnxruntime {onnxruntime.__version__} cannot load the custom-operator library "
            f"{name!r}: {error_reason(error)}"
        ) from error
    with _lock:
        _libraries[name] = None


def session_options(threads: int, *, keep_nodes: bool = False) -> Any:
    """The options of all our sessions: quiet, sequential, ``threads`` inside an operator.

    With ``keep_nodes``, no node is added. Otherwise a DequantizeLinear of several readers gets copies,
    which may run after the planned memory of its input has been used again.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Log fatal errors only: any other failure is an exception, whose message reports it once.
    options.log_severity_level = 4
    # More threads than processors wait for one another, which can turn microseconds into minutes.
    options.intra_op_num_threads = min(threads, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    options.enable_mem_reuse = not _reuses_too_early(onnxruntime.__version__)
    # Before 1.17, the copies also lose their axis.
    if keep_nodes or version_tuple(onnxruntime.__version__) < (1, 17):
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    for library in tuple(_libraries):
        options.register_custom_ops_library(library)
    return options


def cpu_session(model: onnx.ModelProto | bytes, options: Any = None) -> Any:
    """A new session of a model on the CPU, with one thread unless there are ``options``."""
    import onnxruntime

    content = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(
        content, options or session_options(1), providers=["CPUExecutionProvider"]
    )


@functools.lru_cache(maxsize=1)
def _reuses_too_early(version: str) -> bool:
    """Whether the runtime may overwrite values before their last reader: training builds of 1.16 do.

    It happens with inputs of a Scan and with the statistics of a BatchNormalization: gradients are
    wrong, without an error.
    """
    from onnxruntime.capi import _pybind_state

    return version_tuple(version) < (1, 17) and hasattr(_pybind_state, "TrainingAgent")


def get_program(key: Hashable, make: Callable[[], T]) -> T:
    """The program of a key, from the cache if possible; two fits of the same structure trace it once.

    The result of compiling a program can be cached in the same way.
    """
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            cached: T = _cache[key]
            return cached
    program = make()
    with _lock:
        _cache[key] = program
        while len(_cache) > _LIMIT:
            _cache.popitem(last=False)
    return program


def get_session(
    program: Program,
    device: Device,
    threads: int = 1,
    optimize: bool = True,
    stop_spinning: bool = False,
) -> Any:
    """The session of a program on a device, from the cache if possible.

    With ``optimize=False`` the graph runs unchanged. ``stop_spinning`` frees the processors at the end
    of each run, for threads of the caller; otherwise onnxruntime's threads wait for the next run.

    Raises:
        MissingKernel: the runtime lacks an operator; names it, the node, the opset and ways out.
        GraphError: onnxruntime refuses the graph; the message has its reason without the C++ trace.
    """
    key = (os.getpid(), program.key, program.recompute, device, threads, optimize, stop_spinning)
    return get_program(
        key, lambda: new_session(program, device, threads, optimize, stop_spinning=stop_spinning)
    )


def new_session(
    program: Program,
    device: Device,
    threads: int = 1,
    optimize: bool = True,
    providers: list[Any] | None = None,
    stop_spinning: bool = False,
) -> Any:
    """A session of a program that is not shared; ``providers`` replaces those of the device.

    Raises:
        MissingKernel: as for :func:`get_session`.
        GraphError: as for :func:`get_session`.
        OrtflexError: the tensors of the graph cannot be in memory together.
    """
    import onnxruntime
    from onnxruntime.capi._pybind_state import ExecutionOrder

    keep_nodes = program.recompute is not False or _rounds_weights(program)
    options = session_options(threads, keep_nodes=keep_nodes)
    if stop_spinning:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.graph_optimization_level = _choose_level(program, optimize)
    options.enable_mem_pattern = takes_pattern(program)
    if not options.enable_mem_pattern:
        # onnxruntime plans which tensors share memory. It does not free such memory between their lives,
        # for example between the forward pass and its repetition.
        options.enable_mem_reuse = False
    try:
        if plans_memory(device):
            most = sum(program.sizes.values())
            memory_limits.check(
                program.name, most, lambda: find_peak(schedule_of(program, device, threads)).size
            )
        model = program.model
        if program.recompute is not False:
            model = bytes(schedule_of(program, device, threads).model.SerializeToString())
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.execution_order = ExecutionOrder.PRIORITY_BASED  # the order of the file
        return open_session(model, options, device, providers)
    except OrtflexError:
        raise
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        if missing := missing_kernel(error, program.proto(), program.name, device):
            raise MissingKernel(missing) from error
        raise GraphError(
            f"onnxruntime {onnxruntime.__version__} refuses the {program.name} graph: {error_reason(error)}"
        ) from error


def _rounds_weights(program: Program) -> bool:
    """Whether a program rounds float weights: it then computes what its file says, on every processor.

    Kernels of integers saturate on CPUs without VNNI, and onnxruntime 1.32 takes the scales of blocks of
    int8 for scales of columns, so that a MatMul fails or is wrong.
    """
    if b"QuantizeLinear" not in program.model:
        return False
    graph = program.proto().graph
    weights = [k for k in program.takes if isinstance(k, Port) and k.role == "parameter"]
    known = {program.takes[key].name for key in weights}
    constants = {"", *(tensor.name for tensor in graph.initializer)}
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in known:
            return True
        if not known.isdisjoint(node.input) and known.union(constants).issuperset(node.input):
            known.update(node.output)
    return False


def takes_pattern(program: Program) -> bool:
    """Whether onnxruntime allocates memory for all tensors at once from the second run on.

    This memory comes in addition to that of the first run, and saves time only in small steps.
    """
    return program.recompute is False and sum(program.sizes.values()) < _LARGE


def _choose_level(program: Program, optimize: bool = True) -> Any:
    """How much onnxruntime optimizes a graph."""
    from onnxruntime import GraphOptimizationLevel

    levels = GraphOptimizationLevel
    if not optimize or program.nodes > _NO_BASICS:
        return levels.ORT_DISABLE_ALL
    return levels.ORT_ENABLE_BASIC if program.nodes > _NO_FUSION else levels.ORT_ENABLE_ALL


def plans_memory(device: Device) -> bool:
    """Whether the order of nodes on a device is known: other devices than the CPU add copy nodes."""
    return device.providers() == ["CPUExecutionProvider"]


def rounds_short_types(device: Device) -> bool:
    """Whether a graph has to round to float16 itself on a device.

    On a CPU, onnxruntime computes nodes of float16 tensors in float32, and does not round between them.
    """
    return device.providers() == ["CPUExecutionProvider"]


def schedule_of(program: Program, device: Device, threads: int = 1) -> Schedule:
    """The schedule of :func:`make_schedule`, from the cache if possible."""
    key = (os.getpid(), "schedule", program.key, program.recompute, device, threads)
    return get_program(key, lambda: make_schedule(program, device, threads))


def make_schedule(program: Program, device: Device, threads: int = 1) -> Schedule:
    """The graph as onnxruntime optimizes it, with recomputed tensors, and the memory of its tensors."""
    options = session_options(threads)
    options.graph_optimization_level = _choose_level(program)
    specs: dict[str, TensorSpec] = {}
    if plans_memory(device):
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = os.path.join(folder, "step.onnx")
            open_session(program.model, options, device)
            model = onnx.load(options.optimized_model_filepath)
        specs = _read_specs(model, session_options(threads), device)
    else:
        model = program.proto()
    sizes = dict(program.sizes) | {name: liveness.bytes_of(spec) for name, spec in specs.items()}
    if program.recompute is False:
        return Schedule(model, sizes)
    if plans_memory(device):
        recompute.fuse_transposes(model, specs)
    costs, frozen = recompute.costs_of(program), recompute.frozen_inputs(program)
    recompute.apply(model, costs, sizes, program.recompute, frozen)
    state = {
        spec.name: program.gives[key].name
        for key, spec in program.takes.items()
        if key in program.gives
    }
    if not plans_memory(device):
        return Schedule(model, sizes)
    return plan_memory(model, sizes, specs, state, recompute.SMALL)


def find_peak(schedule: Schedule) -> liveness.Peak:
    """The peak of the tensors of a schedule."""
    graph = schedule.model.graph
    nodes = list(graph.node)
    known = recompute.with_copies(liveness.completed(nodes, schedule.sizes), nodes)
    placed = {spec.name for spec in schedule.places}
    peak = liveness.peak(nodes, known, {o.name for o in graph.output} - placed)
    return attrs.evolve(peak, size=max(peak.size, schedule.block))


def _read_specs(model: onnx.ModelProto, options: Any, device: Device) -> dict[str, TensorSpec]:
    """Types and shapes of the tensors that nodes compute, as onnxruntime infers them, where known."""
    import onnxruntime

    probe = copied(model)
    known = {o.name for o in probe.graph.output}
    names = {name for node in probe.graph.node for name in node.output if name} - known
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(probe.SerializeToString(), options, device)
    specs = {}
    for output in session.get_outputs():
        kind = _TENSOR.fullmatch(output.type)
        # A tensor of unknown rank has the same shape as a scalar, [].
        if kind is not None and output.shape and all(isinstance(d, int) for d in output.shape):
            dtype = onnx.TensorProto.DataType.Value(kind[1].upper())
            specs[output.name] = TensorSpec(output.name, dtype, tuple(output.shape))
    return specs


def open_session(
    model: bytes, options: Any, device: Device, providers: list[Any] | None = None
) -> Any:
    """A session on a device, without onnxruntime's fusions if these make a graph that it refuses.

    ``providers`` replaces those of the device. Older versions fuse Gemm and its activation in float64,
    for which they have no kernel. From opset 21 on, the pass that moves a DequantizeLinear of int8 after
    a Transpose or Reshape writes a type that the pass from int8 to uint8 does not change.

    Raises:
        Exception: any that onnxruntime raises.
    """
    import onnxruntime

    providers = device.providers() if providers is None else providers
    try:
        return keep_alive(onnxruntime.InferenceSession(model, options, providers=providers))
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        if "does not match y_zero_point type" in str(error):
            without = ["QDQPropagationTransformer"]
            return keep_alive(
                onnxruntime.InferenceSession(
                    model, options, providers=providers, disabled_optimizers=without
                )
            )
        levels = onnxruntime.GraphOptimizationLevel
        fused = "com.microsoft" in str(error) and b"com.microsoft" not in model
        fused |= "qdq_actions" in str(error)  # a weight of the graph that a branch reads
        if not fused or options.graph_optimization_level != levels.ORT_ENABLE_ALL:
            raise
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC
        return keep_alive(onnxruntime.InferenceSession(model, options, providers=providers))


def run_once(
    program: Program,
    feeds: Mapping[Any, Array],
    values: Mapping[str, float],
    device: Device,
    optimize: bool = True,
) -> dict[Any, Array]:
    """Run a program once, from arrays to arrays, by port or required name."""
    arrays = {spec.name: feeds[key] for key, spec in program.takes.items()}
    results = run_arrays(program, arrays | program.scalars(values), device, optimize)
    return {key: results[spec.name] for key, spec in program.gives.items()}


def run_arrays(
    program: Program, feeds: dict[str, Array], device: Device, optimize: bool = True
) -> dict[str, Array]:
    """Run a program whose every input is an array."""
    names = [o.name for o in program.outputs]
    runner = get_session(program, device, optimize=optimize)
    try:
        results = runner.run(names, feeds)
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        raise GraphError(f"the {program.name} graph failed: {error_reason(error)}") from error
    return dict(zip(names, results, strict=True))


class Workspace:
    """One block for the tensors of a program, shared by bindings that never run at the same time.

    It is empty for programs without recomputed tensors, for batches of unknown size, and on devices
    other than the CPU: onnxruntime then allocates all tensors.
    """

    def __init__(self, program: Program, device: Device, threads: int = 1) -> None:
        self._place = device.ort_device()
        self._schedule: Schedule | None = None
        self._block: Value | None = None
        if program.recompute is not False:
            self._schedule = schedule_of(program, device, threads)
            if self._schedule.block:
                self._block = device.empty([self._schedule.block], np.uint8)

    def bind(self, binder: Binder) -> None:
        """Bind the tensors of the session to their places in the block."""
        if self._schedule is not None and self._block is not None:
            start = self._block.data_ptr()
            for spec, offset in self._schedule.places.items():
                binder.output_at(spec, self._block, self._place, start + offset)

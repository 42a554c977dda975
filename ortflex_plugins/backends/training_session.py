"""onnxruntime's TrainingSession: the whole training step is one graph that the runtime owns.

Model, losses and penalties are one graph with a scalar to minimize; the runtime
differentiates it, adds its own optimizer and keeps the weights. The loss cannot be computed without
the update, so evaluation is a separate session, and the weights are copied there after they change
(counted in ``counters()["weights_copied"]``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
from onnx import TensorProto

from ortflex_core import (
    COLUMNS,
    Array,
    Backend,
    Batch,
    Binder,
    DataBuffers,
    Device,
    DeviceEngine,
    GraphError,
    HostVector,
    Key,
    PlanCache,
    Port,
    Problem,
    Program,
    ReadLosses,
    Runtime,
    Scalar,
    Scales,
    Value,
    binding_counts,
    buffer_value,
    check_state,
    error_reason,
    install_command,
    keep_alive,
    loss_ports,
    ports_of,
    session_options,
    stops_gradients,
    training_program,
)
from ortflex_plugins.backends import ort_gradients

_PREFIXES = ("Moment_", "Update_Count_", "Learning_Rate")
"""Prefixes of the names that the runtime generates; gradients end with _grad."""


@attrs.frozen
class _Native:
    """The runtime's own optimizer: its operator, attributes and state tensors."""

    operator: str
    floats: Mapping[str, float] = attrs.field(factory=dict)
    ints: Mapping[str, int] = attrs.field(factory=dict)
    slots: Mapping[str, str] = attrs.field(factory=dict)
    """Our slot names by the runtime's prefixes."""


def native_optimizer(problem: Problem) -> _Native | None:
    """The runtime's optimizer that is equivalent to ours; None without an equivalent."""
    values = problem.optimizer.hyper_values()
    if problem.optimizer_name == "sgd":
        return _Native("SGDOptimizer")
    betas = {"alpha": values.get("beta1", 0.9), "beta": values.get("beta2", 0.999)}
    slots = dict(zip(("Moment_1_", "Moment_2_"), problem.optimizer.slots, strict=False))
    if problem.optimizer_name == "adam":
        floats = {**betas, "epsilon": values["eps"], "lambda": 0.0}
        return _Native(
            "AdamOptimizer", floats, {"do_bias_correction": 1, "weight_decay_mode": 0}, slots
        )
    if problem.optimizer_name == "lamb":
        floats = {**betas, "epsilon": values["eps"], "lambda": values["weight_decay"]}
        floats |= {name: values[name] for name in ("ratio_min", "ratio_max")}
        return _Native("LambOptimizer", floats, {"do_bias_correction": 1}, slots)
    return None


def _tensors(program: Program) -> list[str]:
    """The names of all tensors of a graph, without those of its subgraphs."""
    graph = program.proto().graph
    names = [name for node in graph.node for name in node.output if name]
    return [*(v.name for v in (*graph.input, *graph.initializer)), *names]


def _numbered(program: Program) -> Program:
    """The program with numbers as names, because the runtime derives new names from them."""
    names = {name: f"t{k}" for k, name in enumerate(_tensors(program))}
    model = program.proto()
    _rename(model.graph, names)
    return attrs.evolve(
        program,
        model=model.SerializeToString(deterministic=True),
        inputs=tuple(attrs.evolve(s, name=names[s.name]) for s in program.inputs),
        outputs=tuple(attrs.evolve(s, name=names[s.name]) for s in program.outputs),
        hosts=tuple(
            attrs.evolve(h, spec=attrs.evolve(h.spec, name=names[h.spec.name]))
            for h in program.hosts
        ),
    )


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for places in (node.input, node.output):
            places[:] = [names.get(name, name) for name in places]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                inner = attribute.g
                own = {v.name for v in (*inner.input, *inner.initializer)}
                own.update(name for each in inner.node for name in each.output)
                _rename(inner, {old: new for old, new in names.items() if old not in own})


def native_session() -> Any:
    """The class TrainingSession; its import configures logging of the whole process, which is undone."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        from onnxruntime.capi.training.training_session import TrainingSession
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    return TrainingSession


@attrs.frozen(kw_only=True)
class TrainingSessionBackend(Backend):
    """Trains with the TrainingSession of onnxruntime-training 1.16.

    The optimizers are those of the runtime: ``sgd``, ``adam`` and, on GPUs, ``lamb``. Losses and
    penalties are the formulas of ortflex, differentiated by the runtime. All operators must therefore
    be among those that its gradient builder differentiates correctly, which is checked before training.
    Only float32 is supported.

    Example:
        >>> trainer = Trainer("model.onnx", backend="training_session")  # doctest: +SKIP
    """

    name: ClassVar[str] = "training_session"
    priority: ClassVar[int] = 20

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        if runtime.has_training_session:
            return []
        return [
            f"{runtime} has no TrainingSession; in a separate environment (Linux x86_64, Python 3.11, "
            f"numpy < 2), {install_command('session')} installs onnxruntime-training 1.16.3"
        ]

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        missing = self.available(runtime)
        if missing:
            return missing
        reasons = [
            *_optimizer_reasons(problem, device),
            *_update_reasons(problem),
            *ort_gradients.reasons(problem, runtime),
        ]
        specs = problem.model.initializers
        doubles = [n for n in problem.parameters if specs[n].dtype != TensorProto.FLOAT]
        if doubles:
            reasons.append(f"TrainingSession trains float32 only, {doubles[0]!r} is float64")
        reasons += ort_gradients.precision_reasons(problem)
        if not reasons and stops_gradients(problem):
            reasons.append(
                "onnxruntime would also differentiate the parts of the loss that are constants: "
                "the assignment of boxes"
            )
        if not reasons:
            program = training_program(problem, ort_gradients.rewrite(problem))
            names = ort_gradients.names_of(program, problem.parameters)
            reasons = ort_gradients.operators_without_gradient(
                program.proto(), names, program.outputs[0].name, runtime
            )
        return reasons

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> TrainingSessionEngine:
        return TrainingSessionEngine(problem, device, runtime)


def _optimizer_reasons(problem: Problem, device: Device) -> list[str]:
    name = problem.optimizer_name
    native = native_optimizer(problem)
    decay = getattr(problem.optimizer, "weight_decay", None)
    if name == "sgd" and decay:
        return ["onnxruntime's SGDOptimizer has no weight_decay; fused and training_agent do"]
    if native is None:
        others = [b for b in problem.plugins["backends"].names() if b != "training_session"]
        return [
            f"TrainingSession has the optimizers sgd, adam and lamb, not "
            f"{problem.optimizer.name or type(problem.optimizer).__name__!r}; any optimizer runs on "
            f"{' and '.join(others)}"
        ]
    if name == "lamb" and "CPUExecutionProvider" in device.providers()[:1]:
        return [
            "onnxruntime 1.16 has LambOptimizer for GPUs only; on the CPU lamb runs on training_agent"
        ]
    return []


def _update_reasons(problem: Problem) -> list[str]:
    """Why the runtime's update, one operator, cannot train a problem."""
    updating = problem.updating
    requested = {
        **{t.transform.name or type(t.transform).__name__: True for t in updating.transforms},
        "accumulate": updating.accumulate > 1,
        "groups": bool(updating.groups),
        "constraint": bool(updating.constraints),
        "averaging": updating.average is not None,
    }
    return [
        f"TrainingSession updates the weights itself and has no {name}; fused and training_agent do"
        for name, is_requested in requested.items()
        if is_requested
    ]


class TrainingSessionEngine(DeviceEngine):
    """A compiled problem on TrainingSession (see :class:`ortflex_core.Engine`)."""

    steps_per_run = 1

    def __init__(self, problem: Problem, device: Device, runtime: Runtime) -> None:
        super().__init__(problem, device)
        self._native = native_optimizer(problem)
        self._program = training_program(problem, ort_gradients.rewrite(problem))
        if any(n.startswith(_PREFIXES) or n.endswith("_grad") for n in _tensors(self._program)):
            self._program = _numbered(self._program)
        ports = ports_of("parameter", problem.parameters)
        # The name of each parameter in the graph and in the runtime's state.
        self._names = {n: self._program.takes[port].name for n, port in ports.items()}
        self._session = self._open()
        rate = device.empty([1], np.float32)
        self._rate = Scalar(device, rate)
        self._rate_value = rate
        self._hosts = HostVector(self._program, device, problem.constants())
        self._scales = Scales(problem, self._hosts)
        costs: dict[Key, Value] = {k: device.empty([], np.float32) for k in self._program.gives}
        self._costs = {self._program.gives[key].name: value for key, value in costs.items()}
        self._loss = Scalar(device, costs[Port("loss")])
        penalty = costs.get(Port("penalty"))
        self._penalty = None if penalty is None else Scalar(device, penalty)
        self._each = [Scalar(device, costs[port]) for port in loss_ports(problem)]
        self._weights: dict[str, Value] | None = None
        self._copied = 0
        self._plans = PlanCache[tuple[DataBuffers, Binder]]()
        self._last: tuple[Any, int, DataBuffers, Binder] | None = None
        taken, ports = self._program.takes, problem.column_ports
        self._columns = {s.name: s for s in problem.columns if ports[s.name] in taken}

    def _open(self) -> Any:
        """The runtime's session: weights among the inputs *and* the initializers, as it requires."""
        from onnxruntime.capi import _pybind_state as state

        problem, native = self.problem, self._native
        assert native is not None
        proto = self._program.proto()
        trained = set(self._names.values())
        infos = {info.name: info for info in proto.graph.input}
        for key, spec in self._program.takes.items():
            if not isinstance(key, Port) or key.role in COLUMNS:
                continue
            array = buffer_value(problem, str(key.of))
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, spec.name))
            if spec.name not in trained:
                proto.graph.input.remove(infos[spec.name])
        parameters = state.TrainingParameters()
        parameters.loss_output_name = self._program.outputs[0].name
        parameters.use_mixed_precision = False
        # On by default: AdamOptimizer then clips the gradient to norm 1.
        parameters.enable_grad_norm_clip = False
        parameters.weights_to_train = trained
        parameters.training_optimizer_name = native.operator
        parameters.optimizer_attributes_map = {n: dict(native.floats) for n in trained}
        parameters.optimizer_int_attributes_map = {n: dict(native.ints) for n in trained}
        self._parameters = parameters
        options = session_options(problem.threads)
        # SGDOptimizer updates in place. In the default order it does so before the backward pass
        # has read the weight: the gradients of all earlier layers would see the new one.
        options.execution_order = state.ExecutionOrder.PRIORITY_BASED
        try:
            return keep_alive(
                native_session()(
                    proto.SerializeToString(),
                    parameters,
                    options,
                    providers=self.device.providers(),
                )
            )
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(f"TrainingSession refuses the graph: {error_reason(error)}") from error

    def _plan(self, batch: Batch) -> tuple[DataBuffers, Binder]:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1] == batch.size:
            return last[2], last[3]
        key = tuple(batch.shape(n) for n in self._columns)
        data, binder = self._plans.get(key, lambda: self._bind(batch))
        self._last = (batch.columns, batch.size, data, binder)
        return data, binder

    def _bind(self, batch: Batch) -> tuple[DataBuffers, Binder]:
        """Memory and bindings for batches of one shape."""
        data = DataBuffers(self.device, self._columns.values(), batch)
        binder = Binder(self._session, "training")
        ports = self.problem.column_ports
        for name, value in data.values.items():
            binder.input(self._program.takes[ports[name]].name, value)
        binder.hosts(self._hosts)
        binder.input("Learning_Rate", self._rate_value)
        for name, value in self._costs.items():
            binder.output(name, value)
        return data, binder

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        out = []
        for batch, rate in zip(batches, rates, strict=True):
            data, binder = self._plan(batch)
            data.fill(batch)
            self._scales.set(batch.denominators)
            self._rate.write(rate)
            self._weights = None
            binder.run()
            self._step += 1
            penalty = self._penalty.read() if self._penalty is not None else 0.0
            out.append((self._loss.read(), penalty, *(cost.read() for cost in self._each)))
        return ReadLosses(out)

    @property
    def _now(self) -> dict[str, Value]:
        """The weights on the evaluation's side, copied out of the session if they changed."""
        if self._weights is None:
            self._weights = {n: self.device.put(a) for n, a in self.state().items()}
            self._copied += len(self._weights)
        return self._weights

    def state(self) -> dict[str, Array]:
        everything = self._session.get_state()
        return {n: np.array(everything[name]) for n, name in self._names.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        shapes = {
            n: self.problem.model.initializers[n].shape or () for n in self.problem.parameters
        }
        check_state(state, shapes, "parameter")  # type: ignore[arg-type]
        names = self._names
        values = {names[n]: np.asarray(a, dtype=np.float32, order="C") for n, a in state.items()}
        self._session.load_state(values, strict=False)
        self._weights = None

    def slots(self) -> dict[str, Array]:
        assert self._native is not None
        everything = self._session.get_state()
        out: dict[str, Array] = {"step": np.asarray(self._step)}
        for prefix, slot in self._native.slots.items():
            for key, name in self._keys(slot):
                out[key] = np.array(everything[prefix + name])
        return out

    def _keys(self, slot: str) -> list[tuple[str, str]]:
        """The name of a slot in checkpoints, and the graph's name of the parameter."""
        ports = self.problem.slot_ports.items()
        return [(key, self._names[str(p.of)]) for key, p in ports if p.slot == slot]

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        assert self._native is not None
        known = {key: array.shape for key, array in self.slots().items()}
        check_state(slots, known, "optimizer slot")
        self._step = int(slots.get("step", self._step))
        values: dict[str, Array] = {}
        for prefix, slot in self._native.slots.items():
            for key, name in self._keys(slot):
                if key in slots:
                    values[prefix + name] = np.asarray(slots[key], dtype=np.float32)
                # The runtime counts updates from 1, as the next one's number.
                values[f"Update_Count_{name}"] = np.asarray([self._step + 1], dtype=np.int64)
        if values:
            self._session.load_state(values, strict=False)

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {"training": self._program}
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        return {
            **binding_counts(binder for _, binder in self._plans),
            "weights_copied": self._copied,
            "steps": self._step,
        }

    def close(self) -> None:
        self._plans.clear()
        self._last = None

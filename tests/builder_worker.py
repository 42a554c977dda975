"""Gradients by onnxruntime's own builder, in a process of their own: on some graphs it aborts.

``python builder_worker.py agent|session jobs.pickle results.pickle``; a job is (model, feeds,
parameters, cotangents), a result the gradients by parameter, or the text of an error.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Arrays = dict[str, Any]


def by_agent(model: bytes, feeds: Arrays, parameters: list[str], cotangents: Arrays) -> Arrays:
    import onnxruntime as ort
    from onnxruntime.capi import _pybind_state as state

    config = state.OrtModuleGraphBuilderConfiguration()
    config.initializer_names = []
    config.initializer_names_to_train = []
    config.input_names_require_grad = parameters
    config.build_gradient_graph = True
    builder = state.OrtModuleGraphBuilder()
    builder.initialize(model, config)
    builder.build(state.TrainingGraphTransformerConfiguration())
    info = builder.get_graph_info()
    session = ort.InferenceSession(
        builder.get_gradient_model(), _options(), providers=["CPUExecutionProvider"]
    )
    device = state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)
    inputs = [i.name for i in session.get_inputs()]
    outputs = list(info.user_output_names)
    fetches = [o.name for o in session.get_outputs()]
    agent = state.TrainingAgent(
        session._sess, inputs, [device] * len(outputs), fetches, [device] * len(fetches), 0
    )

    def pack(arrays: list[Any]) -> tuple[Any, Any]:
        values = [state.OrtValue.ortvalue_from_numpy(a, device) for a in arrays]
        vector = state.OrtValueVector()
        for value in values:
            vector.push_back(value)
        return vector, (arrays, values)  # whatever a vector points to has to stay alive

    given, _kept = pack([feeds[n] for n in inputs])
    seeds, _kept_too = pack([cotangents[n] for n in outputs])
    forward, backward = state.OrtValueVector(), state.OrtValueVector()
    step = state.PartialGraphExecutionState()
    agent.run_forward(given, forward, step, state.OrtValueCache())
    agent.run_backward(seeds, backward, step)
    owner = {gradient: name for name, gradient in info.user_input_grad_names.items()}
    return {owner[n]: backward[k].numpy().copy() for k, n in enumerate(fetches)}


def by_session(model: bytes, feeds: Arrays, parameters: list[str], cotangents: Arrays) -> Arrays:
    """One step of SGD at rate 1 on Σ cotangent · output: what the weights lost."""
    from onnxruntime.capi import _pybind_state as state
    from onnxruntime.capi.training.training_session import TrainingSession

    proto = onnx.load_model_from_string(model)
    graph = proto.graph
    graph.initializer.extend(onnx.numpy_helper.from_array(feeds[n], n) for n in parameters)
    [(output, seed)] = cotangents.items()
    graph.input.append(helper.make_tensor_value_info("seed", TensorProto.FLOAT, seed.shape))
    graph.node.append(helper.make_node("Mul", [output, "seed"], ["products"]))
    graph.node.append(helper.make_node("ReduceSum", ["products"], ["total"], keepdims=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("total", TensorProto.FLOAT, []))
    settings = state.TrainingParameters()
    settings.loss_output_name = "total"
    settings.use_mixed_precision = False
    settings.weights_to_train = set(parameters)
    settings.training_optimizer_name = "SGDOptimizer"
    settings.optimizer_attributes_map = {n: {} for n in parameters}
    settings.optimizer_int_attributes_map = {n: {} for n in parameters}
    options = _options()
    options.execution_order = state.ExecutionOrder.PRIORITY_BASED  # as the backend has it
    session = TrainingSession(
        proto.SerializeToString(), settings, options, providers=["CPUExecutionProvider"]
    )
    arrays = {n: a for n, a in feeds.items() if n not in parameters}
    arrays |= {"seed": seed, "Learning_Rate": np.ones(1, np.float32)}
    known = {i.name for i in session.get_inputs()}
    session.run(["total"], {n: a for n, a in arrays.items() if n in known})
    after = session.get_state()
    return {n: feeds[n] - after[n].reshape(feeds[n].shape) for n in parameters}


def _options() -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def main(how: str, source: str, target: str) -> None:
    sys.modules["onnxruntime.training"] = None  # type: ignore[assignment]  # it imports torch
    import onnxruntime as ort

    del sys.modules["onnxruntime.training"]
    ort.set_default_logger_severity(4)
    with open(source, "rb") as file:
        jobs = pickle.load(file)
    run = {"agent": by_agent, "session": by_session}[how]
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = run(*job)
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            results[name] = f"{type(error).__name__}: {error}"[:500]
    with open(target, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

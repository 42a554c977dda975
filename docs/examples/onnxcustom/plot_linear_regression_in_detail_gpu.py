"""
Linear regression in detail, on a GPU
=====================================

The training of the page before, with data and weights on a GPU. The difference is the memory: batches are
copied to the device, all other values are bound to memory that stays there, and the loss is copied back
only when it is read. Without a GPU, the page binds main memory instead, and everything else is the same.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import onnx.parser
import onnxruntime
from example_tools import available_backends, best_device
from onnx import helper, numpy_helper

from ortflex import Trainer, gradient_model

device = best_device()
providers = ["CUDAExecutionProvider"] if device == "cuda" else []
providers.append("CPUExecutionProvider")
rng = np.random.default_rng(0)
X = rng.standard_normal((2000, 50)).astype(np.float32)
truth = rng.standard_normal((50, 1)).astype(np.float32)
y = X @ truth + 0.1 * rng.standard_normal((2000, 1)).astype(np.float32)
weights = {"coef": np.zeros((50, 1), np.float32), "intercept": np.zeros(1, np.float32)}


def model(inputs, outputs, nodes=""):
    """A linear model, and what is computed from its output."""
    made = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> linear ({inputs}) => ({outputs})
        {{ product = MatMul(X, coef)  Y = Add(product, intercept) {nodes} }}"""
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made.graph.initializer.extend(tensors)
    return made


with_loss = model(
    "float[N, 50] X, float[N, 1] label",
    "float loss",
    """error = Sub(Y, label)  square = Mul(error, error)
    loss = ReduceMean<keepdims = 0>(square)""",
)

# %%
# Binding memory
# --------------
#
# A session reads and writes bound memory on the device without copies. onnxruntime keeps only addresses, so
# the caller must keep the memory.

alive = []


def on_device(array):
    """A copy of an array on the device."""
    copy = np.array(array, order="C")
    alive.append(onnxruntime.OrtValue.ortvalue_from_numpy(copy, device, 0))
    return alive[-1]


batch, rate = 100, np.float32(0.05)
rows, labels, loss = on_device(X[:batch]), on_device(y[:batch]), on_device(np.float32(0))


def bound(session, inputs, outputs):
    """The bindings of a session."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    return binding


# %%
# With TrainingSession, the weights are inside the session. A batch, the rate and the loss are bound once
# for all steps.


def training_session():
    """Two functions: one makes a step, the other reads the weights."""
    from onnxruntime.capi import _pybind_state as state
    from onnxruntime.capi.training.training_session import TrainingSession

    for name, array in weights.items():
        info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        with_loss.graph.input.append(info)
    parameters = state.TrainingParameters()
    parameters.loss_output_name = "loss"
    parameters.use_mixed_precision = False
    parameters.enable_grad_norm_clip = False
    parameters.weights_to_train = set(weights)
    parameters.training_optimizer_name = "SGDOptimizer"
    parameters.optimizer_attributes_map = {name: {} for name in weights}
    parameters.optimizer_int_attributes_map = {name: {} for name in weights}
    options = onnxruntime.SessionOptions()
    options.execution_order = state.ExecutionOrder.PRIORITY_BASED
    options.log_severity_level = 3
    session = TrainingSession(
        with_loss.SerializeToString(), parameters, options, providers=providers
    )
    inputs = {"X": rows, "label": labels, "Learning_Rate": on_device(rate[None])}
    binding = bound(session, inputs, {"loss": loss})
    return lambda: session.run_with_iobinding(binding), session.get_state


# %%
# In the other graph, each weight has two places that take turns: one is read, the other is written.
# Binding an output over its own input would save one of them, but the results are wrong if the update runs
# before the last reader of the old value.


def by_hand():
    """As above, on any onnxruntime."""
    proto = gradient_model(with_loss, wrt=list(weights), outputs=["loss"])
    graph = proto.graph
    graph.input.append(helper.make_tensor_value_info("rate", onnx.TensorProto.FLOAT, []))
    for name, array in weights.items():
        graph.node.append(helper.make_node("Mul", ["rate", f"gradient/{name}"], [f"d/{name}"]))
        graph.node.append(helper.make_node("Sub", [name, f"d/{name}"], [f"new/{name}"]))
        info = helper.make_tensor_value_info(f"new/{name}", onnx.TensorProto.FLOAT, array.shape)
        graph.output.append(info)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=providers)
    fixed = {"X": rows, "label": labels, "rate": on_device(rate)}
    fixed["cotangent/loss"] = on_device(np.float32(1))
    places = [{name: on_device(array) for name, array in weights.items()} for _ in range(2)]
    bindings = [
        bound(
            session,
            {**fixed, **places[now]},
            {"loss": loss, **{f"new/{name}": v for name, v in places[1 - now].items()}},
        )
        for now in (0, 1)
    ]
    turns = [0]

    def step():
        session.run_with_iobinding(bindings[turns[0] % 2])
        turns[0] += 1

    return step, lambda: {name: v.numpy() for name, v in places[turns[0] % 2].items()}


if "training_session" in available_backends():
    print("on TrainingSession")
    step, state = training_session()
else:
    print("this onnxruntime has no TrainingSession: the graph made by hand is run")
    step, state = by_hand()

# %%
# The loop
# --------

losses, began = [], time.perf_counter()
for _ in range(5):
    for start in range(0, len(X), batch):
        rows.update_inplace(X[start : start + batch])
        labels.update_inplace(y[start : start + batch])
        step()
        losses.append(float(loss.numpy()))
print(f"{1e6 * (time.perf_counter() - began) / len(losses):.0f} µs a step")

# %%
# The same with a Trainer
# -----------------------

trainer = Trainer(
    model("float[N, 50] X", "float[N, 1] Y"),
    loss="squared_error",
    optimizer="sgd",
    learning_rate=float(rate),
    batch_size=batch,
    epochs=5,
    shuffle=False,
    device=device,
    progress=False,
)
history = trainer.fit(X, y)
for name, array in trainer.get_state().items():
    np.testing.assert_allclose(array, state()[name], rtol=1e-3, atol=1e-4)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.semilogy(np.arange(len(losses)) / 20, losses, label="by hand, each step")
axes.semilogy(np.arange(5) + 0.5, history.losses, "o", label="Trainer, each epoch")
axes.set_xlabel("epoch")
axes.set_ylabel("squared error")
axes.legend()

"""
Linear regression in detail, on TrainingSession
===============================================

This page shows what ``backend="training_session"`` does: a graph with a loss, a session that
differentiates and updates it, and a loop. onnxruntime's ``TrainingSession`` is in onnxruntime-training
1.16; with another onnxruntime, the page runs the same loop on a graph that contains gradient and update.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx.parser
import onnxruntime
from example_tools import available_backends
from onnx import helper, numpy_helper

from ortflex import gradient_model

rng = np.random.default_rng(0)
X = rng.standard_normal((320, 3)).astype(np.float32)
truth = np.array([[1.0], [-2.0], [0.5]], np.float32)
y = X @ truth + 0.3 + 0.1 * rng.standard_normal((320, 1)).astype(np.float32)

# %%
# A graph with a loss
# -------------------
#
# ``Y = X · coef + intercept`` and the mean of its squared error. The label is one more input, the loss
# the output that is differentiated.

weights = {"coef": np.zeros((3, 1), np.float32), "intercept": np.zeros(1, np.float32)}
model = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    training (float[N, 3] X, float[N, 1] label) => (float loss)
    { product = MatMul(X, coef)  Y = Add(product, intercept)
      error = Sub(Y, label)  square = Mul(error, error)
      loss = ReduceMean<keepdims = 0>(square) }"""
)
for name, array in weights.items():
    model.graph.initializer.append(numpy_helper.from_array(array, name))

# %%
# TrainingSession
# ---------------
#
# It needs the weights as initializers and as inputs, the name of the loss, and the name of one of its own
# optimizers; it adds an input ``Learning_Rate``. Two of its defaults are dangerous: in the default order of
# execution, ``SGDOptimizer`` may write a weight before the backward pass has read it, and for some
# optimizers gradients are clipped to norm 1.


def training_session():
    """Two functions: one makes a step and returns its loss, the other reads the weights."""
    from onnxruntime.capi import _pybind_state as state
    from onnxruntime.capi.training.training_session import TrainingSession

    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    for name, array in weights.items():
        info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        proto.graph.input.append(info)
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
        proto.SerializeToString(), parameters, options, providers=["CPUExecutionProvider"]
    )

    def step(rows, labels, rate):
        feeds = {"X": rows, "label": labels, "Learning_Rate": np.array([rate], np.float32)}
        return float(session.run(["loss"], feeds)[0])

    return step, session.get_state


# %%
# The same without it
# -------------------
#
# :func:`ortflex_core.gradient_model` writes the gradient of the loss as a graph of standard operators;
# two nodes for each weight subtract it. The new weights are outputs.


def by_hand():
    """As above, on any onnxruntime."""
    proto = gradient_model(model, wrt=list(weights), outputs=["loss"])
    graph = proto.graph
    graph.input.append(helper.make_tensor_value_info("rate", onnx.TensorProto.FLOAT, []))
    for name, array in weights.items():
        change, new = f"change/{name}", f"new/{name}"
        graph.node.append(helper.make_node("Mul", ["rate", f"gradient/{name}"], [change]))
        graph.node.append(helper.make_node("Sub", [name, change], [new]))
        info = helper.make_tensor_value_info(new, onnx.TensorProto.FLOAT, array.shape)
        graph.output.append(info)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = dict(weights)

    def step(rows, labels, rate):
        feeds = {"X": rows, "label": labels, "rate": np.array(rate, np.float32), **values}
        feeds["cotangent/loss"] = np.array(1, np.float32)
        loss, *new = session.run(["loss", *(f"new/{n}" for n in values)], feeds)
        values.update(zip(values, new, strict=True))
        return float(loss)

    return step, lambda: values


if "training_session" in available_backends():
    print("on TrainingSession")
    step, state = training_session()
else:
    print("this onnxruntime has no TrainingSession: the graph made by hand is run")
    step, state = by_hand()

# %%
# The loop
# --------

losses, batch = [], 20
for _ in range(8):
    order = rng.permutation(len(X))
    for start in range(0, len(X), batch):
        rows = order[start : start + batch]
        losses.append(step(X[rows], y[rows], rate=0.05))

design = np.hstack([X, np.ones((len(X), 1))])
exact = np.linalg.lstsq(design, y, rcond=None)[0].ravel()
found = np.concatenate([np.ravel(state()[name]) for name in weights])
print("found:        ", found)
print("least squares:", exact)
assert np.abs(found - exact).max() < 0.02

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.semilogy(losses)
axes.axhline(0.01, color="gray", linestyle=":", label="the noise")
axes.set_xlabel("step")
axes.set_ylabel("squared error of the batch")
axes.legend()

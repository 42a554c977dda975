"""
Linear regression in detail, by hand
====================================

What a step of training is: the loss of a batch, the gradient of the loss, the update. Here the gradient
comes from :func:`ortflex_core.gradient_model`, a plain ONNX model, and everything else is numpy.
:class:`ortflex_core.Trainer` puts the same into one graph; both end in the same weights.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from example_tools import available_backends, best_device, show_versions
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import Trainer, gradient_model

rng = np.random.default_rng(0)
X = rng.standard_normal((320, 3)).astype(np.float32)
truth = np.array([[1.0], [-2.0], [0.5]], np.float32)
y = X @ truth + 0.1 * rng.standard_normal((320, 1)).astype(np.float32)

graph = helper.make_graph(
    [
        helper.make_node("MatMul", ["X", "coef"], ["product"]),
        helper.make_node("Add", ["product", "intercept"], ["Y"]),
    ],
    "linear",
    [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 3])],
    [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", 1])],
    [
        numpy_helper.from_array(np.zeros((3, 1), np.float32), "coef"),
        numpy_helper.from_array(np.zeros(1, np.float32), "intercept"),
    ],
)
model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])

# %%
# The gradient as a model
# -----------------------
#
# Its inputs are the model's, the weights, and the gradient of the loss by the output.

backward = gradient_model(model, wrt=["coef", "intercept"])
print([i.name for i in backward.graph.input], "->", [o.name for o in backward.graph.output])
session = onnxruntime.InferenceSession(
    backward.SerializeToString(), providers=["CPUExecutionProvider"]
)

# %%
# The loop
# --------

weights = {"coef": np.zeros((3, 1), np.float32), "intercept": np.zeros(1, np.float32)}
rate, batch, losses = np.float32(0.05), 20, []
for _ in range(5):
    for start in range(0, len(X), batch):
        rows = slice(start, start + batch)
        (predicted,) = session.run(
            ["Y"], {"X": X[rows], **weights, "cotangent/Y": np.zeros((batch, 1), np.float32)}
        )
        error = predicted - y[rows]
        losses.append(float((error**2).mean()))
        names = ["gradient/coef", "gradient/intercept"]
        found = session.run(names, {"X": X[rows], **weights, "cotangent/Y": 2 * error / batch})
        for name, gradient in zip(weights, found, strict=True):
            weights[name] = weights[name] - rate * gradient

# %%
# The same by a Trainer
# ---------------------
#
# On ``training_session`` where onnxruntime-training 1.16 is installed, else on what there is; on a GPU
# where there is one.

backends, device = available_backends(), best_device()
backend = "training_session" if "training_session" in backends else "fused"
print(f"backend {backend}, device {device}; available: {', '.join(backends)}")
trainer = Trainer(
    model,
    loss="squared_error",
    learning_rate=0.05,
    batch_size=20,
    epochs=5,
    shuffle=False,
    backend=backend,
    device=device,
    progress=False,
)
trainer.fit(X, y)
for name, array in trainer.get_state().items():
    print(name, np.ravel(array), "by hand:", np.ravel(weights[name]))
    np.testing.assert_allclose(array, weights[name], rtol=1e-4, atol=1e-5)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.semilogy(losses)
axes.set_xlabel("step")
axes.set_ylabel("squared error of the batch")

# %%
# Versions
# --------

show_versions()

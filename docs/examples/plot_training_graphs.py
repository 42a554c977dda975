"""
Pictures of the graphs that training uses
=========================================

This page draws a model, its gradient, and the graph of a complete training step, in which forward, loss,
backward and update have different colors. ``ortflex graph model.onnx -o graph.svg`` draws the same on the
command line.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ortflex import Trainer, draw, draw_step, gradient_model
from ortflex_core import internals_of, loss_program, update_program

rng = np.random.default_rng(0)
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["X", "W1", "b1"], ["h"], name="dense1"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "W2", "b2"], ["Y"], name="dense2"),
    ],
    "two layers",
    [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 4])],
    [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", 1])],
    [
        numpy_helper.from_array(rng.standard_normal((4, 5)).astype(np.float32), "W1"),
        numpy_helper.from_array(np.zeros(5, np.float32), "b1"),
        numpy_helper.from_array(rng.standard_normal((5, 1)).astype(np.float32), "W2"),
        numpy_helper.from_array(np.zeros(1, np.float32), "b2"),
    ],
)
model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])

# %%
# The model
# ---------

draw(model)

# %%
# Its gradient
# ------------

draw(gradient_model(model, wrt=["W1", "b1", "W2", "b2"]), title="forward, and the gradient")

# %%
# A step of training
# ------------------
#
# Gradient descent on the squared error, with a penalty on the weights.

trainer = Trainer(
    model, loss="squared_error", penalty={"W*": {"name": "l2", "l2": 0.01}}, progress=False
)
trainer.step((rng.standard_normal((8, 4)).astype(np.float32), np.ones((8, 1), np.float32)))
draw_step(trainer)

# %%
# The three graphs of forward and backward
# ----------------------------------------
#
# If onnxruntime's ``TrainingAgent`` runs the model (``backend="training_agent"``), a step is not one graph
# but three: the model's gradient; the loss and its gradient by the predictions; and the update, which
# includes the penalty. onnxruntime makes the first one; this is ortflex's own, which computes the same.

problem = internals_of(trainer).problem
three = {
    "model and gradient": gradient_model(model, wrt=["W1", "b1", "W2", "b2"]),
    "loss": loss_program(problem).proto(),
    "update": update_program(problem).proto(),
}
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
bars = axes.barh(list(three), [len(made.graph.node) for made in three.values()])
axes.bar_label(bars, padding=3)
axes.margins(x=0.08)
axes.invert_yaxis()
axes.set_xlabel("nodes")

# %%
# The loss and its gradient, which is the input of the backward pass.

draw(three["loss"], title="the loss")

# %%
# The penalty, its gradient, and the update of all weights at once.

draw(three["update"], title="the update")

# %%
# The graphs in use
# -----------------

graphs = trainer.save_onnx_graph()
for name, made in graphs.items():
    print(f"{name}: {len(made.graph.node)} nodes")

# %%
# The graphs that run are the formulas above after the passes that make them smaller.

draw(next(iter(graphs.values())), title=f"in use: {next(iter(graphs))}")

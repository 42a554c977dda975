"""
Teach a small model with a large one
====================================

A large network learns handwritten digits from all labels. A small one, with a fortieth of its numbers,
gets 200 labels only. It is trained three times: with its labels, and with the scores of the large network
for the rows without labels, at two temperatures.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from onnx import numpy_helper, parser
from sklearn.datasets import load_digits

from ortflex import Trainer

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
rows, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
train, unseen = slice(0, 1300), slice(1300, None)
few = slice(0, 200)


def network(hidden, seed):
    """Two layers with random weights."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> digits (float[N, 64] X) => (float[N, 10] scores)
        { a = Gemm (X, W1, b1)  h = Relu (a)  scores = Gemm (h, W2, b2) }"""
    )
    rng = np.random.default_rng(seed)
    shapes = {"W1": (64, hidden), "b1": (hidden,), "W2": (hidden, 10), "b2": (10,)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape) * (np.sqrt(2 / shape[0]) if len(shape) == 2 else 0)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


held_out = {"validation_data": (rows[unseen], labels[unseen])}
settings = {"optimizer": "adam", "metrics": "accuracy", "progress": False}

# %%
# The teacher
# -----------

large = Trainer(
    network(256, 1),
    loss="softmax_cross_entropy",
    learning_rate=0.003,
    schedule="cosine",
    epochs=30,
    **settings,
)
teacher = large.fit(rows[train], labels[train], **held_out)
path = str(Path(tempfile.mkdtemp()) / "large.onnx")
large.export(path)
print(f"the teacher: {teacher['validation_accuracy'][-1]:.1%}")

# %%
# The small model
# ---------------
# With ``alpha=1`` the loss reads no labels, so all rows can be used. The scores of the teacher are
# computed once for each row.

small = {"learning_rate": 0.01, "schedule": "cosine", **settings}
alone = Trainer(network(6, 2), loss="softmax_cross_entropy", epochs=390, **small)
histories = {"200 labels": alone.fit(rows[few], labels[few], **held_out)}
for temperature in (1.0, 4.0):
    loss = {
        "name": "distillation",
        "teacher": path,
        "temperature": temperature,
        "alpha": 1.0,
    }
    taught = Trainer(network(6, 2), loss=loss, epochs=60, **small)
    histories[f"teacher, T = {temperature:g}"] = taught.fit(rows[train], labels[train], **held_out)
for name, history in histories.items():
    print(f"{name}: {history['validation_accuracy'][-1]:.1%}")

# %%
# Accuracy on held-out rows
# -------------------------------------
# The three trainings have about the same number of steps.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for name, history in histories.items():
    accuracy = history["validation_accuracy"]
    axis.plot(np.linspace(0, 1, len(accuracy)), accuracy, label=name)
axis.axhline(teacher["validation_accuracy"][-1], color="black", linestyle=":", label="the teacher")
axis.set(xlabel="part of the training", ylabel="accuracy", ylim=(0.6, 1))
axis.legend(loc="lower right")

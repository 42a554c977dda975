"""
Fine-tuning a convolutional network
===================================

A network was trained on digits that are white on black, and the new digits are black on white. At first
only the head and the normalization are trained, then all weights, with a tenth of the rate.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

from ortflex import Trainer

digits = load_digits()
images = (digits.images / 16).astype(np.float32)[:, None]
labels = digits.target
train, test = slice(0, 1200), slice(1200, None)

rng = np.random.default_rng(0)


def weights(name, *shape):
    """Random weights of a sensible size."""
    bound = np.sqrt(6 / np.prod(shape[1:]))
    return numpy_helper.from_array(rng.uniform(-bound, bound, shape).astype(np.float32), name)


node = helper.make_node
same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
graph = helper.make_graph(
    [
        node("Conv", ["image", "conv1", "bias1"], ["c1"], **same),
        node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "conv2", "bias2"], ["c2"], **same),
        node("Relu", ["c2"], ["r2"]),
        node("Flatten", ["r2"], ["f"]),
        node("Gemm", ["f", "head", "bias3"], ["scores"], transB=1),
    ],
    "convolutional",
    [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
    [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
    [
        weights("conv1", 8, 1, 3, 3),
        numpy_helper.from_array(np.zeros(8, np.float32), "bias1"),
        weights("conv2", 16, 8, 3, 3),
        numpy_helper.from_array(np.zeros(16, np.float32), "bias2"),
        weights("head", 10, 256),
        numpy_helper.from_array(np.zeros(10, np.float32), "bias3"),
    ],
)
model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
common = {"loss": "softmax_cross_entropy", "metrics": ["accuracy"], "progress": False}

# %%
# The existing network
# --------------------

first = Trainer(model, optimizer="adam", epochs=8, **common)
first.fit(images[train], labels[train])
known = first.export()
inverted = 1 - images
print("as it knows them:", first.evaluate(images[test], labels[test])["accuracy"])
print("black on white:  ", first.evaluate(inverted[test], labels[test])["accuracy"])

# %%
# Fine-tuning by groups
# ---------------------
#
# The convolutions start to move after three epochs, with three tenths of the rate.

tuned = Trainer(
    known,
    optimizer="adam",
    epochs=10,
    groups=[{"params": ["conv*", "bias1", "bias2"], "rate": 0.3, "start_epoch": 3}],
    **common,
)
history = tuned.fit(inverted[train], labels[train], validation_data=(inverted[test], labels[test]))
print("after fine-tuning:", history["validation_accuracy"][-1])

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.imshow(np.vstack([np.hstack(some[:5, 0]) for some in (images, inverted)]), cmap="gray")
left.set_axis_off()
right.plot(range(1, 11), history["validation_accuracy"])
right.axvline(3.5, color="gray", linestyle=":")
right.text(3.6, min(history["validation_accuracy"]), "convolutions too")
right.set_xlabel("epoch")
right.set_ylabel("accuracy, held out")

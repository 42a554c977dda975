"""
A neural network made by scikit-learn
=====================================

A classifier that scikit-learn trained for a few epochs is exported, and ortflex continues where
scikit-learn stopped, with any onnxruntime and, if there is one, on a GPU.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from example_tools import best_device
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from ortflex import Trainer

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # three epochs are few, and that is the point
    network = MLPClassifier((64,), max_iter=3, random_state=0).fit(X_train, y_train)
model = to_onnx(network, X[:1], target_opset=17, options={"zipmap": False})

# %%
# Continue the training
# ---------------------
#
# The loss uses the logits before the softmax, and the class labels come from the file.

device = best_device()
trainer = Trainer(
    model,
    loss="softmax_cross_entropy",
    optimizer="adam",
    metrics=["accuracy"],
    epochs=15,
    device=device,
    progress=False,
)
before = network.score(X_test, y_test)
history = trainer.fit(X_train, y_train, validation_data=(X_test, y_test))
print(f"accuracy {before:.3f} -> {history['validation_accuracy'][-1]:.3f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.semilogy(history.losses, label="training")
left.semilogy(history["validation_loss"], label="held out")
left.set_xlabel("epoch")
left.set_ylabel("cross entropy")
left.legend()
right.axhline(before, color="gray", linestyle=":", label="scikit-learn, 3 epochs")
right.plot(history["validation_accuracy"], label="going on")
right.set_xlabel("epoch")
right.set_ylabel("accuracy, held out")
right.legend()

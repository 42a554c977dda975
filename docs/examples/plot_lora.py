"""
Adapt a classifier with LoRA
============================

A classifier of handwritten digits gets new digits, which are white on black and upside down. Low-rank
adapters learn the new style. The weights stay frozen, and the adapter is a small file, so that one model
can have many adapters.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from onnx import numpy_helper, parser
from sklearn.datasets import load_digits

from ortflex import Trainer

rng = np.random.default_rng(0)
WIDTH = 128
model = parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    digits (float[N, 64] image) => (float[N, 10] scores)
    { first = Gemm (image, W1, b1)   a = Relu (first)
       second = Gemm (a, W2, b2)      b = Relu (second)
       scores = Gemm (b, W3, b3) }"""
)
for k, (before, after) in enumerate([(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)], start=1):
    weight = (rng.standard_normal((before, after)) * np.sqrt(2 / before)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, f"W{k}"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(after, np.float32), f"b{k}"))

digits = load_digits()
X, y = (digits.data / 16).astype(np.float32), digits.target
train, test = slice(0, 1200), slice(1200, None)
common = {
    "loss": "softmax_cross_entropy",
    "optimizer": "adam",
    "batch_size": 32,
    "metrics": "accuracy",
    "progress": False,
}
first = Trainer(model, learning_rate=0.002, epochs=10, **common)
first.fit(X[train], y[train], validation_data=(X[test], y[test]))
base = first.export()
print("on digits as they were:", first.evaluate(X[test], y[test])["accuracy"])

# %%
# The new style
# -------------

styled = 1 - X[:, ::-1]
print("on the new style:", Trainer(base, **common).evaluate(styled[test], y[test])["accuracy"])

figure, (left, right) = plt.subplots(1, 2, figsize=(4, 2), layout="constrained")
left.imshow(X[0].reshape(8, 8), cmap="gray_r")
right.imshow(styled[0].reshape(8, 8), cmap="gray_r")

# %%
# Two matrices of rank 8 next to each weight
# ------------------------------------------
#
# Only they are trained. The curve of all weights is for comparison.


def adapted(**options):
    """Train on the new style."""
    trainer = Trainer(base, learning_rate=0.005, epochs=12, **common, **options)
    history = trainer.fit(styled[train], y[train], validation_data=(styled[test], y[test]))
    return trainer, history["validation_accuracy"]


lora, of_lora = adapted(adapters={"name": "lora", "rank": 8, "alpha": 16})
whole, of_whole = adapted()
for name, trainer in (("LoRA", lora), ("all weights", whole)):
    print(f"{name}: {sum(a.size for a in trainer.get_state().values()):,} numbers are trained")

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(of_lora, label="LoRA, rank 8")
axes.plot(of_whole, label="all weights")
axes.set_xlabel("epoch")
axes.set_ylabel("accuracy on other digits")
axes.legend()
assert of_lora[-1] > 0.85

# %%
# Files
# -----
#
# Merged, the model has its original nodes and is no slower. Separately, the adapter is a file that
# onnxruntime activates when the base runs.

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    lora.export(folder / "merged.onnx")
    lora.export_adapter(folder / "style.onnx_adapter")
    lora.export_base(folder / "base.onnx")
    for path in sorted(folder.iterdir()):
        print(f"{path.name:20} {path.stat().st_size:>8,} bytes")

"""
Detect objects: a network without anchors
=========================================

A network of four convolutions learns to find drawn squares and discs. For each cell of a grid it returns
the scores of the two classes, and the distributions of the distances from the center of the cell to the
four sides of a box. The loss ``task_aligned`` assigns the labeled boxes to cells, in the training graph.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnx import numpy_helper, parser

from ortflex import Trainer, pad_boxes
from ortflex_plugins.losses.detection import TaskAligned

SIZE, STRIDE, CLASSES, BINS = 48, 8, 2, 6
rng = np.random.default_rng(0)


def draw(count):
    """Images with up to three squares (class 0) and discs (class 1), and their boxes."""
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5
    images = rng.normal(0, 0.1, (count, 1, SIZE, SIZE)).astype(np.float32)
    boxes, kinds = [], []
    for image in images:
        own, own_kinds = [], []
        for _ in range(3):
            size, kind = rng.uniform(12, 22), int(rng.integers(2))
            left, top = rng.uniform(0, SIZE - size, 2)
            box = [left, top, left + size, top + size]
            if any(
                box[0] < b[2] and box[1] < b[3] and box[2] > b[0] and box[3] > b[1] for b in own
            ):
                continue
            dx, dy = abs(x - left - size / 2), abs(y - top - size / 2)
            inside = np.maximum(dx, dy) if kind == 0 else np.hypot(dx, dy)
            image[0, inside < size / 2] = 1
            own.append(box)
            own_kinds.append(kind)
        boxes.append(own)
        kinds.append(own_kinds)
    return images, pad_boxes(boxes, kinds)


images, labels = draw(256)
unseen, their_labels = draw(64)
print(images.shape, labels.shape)

# %%
# The network
# -----------
# Its outputs are the raw heads; their names are those of the loss.

model = parser.parse_model(
    f"""<ir_version: 8, opset_import: ["": 17]>
    detector (float[N, 1, {SIZE}, {SIZE}] image)
      => (float[N, 36, {CLASSES}] logits, float[N, 36, {4 * BINS}] boxes)
    <int64[3] of_classes = {{0, -1, {CLASSES}}}, int64[3] of_sides = {{0, -1, {4 * BINS}}}>
    {{ a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (image, w1, b1)  ra = Relu (a)
      b = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (ra, w2, b2)  rb = Relu (b)
      c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (rb, w3, b3)  rc = Relu (c)
      d = Conv <pads = [1, 1, 1, 1]> (rc, w4, b4)  rd = Relu (d)
      e = Conv (rd, w5, b5)  f = Transpose <perm = [0, 2, 3, 1]> (e)  logits = Reshape (f, of_classes)
      g = Conv (rd, w6, b6)  h = Transpose <perm = [0, 2, 3, 1]> (g)  boxes = Reshape (h, of_sides) }}"""
)
widths = [(12, 1, 3), (24, 12, 3), (48, 24, 3), (48, 48, 3), (CLASSES, 48, 1), (4 * BINS, 48, 1)]
for k, (outputs, inputs, kernel) in enumerate(widths, start=1):
    scale = np.sqrt(2 / (inputs * kernel**2)) if k < 5 else 0.01
    weight = scale * rng.standard_normal((outputs, inputs, kernel, kernel))
    bias = np.full(outputs, -3.0 if k == 5 else 0.0)  # few cells have an object
    for name, array in ((f"w{k}", weight), (f"b{k}", bias)):
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))

# %%
# Training
# --------

loss = TaskAligned(image_size=(SIZE, SIZE), strides=(STRIDE,))
trainer = Trainer(
    model,
    loss=loss,
    optimizer="adam",
    learning_rate=0.006,
    schedule="cosine",
    batch_size=16,
    epochs=16,
    metrics={"name": "average_precision", "iou": 0.5},
    progress=False,
)
history = trainer.fit(images, labels, validation_data=(unseen, their_labels))
print(trainer.evaluate(unseen, their_labels))

# %%
# What it finds in images that it has not seen
# --------------------------------------------
# ``predictions`` makes boxes of the heads, with non-maximum suppression.

found = loss.predictions(trainer.predict(unseen[:6]))
figure, axes = plt.subplots(2, 4, figsize=(10, 5), layout="constrained")
axes[0, 3].plot(history["loss"])
axes[0, 3].set_title("loss")
axes[1, 3].plot(history["validation_average_precision_50"])
axes[1, 3].set_title("mAP@50, validation")
for axis, image, boxes in zip(axes[:, :3].ravel(), unseen, found, strict=False):
    axis.imshow(image[0], cmap="gray")
    axis.set_axis_off()
    for x1, y1, x2, y2, score, kind in boxes[boxes[:, 4] > 0.3]:
        color = "tab:orange" if kind == 0 else "tab:cyan"
        axis.add_patch(plt.Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color=color, lw=2))
        axis.text(x1, y1, f"{('square', 'disc')[int(kind)]} {score:.2f}", color=color, fontsize=7)

"""
Adapt a forecast to a new series
================================

An LSTM forecasts the next value of a series from the last 24. It was trained on one series; a new series
has another period. The head is trained first, then also the recurrent weights.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnx import numpy_helper, parser

from ortflex import Trainer

rng = np.random.default_rng(0)
WINDOW, UNITS = 24, 12


def windows(period, rows):
    """Windows of a noisy periodic series, and the value that follows each."""
    time = np.arange(rows + WINDOW)
    series = np.sin(2 * np.pi * time / period) + 0.3 * np.sin(2 * np.pi * time / (3.3 * period))
    series = (series + 0.05 * rng.standard_normal(len(time))).astype(np.float32)
    X = np.lib.stride_tricks.sliding_window_view(series, WINDOW)[:rows]
    return np.ascontiguousarray(X[..., None]), series[WINDOW:, None]


model = parser.parse_model(
    f"""<ir_version: 8, opset_import: ["": 17]>
    forecast (float[N, {WINDOW}, 1] window) => (float[N, 1] next)
    {{ steps = Transpose <perm = [1, 0, 2]> (window)
       all, last, cell = LSTM <hidden_size = {UNITS}> (steps, W, R, B)
       state = Squeeze (last, axis)
       next = Gemm (state, head, bias) }}"""
)
for name, shape in {
    "W": (1, 4 * UNITS, 1),
    "R": (1, 4 * UNITS, UNITS),
    "B": (1, 8 * UNITS),
    "head": (UNITS, 1),
    "bias": (1,),
}.items():
    array = rng.uniform(-0.3, 0.3, shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, name))
model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))

common = {"loss": "huber", "optimizer": "adam", "batch_size": 32, "progress": False}
first = Trainer(model, learning_rate=0.01, epochs=10, **common)
first.fit(*windows(period=17, rows=1024))
known = first.export()

# %%
# The new series
# --------------

X, y = windows(period=29, rows=700)
train, test = slice(0, 400), slice(400, None)
print("before:", Trainer(known, **common).evaluate(X[test], y[test]))
tuned = Trainer(
    known,
    learning_rate=0.01,
    epochs=20,
    groups=[{"params": ["W", "R", "B"], "rate": 0.5, "start_epoch": 4}],
    clip_norm=1.0,
    **common,
)
history = tuned.fit(X[train], y[train], validation_data=(X[test], y[test]))

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.semilogy(history["loss"], label="training")
left.semilogy(history["validation_loss"], label="validation")
left.axvline(4, color="gray", linestyle=":", label="the LSTM is trained, too")
left.set_xlabel("epoch")
left.set_ylabel("huber loss")
left.legend()
right.plot(y[test][:90], "k.", label="series")
right.plot(Trainer(known, **common).predict(X[test][:90]), label="before")
right.plot(tuned.predict(X[test][:90]), label="after")
right.set_xlabel("time")
right.legend()

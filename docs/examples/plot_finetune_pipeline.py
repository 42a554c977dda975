"""
Fine-tune a scikit-learn pipeline on new data
=============================================

A pipeline was fitted on last year's data. This year the relation has changed, and there are few new
rows. The pipeline is converted to ONNX, and only the weights of its network are trained; the scaler does
not change.
"""

import matplotlib.pyplot as plt
import numpy as np
from skl2onnx import to_onnx
from sklearn.metrics import r2_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ortflex import Trainer

rng = np.random.default_rng(0)


def draw(rows, drift):
    """Rows of a relation that drifts."""
    X = rng.normal(10, 3, (rows, 6)).astype(np.float32)
    y = np.sin(X[:, 0] / 3) + (0.1 + drift) * X[:, 1] + 0.05 * X[:, 2] * X[:, 3] / 10
    return X, (y + 0.05 * rng.standard_normal(rows)).astype(np.float32)


X_old, y_old = draw(2000, drift=0.0)
pipeline = make_pipeline(
    StandardScaler(),
    MLPRegressor(hidden_layer_sizes=(32,), max_iter=1000, tol=1e-3, random_state=0),
).fit(X_old, y_old)

# %%
# Fine-tune the ONNX file
# -----------------------
#
# ``describe`` shows that the numbers of the scaler are not trained.

X_new, y_new = draw(200, drift=0.15)
X_test, y_test = draw(1000, drift=0.15)
trainer = Trainer(
    to_onnx(pipeline, X_old[:1], target_opset=17),
    loss="squared_error",
    optimizer="adam",
    learning_rate=0.003,
    epochs=60,
    batch_size=20,
    metrics="r2",
    progress=False,
)
print(trainer.describe())
history = trainer.fit(X_new, y_new, validation_data=(X_test, y_test))

# %%
# Compared with the old pipeline, and with a new one
# --------------------------------------------------

fresh = make_pipeline(
    StandardScaler(),
    MLPRegressor(hidden_layer_sizes=(32,), max_iter=1000, tol=1e-3, random_state=0),
).fit(X_new, y_new)
scores = {
    "old pipeline": r2_score(y_test, pipeline.predict(X_test)),
    "fitted on 200 rows": r2_score(y_test, fresh.predict(X_test)),
    "fine-tuned on 200 rows": r2_score(y_test, trainer.predict(X_test).ravel()),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(history["validation_r2"])
left.set_xlabel("epoch")
left.set_ylabel("R² on new test rows")
bars = right.barh(list(scores), [max(score, 0) for score in scores.values()])
right.bar_label(bars, [f"{score:.2f}" for score in scores.values()], padding=3)
right.set_xlim(0, 1.15)
right.set_xlabel("R²")

"""
Linear regression, compared with scikit-learn
=============================================

A linear model from scikit-learn is converted to ONNX, gets random weights, and is trained by gradient
descent. The coefficients become those of scikit-learn.
"""

import matplotlib.pyplot as plt
import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression

from ortflex import Trainer

X, y = make_regression(400, n_features=6, noise=5.0, bias=10.0, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32).reshape(-1, 1)
exact = LinearRegression().fit(X, y)
model = to_onnx(exact, X[:1], target_opset=17, black_op={"LinearRegressor"})

# %%
# ``reinitialize=True`` starts from random weights instead of the file's.

trainer = Trainer(
    model,
    loss="squared_error",
    optimizer="sgd",
    learning_rate=0.05,
    schedule={"name": "cosine", "by": "step"},
    reinitialize=True,
    batch_size=20,
    epochs=20,
    progress=False,
)
print(trainer.describe())
history = trainer.fit(X, y)

# %%
# The coefficients
# ----------------

state = trainer.get_state()
found = np.concatenate([np.ravel(a) for a in state.values()])
wanted = np.concatenate([np.ravel(exact.coef_), np.ravel(exact.intercept_)])
names = [f"coef {k}" for k in range(6)] + ["intercept"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.bar(np.arange(7) - 0.2, wanted, 0.4, label="scikit-learn")
left.bar(np.arange(7) + 0.2, found, 0.4, label="ortflex")
left.set_xticks(range(7), names, rotation=30)
left.margins(y=0.2)
left.legend(loc="upper right", ncols=2)
right.semilogy(history.losses)
right.set_xlabel("epoch")
right.set_ylabel("squared error")

"""
Linear regression, forward and backward by hand
===============================================

A training step consists of the model's forward pass, the gradient of the loss by the predictions, the
model's backward pass, and the update. ``OnnxFunction`` computes the two passes, with onnxruntime's
``TrainingAgent`` if it is installed, and numpy computes everything else. Use this form of training if you
need your own code between the passes.
"""

import matplotlib.pyplot as plt
import numpy as np
from example_tools import available_backends, best_device, best_of
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression

from ortflex import OnnxFunction, Trainer

X, y = make_regression(400, n_features=6, noise=5.0, bias=10.0, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32).reshape(-1, 1)
exact = LinearRegression().fit(X, y)
model = to_onnx(exact, X[:1], target_opset=17, black_op={"LinearRegressor"})

# %%
# The two passes
# --------------
#
# ``forward`` returns predictions and the values that the backward pass needs; ``backward`` takes the
# gradient of the loss by the predictions and returns the gradients by the weights.

engine, device = best_of("training_agent", otherwise="fused"), best_device()
function = OnnxFunction(model, engine=engine, device=device, inputs=[])
print("trained:", {name: array.shape for name, array in function.state.items()})
[output] = function.outputs

# %%
# The loop
# --------

rng = np.random.default_rng(0)
start = {name: np.zeros_like(array) for name, array in function.state.items()}
weights, rate, batch, losses = dict(start), np.float32(0.05), 20, []
orders = [rng.permutation(len(X)) for _ in range(10)]
for order in orders:
    for first in range(0, len(X), batch):
        rows = order[first : first + batch]
        outputs, saved = function.forward(X[rows], weights)
        error = outputs[output] - y[rows]
        losses.append(float((error**2).mean()))
        gradients = function.backward(2 * error / len(rows), saved)
        weights = {name: w - rate * gradients[name] for name, w in weights.items()}

# %%
# The same with a Trainer
# -----------------------

trainer = Trainer(
    model,
    loss="squared_error",
    optimizer="sgd",
    learning_rate=float(rate),
    batch_size=batch,
    epochs=1,
    shuffle=False,
    backend=engine,
    device=device,
    progress=False,
)
trainer.set_state(start)
for order in orders:
    trainer.fit(X[order], y[order])
for name, array in trainer.get_state().items():
    np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-3)
print(f"the weights are those of backend={engine!r}; available: {', '.join(available_backends())}")

# %%
# The coefficients
# ----------------

found = np.concatenate([np.ravel(a) for a in weights.values()])
wanted = np.concatenate([np.ravel(exact.coef_), np.ravel(exact.intercept_)])
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.bar(np.arange(7) - 0.2, wanted, 0.4, label="scikit-learn")
left.bar(np.arange(7) + 0.2, found, 0.4, label="forward and backward")
left.set_xticks(range(7), [f"coef {k}" for k in range(6)] + ["intercept"], rotation=30)
left.margins(y=0.2)
left.legend(loc="upper right", ncols=2, fontsize="small")
right.semilogy(losses)
right.set_xlabel("step")
right.set_ylabel("squared error of the batch")

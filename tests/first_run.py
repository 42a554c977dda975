"""A first run with an installed ortflex; writes a model, data and ``train.toml`` into this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import ortflex

TOML = """model = "model.onnx"
data = "data.npz"
loss = "squared_error"
optimizer = "adam"
learning_rate = 0.05
epochs = 5
"""


def main() -> None:
    """Write the files and train; raises if the loss does not fall."""
    checkout = Path(__file__).parents[1] / "ortflex.py"
    assert Path(ortflex.__file__) != checkout, "this is the checkout, not an installation"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 3] X) => (float[N, 1] Y) { p = MatMul(X, w)  Y = Add(p, b) }"""
    )
    for name, shape in {"w": (3, 1), "b": (1,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    onnx.save(model, "model.onnx")
    x = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True) + 1
    np.savez("data.npz", X=x, y=y)
    Path("train.toml").write_text(TOML, "utf-8")
    trainer = ortflex.Trainer("model.onnx", loss="squared_error", learning_rate=0.05, epochs=5)
    trainer.fit(x, y)
    first, last = trainer.train_losses_[0], trainer.train_losses_[-1]
    assert last < first / 2, f"the loss went from {first} to {last}"
    print(f"ortflex {ortflex.__version__}: the loss went from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()

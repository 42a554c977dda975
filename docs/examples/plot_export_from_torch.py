"""
Export from PyTorch so that the file can be trained
===================================================

torch's exporters write files for inference. This page shows the four settings that matter if the file is
to be trained later, and trains the result: the loss decreases as it does in torch.
"""

import io

import matplotlib.pyplot as plt
import numpy as np
import torch
from onnx import load_model_from_string
from sklearn.datasets import load_digits

from ortflex import Trainer, check_model

torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),  # BatchNorm2d has a bias
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(8 * 4 * 4, 10),
)

# %%
# The export
# ----------
#
# * **The batch dimension is dynamic.** With a fixed one, every batch has the size of the example
#   (``Trainer(free_batch=True)`` repairs such files).
# * **Training mode is preserved**, and constants are not folded. Otherwise BatchNormalization is merged
#   into the convolution, and its statistics can no longer be trained.
# * **Equal tensors are not merged.** A new network has many tensors of zeros and ones. Merged tensors
#   train as one; ``keep_initializers_as_inputs=True`` keeps them apart.
# * **The network returns scores**, not probabilities: a loss on scores is numerically stable. A file with
#   a Softmax at the end works as well, because ortflex finds the logits before it.


def export(network, example):
    """The network as a ModelProto that can be trained."""
    buffer = io.BytesIO()
    torch.onnx.export(
        network,
        (example,),
        buffer,
        dynamo=False,
        input_names=["image"],
        output_names=["scores"],
        dynamic_axes={"image": {0: "N"}, "scores": {0: "N"}},
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        keep_initializers_as_inputs=True,
        opset_version=17,
    )
    return load_model_from_string(buffer.getvalue())


model = export(network.train(), torch.zeros(2, 1, 8, 8))
report = check_model(model, loss="softmax_cross_entropy")
print(report.summary)
print([node.op_type for node in model.graph.node])

# %%
# The same run in torch and in ortflex
# ------------------------------------
#
# Same weights, same batches, same optimizer. The two curves lie on top of each other.

digits = load_digits()
X = (digits.images / 16).astype(np.float32)[:1280, None]
y = digits.target[:1280]

trainer = Trainer(
    model,
    loss="softmax_cross_entropy",
    optimizer="adam",
    learning_rate=0.001,
    batch_size=64,
    epochs=12,
    shuffle=False,
    progress=False,
)
history = trainer.fit(X, y)

optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
torch_losses = []
for _ in range(12):
    total = 0.0
    for rows, labels in zip(torch.tensor(X).split(64), torch.tensor(y).split(64), strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(rows), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    torch_losses.append(total / len(X))

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(torch_losses, "o", label="torch")
axes.plot(history["loss"], label="ortflex, on the exported file")
axes.set_xlabel("epoch")
axes.set_ylabel("cross entropy")
axes.legend()
np.testing.assert_allclose(history["loss"], torch_losses, rtol=2e-3)

# %%
# The trained file
# ----------------
#
# ``inference=True`` switches BatchNormalization to its trained statistics.

trained = trainer.export(inference=True)  # with a path, it is written there
network.eval()
with torch.no_grad():
    expected = network(torch.tensor(X[:5])).numpy()
print("difference from torch:", np.abs(trainer.predict(X[:5]) - expected).max())

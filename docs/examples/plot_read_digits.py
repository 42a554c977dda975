"""
Read lines of digits: a convolutional recurrent network with CTC
================================================================

Handwritten digits of scikit-learn are put side by side, three to five in a line, at random distances. The
labels say which digits a line has, but not where. A network of convolutions and an LSTM gives scores for
each of 22 columns, and the loss ``ctc`` sums over all alignments of the labels with the columns.
"""

import io
import logging
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

from ortflex import Trainer

HEIGHT, WIDTH, COLUMNS, MOST = 10, 44, 22, 5
digits = load_digits()
pictures = (digits.images / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(pictures))
train_digits, unseen_digits = order[:1497], order[1497:]


def draw(count, chosen, rng):
    """Lines of three to five of the chosen digits, and their labels: classes 1 to 10, then -1."""
    lines = np.zeros((count, 1, HEIGHT, WIDTH), np.float32)
    labels = np.full((count, MOST), -1)
    for line, label in zip(lines, labels, strict=True):
        number = rng.integers(3, MOST + 1)
        room = rng.multinomial(WIDTH - 8 * number, np.ones(number + 1) / (number + 1))
        left = 0
        for k, which in enumerate(rng.choice(chosen, number)):
            left += room[k]
            top = rng.integers(0, HEIGHT - 7)
            line[0, top : top + 8, left : left + 8] = pictures[which]
            label[k] = digits.target[which] + 1
            left += 8
    lines *= rng.uniform(0.8, 1.2, (count, 1, 1, 1)).astype(np.float32)
    return lines + rng.normal(0, 0.05, lines.shape).astype(np.float32), labels


unseen, truth = draw(400, unseen_digits, np.random.default_rng(1))

# %%
# The network
# -----------


class Reader(torch.nn.Module):
    """Convolutions that halve the width, an LSTM over the columns in both directions, and scores.

    The scores also read the columns directly: then the network soon leaves the solution without letters.
    """

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 24, 3, padding=1)
        self.second = torch.nn.Conv2d(24, 48, 3, padding=1)
        self.columns = torch.nn.Conv2d(48, 96, (HEIGHT // 2, 3), padding=(0, 1))
        self.sequence = torch.nn.LSTM(96, 48, batch_first=True, bidirectional=True)
        self.scores = torch.nn.Linear(96, 11)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.relu(self.columns(torch.relu(self.second(x))))
        x = x.squeeze(2).transpose(1, 2)
        around, _ = self.sequence(x)
        return self.scores(x + around)


torch.manual_seed(0)
file = io.BytesIO()
logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.onnx.export(
        Reader().eval(),
        torch.zeros(2, 1, HEIGHT, WIDTH),
        file,
        input_names=["line"],
        output_names=["scores"],
        dynamic_axes={"line": {0: "N"}, "scores": {0: "N"}},
        dynamo=False,
    )
logging.disable(logging.NOTSET)

# %%
# Training
# --------
# Every epoch draws other lines, so the data is a function that returns batches.

EPOCHS, STEPS, BATCH = 14, 60, 32
drawing = np.random.default_rng(2)


def batches():
    return (draw(BATCH, train_digits, drawing) for _ in range(STEPS))


trainer = Trainer(
    file.getvalue(),
    loss="ctc",
    optimizer="adam",
    learning_rate=0.003,
    schedule={"name": "cosine", "by": "epoch"},
    clip_norm=5.0,
    epochs=EPOCHS,
    progress=False,
)
started = time.perf_counter()
history = trainer.fit(batches)
print(f"{EPOCHS * STEPS} steps in {time.perf_counter() - started:.0f} s")

# %%
# What it reads in lines of digits that it has not seen
# -----------------------------------------------------


def read(scores):
    """The best class of each column, without repetitions and blanks."""
    best = scores.argmax(-1)
    changes = best[np.insert(best[1:] != best[:-1], 0, True)]
    return changes[changes > 0].tolist()


def edits(a, b):
    """The number of insertions, deletions and changes from one list to another."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


texts = [read(scores) for scores in trainer.predict(unseen)]
wanted = [[c for c in row if c > 0] for row in truth.tolist()]
wrong = sum(map(edits, texts, wanted))
print(f"digits: {1 - wrong / sum(map(len, wanted)):.1%}")
print(f"lines: {np.mean([a == b for a, b in zip(texts, wanted, strict=True)]):.1%}")

figure, axes = plt.subplots(3, 2, figsize=(9, 4), layout="constrained")
for axis, line, text in zip(axes.ravel()[:5], unseen, texts, strict=False):
    axis.imshow(line[0], cmap="gray_r")
    axis.set_title("".join(str(c - 1) for c in text))
    axis.set_axis_off()
axes[2, 1].plot(history["loss"])
axes[2, 1].set(title="loss of an epoch", yscale="log")

"""
Fine-tune BERT from its configuration
=====================================

This page builds a BERT from a configuration with the names that transformers uses, exports it to ONNX,
and trains it to distinguish praise from complaints. The weights are random and the corpus is made here, so
nothing is downloaded; with a checkpoint of transformers, the export and the training are the same.
"""

import io

import matplotlib.pyplot as plt
import numpy as np
import torch
from onnx import load_model_from_string
from torch import nn

from ortflex import Trainer

torch.manual_seed(0)
CONFIG = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 12,
    "layer_norm_eps": 1e-12,
    "num_labels": 2,
}


class Layer(nn.Module):
    """Attention and two dense layers, each with a residual connection and a normalization."""

    def __init__(self, config):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.output = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=config["layer_norm_eps"])
        self.intermediate, self.dense = nn.Linear(size, inner), nn.Linear(inner, size)
        self.output_norm = nn.LayerNorm(size, eps=config["layer_norm_eps"])

    def forward(self, hidden, mask):
        rows, words, size = hidden.shape

        def split(x):
            return x.view(rows, words, self.heads, size // self.heads).transpose(1, 2)

        query, key, value = (split(part(hidden)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / (size // self.heads) ** 0.5 + mask
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, words, size)
        hidden = self.attention_norm(hidden + self.output(context))
        inner = nn.functional.gelu(self.intermediate(hidden))
        return self.output_norm(hidden + self.dense(inner))


class Bert(nn.Module):
    """Embeddings, layers, and a classifier on the first word."""

    def __init__(self, config):
        super().__init__()
        size = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], size)
        self.positions = nn.Embedding(config["max_position_embeddings"], size)
        self.norm = nn.LayerNorm(size, eps=config["layer_norm_eps"])
        self.layer = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.pooler = nn.Linear(size, size)
        self.classifier = nn.Linear(size, config["num_labels"])

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1])
        hidden = self.norm(self.words(input_ids) + self.positions(places))
        mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * -10000.0
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


# %%
# The corpus
# ----------
#
# "not" turns a sentence around, so single words do not decide. The tokenizer gives each word a number,
# begins with ``[CLS]`` and is padded with ``[PAD]``.

THINGS = ["film", "book", "meal", "song", "hotel", "game"]
GOOD, BAD = ["good", "great", "lovely", "fine"], ["bad", "awful", "dull", "poor"]
rng = np.random.default_rng(0)


def sentence():
    """A sentence, and whether it is praise."""
    praise, turned = rng.integers(0, 2, 2)
    word = rng.choice(GOOD if praise else BAD)
    start = ["the", rng.choice(THINGS), rng.choice(["was", "is"])]
    middle = ["not"] * turned + list(rng.choice(["very", "really", "quite"], rng.integers(0, 2)))
    return [*start, *middle, word], int(praise != turned)


texts, labels = zip(*(sentence() for _ in range(1200)), strict=True)
vocabulary = ["[PAD]", "[CLS]", *sorted({word for text in texts for word in text})]
assert len(vocabulary) <= CONFIG["vocab_size"]


def tokenized(sentences):
    """The inputs of the model: the numbers of the words, and the mask of the words that are not padding."""
    ids = np.zeros((len(sentences), CONFIG["max_position_embeddings"]), np.int64)
    for row, words in enumerate(sentences):
        ids[row, : len(words) + 1] = [1, *(vocabulary.index(word) for word in words)]
    return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}


X, y = tokenized(texts), np.array(labels)
print(" ".join(texts[0]), "->", y[0], X["input_ids"][0])

# %%
# The export
# ----------
#
# The settings are those of :doc:`plot_export_from_torch`.

network, buffer = Bert(CONFIG).train(), io.BytesIO()
example = tuple(torch.tensor(column[:2]) for column in X.values())
torch.onnx.export(
    network,
    example,
    buffer,
    dynamo=False,
    input_names=list(X),
    output_names=["scores"],
    dynamic_axes={name: {0: "N"} for name in (*X, "scores")},
    training=torch.onnx.TrainingMode.PRESERVE,
    do_constant_folding=False,
    keep_initializers_as_inputs=True,
    opset_version=17,
)
model = load_model_from_string(buffer.getvalue())

# %%
# The training
# ------------
#
# AdamW with a warm-up, as BERT is usually fine-tuned.

train, test = slice(0, 1000), slice(1000, None)
held_out = {name: column[test] for name, column in X.items()}
trainer = Trainer(
    model,
    loss="softmax_cross_entropy",
    optimizer={"name": "adamw", "weight_decay": 0.01},
    learning_rate=2e-3,
    clip_norm=1.0,
    batch_size=32,
    epochs=8,
    metrics="accuracy",
    progress=False,
)
trained = {name: column[train] for name, column in X.items()}
history = trainer.fit(trained, y[train], validation_data=(held_out, y[test]))
print(history)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(history["epoch"], history["loss"], label="loss")
axes.plot(history["epoch"], history["validation_accuracy"], label="accuracy on other sentences")
axes.set_xlabel("epoch")
axes.legend()
assert history["validation_accuracy"][-1] > 0.95

# %%
# Sentences that it has not seen:

for text in ("the hotel was not really awful", "the song is not very lovely", "the book is great"):
    scores = trainer.predict(tokenized([text.split()]))
    print(f"{text:32} {'praise' if scores.argmax() else 'complaint'}")

# %%
# With the checkpoint of a real model, replace ``Bert(CONFIG)`` by
# ``BertForSequenceClassification.from_pretrained(…)`` of transformers. :doc:`plot_lora` trains a fraction
# of the weights.

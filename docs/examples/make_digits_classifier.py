"""A classifier from another tool, and digits that differ from its training data.

scikit-learn trains a small network on clean handwritten digits and skl2onnx writes it to a file.
The other digits are scanned by a bad scanner: they are rotated, the ink has faded, and the sensor is
noisy. The script writes to a folder (by default ``runs/demo``):

    digits.onnx      the classifier, trained on clean digits
    train.npz        X [N, 64] and y [N]: digits for fine-tuning, most of them scanned
    validation.npz   scanned digits for validation during training
    test.npz         scanned digits for the test
    clean.npz        the same digits without the scanner, to measure what is forgotten
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

CLEAN = 800  # digits on which the classifier is trained; the others are scanned
VALIDATION, TEST = 100, 300
SCANS = 4  # the number of scans of each digit for fine-tuning


def scanned(images: Any, rng: np.random.Generator) -> Any:
    """Rows of 64 pixels in [0, 1], rotated by 15° to 35°, with faded ink and a noisy sensor."""
    angles = rng.uniform(15, 35, len(images))
    tilted = [
        ndimage.rotate(image.reshape(8, 8), angle, reshape=False, order=1).ravel()
        for image, angle in zip(images, angles, strict=True)
    ]
    noise = rng.normal(0.0, 0.08, (len(images), 64))
    return np.clip(0.15 + 0.6 * np.stack(tilted) + noise, 0, 1).astype(np.float32)


def make(folder: Path) -> dict[str, Path]:
    """Write the files; returns them by their stems."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.data))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    parts = np.cumsum([CLEAN, len(images) - CLEAN - VALIDATION - TEST, VALIDATION])
    first, more, watched, held_out = zip(
        np.split(images, parts), np.split(labels, parts), strict=True
    )

    network = MLPClassifier(
        hidden_layer_sizes=(64,), alpha=1e-3, tol=1e-3, max_iter=500, random_state=0
    )
    with threadpool_limits(1):  # threads cost more than they help at this size
        network.fit(*first)
    # Every supported onnxruntime reads opset 17. A ZipMap would turn the probabilities into a list of
    # dictionaries, to which no loss can be attached.
    model = to_onnx(network, images[:1], target_opset=17, options={"zipmap": False})

    # The clean digits are once among their scans, so that the network does not forget them.
    mixed = np.concatenate([more[0], *(scanned(more[0], rng) for _ in range(SCANS))])
    columns = {
        "train": (mixed, np.tile(more[1], 1 + SCANS)),
        "validation": (scanned(watched[0], rng), watched[1]),
        "test": (scanned(held_out[0], rng), held_out[1]),
        "clean": held_out,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {"digits": folder / "digits.onnx"}
    files["digits"].write_bytes(model.SerializeToString())
    for name, (x, y) in columns.items():
        files[name] = folder / f"{name}.npz"
        np.savez(files[name], X=x, y=y)
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a classifier and data for the demo.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/demo"))
    for path in make(parser.parse_args().folder).values():
        print(path)

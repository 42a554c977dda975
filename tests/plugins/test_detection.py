"""Detection: the losses beside torchvision and the papers' formulas, boxes that are wrong.

The classes of errors: an assignment or an encoding that differs from the reference, a gradient through
the assignment, padding or another image that changes a loss, NaN from boxes that do not exist, labels
that silently train nothing, predictions decoded differently from what was trained; boxes matched in
another order than COCO's evaluation does, images or classes that count twice or not at all, padding
that counts as a box, a number where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex import pad_boxes
from ortflex_core import Array, ConfigError, DataError, MetricKit, Trainer, gradients
from ortflex_core.compiler.operators.gradient_families import load_rules
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.testing import running
from ortflex_plugins.losses.detection import RetinaNet, Ssd, TaskAligned
from ortflex_plugins.metrics.average_precision import AveragePrecision
from tests import models
from tests.plugins.kit_fixtures import component_of, gives
from tests.training import plugins

SIZE = 64
PLACES = [[x, y] for y in range(4, SIZE, 8) for x in range(4, SIZE, 8)]
ANCHORS = np.array([[x - h, y - h, x + h, y + h] for x, y in PLACES for h in (7.0, 10.0, 14.0)])
KINDS = ("ssd", "retinanet", "task_aligned")


def heads(rows: int, seed: int, first: int) -> dict[str, Array]:
    """Random heads of six classes for 60 random anchors, and up to five boxes in each image."""
    r, size, places, classes = np.random.default_rng(seed), 100, 60, 6
    center, extent = r.uniform(0, size, (places, 2)), r.uniform(size / 20, size / 2.5, (places, 2))
    anchors = np.concatenate([center - extent / 2, center + extent / 2], 1)
    labels = np.full((rows, 5, 5), -1.0)
    for n in range(rows):
        for m in range(r.integers(0 if n else 1, 6)):
            w = r.uniform(size / 20, size / 2.5, 2)
            low = r.uniform(0, size - w)
            labels[n, m] = [*low, *(low + w), r.integers(first, classes)]
    logits = r.normal(size=(rows, places, classes)) * 2
    boxes = r.normal(size=(rows, places, 4))
    return {"logits": logits, "boxes": boxes, "anchors": anchors, "expected": labels}


def computed(loss: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The values of a loss, and the gradients of their mean by logits and boxes."""
    rules = load_rules(running.plugins())

    def formula(op: Any, expected: Any, **predicted: Any) -> dict[str, Any]:
        value = symbolic(loss).per_sample(op, predicted, expected)
        mean = op.ReduceMean(value, keepdims=0)
        slopes = gradients([(mean, None)], [predicted["logits"], predicted["boxes"]], rules)
        return {"value": value, "d_logits": slopes[0], "d_boxes": slopes[1]}

    got = running.run(running.traced(formula, arrays), arrays, loss.hyper_values())
    return {name.removeprefix("d_"): array for name, array in got.items()}


# compute_loss of torchvision 0.28 in float64 on the data of `heads`: the value, and Σ cos(k)·gradient of
# the logits and of the boxes, k the place of the element.
TORCHVISION = {
    ("ssd", 0): (29.519612751860535, -0.20524088924122735, 0.4374113200328598),
    ("ssd", 1): (32.02198482521575, 0.1004143401831136, 0.3500702724009179),
    ("ssd", 2): (27.239038409975166, -0.4672626031689169, -0.0676363607879811),
    ("retinanet", 0): (106.47336833214032, 1.1939992013722307, 0.6985423654299349),
    ("retinanet", 1): (105.17194488300207, -1.565504659932642, -0.23329726490971003),
    ("retinanet", 2): (112.08434966415133, -0.7402935278477508, 0.4349172438479755),
}


@pytest.mark.parametrize(("name", "seed"), TORCHVISION)
def test_torchvision_computes_the_same(name: str, seed: int) -> None:
    loss: Any = Ssd(normalize="batch") if name == "ssd" else RetinaNet()
    got = computed(loss, heads(4, seed, loss.first_class))
    sums = [(got[k].ravel() * np.cos(np.arange(got[k].size))).sum() for k in ("logits", "boxes")]
    np.testing.assert_allclose([got["value"].mean(), *sums], TORCHVISION[name, seed], rtol=1e-9)


def task_aligned(torch: Any, loss: TaskAligned, logits: Any, boxes: Any, labels: Array) -> Any:
    """The loss of one image by the formulas of the papers, place by place."""
    bins, (cx, cy, stride) = boxes.shape[-1] // 4, torch.tensor(loss.centers().T)
    sides = boxes.reshape(len(cx), 4, bins)
    mean = (torch.softmax(sides, -1) * torch.arange(bins)).sum(-1) * stride[:, None]
    found = torch.stack([cx - mean[:, 0], cy - mean[:, 1], cx + mean[:, 2], cy + mean[:, 3]], 1)
    given = torch.tensor(labels[labels[:, 4] >= 0])
    fit, iou = torch.zeros(len(given), len(cx)), torch.zeros(len(given), len(cx))
    owner, target = [-1] * len(cx), torch.zeros(len(cx), dtype=torch.float64)
    fit, iou = fit.double(), iou.double()
    for m, (x1, y1, x2, y2, kind) in enumerate(given):
        inside = [k for k in range(len(cx)) if x1 < cx[k] < x2 and y1 < cy[k] < y2]
        for k in inside:
            iou[m, k] = overlap(torch, found[k].detach(), given[m, :4])
            score = torch.sigmoid(logits[k, int(kind)]).detach()
            fit[m, k] = score**loss.alpha * iou[m, k] ** loss.beta
        for k in sorted(inside, key=lambda k, m=m: -fit[m, k])[: loss.topk]:
            if owner[k] < 0 or iou[m, k] > iou[owner[k], k]:
                owner[k] = m
    for m in range(len(given)):
        own = [k for k in range(len(cx)) if owner[k] == m]
        for k in own:
            target[k] = fit[m, k] / fit[m, own].max() * iou[m, own].max()
    goal, total = torch.zeros_like(logits), torch.zeros((), dtype=torch.float64)
    for k, m in enumerate(owner):
        if m >= 0:
            goal[k, int(given[m, 4])] = target[k]
            exact = torch.stack([cx[k] - given[m, 0], cy[k] - given[m, 1]])
            exact = torch.cat([exact, given[m, 2:4] - torch.stack([cx[k], cy[k]])]) / stride[k]
            exact = exact.clamp(0, bins - 1.01)
            logs, low = torch.log_softmax(sides[k], -1), exact.floor().long()
            part = exact - low
            ends = [logs.gather(1, (low + j)[:, None])[:, 0] for j in (0, 1)]
            spread = -((1 - part) * ends[0] + part * ends[1]).mean()
            closeness = complete(torch, found[k], given[m, :4])
            total = total + target[k] * (loss.box * (1 - closeness) + loss.dfl * spread)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, goal, reduction="sum")
    return (total + loss.cls * entropy) / max(float(target.sum()), 1.0)


def overlap(torch: Any, a: Any, b: Any) -> Any:
    width = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp(min=0)
    common = width * (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp(min=0)
    return common / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - common)


def complete(torch: Any, a: Any, b: Any) -> Any:
    iou = overlap(torch, a, b)
    diagonal = torch.maximum(a[2:], b[2:]) - torch.minimum(a[:2], b[:2])
    apart = (a[:2] + a[2:] - b[:2] - b[2:]) / 2
    angles = [torch.atan((c[2] - c[0]) / (c[3] - c[1])) for c in (a, b)]
    v = 4 / math.pi**2 * (angles[1] - angles[0]) ** 2
    return iou - (apart**2).sum() / (diagonal**2).sum() - (v / (1 - iou + v)).detach() * v


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_task_aligned_is_the_formula_of_the_papers(seed: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    loss = TaskAligned(image_size=(64, 48), strides=(8, 16), topk=5)
    labels = np.full((3, 4, 5), -1.0)  # the last image has no boxes; some boxes are partly outside
    for n in range(2):
        for m in range(rng.integers(1, 5)):
            # A box of the last seed may be wider than the largest distance of the head: 5 · 8 pixels.
            w = rng.uniform(10, (30, 30, 120)[seed], 2)
            low = rng.uniform(-3, np.maximum(np.array([48, 64]) - w, 0))
            labels[n, m] = [*low, *(low + w), rng.integers(3)]
    logits = rng.normal(size=(3, loss.places(), 3))
    boxes = rng.normal(size=(3, loss.places(), 24)) * 1.5
    got = computed(loss, {"logits": logits, "boxes": boxes, "expected": labels})
    scores, sides = (torch.tensor(a, requires_grad=True) for a in (logits, boxes))
    values = [task_aligned(torch, loss, scores[n], sides[n], labels[n]) for n in range(3)]
    (sum(values) / 3).backward()
    wanted = torch.stack(values).detach().numpy()
    np.testing.assert_allclose(got["value"], wanted, rtol=1e-6)
    for name, tensor in (("logits", scores), ("boxes", sides)):
        np.testing.assert_allclose(got[name], tensor.grad.numpy(), rtol=1e-6, atol=1e-7)


def example(name: str, rows: int = 3, dtype: Any = np.float64) -> tuple[Any, dict[str, Array]]:
    """A loss of the family with heads and labels for it."""
    rng = np.random.default_rng(7)
    loss: Any = plugins().component("losses", {"name": name, **PARAMETERS[name]})
    places = 64 if name == "task_aligned" else len(ANCHORS)
    arrays = {"logits": rng.normal(size=(rows, places, 3))}
    arrays["boxes"] = rng.normal(size=(rows, places, 32 if name == "task_aligned" else 4))
    if name != "task_aligned":
        arrays["anchors"] = ANCHORS
    arrays["expected"] = labels_for(name, shapes(rows)[1])
    return loss, {k: a.astype(dtype) for k, a in arrays.items()}


@pytest.mark.parametrize("normalize", ["image", "batch"])
@pytest.mark.parametrize("name", KINDS)
def test_padding_and_images_without_boxes_change_nothing(name: str, normalize: str) -> None:
    """More rows of −1 do not matter; an image of −1 alone has the loss of its background, without NaN."""
    loss, arrays = example(name, dtype=np.float32)
    loss = type(loss)(**{**PARAMETERS[name], "normalize": normalize})
    arrays["expected"][1] = -1
    usual = computed(loss, arrays)
    longer = np.concatenate([arrays["expected"], np.full((3, 4, 5), -1, np.float32)], axis=1)
    running.same_bits(usual, computed(loss, {**arrays, "expected": longer}), name)
    assert all(np.isfinite(a).all() for a in usual.values())
    assert not usual["boxes"][1].any()
    assert bool(usual["value"][1] == 0) == (name == "ssd")
    if normalize == "image":
        alone = {k: a[:1] if k != "anchors" else a for k, a in arrays.items()}
        np.testing.assert_allclose(computed(loss, alone)["value"], usual["value"][:1], rtol=1e-5)


@pytest.mark.parametrize(
    ("box", "key"),
    [
        ([10, 10, 10, 20, 1], "x1 < x2"),
        ([10, 30, 20, 20, 1], "x1 < x2"),
        ([70, 10, 80, 20, 1], "outside"),
        ([-9, 10, -1, 20, 1], "outside"),
        ([10, 10, 20, 20, 3], "from"),
        ([10, 10, 20, 20, 1.5], "from"),
        ([10, 10, 20, 20, -2], "from"),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_wrong_boxes_are_refused(name: str, box: list[float], key: str) -> None:
    images, labels = shapes(4)
    labels = labels_for(name, labels)
    labels[2, 1] = box
    with pytest.raises(DataError, match=rf"{key}.*row 2, box 1"):
        Trainer(detector(name, 3), loss=table(name), progress=False).fit(images, labels)


@pytest.mark.parametrize("name", KINDS)
def test_heads_and_labels_that_do_not_fit_are_refused(name: str) -> None:
    images, labels = shapes(4)
    given: list[tuple[Any, Array, str]] = [
        (detector(name, 3), labels[:, :, :4], "pad_boxes"),
        (detector(name, 3), labels[:, :0], "pad_boxes"),
        (detector(name, 3, less=1), labels, "anchors" if name != "task_aligned" else "strides"),
    ]
    for model, wrong, key in given:
        with pytest.raises(DataError, match=key):
            Trainer(model, loss=table(name), progress=False).fit(images, wrong)
    if name == "ssd":
        with pytest.raises(DataError, match="background"):
            Trainer(detector(name, 3), loss=table(name), progress=False).fit(images, labels)
    half = {**table(name), "predicted": {"logits": "logits"}}
    with pytest.raises(ConfigError, match="boxes"):
        Trainer(detector(name, 3), loss=half)


def test_pad_boxes() -> None:
    targets = [{"boxes": [[0, 0, 1, 1]], "labels": [3]}, {"boxes": np.zeros((0, 4)), "labels": []}]
    assert pad_boxes(targets).tolist() == [[[0, 0, 1, 1, 3]], [[-1, -1, -1, -1, -1]]]
    assert pad_boxes([[], []], [[], []]).shape == (2, 1, 5)
    for boxes, classes in (([[1, 2, 3, 4]], [1]), ([[[1, 2, 3, 4]]], [[1, 2]]), ([[]], [[], []])):
        with pytest.raises(DataError, match="pad_boxes"):
            pad_boxes(boxes, classes)


@pytest.mark.parametrize("name", KINDS)
def test_the_boxes_that_are_learned_are_those_predicted(name: str) -> None:
    """Heads that say exactly what the loss asks for have a mAP of 1, and boxes where the labels are."""
    loss, arrays = example(name)
    labels = arrays["expected"]
    logits, boxes = np.full(arrays["logits"].shape, -20.0), np.zeros(arrays["boxes"].shape)
    if name == "ssd":
        logits[..., 0] = 20
    centers = np.array(PLACES).repeat(1 if name == "task_aligned" else 3, axis=0)
    for n, m in np.argwhere(labels[..., 4] >= 0):
        x1, y1, x2, y2, kind = labels[n, m]
        for k, (x, y) in enumerate(centers):
            if not (x1 < x < x2 and y1 < y < y2):
                continue
            logits[n, k, int(kind)] = 21
            if name == "task_aligned":
                exact = np.array([x - x1, y - y1, x2 - x, y2 - y]) / 8
                near = np.maximum(1 - np.abs(exact[:, None] - np.arange(8)), 1e-12)
                boxes[n, k] = np.log(near).ravel()
            else:
                size = ANCHORS[k, 2] - ANCHORS[k, 0]
                middle = [((x1 + x2) / 2 - x) / size, ((y1 + y2) / 2 - y) / size]
                scale = [math.log((x2 - x1) / size), math.log((y2 - y1) / size)]
                boxes[n, k] = np.array([*middle, *scale]) * loss.box_weights
    predicted = loss.predictions({**arrays, "logits": logits, "boxes": boxes})
    state = AveragePrecision().start()
    state.update(labels, predicted, None)
    assert state.result() == pytest.approx(1)
    for row, wanted in zip(predicted, labels, strict=True):
        real = wanted[wanted[:, 4] >= 0]
        kept = row[row[:, 4] > 0.5]
        order, other = np.lexsort(real.T[::-1]), np.lexsort(np.delete(kept, 4, 1).T[::-1].round(3))
        np.testing.assert_allclose(np.delete(kept, 4, 1)[other], real[order], atol=1e-3)


# Trainings ---------------------------------------------------------------------------------------

PARAMETERS: dict[str, dict[str, Any]] = {
    "ssd": {"image_size": (SIZE, SIZE)},
    "retinanet": {"image_size": (SIZE, SIZE)},
    "task_aligned": {"image_size": (SIZE, SIZE), "strides": (8,)},
}


def table(name: str) -> dict[str, Any]:
    return {"name": name, **PARAMETERS[name]}


def labels_for(name: str, labels: Array) -> Array:
    """The labels with class 0 for the background, if the loss has one."""
    out = labels.copy()
    out[..., 4] += (name == "ssd") & (labels[..., 4] >= 0)
    return out


def shapes(rows: int, seed: int = 0) -> tuple[Array, Array]:
    """Images with one or two squares (class 0) and discs (class 1), and their boxes."""
    r, (y, x) = np.random.default_rng(seed), np.mgrid[:SIZE, :SIZE] + 0.5
    images = r.normal(0, 0.05, (rows, 1, SIZE, SIZE)).astype(np.float32)
    boxes: list[list[list[float]]] = [[] for _ in range(rows)]
    kinds: list[list[int]] = [[] for _ in range(rows)]
    for n in range(rows):
        for _ in range(2):
            size, kind = r.uniform(14, 28), int(r.integers(2))
            left, top = r.uniform(1, SIZE - 1 - size, 2)
            if any(
                left < b[2] and top < b[3] and left + size > b[0] and top + size > b[1]
                for b in boxes[n]
            ):
                continue
            dx, dy = np.abs(x - left - size / 2), np.abs(y - top - size / 2)
            inside = np.maximum(dx, dy) < size / 2 if kind == 0 else np.hypot(dx, dy) < size / 2
            images[n, 0][inside] = 1
            boxes[n].append([left, top, left + size, top + size])
            kinds[n].append(kind)
    return images, pad_boxes(boxes, kinds)


def detector(name: str, classes: int = 2, less: int = 0) -> onnx.ModelProto:
    """Four convolutions to a grid of 8×8 places, and the heads; ``less`` anchors than the loss expects."""
    r, values, nodes, x, channels = np.random.default_rng(0), {}, [], "x", 1
    for k, (width, stride) in enumerate([(12, 2), (24, 2), (48, 2), (48, 1)]):
        values[f"w{k}"] = r.normal(0, math.sqrt(2 / channels / 9), (width, channels, 3, 3))
        values[f"b{k}"] = np.zeros(width)
        convolved = helper.make_node(
            "Conv", [x, f"w{k}", f"b{k}"], [f"c{k}"], strides=[stride] * 2, pads=[1] * 4
        )
        nodes += [convolved, helper.make_node("Relu", [f"c{k}"], [f"h{k}"])]
        x, channels = f"h{k}", width
    each = 1 if name == "task_aligned" else 3
    first = {"ssd": 0.0, "retinanet": -4.6, "task_aligned": -3.0}[name]
    sizes = {"logits": (classes, first), "boxes": (32 if name == "task_aligned" else 4, 0.0)}
    outputs, places = [], 64 * each
    for head, (width, bias) in sizes.items():
        values[f"w_{head}"] = r.normal(0, 0.01, (each * width, channels, 3, 3))
        values[f"b_{head}"] = np.full(each * width, bias)
        values[f"s_{head}"] = np.array([0, -1, width])
        kept = places - less * (head == "boxes")
        nodes += [
            helper.make_node("Conv", [x, f"w_{head}", f"b_{head}"], [f"m_{head}"], pads=[1] * 4),
            helper.make_node("Transpose", [f"m_{head}"], [f"t_{head}"], perm=[0, 2, 3, 1]),
            helper.make_node("Reshape", [f"t_{head}", f"s_{head}"], [f"r_{head}"]),
            helper.make_node("Slice", [f"r_{head}", "start", f"e_{head}", "axis"], [head]),
        ]
        values[f"e_{head}"] = np.array([kept])
        outputs.append(models.floats(head, "N", kept, width))
    values |= {"start": np.array([0]), "axis": np.array([1])}
    if name != "task_aligned":
        values["table"] = ANCHORS
        nodes.append(helper.make_node("Identity", ["table"], ["anchors"]))
        outputs.append(models.floats("anchors", *ANCHORS.shape))
    inputs = [models.floats("x", "N", 1, SIZE, SIZE)]
    return models.model(nodes, inputs, outputs, values)


def trained(name: str, rows: int, epochs: int) -> tuple[Trainer, Array, Array]:
    images, labels = shapes(rows)
    labels = labels_for(name, labels)
    trainer = Trainer(
        detector(name, 3 if name == "ssd" else 2),
        loss=table(name),
        optimizer="adam",
        learning_rate=0.002,
        batch_size=16,
        epochs=epochs,
        metrics={"name": "average_precision", "iou": 0.5},
        progress=False,
        seed=0,
    )
    trainer.fit(images, labels)
    return trainer, images, labels


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_falls(name: str) -> None:
    trainer, images, labels = trained(name, 32, 5)
    assert trainer.train_losses_[-1] < 0.85 * trainer.train_losses_[0]
    scores = trainer.evaluate(images, labels)
    assert 0 <= scores["average_precision_50"] <= 1
    assert "table" not in trainer.get_state()
    assert trainer.per_sample_losses(images, labels).shape == (32,)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_drawn_shapes_are_found(name: str) -> None:
    trainer, images, labels = trained(name, 256, 14)
    assert trainer.evaluate(images, labels)["average_precision_50"] >= 0.9


# The mean average precision ----------------------------------------------------------------------

# mAP, mAP@50 and the average precision of each class by pycocotools 2.0.11 on the data of `found`.
COCO = [
    (0.08967259639241348, 0.24257511528430523, [0.06268152795, 0.14778846808, 0.05854779315]),
    (0.10036952042826791, 0.2744448605479515, [0.08455481105, 0.14464247087, 0.07191127936]),
]


def found(seed: int, rows: int = 20, classes: int = 3) -> tuple[Array, Array]:
    """Boxes, and predictions that are near some of them."""
    r = np.random.default_rng(seed)
    labels, predicted = np.full((rows, 6, 5), -1.0), np.full((rows, 12, 6), -1.0)
    for n in range(rows):
        m = r.integers(0, 7)
        low = r.uniform(0, 60, (m, 2))
        boxes, kinds = np.c_[low, low + r.uniform(5, 40, (m, 2))], r.integers(0, classes, m)
        labels[n, :m] = np.c_[boxes, kinds]
        for j in range(r.integers(0, 13)):
            if m and r.random() < 0.7:
                i = r.integers(m)
                near, score = boxes[i] + r.normal(size=4) * 2.5, r.random()
                kind = kinds[i] if r.random() < 0.85 else r.integers(classes)
                predicted[n, j] = [*near, score, kind]
            else:
                q = r.uniform(0, 60, 2)
                predicted[n, j] = [*q, *(q + r.uniform(5, 40, 2)), r.random(), r.integers(classes)]
    high = np.maximum(predicted[..., 2:4], predicted[..., :2] + 1)
    predicted[..., 2:4] = np.where(predicted[..., 5:] >= 0, high, -1)
    return labels, predicted


@pytest.mark.parametrize("seed", [0, 1])
def test_average_precision_is_that_of_coco(seed: int) -> None:
    labels, predicted = found(seed)
    both = [AveragePrecision().start(), AveragePrecision(iou=0.5).start()]
    for state in both:
        for part in (slice(0, 3), slice(3, 13), slice(13, 20)):
            state.update(labels[part], predicted[part], None)
    wanted, wanted_50, by_class = COCO[seed]
    np.testing.assert_allclose([s.result() for s in both], [wanted, wanted_50], rtol=1e-9)
    np.testing.assert_allclose([*both[0].by_class().values()], by_class, rtol=1e-9)
    only = AveragePrecision(only=1).start()
    only.update(labels, predicted, None)
    assert only.result() == pytest.approx(by_class[1], rel=1e-9)


def test_average_precision_of_odd_data() -> None:
    """NaN without labels or with a box of NaN; other shapes are errors."""
    labels, predicted = found(0)
    for wrong, guesses in ((np.full_like(labels, -1), predicted), (labels, predicted * np.nan)):
        state = AveragePrecision().start()
        state.update(wrong, guesses, None)
        assert math.isnan(state.result())
    shapes = ((labels[..., 0], predicted), (labels, predicted[..., :5]), (labels[:3], predicted))
    for a, b in shapes:
        with pytest.raises(DataError, match="average_precision"):
            AveragePrecision().start().update(a, b, None)


class TestAveragePrecision(MetricKit):
    """The kit of metrics."""

    component = component_of("metrics", "average_precision")
    reference = gives(None)
    expected, predicted = (gives(array) for array in found(3, 12))

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return np.insert(expected, 4, 1.0, axis=2)

    def test_a_trainer_reports_it(self, component: Any, expected: Any, predicted: Any) -> None:
        """Of a model with the output [N, D, 6], by the loss that decodes it: test_the_loss_falls."""

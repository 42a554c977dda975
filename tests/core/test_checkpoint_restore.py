"""What a training continues with is what it began with, or it is refused and the difference is named.

The class of mistake: something that decides about the weights differs although all counts and names are
equal, so that the training ends with other weights without an error. Arguments are enumerated from the
Trainer's signature, so that none can be forgotten.
"""

from __future__ import annotations

import inspect
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, CheckpointError, DataError, ThreadGroup, Trainer, internals_of
from ortflex_core.compiler.problem import parameters as selection
from ortflex_core.kernel import digests
from ortflex_core.training import differences
from tests import models
from tests.training import bits, in_bytes, make, plugins, regression, same

pytestmark = pytest.mark.sampled

FORMAT_1 = Path(__file__).parents[1] / "fixtures" / "checkpoint-format-1"

BASE: dict[str, Any] = {
    "backend": "fused",
    "loss": "squared_error",
    "optimizer": "adam",
    "learning_rate": 0.01,
    "schedule": "cosine",
    "penalty": "l2",
    "groups": [{"params": "W1", "rate": 0.5}],
    "clip_norm": 1.0,
    "clip_value": 0.5,
    "transforms": ["centralize", "noise"],
    "accumulate": 2,
    "constraint": {"W1": "max_norm"},
    "averaging": "ema",
    "batch_size": 4,
    "epochs": 2,
}

# An argument, and values that make another training of it; in adam's family the slots have equal names.
OTHERS: list[tuple[str, Any]] = [
    ("loss", "absolute_error"),
    ("loss", {"name": "huber", "delta": 0.5}),
    ("loss", [{"name": "squared_error", "factor": 2.0}]),
    ("penalty", None),
    ("penalty", {"name": "l2", "l2": 0.5}),
    ("penalty", {"W1": "l2"}),
    *(("optimizer", name) for name in ("adamw", "radam", "lamb")),
    ("optimizer", {"name": "adam", "beta1": 0.8}),
    ("optimizer", {"name": "adam", "eps": 1e-7}),
    ("learning_rate", 0.02),
    ("learning_rate", None),
    ("schedule", "constant"),
    ("schedule", {"name": "cosine", "minimum": 0.001}),
    ("groups", []),
    ("groups", [{"params": "W1", "rate": 0.25}]),
    ("groups", [{"params": "W2", "rate": 0.5}]),
    *(("clip_norm", norm) for norm in (None, 2.0)),
    ("clip_value", None),
    ("transforms", []),
    ("transforms", ["centralize"]),
    ("transforms", ["noise", "centralize"]),
    ("transforms", ["centralize", {"name": "noise", "eta": 0.1}]),
    ("accumulate", 1),
    ("constraint", None),
    ("constraint", {"W1": {"name": "max_norm", "bound": 0.5}}),
    ("constraint", {"W2": "max_norm"}),
    ("averaging", {"name": "ema", "decay": 0.5}),
    ("batch_size", 5),
    ("shuffle", False),
    ("drop_last", True),
    ("seed", 7),
    ("reduction", "sum"),
    ("classes", [1, 2]),
    ("batch_norm", "freeze"),
    ("update_bn", True),
    *(("dropout", ratio) for ratio in ("off", 0.25)),
    ("gradients", [next(entry.name for entry in plugins()["gradients"])]),
    ("prefer", ["ortflex-example"]),
    ("free_batch", True),
    ("sync_every", 2),
    ("precision", {"name": "fp16_mixed", "dynamic": False}),
    ("adapters", [{"name": "lora", "alpha": 8.0, "targets": ["W2"]}]),
]

# What a training has before it that is not BASE's: adapters of the same tensors, on another scale.
OF_OTHERS: dict[str, dict[str, Any]] = {
    "free_batch": {"batch_size": 4},
    "batch_norm": {},
    "adapters": {"params": ["W1"], "adapters": [{"name": "lora", "targets": ["W2"]}]},
}

# Those that make another model.
EDITS: list[tuple[str, Any]] = [
    ("head", 3),
    ("edits", [{"name": "cut", "at": "h2"}]),
    ("quantize", {"weights": "int8"}),
]

# Values that do not change the training, of every argument that may differ.
SAME: dict[str, Any] = {
    "params": ["W*", "b*"],
    "freeze": [],
    "epochs": 3,
    "backend": {"name": "fused", "steps_per_run": 1},
    "recompute": True,
    "device": {"name": "cpu"},
    "threads": 1,
    "metrics": ["mae"],
    "callbacks": ["early_stopping"],
    "reinitialize": True,
    "cache": "memory",
    "check_finite": False,
    "distributed": ThreadGroup(),
    "receipt": False,
    "progress": False,
    "shard_state": True,
}

# Other spellings of what BASE has.
SPELLINGS: list[tuple[str, Any]] = [
    ("loss", {"name": "squared_error"}),
    ("loss", {"Y": "squared_error"}),
    ("loss", [{"name": "squared_error", "predicted": "Y"}]),
    ("penalty", {"*": "l2"}),
    ("optimizer", {"name": "adam", "beta1": 0.9}),
    ("schedule", {"name": "cosine"}),
    ("groups", [{"params": ["W1"], "rate": 0.5}]),
    ("transforms", ({"name": "centralize"}, {"name": "noise", "eta": 0.01})),
    ("constraint", {"W1": {"name": "max_norm"}}),
    ("averaging", {"name": "ema"}),
    ("batch_norm", "train"),
    ("seed", np.int64(0)),
]


def data() -> tuple[Array, Array]:
    return regression(rows=24, features=6)


def begun(folder: Path, model: Any = None, given: Any = None, **options: Any) -> Trainer:
    """A training that has ended, and has saved itself in the middle."""

    def settled(trainer: Trainer, progress: Any) -> None:
        if progress.epoch == 1 and not folder.exists():
            trainer.save(folder)

    trainer = make(model or models.mlp(), callbacks=[settled], **{**BASE, **options})
    trainer.fit(*(given or data()))
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    folder = tmp_path_factory.mktemp("restore") / "c"
    return folder, begun(folder)


def test_every_argument_is_either_compared_or_free() -> None:
    arguments = set(inspect.signature(Trainer).parameters) - {"model", "plugins"}
    compared = {name for name, _ in OTHERS + EDITS}
    assert compared | set(differences.FREE) == arguments
    assert not compared & set(differences.FREE)
    assert set(SAME) == set(differences.FREE)


@pytest.mark.parametrize(("name", "value"), EDITS)
def test_other_edits_make_another_model(name: str, value: Any, saved: tuple[Path, Trainer]) -> None:
    """Not even ``strict=False`` loads weights into it."""
    other = make(models.mlp(), **BASE, **{name: value})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=rf"{name}[.:\w]* was .+, is "):
            other.restore(saved[0], strict=strict)


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_another_argument_is_refused_and_named(
    name: str,
    value: Any,
    saved: tuple[Path, Trainer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, model = saved[0], models.mlp()
    options, before_it = {**BASE, name: value}, OF_OTHERS.get(name)
    if name == "free_batch":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    if name == "batch_norm":
        model = models.normalized(model)
    if name == "adapters":
        options["params"] = ["W1"]
    if name == "sync_every":
        options["distributed"] = ThreadGroup()
    if before_it is not None:
        folder = folder.with_name(name)
        if not folder.exists():
            begun(folder, model, **before_it)
    trainer = make(model, **options)
    before = trainer.get_state()
    with pytest.raises(CheckpointError, match=rf"{name}[.:\w]* was .+, is ") as error:
        trainer.restore(folder)
    assert "strict=False" in str(error.value)
    assert in_bytes(trainer.get_state()) == in_bytes(before)
    assert internals_of(trainer).live.standing.position is None
    with caplog.at_level(logging.WARNING, "ortflex"):
        make(model, **options).restore(folder, strict=False)
    assert re.search(rf"other arguments: {name}", caplog.text)


@pytest.mark.parametrize("name", sorted(SAME))
def test_arguments_that_change_nothing_are_accepted(name: str, saved: tuple[Path, Trainer]) -> None:
    folder, whole = saved
    options = {**BASE, name: SAME[name]}
    if name == "shard_state":
        options["distributed"] = ThreadGroup()
    trainer = make(models.mlp(), **options)
    trainer.restore(folder)
    trainer.fit(*data())
    if name == "epochs":  # the schedule has another length
        assert len(trainer.history_) == 3
    else:
        for key, array in whole.get_state().items():
            np.testing.assert_allclose(trainer.get_state()[key], array, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "value"), SPELLINGS)
def test_other_spellings_are_accepted(name: str, value: Any, saved: tuple[Path, Trainer]) -> None:
    folder, whole = saved
    trainer = make(models.mlp(), **{**BASE, name: value})
    trainer.restore(folder)
    trainer.fit(*data())
    assert bits(trainer) == bits(whole)


def test_the_default_rate_may_be_spelled_out(tmp_path: Path) -> None:
    begun(tmp_path / "c", learning_rate=None)
    rate = plugins().component("optimizers", "adam").default_rate
    make(models.mlp(), **{**BASE, "learning_rate": rate}).restore(tmp_path / "c")


def test_resume_uses_the_arguments_of_its_call_and_reports_them(
    saved: tuple[Path, Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole = saved
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer = Trainer.resume(folder, plugins=plugins(), learning_rate=0.5, epochs=4)
    assert "other arguments: learning_rate: was 0.01, is 0.5" in caplog.text
    assert trainer.learning_rate == 0.5
    again = Trainer.resume(folder, plugins=plugins())
    again.fit(*data())
    assert bits(again) == bits(whole)


# ---------------------------------------------------------------------- data


def moved(array: Array, at: Any, by: float) -> Array:
    out = array.copy()
    out[at] += np.float32(by)
    return out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, y: (moved(x, (17, 3), 1e-3), y), "'X' has other values"),
        (lambda x, y: (x, moved(y, -1, 1)), "'label' has other values"),
        (lambda x, y: (x[::-1], y[::-1]), "'X' has other values, or its rows are in a different"),
        (lambda x, y: (x, y[[0, 1, 2, 4, 3, *range(5, 24)]]), "'label' has other values"),
        (lambda x, y: (x[:, ::-1], y), "'X' has other values"),
        (lambda x, y: (x.astype(np.float16), y), "'X' has other values"),
        (lambda x, y: (x, y, np.ones(len(x))), "there was no"),
    ],
    ids=["value", "label", "order", "order of labels", "order of columns", "numbers", "weights"],
)
def test_other_data_of_as_many_rows_are_refused(
    change: Any, named: str, saved: tuple[Path, Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = saved
    given = change(*data())
    with pytest.raises(DataError, match=rf"had other data: {named}"):
        Trainer.resume(folder, plugins=plugins()).fit(*given)
    with caplog.at_level(logging.WARNING, "ortflex"):
        Trainer.resume(folder, plugins=plugins(), strict=False).fit(*given)
    assert named in caplog.text


def test_other_sample_weights_are_refused(tmp_path: Path) -> None:
    x, y = data()
    weights = np.ones(len(x))
    begun(tmp_path / "c", given=(x, y, weights))
    weights[5] = 2.0
    with pytest.raises(DataError, match="had other data"):
        Trainer.resume(tmp_path / "c", plugins=plugins()).fit(x, y, weights)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x.astype(np.float64), y),
        lambda x, y: (np.asfortranarray(x), y.tolist()),
        lambda x, y: ({"X": x}, y.astype(">f4")),
    ],
)
def test_the_same_data_in_another_form_are_accepted(form: Any, saved: tuple[Path, Trainer]) -> None:
    folder, whole = saved
    trainer = Trainer.resume(folder, plugins=plugins())
    trainer.fit(*form(*data()))
    assert bits(trainer) == bits(whole)


def test_another_training_may_have_other_data(tmp_path: Path) -> None:
    """Only an unfinished training continues; a finished one is followed by one on any data."""
    x, y = data()
    trainer = make(models.mlp(), **BASE)
    trainer.fit(x, y)
    trainer.save(tmp_path / "c")
    Trainer.resume(tmp_path / "c", plugins=plugins()).fit(x[:10] + 1, y[:10])


@pytest.mark.parametrize("shape", [(1000,), (1000, 7), (3, 400, 5)])
def test_a_digest_of_a_sample_sees_type_shape_and_some_rows(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape)
    most = array.nbytes // 5
    whole, some = digests.of_array(array), digests.of_array(array, most)
    assert whole == digests.of_array(array, array.nbytes)
    for row in (0, -1):  # the first and the last row are in every sample
        changed = array.copy()
        changed[row] += 1
        assert digests.of_array(changed, most) != some
        assert digests.of_array(changed) != whole
    for other in (array.astype(np.float32), array[..., None], array[:-1], array[::-1]):
        assert digests.of_array(other, most) != some
        assert digests.of_array(other) != whole
    assert digests.of_array(np.asfortranarray(array)) == whole


def test_digests_of_arrays_of_every_type() -> None:
    seen = set()
    for array in (
        *(np.arange(4).astype(t) for t in ("f2", "f4", "f8", "i1", "i8", "u2", "?")),
        *(np.array(v) for v in (["a", "bc"], [b"a", b"bc"], 1.0, 2, "a")),
        *(np.array(v, object) for v in (["a", "bc"], ["ab", "c"])),
        *(np.zeros(s) for s in (0, (0, 3), (3, 0), (1, 1))),
        onnx.numpy_helper.to_array(
            onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [2], [1, 2])
        ),
    ):
        digest = digests.of_array(array)
        assert digest == digests.of_array(array.copy())
        seen.add(digest)
    assert len(seen) == 19


# ---------------------------------------------------------------------- what is trained, older formats


def test_what_is_trained_comes_from_the_checkpoint(
    saved: tuple[Path, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained by default may be chosen otherwise by another version."""
    folder, whole = saved
    real = selection.choose_parameters

    def choose(model: Any, outputs: Any, params: Any, freeze: Any) -> Any:
        return real(model, outputs, ["W1"] if params is None else params, freeze)

    monkeypatch.setattr(selection, "choose_parameters", choose)
    assert list(internals_of(make(models.mlp(), **BASE)).problem.parameters) == ["W1"]
    trainer = Trainer.resume(folder, plugins=plugins())
    trainer.fit(*data())
    assert bits(trainer) == bits(whole)
    one, other = (list(internals_of(t).problem.parameters) for t in (trainer, whole))
    assert one == other


def test_checkpoints_of_format_1_resume_to_the_same_bits(tmp_path: Path) -> None:
    """Written by 0.1.0 in the middle of a training, with the weights it ended with."""
    shutil.copytree(FORMAT_1, tmp_path / "old")
    x, y = regression(rows=17, features=3)
    trainer = Trainer.resume(tmp_path / "old", plugins=plugins())
    trainer.fit(x, y)
    with np.load(FORMAT_1 / "end.npz") as end:
        for name, array in {**trainer.get_state(), **trainer.engine.slots()}.items():
            wanted = end[name.replace("/", "|")]
            if str(internals_of(trainer).runtime) == "onnxruntime 1.31.1":
                assert array.tobytes() == wanted.tobytes(), name
            else:
                np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-6)
    trainer.save(tmp_path / "new")
    again = Trainer.resume(tmp_path / "new", plugins=plugins())
    same(again.get_state(buffers=True), trainer.get_state(buffers=True), 0)
    trainer.save(tmp_path / "old" / "step-000000009")  # it is a checkpoint of ours


def test_checkpoints_of_format_1_compare_their_arguments(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": "adam",
        "learning_rate": 0.01,
        "batch_size": 4,
        "epochs": 3,
        "schedule": "cosine",
        "averaging": "ema",
        "params": ["W*", "b1"],
        "penalty": {"W*": {"name": "l2", "l2": 0.01}},
    }
    folder = tmp_path / "old"
    shutil.copytree(FORMAT_1, folder)
    model = models.mlp((3, 4, 1))
    make(model, backend="fused", **options).restore(folder)
    with pytest.raises(CheckpointError, match="seed: was 0, is 7"):
        make(model, backend="fused", seed=7, **options).restore(folder)

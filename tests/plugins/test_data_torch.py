"""torch's DataLoader as data: what it collates is trained on, and a resume is exact or refused."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, ConfigError, DataError, Trainer, hook
from tests import models
from tests.training import in_bytes, make, plugins, regression, same

torch = pytest.importorskip("torch")
X, Y = regression(rows=50, features=6)
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05}


def loader(**options: Any) -> Any:
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=8, **options)


class Named(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples as mappings."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"X": X[row], "y": Y[row], "sample_weight": np.float32(row % 3)}


@pytest.mark.parametrize("wrapped", [lambda made: made, Batches])
def test_a_loader_is_its_batches(wrapped: Any) -> None:
    reference, trainer = (make(models.mlp(), **OPTIONS, shuffle=False) for _ in range(2))
    reference.fit(X, Y)
    history = trainer.fit(wrapped(loader()), validation_data=wrapped(loader()))
    assert history["rows"] == [50.0] * 3
    same(trainer.get_state(), reference.get_state(), 1e-6)
    assert history["validation_loss"][-1] == pytest.approx(trainer.evaluate(X, Y)["loss"], rel=1e-6)
    np.testing.assert_allclose(trainer.predict(loader()), trainer.predict(X), rtol=1e-6)


def test_samples_as_mappings_with_weights() -> None:
    weight = np.arange(50, dtype=np.float32) % 3
    reference, trainer = (make(models.mlp(), **OPTIONS, shuffle=False) for _ in range(2))
    reference.fit(X, Y, weight)
    trainer.fit(Batches(torch.utils.data.DataLoader(Named(), batch_size=8)))
    same(trainer.get_state(), reference.get_state(), 1e-6)


def test_a_buffer_mixes_a_loader_that_does_not() -> None:
    trainers = [make(models.mlp(), **OPTIONS) for _ in range(3)]
    for trainer, buffer in zip(trainers, (0, 20, 20), strict=True):
        assert trainer.fit(Batches(loader(), buffer=buffer))["rows"] == [50.0] * 3
    plain, one, other = (trainer.get_state()["W1"] for trainer in trainers)
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, plain)


@pytest.mark.parametrize("buffer", [0, 20])
def test_a_loader_resumes_only_at_the_end_of_an_epoch(buffer: int, tmp_path: Path) -> None:
    """A DataLoader cannot say where it is, so within an epoch a resume is refused with the way out."""

    class Save:
        @hook
        def settled(self, trainer: Trainer, progress: Any) -> None:
            trainer.save(tmp_path / str(progress.step))

    def data() -> Batches:
        return Batches(loader(), buffer=buffer)

    trainer = make(models.mlp(), **OPTIONS, backend="fused", callbacks=[Save()])
    trainer.fit(data())
    epochs = len(trainer.history_)
    steps = max(int(p.name) for p in tmp_path.iterdir()) // epochs
    refused: dict[int, str] = {}
    for step in range(1, epochs * steps):
        again = Trainer.resume(tmp_path / str(step), plugins=plugins())
        try:
            again.fit(data())
        except DataError as error:
            refused[step] = str(error)
        else:
            assert in_bytes(again.get_state()) == in_bytes(trainer.get_state())
    # What is in the buffer has been read; the batch that a new epoch begins with is there, too.
    ends = {step for step in range(1, epochs * steps) if step % steps in (0, 1)}
    assert refused
    assert all(re.search(r"can only start a new epoch.*state_dict", m) for m in refused.values())
    assert buffer or not ends & set(refused)


def test_errors_of_a_loader_reach_the_user_and_no_thread_is_left() -> None:
    class Broken(Named):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row == 33:
                raise RuntimeError("sample 33 is broken")
            return super().__getitem__(row)

    with pytest.raises(RuntimeError, match="sample 33 is broken"):
        make(models.mlp(), **OPTIONS).fit(
            Batches(torch.utils.data.DataLoader(Broken(), batch_size=8))
        )
    assert not [t for t in threading.enumerate() if t.name == "ortflex-data"]


def test_tensors_that_need_gradients_are_named() -> None:
    x = torch.from_numpy(X).requires_grad_()
    with pytest.raises(DataError, match=r"X cannot be converted to an array.*detach"):
        make(models.mlp(), **OPTIONS).fit([(x, torch.from_numpy(Y))])


def test_a_type_that_numpy_lacks_has_the_conversion() -> None:
    """The message is tried: .float() trains, in arrays, datasets and loaders."""
    x, y = torch.from_numpy(X).bfloat16(), torch.from_numpy(Y)
    dataset = torch.utils.data.TensorDataset(x, y)
    for data in ((x, y), (dataset,), (torch.utils.data.DataLoader(dataset, batch_size=8),)):
        with pytest.raises(DataError, match=r"numpy has no bfloat16, convert .*: \.float\(\)"):
            make(models.mlp(), **OPTIONS).fit(*data)
    make(models.mlp(), **OPTIONS).fit(x.float(), y)


def test_a_dataset_of_other_numbers_of_tensors() -> None:
    """One tensor is X; of four, the names of the inputs are missing."""
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    trainer = make(models.mlp(), **OPTIONS)
    single = torch.utils.data.TensorDataset(x)
    np.testing.assert_allclose(trainer.predict(single), trainer.predict(X), rtol=1e-6)
    four = torch.utils.data.TensorDataset(x, x, y, y)
    for data, what in (
        (four, "row 0 of the dataset is a tuple of 4"),
        (torch.utils.data.DataLoader(four, batch_size=8), "batch 0 is a list of 4"),
    ):
        with pytest.raises(DataError, match=rf"^{what}; expected .*several inputs are a mapping"):
            trainer.fit(data)


WEIGHT = torch.nn.Parameter(torch.zeros(1))
ADAM = torch.optim.Adam([WEIGHT])


@pytest.mark.parametrize(
    ("argument", "given", "name"),
    [
        ("loss", torch.nn.CrossEntropyLoss(), "softmax_cross_entropy"),
        ("loss", torch.nn.MSELoss, "squared_error"),
        ("loss", [torch.nn.MSELoss()], "squared_error"),
        ("loss", {"y": torch.nn.L1Loss()}, "absolute_error"),
        ("loss", torch.nn.functional.binary_cross_entropy_with_logits, "log_loss"),
        ("optimizer", ADAM, "adam"),
        ("optimizer", torch.optim.SGD, "sgd"),
        ("schedule", torch.optim.lr_scheduler.CosineAnnealingLR(ADAM, 3), "cosine"),
        ("schedule", torch.optim.lr_scheduler.StepLR(ADAM, 3), "step"),
        ("precision", torch.bfloat16, "bf16_mixed"),
        ("device", torch.device("cpu"), "cpu"),
    ],
)
def test_a_component_of_torch_has_its_name_here(argument: str, given: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{argument}.* of torch; .*'{name}'"):
        make(models.mlp(), **{argument: given})

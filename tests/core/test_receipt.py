"""A receipt says what an export is, and its training can be repeated from it; every change is found."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Batches, ModelError, Trainer, hook, internals_of, verify
from ortflex_core.compiler.onnx_files.content import RECEIPT
from ortflex_core.training import receipt as receipts
from tests import models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.once

X, Y = regression(rows=24, features=6)
MODEL = models.mlp()


def trained(
    model: Any = MODEL, data: Any = (X, Y), validation: Any = None, **options: Any
) -> Trainer:
    trainer = make(model, **{"backend": "fused", "epochs": 2, "batch_size": 8, **options})
    trainer.fit(*data, validation_data=validation)
    return trainer


def verdict(export: Any, model: Any = MODEL, data: Any = (X, Y), **options: Any) -> Any:
    return verify(export, model, data, plugins=plugins(), **options)


def text_of(model: onnx.ModelProto) -> str:
    [text] = [entry.value for entry in model.metadata_props if entry.key == RECEIPT]
    return text


def resealed(model: onnx.ModelProto, **changes: Any) -> onnx.ModelProto:
    """The model with a receipt that says something else, and fits it."""
    table = {**json.loads(text_of(model)), **changes}
    out = onnx.ModelProto()
    out.CopyFrom(model)
    del out.metadata_props[:]
    out.metadata_props.add(key=RECEIPT, value=receipts._text(receipts._sealed(table)))
    return out


def test_an_export_has_a_receipt_after_a_training_only() -> None:
    trainer = make(MODEL, backend="fused", epochs=1)
    assert trainer.export().SerializeToString() == MODEL.SerializeToString()
    trainer.fit(X, Y)
    export = trainer.export()
    assert receipts.read(export, "").steps == 1
    with_receipt = export.SerializeToString()
    assert trainer.export().SerializeToString() == with_receipt
    del export.metadata_props[:]
    without = trained(receipt=False, epochs=1, batch_size=24).export()
    assert without.SerializeToString() == export.SerializeToString()


def test_a_receipt_of_another_training_does_not_stay() -> None:
    first = trained().export()
    kept = make(first).export()
    assert kept.SerializeToString() == first.SerializeToString()
    second = trained(first).export()
    assert receipts.read(second, "").parent == receipts.read(first, "").digest
    assert verdict(second, first).outcome == "identical"
    assert not trained(first, receipt=False).export().metadata_props


# The second epoch is no improvement, and the weights of the first come back.
STOPS = {"name": "early_stopping", "patience": 1, "min_delta": 1e9}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam, cosine": {"optimizer": {"name": "adam", "beta1": 0.8}, "schedule": "cosine", "seed": 3},
    "penalty, clip": {"penalty": {"W1": "l2"}, "clip_norm": 0.1, "transforms": ["centralize"]},
    "groups": {"groups": [{"params": "W1", "rate": 0.5}, {"params": "W2", "start_epoch": 1}]},
    "ema, drop_last": {"averaging": "ema", "drop_last": True, "shuffle": False},
    "lora": {"adapters": {"name": "lora", "rank": 2}},
    "reinitialize": {"reinitialize": True, "freeze": ["b*"]},
    "validation": {"callbacks": ["early_stopping"], "metrics": ["r2"], "validation": 0.25},
    "stopped": {"callbacks": [STOPS], "epochs": 5, "validation": 0.25},
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_repeated_to_the_same_bits(case: str) -> None:
    options = dict(CASES[case])
    export = trained(validation=options.pop("validation", None), **options).export()
    assert len(text_of(export)) <= receipts.MOST
    found = verdict(export)
    assert (found.outcome, found.reasons) == ("identical", ())
    assert found.compared == len(export.graph.initializer)
    assert verify(export).outcome == "intact"


def test_several_fits_and_changed_settings() -> None:
    trainer = trained()
    trainer.seed, trainer.epochs, trainer.learning_rate = 5, 1, 0.01
    trainer.fit(X, Y)
    assert "different data or settings" in verdict(trainer.export()).reasons[0]
    again = make(MODEL, backend="fused", epochs=2)
    again.seed, again.learning_rate = 5, 0.01
    for _ in range(2):
        again.fit(X, Y)
    found = verdict(again.export())
    assert (found.outcome, found.receipt.fits) == ("identical", 2)
    assert found.receipt.arguments["seed"] == 5


def by_hand(act: Any) -> Trainer:
    trainer = trained()
    act(trainer)
    return trainer


class Noise:
    @hook
    def batch_drawn(self, batch: Any, rng: Any) -> Any:
        return {"X": batch["X"] + np.float32(0.1)}


def step_end(progress: Any) -> bool:
    return bool(progress.step == 2)


ONES = {"b1": np.ones(8, np.float32)}
NOT_REPEATED = {
    "interrupted in epoch 1": lambda: trained(callbacks=[step_end]),
    "Trainer.step": lambda: by_hand(lambda trainer: trainer.step((X, Y))),
    "Trainer.set_state": lambda: by_hand(lambda trainer: trainer.set_state(ONES)),
    "iterable": lambda: trained(data=(Batches([(X, Y)]),)),
    "callbacks": lambda: trained(callbacks=[Noise()]),
}


def not_repeated(found: Any, why: str) -> None:
    assert found.outcome == "not repeated"
    assert why in found.reasons[0]


@pytest.mark.parametrize("why", NOT_REPEATED)
def test_what_cannot_be_repeated_says_why(why: str) -> None:
    not_repeated(verdict(NOT_REPEATED[why]().export()), why)


def test_a_resumed_training(tmp_path: Path) -> None:
    trained().save(tmp_path / "checkpoint")
    resumed = Trainer.resume(tmp_path / "checkpoint", plugins=plugins(), progress=False)
    not_repeated(verdict(resumed.export()), "resumed")

    def epoch_end(trainer: Trainer) -> None:
        if not (tmp_path / "middle").exists():
            trainer.save(tmp_path / "middle")

    whole = trained(callbacks=[epoch_end])
    rest = Trainer.resume(tmp_path / "middle", plugins=plugins(), progress=False, callbacks=())
    rest.fit(X, Y)
    found = verdict(rest.export())
    assert found.outcome == "identical"
    assert found.receipt.digest == receipts.read(whole.export(), "").digest


def test_other_data_models_and_recipes_are_told_apart(tmp_path: Path) -> None:
    export = trained(epochs=3).export()
    other = X.copy()
    other[3, 2] += 1
    assert "'X' was float32[24, 6]" in verdict(export, data=(other, Y)).reasons[0]
    assert "'X'" not in verdict(export, data=(X, Y + 1)).reasons[0]
    assert "is not the model" in verdict(export, models.mlp(seed=1)).reasons[0]
    assert "no data" in verdict(export, data=None).reasons[0]
    onnx.save(MODEL, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=X, y=Y)
    recipe = tmp_path / "train.toml"
    recipe.write_text(
        'model = "m.onnx"\ndata = "d.npz"\nloss = "squared_error"\noptimizer = "sgd"\n'
        "epochs = 3\nbatch_size = 8\n"
        'callbacks = [{name = "checkpoint", folder = "here"}]\nbackend = "fused"\n'
    )
    assert verify(export, recipe=recipe, plugins=plugins()).outcome == "identical"
    assert not (tmp_path / "here").exists()
    recipe.write_text(recipe.read_text().replace("epochs = 3", "epochs = 4"))
    not_repeated(verify(export, recipe=recipe, plugins=plugins()), "epochs: was 3, is 4")
    assert "no receipt" in verify(MODEL, plugins=plugins()).reasons[0]


def test_other_versions_are_the_cause_that_is_named() -> None:
    export = trained().export()
    table = json.loads(text_of(export))
    forged = resealed(
        export, versions={**table["versions"], "onnxruntime": "1.0"}, arguments={"loss": "huber"}
    )
    found = verdict(forged)
    assert found.outcome == "not repeated"  # and not "different": this is not where it was trained
    assert any("onnxruntime was 1.0" in reason for reason in found.reasons)
    assert {t.name for t in found.tensors} <= {"W1", "W2", "W3", "b1", "b2", "b3"}


def test_a_forged_receipt_is_found_by_the_repeated_training() -> None:
    export = trained().export()
    value = onnx.numpy_helper.to_array(export.graph.initializer[0]).copy()
    value[0, 0] += 1
    export.graph.initializer[0].raw_data = value.tobytes()
    assert verify(export).outcome == "different"
    content = receipts.content_of(export)
    forged = resealed(export, tensors=content.tensors, graph=content.graph)
    assert verify(forged).outcome == "intact"  # who changes a file can write a receipt that fits
    found = verdict(forged)
    assert found.outcome == "different"
    [tensor] = found.tensors
    assert (tensor.name, tensor.numbers, tensor.size) == ("W1", 1, 48)
    assert tensor.largest == pytest.approx(1)


def missed(export: bytes, count: int, seed: int) -> list[int]:
    """The bits, of some that are drawn, whose change is not found."""
    rng = np.random.default_rng(seed)
    out = []
    for bit in rng.choice(8 * len(export), count, replace=False).tolist():
        changed = bytearray(export)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = verify(bytes(changed)).outcome
        except ModelError:
            continue
        if found == "intact":
            out.append(bit)
    return out


def test_every_changed_bit_is_found() -> None:
    export = trained().export().SerializeToString()
    assert verify(export).outcome == "intact"
    assert missed(export, 1000, seed=24) == []


def test_nothing_private_is_in_a_receipt(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from ortflex_core import Loss\n\n\nclass Quartic(Loss):\n    '''Σ d⁴.'''\n\n"
        "    def per_sample(self, op, predicted, expected):\n"
        "        d = op.Sub(predicted, expected)\n        return op.Mul(op.Mul(d, d), op.Mul(d, d))\n"
    )
    np.savez(tmp_path / "secret-name.npz", X=X, y=Y)
    onnx.save(MODEL, tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    source = plugins().component("data", {"name": "npz", "path": str(tmp_path / "secret-name.npz")})
    callbacks = [
        {"name": "checkpoint", "folder": str(tmp_path / "c")},
        {"name": "csv_log", "path": "log.csv"},
    ]
    loss = f"{tmp_path / 'my_losses.py'}:Quartic"
    trainer = trained("m.onnx", (source,), loss=loss, callbacks=callbacks)
    text = text_of(trainer.export())
    files = ("secret", "log.csv", "checkpoint", "m.onnx", "my_losses")
    for private in (str(tmp_path), str(Path.home()), *files):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text
    assert json.loads(text)["data"]["read"] == {"name": "npz"}
    # The loss is code, which the receipt names by a digest; the caller passes it.
    assert "pass the recipe" in verdict(trainer.export(), "m.onnx").reasons[0]
    own = type(internals_of(trainer).setup.requests[0].loss)()
    found = verdict(trainer.export(), "m.onnx", "secret-name.npz", loss=own)
    assert found.outcome == "identical"
    recipe = tmp_path / "train.toml"
    recipe.write_text(
        'model = "m.onnx"\ndata = "secret-name.npz"\nloss = "my_losses.py:Quartic"\noptimizer = "sgd"\n'
        "epochs = 2\nbatch_size = 8\n"
    )
    export = trainer.export()
    assert verify(export, recipe=recipe, plugins=plugins()).outcome == "identical"
    # Changed code.
    code = tmp_path / "my_losses.py"
    code.write_text(code.read_text().replace("Mul(d, d))", "Abs(d))"))
    not_repeated(verify(export, recipe=recipe, plugins=plugins()), "loss: was")


SAVES = {"name": "checkpoint", "folder": "here"}
LOSSES = {
    "a class": "evil.py:Evil",
    "a teacher": {"name": "distillation", "teacher": "/etc/passwd"},
}
ARGUMENTS = {
    "a file to write": {"callbacks": ["csv_log"]},
    "a folder to write": {"callbacks": [SAVES]},
    "no argument": {"evil": 1},
    "plugins": {"plugins": "plugins"},
    "a wrong value": {"epochs": -1},
}
HOSTILE: dict[str, dict[str, Any]] = {
    **{case: {"arguments": {"loss": loss}} for case, loss in LOSSES.items()},
    **{case: {"arguments": {"loss": "squared_error", **a}} for case, a in ARGUMENTS.items()},
    "no table": {"arguments": ["squared_error"]},
    "a source": {"data": {"read": {"name": "evil.py:Evil"}, "columns": {}}},
    "another backend": {"backend": "evil.py:Evil"},
    "threads": {"threads": -3},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_receipt_names_no_code_and_no_file(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    forged = resealed(trained().export(), **HOSTILE[case])
    before = set(tmp_path.iterdir())
    found = verdict(forged)
    assert found.outcome == "not repeated", found
    assert found.reasons
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format":1}', "x" * 3000, "[" * 2000, '{"format":9,"digest":"0"}', "null"],
)
def test_a_receipt_that_is_none_is_damaged(text: str) -> None:
    export = trained(epochs=1).export()
    export.metadata_props[0].value = text
    with pytest.raises(ModelError, match="receipt is damaged"):
        verify(export)


def test_long_values_are_left_out_with_their_digests() -> None:
    many = ["W3"] * 600
    export = trained(freeze=many, penalty={"W1": {"name": "elastic", "l1": 0.25}}).export()
    table = json.loads(text_of(export))
    assert len(text_of(export)) <= receipts.MOST
    assert receipts.is_left_out(table["arguments"]["freeze"])
    kept = {"W1": {"name": "elastic", "l1": 0.25}}
    assert table["arguments"]["penalty"] == {"by_parameter": kept}
    not_repeated(verdict(export), "freeze")
    assert verdict(export, freeze=many).outcome == "identical"


def test_many_columns_are_one_digest() -> None:
    wide = {"columns": {f"{'c' * 30}{k}": f"float32[9] {k:032d}" for k in range(200)}, "rows": 9}
    whole = {"format": 1, "versions": {"ortflex": "1"}, "data": wide, "arguments": {"loss": "x"}}
    text = receipts._fitted({**whole, "unnamed": ["a" * 3000], "obstacles": ["b" * 3000]})
    table = json.loads(text)
    assert len(text) <= receipts.MOST
    assert receipts.agrees(table["data"]["columns"], wide["columns"])
    assert not receipts.agrees(table["data"]["columns"], {**wide["columns"], "c": "float32[9] 0"})
    many = {f"argument_{k}": f"{k:040d}" for k in range(100)}
    assert len(receipts._fitted({**whole, "arguments": many, "versions": many})) <= receipts.MOST


def test_other_layouts_and_forms_of_files(tmp_path: Path) -> None:
    path, export = tmp_path / "m.onnx", tmp_path / "trained.onnx"
    apart = {"save_as_external_data": True, "location": "m.data", "size_threshold": 64}
    onnx.save(models.mlp((6, 300, 4, 1)), path, **apart)
    trained(path).export(export)
    values = tmp_path / "trained.onnx.data"
    data = bytearray(values.read_bytes())
    assert verdict(export, path).outcome == "identical"
    # The same tensors in one file.
    assert verdict(onnx.load(export), models.mlp((6, 300, 4, 1))).outcome == "identical"
    data[100] ^= 1
    values.write_bytes(data)
    assert verify(export).outcome == "different"

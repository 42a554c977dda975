"""Files that are data name installed plugins only: no code that they name runs, through any entrance.

The class of the defect: a checkpoint, a run folder, the header of a state, a manifest, a PEFT folder,
a folder of the hub or the arguments of a pickled Trainer select a class by its path, and the class is
imported or called before its kind is checked. The entrances are listed from the public names, the
commands and the fields of components; each is tried with every payload, or reads no names.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from ortflex_core import (
    Arguments,
    BrokenPlugin,
    OrtflexError,
    Recipe,
    Trainer,
    apply_state,
    hook,
    internals_of,
    kinds_of_plugins,
    open_step,
    to_toml,
    verify,
)
from ortflex_core.training import receipt as receipts
from ortflex_plugins.c.export import export_c
from ortflex_plugins.pictures import draw
from tests import edited_checkpoints, models
from tests.plugins import entrances
from tests.plugins.commands import ortflex
from tests.plugins.payloads import payloads, plant, watched
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python

X, Y = regression(rows=8)
KEYS = (*kinds_of_plugins(), "gradients", "groups", "data", "validation", "plugins")
OPTIONS: dict[str, Any] = {"loss": "squared_error", "backend": "fused", "epochs": 1}


class Prints:
    """A callback of the user."""

    @hook
    def epoch_end(self) -> None:
        """Do nothing."""


# What is tried, by how the payload gets into the file; the values are the entrances of a trial.
TRIED: dict[str, tuple[str, ...]] = {
    "resume": ("Trainer.resume(folder)", "list_checkpoints(folder)", "export run"),
    "restore": ("Trainer.restore(folder)", "train --resume"),
    "unpickle": (),
    "recipe": (
        *("Recipe.load(path)", "train recipe", "compare recipe", "graph source"),
        *("export-step recipe", "new-flower-app recipe", "verify(recipe)", "verify --recipe"),
        "find-rate recipe",
    ),
    "run": ("report folders", "report(what)", "evaluate run", "predict run"),
    "state": ("apply_state(state)", "apply-state state"),
    "step": ("open_step(folder)", "export_c(step)"),
    "peft": ("adapters lora.source",),
    "hub": ("SharesModels.from_hub(repo_id)", "SharesModels.from_hub(filename)"),
    "model": (
        *("Model(source)", "Trainer(model)", "OnnxFunction(model)"),
        *("OrtClassifier(model)", "OrtEstimator(model)", "apply_state(model)"),
        *("apply-state model", "as_model(source)", "check_model(model)", "draw(model)"),
        "edited_model(model)",
        *("estimate_memory(model)", "gradient_model(model)", "read_model(source)"),
        *("server_app(model)", "init model", "check model", "Recipe(model)"),
        *("diff first", "diff second", "verify(model)", "verify --model", "quantize model"),
        *("shrink(model)", "shrink model"),
    ),
    "receipt": ("verify(trained)", "verify trained"),
}
READS_NO_NAMES = {
    "bytes and text, whose names are looked up by others": (
        *("ArrayFile(path)", "NotRegular.of(path)", "RegularFile(path)", "lines(path)"),
        *("open_regular(path)", "open_text(path)", "read_bytes(path)", "read_json(path)"),
        *("read_text(path)", "TeacherTensor(model)", "no_file(path)"),
    ),
    "rows, which have names of columns only": (
        *("Recipe(data)", "partition_rows(data)", "init --data", "predict data"),
        *("evaluate data", "data arrow.path", "data csv.path", "data image_folder.path"),
        *("data npy.path", "data npz.path", "data parquet.path", "data tokenized.path"),
        "files_digest(files)",
        *("data tokenized.tokenizer", "verify(data)", "verify --data", "quantize --data"),
        "shrink --data",
    ),
    "a file is written": (
        *("Adapter.write(path)", "History.to_csv(path)"),
        *("BaseOnnxClass.save_onnx_graph(folder)", "Model.export(path)", "Shrunk.export(path)"),
        *("FolderLock.acquire(folder)", "FolderLock.holder(folder)"),
        *("OrtEstimator.to_onnx(path)", "Picture.save(path)"),
        "OrtGradientForwardBackwardFunction.save_onnx_graph(folder)",
        *("Recipe.to_toml(folder)", "SharesModels.push_to_hub(filename)"),
        *("SharesModels.push_to_hub(repo_id)", "Trainer.export(path)", "Trainer.save(folder)"),
        *("Trainer.export_adapter(path)", "Trainer.export_base(path)"),
        *("Trainer.export_step(folder)", "Trainer.save_onnx_graph(folder)", "apply_state(path)"),
        *("export_step(folder)", "make_folder(path)", "server_app(output)", "write_bytes(path)"),
        *("write_adapter(path)", "write_base(path)", "callbacks checkpoint.folder"),
        *("callbacks csv_log.path", "callbacks tensorboard.folder", "callbacks mlflow.uri"),
        *("callbacks mlflow.model", "callbacks wandb.model"),
        *("init --output", "predict --output", "graph --output", "report --output"),
        *("export-step --output", "apply-state --output", "new-plugin --output"),
        *("new-flower-app --output", "diff --output", "find-rate --output"),
        *(
            "export_c(folder)",
            "RateSweep.to_csv(path)",
            "Page.save(path)",
            "report(path)",
            "quantize --output",
            "shrink --output",
            "export --output",
            "shrink(path)",
        ),
    ),
    "the caller names code": (
        *("Plugins.with_folder(folder)", "Plugins.for_data(folder)", "use_library(path)"),
    ),
    "functions of an operator's name, which find installed families": ("RuleTable(later)",),
    "a name for messages, or values that were read": (
        *("ModelReport(model)", "PortableStep(folder)", "Saved(source)", "Summary(model)"),
        *("with_values(source)", "DataSource.found(like)", "Receipt(model)", "Receipt(data)"),
        "Receipt(recipe)",
    ),
}


def test_every_entrance_is_tried_or_reads_no_names() -> None:
    """A new parameter, option or field that is a file has to be entered in one of the two tables."""
    known = {e for group in (*TRIED.values(), *READS_NO_NAMES.values()) for e in group}
    listed = {*entrances.of_python(), *entrances.of_commands(), *entrances.of_components()}
    assert listed - known == set()
    assert known - listed == set()
    assert {trial for trial, group in TRIED.items() if group or trial == "unpickle"} == set(TRIALS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a run, a portable step and a PEFT folder, all without payloads."""
    folder = tmp_path_factory.mktemp("saved")
    onnx.save(models.linear(), folder / "model.onnx")
    np.savez(folder / "data.npz", X=X, y=Y)
    trainer = make(folder / "model.onnx", **OPTIONS)
    trainer.fit(X, Y)
    trainer.save(folder / "checkpoint")
    (folder / "run").mkdir()
    trainer.export(folder / "run" / "trained.onnx")
    trainer.history_.to_csv(folder / "run" / "history.csv")
    (folder / "run" / "versions.json").write_text("{}")
    lora = {"name": "lora", "rank": 1}
    adapted = make(folder / "model.onnx", **OPTIONS, adapters=[lora])
    adapted.export_step(folder / "step", X, Y)
    adapted.export_adapter(folder / "peft", format="peft")
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the files, with planted code, as the current folder and on Python's path."""
    folder = shutil.copytree(saved, tmp_path / "place")
    plant(folder)
    for inner in ("checkpoint", "run", "step", "peft"):
        plant(folder / inner)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if "evil" in name:
            del sys.modules[name]


Change = Mapping[str, Any]
"""Values of keys of a recipe, in which a payload is named."""


def changes(payload: dict[str, Any]) -> Iterator[Change]:
    """A payload as the value of every key at once, then of one key each, plain and nested."""
    if "plugins" in payload:
        yield payload
        return
    name = payload.get("name", payload.get("target"))
    whole: dict[str, Any] = {}
    for key in KEYS:
        if key == "plugins":
            value: Any = "plugins"
        elif key == "gradients":
            value = [name]
        elif key == "groups":
            value = [{"params": "coef", "optimizer": payload, "penalty": {"*": payload}}]
        elif key in ("adapters", "transforms", "metrics", "callbacks"):
            value = [payload, name, {**payload, "plugins": "plugins"}]
        elif key == "schedule":
            value = {"name": "chained", "schedules": [payload, "cosine"]}
        elif key in ("penalty", "constraint"):
            value = {"*": payload}
        elif key == "loss":
            value = [{**payload, "predicted": "Y"}, {"name": "squared_error", "of": payload}]
        else:
            value = payload
        whole[key] = value
    # A folder of plugins is refused before all others, and rows are read before the rest.
    yield {key: value for key, value in whole.items() if key not in ("plugins", "data")}
    yield {"callbacks": [payload]}
    yield {"loss": {"Y": payload}}


def edited_record(place: Path, change: Change) -> Path:
    arguments = {k: v for k, v in change.items() if k not in ("data", "validation")}
    edited_checkpoints.edit(place / "checkpoint", lambda r: r["arguments"].update(arguments))
    return place / "checkpoint"


def written_recipe(place: Path, change: Change) -> Path:
    table = {"model": "../model.onnx", "data": "../data.npz", "loss": "squared_error", **change}
    lines = [f"{key} = {to_toml(value)}\n" for key, value in table.items()]
    (place / "run" / "recipe.toml").write_text("".join(lines), "utf-8")
    return place / "run" / "recipe.toml"


def edited_header(place: Path, change: Change) -> Path:
    path = place / "step" / "state.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    content = json.loads(header["__metadata__"]["ortflex"])
    content["adapters"] = [v for value in change.values() for v in _listed(value)]
    save_file(load_file(path), path, {"ortflex": json.dumps(content)})
    return path


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def command(*arguments: Any) -> None:
    """A command; its error is raised, and a traceback fails the test."""
    result = ortflex(*map(str, arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    if result.exit_code:
        raise OrtflexError(result.output)


def resume(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    folder = edited_record(place, change)
    yield lambda: Trainer.resume(folder, plugins=plugins())
    yield lambda: Trainer.resume(folder, plugins=plugins(), callbacks=[Prints()])
    yield lambda: Trainer.resume(folder, plugins=plugins(), strict=False, metrics=())
    yield lambda: command("export", folder, "-o", place / "out.onnx", "--force")


def restore(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    folder = edited_record(place, change)
    trainer = make(place / "model.onnx", **OPTIONS)
    yield lambda: trainer.restore(folder)
    yield lambda: trainer.restore(folder, strict=False)
    own = place / "train.toml"
    own.write_text(
        'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\nepochs = 1\noutput = "o"\n'
    )
    yield lambda: command("train", own, "--resume", folder, "--force")


def unpickle(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    trainer = make(place / "model.onnx", **OPTIONS)
    known = {k: v for k, v in change.items() if k in {f.name for f in attrs.fields(Arguments)}}
    internals_of(trainer).arguments.update(known)
    packed = pickle.dumps(trainer)
    yield lambda: pickle.loads(packed)


def recipe(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    path = written_recipe(place, change)
    yield lambda: Recipe.load(path, plugins=plugins())
    yield lambda: Trainer.from_recipe(Recipe.load(path, ["epochs=1"], trust_code=False))
    for name, options in (
        ("train", ()),
        ("compare", ("--steps", 1)),
        ("export-step", ("-o", "out")),
        ("graph", ("-o", "out.svg")),
        ("graph", ("-o", "out.svg", "--training")),
        ("new-flower-app", ("-o", "app")),
        ("check", ()),
        ("find-rate", ()),
    ):
        yield lambda name=name, options=options: command(name, path, *options)  # type: ignore[misc]


def run(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    folder = written_recipe(place, change).parent
    shutil.copytree(folder, place / "other", dirs_exist_ok=True)
    yield lambda: command("report", folder)
    yield lambda: command("report", folder, place / "other", "-o", "several.html")
    yield lambda: command("evaluate", folder)
    yield lambda: command("evaluate", folder, "--metric", "mae")
    yield lambda: command("predict", folder, "-o", "out.npz", "--force")
    yield lambda: command("graph", folder)
    yield lambda: command("graph", folder, "--training", "-o", "out.svg")


def state(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    path = edited_header(place, change)
    for given in (path, path.parent):
        yield lambda given=given: apply_state(place / "model.onnx", given)  # type: ignore[misc]
        yield lambda given=given: command(  # type: ignore[misc]
            "apply-state", place / "model.onnx", given, "-o", "out.onnx", "--no-strict"
        )


def step(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    path = place / "step" / "manifest.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "schedule": change, "not_portable": [change]}))
    yield lambda: open_step(path.parent)
    path.write_text(json.dumps({**table, "schedule": change}))
    yield lambda: open_step(path.parent)
    yield lambda: export_c(path.parent, place / "in_c")


def peft(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    path = place / "peft" / "adapter_config.json"
    entries = json.loads(path.read_text())
    extra = {"auto_mapping": change, "base_model_name_or_path": "evil.py:Evil", "r": 1}
    path.write_text(json.dumps({**entries, **extra, **change}))
    lora = {"name": "lora", "source": str(path.parent), "rank": 1}
    yield lambda: make(place / "model.onnx", **OPTIONS, adapters=[lora])


def hub(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    written_recipe(place, change)

    class Api:
        """A hub that has the files of the folder."""

        def __getattr__(self, name: str) -> Any:
            def call(*_: Any, **options: Any) -> Any:
                if name == "list_repo_files":
                    return [p.name for p in place.iterdir() if p.is_file()]
                return str(place / options.get("filename", "model.onnx"))

            return call

    yield lambda: Trainer.from_hub("a/b", "model.onnx", loss="squared_error", api=Api())


def model(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    proto = onnx.load(place / "model.onnx")
    text = json.dumps(change)
    for key in ("ortflex", "callbacks", "adapters", "loss", "pkg.torch.onnx.name_scopes"):
        proto.metadata_props.add(key=key, value=text)
        proto.graph.node[0].metadata_props.add(key=key, value=text)
    proto.doc_string = proto.producer_name = text
    path = place / "named.onnx"
    onnx.save(proto, path)
    yield lambda: draw(path, plugins=plugins())
    yield lambda: make(path, **OPTIONS)


def receipt(place: Path, change: Change) -> Iterator[Callable[[], Any]]:
    trainer = make(place / "model.onnx", **OPTIONS)
    trainer.fit(X, Y)
    export = trainer.export()
    table = json.loads(export.metadata_props[0].value)
    read = {key: change[key] for key in ("data", "validation") if key in change}
    others = {key: value for key, value in change.items() if key not in read}
    forms = [{"arguments": {**table["arguments"], **others}}]
    forms += [{"data": {**table["data"], "read": value}} for value in read.values()]
    for form in forms:
        export.metadata_props[0].value = receipts._text(receipts._sealed({**table, **form}))

        def attempt() -> None:
            found = verify(export, place / "model.onnx", "data.npz", plugins=plugins())
            if found.outcome == "not repeated":
                raise OrtflexError(*found.reasons)

        yield attempt


TRIALS: Mapping[str, Callable[[Path, Change], Iterator[Callable[[], Any]]]] = {
    trial.__name__: trial
    for trial in (resume, restore, unpickle, recipe, run, state, step, peft, hub, model, receipt)
}
WITH_EACH = ("resume",)
"""The trials in which every payload is the value of single keys, too."""


@pytest.mark.once
@pytest.mark.parametrize("trial", TRIALS)
def test_no_payload_runs(place: Path, trial: str) -> None:
    """Each entrance with each payload: nothing runs, and every error is one of ortflex."""
    found = payloads(place, place / "it-ran")
    assert len(found) >= 12
    before, refused = set(sys.modules), 0
    for title, payload in found.items():
        for k, change in enumerate(changes(payload)):
            if k and trial not in WITH_EACH:
                break
            for attempt in TRIALS[trial](place, change):
                with watched() as seen:
                    try:
                        attempt()
                    except OrtflexError:
                        refused += 1
                assert not seen, (title, change)
            ran = [p for p in place.rglob("it-ran") if p.is_file()]
            assert not ran, (title, change)
    assert not {name for name in set(sys.modules) - before if "evil" in name.lower()}
    assert refused >= len(found) or trial in ("hub", "model", "peft", "restore")


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ("data", "validation")])
def test_a_refusal_names_the_file_and_the_key(place: Path, key: str) -> None:
    """Each key alone, with a file that runs if it is trusted: the payloads are not harmless."""
    payload = {"name": "evil.py:Evil"}
    value = {**next(changes(payload)), "plugins": str(place / "plugins")}[key]
    path = written_recipe(place, {key: value})
    with watched() as seen, pytest.raises(OrtflexError, match=key) as caught:
        Recipe.load(path, plugins=plugins())
    assert not seen
    assert str(path) in str(caught.value)
    with watched() as seen, suppress(OrtflexError):  # it runs, and it is no loss
        Recipe.load(path, plugins=plugins(), trust_code=True)
    assert seen or key == "gradients"  # which are loaded with the model


def test_a_class_is_checked_before_it_is_called(place: Path) -> None:
    """Trusted or not: a callback is recognized by its hooks, before it is made."""
    for name in ("subprocess:Popen", "logging:FileHandler", "builtins:dict"):
        spec = {"name": name, "args": ["touch", "it-ran"], "filename": "it-ran"}
        with watched() as seen, pytest.raises(BrokenPlugin, match="has no hooks"):
            plugins().component("callbacks", spec, "callbacks[0]")
        edited_record(place, {"callbacks": [spec]})
        with watched() as also, pytest.raises(BrokenPlugin, match="has no hooks"):
            Trainer.resume(place / "checkpoint", trust_code=True)
        assert [*seen, *also] == []
    assert not (place / "it-ran").exists()


def test_objects_of_the_caller_replace_names_of_the_file(place: Path) -> None:
    """The comfortable case: an object that is passed, and the names in the file are not read."""
    folder = edited_record(place, {"callbacks": [{"name": "evil.py:Evil"}], "loss": "evil:Evil"})
    with pytest.raises(OrtflexError, match=r"loss: .*\n?.*callbacks\[0\]: "):
        Trainer.resume(folder, plugins=plugins())
    made = Trainer.resume(folder, plugins=plugins(), callbacks=[Prints()], loss="squared_error")
    assert isinstance(internals_of(made).setup.callbacks[0], Prints)
    path = written_recipe(place, {"callbacks": ["evil.py:Evil"], "metrics": ["evil.py:Evil"]})
    command("evaluate", path.parent, "--metric", "mae")
    with pytest.raises(OrtflexError, match=r"metrics\[0\]"):
        Recipe.load(path, plugins=plugins(), without=["callbacks"])
    assert not (place / "run" / "it-ran").exists()
    with pytest.raises(OrtflexError):
        command("evaluate", path.parent, "--trust-code")  # it is no metric, but it was imported
    assert (place / "run" / "it-ran").exists()

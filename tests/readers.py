"""Every reader of files: what it reads, and special files in the place of each of its files.

``python -m tests.readers FOLDER`` prints one line per case. Which files a reader opens is recorded
while it reads valid ones, so that none can be forgotten; ``tests/core/test_regular_files.py`` compares
where they were opened with the calls in the source.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import shutil
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from PIL import Image

from ortflex_core import FolderLock, Model, OrtflexError, Plugins, Recipe, Trainer, apply_state
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel import locks, regular_files
from ortflex_core.training import receipt
from ortflex_core.training.artifacts import hub as repository
from ortflex_core.training.data import column_files
from ortflex_core.training.engines import mailbox
from ortflex_plugins.c import compiler
from tests import children, models
from tests.fuzz import seeds
from tests.training import make, plugins, regression

Use = Callable[[Path], Any]
READERS: dict[str, tuple[Callable[[Path], Any], Use]] = {}
"""By name: what writes the files into a folder, and what reads them."""
HUGE = 1 << 42
"""Bytes of a file with a hole, more than any machine has."""


def reader(build: Callable[[Path], Any]) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        READERS[use.__name__] = build, use
        return use

    return add


# Models ---------------------------------------------------------------------------------------------


def _outside(folder: Path) -> None:
    (folder / "m.onnx").write_bytes(seeds.all_models()["outside"])
    (folder / "w.bin").write_bytes(seeds.weights())


@reader(_outside)
def a_model(folder: Path) -> None:
    Model(folder / "m.onnx")


@reader(_outside)
def a_model_whose_data_are_mapped(folder: Path) -> None:
    with mock.patch.object(model_file, "HUGE", 0), mock.patch.object(model_file, "_SMALL", 0):
        model = Model(folder / "m.onnx")
        model.initializer("W1")


@reader(_outside)
def a_model_whose_values_are_held_apart(folder: Path) -> None:
    with mock.patch.object(model_file, "LARGE", 0), mock.patch.object(model_file, "_HELD", 0):
        Model(folder / "m.onnx")


def _exported(folder: Path) -> None:
    (folder / "source").mkdir()
    _outside(folder / "source")
    Model(folder / "source" / "m.onnx").export({}, folder / "m.onnx")
    (folder / f"m.onnx.{'0' * 12}.data").write_bytes(b"of another export")


@reader(_exported)
def an_export_over_a_model(folder: Path) -> None:
    """Looks for data files of earlier exports, and for models that mention them."""
    Model(folder / "source" / "m.onnx").export({}, folder / "m.onnx")


class _Hub:
    """The client of the Hub: its cache is a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None) -> str:
        return str(self.folder / filename)

    def file_exists(self, repo_id: str, filename: str, revision: str | None = None) -> bool:
        return True


def _repository(folder: Path) -> None:
    _outside(folder)
    (folder / "README.md").write_text("text")


@reader(_repository)
def a_model_of_the_hub(folder: Path) -> None:
    with (
        mock.patch.object(os, "link", _no_links),
        repository.open_model("a/b", "m.onnx", None, _Hub(folder)) as (path, _),
    ):
        Model(path)


@reader(_repository)
def the_card_of_a_repository(folder: Path) -> None:
    with repository._explained(_Hub(folder), "a/b", None):
        repository._may_write_card(_Hub(folder), "a/b", None)


def _no_links(*_: Any) -> None:
    raise OSError


# Checkpoints and portable steps -----------------------------------------------------------------------


def _checkpoint(folder: Path) -> None:
    seeds.checkpoint(folder / "c")


@reader(_checkpoint)
def a_checkpoint(folder: Path) -> None:
    Trainer.resume(folder / "c", plugins=plugins())


@reader(_checkpoint)
def a_checkpoint_that_is_replaced(folder: Path) -> None:
    trainer = make(models.mlp((3, 4, 1)), backend="fused")
    trainer.save(folder / "c")


def _run_with_checkpoints(folder: Path) -> None:
    trainer = _with_checkpoints(folder)
    trainer.fit(*regression(rows=8, features=3))


def _with_checkpoints(folder: Path) -> Trainer:
    kept = {"name": "checkpoint", "folder": str(folder / "cks"), "epochs": 1}
    options = {"backend": "fused", "epochs": 2, "batch_size": 8, "callbacks": [kept]}
    return make(models.mlp((3, 4, 1)), **options)


@reader(_run_with_checkpoints)
def a_run_that_continues(folder: Path) -> None:
    trainer = Trainer.resume(folder / "cks", plugins=plugins())
    trainer.fit(*regression(rows=8, features=3))


def _resumed(folder: Path) -> None:
    _run_with_checkpoints(folder)
    (folder / "train.toml").write_text("epochs = 2\n")


@reader(_resumed)
def a_recipe_of_a_run_that_continues(folder: Path) -> None:
    from ortflex_plugins.cli.run_folder import plain_descent

    plain_descent(folder / "train.toml", (), folder / "cks")


def _loss_of_a_file(folder: Path) -> None:
    (folder / "own.py").write_text("")


@reader(_loss_of_a_file)
def a_file_of_code_in_a_receipt(folder: Path) -> None:
    receipt._of_file(str(folder / "own.py"))


def _library(folder: Path) -> None:
    with _cache(folder):
        compiler.compile_library("int kept;")


@reader(_library)
def a_library_that_was_compiled(folder: Path) -> None:
    with _cache(folder):
        compiler.compile_library("int kept;")
        compiler.compile_library(f"int number_{next(_NUMBERS)};")


def _cache(folder: Path) -> Any:
    return mock.patch.dict(os.environ, {compiler.CACHE: str(folder)})


_NUMBERS = itertools.count()


def _step(folder: Path) -> None:
    x, y = regression(rows=8, features=3)
    trainer = make(models.mlp((3, 4, 1)), backend="fused", optimizer="adam", batch_size=4)
    trainer.fit(x, y)
    trainer.export_step(folder / "step")
    onnx.save(models.mlp((3, 4, 1)), folder / "m.onnx")


@reader(_step)
def a_portable_step(folder: Path) -> None:
    apply_state(folder / "m.onnx", folder / "step", folder / "out.onnx")


@reader(_step)
def a_step_that_is_replaced(folder: Path) -> None:
    _step(folder)


@reader(_step)
def a_state(folder: Path) -> None:
    apply_state(folder / "m.onnx", folder / "step" / "state.safetensors")


def _adapter(folder: Path) -> None:
    from tests.plugins.test_adapters_folders import GOOD, written

    written(folder / "peft", {**GOOD, "alpha_pattern": {"fc1": 2}})


@reader(_adapter)
def an_adapter(folder: Path) -> None:
    from tests.plugins.test_adapters_folders import trained

    trained(folder / "peft")


# Recipes and run folders ------------------------------------------------------------------------------


def _recipe(folder: Path) -> None:
    onnx.save(models.mlp((3, 4, 1)), folder / "model.onnx")
    (folder / "data.csv").write_bytes(seeds.table())
    (folder / "own.py").write_text(
        "from ortflex_core import Loss\n\n\nclass Own(Loss):\n    name = 'own'\n"
        "    scores = 'values'\n\n    def per_sample(self, op, scores, labels):\n"
        "        return op.ReduceSum(scores - labels)\n"
    )
    (folder / "train.toml").write_text(
        'model = "model.onnx"\nloss = "own.py:Own"\ndata = "data.csv"\n'
    )


@reader(_recipe)
def a_recipe(folder: Path) -> None:
    recipe = Recipe.load(folder / "train.toml", plugins=Plugins.discover())
    Trainer.from_recipe(recipe, Plugins.discover())


@reader(seeds.finished_run)
def a_page_of_a_run(folder: Path) -> None:
    from ortflex_plugins.pictures.pages import page_of_folder as report

    if not os.path.lexists(folder / "run" / ".run.lock"):
        (folder / "run" / ".run.lock").touch()
    report(folder / "run")


@reader(seeds.finished_run)
def a_run(folder: Path) -> None:
    from ortflex_plugins.cli import trained

    recipe, trainer = trained.open_run(folder / "run")
    trainer.predict(trained.features(trained.source(recipe, trainer, None)[1]))


@reader(seeds.finished_run)
def a_run_that_ends(folder: Path) -> None:
    from ortflex_plugins.cli import run_folder

    trainer = make(models.mlp((3, 4, 1)), backend="fused", epochs=1)
    trainer.fit(*regression(rows=4, features=3))
    content = types.SimpleNamespace(content=dict)
    run_folder.finish(folder / "run", trainer, content)  # type: ignore[arg-type]
    run_folder.was_interrupted(folder / "run")


# Data -------------------------------------------------------------------------------------------------


def _arrays(folder: Path) -> None:
    for name, array in seeds.arrays().items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "data.npz", **seeds.arrays())


def _rows(folder: Path) -> None:
    (folder / "data.csv").write_bytes(seeds.table())
    (folder / "texts.csv").write_text("text,label\na b,1\nb,0\n")
    (folder / "texts.jsonl").write_text('{"text": "a b", "label": 1}\n{"text": "b", "label": 0}\n')
    (folder / "tokenizer.json").write_text("{}")
    for kind in ("parquet", "arrow"):
        (folder / f"data.{kind}").write_bytes(seeds.columns(kind))
    import pyarrow.parquet

    texts = pyarrow.table({"text": ["a b", "b"], "label": [1, 0]})
    pyarrow.parquet.write_table(texts, folder / "texts.parquet")
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "images" / name / "1.png")


def _source(build: Callable[[Path], Any], name: str, **given: Any) -> None:
    """A reader for a data source: some of its rows are read, whatever it returns."""

    def use(folder: Path) -> None:
        path = str(folder / given.get("path", "."))
        made = plugins().component("data", {"name": name, **given, "path": path}).load()
        if hasattr(made, "sizes"):
            for piece in range(len(made.sizes)):
                list(made.read(piece))
        else:
            made.take(np.arange(2))

    READERS[f"{name} {given.get('path', 'folder')} {given.get('buffer', '')}"] = build, use


_source(_arrays, "npz", path="data.npz")
_source(_arrays, "npy")
_source(_arrays, "npy", buffer=4)
_source(_rows, "csv", path="data.csv")
_source(_rows, "parquet", path="data.parquet", buffer=4)
_source(_rows, "arrow", path="data.arrow", buffer=4)
_source(_rows, "image_folder", path="images", size=[4, 4])
for ending in ("csv", "jsonl", "parquet"):
    _source(_rows, "tokenized", path=f"texts.{ending}", tokenizer="tokenizer.json", length=4)


# Locks and messages -----------------------------------------------------------------------------------


def _nothing(folder: Path) -> None:
    (folder / ".lock").touch()


@reader(_nothing)
def a_lock(folder: Path) -> None:
    lock = FolderLock()
    lock.holder(folder)
    lock.acquire(folder)
    lock.release()


def _shared(folder: Path) -> None:
    (folder / "memory").write_bytes(bytes(64) + b"0" * mailbox._TOKEN)


@reader(_shared)
def a_shared_memory(folder: Path) -> None:
    with contextlib.suppress(UnicodeDecodeError, OSError):
        mailbox._token(str(folder / "memory"))


LAYOUT = {"h": column_files.Column(np.dtype(np.float32), (3, 4))}


class Owner:
    """What derived columns belong to: their file is removed with it."""


KEPT = Owner()


def _temporary(folder: Path) -> Any:
    return mock.patch.object(column_files.tempfile, "tempdir", str(folder))


def _columns(folder: Path) -> None:
    with _temporary(folder), column_files.ColumnFiles(KEPT).making("key", LAYOUT):
        pass


@reader(_columns)
def derived_columns(folder: Path) -> None:
    with _temporary(folder):
        column_files.ColumnFiles(Owner()).find("key", LAYOUT)


# Special files ----------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    place = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(place)


def _hole(path: Path) -> None:
    content = b"" if not path.exists() else path.read_bytes()
    path.unlink(missing_ok=True)
    with path.open("wb") as out:
        out.write(content)
        out.truncate(HUGE)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (
        os.mkfifo(path.with_name("a pipe")),
        path.symlink_to("a pipe"),
    ),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "hole": _hole,
}
OF_ANY_SIZE = (".bin", ".data", ".npy", "memory")
"""The ends of files whose size has no bound: only what a header names is read, or nothing at all."""


@contextlib.contextmanager
def recorded(opened: set[Path], places: set[str]) -> Iterator[None]:
    """Record the files that are opened, and the functions that open them."""
    opener, locking = regular_files._open, locks._open

    def record(path: Any) -> None:
        opened.add(Path(path))
        frame: Any = sys._getframe(2)
        while frame.f_globals.get("__name__") in (regular_files.__name__, __name__):
            frame = frame.f_back
        places.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")

    def reading(path: str, flags: int) -> int:
        record(path)
        return opener(path, flags)

    def lock(path: Path) -> int:
        record(path)
        return locking(path)

    with (
        mock.patch.object(regular_files, "_open", reading),
        mock.patch.object(locks, "_open", lock),
    ):
        yield


def _without_tokenizers() -> None:
    """What the source needs of the package, where it is missing."""
    if importlib.util.find_spec("tokenizers") is not None:
        return
    one = types.SimpleNamespace(ids=[0] * 4, attention_mask=[1] * 4, type_ids=[0] * 4)
    made = types.SimpleNamespace(
        padding=None,
        token_to_id=lambda token: 0,
        enable_truncation=lambda length: None,
        enable_padding=lambda **options: None,
        encode_batch=lambda rows: [one] * len(rows),
    )
    known = types.SimpleNamespace(from_str=lambda text: json.loads(text) or made)
    sys.modules["tokenizers"] = types.SimpleNamespace(Tokenizer=known)  # type: ignore[assignment]


def attack(name: str, folder: Path, say: Callable[..., None]) -> None:
    """Read the valid files, then put each special file in the place of each of them."""
    build, use = READERS[name]
    folder.mkdir(parents=True)
    build(folder)
    whole = folder.with_name(f"{folder.name}-whole")
    shutil.copytree(folder, whole)
    opened: set[Path] = set()
    places: set[str] = set()
    with recorded(opened, places):
        use(folder)
    inside = sorted({p.relative_to(folder) for p in opened if p.is_relative_to(folder)})
    inside = [p for p in inside if not (whole / p).is_dir() and ".part/" not in f"{p}/"]
    say(reader=name, opened=[str(p) for p in inside], places=sorted(places))
    for place in inside:
        for kind, special in SPECIAL.items():
            if kind == "hole" and place.name.endswith(OF_ANY_SIZE):
                continue
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if kind != "hole" and os.path.lexists(target):
                target.unlink()
            special(target)
            say(begin=f"{name}: {kind} in the place of {place}")
            began, end, text = time.monotonic(), "fine", ""
            try:
                use(folder)
            except OrtflexError as error:
                end, text = "refused", str(error)
            except BaseException as error:
                end, text = f"wrong: {type(error).__name__}", str(error)
            say(
                end=end,
                text=text[:500],
                seconds=time.monotonic() - began,
                mib=round(children.peak()),
            )


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = sys.argv[2:] or list(READERS)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    _without_tokenizers()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number, name in enumerate(chosen):
        attack(name, folder / str(number), lambda **said: print(json.dumps(said), file=out))


if __name__ == "__main__":
    main()

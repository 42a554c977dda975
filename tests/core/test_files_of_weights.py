"""Files of weights: arrays as the library safetensors reads them, models with data in a second file.

Exports of such pairs are all or nothing, and live Trainers keep their bytes.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from safetensors import safe_open
from safetensors.numpy import load

from ortflex_core import Model, ModelError, OutputError, Trainer, dump_arrays, write_bytes
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.files import staging
from ortflex_core.training.artifacts.array_file import read_arrays, write_arrays
from tests import children, models
from tests.training import make, plugins

pytestmark = pytest.mark.once

TYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
]


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    out = {f"of {name}": rng.integers(0, 2, (3, 5)).astype(name) for name in TYPES}
    return out | {
        "empty": np.zeros((0, 4), np.float32),
        "a number": np.float64(2.5).reshape(()),
        "größe/λ": rng.standard_normal(7).astype(np.float32),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"λ": '{"a": [1, "\\n"]}'}])
@pytest.mark.parametrize("content", [{}, arrays()], ids=["nothing", "all types"])
def test_the_library_reads_what_is_written(
    content: dict[str, Any], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    out = io.BytesIO()
    dump_arrays(out, content, metadata)
    found = load(out.getvalue())
    assert found.keys() == content.keys()
    for name, array in content.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    (tmp_path / "file").write_bytes(out.getvalue())
    with safe_open(tmp_path / "file", "numpy") as file:
        assert file.metadata() == metadata


VIEWS: dict[str, Any] = {
    "transposed": lambda a: a.T,
    "in the order of Fortran": np.asfortranarray,
    "backwards": lambda a: a[::-1, ::-1],
    "every other": lambda a: a[:, ::2],
    "broadcast": lambda a: np.broadcast_to(a[:1], (4, a.shape[1])),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("kind", ["float32", "int64", "bool", "float16"])
@pytest.mark.parametrize("name", VIEWS)
def test_arrays_in_any_memory_are_read_back(name: str, kind: str, tmp_path: Path) -> None:
    whole = np.random.default_rng(1).integers(0, 2, (4, 6)).astype(kind)
    view = VIEWS[name](whole)
    write_arrays(tmp_path / "file", {"first": whole, "view": view}, {"a": "b"})
    found, metadata = read_arrays(tmp_path / "file")
    theirs = load((tmp_path / "file").read_bytes())
    for read in (found, theirs):
        assert read["view"].dtype == np.dtype(kind)
        np.testing.assert_array_equal(read["view"], view)
        np.testing.assert_array_equal(read["first"], whole)
    assert metadata == {"a": "b"}


def test_no_copy_of_a_large_array_is_made(tmp_path: Path) -> None:
    large = {name: np.ones((1 << 20,), np.float32) for name in "abcd"}  # 4 MiB each
    turned = {"m": np.ones((1 << 10, 1 << 10), np.float32).T}
    # At most that of the array whose elements are not contiguous.
    for content, most in ((large, 1 << 20), (large | turned, 5 << 20)):
        tracemalloc.start()
        write_arrays(tmp_path / "file", content)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most


@pytest.mark.parametrize("kind", ["complex128", "U3", "O"])
def test_a_type_that_the_format_lacks_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'odd' has the type"):
        write_arrays(tmp_path / "file", {"odd": np.zeros(2, kind)})


# Models with data in a second file ---------------------------------------------------------------

ROOT = Path(__file__).parents[2]
SIZES = {"w0": (40, 40), "w1": (40, 40), "w2": (40, 40), "w3": (40, 3)}


def pair(path: Path, *, padding: int = 0, align: int = 1, value: float | None = None) -> Path:
    """A chain of products; all of its weights are in ``<name>.data``, at offsets as asked for."""
    rng = np.random.default_rng(0)
    steps = [f"h{k} = MatMul(r{k}, w{k})  r{k + 1} = Tanh(h{k})" for k in range(3)]
    body = "  ".join([*steps, "Y = MatMul(r3, w3)"])
    model = models.parsed(body, {}, "float[N, 40] r0", "float[N, 3] Y")
    with open(path.with_name(f"{path.name}.data"), "wb") as out:
        out.write(b"\xff" * padding)
        for weight, shape in SIZES.items():
            out.write(b"\xff" * (-out.tell() % align))
            array = (rng.standard_normal(shape) / 6).astype(np.float32)
            if value is not None:
                array[:] = value
            tensor = TensorProto(name=weight, data_type=TensorProto.FLOAT, dims=shape, raw_data=b"")
            onnx.external_data_helper.set_external_data(
                tensor, f"{path.name}.data", out.tell(), array.nbytes
            )
            tensor.ClearField("raw_data")
            model.graph.initializer.append(tensor)
            out.write(array.tobytes())
    path.write_bytes(model.SerializeToString())
    return path


def weights(path: Path) -> dict[str, np.ndarray]:
    """What another program reads."""
    onnx.checker.check_model(str(path))
    return models.weights_of(onnx.load(path))


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in SIZES)


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done above 1 GB, done above 4 kB."""
    monkeypatch.setattr(model_file, "HUGE", 2**12)


# ---------------------------------------------------------------------- killed

WORKER = """
import os, shutil, sys
import numpy as np
from pathlib import Path
from ortflex_core.compiler.onnx_files import export as exporting
from ortflex_core.compiler.onnx_files import model_file as modelfile
from ortflex_core import OutputError
from ortflex_core import Model
from tests.core.test_files_of_weights import SIZES, weights

path, mode, huge = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "huge"
modelfile.HUGE = 2**12 if huge else 2**40
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock")

class Count:
    armed, left = False, 0
    def __call__(self, event, arguments=()):
        if self.armed and (event in EVENTS or event == "fsync"):
            self.left -= 1
            if self.left == 0 and mode == "kill":
                os._exit(9)
            if self.left <= 0 and mode == "full" and event not in ("os.remove", "os.rmdir", "os.scandir"):
                raise OSError(28, "No space left on device")

def export(path, values, k):
    count, real = Count(), os.fsync
    sys.addaudithook(count)
    def fsync(handle):
        count("fsync")
        real(handle)
    os.fsync = fsync
    model = Model(path)
    count.left, count.armed = k, True
    try:
        model.export(values, path)
    except OutputError as error:
        count.armed = False
        os._exit(28 if str(error).count("cannot write") == 1 else 1)
    os._exit(0 if count.left > 0 else 7)

rng = np.random.default_rng(0)
Model(path).export({}, path)  # so that the old data have a name of ours
before, codes = weights(path), []
while 0 not in codes:
    place = path.parent.with_name(f"{mode}{len(codes)}")
    shutil.copytree(path.parent, place)
    copy = place / path.name
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SIZES.items()}
    child = os.fork()
    if child == 0:
        export(copy, values, len(codes) + 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    found = weights(copy)
    old = all(np.array_equal(found[n], before[n]) for n in SIZES)
    new = all(np.array_equal(found[n], values[n]) for n in SIZES)
    assert new if codes[-1] in (0, 7) else (old or new), codes
    Model(copy).export(values, copy)  # removes what was left behind
    assert len(os.listdir(place)) == 2, (codes, os.listdir(place))
    shutil.rmtree(place)
expected = {0, 9} if mode == "kill" else {0, 7, 28}
assert set(codes) == expected, codes
print(len(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("where", ["huge", "read"])
@pytest.mark.parametrize("mode", ["kill", "full"])
def test_an_export_that_ends_anywhere_leaves_the_old_pair_or_the_new_one(
    mode: str, where: str, tmp_path: Path
) -> None:
    """Killed before the k-th call to the system, or the disk full from there on, for every k.

    What it left, the next export removes.
    """
    (tmp_path / "place").mkdir()
    path = pair(tmp_path / "place" / "m.onnx")
    call = [sys.executable, "-c", WORKER, str(path), mode, where]
    run = children.run(call, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 12


def test_what_a_living_process_is_writing_is_not_cleared(tmp_path: Path) -> None:
    """And what a killed one left is, by any write into the folder; what only looks like it stays."""
    dead, foreign = tmp_path / ".a.onnx.0123abcd.part", tmp_path / ".b.onnx.0123abcd.part"
    for folder in (dead, foreign):
        folder.mkdir()
        (folder / "data").write_text("half of it")
    (dead / ".lock").write_text("1\n")
    with staging(tmp_path / "a.onnx") as live:
        (live / "data").write_text("half of it")
        write_bytes(tmp_path / "b.txt", b"content")
        assert (live / "data").exists()
        assert not dead.exists()
        assert foreign.exists()
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "b.txt"]


def test_several_processes_that_export_to_one_path(tmp_path: Path) -> None:
    """Every pair that a reader sees is of one export: its tensors are all of one number."""
    path = pair(tmp_path / "m.onnx", value=0.0)
    code = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from ortflex_core import Model\n"
        "from tests.core.test_files_of_weights import SIZES\n"
        "path, number = Path(sys.argv[1]), float(sys.argv[2])\n"
        "for k in range(12):\n"
        "    Model(path).export({n: np.full(s, number + k, np.float32) for n, s in SIZES.items()}, path)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(1000 * k)], cwd=ROOT)
        for k in range(2)
    ]
    seen, last = set(), time.monotonic() + 120
    while any(writer.poll() is None for writer in writers):
        if time.monotonic() > last:
            for writer in writers:
                writer.kill()
        model = Model(path)
        values = {float(v) for n in SIZES for v in np.unique(model.initializer(n))}
        assert len(values) == 1
        seen |= values
        time.sleep(0.01)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(seen) > 2
    assert len(os.listdir(tmp_path)) == 2


# ---------------------------------------------------------------------- other people's files


def test_names_of_a_first_export_and_of_those_that_replace_it(tmp_path: Path) -> None:
    """People copy ``m.onnx`` and ``m.onnx.data``; a copy made in between must not fit by chance."""
    source = pair(tmp_path / "m.onnx")
    out = tmp_path / "out"
    out.mkdir()
    model = Model(source)
    model.export({}, out / "n.onnx")
    assert sorted(os.listdir(out)) == ["n.onnx", "n.onnx.data"]
    names = set()
    for k in range(3):
        model.export({"w0": np.full(SIZES["w0"], k, np.float32)}, out / "n.onnx")
        [name] = set(os.listdir(out)) - {"n.onnx"}
        names.add(name)
    assert len(names) == 3
    assert "n.onnx.data" not in names


def test_data_that_another_model_refers_to_stay(tmp_path: Path) -> None:
    """In the same folder, in the one above it, and by a hard link."""
    place = tmp_path / "place"
    place.mkdir()
    path = pair(place / "m.onnx")
    before = weights(path)
    shutil.copy(path, place / "twin.onnx")
    above = onnx.load(path, load_external_data=False)
    for tensor in above.graph.initializer:
        tensor.external_data[0].value = f"place/{tensor.external_data[0].value}"
    (tmp_path / "above.onnx").write_bytes(above.SerializeToString())
    (tmp_path / "linked").mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        os.link(place / name, tmp_path / "linked" / name)
    changed = {n: np.zeros(s, np.float32) for n, s in SIZES.items()}
    others = [place / "twin.onnx", tmp_path / "above.onnx", tmp_path / "linked" / "m.onnx"]
    for gone in range(2):
        Model(path).export(changed, path)
        assert equal(weights(path), changed)
        for other in others[gone:]:  # onnx itself reads no hard links
            model = Model(other)
            assert equal({n: model.initializer(n) for n in SIZES}, before)
        others[0].unlink(missing_ok=True)
    assert (place / "m.onnx.data").exists()


def test_foreign_files_of_such_names_stay(tmp_path: Path) -> None:
    path = pair(tmp_path / "m.onnx")
    theirs = {
        "m.onnx.0123456789ab.data": "not what its name says",
        "m.onnx.notes.data": "notes",
        "n.onnx.data": "of another model",
    }
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    Model(path).export({}, tmp_path / "n.onnx")
    Model(path).export({}, path)
    assert {name: (tmp_path / name).read_text() for name in theirs} == theirs
    assert equal(weights(path), weights(tmp_path / "n.onnx"))


def test_a_large_model_whose_values_are_lists_of_numbers(tmp_path: Path, low_limit: None) -> None:
    """Not raw bytes, as old converters write them: they go to the data file as well."""
    proto = onnx.load(pair(tmp_path / "m.onnx"))
    for tensor in proto.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values.ravel().tolist())
    Model(proto).export({}, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size == 4 * 3 * 40 * 40  # w3 is small
    assert equal(weights(tmp_path / "out.onnx"), models.weights_of(proto))


def test_a_read_only_folder(tmp_path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    path = pair(tmp_path / "m.onnx")
    model, before = Model(path), weights(path)
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        model.export({}, path)
    tmp_path.chmod(0o755)
    assert equal(weights(path), before)


# ---------------------------------------------------------------------- live Trainers


X = np.random.default_rng(5).standard_normal((16, 40)).astype(np.float32)
Y = np.arange(16) % 3


def trainer(path: Path, params: Any, **options: Any) -> Trainer:
    settings = {"loss": "softmax_cross_entropy", "backend": "fused", "epochs": 1, "batch_size": 8}
    return make(path, params=params, **settings | options)


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("params", [["w1"], ["w0", "w3"], ["w*"]])
@pytest.mark.parametrize("layout", [{}, {"align": 4096}, {"padding": 3}])
@pytest.mark.parametrize("by", ["itself", "another", "another before any fit"])
def test_an_export_over_the_source_file_leaves_live_trainers_unchanged(
    layout: dict[str, int], params: list[str], by: str, tmp_path: Path
) -> None:
    """Whichever Trainer of the file exports: offsets move, and frozen tensors stay what they are."""
    path = pair(tmp_path / "m.onnx", **layout)
    shutil.copytree(tmp_path, tmp_path / "twin")
    twin, live = trainer(tmp_path / "twin" / "m.onnx", params), trainer(path, params)
    exporter = live if by == "itself" else trainer(path, ["w2"], learning_rate=0.3)
    if by != "another before any fit":
        twin.fit(X, Y)
        live.fit(X, Y)
    if exporter is not live:
        exporter.fit(X, Y)
    exporter.export(path)
    # A file of the old name, too, with other bytes.
    (tmp_path / "m.onnx.data").write_bytes(b"\xee" * 40_000)
    for both in (twin, live):
        both.fit(X, Y)
    assert live.evaluate(X, Y) == twin.evaluate(X, Y)
    for name, one in (("second", live), ("wanted", twin)):
        one.export(tmp_path / f"{name}.onnx")
        one.save(tmp_path / name)
    assert equal(weights(tmp_path / "second.onnx"), weights(tmp_path / "wanted.onnx"))
    again = Trainer.resume(tmp_path / "second", plugins=plugins())
    again.fit(X, Y)
    twin.fit(X, Y)
    assert equal(models.weights_of(again.export()), models.weights_of(twin.export()))


@pytest.mark.usefixtures("low_limit")
def test_a_checkpoint_removed_under_a_trainer_and_one_that_links_to_it(tmp_path: Path) -> None:
    one = trainer(pair(tmp_path / "m.onnx"), ["w1"])
    one.fit(X, Y)
    one.save(tmp_path / "a")
    one.save(tmp_path / "b")  # its model is linked to that of the first
    again = Trainer.resume(tmp_path / "a", plugins=plugins())
    shutil.rmtree(tmp_path / "a")
    again.fit(X, Y)
    again.save(tmp_path / "c")
    shutil.rmtree(tmp_path / "b")
    last = Trainer.resume(tmp_path / "c", plugins=plugins())
    assert equal(models.weights_of(last.export()), models.weights_of(again.export()))
    table = models.weights_of(last.export())["w0"]
    assert np.array_equal(table, weights(tmp_path / "m.onnx")["w0"])


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("how", ["bytes", "shorter", "longer"])
def test_a_file_that_others_change_in_place_is_refused(how: str, tmp_path: Path) -> None:
    """By every way to read it; the trained tensors are still there."""
    one = trainer(pair(tmp_path / "m.onnx"), ["w1"])
    one.fit(X, Y)
    trained = one.get_state()["w1"]
    file = tmp_path / "m.onnx.data"
    size, stamp = file.stat().st_size, file.stat().st_mtime_ns
    with open(file, "r+b") as out:
        if how == "bytes":
            out.write(b"\0" * 100)
        else:
            out.truncate(size // 2 if how == "shorter" else size + 1)
    os.utime(file, ns=(stamp + 10**9, stamp + 10**9))
    for read in (
        lambda: one.fit(X, Y),
        lambda: one.evaluate(X, Y),
        lambda: one.predict(X),
        lambda: one.export(),
        lambda: one.export(tmp_path / "out.onnx"),
        lambda: one.model.initializer("w0"),
    ):
        with pytest.raises(ModelError, match=r"m\.onnx\.data', .* was changed since the model was"):
            read()
    assert np.array_equal(one.get_state()["w1"], trained)
    assert not (tmp_path / "out.onnx").exists()

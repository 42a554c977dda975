"""What is wrong with an installation is found, and said, before onnxruntime is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from ortflex_core import (
    OrtflexError,
    Runtime,
    RuntimeUnavailable,
    diagnose,
    find_distributions,
    require_runtime,
)
from ortflex_core.compiler.runtime import installation as runtime_module
from ortflex_core.compiler.runtime.installation import Distribution, version_tuple
from ortflex_plugins.cli.doctor import examine
from tests import children

STOCK = Distribution("onnxruntime", "1.31.1")
SESSION = Distribution("onnxruntime-training", "1.16.3")


def somewhere() -> str:
    return "/site-packages/onnxruntime/__init__.py"


def nowhere() -> None:
    return None


def add_distribution(folder: Path, name: str, version: str) -> None:
    """Write the metadata of a distribution, as an installer would, and nothing else of it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run_python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return children.run([sys.executable, "-c", code], env=environment)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.16.3", (1, 16, 3)), ("1.20.0.dev20241101+cu118", (1, 20, 0)), ("2", (2,)), ("?", ())],
)
def test_version_tuple(version: str, expected: tuple[int, ...]) -> None:
    assert version_tuple(version) == expected


def test_installed_reads_metadata_only_and_takes_the_first_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    add_distribution(tmp_path / "later", "onnxruntime", "1.30.0")
    add_distribution(tmp_path, "onnxruntime", "1.31.1")
    add_distribution(tmp_path, "onnxruntime-training", "1.16.3")
    add_distribution(tmp_path, "onnxruntime-extensions", "0.14.0")  # another import name
    assert find_distributions([str(tmp_path), str(tmp_path / "later")]) == [SESSION, STOCK]


def test_a_sound_installation_has_no_faults() -> None:
    assert diagnose([STOCK], numpy_version="2.4.6", location=somewhere) == []
    assert diagnose([SESSION], numpy_version="1.26.4", location=somewhere) == []


@pytest.mark.parametrize("driver", [None, "/usr/bin/nvidia-smi"])
@pytest.mark.parametrize(("system", "machine"), [("linux", "x86_64"), ("darwin", "arm64")])
def test_none_installed(monkeypatch: Any, driver: str | None, system: str, machine: str) -> None:
    """The newest one that fits: a GPU's where there is one and a build for this machine."""
    monkeypatch.setattr("shutil.which", lambda name: driver)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    [fault] = diagnose([], location=nowhere)

    assert fault.message.startswith("No onnxruntime is installed in this environment.")
    fits = driver is not None and system == "linux"
    assert fault.command == "python -m pip install onnxruntime" + "-gpu" * fits
    assert ("NVIDIA" in fault.message) == fits


OLD = Distribution("onnxruntime", "1.18.1")
NUMPY_2 = "was built for numpy 1, and numpy 2.4.6 is installed"
UNINSTALL = "uninstall -y onnxruntime-training onnxruntime && python -m pip "


@pytest.mark.parametrize(
    ("installed", "location", "message", "command"),
    [
        (
            [],
            somewhere,
            f"would be imported from {somewhere()}, but no installed distribution",
            "install onnxruntime",
        ),
        (
            [STOCK],
            nowhere,
            "onnxruntime 1.31.1 is listed as installed, but there is no package",
            "install --force-reinstall --no-deps onnxruntime==1.31.1",
        ),
        (
            [SESSION, STOCK],
            somewhere,
            "onnxruntime-training 1.16.3, onnxruntime 1.31.1",
            f"{UNINSTALL}install onnxruntime-training==1.16.3",
        ),
        ([SESSION], somewhere, f"{SESSION} {NUMPY_2}", 'install "numpy<2"'),
        ([OLD], somewhere, f"{OLD} {NUMPY_2}", 'install "numpy<2"'),
    ],
    ids=["no metadata", "no package", "two at once", "old with numpy 2", "also old"],
)
def test_a_fault_is_said_with_the_command_that_repairs_it(
    installed: list[Distribution], location: Any, message: str, command: str
) -> None:
    [fault] = diagnose(installed, numpy_version="2.4.6", location=location)
    assert message in fault.message
    assert fault.command.removesuffix("-gpu") == f"python -m pip {command}"


def test_require_runtime_refuses_with_the_message_and_the_command(monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime_module, "find_distributions", lambda: [SESSION, STOCK])

    with pytest.raises(RuntimeUnavailable, match=r"2 distributions provide") as caught:
        require_runtime()

    assert isinstance(caught.value, OrtflexError)
    assert "To repair it: python -m pip uninstall -y" in str(caught.value)


def test_this_environment() -> None:
    runtime = require_runtime()

    assert isinstance(runtime, Runtime)
    assert [Distribution(runtime.distribution, runtime.version)] == find_distributions()
    assert "CPUExecutionProvider" in runtime.providers
    assert runtime.max_opset >= 19
    assert runtime.max_ir >= 9
    assert require_runtime() is runtime


# runtime: newest opset, newest IR, TrainingSession, TrainingAgent
ABLE = {
    "onnxruntime-training 1.16.3": (19, 9, True, True),
    "onnxruntime-training-cpu 1.19.2": (21, 10, False, True),
    "onnxruntime 1.19.2": (21, 10, False, False),
    "onnxruntime 1.23.2": (22, 11, False, False),  # no kernels of QuantizeLinear 23
    "onnxruntime 1.31.1": (26, 13, False, False),
}


def test_what_each_runtime_can_do() -> None:
    runtime = require_runtime()
    if str(runtime) not in ABLE:
        pytest.skip(f"what {runtime} can do was not measured")
    reads = (runtime.max_opset, runtime.max_ir)
    assert (*reads, runtime.has_training_session, runtime.has_training_agent) == ABLE[str(runtime)]


def test_torch_is_not_imported_and_nothing_is_printed() -> None:
    code = """
import sys
from ortflex_core import require_runtime
require_runtime()
assert "torch" not in sys.modules, "torch"
assert "onnxruntime.training" not in sys.modules, "left hidden"
"""
    done = run_python(code)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


DOCTOR = """
import sys
from ortflex_plugins.cli.doctor import doctor
try:
    doctor(standalone_mode=False)
finally:
    print("imported" if "onnxruntime" in sys.modules else "not imported", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("version", "variable", "on"),
    [("1.32.0", "", True), ("1.32.0", "1", False), ("1.19.2", "", False)],
)
@pytest.mark.skipif(sys.platform == "win32", reason="all versions for Windows have it")
def test_doctor_says_whether_the_runtime_may_report_its_use(
    version: str, variable: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = attrs.evolve(require_runtime(), version=version)
    monkeypatch.setattr("ortflex_plugins.cli.doctor.require_runtime", lambda: found)
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", variable)
    assert examine()["telemetry"] is on


def test_doctor_says_that_there_are_two_before_importing_either(tmp_path: Path) -> None:
    other = "onnxruntime-openvino"
    add_distribution(tmp_path, other, "1.24.1")

    done = run_python(DOCTOR, tmp_path)

    assert done.returncode == 1
    assert "Broken: 2 distributions provide the package 'onnxruntime'" in done.stdout
    assert f"{other} 1.24.1" in done.stdout
    assert "To repair it: python -m pip uninstall -y" in done.stdout
    assert done.stderr == "not imported\n"


def test_doctor_says_that_an_import_fails(tmp_path: Path) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libonnxruntime.so: cannot open')")

    done = run_python(DOCTOR, tmp_path)

    assert done.returncode == 1
    assert "importing it fails: ImportError: libonnxruntime.so: cannot open" in done.stdout
    assert "To repair it: python -m pip install --force-reinstall --no-deps" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_says_that_none_is_installed() -> None:
    hide = """
import importlib.metadata, importlib.util
import ortflex_plugins.cli.doctor

importlib.metadata.distributions = lambda **_: []
importlib.util.find_spec = lambda _: None
"""

    done = run_python(hide + DOCTOR)

    assert done.returncode == 1
    assert "Broken: No onnxruntime is installed in this environment." in done.stdout
    assert done.stderr == "not imported\n"

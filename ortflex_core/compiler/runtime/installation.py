"""The installed onnxruntime: its capabilities, and faults of the installation.

About twenty distributions install the same import name ``onnxruntime``. Two of them overwrite each
other's files, and an old one can be imported with numpy 2, but then crashes the process. So this
module reads the metadata *before* anything imports onnxruntime, and the rest of the project calls
:func:`require_runtime` first.

    >>> from ortflex_core.compiler.runtime.installation import Distribution
    >>> from ortflex_core import diagnose
    >>> old = Distribution("onnxruntime-training", "1.16.3")
    >>> [fault] = diagnose([old], numpy_version="2.4.6", location=lambda: "__init__.py")
    >>> fault.command
    'python -m pip install "numpy<2"'
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from ortflex_core.kernel.errors import RuntimeUnavailable

# Distributions with the import name `onnxruntime`, the most capable first; if two are installed,
# keep the first. Not in the list: onnxruntime-extensions, -genai and others, which have other
# import names.
KNOWN_DISTRIBUTIONS = (
    *("onnxruntime-training", "onnxruntime-training-cpu"),
    *("ort-nightly-training", "ort-training-nightly", "onnxruntime-gpu", "ort-nightly-gpu"),
    *("onnxruntime-azure", "onnxruntime-cann", "onnxruntime-coreml", "onnxruntime-directml"),
    *("onnxruntime-migraphx", "onnxruntime-noopenmp", "onnxruntime-openvino", "onnxruntime-qnn"),
    *("onnxruntime-rocm", "onnxruntime-silicon", "onnxruntime-tensorrt", "onnxruntime-vitisai"),
    *("onnxruntime-webgpu", "ort-nightly-directml", "ort-nightly-qnn", "ort-nightly"),
    "onnxruntime",
)

_PIP = "python -m pip"
_FIRST_WITH_NUMPY_2 = (1, 19)


@attrs.frozen
class Distribution:
    """One installed distribution that provides ``import onnxruntime``."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@attrs.frozen
class Fault:
    """A problem of the installation, and the command that repairs it."""

    message: str
    command: str

    def __str__(self) -> str:
        return f"{self.message}\nTo repair it: {self.command}"


@attrs.frozen(kw_only=True)
class Runtime:
    """The onnxruntime of this environment and what it can do.

    ``max_opset`` and ``max_ir`` are the newest that it loads, determined by a trial; graphs of
    ortflex do not declare newer ones.

    Example:
        >>> runtime = Runtime(distribution="onnxruntime", version="1.31.1", max_opset=26, max_ir=13)
        >>> runtime.version_info, runtime.has_training_agent
        ((1, 31, 1), False)
    """

    distribution: str
    version: str
    max_opset: int
    max_ir: int
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    has_training_session: bool = False
    has_training_agent: bool = False

    @property
    def version_info(self) -> tuple[int, ...]:
        """The version as integers, so that 1.9 sorts before 1.16."""
        return version_tuple(self.version)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version.

    >>> version_tuple("1.20.0.dev20241101+cu118")
    (1, 20, 0)
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release.group().split(".")) if release else ()


def find_distributions(path: Sequence[str] | None = None) -> list[Distribution]:
    """List the distributions that provide ``import onnxruntime``, the most capable first.

    Args:
        path: folders to look in, ``sys.path`` if None.
    """
    where = sys.path if path is None else list(path)
    return [
        Distribution(name, distribution.version)
        for name in KNOWN_DISTRIBUTIONS
        # The first distribution hides others of the same name, as in an import.
        for distribution in list(importlib.metadata.distributions(name=name, path=where))[:1]
    ]


def import_location() -> str | None:
    """Return the folder that ``import onnxruntime`` would load, without importing it.

    An empty folder, which an uninstallation can leave, does not count: Python would import it as an
    empty namespace package.
    """
    try:
        spec = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):  # ValueError: an imported module without a spec
        return None
    return None if spec is None else spec.origin


def diagnose(
    found: Sequence[Distribution] | None = None,
    *,
    numpy_version: str | None = None,
    location: Callable[[], str | None] = import_location,
) -> list[Fault]:
    """Return the faults of the installation, without importing onnxruntime.

    Args:
        found: the distributions, :func:`find_distributions` if None.
        numpy_version: the version of numpy, that of this environment if None.
        location: the folder that would be imported; called only if the metadata show no fault.

    Example:
        >>> names = "onnxruntime-gpu", "onnxruntime"
        >>> [fault] = diagnose([Distribution(name, "1.31.1") for name in names])
        >>> fault.message.startswith("2 distributions provide the package 'onnxruntime'")
        True
    """
    found = find_distributions() if found is None else found
    if not found:
        stray = location()
        return [_nothing_installed() if stray is None else _no_metadata(stray)]
    if len(found) > 1:
        return [_several(found)]
    runtime = found[0]
    if location() is None:
        return [
            Fault(
                f"{runtime} is listed as installed, but there is no package 'onnxruntime' to "
                "import: its files were removed, perhaps by uninstalling another runtime.",
                _reinstall(runtime),
            )
        ]
    numpy = numpy_version or importlib.metadata.version("numpy")
    if version_tuple(runtime.version) < _FIRST_WITH_NUMPY_2 and version_tuple(numpy) >= (2,):
        return [
            Fault(
                f"{runtime} was built for numpy 1, and numpy {numpy} is installed: it would "
                "import and then crash the process at the first run.",
                f'{_PIP} install "numpy<2"',
            )
        ]
    return []


def require_runtime() -> Runtime:
    """Return the runtime of this environment, checked before onnxruntime is imported.

    The result is kept until the process ends; a failure is not, so that a notebook can be repaired
    without a restart.

    Raises:
        RuntimeUnavailable: no runtime is installed, two are, or the installed one cannot work;
            the message has the command that repairs it.
    """
    distributions = find_distributions()
    if faults := diagnose(distributions):
        raise RuntimeUnavailable("\n".join(map(str, faults)))
    return _probe(distributions[0])


@functools.lru_cache(maxsize=1)
def _probe(distribution: Distribution) -> Runtime:
    try:
        with _hidden("onnxruntime.training"):
            ort = importlib.import_module("onnxruntime")
        # A broken package may still be imported without an error.
        sessions, providers = ort.InferenceSession, ort.get_available_providers()
        options = ort.SessionOptions()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"{distribution} is installed, but importing it fails: {reason}"
        raise RuntimeUnavailable(str(Fault(message, _reinstall(distribution)))) from error
    options.log_severity_level = 4  # here a refusal is a result, not an error to print
    max_opset, max_ir = _newest_accepted(
        lambda model: sessions(model, options, providers=["CPUExecutionProvider"])
    )
    pybind = importlib.import_module("onnxruntime.capi._pybind_state")
    return Runtime(
        distribution=distribution.name,
        version=distribution.version,
        max_opset=max_opset,
        max_ir=max_ir,
        providers=tuple(providers),
        has_training_session=_has_training_session(),
        has_training_agent=all(
            hasattr(pybind, name) for name in ("TrainingAgent", "OrtModuleGraphBuilder")
        ),
    )


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make ``module`` impossible to import within the context.

    A training build imports ``onnxruntime.training``, which imports torch if it is installed: this
    takes two seconds and is not needed here.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's mark of a module that does not exist
    try:
        yield
    finally:
        del sys.modules[module]


def _has_training_session() -> bool:
    # Not `onnxruntime.training`, which needs torch.
    try:
        module = importlib.import_module("onnxruntime.capi.training.training_session")
    except ImportError:
        return False
    return hasattr(module, "TrainingSession")


def _newest_accepted(load: Callable[[bytes], Any]) -> tuple[int, int]:
    """Return the newest opset and IR version that ``load`` accepts.

    A release may declare an opset whose new versions of operators have no kernels yet (onnxruntime 1.32
    and QuantizeLinear of opset 28), so the trial has operators that most opsets change.
    """
    # Importing onnx takes 60 ms, which the checks above do not need.
    import onnx
    from onnx import TensorProto, helper

    value = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1])
    nodes = [
        helper.make_node("Identity", ["x"], ["i"]),
        helper.make_node("QuantizeLinear", ["i", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(nodes, "probe", [value("x")], [value("y")], [scale])

    def accepts(opset: int, ir: int) -> bool:
        model = helper.make_model(
            graph, ir_version=ir, opset_imports=[helper.make_opsetid("", opset)]
        )
        try:
            load(model.SerializeToString())
        except Exception:  # each release of onnxruntime has its own exceptions for this
            return False
        return True

    # Every runtime that ortflex supports loads this pair.
    opset, ir = 17, 8
    ir = next((new for new in range(onnx.IR_VERSION, ir, -1) if accepts(opset, new)), ir)
    newest = onnx.defs.onnx_opset_version()
    return next((new for new in range(newest, opset, -1) if accepts(new, ir)), opset), ir


def _nothing_installed() -> Fault:
    text = "No onnxruntime is installed in this environment."
    if _has_nvidia() and sys.platform in ("linux", "win32") and platform.machine() in _X86:
        text += " This machine has an NVIDIA GPU; to train without it, install onnxruntime."
        return Fault(text, f"{_PIP} install onnxruntime-gpu")
    return Fault(text, f"{_PIP} install onnxruntime")


_X86 = ("x86_64", "AMD64")


def _has_nvidia() -> bool:
    """Whether the driver of an NVIDIA GPU is installed."""
    return shutil.which("nvidia-smi") is not None


def _no_metadata(location: str) -> Fault:
    return Fault(
        f"'onnxruntime' would be imported from {location}, but no installed distribution provides "
        "it: its version is unknown. Remove or rename that folder, then install a runtime.",
        _nothing_installed().command,
    )


def _several(found: Sequence[Distribution]) -> Fault:
    names = " ".join(one.name for one in found)
    return Fault(
        f"{len(found)} distributions provide the package 'onnxruntime': "
        f"{', '.join(map(str, found))}. They overwrite each other's files, so keep one only.",
        f"{_PIP} uninstall -y {names} && {_PIP} install {found[0].name}=={found[0].version}",
    )


def _reinstall(runtime: Distribution) -> str:
    return f"{_PIP} install --force-reinstall --no-deps {runtime.name}=={runtime.version}"

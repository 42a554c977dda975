"""One environment per runtime, since all of them install the import name `onnxruntime`.

`make test` calls this; by hand, `nox --list`, and for instance
`nox --session "tests(agent)" -- tests/core -k runtime`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nox

ROOT = Path(__file__).parent
REPORTS = ROOT / ".nox" / "reports"
DIST = ROOT / "dist"
EXAMPLE_PLUGIN = ROOT / "tests" / "fixtures" / "ortflex_example"
TESTS = ("python", "-m", "pytest", "--numprocesses", "auto", "--dist", "worksteal")
JAVASCRIPT = "tests/end_to_end/test_portable_javascript.py"
"""The session `node` runs these tests."""
VARIABLES = {
    # onnxruntime's thread for telemetry, and its file in the home folder.
    "ORT_DISABLE_TELEMETRY": "1",
    # One thread a worker: two would compete for the same cores.
    "OMP_NUM_THREADS": "1",
    # Without bytecode, each worker and each process of a test compiles everything again.
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / ".nox" / "bytecode"),
}

# An oracle of the tests and a peer of the benchmarks. Always installed by pip: uv resolves torch
# together with its CUDA packages, several gigabytes, where pip takes a local wheel.
TORCH = "torch==2.13.0"

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False


def lower_bounds() -> tuple[str, ...]:
    """The oldest versions that pyproject.toml claims for our dependencies: ``onnx==1.21.*``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claims = [*project["dependencies"], *project["optional-dependencies"]["stock"]]
    return tuple(re.sub(">=([0-9.]+).*", r"==\1.*", claim) for claim in claims)


class Environment(NamedTuple):
    """Where the tests run: an extra of pyproject.toml and a Python."""

    extra: str
    python: str
    with_torch: bool
    scope: str
    """Which tests run here: a name in SCOPES of tests/conftest.py."""
    sample: str = "8"
    """The fraction 1/n of cases that tests which draw their own take here."""
    pins: tuple[str, ...] = ()
    """Requirements on top of the extra: the version of the runtime, where it is not the newest."""
    more: tuple[str, ...] = ()
    """Further extras."""
    backend: str = "fused"
    """The backend that this environment is for: tests that ask it are left out last."""


ENVIRONMENTS = {
    # Later versions of pyarrow want numpy 2.
    "session": Environment(
        *("session", "3.11", True, "session"), pins=("pyarrow<23",), backend="training_session"
    ),
    "agent": Environment("agent", "3.11", True, "agent", backend="training_agent"),
    # With the packages that read the files of callbacks, a kernel that runs cells of notebooks, and the
    # tables that users have.
    "stock": Environment(
        "stock",
        "3.11",
        with_torch=True,
        scope="most",
        sample="1",
        pins=("tensorboard", "ipykernel", "nbclient", "pandas", "polars"),
        more=("mlflow", "hub"),
    ),
    "stock-3.13": Environment("stock", "3.13", False, scope="python", sample="16"),
    # Comparisons with torch run above; these test whether older runtimes compute the same.
    "stock-3.12": Environment(
        "stock", "3.12", False, scope="runtime", sample="16", pins=("onnxruntime==1.23.*",)
    ),
    "lowest": Environment(
        "stock",
        "3.11",
        with_torch=False,
        scope="version",
        sample="16",
        # Later versions of pyarrow want numpy 2.
        pins=(*lower_bounds(), "pyarrow<23"),
    ),
}


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that starts; shims of pyenv may not."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"versions/{version}*/bin/python{version}"))),
        # Windows has no python3.11, only the interpreter that runs this.
        sys.executable,
    ]
    ask = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for candidate in filter(None, candidates):
        answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.startswith(f"{version} "):
            # The interpreter that a shim starts, not the shim.
            return answer.stdout.split(maxsplit=1)[1].strip()
    return None


PYTHONS = {
    version: find_python(version)
    for version in sorted({environment.python for environment in ENVIRONMENTS.values()})
}
MUTATION_PYTHON = "3.12"  # the first with sys.monitoring


def session_for(kind: str, name: str, python: str) -> Any:
    """Return the decorator of a session; if its Python is missing, it needs no environment."""
    path = PYTHONS[python]
    backend = None if path else "none"
    return nox.session(name=f"{kind}({name})", python=path, venv_backend=backend, tags=[kind])


def prepare(
    session: nox.Session, *extras: str, with_torch: bool = False, pins: tuple[str, ...] = ()
) -> None:
    """Install the project with these extras if needed; make a new environment if dependencies changed."""
    wanted = _digest(*extras, *pins, TORCH if with_torch else "")
    stamp = Path(session.virtualenv.location) / "ortflex.stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        if stamp.exists():
            session.log("the dependencies in pyproject.toml changed: a new environment")
            session.virtualenv.reuse_existing = False
            session.virtualenv.create()
        if with_torch:
            session.install("pip")  # uv makes environments without it
            session.run_install("python", "-m", "pip", "install", "--quiet", TORCH)
            session.install("onnxscript")  # torch's exporter needs it
        session.install("--editable", f".[{','.join(extras)}]", *pins)
        stamp.write_text(wanted)
    else:
        # Entry points may have changed.
        session.install("--no-deps", "--editable", ".")


def _digest(*parts: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tables = [project["dependencies"], project["optional-dependencies"], project["scripts"], parts]
    return hashlib.sha256(json.dumps(tables).encode()).hexdigest()


@contextmanager
def reported(name: str) -> Iterator[Path]:
    """Write a line of the table for this session, even if it fails.

    Until the block succeeds, or the tests write their own report, the line says that it failed. It
    also has the duration, including that of making the environment.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    path = REPORTS / f"{name}.json"
    failed, began = json.dumps(one_line(name, "failed")), time.monotonic()
    path.write_text(failed)
    try:
        yield path
        if path.read_text() == failed:
            path.write_text(json.dumps(one_line(name, "passed")))
    finally:
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"seconds": round(time.monotonic() - began)}, indent=2))


def one_line(name: str, outcome: str, reason: str = "") -> dict[str, Any]:
    """Return the report of a session that counts as one test."""
    return {
        "runtime": name,
        "python": "",
        "backends": {"": {outcome: 1}},
        "skips": {reason: 1} if outcome == "skipped" else {},
    }


@nox.session(tags=["tests"])
def lint(session: nox.Session) -> None:
    """The rules and the format of ruff, and spelling; ``-- --fix`` repairs and formats."""
    with reported("lint"):
        session.install("ruff", "codespell")
        fix = "--fix" in session.posargs
        session.run("ruff", "check", *(["--fix"] if fix else []), ".")
        session.run("ruff", "format", *([] if fix else ["--check"]), ".")
        # Tests misspell words on purpose, to see what an error suggests.
        pages = sorted(p.name for p in ROOT.glob("*.md"))
        session.run("codespell", *pages, "docs", "ortflex.py", "ortflex_core", "ortflex_plugins")
        session.run("codespell", "--ignore-words", "tests/misspelt.txt", "tests", "noxfile.py")


@nox.session(tags=["tests"])
def types(session: nox.Session) -> None:
    """Strict mypy on both packages."""
    with reported("types"):
        prepare(session, "dev")
        session.run("mypy")


@nox.session(python=PYTHONS["3.11"])
def wheel(session: nox.Session) -> None:
    """The wheel and the source distribution in dist/, as an index takes them."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install("build", "hatchling", "twine")
    # The wheel is built from the source distribution, which therefore has all that it needs.
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST))


@nox.session(python=PYTHONS["3.11"], tags=["tests"], reuse_venv=False)
def package(session: nox.Session) -> None:
    """The wheel and the source distribution: built, checked, and used from a fresh environment."""
    with reported("package"):
        wheel.func(session)
        files = sorted(map(str, DIST.iterdir()))
        session.run("python", "-m", "twine", "check", "--strict", *files)
        session.run("python", "tests/distributions.py", *files)
        # No package of the tools may replace a missing dependency.
        session.virtualenv.reuse_existing = False
        session.virtualenv.create()
        session.install(f"{next(DIST.glob('*.whl'))}[stock]")
        # In a folder from which the checkout cannot be imported.
        place = session.create_tmp()
        session.chdir(place)
        session.run("python", str(ROOT / "tests" / "first_run.py"))
        session.run("python", "-m", "ortflex", "--help", silent=True)
        session.run("ortflex", "plugins", silent=True)
        # Messages name the wheel, not an index.
        code = "from ortflex_core import install_command as c; print(c('xla'))"
        assert ".whl[xla]" in session.run("python", "-c", code, silent=True)
        session.run("ortflex", "train", "train.toml", 'output="run"')


for name, environment in ENVIRONMENTS.items():

    @session_for("tests", name, environment.python)
    def run_tests(
        session: nox.Session, name: str = name, environment: Environment = environment
    ) -> None:
        """The test suite with one runtime."""
        with reported(f"tests({name})") as report:
            if PYTHONS[environment.python] is None:
                reason = f"no Python {environment.python} was found"
                report.write_text(json.dumps(one_line(f"tests({name})", "skipped", reason)))
                session.skip(reason)
            extras = (environment.extra, "sklearn", "plot", "tensorboard", "parquet", "dev")
            extras += environment.more
            prepare(session, *extras, with_torch=environment.with_torch, pins=environment.pins)
            session.install("--no-deps", "--editable", str(EXAMPLE_PLUGIN))
            everything = any("slow or" in each for each in session.posargs)
            scope = environment.scope
            if everything and scope != "most":
                scope = "every case"
            elif everything:
                scope = "all"
                # It guides mutants; without a wheel of it, its test is skipped.
                session.install("--only-binary", "atheris", "atheris", success_codes=[0, 1, 2])
            # Python's own limit (pyproject.toml) may wait for a lock that native code holds.
            limit = 7300 if everything else 330
            session.run(
                *(*TESTS, "--continue-on-collection-errors", f"--ignore={JAVASCRIPT}"),
                *("-o", f"faulthandler_timeout={limit}", "-o", "faulthandler_exit_on_timeout=true"),
                *("-m", "not slow", *session.posargs),
                env={
                    **VARIABLES,
                    "ORTFLEX_TEST_REPORT": str(report),
                    **sampled(scope, environment.sample, environment.backend),
                    "ORTFLEX_TEST_SILENCE": str(limit + 300),
                },
            )


@session_for("tests", "mpi", "3.11")
def run_mpi(session: nox.Session) -> None:
    """The process group of MPI, whose library comes as a wheel."""
    with reported("tests(mpi)"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        prepare(session, "stock", "mpi", "dev", with_torch=True)
        tests = "tests/plugins/test_process_group_mpi.py"
        # One launch at a time: a rank that waits keeps its core busy.
        session.run(*TESTS, "--numprocesses", "0", tests, *session.posargs, env=VARIABLES)


@session_for("tests", "node", "3.11")
def run_node(session: nox.Session) -> None:
    """The portable step in JavaScript; the packages of npm are installed where the tests look for them."""
    with reported("tests(node)"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        if shutil.which("npm") is None:
            session.skip("npm is not installed")
        prepare(session, "stock", "dev", with_torch=True)
        folder = ROOT / ".nox" / "node"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "node_modules" / "onnxruntime-web").is_dir():
            # Without scripts: the one of onnxruntime-node downloads libraries for CUDA.
            packages = ("onnxruntime-node", "onnxruntime-web")
            command = ("npm", "install", "--ignore-scripts", "--prefix", str(folder), *packages)
            session.run(*command, external=True)
        session.run(*TESTS, JAVASCRIPT, "-m", "not slow", *session.posargs, env=VARIABLES)


@session_for("tests", "flower", "3.11")
def run_flower(session: nox.Session) -> None:
    """Federated training; Flower pins protobuf and other packages below the newest versions."""
    with reported("tests(flower)"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        prepare(session, "stock", "flower", "dev")
        tests = sorted(
            str(path.relative_to(ROOT)) for path in ROOT.glob("tests/plugins/test_flower*")
        )
        session.run(*TESTS, *tests, "-m", "not slow", *session.posargs, env=VARIABLES)


@session_for("tests", "peft", "3.11")
def run_peft(session: nox.Session) -> None:
    """Adapters next to PEFT, and files of the networks of transformers in several forms."""
    with reported("tests(peft)"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        # torch's older exporter cannot trace the masks that later versions of transformers make.
        packages = ("peft==0.21.2", "transformers<5")
        prepare(session, "stock", "dev", with_torch=True, pins=packages)
        tests = ("tests/plugins/test_adapters_peft.py", "tests/end_to_end/test_file_forms.py")
        session.run(*TESTS, *tests, "-m", "not slow", *session.posargs, env=VARIABLES)


def sampled(scope: str, sample: str, backend: str) -> dict[str, str]:
    """The variables that choose which tests run, unless the caller has set them."""
    chosen = {"ORTFLEX_TEST_SCOPE": scope, "ORTFLEX_TEST_SAMPLE": sample}
    chosen["ORTFLEX_TEST_BACKEND"] = backend
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def run_backend(session: nox.Session, name: str) -> None:
    """The tests of a backend that is an extra of its name, its kit, and the core with it."""
    with reported(f"tests({name})"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        prepare(session, "stock", name, "sklearn", "plot", "dev")
        session.install("--no-deps", "--editable", str(EXAMPLE_PLUGIN))
        own = sorted(map(str, ROOT.glob(f"tests/plugins/test_{name}*.py")))
        tests = (*own, "tests/plugins/test_conformance.py", "tests/core")
        session.run(
            *(*TESTS, *tests, "-m", "not slow", *session.posargs),
            env={**VARIABLES, **sampled("backend", "16", name)},
        )


@session_for("tests", "xla", "3.11")
def run_xla(session: nox.Session) -> None:
    """The backend of JAX: its kit, the table of its operators, and runs compared with fused."""
    run_backend(session, "xla")


@session_for("tests", "openvino", "3.11")
def run_openvino(session: nox.Session) -> None:
    """The backend of OpenVINO: its kit, and runs compared with fused."""
    run_backend(session, "openvino")


@session_for("tests", "launchers", "3.11")
def run_launchers(session: nox.Session) -> None:
    """Scripts under Dask; with the slow tests under Ray Train, Spark and Slurm's batch file, too."""
    with reported("tests(launchers)"):
        if PYTHONS["3.11"] is None:
            session.skip("no Python 3.11 was found")
        slow = any("slow or" in each for each in session.posargs)
        clusters = ("dask[distributed]", *(("ray[train]", "pyspark") if slow else ()))
        prepare(session, "stock", "sklearn", "dev", with_torch=slow, pins=clusters)
        tests = "tests/end_to_end/test_launchers.py"
        session.run(*TESTS, tests, "-m", "not slow", *session.posargs, env=VARIABLES)


@session_for("mutation", "stock", MUTATION_PYTHON)
def mutation(session: nox.Session) -> None:
    """Mutants of the sources against the tests that reach them: the map, then ``-- --count 300``."""
    if PYTHONS[MUTATION_PYTHON] is None:
        session.skip(f"no Python {MUTATION_PYTHON} was found")
    stock = ENVIRONMENTS["stock"]
    extras = ("stock", "sklearn", "plot", "tensorboard", "parquet", "dev", *stock.more)
    prepare(session, *extras, with_torch=True, pins=stock.pins)
    session.install("--no-deps", "--editable", str(EXAMPLE_PLUGIN))
    session.run("python", "-m", "tests.mutation", "map")
    session.run("python", "-m", "tests.mutation", *session.posargs)


for name in ("agent", "session"):

    @session_for("bench", name, ENVIRONMENTS[name].python)
    def run_benchmarks(session: nox.Session, name: str = name) -> None:
        """Microseconds a step of the backends of this environment, compared with torch."""
        if PYTHONS[ENVIRONMENTS[name].python] is None:
            session.skip(f"no Python {ENVIRONMENTS[name].python} was found")
        prepare(session, name, "sklearn", with_torch=True)
        small = ("--workload=W1", "--workload=W2")
        session.run("python", "-m", "tests.benchmarks", "peers", *small, *session.posargs)


@session_for("bench", "jax", "3.11")
def prepare_jax(session: nox.Session) -> None:
    """The environment of JAX, a peer of the next session."""
    if PYTHONS["3.11"] is None:
        session.skip("no Python 3.11 was found")
    session.install("jax", "jaxlib", "numpy")


@session_for("bench", "peers", "3.11")
def run_peers(session: nox.Session) -> None:
    """Microseconds a step, compared with all peers; WORKLOADS="W1" and PEERS="torch" choose."""
    if PYTHONS["3.11"] is None:
        session.skip("no Python 3.11 was found")
    prepare(session, "stock", "sklearn", "parquet", with_torch=True)
    arguments = []
    others = {
        "jax step": "bench-jax",
        "jax scan": "bench-jax",
        "on-device": "bench-agent",
        # The tests of these backends make their environments.
        "ortflex xla": "tests-xla",
        "ortflex openvino": "tests-openvino",
    }
    for peer, other in others.items():
        python = Path(session.virtualenv.location).parent / other / "bin" / "python"
        if python.exists():
            arguments.append(f"--python={peer}={python}")
    for option, variable in (("workload", "WORKLOADS"), ("peer", "PEERS")):
        text = os.environ.get(variable, "")
        # The names of peers have spaces.
        chosen = text.replace(",", " ").split() if option == "workload" else text.split(",")
        arguments += [f"--{option}={name.strip()}" for name in chosen if name.strip()]
    session.run("python", "-m", "tests.benchmarks", "peers", *arguments, *session.posargs)
    if not os.environ.get("WORKLOADS"):
        images = ("--workload=W9", "--workload=W10", "--peer=torch")
        session.run("python", "-m", "tests.benchmarks", "peers", *images)
        large = [f"--workload={name}" for name in ("W3", "W4", "W7", "W8")]
        two = ("python", "-m", "tests.benchmarks", "peers", "--threads=2")
        session.run(*two, *large, *arguments)
        session.run(*two, *images)
    for table in ("estimators", "features", "layers", "growth", "data"):
        session.run("python", "-m", "tests.benchmarks", table)


@nox.session(python=PYTHONS["3.11"], tags=["gpu"])
def gpu(session: nox.Session) -> None:
    """On a machine with a CUDA device: tests of the GPU, `tests/end_to_end` on it, and the table."""
    if PYTHONS["3.11"] is None:
        session.skip("no Python 3.11 was found")
    prepare(session, "stock-gpu", "sklearn", "plot", "parquet", "dev", with_torch=True)
    session.install("jax[cuda12]")
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
    # Every run of these tests that names no device is on the GPU.
    whole = ("python", "-m", "pytest", "-m", "not slow", "tests/end_to_end", *session.posargs)
    session.run(*whole, env={"ORTFLEX_TEST_DEVICE": "cuda"})
    session.run("python", "-m", "tests.benchmarks", "gpu")


@nox.session
def demo(session: nox.Session) -> None:
    """Fine-tune a classifier on handwritten digits."""
    prepare(session, "stock", "sklearn", "plot")
    session.run("python", "docs/examples/demo.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in docs/_build/html: reference from the classes, examples that run, no warnings."""
    prepare(session, "stock", "sklearn", "plot", "testing", "docs", with_torch=True)
    session.run("python", "-m", "ortflex_plugins.cli.reference", "docs/reference")
    session.run("python", "docs/draw_architecture.py")
    session.run(
        # Read again, all pages: of those that did not change, the search index loses its entries.
        *("python", "-m", "sphinx", "-E", "-W", "--keep-going", "-q", "-b", "html"),
        *("docs", "docs/_build/html"),
        env={"OMP_NUM_THREADS": "1"},
    )
    # The site's own search, in the language that it is written in.
    if node := shutil.which("node"):
        session.run(
            node,
            *("docs/search_queries.mjs", "docs/_build/html", "docs/search_queries.json"),
            external=True,
        )

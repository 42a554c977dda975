"""The runners in JavaScript: node and WebAssembly against Python's runner, and the page in Chromium.

The packages of npm are looked for in the folder ORTFLEX_NODE_MODULES, and in .nox/node/node_modules, where
``nox --session "tests(node)"`` puts them. Without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import open_step
from tests import children, models
from tests.end_to_end.portable_cases import (
    RUNNER,
    batches,
    columns,
    compile_for,
    count_rows,
    fused,
    network_trainer,
    runner,
    workload,
)
from tests.training import regression

ROOT = Path(__file__).parents[2]
STEPS = 100
NAMES = ["W1", "plain"]
SLOW = [
    "W2",
    "W3",
    "W5",
    "W6",
    "W4",
    "W7",
    "W8",
    "vision resnet",
    "sequence encoder",
    "sequence gru",
]
CASES = [*NAMES, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
TOLERANCE = 1e-3
"""Of a hundred steps, relative, where kernels differ; of one step it is 1e-5."""
OF_SIX_ROWS = 5e-3
"""The same where BatchNormalization divides by the variances of batches of six rows."""

ROUGH = {"W4", "W7", "W8", "vision resnet", "sequence encoder"}
"""Networks that train with plain steps in wasm, whose kernels add in another order.

Adam divides a gradient by its size. Where it is rounding noise, as that of the bias of keys in attention,
the weight moves by a whole rate in a direction that depends on the kernels. Adam itself is in "plain".
"""


def node_modules(package: str) -> Path:
    """The folder with the packages of npm; skips the test without it."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    places = [os.environ.get("ORTFLEX_NODE_MODULES"), ROOT / ".nox" / "node" / "node_modules"]
    for place in filter(None, places):
        if (Path(place) / package).is_dir():
            return Path(place)
    pytest.skip(f"the npm package {package} is not installed (ORTFLEX_NODE_MODULES)")


def case(name: str, plain_steps: bool = False) -> tuple[Any, Any]:
    if name.startswith("W"):
        changes = {"optimizer": "sgd", "learning_rate": 0.01} if plain_steps else {}
        return workload(name, **changes)
    if name == "plain":
        X, y = regression(96, 6)
        weight = np.linspace(0, 1, 96).astype(np.float32)
        trainer = fused(models.mlp(), optimizer="adam", averaging="ema", penalty="l2")
        return trainer, batches(X, y, weight, 16)
    return network_trainer(name, "sgd" if plain_steps else "adam")


def in_javascript(batch: Any) -> dict[str, Any]:
    lists = {name: np.asarray(array).ravel().tolist() for name, array in columns(batch).items()}
    return {"rows": count_rows(batch), **lists}


def node(folder: Path, package: str, given: list[list[Any]], **scalars: float) -> Any:
    """The process in which node makes steps, each of several batches; the folder has their state."""
    work = folder.parent / "node"
    work.mkdir(exist_ok=True)
    for name in ("step.mjs", "node.mjs"):
        shutil.copy(RUNNER.parent / name, work)
    if not (work / "node_modules").exists():
        (work / "node_modules").symlink_to(node_modules(package))
    table = [[in_javascript(batch) for batch in parts] for parts in given]
    job = {"folder": str(folder), "runtime": package, "batches": table, "scalars": scalars}
    (work / "job.json").write_text(json.dumps(job))
    return children.run(["node", "node.mjs", "job.json"], cwd=work, seconds=600)


def run_node(folder: Path, package: str, given: list[list[Any]], **scalars: float) -> list[float]:
    """The costs of the steps that node makes."""
    done = node(folder, package, given, **scalars)
    assert done.returncode == 0, done.stderr
    costs: list[float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def same_runtime() -> bool:
    """Whether the packages of node and Python have the same version of onnxruntime."""
    import onnxruntime

    table = node_modules("onnxruntime-node") / "onnxruntime-node" / "package.json"
    return bool(json.loads(table.read_text())["version"] == onnxruntime.__version__)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
@pytest.mark.parametrize("name", CASES)
def test_steps_in_node(tmp_path: Path, name: str, package: str) -> None:
    node_modules(package)
    other = package == "onnxruntime-web"
    trainer, given = case(name, plain_steps=other and name in ROUGH)
    compile_for(trainer, given[0], fixed=True)
    folder = tmp_path / "step"
    trainer.export_step(folder, rows=count_rows(given[0]))
    step = runner().Step(folder)
    parts = [given[k % len(given)] for k in range(STEPS)]
    first = step.run([columns(parts[0])])
    found = run_node(folder, package, [parts[:1]])
    np.testing.assert_allclose(found, [first], rtol=1e-5)
    compare(folder, step, 1e-5)
    rest = [step.run([columns(part)]) for part in parts[1:]]
    found = run_node(folder, package, [[part] for part in parts[1:]])
    limit = OF_SIX_ROWS if name == "vision resnet" else TOLERANCE
    least = limit * rest[0] if other else 1e-6  # a loss near 0 is compared with the first one
    np.testing.assert_allclose(found, rest, rtol=limit, atol=least)
    compare(folder, step, limit)
    if not other and same_runtime():
        assert found == rest


def compare(folder: Path, step: Any, tolerance: float) -> None:
    """The state that node wrote, and that of Python's runner: relative to the largest element, or to 1."""
    state = open_step(folder).state.arrays
    for name, array in step.state.items():
        scale = float(np.abs(array).max(initial=1.0))
        np.testing.assert_allclose(
            state[name], array, rtol=tolerance, atol=tolerance * scale, err_msg=name
        )


def test_several_batches_a_run_and_another_rate_in_node(tmp_path: Path) -> None:
    node_modules("onnxruntime-node")
    X, y = regression(96, 6)
    given = batches(X, y, None, 16)
    trainer = fused(models.mlp(), optimizer="adam")
    options = {"steps_per_run": 2, "optional_inputs": False}
    trainer.export_step(tmp_path / "step", X[:16], y[:16], **options)
    step = runner().Step(tmp_path / "step")
    expected = step.run([columns(part) for part in given[:2]], learning_rate=[0.1, 0.1])
    folder, package = tmp_path / "step", "onnxruntime-node"
    found = run_node(folder, package, [given[:2]], learning_rate=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    compare(folder, step, 1e-5)
    trainer.export_step(folder, steps_per_run=2)
    done = node(folder, package, [given[:2]], learning_rate=0.1)
    assert "learning_rate cannot be given: export the step with --required-inputs" in done.stderr


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_node_follows_the_schedule_without_a_rate(tmp_path: Path, package: str) -> None:
    node_modules(package)
    X, y = regression(96, 6)
    options = {"batch_size": 16, "epochs": 3, "shuffle": False, "learning_rate": 0.1}
    trainer = fused(models.mlp(), schedule="one_cycle", **options)
    trainer.export_step(tmp_path / "step", X, y, rows=16)
    run_node(tmp_path / "step", package, [[part] for part in batches(X, y, None, 16)] * 3)
    trainer.fit(X, y)
    state = open_step(tmp_path / "step").state.arrays
    for name, array in trainer.get_state().items():
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


class Served(SimpleHTTPRequestHandler):
    """The folder of the page, in which a script presses the button and sends what the page says."""

    told: ClassVar[list[str]] = []
    ended: ClassVar[threading.Event] = threading.Event()
    script = """<script type="module">
      const end = (text) => fetch("/told", {method: "POST", body: text});
      const timer = setInterval(() => {
        const state = document.body.dataset.state, text = document.getElementById("log").textContent;
        if (state === "ready") document.getElementById("train").click();
        if (state === "trained" || text.includes("failed")) { clearInterval(timer); end(text); }
      }, 50);
    </script></html>"""

    def do_GET(self) -> None:
        """Serve a file; the page with the script."""
        if not self.path.startswith("/browser.html"):
            super().do_GET()
            return
        text = Path(self.directory, "browser.html").read_text().replace("</html>", self.script)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        """Take what the page says."""
        self.told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()
        self.ended.set()

    def log_message(self, *args: Any) -> None:
        """Be quiet."""


Served.extensions_map = {
    **SimpleHTTPRequestHandler.extensions_map,
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
}


def test_the_page_trains_in_chromium(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    modules = node_modules("onnxruntime-web")
    X, y = regression(96, 6)
    trainer = fused(models.mlp(), optimizer="adam", learning_rate=0.01)
    trainer.export_step(tmp_path / "step", X[:16], y[:16], rows=16)
    table = {"data": X.tolist(), "label": y.tolist()}
    (tmp_path / "data.json").write_text(json.dumps(table))
    (tmp_path / "node_modules").symlink_to(modules)
    for name in ("step.mjs", "browser.html"):
        shutil.copy(RUNNER.parent / name, tmp_path)
    Served.told.clear()
    Served.ended.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Served, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = f"http://127.0.0.1:{server.server_port}/browser.html?epochs=3"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    with subprocess.Popen(
        [browser, *options, profile, page], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert Served.ended.wait(180), "the page said nothing"
        finally:
            process.terminate()
            server.shutdown()
            server.server_close()
    step = runner().Step(tmp_path / "step")
    lines = [line for line in Served.told[0].splitlines() if line.startswith("epoch")]
    assert len(lines) == 3, Served.told
    for line in lines:
        costs = [step.run([columns(part)]) for part in batches(X, y, None, 16)]
        assert float(line.rpartition(" ")[2]) == pytest.approx(np.mean(costs), rel=1e-4)


def test_the_runners_are_short() -> None:
    for name in ("step.mjs", "browser.html"):
        text = (RUNNER.parent / name).read_text()
        assert len([line for line in text.splitlines() if line.strip()]) <= 80, name

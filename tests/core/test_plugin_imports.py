"""What a fresh process imports: a training imports the plugins that it uses, and no other.

The class: the code of an installed distribution runs in trainings of people who do not use it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ortflex_core import KINDS
from ortflex_plugins.gradients import OPERATORS
from tests import children, installing, models
from tests.training import plugins

pytestmark = pytest.mark.once

HOOKED = "open(__file__ + '.imported', 'a').write('x')\n"
CODE = """
import json, sys
import numpy as np
from ortflex import Trainer
model, options = sys.argv[1], json.loads(sys.argv[2])
rows = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
try:
    trainer = Trainer(model, loss="squared_error", epochs=1, progress=False, **options)
    trainer.fit(rows, rows[:, :1])
    trainer.predict(rows)
except Exception as error:
    print(type(error).__name__)
print(json.dumps(sorted(sys.modules)))
"""


def imported(tmp_path: Path, **options: object) -> tuple[set[str], int]:
    """The modules after a training in a fresh process, and how often those of a stranger were run."""
    groups = {f"ortflex.{kind}": {"far": "far_module:Plugin"} for kind in KINDS}
    folder = installing.write(tmp_path, "far", HOOKED + "Plugin = None", groups)
    (tmp_path / "m.onnx").write_bytes(models.mlp((3, 4, 1), "Relu").SerializeToString())
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = children.run(
        [sys.executable, "-c", CODE, f"{tmp_path}/m.onnx", json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    seen = folder / "far_module.py.imported"
    return set(
        json.loads(done.stdout.splitlines()[-1])
    ), seen.stat().st_size if seen.exists() else 0


def test_a_training_imports_the_families_of_its_operators_alone(tmp_path: Path) -> None:
    modules, strangers = imported(tmp_path)
    families = {name for name in OPERATORS if f"ortflex_plugins.gradients.{name}" in modules}
    assert {"elementwise", "matmul"} <= families
    assert not families & {"attention", "control", "convolution", "recurrent", "signal", "sampling"}
    assert strangers == 0
    own = "ortflex_plugins."
    kinds = (f"{own}optimizers.", f"{own}losses.")
    others = {m for m in modules if m.startswith(kinds) and "._" not in m}
    assert others == {f"{own}optimizers.adam", f"{own}losses.regression"}


@pytest.mark.parametrize(
    "options", [{"prefer": ["far"]}, {"gradients": ["far"]}, {"backend": "fastest"}]
)
def test_what_is_asked_for_is_imported(options: dict[str, object], tmp_path: Path) -> None:
    """The family that cannot be used is an error where it is named."""
    _, strangers = imported(tmp_path, **options)
    assert strangers > 0


def test_the_list_of_operators_is_that_of_the_families() -> None:
    """Of every family of ours: what it has a rule for, or passes integers through."""
    registry = plugins()["gradients"]
    found = {}
    for entry in registry:
        if entry.owner == "ortflex":
            family = registry.loaded(entry)
            found[entry.name] = {*family.table, *family.rounding, *family.carrying}
    assert found == {name: set(keys) for name, keys in OPERATORS.items()}


def test_no_operator_has_rules_in_two_of_our_families() -> None:
    registry = plugins()["gradients"]
    keys = [k for e in registry if e.owner == "ortflex" for k in registry.loaded(e).table]
    assert len(keys) == len(set(keys))
    assert len(keys) > 180

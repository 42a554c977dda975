"""Backends that are not available are one line wherever backends are listed; the reasons are on request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import attrs
import onnx
import pytest
from click.testing import CliRunner

from ortflex_core import Plugins, Trainer, Unsupported, check_model, refusals, time_backends
from ortflex_core.compiler.runtime import session
from ortflex_core.training.engines.backend_choice import Absent
from ortflex_plugins.backends.fused import FusedBackend
from ortflex_plugins.cli.main import main
from tests import models
from tests.training import regression, with_backends

pytestmark = pytest.mark.once

X, Y = regression(rows=40)
LINE = "not available here: far, further (`ortflex doctor` shows why)"
WHY = "far is not installed: pip install far"


@attrs.frozen(kw_only=True)
class Far(FusedBackend):
    name: ClassVar[str] = "far"

    def available(self, runtime: Any) -> list[str]:
        return [WHY]


@attrs.frozen(kw_only=True)
class Further(Far):
    name: ClassVar[str] = "further"


@attrs.frozen(kw_only=True)
class Choosy(FusedBackend):
    name: ClassVar[str] = "choosy"

    def supports(self, problem: Any, device: Any, runtime: Any) -> list[str]:
        return ["it is Monday"]


def with_absent() -> Plugins:
    return with_backends(Far, Further, Choosy, keep=("fused",))


def test_the_check_has_one_line_for_all_of_them() -> None:
    found = check_model(models.linear(), plugins=with_absent())
    lines = found.summary.splitlines()
    assert lines[2:] == ["fused: can train this model", "choosy: it is Monday", LINE]
    assert found.backends["far"] == (WHY,)
    assert found.to_dict()["backends"]["far"] == {"can_train": False, "reasons": [WHY]}


def test_equal_reasons_are_one_line() -> None:
    reasons = dict.fromkeys(("a", "b", "c"), ("the model is broken",))
    assert refusals(reasons) == ["a, b, c: the model is broken"]
    assert refusals({"a": [Absent("x")], "b": []}, "not measured: ") == [
        "not available here: a (`ortflex doctor` shows why)"
    ]
    assert refusals({}) == []


def trainer(**options: Any) -> Trainer:
    return Trainer(
        models.linear(), loss="squared_error", epochs=1, plugins=with_absent(), **options
    )


def test_a_backend_that_is_asked_for_by_name_has_its_reason() -> None:
    with pytest.raises(Unsupported, match=WHY):
        trainer(backend="far", progress=False).fit(X, Y)


def test_the_table_of_times_has_one_row_for_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    rows = time_backends(trainer(progress=False), X, Y).table()
    assert rows[0][0] == "backend"
    assert sorted(row[0] for row in rows[1:-1]) == ["choosy", "fused"]
    assert rows[-1][0] == "others"
    assert rows[-1][-1] == LINE
    session._cache.clear()
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer(backend="fastest").fit(X, Y)
    lines = [m for m in caplog.messages if "far" in m]
    assert len(lines) == 1
    assert LINE in lines[0]
    session._cache.clear()


@pytest.mark.parametrize("times", [False, True])
def test_commands_say_it_once(times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plugins, "discover", classmethod(lambda cls: with_absent()))
    onnx.save(models.linear(), tmp_path / "m.onnx")
    (tmp_path / "data.csv").write_text(
        "a,b,c,d,e,y\n" + "1,2,3,4,5,6\n2,2,1,4,5,7\n" * 8, encoding="utf-8"
    )
    recipe = tmp_path / "train.toml"
    recipe.write_text(
        'model = "m.onnx"\ndata = "data.csv"\nloss = "squared_error"\nbatch_size = 4\n', "utf-8"
    )
    command = ["compare", str(recipe), "--steps", "2"]
    result = CliRunner().invoke(main, [*command, "--time"] if times else command)
    assert result.output.count("far") == 1, result.output
    assert LINE in result.output.splitlines()
    assert "choosy: it is Monday" in result.output
    assert WHY not in result.output
    result = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx"), "--all"])
    assert LINE in result.output
    assert f"far cannot train this model: {WHY}" in result.output
    result = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx")])
    assert WHY not in result.output

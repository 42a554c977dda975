"""The tool itself: its mutants are mistakes, and planted ones are killed or survive as they must."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import children
from tests.mutation import operators, report, run
from tests.mutation.operators import Mutant

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SOURCE = '''\
"""Not a word of this is changed: 1 < 2."""

from typing import Any

LIMIT = 3


def clipped(value: "int | None", *, low: int = 0) -> int:
    """Or of this."""
    if value is None:
        raise ValueError(f"no number {1 + 1}", "a text")
    log.append(value)
    return max(value + low, LIMIT)
'''


def edits(text: str) -> set[tuple[str, str, str]]:
    found = operators.mutants("x.py", text)
    return {(m.kind, m.before, m.after) for m in found if operators.changes(m, text)}


def test_every_kind_of_mistake_is_made_once_at_each_place() -> None:
    assert edits(SOURCE) == {
        ("constant", "3", "4"),
        ("constant", "0", "1"),
        ("early return", "", "return None\n    "),
        ("comparison", "is", "is not"),
        ("removed guard", "value is None", "False"),
        ("removed statement", "log.append(value)", "pass"),
        ("operator", "+", "-"),
        ("argument", "value + low, LIMIT", "LIMIT, value + low"),
    }


@pytest.mark.parametrize(
    ("expression", "after"),
    [
        ("a < b", "a <= b"),
        ("(a) not in (b)", "(a) in (b)"),
        ("a and not b", "((a) or (not b))"),
        ("a and not b", "a and (b)"),
        ("-a", "(a)"),
        ("f(ä, b=1, c=2)", "f(ä, b=1, )"),
        ("f('name', 'two words')", "f('name_', 'two words')"),
        ("a ** 2.5", "a ** 5.0"),
        ("a // b", "a * b"),
        ("x if True else y", "x if False else y"),
    ],
)
def test_an_edit_is_at_its_place(expression: str, after: str) -> None:
    """Columns of the syntax tree count bytes, and operands may stand in parentheses."""
    text = f"def f():\n    return 'é', {expression}\n"
    changed = {m.apply(text) for m in operators.mutants("x.py", text)}
    assert f"def f():\n    return 'é', {after}\n" in changed


@pytest.mark.parametrize(
    "text",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n",
        "assert x < 1\n",
        "def f(x):\n    raise E('a' + f'{x < 1}')\n",
        "pairs = zip(a, b, strict=True)\n".replace("a, b", "a"),
        "T = TypeVar('T', int, bound=1)\n",
        "Table = dict[str, 'x']\n",
        "__all__ = ['a', 'b']\n",
    ],
)
def test_what_no_test_can_see_is_left_out(text: str) -> None:
    assert not edits(text)


def test_a_seed_draws_the_same_mutants_in_proportion_to_the_length() -> None:
    texts = {"long.py": SOURCE + "x = 1\n" * 400, "short.py": "def f(a, b):\n    return a < b\n"}
    drawn = operators.draw(texts, seed=3, count=20)
    assert drawn == operators.draw(texts, seed=3, count=20)
    assert len({m.identity for m in drawn}) == len(drawn)
    assert drawn != operators.draw(texts, seed=4, count=20)
    assert sum(m.source == "long.py" for m in drawn) > len(drawn) / 2


def test_an_identity_does_not_depend_on_the_number_of_the_line() -> None:
    before = {m.identity for m in operators.mutants("x.py", SOURCE)}
    assert before == {
        m.identity for m in operators.mutants("x.py", SOURCE.replace("LIM", "\n\nLIM", 1))
    }


@pytest.mark.slow
def test_planted_mutants_are_killed_or_survive(tmp_path: Path) -> None:
    """A failing test, a loop without an end, an import that fails; and what no test looks at."""
    copy = tmp_path / "copy"
    (copy / "tests").mkdir(parents=True)
    source = """
        def count(n, step=1):
            done = 0
            while done < n:
                done += step
            return done

        def unseen(a):
            return a + 1
    """
    (copy / "counting.py").write_text(textwrap.dedent(source), "utf-8")
    (copy / "tests" / "test_counting.py").write_text(
        "from counting import count\n\ndef test_count():\n    assert count(3) == 3\n", "utf-8"
    )
    (copy / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n"
        "markers = ['slow', 'gpu']\npythonpath = ['.']\n",
        "utf-8",
    )
    script = """
        import json, sys
        from pathlib import Path
        from tests.mutation import operators, run

        copy = Path(sys.argv[1])
        text = (copy / "counting.py").read_text("utf-8")
        server = run.Server(copy)
        out = {"": server.run(["tests/test_counting.py"], 60)[0]}
        for mutant in operators.mutants("counting.py", text):
            if operators.changes(mutant, text) and mutant.kind != "early return":
                with server.planted(mutant):
                    seconds = 3 if mutant.after == "pass" else 60
                    verdict, by = server.run(["tests/test_counting.py::test_count"], seconds)
                out[f"{mutant.line} {mutant.after}"] = verdict
        out["restored"] = (copy / "counting.py").read_text("utf-8") == text
        print(json.dumps(out))
    """
    ended = children.run(
        [sys.executable, "-c", textwrap.dedent(script), str(copy)], cwd=ROOT, check=True
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "": run.SURVIVED,
        "2 2": run.KILLED,  # the default of step
        "3 1": run.SURVIVED,  # 1, 2, 3: the sum is the same
        "4 <=": run.KILLED,
        "5 pass": run.TIMEOUT,
        "9 -": run.SURVIVED,
        "9 2": run.SURVIVED,
        "restored": True,
    }


def mutant(source: str = "ortflex_core/compiler/graph/ops.py", text: str = "a < b") -> Mutant:
    return Mutant(source, 7, (7,), "comparison", "<", "<=", text, 0, 1, False)


def test_results_are_kept_and_the_score_leaves_out_what_is_equivalent(tmp_path: Path) -> None:
    results = report.Results(tmp_path / "results.jsonl")
    drawn = [mutant(text=f"a < {n}") for n in range(5)]
    verdicts = (run.KILLED, run.TIMEOUT, run.SURVIVED, run.SURVIVED, run.UNDECIDED)
    for each, verdict in zip(drawn, verdicts, strict=True):
        results.keep(each, run.Outcome(verdict, "", 1, 0.5))
    known = report.Results(results.path).known
    assert known == results.known
    last = report.table(drawn, known, [drawn[3].identity]).splitlines()[-1].split()
    assert last == ["all", "1", "1", "1", "1", "0", "1", "0", "66.7%"]


def test_an_equivalent_mutant_is_found_by_its_text_and_needs_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    entry = (
        'file = "ortflex_core/compiler/graph/ops.py"\nline = "a < b"\nbefore = "<"\nafter = "<="\n'
    )
    path.write_text(f"[[mutant]]\n{entry}argument = 'both are equal at the bound'\n", "utf-8")
    known = report.arguments(path)
    assert report.argument_of(mutant(), known)
    assert not report.argument_of(mutant(text="a < c"), known)
    path.write_text(f"[[mutant]]\n{entry}argument = 'because'\n", "utf-8")
    with pytest.raises(ValueError, match="has no argument"):
        report.arguments(path)


def test_every_argument_is_about_a_line_that_there_is() -> None:
    """A line that changed is judged once more."""
    for file, line, before, _ in report.arguments():
        lines = [each.strip() for each in (ROOT / file).read_text("utf-8").splitlines()]
        assert line in lines, f"{file} has no line {line!r}"
        assert before in (ROOT / file).read_text("utf-8")


def test_the_map_has_the_tests_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.mutation import reach, tree

    monkeypatch.setattr(tree, "PLACE", tmp_path)
    monkeypatch.setattr(reach, "MAP", tmp_path / "map.sqlite")
    wide = {"test": "t.py::wide", "seconds": 0.1, "reached": {"a.py": [1, 9, 200], "b.py": [1]}}
    narrow = {"test": "t.py::narrow", "seconds": 0.2, "reached": {"a.py": [9]}}
    reach._store("t.py", [json.dumps(wide), json.dumps(narrow)])
    names = [[t.name for t in reach.reaching("a.py", lines)] for lines in ([9], [200, 300], [2])]
    assert names == [["t.py::narrow", "t.py::wide"], ["t.py::wide"], []]
    reach._store("t.py", [json.dumps(narrow)])  # the file changed
    assert [t.name for t in reach.reaching("a.py")] == ["t.py::narrow"]


def test_the_cases_that_the_map_lacks_are_run_last() -> None:
    """The line of a mutant may be reached by another case of a function that reaches its source."""
    from tests.mutation.reach import Test

    line, source = Test("t.py::near[a]", 0.1), Test("t.py::far[b]", 0.2)
    batches = list(run._batches([line], [line, source], mutant(), 60.0))
    assert [names for _, names in batches] == [["t.py::near[a]"], ["t.py::near", "t.py::far"]]
    assert list(run._batches([line], [line, source], mutant(), 0.15))[-1][1] == ["t.py::near"]


@pytest.mark.parametrize("there", [False, True])
def test_names_without_a_test_kill_nothing(there: bool) -> None:
    """pytest fails for a file that does not exist; so does it without the mutant."""

    class Scripted:
        said = "file or directory not found"
        calls = 0

        def planted(self, _: Any) -> Any:
            return contextlib.nullcontext()

        def run(self, tests: Any, seconds: float) -> tuple[str, str]:
            self.calls += 1
            return (run.SURVIVED if there and self.calls > 1 else run.KILLED), ""

    server: Any = Scripted()
    if there:  # the mutant ends the process, so that no test is named
        assert run.judge(server, mutant(), 9.0, ["tests/some.py"]).verdict == run.KILLED
        return
    with pytest.raises(RuntimeError, match="fail without a mutant"):
        run.judge(server, mutant(), 9.0, ["tests/no_such_file.py"])

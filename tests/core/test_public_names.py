"""What is public stays: docs/reference/names.md lists it, and nothing listed goes away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.core import public_names

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^### (\S+)\n\n```text\n(.*?)^```$", re.M | re.S)


def listed() -> dict[str, list[str]]:
    """Lines by module, as the page has them."""
    return {m: text.splitlines() for m, text in BLOCK.findall(public_names.PAGE.read_text("utf-8"))}


def parsed(line: str) -> tuple[str, list[str] | None]:
    name, bracket, rest = line.partition("(")
    arguments = [a for a in rest.removesuffix(")").split(", ") if a]
    return name, arguments if bracket else None


def broken(old: str, new: str) -> str:
    """Why a caller of ``old`` would not get along with ``new``; empty if all would."""
    (name, before), (_, after) = parsed(old), parsed(new)
    if before is None or after is None:
        return "" if before == after else f"{old} has become {new}"
    gone = [a for a in before if a != "*" and a.rstrip("=") not in {b.rstrip("=") for b in after}]
    if gone:
        return f"{name} has lost the argument {gone[0].rstrip('=')!r}"
    asked = [b for b in after if not b.endswith("=") and b not in before and b[0] != "*"]
    if asked:
        return f"{name} asks for {asked[0]!r}, which nobody gave before"
    head = [a.rstrip("=") for a in before[: before.index("*") if "*" in before else None]]
    if [b.rstrip("=") for b in after[: len(head)]] != head:
        return f"{name} takes its arguments in another order"
    return ""


MODULES = [(m, names) for group in public_names.MODULES.values() for m, names in group.items()]


@pytest.mark.parametrize(
    ("module", "names"), MODULES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_listed_public_names_are_not_removed(module: str, names: Any) -> None:
    if module.endswith("estimators"):
        pytest.importorskip("sklearn")
    now = {parsed(line)[0]: line for line in public_names.lines(module, names)}
    problems = []
    for line in listed()[module]:
        name = parsed(line)[0]
        if name.startswith("OrtLayer") and "OrtLayer" not in now:
            continue  # torch is not installed
        problems.append(f"{name} is gone" if name not in now else broken(line, now[name]))
    hint = "see docs/explanation/deprecation.md, then python -m tests.core.public_names"
    assert not any(problems), f"{'; '.join(filter(None, problems))}: {hint}"


def test_type_checkers_know_the_public_names() -> None:
    assert public_names.STUB.read_text("utf-8") == public_names.stub()


@pytest.mark.slow
def test_the_list_of_public_names_is_complete() -> None:
    for module in ("sklearn", "torch"):
        pytest.importorskip(module)
    written = public_names.PAGE.read_text("utf-8")
    assert written == public_names.page(), "run python -m tests.core.public_names"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("f(a, b=)", "f(a, b=, c=)", ""),
        ("f(a, b)", "f(a, b=)", ""),
        ("f(a, *, b=)", "f(a, *, c=, b=)", ""),
        ("f(a, b=)", "f(a)", "f has lost the argument 'b'"),
        ("f(a)", "f(a, b)", "f asks for 'b', which nobody gave before"),
        ("f(a, b)", "f(b, a)", "f takes its arguments in another order"),
        ("f(a, b=)", "f(b=, a=)", "f takes its arguments in another order"),
        ("f(a=)", "f(a)", "f asks for 'a', which nobody gave before"),
        ("f(a, b=)", "f(a, *, b=)", "f takes its arguments in another order"),
        ("A.x", "A.x()", "A.x has become A.x()"),
    ],
)
def test_what_counts_as_broken(old: str, new: str, reason: str) -> None:
    assert broken(old, new) == reason


def test_kinds_of_plugins_and_hooks_stay() -> None:
    from ortflex_core import KINDS, NAMES

    assert set(KINDS) >= {
        *("losses", "penalties", "schedules", "optimizers", "transforms", "constraints"),
        *("averages", "devices", "backends", "data", "metrics", "callbacks", "gradients"),
    }
    assert set(NAMES) >= {
        *("recipe_resolved", "graph_built", "train_start", "epoch_start", "step_end", "steps_end"),
        *("validation_end", "epoch_end", "settled", "checkpoint_saving", "checkpoint_loading"),
        *("train_end", "exception"),
    }


def test_the_readme_and_the_policy_lead_here() -> None:
    policy = (ROOT / "docs" / "explanation" / "deprecation.md").read_text("utf-8")
    assert "../reference/names.md" in policy

"""A package adds a kind of plugin with one class and one entry point; everything else follows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from ortflex_core import KINDS, ConfigError, PluginError, Plugins
from ortflex_plugins.cli.completion import kinds as complete_kinds
from ortflex_plugins.cli.main import main
from ortflex_plugins.cli.reference import pages
from tests.installing import GOOD, Install
from tests.installing import install as install
from tests.plugins.commands import ortflex, works
from tests.plugins.conformance_installed import PYTEST, run
from tests.plugins.conformance_installed import install as put

pytestmark = pytest.mark.per_python

PACKAGE = Path(__file__).parents[1] / "fixtures" / "ortflex_filters"
BROKEN = "raise RuntimeError('no such library')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path in which the package with the kind ``filters`` is installed."""
    folder = tmp_path / "site"
    put(PACKAGE, folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("ortflex_filters")]:
        del sys.modules[name]


def test_names_are_listed_without_imports(site: Path) -> None:
    plugins = Plugins.discover()
    assert plugins["filters"].names() == ["finite"]
    assert set(plugins.kinds) == {*KINDS, "filters"}
    assert not [name for name in sys.modules if name.startswith("ortflex_filters")]


def test_components_are_made_described_and_refused_like_those_of_any_kind(site: Path) -> None:
    plugins = Plugins.discover()
    made = plugins.component("filters", {"name": "finite", "bound": 2})
    assert plugins.kind_of(made) == "filters"
    assert plugins.described("filters", made) == {"name": "finite", "bound": 2}
    assert plugins.component("filters", made) is made
    with pytest.raises(ConfigError, match=r"^filter\.bounds: .*'bound'"):
        plugins.component("filters", {"name": "finite", "bounds": 2})
    with pytest.raises(PluginError, match=r"unknown filter .*'finite'"):
        plugins.component("filters", "finit")
    with pytest.raises(ConfigError, match="filter: "):
        plugins.component("filters", plugins.component("losses", "huber"))


def test_a_component_may_contain_one_of_the_kind(site: Path) -> None:
    from ortflex_filters.protocol import Filter  # type: ignore[import-not-found]

    from ortflex_core import Component
    from ortflex_core.kernel.construct import structure

    @attrs.frozen(kw_only=True)
    class Twice(Component):
        name = "twice"
        first: Filter
        rest: tuple[Filter, ...] = ()

    annotations = {"first": Filter, "rest": tuple[Filter, ...]}
    Twice.__annotations__ = annotations
    read = {"first": "finite", "rest": ["finite", {"name": "finite", "bound": 3}]}
    made = structure(Twice, read, "twice", Plugins.discover())
    assert [part.bound for part in (made.first, *made.rest)] == [1e6, 1e6, 3]
    assert Plugins.discover().described("losses", made)["rest"][1] == {"name": "finite", "bound": 3}


def test_the_command_line_knows_the_kind(site: Path) -> None:
    for word in ("filters", "Filter"):
        result = works("plugins", word)
        assert "finite" in result.output
        assert "Keeps rows of bounded numbers" in result.output
    assert "the largest absolute value" in ortflex("plugins", "finite").output
    rows = json.loads(ortflex("plugins", "--check", "--json").output)
    assert [r["status"] for r in rows if r["kind"] == "filters"] == ["ok"]
    ctx = main.make_context("ortflex", ["plugins"])
    assert "filter" in {item.value for item in complete_kinds(ctx, main.params[0], "fil")}


@pytest.mark.once
def test_the_pages_of_the_package_are_generated(site: Path) -> None:
    made = pages(distribution="ortflex-filters")
    assert set(made) == {"components.md", "filters.md"}
    assert "Selects rows of the data." in made["filters.md"]
    assert "the largest absolute value" in made["filters.md"]
    assert "filters.md" not in pages()


@pytest.mark.once
def test_packages_are_listed_by_kind() -> None:
    listed = {"home": "https://example.org", "description": "One sentence.", "stability": "stable"}
    packages = [
        {"name": "first", **listed, "plugins": {"losses": ["one", "two"], "filters": ["three"]}},
        {"name": "second", **listed, "plugins": {"losses": ["four"]}},
    ]
    text = pages(packages=packages)["packages.md"]
    losses = text.partition("## Losses")[2].partition("##")[0]
    found = [name for name in ("one", "two", "three", "four") if f"`{name}`" in losses]
    assert found == ["one", "two", "four"]
    assert "[first](https://example.org)" in text.partition("## Filters")[2]


def test_a_new_plugin_of_the_kind_passes_its_kit(site: Path, tmp_path: Path) -> None:
    works("new-plugin", "filter", "fresh_filter", "--output", str(tmp_path))
    put(tmp_path / "fresh_filter", site)
    test = tmp_path / "fresh_filter" / "tests" / "test_fresh_filter.py"
    ours = tmp_path / "test_finite.py"
    text = test.read_text("utf-8").replace("fresh_filter.filter", "ortflex_filters.finite")
    text = text.replace("FreshFilter(threshold=0.25)", "Finite(bound=1)")
    text = text.replace("FreshFilter", "Finite")
    ours.write_text(text.replace("row[0] > 0.25", "abs(row).max() <= 1"), "utf-8")
    passed = run([*PYTEST, "--import-mode=importlib", str(test), str(ours)], tmp_path, site)
    assert "12 passed" in passed.stdout, passed.stdout[-3000:]


def test_a_kind_without_templates_says_where_they_belong(site: Path, tmp_path: Path) -> None:
    (site / "ortflex_filters" / "templates" / "filter.py.txt").unlink()
    done = ortflex("new-plugin", "filter", "fresh_filter", "--output", str(tmp_path))
    assert done.exit_code == 1
    assert "filter.py.txt" in done.output
    assert "ortflex_filters" in done.output


def test_the_kind_is_switched_off_with_its_distribution(site: Path) -> None:
    plugins = Plugins.discover(["ortflex-filters"])
    with pytest.raises(PluginError, match="unknown kind of plugin 'filters'"):
        plugins["filters"]
    assert "huber" in plugins["losses"]


def test_a_broken_kind_is_an_error_only_if_it_is_requested(install: Install) -> None:
    groups = {"ortflex.boxes": {"one": "cube_module:A"}}
    groups["ortflex.kinds"] = {"boxes": "cube_module:Box"}
    install("cube", BROKEN, groups)
    plugins = Plugins.discover()
    assert plugins.component("losses", "huber").name == "huber"
    with pytest.raises(PluginError, match="no such library"):
        plugins.component("boxes", "one")


@pytest.mark.parametrize("target", ["cube_module:Cubed.name", "cube_module:attrs"])
def test_what_is_no_class_of_components_is_no_kind(install: Install, target: str) -> None:
    install("cube", GOOD, {"ortflex.kinds": {"boxes": target}, "ortflex.boxes": {"one": target}})
    with pytest.raises(PluginError, match="expected a subclass of ortflex_core's Component"):
        Plugins.discover()["boxes"].load("one")


def test_the_name_of_a_kind_is_taken_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("cube", GOOD, {"ortflex.kinds": {"losses": "cube_module:Cubed"}})
    plugins = Plugins.discover()
    assert plugins.kinds["losses"] is KINDS["losses"]
    assert "'losses' (cube_module:Cubed" in caplog.text


def test_home_page_and_stability_are_shown(site: Path) -> None:
    module = site / "ortflex_filters" / "finite.py"
    declared = '    name: ClassVar[str] = "finite"\n'
    text = module.read_text("utf-8")
    experimental = f'{declared}    stability = "experimental"\n'
    module.write_text(text.replace(declared, experimental), "utf-8")
    (metadata,) = site.glob("*.dist-info/METADATA")
    lines = f"{metadata.read_text()}Project-URL: Homepage, https://example.org/filters\n"
    metadata.write_text(lines, "utf-8")
    (row,) = json.loads(ortflex("plugins", "finite", "--json").output)
    assert (row["home"], row["stability"]) == ("https://example.org/filters", "experimental")
    assert row["description"].startswith("Keeps rows of bounded numbers")
    for what in ("finite", "filters"):
        assert "experimental" in ortflex("plugins", what).output
    assert "https://example.org/filters" in ortflex("plugins", "finite").output

"""The requirements on every component: found by name, written to a file and read back, documented."""

from __future__ import annotations

import doctest
import inspect
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import (
    Component,
    ConfigError,
    Program,
    require_runtime,
    singular,
    to_plain,
    to_toml,
)
from ortflex_core.kernel.class_paths import is_class_path
from ortflex_core.kernel.construct import structure
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing.running import check_reasons, plugins, require, same_bits


class ComponentKit:
    """The checks of all kinds; inherit the kit of a kind, not this one."""

    kind: ClassVar[str]
    """The kind as the registry calls it."""
    has_formula: ClassVar[bool] = True
    """Whether the docstring has to show a formula (between double backquotes)."""

    @pytest.fixture
    def component(self) -> Any:
        """The plugin to test, with the parameters to test it with: override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture 'component'")

    def test_entry_point(self, component: Any) -> None:
        """It is registered under its own name."""
        group = f"ortflex.{self.kind}"
        name = plugins()[self.kind].name_of(component)
        require(
            name is not None and not is_class_path(name),
            f"{type(component).__name__} is not registered; pyproject.toml needs, under "
            f'[project.entry-points."{group}"]: {getattr(component, "name", "") or "my_name"} = '
            f'"{type(component).__module__}:{type(component).__qualname__}", and the package '
            "(re)installed",
        )
        assert name is not None
        loaded = plugins()[self.kind].load(name)
        require(loaded is type(component), f"the name {name!r} loads {loaded!r}")
        if isinstance(component, Component):
            require(
                component.name == name,
                f"{type(component).__name__}.name is {component.name!r}, its entry point {name!r}",
            )

    def test_config_round_trip(self, component: Any) -> None:
        """A component that is written to a TOML file and read back is equal."""
        cls = type(component)
        require(attrs.has(cls), f"{cls.__name__} must be an attrs class: recipes name its fields")
        try:
            text = f"component = {to_toml(to_plain(_table(component)))}"
        except TypeError as error:
            raise AssertionError(f"{cls.__name__} cannot be written to a file: {error}") from error
        read = tomllib.loads(text)["component"]
        read.pop("name", None)
        again = structure(cls, read, singular(self.kind), plugins())
        require(again == component, f"{text}\nis read as {again!r}, expected {component!r}")

    def test_is_frozen(self, component: Any) -> None:
        """It is equal and hashable by its fields, and immutable: it is a key of cached graphs."""
        twin = attrs.evolve(component)
        require(
            twin == component,
            f"two objects {type(component).__name__} with the same fields are not equal",
        )
        for field in attrs.fields(type(component)):
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                setattr(component, field.name, getattr(component, field.name))

    def test_bad_parameters_are_refused(self, component: Any) -> None:
        """A hyperparameter that is not a finite number, or unknown, is an error that names it."""
        cls, good = type(component), component.describe()
        good.pop("name")
        for name in component.hyper_names():
            for bad in (np.nan, np.inf, "much", None):
                try:
                    attrs.evolve(component, **{name: bad})
                except (TypeError, ValueError) as error:
                    require(
                        name in str(error),
                        f"{cls.__name__}({name}={bad!r}): the error does not name {name!r}: {error}",
                    )
                else:
                    raise AssertionError(f"{cls.__name__}({name}={bad!r}) is accepted")
        with pytest.raises(ConfigError, match="no_such_field: unknown parameter"):
            structure(cls, {**to_plain(good), "no_such_field": 1}, singular(self.kind), plugins())

    def test_docstring(self, component: Any) -> None:
        """It has one line of summary, the formula, and an example that runs."""
        check_docstring(type(component), formula=self.has_formula)


class FamilyKit:
    """The checks of kinds whose plugins are families of operators; inherit the kit of a kind."""

    kind: ClassVar[str]
    """The kind as the registry calls it."""
    attribute: ClassVar[str]
    """The usual name of the family in its module."""

    @pytest.fixture
    def component(self) -> Any:
        """The family to test: override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture 'component'")

    @pytest.fixture
    def cases(self) -> Sequence[Any]:
        """Calls of its operators: override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture 'cases'")

    def test_entry_point(self, component: Any) -> None:
        """It is registered, and no other family has the same operators."""
        require(
            [e.name for e in plugins()[self.kind] if e.load() is component],
            "the family is not registered; pyproject.toml needs, under "
            f'[project.entry-points."ortflex.{self.kind}"]: '
            f'my_family = "my_package.my_module:{self.attribute}"',
        )
        self.check_unique(component)

    def check_unique(self, component: Any) -> None:
        """Fail if another family has one of the operators."""
        raise NotImplementedError


class ReferenceKit(ComponentKit):
    """The checks of kinds with a reference, such as a numpy function that repeats the formula."""

    @pytest.fixture
    def reference(self) -> Any:
        """What the component computes, in numpy: override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture 'reference'")

    @pytest.fixture
    def compared(self, reference: Any) -> Any:
        """The reference; without one, the test is skipped."""
        if reference is None:
            pytest.skip("no reference was given")
        return reference


class RuntimeKit(ComponentKit):
    """The checks of kinds that not every runtime has; skipped, with the reasons, where it has not."""

    has_formula: ClassVar[bool] = False

    @pytest.fixture
    def here(self, component: Any) -> Any:
        """The component, if it can be used here."""
        if reasons := type(component).available(require_runtime()):
            pytest.skip("; ".join(reasons))
        return component

    def test_available(self, component: Any) -> None:
        """The reasons are sentences, and no device is needed to get them."""
        check_reasons(type(component).available(require_runtime()))


def _table(component: Any) -> dict[str, Any]:
    if isinstance(component, Component):
        return component.describe()
    fields = [f for f in attrs.fields(type(component)) if f.init]
    return {f.alias or f.name: getattr(component, f.name) for f in fields}


def check_docstring(cls: type, *, formula: bool) -> None:
    """Fail unless the docstring has a summary and an example that runs."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    require(text.split("\n")[0].strip(), f"{cls.__name__} has no docstring")
    if formula:
        require("``" in text, f"the docstring of {cls.__name__} shows no ``formula``")
    module = inspect.getmodule(cls)
    names = dict(vars(module)) if module is not None else {cls.__name__: cls}
    example = doctest.DocTestParser().get_doctest(text, names, cls.__name__, None, None)
    require(example.examples, f"the docstring of {cls.__name__} has no example (>>> …)")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(example, out=said.append)
    require(not runner.failures, f"the example of {cls.__name__} fails:\n{''.join(said)}")


def check_determinism(
    component: Any, compute: Callable[[], Arrays], program: Callable[[], Program]
) -> None:
    """Fail unless the results are bit-identical, and the graph the same, when they are made again."""
    same_bits(compute(), compute(), component.name)
    equal = program().key == program().key
    require(equal, f"{component.name}: two traces give different graphs")


def check_hyperparameters(component: Any, program: Callable[[Any], Program]) -> None:
    """Fail unless every hyperparameter is a symbol of the graph, which does not contain its value."""
    made, values = program(component), component.hyper_values()
    used = {s for h in made.hosts for s in h.expression.symbols}
    unused = sorted(set(values) - used)
    require(not unused, f"{component.name}: its formula does not use {', '.join(unused)}")
    for name, value in values.items():
        for moved in (value * 1.01, value * 0.99, value + 0.01):
            try:
                other = attrs.evolve(component, **{name: moved})
            except ValueError:  # outside its range
                continue
            require(
                program(other).key == made.key,
                f"{component.name}: a new value of {name} changes the graph",
            )
            break

"""The update of a large parameter as a C function that reads and writes memory once.

The function has the bits of the numpy functions that it replaces: the same operators in the same
order, each rounded once.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import Array, Formula, Host, OrtflexError, Port, Unsupported
from ortflex_plugins.c.compiler import load_library
from ortflex_plugins.c.scalars import HEADERS, TYPES, expression, literal

_log = logging.getLogger("ortflex")
_DTYPES: Mapping[Any, int] = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
}
_FUNCTION = """\
__attribute__((visibility("default")))
void update(void *const *memory, int64_t count) {{
{pointers}
{scalars}
    for (int64_t i = 0; i < count; i++) {{
{lines}
    }}
}}
"""


@attrs.frozen
class CompiledUpdate:
    """A compiled formula (:class:`ortflex_core.HostUpdates` calls it).

    Attributes:
        ports: the tensors in the order in which the function takes their addresses.
        hosts: the host scalars, which follow.
    """

    library: ctypes.CDLL
    ports: tuple[Port, ...]
    hosts: tuple[Host, ...]

    def bind(
        self, tensors: Mapping[Port, Array], scalars: Mapping[Host, Array]
    ) -> Callable[[], None]:
        """A call that updates tensors in place; it keeps them alive."""
        arrays = [*(tensors[p] for p in self.ports), *(scalars[h] for h in self.hosts)]
        memory = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        count = ctypes.c_int64(tensors[self.ports[0]].size)
        function = self.library.update

        def run(_arrays: object = arrays) -> None:
            function(memory, count)

        return run


def compile_update(formula: Formula, dtype: np.dtype[Any]) -> CompiledUpdate | None:
    """The update of a parameter in C, or None if there is no compiler or an operator has no expression.

    All tensors of the formula have the type ``dtype``.
    """
    try:
        source = update_source(formula, dtype)
        if source is None:
            return None
        library = load_library(source)
    except Unsupported as error:
        _log.debug("large weights are updated by numpy: %s", error)
        return None
    except OrtflexError as error:
        _log.warning("large weights are updated by numpy: %s", error)
        return None
    library.update.restype = None
    return CompiledUpdate(library, *_inputs(formula))


def update_source(formula: Formula, dtype: np.dtype[Any]) -> str | None:
    """The C source of a formula, or None if an operator or a constant has no expression.

    Example:
        >>> from ortflex_core import Formula
        >>> update_source(Formula((), {}), np.dtype(np.float16)) is None
        True
    """
    if dtype not in _DTYPES:
        return None
    kind = _DTYPES[dtype]
    of_c = TYPES[kind]
    ports, hosts = _inputs(formula)
    names: dict[Any, str] = {port: f"x{k}" for k, port in enumerate(ports)}
    names |= {host: f"s{k}" for k, host in enumerate(hosts)}
    lines = [f"const {of_c} {names[port]} = p{k}[i];" for k, port in enumerate(ports)]
    for k, line in enumerate(formula.lines):
        for operand in line.operands:
            if operand not in names and not isinstance(operand, int):
                array = operand.array  # type: ignore[union-attr]
                if array.dtype != dtype or array.shape:
                    return None
                names[operand] = literal(float(array[()]), kind)
        found = expression(line.operator, kind, [names[operand] for operand in line.operands])
        if found is None or found.calls or line.attributes:
            return None
        names[k] = f"t{k}"
        lines.append(f"const {of_c} t{k} = {found.text};")
    for port, result in formula.results.items():
        lines.append(f"p{ports.index(port)}[i] = {names[result]};")
    pointers = [f"{of_c} *restrict p{k} = memory[{k}];" for k in range(len(ports))]
    scalars = [
        f"const {of_c} s{k} = *(const {of_c} *)memory[{len(ports) + k}];" for k in range(len(hosts))
    ]
    function = _FUNCTION.format(
        pointers=_indented(pointers, 1), scalars=_indented(scalars, 1), lines=_indented(lines, 2)
    )
    return f"{HEADERS}{function}"


def _inputs(formula: Formula) -> tuple[tuple[Port, ...], tuple[Host, ...]]:
    """The tensors and the host scalars that a formula reads or writes, in a fixed order."""
    operands = [o for line in formula.lines for o in line.operands]
    ports = [o for o in operands if isinstance(o, Port)] + list(formula.results)
    hosts = [o for o in operands if isinstance(o, Host)]
    return tuple(dict.fromkeys(ports)), tuple(dict.fromkeys(hosts))


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join("    " * depth + line for line in lines)

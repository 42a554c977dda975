"""The mutants of a source: small edits of its text, each of a kind of mistake that people make."""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections import defaultdict
from typing import NamedTuple

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_NAME = re.compile(r"[\w./:-]+")
_OF_TYPES = {"cast", "TypeVar", "NamedTuple", "NewType", "TypedDict", "overload", "ParamSpec"}


class Mutant(NamedTuple):
    """One edit of one source."""

    source: str
    line: int
    """Where the edit begins."""
    lines: tuple[int, ...]
    """The lines of the statement: a test that reaches one of them reaches the mutant."""
    kind: str
    before: str
    """The text that is replaced."""
    after: str
    text: str
    """The whole line, without its indentation."""
    start: int
    end: int
    at_import: bool
    """Whether the line runs when the module is imported, so that the map cannot have it."""

    @property
    def identity(self) -> str:
        """The same as long as the line and the edit are, wherever the line moves to."""
        parts = (self.source, self.text, self.kind, self.before, self.after)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def apply(self, text: str) -> str:
        """Return the text of the source with this mistake."""
        return text[: self.start] + self.after + text[self.end :]

    def __str__(self) -> str:
        before, after = (_short(part) for part in (self.before, self.after))
        return f"{self.source}:{self.line}: {self.kind}: {before} → {after}"


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) < 70 else joined[:67] + "…"


def mutants(source: str, text: str) -> list[Mutant]:
    """Every mutant of a source, also those that ``changes`` leaves out."""
    finder = _Finder(source, text)
    finder.visit(ast.parse(text))
    return finder.out


def changes(mutant: Mutant, text: str) -> bool:
    """Whether a mutant can be compiled and is another program."""
    try:
        return ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def draw(texts: dict[str, str], seed: int, count: int) -> list[Mutant]:
    """Draw mutants: a source by its length, then one of the kinds that it has, then a place.

    The same seed draws the same ones from the same sources; fewer if there are not as many.
    """
    rng = random.Random(seed)
    names = sorted(texts)
    weights = [texts[name].count("\n") for name in names]
    known: dict[str, dict[str, list[Mutant]]] = {}
    drawn: dict[str, Mutant] = {}
    for _ in range(20 * count):
        if len(drawn) == count:
            break
        name = rng.choices(names, weights)[0]
        if name not in known:
            known[name] = defaultdict(list)
            for mutant in mutants(name, texts[name]):
                known[name][mutant.kind].append(mutant)
        if kinds := known[name]:
            mutant = rng.choice(kinds[rng.choice(sorted(kinds))])
            if mutant.identity not in drawn and changes(mutant, texts[name]):
                drawn[mutant.identity] = mutant
    return list(drawn.values())


class _Finder(ast.NodeVisitor):
    """Walks over the code that computes: no annotations, texts of errors, decorators or f-strings."""

    def __init__(self, source: str, text: str) -> None:
        self.source, self.text = source, text
        self.rows = text.splitlines(keepends=True)
        self.starts = [0]
        for row in self.rows:
            self.starts.append(self.starts[-1] + len(row))
        self.functions = 0
        self.statement: ast.stmt | None = None
        self.out: list[Mutant] = []

    # What is walked over

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        before, self.statement = self.statement, node
        super().visit(node)
        self.statement = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        body = _without_docstring(node.body)
        self.functions += 1
        if body and not _trivial(body[0]):
            self._insert(body[0], "early return", "return None")
        for statement in body:
            self.visit(statement)
        self.functions -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.functions += 1
        self.visit(node.body)
        self.functions -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in _without_docstring(node.body):
            self.visit(statement)

    def visit_Module(self, node: ast.Module) -> None:
        for statement in _without_docstring(node.body):
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts for people."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Removed with its condition; the rest is a text for people."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """For the type checker."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        named = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if not self.functions and ("__all__" in named or isinstance(node.value, ast.Subscript)):
            return  # exported names and types
        if self.functions and not named:
            self._remove(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._remove(node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # the docstring of a field
        if isinstance(node.value, ast.Call):
            self._remove(node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            self._replace(node.test, "removed guard", "False")
        self.generic_visit(node)

    # What is replaced

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operator = _COMPARED[type(node.ops[0])]
            self._between(node, node.left, node.comparators[0], "comparison", operator)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if operator := _COMPUTED.get(type(node.op)):
            self._between(node, node.left, node.right, "operator", operator)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = "or" if isinstance(node.op, ast.And) else "and"
        parts = [f"({self._of(part)})" for part in node.values]
        self._replace(node, "operator", f"({f' {operator} '.join(parts)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._replace(node, "operator", f"({self._of(node.operand)})")
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, "constant", str(not value))
        elif isinstance(value, int):
            self._replace(node, "constant", f"{value + 1}")
        elif isinstance(value, float):
            self._replace(node, "constant", repr(2 * value if value else 1.0))
        elif isinstance(value, str) and _NAME.fullmatch(value):
            self._replace(node, "constant", repr(value + "_"))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if (node.func.id if isinstance(node.func, ast.Name) else name) in _OF_TYPES:
            return
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        if len(node.args) > 1 and not starred:
            first, second = node.args[:2]
            middle = self.text[self._at(first, True) : self._at(second, False)]
            swapped = self._of(second) + middle + self._of(first)
            self._edit(self._at(first, False), self._at(second, True), "argument", swapped, node)
        if len(node.args) + len(node.keywords) > 1:
            for keyword in node.keywords:
                if keyword.arg not in (None, "help", "strict"):
                    self._drop(keyword, node)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: an assertion
            self.generic_visit(node)

    # Edits of the text

    def _offset(self, line: int, column: int) -> int:
        """The offset of a position of ``ast``, whose columns count bytes."""
        row = self.rows[line - 1].encode("utf-8")
        return self.starts[line - 1] + len(row[:column].decode("utf-8"))

    def _at(self, node: ast.expr | ast.stmt | ast.keyword, end: bool) -> int:
        if end:
            return self._offset(node.end_lineno or 0, node.end_col_offset or 0)
        return self._offset(node.lineno, node.col_offset)

    def _of(self, node: ast.expr) -> str:
        return self.text[self._at(node, False) : self._at(node, True)]

    def _replace(self, node: ast.expr, kind: str, after: str) -> None:
        self._edit(self._at(node, False), self._at(node, True), kind, after, node)

    def _between(
        self, node: ast.expr, left: ast.expr, right: ast.expr, kind: str, after: str
    ) -> None:
        """Replace the operator between two expressions, which may be in parentheses."""
        start, end = self._at(left, True), self._at(right, False)
        middle = self.text[start:end]
        operator = re.search(r"(?:not\s+in|is\s+not|in\b|is\b|[<>=!+\-*/%&|^@]+)", middle)
        if operator and "#" not in middle:
            self._edit(start + operator.start(), start + operator.end(), kind, after, node)

    def _drop(self, keyword: ast.keyword, call: ast.Call) -> None:
        start, end = self._at(keyword, False), self._at(keyword, True)
        comma = re.match(r"\s*,", self.text[end:])
        self._edit(start, end + (comma.end() if comma else 0), "argument", "", call)

    def _remove(self, node: ast.stmt) -> None:
        self._edit(self._at(node, False), self._at(node, True), "removed statement", "pass", node)

    def _insert(self, node: ast.stmt, kind: str, text: str) -> None:
        start = self._at(node, False)
        indent = " " * node.col_offset
        self._edit(start, start, kind, f"{text}\n{indent}", node)

    def _edit(self, start: int, end: int, kind: str, after: str, node: ast.expr | ast.stmt) -> None:
        statement = node if isinstance(node, ast.stmt) else self.statement or node
        last = statement.end_lineno
        if isinstance(statement, (ast.If, ast.While, ast.With, ast.For, ast.FunctionDef)):
            last = node.end_lineno  # the head, not the body
        line = self.text.count("\n", 0, start) + 1
        self.out.append(
            Mutant(
                source=self.source,
                line=line,
                lines=tuple(range(statement.lineno, (last or line) + 1)),
                kind=kind,
                before=self.text[start:end],
                after=after,
                text=self.rows[line - 1].strip(),
                start=start,
                end=end,
                at_import=not self.functions,
            )
        )


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return body[1:]
    return body


def _trivial(statement: ast.stmt) -> bool:
    """Whether an early return in front of it changes nothing, or leaves nothing to test."""
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Pass, ast.Raise))

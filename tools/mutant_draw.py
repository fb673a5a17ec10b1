"""Lists the changes that make mutants of `ikbo_jax/`, and draws some of them (tools/mutants.py).

Unchanged stay texts, annotations, decorators, base classes, imports, what `raise` raises, and what
only type checkers read. A change is one within a line.
"""

from __future__ import annotations

import ast
import bisect
import collections
import contextlib
import dataclasses
import io
import itertools
import pathlib
import random
import tokenize
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE, KERNELS = "ikbo_jax", "ikbo_jax/pallas/"
#: Files without code that a test could miss.
LEFT_OUT = ("ikbo_jax/_version.py",)

COMPARISONS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
}
OPERATORS = {
    **{"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*"},
    **{"<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"},
}
#: Functions of two arguments whose order does not matter, or must be as it is.
NOT_SWAPPED = (
    *("add", "equal", "gcd", "lcm", "logical_and", "logical_or", "max", "maximum", "min"),
    *("minimum", "multiply", "cast", "getattr", "hasattr", "isinstance", "issubclass", "setattr"),
)
#: Operands that no other operator takes.
_NOT_NUMBERS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
_NAMES = (ast.Name, ast.Attribute)

#: A line and a character of it.
Place = tuple[int, int]
#: The first and the last line.
Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
      path: the file, relative to the root of the tree.
      columns: where `old` begins and ends in the line.
      repeat: how often the line has the same change at an earlier column.
      statement: the lines of the statement, without the statements of its body.
      at_import: whether an import runs the statement, and no call.
      scopes: the lines of the functions and classes around it, innermost first.
      names: what the statement assigns, if an import runs it.
    """

    path: str
    line: int
    kind: str
    old: str
    new: str
    columns: tuple[int, int]
    repeat: int
    statement: Span
    at_import: bool
    scopes: tuple[Span, ...]
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        """Names the mutant in results, as long as the package does not change."""
        repeat = f"#{self.repeat + 1}" if self.repeat else ""
        return f"{self.path}:{self.line}:{self.kind}:{self.old.strip()}->{self.new}{repeat}"

    def apply(self, source: str) -> str:
        """Changes the file's text."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        start, end = self.columns
        assert text[start:end] == self.old, self.id
        lines[self.line - 1] = text[:start] + self.new + text[end:]
        return "".join(lines)


class _Finder(ast.NodeVisitor):
    """Lists every change of a file that can be made within one line."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.splitlines()
        self.found: list[Mutant] = []
        self.repeats: collections.Counter[tuple[int, str, str, str]] = collections.Counter()
        self.scopes: list[Span] = []
        self.statements: list[ast.stmt] = []
        self.bodies = 0  # of functions, around the node that is visited
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self.tokens = [t for t in tokens if t.type in (tokenize.OP, tokenize.NAME)]
        self.visit(ast.parse(source))

    def place(self, line: int, column: int) -> Place:
        """Turns a column in bytes, as `ast` counts, into one in characters."""
        return line, len(self.lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.expr | ast.stmt) -> Place:
        return self.place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.place(node.end_lineno, node.end_col_offset)

    def add(self, kind: str, start: Place, end: Place, new: str) -> None:
        """Notes a change, if it is within a line."""
        if start[0] != end[0]:
            return
        line, columns = start[0], (start[1], end[1])
        old = self.lines[line - 1][slice(*columns)]
        statement = self.statements[-1]
        at_import = not self.bodies
        key = (line, kind, old, new)
        if old != new:
            self.found.append(
                Mutant(
                    *(self.path, line, kind, old, new, columns, self.repeats[key]),
                    *(_header(statement), at_import, tuple(reversed(self.scopes))),
                    _assigned(statement) if at_import else (),
                )
            )
            self.repeats[key] += 1

    def add_operator(self, kind: str, left: Place, right: Place, table: dict[str, str]) -> None:
        """Notes the change of the operator between two places."""
        first = bisect.bisect_left(self.tokens, left, key=lambda t: t.start)
        last = bisect.bisect_left(self.tokens, right, key=lambda t: t.start)
        between = [t for t in self.tokens[first:last] if t.string not in "()"]
        name = " ".join(t.string for t in between)
        if name in table:
            self.add(kind, between[0].start, between[-1].end, table[name])

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statements.append(node)
        super().visit(node)
        if isinstance(node, ast.stmt):
            self.statements.pop()

    @contextlib.contextmanager
    def scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[None]:
        self.scopes.append((node.lineno, node.end_lineno or node.lineno))
        yield
        self.scopes.pop()

    def visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # Decorators, annotations and base classes stay as they are.
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        with self.scope(node):
            self.visit_all([*node.args.defaults, *node.args.kw_defaults])
            self.bodies += 1
            self.visit_all(node.body)
            self.bodies -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        with self.scope(node):
            self.visit_all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value])

    def visit_TypeAlias(self, node: ast.TypeAlias) -> None:
        pass

    def visit_Assign(self, node: ast.Assign) -> None:
        if _assigned(node) != ("__all__",):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" not in test and "__name__" not in test:
            self.visit_all([node.test, *node.body])
        self.visit_all(node.orelse)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("dropped", self.start(node), self.end(node), "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add("dropped", self.start(node), self.end(node), "pass")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Constant(self, node: ast.Constant) -> None:
        new = _changed_constant(node.value)
        if new:
            self.add("constant", self.start(node), self.end(node), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.add_operator("comparison", self.end(left), self.start(right), COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if _are_numbers(node.left, node.right):
            self.add_operator("operator", self.end(node.left), self.start(node.right), OPERATORS)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("dropped", self.start(node), self.end(node), "pass")
        if _are_numbers(node.value):
            table = {f"{old}=": f"{new}=" for old, new in OPERATORS.items()}
            self.add_operator("operator", self.end(node.target), self.start(node.value), table)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            table = {"and": "or", "or": "and"}
            self.add_operator("operator", self.end(left), self.start(right), table)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        line, column = self.start(node)
        for sign in ("not ", "-"):
            if self.lines[line - 1].startswith(sign, column):
                self.add("operator", (line, column), (line, column + len(sign)), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        for first, second in zip(node.args, node.args[1:], strict=False):
            if name not in NOT_SWAPPED and _are_alike(first, second):
                line, start = self.start(first)
                between, last = self.end(first), self.start(second)
                end = self.end(second)
                if line == end[0]:
                    text = self.lines[line - 1]
                    parts = text[last[1] : end[1]], text[between[1] : last[1]]
                    new = "".join((*parts, text[start : between[1]]))
                    self.add("swapped", (line, start), end, new)
        self.generic_visit(node)


def _header(node: ast.stmt) -> Span:
    """The lines of a statement up to its body."""
    end = node.end_lineno or node.lineno
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(body, list):
        first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
        end = max(node.lineno, first.lineno - 1)
    return node.lineno, end


def _assigned(node: ast.stmt) -> tuple[str, ...]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return tuple(x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name))


def _changed_constant(value: object) -> str:
    """Another constant; "" for texts and None, which stay."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return repr(float(f"{value * 1.5:.6g}") if value else 1.0)
    return ""


def _are_alike(first: ast.expr, second: ast.expr) -> bool:
    """Whether one argument can stand for the other: both are names, or numbers, or calls, ..."""
    if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
        return type(first.value) is type(second.value) and not isinstance(first.value, str)
    is_context = any(isinstance(x, ast.Name) and x.id in ("self", "ctx") for x in (first, second))
    is_text_or_many = isinstance(first, ast.JoinedStr | ast.Starred)
    return type(first) is type(second) and not is_context and not is_text_or_many


def _are_numbers(*nodes: ast.expr) -> bool:
    """Whether an operator's operands can be numbers; False for texts, sequences and types."""
    for node in nodes:
        if isinstance(node, _NOT_NUMBERS):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str | None):
            return False
        name = ast.unparse(node).rpartition(".")[2] if isinstance(node, _NAMES) else ""
        if name[:1].isupper() and not name.isupper():
            return False
    return True


def find(path: str, source: str) -> list[Mutant]:
    """Lists all mutants of a file, line by line."""
    return sorted(_Finder(path, source).found, key=lambda m: (m.line, m.columns, m.kind))


def draw(seed: int, count: int = 150, kernels: int = 60, root: pathlib.Path = ROOT) -> list[Mutant]:
    """Draws mutants: a line among all that can be changed, then one of its changes."""
    groups: tuple[dict[tuple[str, int], list[Mutant]], ...] = ({}, {})
    sources = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path not in LEFT_OUT:
            sources[path] = file.read_text()
            for mutant in find(path, sources[path]):
                group = groups[0 if path.startswith(KERNELS) else 1]
                group.setdefault((path, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    drawn: list[Mutant] = []
    for lines, wanted in zip(groups, (kernels, count - kernels), strict=True):
        order = sorted(lines)
        chance.shuffle(order)
        chosen = (chance.choice(lines[line]) for line in order)
        valid = (m for m in chosen if _compiles(m.apply(sources[m.path])))
        drawn += itertools.islice(valid, wanted)
    return drawn


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True

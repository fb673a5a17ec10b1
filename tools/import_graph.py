"""Draws which rooms of the package import which, into docs/architecture.md.

python tools/import_graph.py           writes the graph
python tools/import_graph.py --check   exits with status 1 if the page is out of date

A room is a folder of the package, a folder of `pallas/` or `rewrite/`, or a module beside folders.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "ikbo_jax"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: begin -->\n", "<!-- imports: end -->\n"
#: Modules of the command line, one room.
COMMAND_LINE = ("__main__", "cli", "cli_demo", "demo", "demo_attention", "demo_ranking", "terminal")
#: Folders of the package whose folders and modules are rooms.
DIVIDED = ("pallas", "rewrite")


def modules() -> dict[str, pathlib.Path]:
    """Every module by its name inside the package; "" is the package itself."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(source: str, name: str, is_package: bool = False) -> set[str]:
    """Full names of all modules that the module `name` imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *filter(None, name.split("."))]
                up = here[: len(here) - node.level + is_package]
                base = ".".join([*up, *filter(None, [node.module])])
            for alias in node.names:
                # `from package import module` imports the module, not only the package.
                inner = f"{base}.{alias.name}".removeprefix(f"{PACKAGE}.")
                names.add(f"{PACKAGE}.{inner}" if inner in MODULES else base)
    return names


def room(name: str) -> str:
    """The room of a module; the package's own `__init__` is a room named like the package."""
    first, *rest = name.split(".")
    if first in COMMAND_LINE:
        return "cli"
    if first in DIVIDED and rest:
        return f"{first}.{rest[0]}"
    return first or PACKAGE


def edges() -> dict[str, dict[str, int]]:
    """For every room, how many imports of each other room its modules contain."""
    found: dict[str, dict[str, int]] = collections.defaultdict(collections.Counter)
    for name, path in MODULES.items():
        found[room(name)]
        for target in imported(path.read_text(), name, path.name == "__init__.py"):
            top, _, inner = target.partition(".")
            if top == PACKAGE and room(inner) != room(name):
                found[room(name)][room(inner)] += 1
    return found


def graph() -> str:
    """The rooms as a Mermaid flow chart; an arrow's number counts imports."""
    lines = ["```mermaid", "flowchart TD"]
    for source, targets in sorted(edges().items()):
        for target, count in sorted(targets.items()):
            lines.append(f'  {_id(source)}["{source}"] -->|{count}| {_id(target)}["{target}"]')
    return "\n".join([*lines, "```"]) + "\n"


def _id(name: str) -> str:
    return name.replace(".", "_")


def drawn(page: str) -> str:
    """The page with the current graph between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{graph()}{END}{after}"


def main() -> int:
    """Writes the page, or with --check compares it."""
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        if page != drawn(page):
            print(f"{PAGE.relative_to(ROOT)} is out of date: python tools/import_graph.py")
            return 1
        return 0
    PAGE.write_text(drawn(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""MkDocs hook: pages from files outside of docs/, and links to files that the site leaves out.

README.md is the start page. A notebook's page is made of the cells and outputs of its .ipynb file.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import posixpath
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Pages made of files outside of docs/: the file, the page.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
NOTEBOOKS = "docs/notebooks"


def _setup_file() -> Any:
    spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = _setup_file()


def site_links(text: str, document: str, source: str) -> str:
    """Points the links of a file of the repository to the site's pages.

    Links to files without a page become addresses below `source`.

    Args:
      text: Markdown.
      document: the file that has the text, relative to the root.
      source: address of the repository's files.
    """
    here = posixpath.dirname(page_of(document) or document)

    def replaced(link: Any) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if "://" in target or not target:
            return str(link[0])
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        page = page_of(path)
        if page is None:
            return str(SETUP.absolute_links(link[0] + ")", source, document))[:-1]
        return f"{link['before']}{posixpath.relpath(page, here or '.')}{hash_}{anchor}"

    return str(SETUP.LINK.sub(replaced, text))


def page_of(path: str) -> str | None:
    """Finds the file of the site, relative to docs/, that a file of the repository becomes."""
    if path in PAGES:
        return PAGES[path]
    if posixpath.dirname(path) == NOTEBOOKS and path.endswith((".ipynb", ".py")):
        path = posixpath.splitext(path)[0] + ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """Writes a notebook's cells and outputs as Markdown; pictures become part of the page."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                encoded = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![plot](data:image/png;base64,{encoded})")
            elif shown := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that are made of other files."""
    from mkdocs.structure.files import File

    texts = {page: (ROOT / path).read_text("utf-8") for path, page in PAGES.items()}
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        page = page_of(f"{NOTEBOOKS}/{path.name}")
        texts[str(page)] = notebook_page(json.loads(path.read_text("utf-8")))
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of a page."""
    made_of = {made: path for path, made in PAGES.items()}
    document = made_of.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return site_links(markdown, document, SETUP.source())

"""The documents' Python runs as printed; every name, page and link has its place on the site."""

import importlib
import importlib.util
import re
import types

import pytest
from processes import ROOT, run_forked

from tools import site_hook

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What a page's blocks print first.
PRINTED = {
    "README.md": "1. attention:",
    "adopting.md": "rewrite: 1 broadcast found; saves",
    "rewrite.md": "rewrite: 1 broadcast found; saves",
    "tuning.md": "1. linear_compression:",
}
#: What is appended to a page's last block, and what it prints.
APPENDED = {"adopting.md": ("print(tokens.shape, rows.shape)", "(6, 4, 16) (6, 3, 16)")}
#: A block: how far its fence is indented, its language, its text.
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def blocks(text: str, wanted: str = "python") -> list[str]:
    """The blocks of a page in a language."""
    return [
        "\n".join(line.removeprefix(indent) for line in body.split("\n"))
        for indent, language, body in BLOCK.findall(text)
        if language == wanted
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page.read_text("utf-8"))], ids=lambda page: page.name
)
def test_every_block_of_a_page_stands_alone(page, tmp_path):
    if page.name in ("adopting.md", "rewrite.md"):
        pytest.importorskip("flax")
    last, printed = APPENDED.get(page.name, ("", ""))
    code = blocks(page.read_text("utf-8"))
    code[-1] += f"\n{last}\n"
    # The user's cache is empty, and nothing but the block's own lines is there.
    results = run_forked(code, tmp_path, IKBO_JAX_CACHE_DIR=str(tmp_path))
    for text, result in zip(code, results, strict=True):
        assert result.returncode == 0, f"{page.name}:\n{text}\n{result.stderr}"
    found = "".join(result.stdout for result in results)
    assert found.startswith(PRINTED.get(page.name, "")), found
    assert found.endswith(printed + "\n" if printed else ""), found
    # What a page shows as printed; `…` stands for what it leaves out.
    if page.name == "README.md":
        (shown,) = blocks(page.read_text("utf-8"), "text")
        assert re.fullmatch(re.escape(shown).replace("…", ".*"), found), found


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
    page = (ROOT / "docs/performance.md").read_text("utf-8")
    typed = re.sub(r"<!-- begin generated.*?<!-- end generated.*?-->", "", page, flags=re.DOTALL)
    assert len(typed.split()) <= 3000, "words beside the generated tables"


def test_the_picture_of_masks_has_the_titles_that_its_script_draws(tmp_path):
    pytest.importorskip("matplotlib")
    from tools import draw_masks

    assert draw_masks.main(["--out", str(tmp_path / "masks.svg")]) == 0
    drawn, kept = (
        re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text("utf-8"))
        for path in (tmp_path / "masks.svg", draw_masks.PAGE_IMAGE)
    )
    assert drawn == kept
    assert "hstu(num_targets)" in drawn


def test_blocks_are_found_wherever_they_stand():
    text = "a\n```python\nx = y\n```\n```sh\nls\n```\n  ```python\n  z\n  ```\n"
    assert blocks(text) == ["x = y\n", "z\n"]


def test_python_is_called_python():
    """A block under another name, or under none, would not be run."""
    for page in PAGES:
        for _, language, body in BLOCK.findall(page.read_text("utf-8")):
            is_python = re.search(r"^(import \w|from \w+ import |def \w+\()", body, re.MULTILINE)
            assert language == "python" or not is_python, f"{page.name}:\n{body}"


def _exists(name: str) -> bool:
    """Whether a dotted name of the library is a module, or a name of one."""
    found = importlib.import_module("ikbo_jax")
    for part in name.split(".")[1:]:
        module = f"{found.__name__}.{part}" if hasattr(found, "__path__") else ""
        if hasattr(found, part):
            found = getattr(found, part)
        elif module and importlib.util.find_spec(module) is not None:
            found = importlib.import_module(module)
        else:
            return False
    return True


def test_names_and_files_of_the_documents_exist():
    pytest.importorskip("flax")
    stale = []
    folders = "ikbo_jax", "tests", "tools", "benchmarks", "examples"
    sources = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text("utf-8")
        files = r"`((?:ikbo_jax|tests|tools|benchmarks|examples|docs)/[\w/.*-]+)`"
        stale += [(page.name, x) for x in re.findall(files, text) if not [*ROOT.glob(x)]]
        stale += [(page.name, x) for x in re.findall(r"`(\w+\.py)`", text) if x not in sources]
        names = [
            re.sub(r"^ikbo\.", "ikbo_jax.", x) for x in re.findall(r"`(ikbo\w*\.[\w.]+)", text)
        ]
        stale += [(page.name, x) for x in set(names) if not _exists(x.rstrip("."))]
        modules = [x.replace(".", "/") for x in re.findall(r"python -m (benchmarks[\w.]*)", text)]
        stale += [(page.name, x) for x in modules if not [*ROOT.glob(f"{x}*.py"), *ROOT.glob(x)]]
    assert not stale
    assert not _exists("ikbo_jax.masks.nothing")


API = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs/api").glob("*.md")))
LISTED = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
#: Modules all of whose public names the reference lists.
MODULES = ("ikbo_jax", "ikbo_jax.layers", "ikbo_jax.serving")
FLAX = ("ikbo_jax.layers.nnx", "ikbo_jax.layers.linen")


def public_names() -> set[str]:
    names = {
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if name != "__version__"
    }
    if importlib.util.find_spec("flax") is None:
        return names
    for module in FLAX:
        found = vars(importlib.import_module(module))
        classes = {n for n, x in found.items() if getattr(x, "__module__", "") == module}
        names |= {f"{module}.{n}" for n in classes if n[0].isupper()}
    return names


def test_the_reference_lists_every_public_name_once():
    assert len(LISTED) == len(set(LISTED)) > 30
    assert sorted(public_names() - set(LISTED)) == []


def test_every_name_of_the_reference_exists_and_says_what_it_does(monkeypatch):
    for listed in LISTED:
        module, name = listed.rsplit(".", 1)
        if module in FLAX:
            pytest.importorskip("flax")
        if module == "ikbo_jax.layers.keras":
            if importlib.util.find_spec("keras") is None:
                continue
            monkeypatch.setenv("KERAS_BACKEND", "jax")
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            found = importlib.import_module(listed)
        assert found.__doc__, listed
        if isinstance(found, types.ModuleType):
            public = (x for n, x in vars(found).items() if n[0] != "_")
            functions = [x for x in public if getattr(x, "__module__", "") == listed]
            assert functions
            assert all(x.__doc__ for x in functions), listed


def test_every_example_is_in_the_list_of_examples():
    listed = re.findall(r"^\| \[([\w.]+)\]", (ROOT / "examples/README.md").read_text("utf-8"), re.M)
    programs = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    programs |= {path.parent.name for path in (ROOT / "examples").glob("*/__main__.py")}
    assert sorted(listed) == sorted(programs)


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r"^ +- (?:[^#\n]*: )?(\S+\.md)$", config, re.MULTILINE))
    folder = ROOT / "docs"
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    pages |= set(site_hook.PAGES.values())
    pages |= {str(site_hook.page_of(f"docs/notebooks/{x.name}")) for x in folder.rglob("*.ipynb")}
    assert listed == pages


@pytest.mark.parametrize(
    ("document", "link", "expected"),
    [
        ("README.md", "docs/gdpa.md#masks", "gdpa.md#masks"),
        ("README.md", "LICENSE", "S/blob/main/LICENSE"),
        ("docs/gdpa.md", "glossary.md", "glossary.md"),
        ("docs/gdpa.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/gdpa.md", "../README.md#use", "index.md#use"),
        ("docs/api/ops.md", "../../README.md#use", "../index.md#use"),
        ("docs/experiments/gdpa.md", "../gdpa.md", "../gdpa.md"),
        ("docs/training.md", "../examples/hstu/model.py", "S/blob/main/examples/hstu/model.py"),
        ("docs/adopting.md", "notebooks/a.ipynb", "notebooks/a.md"),
        ("docs/adopting.md", "#masks", "#masks"),
        ("docs/adopting.md", "data:image/png;base64,eA==", "data:image/png;base64,eA=="),
        ("docs/adopting.md", "https://a.example/b.md", "https://a.example/b.md"),
    ],
)
def test_links_lead_to_pages_or_to_the_sources(document, link, expected):
    assert site_hook.site_links(f"a [b c]({link}).", document, "S") == f"a [b c]({expected})."


def test_a_notebook_becomes_a_page():
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# A\n", "b"]},
            {
                "cell_type": "code",
                "source": ["print(1)"],
                "outputs": [{"text": ["1\n"]}, {"data": {"image/png": "eA==\n"}}],
            },
        ]
    }
    page = site_hook.notebook_page(notebook)
    assert page == (
        "# A\nb\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "![plot](data:image/png;base64,eA==)\n"
    )

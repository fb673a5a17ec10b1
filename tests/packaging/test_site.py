"""The site: every public name, every page and every link has its place. `make docs` builds it."""

import importlib
import importlib.util
import pathlib
import re
import types

import pytest

from tools import site_hook

ROOT = pathlib.Path(__file__).resolve().parents[2]
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

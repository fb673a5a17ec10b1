"""Builds the package, with absolute links in its description; all else is in pyproject.toml."""

from __future__ import annotations

import pathlib
import posixpath
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent
#: A link or an image of Markdown: what stands before the target, and the target.
LINK = re.compile(r"(?P<before>(?P<image>!?)\[[^\]]*\]\()(?P<target>[^)\s]+)(?=\))")


def absolute_links(text: str, source: str, document: str = "README.md") -> str:
    """Replaces links to files of the repository by addresses below `source`.

    Links are relative to the folder of `document`. Addresses and anchors stay as they are.
    """

    def replaced(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        return f"{link['before']}{source}/{'raw' if link['image'] else 'blob'}/main/{path}"

    return LINK.sub(replaced, text)


def source() -> str:
    """Reads the address of the sources from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["urls"]["Source"])


def long_description() -> str:
    """Reads the first page, with absolute links."""
    return absolute_links((ROOT / "README.md").read_text("utf-8"), source())


if __name__ == "__main__":
    from setuptools import setup

    setup(long_description=long_description(), long_description_content_type="text/markdown")

"""The Python of the documents runs as it is printed, page by page."""

from __future__ import annotations

import pathlib
import re

import pytest
from processes import run_forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What a page's blocks print first.
PRINTED = {
    "README.md": "(12, 33, 16) 1. linear_compression:",
    "adopting.md": "rewrite: 1 broadcast found; saves",
    "rewrite.md": "rewrite: 1 broadcast found; saves",
    "tuning.md": "1. linear_compression:",
}
#: What is appended to a page's code, and what it prints.
APPENDED = {
    "adopting.md": ("print(scores.shape, tokens.shape, rows.shape)", "(6, 4) (6, 4, 16) (6, 3, 16)")
}
#: A block: how far its fence is indented, its language, its text.
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The Python blocks of a page."""
    return [
        "\n".join(line.removeprefix(indent) for line in body.split("\n"))
        for indent, language, body in BLOCK.findall(text)
        if language == "python"
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page.read_text("utf-8"))], ids=lambda page: page.name
)
def test_every_block_of_a_page_runs_after_those_before_it(page, tmp_path):
    if page.name == "adopting.md":
        pytest.importorskip("flax")
    last, printed = APPENDED.get(page.name, ("", ""))
    code = "\n".join([*blocks(page.read_text("utf-8")), last])
    # The user's cache is empty, and nothing but the page's own lines is there.
    (result,) = run_forked([code], tmp_path, IKBO_JAX_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, f"{page.name}:\n{result.stderr}"
    assert result.stdout.startswith(PRINTED.get(page.name, "")), result.stdout
    assert result.stdout.endswith(printed + "\n" if printed else ""), result.stdout


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

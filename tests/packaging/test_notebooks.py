"""The notebooks run and print what is stored, and their two files hold the same cells."""

import json
import re

import pytest
from processes import ROOT, run_forked

FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
#: What a notebook prints, in order.
PRINTED = {
    "rank_a_request": ("largest difference", "implementation: mosaic_gpu", "MiB of scratch"),
    "rewrite_your_model": ("2 broadcasts, 0 copies left", "sort along the looked-up axis"),
    "train_hstu": ("drawn ratings", "jagged", "norm_linear", "loss 0.", "test AUC 0."),
}
FIGURES = "assert plt.get_fignums(), 'no plot'\n"


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a file in the percent format of jupytext: kind and text."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, body = part.split("\n", 1)
        if is_markdown := "[markdown]" in head:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(("markdown" if is_markdown else "code", body.strip()))
    return found


def without_numbers(text: str) -> list[str]:
    """The words of a text; the names of files of cells, and numbers, are `#`."""
    return re.sub(r"\S+:\d+|[\d.]+(e-\d+)?", "#", text).split()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    for package in ("matplotlib", "flax", "optax"):
        pytest.importorskip(package)
    code = notebook.read_text("utf-8") + FIGURES
    variables = {"IKBO_SMALL": "1", "MPLBACKEND": "agg", "IKBO_JAX_CACHE_DIR": str(tmp_path)}
    (result,) = run_forked([code], tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    shown = PRINTED[notebook.stem]
    assert re.search(".*".join(map(re.escape, shown)), result.stdout, re.DOTALL), result.stdout
    if "IKBO_SMALL" not in code:
        cells = json.loads(notebook.with_suffix(".ipynb").read_text("utf-8"))["cells"]
        stored = [x for c in cells for o in c.get("outputs", ()) for x in o.get("text", ())]
        assert without_numbers("".join(stored)) == without_numbers(result.stdout)


def test_both_files_of_a_notebook_hold_the_same_cells():
    assert [path.stem for path in NOTEBOOKS] == sorted(PRINTED)
    for path in NOTEBOOKS:
        notebook = json.loads(path.with_suffix(".ipynb").read_text("utf-8"))
        found = [(c["cell_type"], "".join(c["source"]).strip()) for c in notebook["cells"]]
        assert found == cells(path.read_text("utf-8")), f"jupytext --sync {path}"
        errors = [o for c in notebook["cells"] for o in c.get("outputs", ()) if "ename" in o]
        assert not errors
        assert path.with_suffix(".ipynb").stat().st_size < 150_000


def test_cells_of_the_percent_format():
    text = "# ---\n# a\n# ---\n\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n\n# %%\ny\n"
    assert cells(text) == [("markdown", "# A\n\nb"), ("code", "x = 1"), ("code", "y")]

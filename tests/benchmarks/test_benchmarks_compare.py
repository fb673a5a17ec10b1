"""The comparison with an older commit: its package, its points, and a run in small."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import ikbo_jax
from benchmarks import children, compare, harness, timing

pytestmark = pytest.mark.slow

#: An older version whose linear compression differs in two elements, and which lacks attention.
OTHER = """

_linear_compression = linear_compression


def linear_compression(*args, **options):
    out = _linear_compression(*args, **options)
    return out.at[0, 1, :2].add(0.5)


del attention
"""


@pytest.fixture
def before(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a copy of the package."""
    source, copy = pathlib.Path(ikbo_jax.__file__).parent, tmp_path / "old" / "ikbo_jax"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy.parent


def test_an_equal_version_compiled_by_other_processes(before, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # An earlier path with another `benchmarks` must not reach the processes that compile.
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path[1:]]))
    out = tmp_path / "compare.json"
    names = ["linear_compression index", "attention heads"]
    options = ["--out", str(out), "--quick", "--jobs", "2"]
    assert compare.main(["--before", str(before), *options, "--points", *names]) == 0
    results = timing.read_results(out)
    assert [p["sweep"] for p in results["points"]] == names
    for point in results["points"]:
        assert point["differences"] == []
        before_ms, after_ms = (p["median_ms"] for p in point["providers"])
        assert [p["name"] for p in point["providers"]] == ["before", "after"]
        assert point["ratio"] == pytest.approx(after_ms / before_ms)
    table = capsys.readouterr().out
    assert "attention heads 8:2 heads" in table
    assert ", equal" in table


def test_differences_and_failures_are_named(before, tmp_path, monkeypatch, capsys):
    # JAX registers a type for artefacts once, and another test may have imported the package.
    monkeypatch.setattr(compare, "BEFORE", "ikbo_jax_other")
    with open(before / "ikbo_jax" / "__init__.py", "a") as file:
        file.write(OTHER)
    out = tmp_path / "compare.json"
    names = ["linear_compression index", "attention heads"]
    options = ["--out", str(out), "--quick", "--points", *names]
    assert compare.main(["--before", str(before), *options]) == 1
    results = timing.read_results(out)
    (different,), (failed,) = results["points"], results["failed"]
    (difference,) = different["differences"]
    n = different["problem"]["n"]
    assert (difference["count"], difference["first"]) == (2, n)
    assert difference["largest"] == pytest.approx(0.5, rel=0.05)
    assert "has no attribute 'attention'" in failed
    table = capsys.readouterr().out
    assert f"result 0: 2 elements from {n} on, by up to 0.5 of" in table
    assert "FAILED: attention heads 8:2 heads: AttributeError: " in table


def test_what_the_budget_leaves_out_is_named(before, tmp_path):
    out = tmp_path / "compare.json"
    options = ["--out", str(out), "--points", "gdpa other", "--budget-s", "0"]
    assert compare.main(["--before", str(before), *options]) == 1
    results = timing.read_results(out)
    assert results["points"] == []
    assert results["left_out"] == ["gdpa other B=2048 H=64 max=800 half forward"]


def test_the_package_of_a_commit_has_another_name(tmp_path, monkeypatch):
    """As it was committed, whatever has happened to it since."""
    root = tmp_path / "root"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(children.ROOT / "ikbo_jax", root / "ikbo_jax", ignore=ignored)
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "before"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    with open(root / "ikbo_jax" / "__init__.py", "a") as file:
        file.write("later = 1\n")
    (root / "ikbo_jax" / "later.py").touch()
    monkeypatch.setattr(children, "ROOT", root)

    assert re.fullmatch("[0-9a-f]{40}", compare.unpack("HEAD", tmp_path))
    package = tmp_path / compare.BEFORE
    names = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert len(names) > 100
    assert pathlib.Path("tuning/sm90.json") in names
    assert pathlib.Path("later.py") not in names
    text = (package / "__init__.py").read_text()
    assert "ikbo_jax_before" in text
    assert "later" not in text
    for path in package.rglob("*.py"):
        assert "from ikbo_jax." not in path.read_text()
        assert "import ikbo_jax\n" not in path.read_text()
    with pytest.raises(ValueError, match="no commit or folder 'no-such-commit'"):
        compare.unpack("no-such-commit", tmp_path)


def chosen(*names: str) -> list[harness.Point]:
    options = ["--out", os.devnull, "--before", ".", "--points", *names]
    return compare.BENCHMARK.todo(compare.BENCHMARK.parse(options))


def test_points_are_chosen_by_name_and_groups_take_turns():
    points, groups = chosen("*"), list(compare.GROUPS)
    assert [p.sweep.split()[0] for p in points[: len(groups)]] == groups
    assert len({p.name for p in points}) == len(points)
    names = ["gdpa full max=512 forward", "ranking ratio", "ranking_rewritten ratio"]
    assert [p.label for p in chosen(*names)[:3]] == ["max=512 forward", "10:1", "10:1"]
    with pytest.raises(ValueError, match="no point 'gdpa empty'"):
        chosen("gdpa full", "gdpa empty")


def test_a_larger_difference_is_timed_again(monkeypatch):
    rounds = iter([(1.0, 1.1), (1.0, 1.0), (1.0, 1.0)])

    def interleaved(thunks, **_):
        return dict(zip(thunks, ([ms] * 3 for ms in next(rounds)), strict=True))

    monkeypatch.setattr(harness, "interleaved_ms", interleaved)
    contenders = [harness.Contender({"name": n, "error": 0.0}) for n in ("before", "after")]
    found = compare.times(contenders, harness.Protocol(matmul_size=0))
    _, after = found["providers"]
    assert len(after["ms"]) == 9  # the medians of the first two are 1.05 apart
    assert after["median_ms"] == found["ratio"] == 1.0


def test_processes_share_work(tmp_path):
    first = children.claims(tmp_path, 4)
    assert next(first) == 0
    assert list(children.claims(tmp_path, 4)) == [1, 2, 3]
    assert list(first) == []
    (tmp_path / "other").mkdir()
    assert list(children.claims(tmp_path / "other", 4, until=0.0)) == []

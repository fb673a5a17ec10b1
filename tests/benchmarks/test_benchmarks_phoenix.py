"""The benchmark of Phoenix's transformer, on sizes for a CPU."""

import json

import pytest

from benchmarks import phoenix

pytestmark = pytest.mark.slow


def test_a_run_in_small(tmp_path):
    out = tmp_path / "phoenix.json"
    assert phoenix.BENCHMARK.main(["--out", str(out), "--quick", "--sweep", "all"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["direction"] for point in points] == ["forward", "both"]
    for point in points:
        assert phoenix.bars(point, points).endswith("x xla, bar 2.0")
        assert {p["name"]: p["ok"] for p in point["providers"]} == {"ikbo": True, "xla": True}


def test_useful_flops_count_visible_pairs():
    shape = phoenix.Shape(batch=1, layers=1, history=(3, 3), candidates=2, width=1)
    # A history of 3 rows, whose candidates see it and themselves; 20 + 2 * 4 and 20 heads.
    pairs, dense = 6 + 2 * 4, 5 * (28 + 20) * 128
    assert shape.flops("forward") == 4 * pairs * 20 * 128 + 2 * dense
    assert shape.flops("both") == 3.5 * 4 * pairs * 20 * 128 + 3 * 2 * dense

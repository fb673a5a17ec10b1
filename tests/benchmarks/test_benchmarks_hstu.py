"""The benchmark of HSTU's layers, on sizes for a CPU."""

import json

import numpy as np
import pytest

from benchmarks import hstu, jagged

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sweep", ["default", "drawn", "phoenix"])
def test_a_run_in_small(tmp_path, sweep):
    out = tmp_path / "hstu.json"
    name = f"{sweep} {hstu.SWEEPS[sweep][-1].label},"
    chosen = ["--sweep", sweep] if sweep == "default" else ["--points", name]
    assert hstu.BENCHMARK.main(["--out", str(out), "--quick", *chosen]) == 0
    points = json.loads(out.read_text())["points"]
    assert {point["direction"] for point in points} == set(hstu.SWEEPS[sweep][0].directions)
    for point in points:
        found = {p["name"]: p["ok"] for p in point["providers"]}
        assert found == dict.fromkeys(("ikbo", "xla", "masked"), True)


def test_pairs_of_masked_attention():
    shape = jagged.Masked(1, 6, heads=1, head_dim=1, targets=2, contextual=1, window=2)
    seen = np.zeros((6, 6), bool)
    for begin, end in (shape.intervals[:, :2].T, shape.intervals[:, 2:].T):
        seen |= (np.arange(6) >= begin[:, None]) & (np.arange(6) < end[:, None])
    assert shape.flops("forward") == 4 * seen.sum()
    assert shape.flops("backward") == 10 * seen.sum()


def test_useful_flops_count_visible_pairs():
    shape = jagged.Hstu(batch=1, layers=1, shortest=3, longest=3, width=2, heads=1, head_dim=4)
    # Three rows see six pairs; four groups of 4 columns come out of 2, and 2 of three groups.
    forward = 4 * 6 * 4 + 2 * 3 * (2 * 16 + 12 * 2)
    assert shape.flops("forward") == forward
    assert shape.flops("both") == 3 * forward


def test_useful_flops_of_phoenix_count_visible_pairs():
    shape = jagged.Phoenix(batch=1, layers=1, history=(3, 3), candidates=2, width=1)
    # A history of 3 rows, whose candidates see it and themselves; 20 + 2 * 4 and 20 heads.
    pairs, dense = 6 + 2 * 4, 5 * (28 + 20) * 128
    assert shape.flops("forward") == 4 * pairs * 20 * 128 + 2 * dense
    assert shape.flops("both") == 3.5 * 4 * pairs * 20 * 128 + 3 * 2 * dense

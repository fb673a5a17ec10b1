"""The benchmark of lookups and segment sums, on a CPU, which has no time on a device."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from benchmarks import look_up

RESULTS = pathlib.Path(look_up.__file__).parent / "results" / "look_up" / "h100.json"


def test_a_point_is_checked_and_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = look_up.Point(40, 5, 32, "bfloat16", False)
    monkeypatch.setattr(look_up, "drawn", lambda: [point])
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["look_up", "--points", "1", "--out", str(out)])
    look_up.main()
    assert "not timed" in capsys.readouterr().out
    (record,) = json.loads(out.read_text())["points"]
    assert record["is_equal"]
    assert record["error"] <= 0.5


def test_the_drawn_sizes_are_those_of_the_results_which_are_right() -> None:
    records = json.loads(RESULTS.read_text())["points"]
    points = [*look_up.drawn(), *look_up.CHOSEN]
    for point, record in zip(points, records, strict=True):
        assert look_up.describe(record).split()[:2] == [str(point.batch), str(point.users)]
        assert record["is_equal"]
        if point.dtype != "float32":
            assert record["error"] is None or record["error"] <= 0.5

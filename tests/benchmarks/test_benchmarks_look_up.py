"""The benchmark of lookups and segment sums, on a CPU, which has no time on a device."""

import json
import pathlib

from benchmarks import look_up, report

RESULTS = pathlib.Path(look_up.__file__).parent / "results" / "look_up" / "h100.json"


def test_points_are_checked_and_described(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "results.json"
    name = f"chosen {look_up.CHOSEN[0].label}"
    assert look_up.BENCHMARK.main(["--out", str(out), "--quick", "--points", name]) == 0
    (point,) = json.loads(out.read_text())["points"]
    names = {"gather", "copy", look_up.LOOK_UP, look_up.SEGMENT_SUM, "scatter"}
    assert {p["name"] for p in point["providers"] if p["ok"]} >= names


def test_a_wrong_sum_is_seen() -> None:
    sizes = look_up.Sizes(4, 2, 8, "float32", is_sorted=True)
    values, index = look_up.jnp.ones((4, 2)), look_up.np.asarray([0, 0, 1, 1])
    for number, ok in ((2.0, True), (2.1, False)):
        sums = look_up.jnp.full((2, 2), number)
        assert look_up._check_sums(sizes, index, values, sums).ok == ok


def test_results_are_those_of_the_sizes_and_can_be_drawn(tmp_path: pathlib.Path) -> None:
    records = json.loads(RESULTS.read_text())["points"]
    for point, record in zip(look_up.POINTS, records, strict=True):
        assert (record["sweep"], record["label"]) == (point.sweep, point.label)
    assert report.main([str(RESULTS), "--root", str(tmp_path)]) == 0
    assert (tmp_path / "docs" / "images" / "look_up.svg").exists()

"""What the report refuses to replace, and what its plots look like."""

import json
import re

import pytest
from test_benchmarks import synthetic

from benchmarks import headline, plots, records, report, scaling, tables, timing


def documents(root, results: dict, *arguments: str) -> tuple[int, str]:
    """What the report returns for the results, and the page of performance afterwards."""
    page = root / "docs/performance.md"
    if not page.exists():
        page.parent.mkdir()
        names = sorted(report.blocks(synthetic(), "README.md"))
        blocks = (f"<!-- begin generated: {n} -->\n<!-- end generated: {n} -->\n" for n in names)
        page.write_text("".join(blocks))
    file = root / "r.json"
    file.write_text(json.dumps(results))
    return report.main([str(file), "--root", str(root), *arguments]), page.read_text()


def changed(date: str, points: slice = slice(None)) -> dict:
    """The synthetic results, measured at another time, with some of their points."""
    found = synthetic()
    found["environment"]["date"] = date
    return found | {"points": found["points"][points]}


def test_report_replaces_chosen_blocks_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert documents(tmp_path, changed("2026-03-01T00:00:00+00:00"))[0] == 0
    capsys.readouterr()
    part = changed("2026-03-02T00:00:00+00:00", slice(0, 2))
    status, after = documents(tmp_path, part, "--only", "linear-compression-table")
    assert status == 0
    assert after.count("2026-03-02") == 1
    assert capsys.readouterr().out == "wrote: docs/performance.md\n"


def test_report_names_the_blocks_that_it_knows(tmp_path, capsys):
    with pytest.raises(SystemExit):
        documents(tmp_path, synthetic(), "--only", "nonsense")
    assert "linear-compression-table" in capsys.readouterr().err


def test_committed_results_are_right_and_make_the_tables():
    """Every table of the documents is what a file makes, or some files of one run together."""
    page = (report.ROOT / "docs/performance.md").read_text("utf-8")
    bodies = {match["name"]: match["body"] for match in report._BLOCK.finditer(page)}
    bodies.pop("headline")
    folder = report.ROOT / "benchmarks/results"
    files = {path.name: timing.read_results(path) for path in sorted(folder.glob("*.json"))}
    for results in files.values():
        assert results["environment"]["device"]
        assert not records.wrong(results)
    for parts in (
        [f"scaling-{sweep}-h100.json" for sweep in scaling.PROGRAMS],
        ["scaling-h200.json", "scaling-processes-h200.json"],
        [f"linear_compression-gradient{part}-h100.json" for part in ("", "-drawn")],
        [f"production-{op}-h200.json" for op in ("attention", "gdpa", "few-queries")],
    ):
        files[" ".join(parts)] = records.joined({part: files[part] for part in parts})
    made = [report.blocks(results, "docs/performance.md") for results in files.values()]
    missing = [name for name, body in bodies.items() if body not in [x.get(name) for x in made]]
    assert [name for name in missing if bodies[name] != tables.NOT_MEASURED] == []


# The table of the first page.


def test_the_first_page_has_the_recorded_times(tmp_path, capsys):
    assert headline.main(["--check"]) == 0
    (tmp_path / "docs").mkdir()
    for document in report.DOCUMENTS[:2]:
        text = (report.ROOT / document).read_text("utf-8")
        (tmp_path / document).write_text(text.replace("| `look_up` |", "| look |"))
    arguments = ["--root", str(tmp_path)]
    assert headline.main([*arguments, "--check"]) == 1
    assert headline.main(arguments) == 0
    assert headline.main([*arguments, "--check"]) == 0
    assert "wrote: README.md\nwrote: docs/performance.md" in capsys.readouterr().out


def test_a_row_of_the_first_page_compares_the_fastest_alternative_of_every_size():
    row = headline.Row("a", "drawn", "b", ("file",), "s", ("x", "y"))
    times = [{"ikbo": 2.0, "x": 8.0, "y": 4.0}, {"ikbo": 2.0, "x": 1.0}, {"ikbo": 2.0, "z": 1.0}]
    points = [
        {
            "sweep": "s",
            "label": "",
            "providers": [{"name": n, "median_ms": ms} for n, ms in t.items()],
        }
        for t in times
    ]
    environment = {"commit": "0123456789", "device": "NVIDIA H200"}
    file = {"op": "o", "environment": environment, "points": points}
    found = headline.cells(row, [file])
    assert found == (
        "a",
        "2 drawn, 1 slower",
        "b",
        "2.00\u00a0ms",
        "2.00\u00a0ms",
        "1.00×",
        "H200, `0123456`",
    )
    with pytest.raises(ValueError, match="file have no times of a, drawn"):
        headline.cells(row._replace(theirs=("w",)), [file])


# The plots, as text.


@pytest.mark.slow
def test_plots_use_words(tmp_path):
    pytest.importorskip("matplotlib")
    results = report.ROOT / "benchmarks/results"
    found = {}
    for name in ("linear_compression", "attention", "gdpa", "ranking-ratio"):
        for path in report.draw(timing.read_results(results / f"{name}-h200.json"), tmp_path):
            found[path.rpartition("/")[2]] = (tmp_path / path).read_text("utf-8")
    sweeps = found["linear_compression_sweeps.svg"]
    for words in plots.PANELS.values():
        assert f">{words}<" in sweeps
    assert ">cuDNN, queries grouped by hand<" in found["attention_lengths.svg"]
    assert "dotted: target" in found["gdpa_lengths.svg"]
    ratio = found["ranking_ratio.svg"]
    for number in ("5", "10", "20", "1,000", "2,000"):
        assert f">{number}<" in ratio
    for text in found.values():
        assert "grouped-cudnn" not in text
        assert "the bars" not in text
        assert "×" not in text
        # A page is some 9 inches wide: a wider picture would have smaller type.
        assert float(re.search(r'width="([\d.]+)pt"', text)[1]) <= 9.5 * 72


def test_legends_and_labels_lie_over_nothing(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    boxes, save = [], figures.Figure.savefig

    def watched(figure, *args, **options):
        figure.canvas.draw()
        panels = [axis.get_window_extent() for axis in figure.axes]
        tight = [axis.get_tightbbox() for axis in figure.axes]
        boxes.extend((a, b) for a in tight for b in tight if a is not b)
        boxes.extend((legend.get_window_extent(), p) for legend in figure.legends for p in panels)
        return save(figure, *args, **options)

    monkeypatch.setattr(figures.Figure, "savefig", watched)
    results = timing.read_results(report.ROOT / "benchmarks/results/ranking-ratio-h200.json")
    report.draw(results, tmp_path)
    assert len(boxes) == 2 + 2
    for one, other in boxes:
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_files_of_one_run_are_joined(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    whole = synthetic()
    parts = [changed("2026-03-02T03:04:05+00:00", slice(i, None, 2)) for i in (0, 1)]
    names = [str(tmp_path / f"{i}.json") for i in (0, 1)]
    for name, part in zip(names, parts, strict=True):
        with open(name, "w") as file:
            json.dump(part, file)
    found = records.joined(dict(zip(names, parts, strict=True)))
    assert len(found["points"]) == len(whole["points"])
    assert {p["label"] for p in found["points"]} == {p["label"] for p in whole["points"]}
    (tmp_path / "docs").mkdir()
    assert report.main([*names, "--root", str(tmp_path)]) == 0
    for change, words in (
        ({"environment": {**parts[1]["environment"], "driver": "abc"}}, "'driver': 'abc'"),
        ({"op": "gdpa"}, "gdpa"),
        ({"points": parts[0]["points"][:1]}, "twice"),
    ):
        with open(names[1], "w") as file:
            json.dump(parts[1] | change, file)
        with pytest.raises(SystemExit):
            report.main([*names, "--root", str(tmp_path)])
        assert words in capsys.readouterr().err


def test_joined_files_of_several_commits_name_them():
    first, second = synthetic(), synthetic()
    second["points"] = [point | {"label": f"other {point['label']}"} for point in second["points"]]
    second["environment"]["commit"] = "abcdef012345678"
    first["environment"]["commit"] = "0123456"
    found = records.joined({"first": first, "second": second})
    text = tables.provenance(found)
    assert "commits `0123456` and `abcdef012345`, " in text
    assert "commit `0123456`, " in tables.provenance(first)

"""Samples of cases: cases of a test are left out, never a whole test."""

from __future__ import annotations

import pathlib

import pytest
from test_time_limit import run

pytestmark = pytest.mark.slow

TESTS = """
import pytest

@pytest.mark.parametrize("x", range(7))
@pytest.mark.parametrize("y", ["a[1]", "b[1]"])
def test_of_cases(x, y):
    pass

def test_alone():
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("x", range(5))
def test_sampled(x):
    pass
"""


@pytest.mark.parametrize(
    ("options", "cases", "sampled"),
    [
        ("", [(y, x) for y in "ab" for x in range(7)], [0, 2, 4]),
        ("--one-in 1 --all-cases", [(y, x) for y in "ab" for x in range(7)], range(5)),
        ("--one-in 4", [("a", 0), ("a", 4), ("b", 1), ("b", 5)], [0, 4]),
        # Cases that -k leaves out are not counted.
        ("--one-in 4 -k not(a[1])", [("b", 0), ("b", 4)], [0, 4]),
        ("--one-in 100 --all-cases", [("a", 0)], [0]),
    ],
)
def test_every_test_has_its_first_case(tmp_path, options, cases, sampled) -> None:
    status, output = run(tmp_path, TESTS, "-p", "case_sample", "-v", *options.split())
    assert status == 0, output
    names = [x.split(" ")[0].partition("::")[2] for x in output.splitlines() if "::" in x]
    assert names == [
        *(f"test_of_cases[{y}[1]-{x}]" for y, x in cases),
        "test_alone",
        *(f"test_sampled[{x}]" for x in sampled),
    ]
    left_out = 14 + 5 - len(cases) - len(sampled)
    assert (f"{left_out} deselected" in output) == (left_out > 0)


def test_a_chosen_case_runs(tmp_path: pathlib.Path) -> None:
    status, output = run(tmp_path, TESTS, "-p", "case_sample", "-v", "-k", "test_sampled and 1]")
    assert status == 0, output
    assert "test_sampled[1] PASSED" in output


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_count_below_one_is_refused(tmp_path: pathlib.Path, count: str) -> None:
    status, output = run(tmp_path, TESTS, "-p", "case_sample", f"--one-in={count}")
    assert status == 4
    assert f"--one-in is {count}, expected at least 1" in output

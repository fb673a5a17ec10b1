"""`tools/mutants.py`: what is a mutant, which tests run for it, and what kills it."""

import contextlib
import json

import numpy as np

from tools import mutant_draw, mutant_runs, mutants

SOURCE = '''"""Text 1 < 2."""
LIMIT: tuple[int, 3] = 8

@cache(maxsize=4)
def within(x: "a < b", y=True):
    """Text."""
    é = "é" if not x else "-" + x; check(x, y)
    if x.a >= (y) and y is not None:
        raise ValueError(f"{x + 1} is no", 5)
    return max(x, y) - within(y, x, *x)
'''
CHANGES = """2:constant:8->9 5:constant:True->False 7:operator:not->
7:dropped:check(x, y)->pass 7:swapped:x, y->y, x 8:comparison:>=->> 8:operator:and->or
8:comparison:is not->is 9:dropped:raise ValueError(f"{x + 1} is no", 5)->pass
10:operator:-->+ 10:swapped:y, x->x, y"""


def test_changes_of_a_line_and_tests_that_run_it(tmp_path) -> None:
    found = mutant_draw.find("m.py", SOURCE)
    assert " ".join(x.id.removeprefix("m.py:") for x in found) == CHANGES.replace("\n", " ")
    assert 'é = "é" if x else "-"' in found[2].apply(SOURCE)
    (tmp_path / "m.py").write_text(SOURCE)
    arrays = {"n": 3, "meta": [[9.0], [1], [2], [3], [4]]}
    arrays["names"] = json.dumps(["slow", "fast[1]", "fast[2]", "near", "imports"])
    arrays["points"] = json.dumps([["m.py", 10], ["m.py", 8, 10], ["m.py", 2]])
    bits = [[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    np.savez(tmp_path / "cov.npz", bits=np.packbits(bits, axis=1), **arrays)
    coverage = mutant_runs.Coverage(tmp_path / "cov.npz", tmp_path)
    # An import runs line 2, in whichever test comes first.
    assert coverage.tests(found[0]) == ["fast[1]", "near", "slow", "fast[2]"]
    assert coverage.tests(found[-1]) == ["fast[1]", "slow", "fast[2]", "near"]


def test_a_seed_draws_lines_of_which_some_are_kernels(tmp_path) -> None:
    for path in ("ikbo_jax/ops/m.py", "ikbo_jax/pallas/flash/k.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(SOURCE)
    drawn, again, other = (mutant_draw.draw(seed, 5, 3, tmp_path) for seed in (1, 1, 2))
    assert drawn == again != other
    assert len({(x.path, x.line) for x in drawn}) == 5
    results = {drawn[0].id: {"suite": "rest"}, drawn[1].id: {"suite": "short"}}
    table = mutants.table([x.id for x in drawn], results, [drawn[2].id])
    assert "| `pallas/flash` | 3 | 1 | 1 (50%) | 2 (100%) |\n| all | 5 | 1 |" in table


class FakeTree:
    """The test "bad" always fails, and "kills" fails with the mutant."""

    failing: tuple[str, ...] = ("bad",)

    @contextlib.contextmanager
    def mutated(self, mutant):
        self.failing = ("bad", "kills")
        yield
        self.failing = ("bad",)

    def run(self, tests, seconds):
        failed = next((x for x in tests if x in self.failing), None)
        return mutant_runs.Outcome(tests[: tests.index(failed)] if failed else tests, failed)


def test_only_a_test_that_passes_without_the_mutant_kills_it() -> None:
    mutant, *_ = mutant_draw.find("m.py", SOURCE)
    for rest, verdict in (["b", "kills"], ("killed", "rest")), (["b"], ("survived", None)):
        parts = {"short": ["a", "bad", "before"], "rest": rest}
        options = {"budget": 9.0, "failing": set(), "passed": ["before"]}
        record = mutant_runs.judge(mutant, parts, FakeTree(), **options)
        assert (record["state"], record.get("suite")) == verdict
        assert (options["failing"], record["passed"]) == ({"bad"}, ["before", "a", "b"])

"""The autotuner's contest: who takes part, who wins, what is written, and what Ctrl-C leaves."""

import dataclasses
import itertools
import json
import random
from typing import Any
from unittest import mock

import pytest
from fake_tuning import ATTENTION, GDPA, Bench, row
from fake_tuning import LINEAR as DEFAULT

from ikbo_jax.autotuner import autotune, session
from ikbo_jax.autotuner.bench import Contender, Task
from ikbo_jax.problems import AttentionConfig, LinearCompressionProblem
from ikbo_jax.tuning import table, table_rows, user_cache

#: What no candidate of attention has.
PROPOSED_BY_NOBODY = AttentionConfig(balance=True, late_turns=True)
CANDIDATES = list(DEFAULT.configs())


def tune(problem: Any, bench: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The row that came out, and the lines of progress."""
    lines: list[str] = []
    found = autotune.tune(
        problem, run=bench, progress=lambda done, total, text: lines.append(text), **options
    )
    return found, lines


# Who takes part.


def test_xla_begins_and_halves_of_the_field_go_on_to_a_final_with_xla(builtin):
    builtin(row(DEFAULT, CANDIDATES[7]))
    times = {config: 0.4 + place / 1000 for place, config in enumerate(CANDIDATES)}
    bench = Bench({None: 1.0, **times, CANDIDATES[60]: 0.3})
    found, lines = tune(DEFAULT, bench)
    assert table_rows.config_from_json(found["config"]) == CANDIDATES[60]
    first, *heats, final = bench.tasks
    assert first.contenders == (None,)
    assert [len(task.contenders) for task in heats] == [110, 55, 28, 14, 8]
    windows = [task.window_s for task in heats]
    assert windows == [autotune.FIRST_WINDOW_S * 2**i for i in range(5)]
    assert final.contenders[0] is None
    assert CANDIDATES[60] in final.contenders
    assert (final.window_s, final.windows) == (autotune.FINAL_WINDOW_S, autotune.FINAL_WINDOWS)
    assert all(CANDIDATES[7] in task.contenders for task in (*heats, final))
    assert "best: block_m" in lines[-1]


def test_choice_that_no_candidate_is_takes_part_and_stays_if_it_is_fastest(builtin, cache_file):
    """The shipped row was measured with a configuration that the tuner cannot propose."""
    assert PROPOSED_BY_NOBODY not in list(ATTENTION.configs())
    builtin(row(ATTENTION, PROPOSED_BY_NOBODY))
    bench = Bench({None: 9.0, PROPOSED_BY_NOBODY: 0.9}, 1.0)
    found, lines = tune(ATTENTION, bench, limit=3)
    assert table_rows.config_from_json(found["config"], "attention") == PROPOSED_BY_NOBODY
    assert not cache_file.exists()
    assert "best: the table's choice" in lines[-1]
    assert "nothing written" in lines[-1]
    assert all(PROPOSED_BY_NOBODY in task.contenders for task in bench.tasks[1:])
    assert table.lookup(ATTENTION).source == "sm90.json"


def test_shipped_choice_takes_part_beside_a_row_of_the_user(builtin, cache_file):
    """A row that an earlier version wrote although it was slower is found out."""
    builtin(row(ATTENTION, PROPOSED_BY_NOBODY))
    slow = list(ATTENTION.configs())[5]
    user_cache.write_user_row(row(ATTENTION, slow))
    bench = Bench({None: 9.0, PROPOSED_BY_NOBODY: 0.9, slow: 1.1}, 1.0)
    tune(ATTENTION, bench, limit=2)
    choice = table.lookup(ATTENTION, device="NVIDIA H200")
    assert (choice.config, choice.source) == (PROPOSED_BY_NOBODY, "user cache")
    assert {slow, PROPOSED_BY_NOBODY, None} <= set(bench.tasks[-1].contenders)


def test_gdpa_without_a_measured_row_is_compared_with_xla(builtin, cache_file):
    """The op runs the default configuration there, which has to win, too."""
    builtin()
    default = GDPA.default_config()
    assert autotune.choices_of_table(GDPA) == (default, default)
    _, lines = tune(GDPA, Bench({default: 1.0}, 1.01), limit=2)
    assert not cache_file.exists()
    assert "nothing written" in lines[-1]
    tune(GDPA, Bench({default: 1.0}, 0.9), limit=2)
    assert table.lookup(GDPA).source == "user cache"


# Who wins.


@pytest.mark.parametrize(
    ("table_windows", "windows", "is_written"),
    [
        ([1.0, 1.0, 1.0], [0.99, 0.99, 0.99], True),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], [1.01, 1.01, 1.01], False),
        # 1 % faster, but windows differ by more.
        ([1.0, 1.02, 0.98], [0.99, 0.99, 0.99], False),
        ([1.0, 1.0, 1.0], [0.99, 0.97, 1.01], False),
        ([1.0, 1.02, 0.98], [0.9, 0.91, 0.89], True),
        # One window that something else slowed is no noise.
        ([1.0, 1.0, 9.0], [0.99, 0.99, 0.99], True),
    ],
)
def test_row_is_written_if_it_beats_the_table_by_more_than_the_noise(
    builtin, cache_file, table_windows, windows, is_written
):
    now, new = CANDIDATES[:2]
    builtin(row(DEFAULT, now))
    bench = Bench({None: 3.0, now: table_windows, new: windows}, 2.0)
    found, lines = tune(DEFAULT, bench, limit=4)
    assert table_rows.config_from_json(found["config"]) == (new if is_written else now)
    assert cache_file.exists() == is_written
    assert ("written to" in lines[-1]) == is_written
    assert ("nothing written" in lines[-1]) != is_written


def test_report_says_who_won_and_by_how_much(builtin):
    builtin(row(DEFAULT, CANDIDATES[0]))
    bench = Bench({None: 2.0, CANDIDATES[0]: 1.1, CANDIDATES[1]: 1.0}, 1.5)
    found, lines = tune(DEFAULT, bench, limit=3)
    assert (found["ms"], found["xla_ms"], found["device"]) == (1.0, 2.0, "NVIDIA H200")
    rate = 2 * 8192**3 / 1.7
    assert found["fraction"] == pytest.approx(DEFAULT.useful_flops / rate, rel=1e-4)
    assert lines[-1].startswith(f"best: {autotune.brief(CANDIDATES[1])}, 1 ms, 10.0% faster than")
    assert f"the table's choice ({autotune.brief(CANDIDATES[0])}), 1.1 ms" in lines[-1]
    assert "with a noise of 0.0%" in lines[-1]
    assert "XLA takes 2 ms, 2.00 times as long" in lines[-1]


def test_result_that_cannot_be_written_is_told(builtin, monkeypatch):
    builtin(row(DEFAULT, CANDIDATES[0]))
    full = mock.Mock(side_effect=OSError("no space left on device"))
    monkeypatch.setattr(user_cache, "write_user_row", full)
    with pytest.raises(OSError, match="best: block_m .* no space left on device"):
        tune(DEFAULT, Bench({None: 2.0, CANDIDATES[0]: 1.1}), limit=3)


def test_choice_that_fails_loses_to_whoever_works(builtin):
    builtin(row(DEFAULT, CANDIDATES[0]))
    bench = Bench({None: 1.0, CANDIDATES[0]: "wrong result: error 3, bound 0.1"}, 0.9)
    _, lines = tune(DEFAULT, bench, limit=2)
    assert table.lookup(DEFAULT).config == CANDIDATES[1]
    assert any("wrong result" in line for line in lines)
    assert "failed" in lines[-1]


def test_failing_candidates_are_reported_once_and_passed_over():
    first, second = CANDIDATES[:2]
    bench = Bench({None: 1.0, first: "wrong result: error 3, bound 0.1", second: 0.5}, 0.6)
    found, lines = tune(DEFAULT, bench, limit=3)
    assert table_rows.config_from_json(found["config"]) == second
    assert sum("wrong result" in line for line in lines) == 1


def test_small_problem_keeps_its_digits():
    tiny = LinearCompressionProblem((1, 1), (1, 1), 1, 8, "bfloat16")
    found, _ = tune(tiny, Bench({None: 0.0050123, CANDIDATES[0]: 1.0}, 0.0020123456), limit=2)
    assert 0 < found["fraction"] < 1e-6
    assert found["ms"] == 0.0020123
    assert table_rows.Row.from_json(found).problem == tiny
    assert len(f"{found['fraction']:e}".rstrip("0")) > 4


@pytest.mark.parametrize("seed", range(5))
def test_noisy_heats_leave_the_winner_within_one_percent(builtin, seed):
    """Windows scatter by 2 % at 10 ms, and less the longer they are."""
    builtin()
    rng = random.Random(seed)
    truth = {c: 0.37 * (1 + abs(rng.gauss(0, 0.1))) for c in CANDIDATES} | {None: 1.1}

    class Noisy(Bench):
        def windows(self, candidate: Contender, task: Task) -> list[float] | str:
            scatter = 0.02 * (autotune.FIRST_WINDOW_S / task.window_s) ** 0.5
            return [truth[candidate] * (1 + rng.gauss(0, scatter)) for _ in range(task.windows)]

    bench = Noisy({})
    found, _ = tune(DEFAULT, bench)
    best = min(truth.values())
    assert truth[table_rows.config_from_json(found["config"])] <= 1.01 * best
    seconds = sum(t.window_s * t.windows * len(t.contenders) for t in bench.tasks)
    # A window's warm-up takes as long again.
    assert 2.5 * seconds < 50


# What Ctrl-C leaves.


class Interrupting(Bench):
    """Ctrl-C in task number `place`, of which `windows` were measured of all but `without`."""

    def __init__(self, times, place, windows=2, without=()) -> None:
        super().__init__(times)
        self.place, self.measured, self.without = place, windows, without

    def __call__(self, task: Task) -> dict[str, Any]:
        answer = super().__call__(task)
        if len(self.tasks) - 1 < self.place:
            return answer
        for candidate, result in zip(task.contenders, answer["results"], strict=True):
            measured = 0 if candidate in self.without else self.measured
            result["ms"] = result["ms"][:measured]
        raise session.Interrupted(task, {k: answer[k] for k in ("results", "matmul_ms")})


@pytest.mark.parametrize("place", [1, 2, 6])
def test_interrupted_contest_writes_what_is_better_so_far(builtin, place):
    builtin(row(DEFAULT, CANDIDATES[0]))
    times = {None: 2.0, CANDIDATES[0]: 1.0, CANDIDATES[9]: 0.9}
    with pytest.raises(KeyboardInterrupt, match="interrupted; so far best: .* written to"):
        tune(DEFAULT, Interrupting(times | dict.fromkeys(CANDIDATES[20:], 3.0), place))
    choice = table.lookup(DEFAULT)
    # The others take half a millisecond.
    assert choice.config in CANDIDATES[1:20]
    assert choice.source == "user cache"


@pytest.mark.parametrize(
    ("ms", "sentence"),
    [
        (0.4, "best: the table's choice.*nothing written"),
        (0.505, r"1.0% faster .* noise of 2.0%.*nothing written"),
    ],
    ids=["slower", "within the least noise of a heat"],
)
def test_interrupted_contest_writes_nothing_that_is_not_better(builtin, cache_file, ms, sentence):
    builtin(row(DEFAULT, CANDIDATES[0]))
    with pytest.raises(KeyboardInterrupt, match=sentence):
        tune(DEFAULT, Interrupting({None: 2.0, CANDIDATES[0]: ms}, 2))
    assert not cache_file.exists()


@pytest.mark.parametrize(
    ("windows", "without"), [(1, ()), (2, (CANDIDATES[0],))], ids=["one window", "no choice"]
)
def test_interrupted_round_without_a_comparison_leaves_the_one_before(
    builtin, cache_file, windows, without
):
    builtin(row(DEFAULT, CANDIDATES[0]))
    times = {None: 2.0, CANDIDATES[0]: 1.0}
    with pytest.raises(KeyboardInterrupt, match="before the table's choice was timed"):
        tune(DEFAULT, Interrupting(times, 1, windows, without))
    assert not cache_file.exists()
    with pytest.raises(KeyboardInterrupt, match="written to"):
        tune(DEFAULT, Interrupting(times, 2, windows, without))
    assert cache_file.exists()


def test_interruption_between_rounds_counts_those_before(builtin, cache_file):
    builtin(row(DEFAULT, CANDIDATES[0]))
    bench = Bench({None: 2.0, CANDIDATES[0]: 1.0})
    calls = itertools.count()

    def run(task: Task) -> dict[str, Any]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return bench(task)

    with pytest.raises(KeyboardInterrupt, match="written to"):
        tune(DEFAULT, run)
    assert len(json.loads(cache_file.read_text())["rows"]) == 1


def test_user_row_of_the_same_choice_is_not_written_again(builtin, cache_file):
    builtin()
    original = dataclasses.replace(row(DEFAULT, CANDIDATES[1]), date="2020-01-01")
    user_cache.write_user_row(original)
    tune(DEFAULT, Bench({None: 2.0, CANDIDATES[1]: 0.4}), limit=3)
    assert table_rows.parse(cache_file.read_text()) == (original,)

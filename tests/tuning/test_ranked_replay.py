"""Measured times of several configurations of a problem, replayed through the ranking.

For each problem: the time of what `table.lookup` chooses, over the best that was timed. `LOSSES`
has the geometric mean and the worst of each group as of this writing; neither may rise by more than
rounding, so a change of a model or a rule cannot make what was measured slower unnoticed.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import measured_times
import pytest

from ikbo_jax.problems import (
    AttentionBackwardProblem,
    AttentionProblem,
    Config,
    FewQueriesConfig,
    LinearCompressionConfig,
    PackedCompressionConfig,
    Problem,
    ResidentCompressionConfig,
)
from ikbo_jax.problems.attention_backward_problem import small_configs
from ikbo_jax.problems.hopper import NUM_SMS
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table, table_rows

#: By group: problems, those of which the choice was timed, geometric mean, worst.
LOSSES = {
    "drawn compressions": (81, 73, 1.0238, 1.119),
    "compressions": (14, 8, 1.0042, 1.034),
    "large compressions": (25, 25, 1.0025, 1.063),
    "gdpa": (14, 14, 1.0, 1.0),
    "gradients of attention": (40, 40, 1.0017, 1.017),
    "small gradients of attention": (10, 10, 1.0, 1.0),
    "cuts of attention's tiles": (14, 14, 1.0, 1.0),
    "kernels of attention": (12, 12, 1.0, 1.0),
    "segment sums": (17, 17, 1.005, 1.052),
    "hot segment sums": (4, 4, 1.046, 1.133),
}
#: The choice's time, None if it was not timed, and all times.
Replayed = tuple[float | None, list[float | None]]


def chosen(problem: Problem) -> Config | None:
    return table.lookup(problem, device="NVIDIA H100", with_user_rows=False).config


def drawn_compressions() -> Iterator[Replayed]:
    for problem, times in measured_times.drawn_compressions():
        yield times.get(chosen(problem)), [*times.values()]


def compressions() -> Iterator[Replayed]:
    for problem, xla, row, packed, resident in measured_times.COMPRESSIONS.values():
        us = None
        match chosen(problem):
            case None:
                us = xla
            case LinearCompressionConfig():
                us = row
            case PackedCompressionConfig() as x:
                us = packed.get((x.block_n, x.block_m, x.num_stages, x.cluster))
            case ResidentCompressionConfig() as x:
                times = {ResidentCompressionConfig(*y): us for y, us in resident.items()}
                us = times.get(x)
        yield us, [xla, row, *packed.values(), *resident.values()]


def large_compressions() -> Iterator[Replayed]:
    kinds = PackedCompressionConfig, LinearCompressionConfig, ResidentCompressionConfig
    for problem, times in measured_times.LARGE_COMPRESSIONS.items():
        yield times[kinds.index(type(chosen(problem)))], [*times]


def gdpas() -> Iterator[Replayed]:
    for problem, times in measured_times.GDPA.values():
        yield times.get(chosen(problem)), [*times.values()]


def gradients() -> Iterator[Replayed]:
    for (users, rows, heads, *widths), times in measured_times.of_gradients("large").items():
        q_len = 4 if rows < 64 else 16
        sizes = (users * rows // q_len, users, q_len, widths[0], heads, heads, widths[1])
        problem = AttentionBackwardProblem(*sizes, "bfloat16")
        assert not small_configs(problem)
        config = chosen(problem)
        fields = config.d_query, config.block_q, config.stages, config.kv_slots
        yield times.get(fields), [*times.values()]


def small_gradients() -> Iterator[Replayed]:
    for sizes, times in measured_times.of_gradients("small").items():
        problem = AttentionBackwardProblem(*sizes, "bfloat16")
        config = chosen(problem)
        blocks = -(-problem.rows // config.block_q)
        # More parts of as many blocks of queries are no faster.
        like = [
            times.get((config.d_query, config.block_q, splits), math.inf)
            for splits in range(config.splits, NUM_SMS // problem.items + 1)
            if -(-blocks // splits) == -(-blocks // config.splits)
        ]
        yield min(like), [*times.values()]


def cuts() -> Iterator[Replayed]:
    for sizes, (few, spanning, balanced, one_user) in measured_times.of_attention("cut").items():
        config = chosen(AttentionProblem(*sizes, "bfloat16"))
        if isinstance(config, FewQueriesConfig):
            us = few
        else:
            us = one_user if config.one_user else balanced if config.balance else spanning
        yield us, [few, spanning, balanced, one_user]


def kernels() -> Iterator[Replayed]:
    for sizes, (few, tile) in measured_times.of_attention("kernel").items():
        config = chosen(AttentionProblem(*sizes, "bfloat16"))
        yield few if isinstance(config, FewQueriesConfig) else tile, [few, tile]


def segment_sums(timed: Mapping[str, measured_times.SegmentSums]) -> Iterator[Replayed]:
    """Beside the kernels alone: XLA's scatter is not the same in every run."""
    for problem, times in timed.values():
        yield times.get(chosen(problem)), [us for config, us in times.items() if config]


GROUPS = (
    *(drawn_compressions, compressions, large_compressions, gdpas, gradients, small_gradients),
    *(cuts, kernels),
    *(
        functools.partial(segment_sums, x)
        for x in (measured_times.BOTH_SUMS, measured_times.HOT_SUMS)
    ),
)


@pytest.mark.parametrize(("name", "group"), list(zip(LOSSES, GROUPS, strict=True)))
def test_choices_are_as_near_the_fastest_as_they_were(name, group):
    replayed = list(group())
    losses = [us / min(x for x in all_us if x) for us, all_us in replayed if us is not None]
    sizes, timed, mean, worst = LOSSES[name]
    assert (len(replayed), len(losses)) == (sizes, timed)
    assert math.prod(losses) ** (1 / len(losses)) <= mean
    assert max(losses) <= worst


def test_sums_that_xla_scatters_faster():
    """Three sums of rows of at most 96 bytes; the kernel's are the same in every run."""
    slower = {
        name: times[chosen(problem)] / times[None]
        for name, (problem, times) in measured_times.SUMS.items()
        if times[chosen(problem)] > times.get(None, math.inf)
    }
    assert slower.keys() == {"b16k", "b64k", "b64k_16B"}
    assert max(slower.values()) < 1.42


@pytest.mark.parametrize("row", table_rows.builtin_rows(), ids=table_rows.Row.describe)
def test_rows_pay(row):
    """A row that the ranking would choose anyway is not needed."""
    assert ranked(row.problem)[0].config != row.config
    assert table.lookup(row.problem, with_user_rows=False).config == row.config


def test_a_ranking_is_made_once(monkeypatch):
    problem = dataclasses.replace(next(measured_times.drawn_compressions())[0], m=77)
    first = ranked(problem)
    monkeypatch.setattr(type(problem), "rank", None)
    assert ranked(dataclasses.replace(problem)) is first
    times = [way.us for way in first if way.us is not None]
    assert times == sorted(times)

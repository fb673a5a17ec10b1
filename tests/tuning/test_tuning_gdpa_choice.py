"""Which kernel and configuration the rules of GDPA's forward pass choose, beside measured times."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig, short_gdpa
from ikbo_jax.problems.gdpa_sizes import SOFTMAX
from ikbo_jax.tuning import table

#: The fastest choice may be missed by so much.
TOLERANCE = 1.05


class Sizes(NamedTuple):
    """Sequences, all queries and keys, heads and their width, bounds."""

    batch: int
    q_rows: int
    kv_rows: int
    heads: int
    head_dim: int
    bounds: tuple[int, int]
    activation: str
    is_broadcast: bool = False
    dtype: str = "bfloat16"

    @property
    def problem(self) -> GdpaProblem:
        approx = "tanh" if self.activation in ("gelu_tanh", "silu") else None
        return GdpaProblem(
            *(self.batch, self.batch, self.q_rows, self.kv_rows, self.heads, self.heads),
            *(self.head_dim, self.dtype, (self.activation,), approx, self.is_broadcast),
            *self.bounds,
        )


def found(block_kv: int, ctas: int, *, rows: int = 64, slots: int = 2) -> ShortGdpaConfig:
    return ShortGdpaConfig(rows, block_kv, slots, ctas, finds_tiles=True)


def listed(block_kv: int, ctas: int, *, rows: int = 64, slots: int = 2) -> ShortGdpaConfig:
    return ShortGdpaConfig(rows, block_kv, slots, ctas)


JAGGED = {"skip_empty": True, "half_blocks": True}
DEEP = GdpaConfig(64, 4, 4, 3, **JAGGED)  # what near rows of the table have at H = 128
LATE = GdpaConfig(128, 2, 2, 3, late_turns=True, **JAGGED)
FLAT = GdpaConfig(64, 2, 2, 3, late_turns=True, **JAGGED)
SEEDS = dataclasses.replace(LATE, half_blocks=False)


def by_tickets(config: GdpaConfig, **changes: bool) -> GdpaConfig:
    return dataclasses.replace(config, tickets=True, **changes)


# us: sums of kernels, times by CUPTI, medians of 12, the least of two rounds and of four H200s;
# 2026-11-26, jax 0.11.2. Both fastest ones of every kind that was timed.
TIMES = {
    "short_69": (
        Sizes(69, 2161, 2161, 4, 64, (63, 63), "silu"),
        {found(64, 4): 4.08, found(32, 4): 4.48, found(64, 2): 4.62, listed(64, 4): 8.03},
    ),
    "short_698": (
        Sizes(698, 22300, 22300, 1, 64, (64, 64), "silu"),
        {found(64, 4): 6.64, found(64, 2, slots=3): 6.77, found(32, 4): 7.44, listed(64, 4): 10.82},
    ),
    "short_1115_softmax": (
        Sizes(1115, 35680, 35680, 2, 64, (64, 64), "softmax"),
        {found(64, 3): 16.13, found(32, 4): 17.26, found(64, 2): 18.37, listed(64, 4): 20.80},
    ),
    "short_1654": (
        Sizes(1654, 52479, 52479, 2, 64, (64, 64), "silu"),
        {found(64, 3): 19.34, found(32, 4): 21.28, found(64, 2): 21.94, listed(64, 4): 24.75},
    ),
    "uniform_93": (
        Sizes(133, 6200, 6200, 4, 64, (91, 91), "gelu_tanh"),
        {found(96, 2): 9.23, found(64, 3): 9.90, listed(64, 4): 11.28, by_tickets(FLAT): 15.36},
    ),
    "uniform_152": (
        Sizes(184, 14347, 14347, 1, 64, (149, 149), "gelu_tanh"),
        {
            **{found(64, 3): 7.70, found(96, 2): 8.96, found(128, 2): 9.49, found(64, 2): 9.70},
            **{listed(64, 4): 10.11, FLAT: 11.84, by_tickets(FLAT): 12.02},
        },
    ),
    "uniform_278": (
        Sizes(178, 25368, 25368, 1, 64, (272, 272), "silu"),
        {
            **{found(96, 2): 11.65, found(128, 2): 12.43, found(64, 3): 13.84},
            **{listed(64, 4): 12.29, FLAT: 14.70, by_tickets(FLAT): 14.96},
        },
    ),
    "log_normal_88": (
        Sizes(88, 14479, 14479, 1, 64, (2048, 2048), "silu"),
        {
            **{found(128, 2): 20.19, found(64, 3): 28.69, listed(64, 4): 26.74},
            **{LATE: 23.97, by_tickets(LATE): 24.19, GdpaConfig(128, 2, 3, 2, **JAGGED): 24.03},
        },
    ),
    "log_normal_81": (
        Sizes(81, 13462, 13462, 2, 128, (2048, 2048), "gelu_tanh"),
        {
            **{by_tickets(LATE): 32.77, LATE: 38.05, by_tickets(DEEP): 35.58, DEEP: 38.70},
            **{listed(64, 2): 38.53, found(64, 2): 47.57, found(128, 1): 48.82},
        },
    ),
    "log_normal_244": (
        Sizes(244, 40633, 40633, 1, 128, (2048, 2048), "gelu_tanh"),
        {
            **{by_tickets(LATE): 34.45, LATE: 41.38, by_tickets(DEEP): 36.69, DEEP: 42.64},
            **{listed(64, 2): 44.88, found(64, 2): 73.73, found(128, 1): 64.00},
        },
    ),
    "pffn_94": (
        Sizes(82, 13674, 7708, 2, 128, (2048, 94), "softmax"),
        {
            **{found(48, 2): 10.93, found(96, 1): 12.42, listed(96, 1): 15.47},
            **{GdpaConfig(128, 2, 2, 3, late_turns=True): 16.86, GdpaConfig(64, 4, 4, 2): 17.42},
        },
    ),
    "pffn_31": (
        Sizes(1173, 195581, 36363, 4, 128, (2048, 31), "softmax", dtype="float16"),
        {
            **{listed(32, 3): 125.34, found(32, 2): 134.96, listed(32, 3, rows=32): 193.55},
            **{GdpaConfig(128, 2, 2, 3, late_turns=True): 185.57, GdpaConfig(128, 2, 3, 2): 268.27},
        },
    ),
    "pma_23": (
        Sizes(140, 3220, 24222, 8, 64, (23, 2048), "gelu_tanh", is_broadcast=True),
        {
            **{found(128, 2, rows=32): 25.60, found(64, 3, rows=32): 32.34},
            **{listed(64, 4, rows=32): 37.01, found(32, 4, rows=32, slots=3): 40.70},
            **{by_tickets(DEEP, late_turns=True): 29.97, by_tickets(LATE): 30.88, LATE: 39.28},
        },
    ),
    "pma_19": (
        Sizes(1964, 37316, 323562, 2, 64, (19, 2048), "relu", is_broadcast=True),
        {
            **{found(128, 2, rows=32): 64.88, found(64, 3, rows=32): 69.70},
            **{listed(64, 4, rows=32): 68.53, found(32, 3, rows=32, slots=3): 73.31},
            **{by_tickets(SEEDS): 78.74, SEEDS: 81.19},
        },
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_the_choice_is_nearly_the_fastest_that_was_timed(name):
    sizes, times = TIMES[name]
    assert all(config.illegal_reason(sizes.problem) is None for config in times)
    chosen = table.lookup(sizes.problem, with_user_rows=False).config
    assert chosen in times, f"{chosen} was not timed"
    assert times[chosen] <= TOLERANCE * min(times.values())
    assert next(iter(sizes.problem.candidate_configs())) == min(times, key=times.__getitem__)


def changed(name: str, **changes: object) -> GdpaProblem:
    return dataclasses.replace(TIMES[name][0].problem, **changes)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        # Heads or widths that fill the SMs, no bounds, longer ones, full sequences.
        (changed("uniform_152", q_heads=4, kv_heads=4), GdpaConfig),
        (changed("uniform_152", head_dim=128), GdpaConfig),
        (changed("uniform_152", max_seqlen_q=None), GdpaConfig),
        (changed("log_normal_88", max_seqlen_kv=4096), GdpaConfig),
        (changed("log_normal_88", q_rows=88 * 2048, kv_rows=88 * 2048), GdpaConfig),
        # Sequences of queries that share keys; fewer than there are of keys.
        (changed("uniform_152", batch_kv=100), GdpaConfig),
        (changed("uniform_152", batch_kv=185), GdpaConfig),
        # Many queries of each sequence share few keys.
        (changed("pffn_94", q_rows=82 * 257), GdpaConfig),
        (changed("pffn_94", kv_rows=82 * 97, max_seqlen_kv=97), GdpaConfig),
        (changed("pffn_94", max_seqlen_q=None), ShortGdpaConfig),
        (changed("pffn_94", max_seqlen_q=None, max_seqlen_kv=None), GdpaConfig),
        (changed("pffn_94", head_dim=256), GdpaConfig),
        # Seeds.
        (changed("pma_23", q_rows=140 * 64), ShortGdpaConfig),
        (changed("pma_23", q_rows=140 * 65), GdpaConfig),
        (changed("pma_23", head_dim=128), GdpaConfig),
        (changed("pma_23", max_seqlen_kv=None), ShortGdpaConfig),
    ],
)
def test_where_the_kernel_for_short_sequences_is_the_default(problem, expected):
    assert isinstance(table.lookup(problem, with_user_rows=False).config, expected)


def test_without_pairs_of_sequences_tiles_are_listed():
    """A sequence of keys without queries; more sequences than are found quickly."""
    rows = {"q_rows": 2049 * 32, "kv_rows": 2049 * 32}
    for problem in (
        changed("short_698", batch_kv=699),
        changed("short_698", batch=2049, batch_kv=2049, **rows),
    ):
        config = problem.default_config()
        assert config.tile_rows == 64
        assert not config.finds_tiles


@given(
    batch=st.integers(1, 4000),
    more=st.sampled_from([0, 0, 1]),
    q_mean=st.integers(0, 300),
    kv_mean=st.one_of(st.integers(0, 300), st.integers(0, 20_000)),
    tail=st.sampled_from([None, 1, 2, 12]),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 8)]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    activation=st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "softmax", "hardswish"]),
    approx=st.sampled_from([None, "tanh"]),
    is_broadcast=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_the_default_is_legal_and_keeps_its_registers(
    batch, more, q_mean, kv_mean, tail, heads, head_dim, activation, approx, is_broadcast, dtype
):
    """Where the kernel for short sequences is preferred, it is the first candidate, and an SM holds
    the CTAs that it asks for."""
    problem = GdpaProblem(
        *(batch, batch + more, batch * q_mean, batch * kv_mean, *heads, head_dim, dtype),
        *((activation,), approx, is_broadcast),
        *((None, None) if tail is None else (tail * q_mean, tail * kv_mean)),
    )
    candidates = list(problem.candidate_configs())
    assert len(candidates) == len(set(candidates)) <= 16
    assert all(config.illegal_reason(problem) is None for config in candidates)
    config = candidates[0]
    assert problem.default_config() == config
    assert isinstance(config, ShortGdpaConfig) == problem.prefers_short
    if isinstance(config, ShortGdpaConfig):
        assert config.ctas == short_gdpa.most_ctas(config, problem)
        assert short_gdpa.registers(config, problem) <= short_gdpa.MAX_REGISTERS
        assert "the kernel for short sequences (" in problem.default_rule()
    elif config.tickets:
        assert activation != SOFTMAX

"""Generalised dot-product attention in the dispatch table and in the autotuner."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest
from fake_tuning import HERE, row
from hypothesis import given
from hypothesis import strategies as st
from measured_times import GDPA
from problems_gdpa import Shape

import ikbo_jax as ikbo
from ikbo_jax.autotuner import autotune
from ikbo_jax.cases import gdpa
from ikbo_jax.cases.gdpa import Case
from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig, short_gdpa
from ikbo_jax.problems import gdpa as gdpa_problems
from ikbo_jax.problems.gdpa_sizes import SOFTMAX
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table, user_cache

ROWS = 1152 * 1024
DEFAULT = GdpaProblem(
    *(1152, 1152, ROWS, ROWS, 4, 4, 128, "bfloat16"), ("gelu_tanh",), "tanh", False, 1024, 1024
)
TINY = GdpaProblem(
    *(5, 5, 5 * 7, 5 * 7, 2, 1, 16, "float32"), ("relu", "gelu_tanh"), "tanh", False, 12, 12
)
#: Keys of a sequence that stay in shared memory.
SHORT = dataclasses.replace(DEFAULT, kv_rows=1152 * 256, max_seqlen_kv=256)


def at(**changes: Any) -> GdpaProblem:
    return dataclasses.replace(DEFAULT, **changes)


# Candidates.


def test_what_was_measured_fastest_is_timed_first():
    three_slots = GdpaConfig(128, 2, 2, 3)
    assert DEFAULT.default_config() == dataclasses.replace(three_slots, late_turns=True)
    assert SHORT.default_config() == dataclasses.replace(three_slots, run=8)
    for problem in (DEFAULT, SHORT, at(head_dim=64), at(kv_rows=1152 * 7)):
        assert len(list(problem.configs())) > 8
    candidates = list(DEFAULT.configs())
    assert {config.late_turns for config in candidates[:4]} == {False, True}
    assert {(config.run, config.skip_empty) for config in candidates} == {(1, False)}
    assert {c.run for c in SHORT.configs()} == {1, 2, 4, 8}
    half = at(max_seqlen_q=2048, max_seqlen_kv=2048)
    assert half.default_config() == GdpaConfig(
        128, 2, 2, 3, late_turns=True, skip_empty=True, half_blocks=True
    )


# Lookup.


@pytest.mark.parametrize(
    ("head_dim", "activations", "expected"),
    [
        (64, ("gelu",), False),
        (64, ("gelu_tanh", "silu", "gelu_tanh", "silu"), False),
        (64, ("silu",), True),
        (96, ("gelu",), False),
        (96, ("gelu", "relu", "gelu", "relu"), False),
        (96, ("relu",), True),
        (128, ("gelu",), True),
        (256, ("relu",), False),
    ],
)
def test_half_blocks_that_may_serialise_are_not_the_default(head_dim, activations, expected):
    measured = at(head_dim=head_dim, q_rows=ROWS // 2, kv_rows=ROWS // 2)
    config = measured.default_config()
    assert config.half_blocks
    problem = dataclasses.replace(measured, activations=activations, approx=None)
    wanted = dataclasses.replace(config, half_blocks=expected)
    assert problem.default_config() == wanted
    candidates = list(problem.configs())
    assert len(candidates) == len(set(candidates))


@pytest.mark.parametrize("is_users", [True, False], ids=["user cache", "sm90.json"])
def test_kernel_runs_by_itself_with_and_without_a_measured_row(is_users, builtin, seems_hopper):
    arrays = problems_gdpa.make_arrays(Shape((300, 20), (300, 20), 2, 1, 64))
    attend = functools.partial(ikbo.gdpa, activation="relu", max_seqlen_q=300)
    builtin()
    (plan,) = ikbo.explain(attend, *arrays[:5]).plans
    assert (plan.implementation, plan.config) == ("mosaic_gpu", plan.problem.default_config())
    assert plan.reason.startswith("default configuration: no measured row is near; the kernel for ")
    measured = dataclasses.replace(plan.problem, q_rows=330, kv_rows=400)
    config = plan.problem.configs()[1]
    if is_users:
        user_cache.write_user_row(row(measured, config, device=HERE))
    else:
        builtin(row(measured, config, device=HERE))
    (plan,) = ikbo.explain(attend, *arrays[:5]).plans
    assert (plan.implementation, plan.config) == ("mosaic_gpu", config)
    assert f"{'user cache' if is_users else 'sm90.json'}, nearest row" in plan.reason
    (plan,) = ikbo.explain(functools.partial(attend, activation="softmax"), *arrays[:5]).plans
    assert (plan.implementation, plan.config) == ("mosaic_gpu", plan.problem.default_config())
    assert "no measured row" in plan.reason


def test_short_sequences_have_a_kernel_of_their_own(builtin, seems_hopper):
    """By the bounds; without bounds, if the mean is half as long."""
    builtin(row(at(head_dim=64)))
    arrays = problems_gdpa.make_arrays(Shape((30, 20), (30, 20), 2, 1, 64))
    attend = functools.partial(ikbo.gdpa, activation="relu", max_seqlen_q=40, max_seqlen_kv=40)
    (plan,) = ikbo.explain(attend, *arrays[:5]).plans
    assert (plan.implementation, plan.config) == (
        "mosaic_gpu",
        ShortGdpaConfig(64, 48, ctas=4, finds_tiles=True),
    )
    assert "the kernel for short sequences (up to 96 keys)" in plan.reason
    bounds = {"q_rows": 4096 * 32, "kv_rows": 4096 * 32, "batch": 4096, "batch_kv": 4096}
    short = at(**bounds, head_dim=64, max_seqlen_q=64, max_seqlen_kv=64)
    assert short.default_config() == ShortGdpaConfig(64, 64, ctas=4)
    longer = dataclasses.replace(short, max_seqlen_kv=97)
    shared = dataclasses.replace(short, batch_kv=15, kv_rows=15 * 64)
    for problem in (longer, shared, dataclasses.replace(short, head_dim=256)):
        assert isinstance(problem.default_config(), GdpaConfig)
    # A row of the same class names the kernel, and is read as it was written.
    user_cache.write_user_row(row(short, ShortGdpaConfig(64, 32, 3, 2)))
    assert table.lookup(short).config == ShortGdpaConfig(64, 32, 3, 2)


def first(problem: GdpaProblem) -> Any:
    """The default configuration, also after a change of a limit."""
    return next(iter(problem.rank())).config


def test_ctas_find_their_tiles_by_default(monkeypatch):
    """Up to a number of sequences, if there is one of keys for each of queries."""
    bounds = {"q_rows": 600 * 32, "kv_rows": 600 * 32, "batch": 600, "batch_kv": 600}
    short = at(**bounds, head_dim=64, max_seqlen_q=64, max_seqlen_kv=64)
    found, listed, *_ = short_gdpa.candidate_configs(short)
    assert (found.finds_tiles, listed.finds_tiles) == (True, False)
    assert first(short) == found
    monkeypatch.setattr(short_gdpa, "MOST_FOUND", 599)
    assert first(short) == listed
    assert list(short_gdpa.candidate_configs(short))[1] == found
    monkeypatch.undo()
    shared = dataclasses.replace(short, batch_kv=599)
    assert not any(c.finds_tiles for c in short_gdpa.candidate_configs(shared))
    # Finding takes memory, with which an SM holds two CTAs instead of three.
    many = {"q_rows": 2000 * 32, "kv_rows": 2000 * 32, "batch": 2000, "batch_kv": 2000}
    wide = at(**many, head_dim=96, q_heads=8, kv_heads=8, max_seqlen_q=32, max_seqlen_kv=32)
    assert not first(wide).finds_tiles


def test_tickets_by_default(builtin, monkeypatch):
    """Where lengths differ by far and rounds are few; then no near row without them counts."""
    lengths = {"q_rows": 244 * 167, "kv_rows": 244 * 167, "batch": 244, "batch_kv": 244}
    tailed = at(**lengths, q_heads=1, kv_heads=1, max_seqlen_q=2048, max_seqlen_kv=2048)
    near = dataclasses.replace(tailed, batch=250, batch_kv=250)
    plain = GdpaConfig(128, 2, 2, 3, skip_empty=True, half_blocks=True)
    builtin(row(tailed, plain))
    assert first(tailed).tickets
    assert table.lookup(tailed).config == plain  # what was measured for these sizes
    assert table.lookup(near).config == first(near)
    assert dataclasses.replace(plain, tickets=True) in near.configs()
    builtin(row(tailed, dataclasses.replace(plain, tickets=True)))
    assert table.lookup(near).config == dataclasses.replace(plain, tickets=True)
    monkeypatch.setattr(gdpa_problems, "TICKETS_MOST_ROUNDS", 0)
    assert not first(tailed).tickets
    monkeypatch.undo()
    softmax = dataclasses.replace(tailed, activations=("softmax",))
    uniform = dataclasses.replace(tailed, max_seqlen_kv=512)
    full = dataclasses.replace(tailed, q_heads=40, kv_heads=40)
    assert not any(first(p).tickets for p in (softmax, uniform, full))
    rounds = [  # of a launch of 132 SMs: 0.8, 1.4
        dataclasses.replace(tailed, q_rows=n * 167, kv_rows=n * 167, batch=n, batch_kv=n)
        for n in (60, 100)
    ]
    assert [first(p).tickets for p in rounds] == [False, True]


def test_few_queries_of_all_sequences_have_three_slots(seems_hopper):
    """Where sequences share keys, which the kernel for short sequences does not load once for all.

    The op makes the problem here: its rows are the result's, not the seeds.
    """
    for seeds, sequences in ((23, 140), (64, 9), (65, 140)):
        keys, index = (200, 100) * sequences, (*range(2 * sequences), 0)
        arrays = problems_gdpa.make_arrays(Shape(seeds, keys, 2, 2, 64, q_to_kv=index))
        attend = functools.partial(
            ikbo.gdpa, activation="relu", broadcast_q=True, max_seqlen_kv=300
        )
        (plan,) = ikbo.explain(attend, *arrays[:5], q_to_kv=arrays.q_to_kv).plans
        assert plan.config.q_slots == 3


@given(
    rows=st.sampled_from([16, 32, 64]),
    block_kv=st.sampled_from([16, 48, 64, 128]),
    slots=st.sampled_from([2, 3, 4]),
    head_dim=st.sampled_from([64, 96, 128]),
    activation=st.sampled_from(["relu", "gelu", "silu", "softmax"]),
)
def test_ctas_of_an_sm_fit_its_memory_and_registers(rows, block_kv, slots, head_dim, activation):
    problem = at(head_dim=head_dim, activations=(activation,), approx=None)
    config = ShortGdpaConfig(rows, block_kv, slots, 1)
    if config.illegal_reason(problem) is None:
        most = short_gdpa.most_ctas(config, problem)
        assert most * config.smem_bytes(head_dim) <= 227 * 1024
        reason = dataclasses.replace(config, ctas=most + 1).illegal_reason(problem)
        assert f"registers for {most} CTAs" in reason
    else:
        assert "shared memory" in config.illegal_reason(problem)


# The choice, beside measured times.


def changed(name: str, **changes: object) -> GdpaProblem:
    return dataclasses.replace(GDPA[name][0], **changes)


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
    candidates = list(problem.configs())
    assert len(candidates) == len(set(candidates)) <= 16
    assert all(config.illegal_reason(problem) is None for config in candidates)
    config = candidates[0]
    assert problem.default_config() == config
    is_short = short_gdpa.why_preferred(problem) is not None
    assert isinstance(config, ShortGdpaConfig) == is_short
    if isinstance(config, ShortGdpaConfig):
        assert config.ctas == short_gdpa.most_ctas(config, problem)
        assert short_gdpa.registers(config, problem) <= short_gdpa.MAX_REGISTERS
        assert "the kernel for short sequences (" in ranked(problem)[0].why
    elif config.tickets:
        assert activation != SOFTMAX


# Trials.


@given(
    sequences=st.integers(1, 300),
    mean=st.integers(1, 50),
    extra=st.integers(0, 200),
    rest=st.integers(0, 299),
)
def test_sequences_fill_the_rows_and_keep_their_bound(sequences, mean, extra, rest):
    rows = sequences * mean + rest % sequences
    longest = -(-rows // sequences) + extra
    offsets = gdpa.spread_offsets(rows, sequences, longest)
    lengths = np.diff(offsets)
    assert (offsets[0], offsets[-1], len(lengths)) == (0, rows, sequences)
    assert 1 <= lengths.min() <= lengths.max() <= longest
    np.testing.assert_array_equal(gdpa.spread_offsets(rows, sequences, longest), offsets)
    equal = np.diff(gdpa.spread_offsets(rows, sequences, None))
    assert equal.max() - equal.min() <= 1


def test_half_filled_sequences_have_all_lengths():
    lengths = np.diff(gdpa.spread_offsets(1152 * 512, 1152, 1024))
    assert lengths.min() <= 2
    assert lengths.max() >= 1022
    assert np.abs(np.diff(np.sort(lengths))).max() <= 2
    assert (np.diff(lengths) < 0).any()
    full = np.diff(gdpa.spread_offsets(1152 * 1024, 1152, 1024))
    assert set(full.tolist()) == {1024}


def test_useful_flops_count_the_pairs_of_the_operands():
    assert Case(DEFAULT).useful_flops == DEFAULT.useful_flops(1152 * 1024**2)
    problem = dataclasses.replace(TINY, batch_kv=3, kv_rows=24)
    operands = Case(problem).inputs()
    assert operands.q_to_kv.tolist() == sorted(operands.q_to_kv.tolist())
    pairs = sum(
        q * int(jnp.diff(operands.cu_seqlens_kv)[kv])
        for q, kv in zip(jnp.diff(operands.cu_seqlens_q).tolist(), operands.q_to_kv, strict=True)
    )
    assert Case(problem).useful_flops == problem.useful_flops(pairs)


# The autotuner.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_seqlen_q": 100}, f"{ROWS} rows of queries do not fit 1152 sequences of at most 100"),
        ({"max_seqlen_kv": 9}, f"{ROWS} rows of keys do not fit 1152 sequences of at most 9"),
        ({"batch": 0}, f"{ROWS} rows of queries do not fill 0 sequences"),
        ({"kv_rows": 3}, "3 rows of keys do not fill 1152 sequences"),
        ({"activations": ("softmax", "relu", "relu", "relu")}, "softmax in all heads or in none"),
        ({"dtype": "float32"}, "the inputs are float32"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(changes, reason, cache_dir):
    with pytest.raises(ValueError, match=reason):
        autotune.tune(at(**changes), run=pytest.fail)
    assert not cache_dir.exists()

"""Which kernel and configuration the rules of GDPA's forward pass choose, beside measured times."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_times import GDPA

from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig, short_gdpa
from ikbo_jax.problems.gdpa_sizes import SOFTMAX
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table


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

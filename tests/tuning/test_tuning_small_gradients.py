"""The cost model of attention's small gradients; `test_ranked_replay` has times of kernels."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo_jax.problems import AttentionBackwardProblem
from ikbo_jax.problems.attention_backward import HEAD_DIMS, most_blocks
from ikbo_jax.problems.attention_backward_cost import small_configs
from ikbo_jax.problems.hopper import NUM_SMS
from ikbo_jax.tuning import table

PARTS, STORED = "parts", "stored"
#: Users of equally many rows, a block or more each: the model allows for other numbers of rows, and
#: so takes more parts than are best for these.
EVEN = {
    (48, 6, 8, 273, 1, 1, 128): 1,
    (192, 6, 8, 273, 1, 1, 128): 4,
    (384, 6, 8, 273, 1, 1, 128): 4,
}
sizes = st.one_of(st.integers(1, 64), st.integers(1, 5000))


def _problem(sizes: tuple[int, ...]) -> AttentionBackwardProblem:
    return AttentionBackwardProblem(*sizes, "bfloat16")


@pytest.mark.parametrize(("sizes", "best"), EVEN.items(), ids=str)
def test_users_of_any_numbers_of_rows_have_a_few_more_parts(sizes, best):
    config = table.lookup(_problem(sizes), with_user_rows=False).config
    assert config.d_query == PARTS
    assert best <= config.splits <= best + 2


def test_configurations_of_larger_gradients_that_were_timed():
    """Us: 47.17 against 54.35 with two parts; 48.35 against 52.30 with blocks of 16 rows."""
    uneven = table.lookup(_problem((1397, 7, 3, 422, 4, 4, 128)), with_user_rows=False).config
    assert (uneven.d_query, uneven.splits) == (STORED, 1)
    many = table.lookup(_problem((813, 101, 5, 87, 4, 4, 128)), with_user_rows=False).config
    assert (many.d_query, many.block_q, many.kv_slots) == (PARTS, 32, 2)
    assert many.adds_by_launch


@given(
    batch=sizes,
    users=st.integers(1, 200),
    q_len=st.integers(1, 64),
    kv_len=st.integers(1, 20_000),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2), (16, 1)]),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_parts_of_small_gradients_take_little_memory(batch, users, q_len, kv_len, heads, head_dim):
    problem = _problem((batch, users, q_len, kv_len, *heads, head_dim))
    for config in small_configs(problem):
        tiles = problem.items // users
        blocks = most_blocks(batch, users, q_len * heads[0] // heads[1], config.block_q)
        of_queries = tiles * blocks * config.block_q * head_dim * 4
        of_keys = 2 * config.splits * users * kv_len * heads[1] * head_dim * 4
        total = of_queries * (config.d_query == PARTS) + of_keys * (config.splits > 1)
        assert total < 40 * 2**20
        assert problem.items * config.splits <= NUM_SMS


@pytest.mark.parametrize("kv_len", [2048, 4096, 8192])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_queries_have_no_small_configurations(kv_len, head_dim):
    for batch, users in ((2048, 32), (10_000, 1), (math.prod((64, 128)), 8)):
        assert not small_configs(_problem((batch, users, 8, kv_len, 8, 8, head_dim)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"head_dim": 8}, {"head_dim": 80}, {"dtype": "float32"}),
        *({name: 0} for name in ("batch", "users", "q_len", "kv_len", "q_heads")),
    ],
    ids=str,
)
def test_small_gradients_without_a_kernel_or_of_nothing_have_no_configuration(changes):
    problem = dataclasses.replace(_problem((40, 3, 2, 9, 4, 2, 64)), **changes)
    assert small_configs(problem) == ()
    assert table.lookup(problem, with_user_rows=False).config is None or problem.q_heads == 0

"""Which launches compute the gradient of attention, against times of kernels."""

from __future__ import annotations

import pytest
from attention_gradient_times import timed

from ikbo_jax.problems import AttentionBackwardProblem
from ikbo_jax.problems.attention_backward_cost import small_configs
from ikbo_jax.tuning import table

#: Of users, rows of a user, heads, keys and columns: times by d_query, block_q, stages, kv_slots,
#: and True where tiles are tall.
TIMED = timed("large")
#: A choice may take this many times as long as the fastest configuration that was timed.
MARGIN = 1.02


def problem_of(users: int, rows: int, heads: int, kv_len: int, head_dim: int):
    q_len = 4 if rows < 64 else 16
    sizes = (users * rows // q_len, users, q_len, kv_len, heads, heads, head_dim)
    return AttentionBackwardProblem(*sizes, "bfloat16")


@pytest.mark.parametrize("sizes", TIMED, ids=lambda sizes: "_".join(map(str, sizes)))
def test_the_choice_is_as_fast_as_what_was_timed(sizes):
    problem = problem_of(*sizes)
    assert not small_configs(problem)  # those have a model
    config = table.lookup(problem, device="NVIDIA H100", with_user_rows=False).config
    tall = (True,) if config.tall else ()
    chosen = TIMED[sizes][config.d_query, config.block_q, config.stages, config.kv_slots, *tall]
    assert chosen <= MARGIN * min(TIMED[sizes].values())

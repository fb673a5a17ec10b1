"""Programs that look like what a proof of the rewriting asks for, and are something else."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from rewrite_basics import check_values_and_gradients

import ikbo_jax as ikbo

RNG = np.random.default_rng(0)
U, B, D = 4, 32, 8
INDEX = jnp.asarray(RNG.integers(0, U, B), jnp.int32)


def floats(*shape):
    return problems.random_array(RNG, shape, "float32")


def test_an_index_that_is_clamped_below_zero_counts_from_the_end() -> None:
    def looked_up(users, cand, index, lengths):
        last = jnp.clip(lengths, 0, 3) - 1
        return jnp.tanh(users[lax.clamp(jnp.zeros_like(index), index, last)]) * cand

    index, lengths = (jnp.asarray(RNG.integers(0, n, B), jnp.int32) for n in (4, 5))
    check_values_and_gradients(looked_up, floats(U, D), floats(B, D), index, lengths)


def test_positions_that_wrap_around_are_no_index_in_bounds() -> None:
    def looked_up(users, cand):
        return jnp.tanh(users[lax.iota(jnp.int8, 200)]) * cand

    check_values_and_gradients(looked_up, floats(127, D), floats(200, D))


def test_a_constant_index_out_of_bounds_takes_no_row_of_its_own() -> None:
    index = np.array([-1, 0, 1, 1, 0] * 4, np.int32)[:, None]
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def normed(users, cand, weight):
        rows = lax.gather(users, index, numbers, (1, D), mode="clip") @ weight
        return rows / jnp.linalg.norm(rows, axis=1, keepdims=True) * cand

    # No index takes the last row, whose norm has no gradient.
    users = floats(3, D).at[2].set(0)
    check_values_and_gradients(normed, users, floats(len(index), D), floats(D, D))


def test_a_mask_is_computed_in_the_dtype_of_its_numbers() -> None:
    def visible():
        # 7 * 0.1 is not below 0.7 in float32, but is below the float64 number 0.7.
        with jax.numpy_dtype_promotion("standard"):
            below = jnp.arange(9) * 0.1 < 0.7
        return below[None] | (jnp.arange(9)[:, None] == 0)

    assert not visible()[1, 7]

    def attend(history, cand, index, weight):
        rows = jnp.concatenate([history[index], cand[:, None]], axis=1)
        logits = jnp.einsum("btd,bsd->bts", rows @ weight, rows)
        logits = jnp.where(visible()[None], logits, -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(logits, axis=-1), rows)

    check_values_and_gradients(attend, floats(U, 8, D), floats(B, D), INDEX, floats(D, D))


@pytest.mark.parametrize("shape", [(1, D), (B, 1), ()], ids=str)
def test_a_jvp_rule_may_close_over_an_array(shape: tuple[int, ...]) -> None:
    factor = floats(*shape)

    @jax.custom_jvp
    def squashed(x):
        return jnp.tanh(x)

    @squashed.defjvp
    def _(primals, tangents):
        return squashed(*primals), tangents[0] * factor

    def score(users, cand, index):
        return squashed(users[index]) * cand

    check_values_and_gradients(score, floats(U, D), floats(B, D), INDEX)


def test_a_merged_value_is_broadcast_by_an_operation() -> None:
    def outer(users, cand, index):
        rows = (users[index] @ jnp.ones((D, 1))).reshape(2 * B, 1)
        return (jnp.tanh(rows) * jnp.tanh(cand[:1])).reshape(B, 2, D) * cand[:, None]

    args = floats(U, 2, D), floats(B, D), INDEX
    check_values_and_gradients(outer, *args)
    (report,) = ikbo.explain(ikbo.rewrite(outer), *args).notes
    assert "raised" not in str(report), report

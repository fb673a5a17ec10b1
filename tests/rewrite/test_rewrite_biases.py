"""Attention with a bias that is the same for all candidates of a user: of JAX, and in a sequence.

`test_rewrite_weights` has biases that are added before a softmax, as programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import became, check_values_and_gradients, report_of, shapes

import ikbo_jax as ikbo

B, U, T, S, N, H = 64, 4, 2, 12, 2, 8
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
LENGTHS = jnp.asarray([0, 5, 12, 7], jnp.int32)
KEPT = jnp.arange(S)[None] < LENGTHS[:, None]
AGES = jnp.asarray(RNG.uniform(0, 30, (U, S)), jnp.float32)
ALIBI = -jnp.asarray(RNG.uniform(0.1, 1, (N, T, S)), jnp.float32)


def random(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


ARRAYS = random(B, T, N, H), random(U, S, N, H), random(U, S, N, H), AGES


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def of_user(bias: Any) -> Any:
    return bias[INDEX][:, None, None]


def copies_keys(fn: Any, *args: Any) -> bool:
    found = shapes(jax.make_jaxpr(ikbo.rewrite(fn))(*args))
    return any(sorted(shape) == sorted((B, S, N, H)) for shape in found)


#: Biases and masks of `jax.nn.dot_product_attention`.
OF_JAX = {
    "jax.nn, positions": lambda ages: {"bias": ALIBI[None, :1, :1]},
    "jax.nn, heads": lambda ages: {"bias": ALIBI[None]},
    "jax.nn, users": lambda ages: {"bias": of_user(ages)},
    "jax.nn, users and a mask": lambda ages: {"bias": of_user(ages), "mask": of_user(KEPT)},
}


@pytest.mark.parametrize("name", OF_JAX)
def test_keys_are_never_copied(name: str) -> None:
    def fn(query: Any, key: Any, value: Any, ages: Any) -> Any:
        return jax.nn.dot_product_attention(query, key[INDEX], value[INDEX], **OF_JAX[name](ages))

    check_values_and_gradients(fn, *ARRAYS)
    assert not copies_keys(fn, *ARRAYS), str(report_of(fn, *ARRAYS))
    assert "attention" in became(fn, *ARRAYS)


def sequence(owns: int, weights: Any) -> Any:
    """Two layers over [history, candidates], in which candidates do not see each other."""
    tokens = S + owns
    causal = np.tril(np.ones((tokens, tokens), bool))
    causal[S:, S:] = np.eye(owns, dtype=bool)

    def fn(history: Any, cand: Any, w: Any, ages: Any, table: Any) -> Any:
        x = jnp.concatenate([history[INDEX], cand], axis=1)
        ages = jnp.concatenate([ages[INDEX], jnp.zeros((B, owns))], axis=1)[:, None, None]
        for layer in w:
            q, k, v = ((x @ y).reshape(*x.shape[:-1], N, H) for y in layer)
            logits = jnp.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5)
            mixed = jnp.einsum("bnts,bsnh->btnh", weights(logits, causal, ages, table), v)
            x += mixed.reshape(x.shape)
        return x[:, S:]

    arrays = random(U, S, N * H), random(B, owns, N * H), random(2, 3, N * H, N * H) / 4
    return fn, (*arrays, AGES / 10, random(1, N, tokens, tokens))


def with_ones(kept: Any, tokens: int) -> Any:
    ones = jnp.ones((*kept.shape[:-1], tokens - S), bool)
    return jnp.concatenate([kept, ones], axis=-1)


SEQUENCES = {
    "table": lambda x, seen, ages, table: softmax(jnp.where(seen, x + table, -1e9)),
    "subtracted": lambda x, seen, ages, table: softmax(jnp.where(seen, x - table, -jnp.inf)),
    "alibi": lambda x, seen, ages, table: softmax(
        jnp.where(seen, x - np.abs(np.arange(len(seen)) - S).astype(np.float32), -1e30)
    ),
    "age of keys": lambda x, seen, ages, table: softmax(jnp.where(seen, x - ages, -1e9)),
    "scaled sum of several": lambda x, seen, ages, table: softmax(
        jnp.where(seen, (x + table - ages) / 2, -1e9)
    ),
    "after an added mask": lambda x, seen, ages, table: softmax(
        x + jnp.where(seen, 0, -1e9)[None, None] + table
    ),
    "before an added mask": lambda x, seen, ages, table: softmax(
        x + table + jnp.where(seen, 0, -1e9)[None, None]
    ),
    "that holds the mask": lambda x, seen, ages, table: softmax(
        x + jnp.where(seen, table[0] / 2, -1e9)[None]
    ),
    "summed with the mask": lambda x, seen, ages, table: softmax(
        x + (table - ages + jnp.where(seen, 0, -1e9))
    ),
    "after a cap": lambda x, seen, ages, table: softmax(
        jnp.where(seen, 5 * jnp.tanh(x / 5) + table, -1e9)
    ),
    "padding": lambda x, seen, ages, table: softmax(
        jnp.where(seen & with_ones(ages[..., :S] < 2, len(seen)), x + table, -1e9)
    ),
}


@pytest.mark.parametrize("owns", [1, 3])
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_bias_in_a_sequence_leaves_the_history_at_user_batch(name: str, owns: int) -> None:
    with jax.numpy_rank_promotion("allow"):
        fn, args = sequence(owns, SEQUENCES[name])
        check_values_and_gradients(fn, *args)
        report = report_of(fn, *args)
    assert report.flops_saved > 0.6 * report.costs.original.flops, str(report)


def test_a_bias_by_candidate_in_a_sequence_stays_as_written() -> None:
    def weights(x: Any, seen: Any, ages: Any, table: Any) -> Any:
        bias = jnp.sin(jnp.arange(B, dtype=x.dtype))[:, None, None, None] * table
        return softmax(jnp.where(seen, x + bias, -1e9))

    with jax.numpy_rank_promotion("allow"):
        fn, args = sequence(1, weights)
        check_values_and_gradients(fn, *args)
        report = report_of(fn, *args)
    assert any("bias differs by candidate" in x.reason for x in report.materialised)

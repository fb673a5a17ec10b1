"""HSTU with a bias of times and positions.

`test_rewrite_blocks` has its weights with other masks, and `test_rewrite_masks` several candidates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite_basics import check_values_and_gradients, report_of

pytestmark = pytest.mark.usefixtures("models_may_promote")

USERS, LENGTH, WIDTH, HEADS, HEAD, LAYERS = 4, 23, 32, 2, 16, 2


#: Weights of scores [rows, heads, n, n] and a mask [.., n, n] bool.
SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "times_bool": lambda s, m: jax.nn.silu(s) * m / s.shape[-1],
    "softmax": lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e9)),
}


def params() -> list[tuple[jax.Array, jax.Array]]:
    rng = np.random.default_rng(0)
    shapes = (WIDTH, 4 * HEADS * HEAD), (HEADS * HEAD, WIDTH)
    return [
        tuple(jnp.asarray(rng.standard_normal(s, np.float32) * s[0] ** -0.5) for s in shapes)
        for _ in range(LAYERS)
    ]


def request(rows: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    history = rng.standard_normal((USERS, LENGTH, WIDTH), np.float32)
    items = rng.standard_normal((rows, 1, WIDTH), np.float32)
    index = rng.integers(0, USERS, rows).astype(np.int32)
    return tuple(map(jnp.asarray, (history, items, index)))


#: The number of the bucket of each time difference, an integer.
BUCKETS: dict[str, Callable[[Any], Any]] = {
    "log": lambda x: (jnp.log(jnp.maximum(jnp.abs(x), 1).astype(jnp.float32)) / 0.3).astype(int),
    "searched": lambda x: jnp.searchsorted(2 ** jnp.arange(20), jnp.abs(x)),
    "compared": lambda x: (jnp.abs(x)[..., None] > 2 ** jnp.arange(20)).sum(axis=-1),
}


def times(index: jax.Array) -> jax.Array:
    """The times of a user's events, and later times of the candidates: [rows, tokens] int32."""
    rng = np.random.default_rng(2)
    events = np.sort(rng.integers(0, 1000, (USERS, LENGTH)).astype(np.int32), axis=1)
    now = jnp.asarray(rng.integers(1000, 2000, (len(index), 1)).astype(np.int32))
    return jnp.concatenate([jnp.asarray(events)[index], now], axis=1)


def bias(bucket: str, table: jax.Array, index: jax.Array) -> jax.Array:
    """A bias of times between all tokens, and of their positions: [rows, 1, tokens, tokens]."""
    at = times(index)
    found = table[0][BUCKETS[bucket](at[:, :, None] - at[:, None])]
    n = np.arange(LENGTH + 1)
    return (found + table[1][n[:, None] - n + LENGTH + 1])[:, None]


def model(spelling: str, bucket: str) -> Any:
    def fn(layers: Any, history: Any, items: Any, index: Any, table: Any) -> Any:
        x = jnp.concatenate([history[index], items], axis=1)
        rows, n, _ = x.shape
        seen = jnp.tril(jnp.ones((n, n), bool))[None, None]
        for w_in, w_out in layers:
            mean = x.mean(axis=-1, keepdims=True)
            norm = (x - mean) * jax.lax.rsqrt(x.var(axis=-1, keepdims=True) + 1e-6)
            uvqk = jax.nn.silu(norm @ w_in).reshape(rows, n, 4, HEADS, HEAD)
            u, v, q, k = (uvqk[:, :, i] for i in range(4))
            scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) * HEAD**-0.5
            weights = SPELLINGS[spelling](scores + bias(bucket, table, index), seen)
            a = jnp.einsum("bhnm,bmhd->bnhd", weights, v)
            x = x + (u * a).reshape(rows, n, -1) @ w_out
        return x[:, LENGTH:]

    return fn


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_times_between_all_tokens_leave_the_history_at_user_batch(
    spelling: str, bucket: str
) -> None:
    """Though times between the candidate and each event differ by candidate."""
    table = jnp.asarray(np.random.default_rng(3).standard_normal((2, 64), np.float32))
    fn, args = model(spelling, bucket), (params(), *request(48), table)
    report = report_of(fn, *args)
    assert report.flops_saved >= 0.88 * report.costs.original.flops, report
    check_values_and_gradients(fn, *args, bound=3e-5)

"""Seeded inputs and the oracle of segment sums, and indices to put into order."""

import jax
import jax.numpy as jnp
import numpy as np


def draw(
    batch: int, users: int, width: int, dtype: str, is_sorted: bool, has_hot_user: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Draws values [batch, width] and an index [batch], some of it out of range."""
    rng = np.random.default_rng(0)
    index = rng.integers(-1, users + 1, batch).astype(np.int32)
    if has_hot_user:
        index = np.where(rng.random(batch) < 0.8, users // 3, index)
    if is_sorted:
        index.sort()
    return jnp.asarray(rng.normal(size=(batch, width)), dtype), jnp.asarray(index)


def assert_sums(
    found: jax.Array, values: jax.Array, index: jax.Array, rtol: float, atol: float
) -> None:
    """Holds the sums of users [users, ...] to their relative and absolute error."""
    expected = np.zeros(found.shape)
    np.add.at(expected, np.clip(index, 0, len(found) - 1), np.asarray(values, np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=atol)


def draw_index(kind: str, batch: int, users: int) -> np.ndarray:
    """Draws an index [batch] int32 by the name of its distribution; "beyond": out of range, too."""
    rng = np.random.default_rng(0)
    match kind:
        case "uniform":
            index = rng.integers(0, users, batch)
        case "distinct":
            index = rng.permutation(users)[:batch]
        case "zipf":
            index = (rng.zipf(1.3, batch) - 1) % users
        case "gaps":
            index = rng.integers(0, users // 7, batch) * 7
        case "runs":
            index = np.repeat(rng.permutation(users), -(-batch // users))[:batch]
        case "beyond":
            index = rng.integers(-3, users + 3, batch)
            index[::50], index[1::50] = -(2**31), 2**31 - 1
    return index.astype(np.int32)

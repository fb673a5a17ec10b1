"""A ranking transformer as in Phoenix's public description: [user and history, candidates] a row.

Candidates do not see each other, positions rotate queries and keys, logits have a soft cap, and
padding hides keys, but no position's own key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

USERS, LENGTH, WIDTH, HEADS, GROUPS, HEAD = 4, 24, 32, 4, 2, 16
LAYERS = 2


def params() -> list[dict[str, jax.Array]]:
    """Draws the weights of all layers."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[0] ** -0.5)

    shapes = {
        "q": (WIDTH, HEADS * HEAD),
        "k": (WIDTH, GROUPS * HEAD),
        "v": (WIDTH, GROUPS * HEAD),
        "out": (HEADS * HEAD, WIDTH),
        "gate": (WIDTH, 2 * WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    return [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def request(rows: int, candidates: int) -> tuple[jax.Array, ...]:
    """Draws histories [USERS, LENGTH, WIDTH], candidates a row, padding and the index."""
    rng = np.random.default_rng(1)
    history = rng.standard_normal((USERS, LENGTH, WIDTH), np.float32)
    items = rng.standard_normal((rows, candidates, WIDTH), np.float32)
    kept = np.arange(LENGTH) < np.asarray([LENGTH, 5, 0, 17])[:, None]
    index = rng.integers(0, USERS, rows).astype(np.int32)
    return tuple(map(jnp.asarray, (history, items, kept, index)))


def candidate_mask(length: int, start: int) -> jax.Array:
    """Makes the mask [1, 1, length, length]: causal, and a candidate sees no other candidate."""
    mask = jnp.tril(jnp.ones((1, 1, length, length)))
    mask = mask.at[:, :, start:, start:].set(0)
    own = jnp.arange(start, length)
    return mask.at[:, :, own, own].set(1)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates [rows, length, heads, HEAD] by position; the phases of both halves are equal."""
    frequency = 1e4 ** (-jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
    position = jnp.arange(x.shape[1], dtype=jnp.float32)[None]
    phase = jnp.tile(jnp.einsum("bi,j->bij", position, frequency), (1, 1, 2))[:, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * jnp.cos(phase) + turned * jnp.sin(phase)


def norm(x: jax.Array) -> jax.Array:
    """Divides by the root of the mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(layer: Any, x: jax.Array, mask: jax.Array, cap: float) -> jax.Array:
    """Attends by groups of query heads, with a soft cap of the logits."""
    rows, length, _ = x.shape
    q = rotated((x @ layer["q"]).reshape(rows, length, HEADS, HEAD))
    k = rotated((x @ layer["k"]).reshape(rows, length, GROUPS, HEAD))
    v = (x @ layer["v"]).reshape(rows, length, GROUPS, HEAD)
    q = q.reshape(rows, length, GROUPS, HEADS // GROUPS, HEAD)
    logits = jnp.einsum("...thgd,...shd->...hgts", q, k) * HEAD**-0.5
    logits = cap * jnp.tanh(logits / cap)
    logits = jnp.where(mask[:, :, None], logits, -1e30)
    weights = jax.nn.softmax(logits)
    return (
        jnp.einsum("...hgts,...shd->...thgd", weights, v).reshape(rows, length, -1) @ layer["out"]
    )


def phoenix(
    layers: Any, history: Any, items: Any, kept: Any, index: Any, cap: float = 30.0
) -> jax.Array:
    """Returns [rows, candidates, WIDTH] of the candidates; every position sees itself."""
    start, count = history.shape[1], items.shape[1]
    x = jnp.concatenate([history[index], items], axis=1)
    padding = jnp.concatenate([kept[index], jnp.ones(items.shape[:2], bool)], axis=1)
    mask = padding[:, None, None, :].astype(x.dtype) * candidate_mask(start + count, start)
    mask = jnp.maximum(mask, jnp.eye(start + count)[None, None]) != 0
    for layer in layers:
        x = x + norm(attention(layer, norm(x), mask, cap))
        y = norm(x)
        x = x + norm((jax.nn.gelu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"])
    return norm(x)[:, start:]

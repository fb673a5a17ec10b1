"""The table of layouts: every model with its arguments, and what its rewrite must save."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

B, U, S = 96, 4, 9  # candidates, users, keys of a history
F_USER, F_CAND, D, VOCABULARY = 6, 3, 8, 50
F = F_USER + F_CAND
HIDDEN, HEADS = 12, 2


class Layout(NamedTuple):
    """A model in one layout.

    Attributes:
      name: in the table.
      fn: the model.
      uses: names of the arguments in `arrays`.
      saved: the share of the model's FLOPs that `rewrite` must save at least: 0.02 below what it
        saves in jax 0.11.2. With few exceptions, that is all that a form by hand saves.
      never: shapes that the rewritten program must not hold, since they are copies.
      op: what the report must say that the model became.
    """

    name: str
    fn: Callable[..., Any]
    uses: tuple[str, ...]
    saved: float
    never: tuple[tuple[int, ...], ...] = ()
    op: str = ""

    def args(self) -> list[Any]:
        return [arrays()[name] for name in self.uses]


LAYOUTS: dict[str, Layout] = {}


def layout(
    uses: str, saved: float, never: Any = (), name: str = "", op: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a model to the table by its name, which is the function's if none is given."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        key = name or fn.__name__
        LAYOUTS[key] = Layout(key, fn, tuple(uses.split()), saved, never, op)
        return fn

    return add


@functools.cache
def arrays() -> dict[str, Any]:
    """Every argument that a model may have, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape, np.float32))

    def weight(*shape: int) -> jax.Array:
        return normal(*shape) * jnp.float32(shape[0] ** -0.5)

    def ids(*shape: int) -> jax.Array:
        return jax.device_put(rng.integers(0, VOCABULARY, shape).astype(np.int32))

    pairs = F * (F - 1) // 2
    blocks = [
        {
            "qkv": weight(D * HEADS, 3 * D * HEADS),
            "out": weight(D * HEADS, D * HEADS),
            "up": weight(D * HEADS, 4 * D * HEADS),
            "down": weight(4 * D * HEADS, D * HEADS),
        }
        for _ in range(8)
    ]
    return {
        "user": normal(U, D),
        "cand": normal(B, D),
        "one": normal(1, D),
        "lone": normal(D),
        "index": jnp.asarray(rng.integers(0, U, B), jnp.int32),
        "counts": jnp.asarray([30, 0, 50, 16], jnp.int32),
        "requests": normal(2, 5, D),
        "to_request": jnp.asarray([1, 0, 1, 1], jnp.int32),
        "compress": weight(F, HIDDEN).T,
        "compress_three": weight(5 + F, HIDDEN).T,
        "user_fields": normal(U, F_USER, D),
        "cand_fields": normal(B, F_CAND, D),
        "user_ids": ids(U, F_USER),
        "cand_ids": ids(B, F_CAND),
        "table": normal(VOCABULARY, D),
        "w_fields": weight(F * D, HIDDEN),
        "w_field": weight(D, HIDDEN),
        "w_wide": weight(2 * F * D, HIDDEN),
        "w_pairs": weight(pairs + D, HIDDEN),
        "w_tower": weight(D, HIDDEN),
        "w_top": weight(HIDDEN, HIDDEN),
        "w_first": weight(2 * D, HIDDEN),
        "w_unit": weight(4 * D, HIDDEN),
        "w_out": weight(HIDDEN, 1),
        "history": normal(U, S, D),
        "long": normal(U, S, D * HEADS),
        "token": normal(B, D * HEADS),
        "items": normal(40, D),
        "people": normal(30, D),
        "bias": normal(U, S),
        "kept": jnp.asarray(rng.integers(0, 2, (U, S)), bool),
        "bounds": jnp.asarray(np.linspace(-1, 1, 7), jnp.float32),
        "buckets": normal(8, D),
        "kernel": weight(3, D, HIDDEN),
        "lengths": jnp.asarray([3, S, 1, 5], jnp.int32),
        "w_state": weight(2 * D, 3 * D),
        "w_bag": weight(VOCABULARY, HIDDEN),
        "blocks2": blocks[:2],
        "stacked": jax.tree.map(lambda *x: jnp.stack(x), *blocks[:2]),
        "blocks8": blocks,
    }

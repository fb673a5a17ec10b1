"""Phoenix's model: soft cap, padding, positions by tile, and candidates that are isolated."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import phoenix_model
import pytest
from rewrite_basics import check, report_of, share_saved


@pytest.mark.parametrize(
    ("rows", "candidates", "saved"), [(64, 1, 0.91), (16, 8, 0.65), (8, 64, 0.46)]
)
def test_what_can_be_saved_is_saved(rows: int, candidates: int, saved: float) -> None:
    args = phoenix_model.params(), *phoenix_model.request(rows, candidates)
    assert share_saved(phoenix_model.phoenix, *args) >= saved


def test_values_are_the_models() -> None:
    args = phoenix_model.params(), *phoenix_model.request(6, 3)
    check(lambda fn: fn, phoenix_model.phoenix, *args)


U, B, S, D = 4, 24, 5, 8
RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.standard_normal(shape, np.float32)) for shape in ((U, S, D), (D, D)))
INDEX = jnp.asarray(RNG.integers(0, U, B), jnp.int32)
PHASE = jnp.linspace(0.5, 1, S * D // 2, dtype=jnp.float32).reshape(S, D // 2)

#: Ways to repeat [S, D / 2] to [S, D].
REPEATS: dict[str, Callable[[Any], Any]] = {
    "tile": lambda x: jnp.tile(x, (1, 2)),
    "tile_of_a_batch": lambda x: jnp.tile(x[None], (1, 1, 2)),
    "repeat": lambda x: jnp.repeat(x, 2, axis=1),
    "concatenate": lambda x: jnp.concatenate([x, x], axis=1),
    "stack": lambda x: jnp.stack([x, x], axis=-1).reshape(S, D),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (S, 2, D // 2)).reshape(S, D),
    "gather": lambda x: x[:, jnp.arange(D) % (D // 2)],
    "resized": lambda x: jnp.resize(x.T, (D, S)).T,
}


@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("is_input", [False, True])
def test_repeated_positions_are_no_obstacle(name: str, is_input: bool) -> None:
    def fn(x: Any, phase: Any) -> Any:
        # Positions that are computed, or are an input that no user determines.
        fixed = jnp.outer(jnp.arange(S, dtype=jnp.float32), jnp.linspace(0.1, 1, D // 2))
        phase = phase if is_input else jnp.sin(fixed)
        repeated = jnp.cos(REPEATS[name](phase)).reshape(1, S, D)
        return ((x[INDEX] @ W) * repeated) @ W

    report = report_of(fn, X, PHASE)
    assert report.flops_saved >= 0.8 * report.costs.original.flops, str(report)
    check(lambda fn: fn, fn, X, PHASE)

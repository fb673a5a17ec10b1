"""Layouts that ranking teams write: values, gradients, and the share of products removed.

`layout_table` holds every model with the share of its FLOPs that `rewrite` saves at least.
"""

from typing import Any

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  These fill the table.
import layout_positions  # noqa: F401
import layout_sequences  # noqa: F401
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from layout_table import HEADS, LAYOUTS, D, S, arrays
from rewrite_basics import (
    both,
    check,
    check_values_and_gradients,
    close,
    computed,
    gradients_by_all,
    loss,
    report_of,
    shapes,
    share_saved,
)

import ikbo_jax as ikbo


@pytest.mark.parametrize("name", LAYOUTS)
def test_share_removed(name: str) -> None:
    """Asserts as well that no array is a copy, of a shape that the layout must never hold."""
    layout = LAYOUTS[name]
    args = layout.args()
    assert share_saved(layout.fn, *args) >= layout.saved
    # An op's XLA path, which runs on CPUs, may hold them.
    program = jax.make_jaxpr(ikbo.rewrite(layout.fn))(*args)
    assert not shapes(program, inside_ops=False).intersection(layout.never)
    copied = shapes(jax.make_jaxpr(layout.fn)(*args)).intersection(layout.never)
    assert copied or not layout.never
    report = report_of(layout.fn, *args)
    assert layout.op in report.details, report


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name: str) -> None:
    layout = LAYOUTS[name]
    args = layout.args()
    # A while loop has no gradient.
    of = loss if "while_loop" in name else gradients_by_all(args)
    for each in (lambda fn: fn, of):
        check(each, layout.fn, *args)


def test_comparisons_that_are_no_lookups() -> None:
    def at(positions, compare=jnp.equal):
        return lambda user, index: compare(index[:, None], positions).astype(user.dtype) @ user

    def shuffled(user, index):
        """The index is shuffled by a transpose of two dimensions that it has in between."""
        column = index.reshape(2, -1).T.reshape(-1, 1)
        return (column == jnp.arange(len(user))[None]).astype(user.dtype) @ user

    user, index = LAYOUTS["one_hot"].args()[:1] + LAYOUTS["one_hot"].args()[2:3]
    positions = jnp.arange(user.shape[0])[None]
    assert user.shape[0] % 2 == 0
    assert index.shape[0] % 2 == 0
    pairs = positions.reshape(2, -1).T.reshape(1, -1)
    for fn in (shuffled, at(pairs)):
        close(*both(fn, user, index))
    for fn in (at(positions[:, ::-1]), at(positions + 1), at(positions, jnp.less), at(positions)):
        close(*both(fn, user, index - 1))


class LinenLayer(linen.Module):
    """A layer of a transformer; its mask differs by candidate in form."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y, mask = linen.LayerNorm()(x), linen.make_causal_mask(x[..., 0])
        x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS)(y, y, mask=mask)
        y = linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x))
        return x + linen.Dense(x.shape[-1])(linen.gelu(y))


class NnxLayer(nnx.Module):
    """The same layer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first, self.second = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(n * width, m * width, rngs=rngs) for n, m in ((1, 4), (4, 1))
        )

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(jnp.ones((1, x.shape[1])))
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


@pytest.mark.parametrize("library", [linen, nnx], ids=["linen", "nnx"])
def test_modules_of_flax(library: Any) -> None:
    request = [arrays()[name] for name in ("long", "token", "index")]
    if library is linen:
        apply = LinenLayer().apply
        params = jax.jit(LinenLayer().init)(jax.random.key(0), request[0])
    else:
        graph, params = nnx.split(NnxLayer(request[1].shape[1], nnx.Rngs(0)))
        apply = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731

    def fn(params: Any, long: Any, token: Any, index: Any) -> Any:
        x = jnp.concatenate([long[index], token[:, None]], axis=1)
        return apply(params, apply(params, x))[:, -1]

    assert share_saved(fn, params, *request) >= 0.85
    with jax.numpy_rank_promotion("allow"):
        for of in (lambda fn: fn, lambda fn: jax.grad(loss(fn))):
            ours, theirs = (computed(of(f), params, *request) for f in (ikbo.rewrite(fn), fn))
            # The bias of keys has no gradient but for roundings.
            for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                scale = np.max(np.abs(y), initial=1.0)
                np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * scale)


def _fields(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x[INDEX], y[:, None]], axis=1)


INDEX = jnp.asarray([0, 2, 1, 1, 3, 0, 0, 2, 3, 1, 2, 2], jnp.int32)
#: `jnp.reshape(order="F")` and the derivative of a product along an axis reshape like this.
PERMUTED = {
    "within_rows": lambda x, y: lax.reshape(x[INDEX], (12, 30), (0, 2, 1)),
    "candidates_last": lambda x, y: lax.reshape(x[INDEX], (30, 12), (1, 2, 0)),
    "merged": lambda x, y: lax.reshape(_fields(x, y).reshape(84, 5), (12, 35), (1, 0)),
    "split": lambda x, y: lax.reshape(x[INDEX.reshape(3, 4)], (12, 30), (1, 0, 2, 3)),
    "split_rows": lambda x, y: lax.reshape(x[INDEX.reshape(3, 4)], (3, 4, 30), (0, 1, 3, 2)),
    "pairs": lambda x, y: lax.reshape(
        jnp.einsum("bfd,bgd->bfg", _fields(x, y), _fields(x[:, :2], y)), (12, 21), (0, 2, 1)
    ),
    "product": lambda x, y: jnp.prod(1 + x[INDEX] / 9, axis=1) * y,
}


@pytest.mark.parametrize("name", PERMUTED)
def test_reshapes_permute(name: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((4, 6, 5), (12, 5)))

    check_values_and_gradients(lambda x, y: jnp.tanh(PERMUTED[name](jnp.sin(x), y)), x, y)


#: Ways to repeat [S, D / 2] to [S, D].
REPEATS = {
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
    """As in Phoenix, whose queries and keys are rotated by phases that both halves share."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((4, S, D), (D, D)))
    index = jnp.asarray(rng.integers(0, 4, 24), jnp.int32)
    given = jnp.linspace(0.5, 1, S * D // 2, dtype=jnp.float32).reshape(S, D // 2)

    def fn(x, phase):
        # Positions that are computed, or are an input that no user determines.
        fixed = jnp.outer(jnp.arange(S, dtype=jnp.float32), jnp.linspace(0.1, 1, D // 2))
        phase = phase if is_input else jnp.sin(fixed)
        repeated = jnp.cos(REPEATS[name](phase)).reshape(1, S, D)
        return ((x[index] @ w) * repeated) @ w

    report = report_of(fn, x, given)
    assert report.flops_saved >= 0.8 * report.costs.original.flops, str(report)
    check(lambda fn: fn, fn, x, given)

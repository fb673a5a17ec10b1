"""Layouts that ranking teams write: values, gradients, and the share of products removed.

`layout_table` holds every model with the share of its FLOPs that `rewrite` saves at least.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  It fills the table.
import layout_sequences
import numpy as np
import pytest
from flax import linen, nnx
from jax import export, lax
from layout_table import HEADS, LAYOUTS, B, D, S, U, arrays
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
from ikbo_jax.rewrite.attention import block_attention
from ikbo_jax.rewrite.report import cost
from ikbo_jax.rewrite.values import lineage


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
    "tile_of_rows": lambda x: jnp.tile(jnp.broadcast_to(x, (24, *x.shape)), (1, 1, 2)),
    "concatenate_rows": lambda x: jnp.concatenate([jnp.broadcast_to(x, (24, *x.shape))] * 2, 2),
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
        repeated = jnp.cos(REPEATS[name](phase)).reshape(-1, S, D)
        return ((x[index] @ w) * repeated) @ w

    report = report_of(fn, x, given)
    assert report.flops_saved >= 0.8 * report.costs.original.flops, str(report)
    check(lambda fn: fn, fn, x, given)


# HSTU with a bias of the times between all tokens, and of their positions. `test_rewrite_blocks`
# has its weights with other masks, and `test_rewrite_masks` several candidates.

#: The number of the bucket of each time difference, an integer.
BUCKETS: dict[str, Callable[[Any], Any]] = {
    "log": lambda x: (jnp.log(jnp.maximum(jnp.abs(x), 1).astype(jnp.float32)) / 0.3).astype(int),
    "searched": lambda x: jnp.searchsorted(2 ** jnp.arange(20), jnp.abs(x)),
    "compared": lambda x: (jnp.abs(x)[..., None] > 2 ** jnp.arange(20)).sum(axis=-1),
}
#: Weights of logits [rows, heads, n, n] and a mask [.., n, n] bool.
WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "silu": lambda x, mask: jax.nn.silu(x) * mask / x.shape[-1],
    "softmax": lambda x, mask: jax.nn.softmax(jnp.where(mask, x, -1e9)),
}


@pytest.mark.usefixtures("models_may_promote")
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_times_between_all_tokens_leave_the_history_at_user_batch(
    monkeypatch: pytest.MonkeyPatch, weights: str, bucket: str
) -> None:
    """Though times between the candidate and each event differ by candidate."""
    # As with many keys: the history has nine.
    monkeypatch.setattr(block_attention, "FEW_KEYS", 0)
    rng, given, n = np.random.default_rng(3), arrays(), np.arange(S + 1)
    events = np.sort(rng.integers(0, 1000, (U, S)).astype(np.int32), axis=1)
    now = rng.integers(1000, 2000, (B, 1)).astype(np.int32)
    table = jnp.asarray(rng.standard_normal((2, 64), np.float32))

    def fn(blocks: Any, long: Any, token: Any, index: Any, table: Any) -> Any:
        at = jnp.concatenate([jnp.asarray(events)[index], now], axis=1)
        bias = table[0][BUCKETS[bucket](at[:, :, None] - at[:, None])]
        bias = (bias + table[1][n[:, None] - n + S + 1])[:, None]

        def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
            logits = jnp.einsum("btnh,bsnh->bnts", q, k) * D**-0.5 + bias
            return jnp.einsum("bnts,bsnh->btnh", WEIGHTS[weights](logits, mask), v)

        return layout_sequences.transformer(attend)(blocks, long, token, index)

    args = *(given[name] for name in ("blocks2", "long", "token", "index")), table
    report = report_of(fn, *args)
    assert report.flops_saved >= 0.83 * report.costs.original.flops, report
    check_values_and_gradients(fn, *args, bound=3e-5)


# Symbolic numbers of users and candidates, as in an exported model.

#: Layouts that do not name users and batch, so that they may be symbolic.
NAMES = (
    "dlrm",
    "din",
    "filled",
    "one_hot",
    "searchsorted",
    "gru_by_vmap",
    "last_item_by_two_indices",
    "last_item_taken_along_the_axis",
    "best_items",
    "column_set_to_the_candidates",
    "interpolated_features",
    "attention_with_a_bias_of_the_user",
    "causal_transformer",
    "hstu",
)


def report_of_exported(fn, args, *sizes: str, constraints=()):
    """Compares a function that is exported with symbolic sizes; returns the rewrite's report.

    `sizes` are the names of the sizes B and U; U stays a number without a name.
    """
    symbols = export.symbolic_shape(", ".join(sizes), constraints=constraints)
    symbols = dict(zip((B, U), symbols, strict=False))

    def of(x):
        return jax.ShapeDtypeStruct(tuple(symbols.get(n, n) for n in x.shape), x.dtype)

    symbolic = jax.tree.map(of, args)
    exported = export.export(jax.jit(ikbo.rewrite(fn)))(*symbolic)
    expected = computed(fn, *args)
    np.testing.assert_allclose(exported.call(*args), expected, rtol=1e-4, atol=1e-4)
    (report,) = ikbo.explain(ikbo.rewrite(fn), *symbolic).notes
    assert "raised" not in str(report)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_a_bound(name: str) -> None:
    fn, args = LAYOUTS[name].fn, LAYOUTS[name].args()
    sizes, bound = ("batch", "users"), f"batch >= {S}*users"
    if name == "one_hot":  # Its model names the number of users.
        sizes, bound = ("batch",), f"batch >= {U * S}"
    report = report_of_exported(fn, args, *sizes, constraints=[bound])
    assert report.changed, str(report)
    assert "*batch" in str(report)


@pytest.mark.parametrize("name", ["dlrm", "causal_transformer", "last_item_by_two_indices"])
def test_a_batch_without_a_bound_is_refused(name: str) -> None:
    """A batch of one candidate has fewer rows than there are users."""
    assert not report_of_exported(LAYOUTS[name].fn, LAYOUTS[name].args(), "batch").changed


def _broadcast(users, slots):
    return jnp.broadcast_to(users[:, None], (users.shape[0], slots, users.shape[1]))


#: Spellings of a grid [users, slots] of candidates.
GRIDS = {
    "broadcast": _broadcast,
    "broadcast and merged": lambda u, n: _broadcast(u, n).reshape(u.shape[0] * n, -1),
    "repeat": lambda u, n: jnp.repeat(u, n, axis=0),
    "tile": lambda u, n: jnp.tile(u[:, None], (1, n, 1)),
    "number divided": lambda u, n: u[jnp.arange(u.shape[0] * n) // n],
    "index of the grid": lambda u, n: u[
        jnp.broadcast_to(jnp.arange(u.shape[0])[:, None], (u.shape[0], n))
    ],
    "repeated index": lambda u, n: jnp.take(u, jnp.repeat(jnp.arange(u.shape[0]), n), axis=0),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_of_users_and_slots(name: str) -> None:
    """Its products of sizes are compared by a bound of the product; without one, nothing runs."""

    def model(users, cands, w):
        copies = GRIDS[name](users, cands.shape[1])
        cands = cands.reshape(*copies.shape[:-1], cands.shape[-1])
        return jnp.concatenate([copies, cands], axis=-1) @ w

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((U, 64), (U, B, 33), (97, 128))]
    bound = [f"slots*users >= {S}*users"]
    assert report_of_exported(model, args, "slots", "users", constraints=bound).changed
    assert not report_of_exported(model, args, "slots", "users").changed


def test_sizes_are_compared_for_every_value_of_a_dimension() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    assert lineage.is_at_least(batch, 8)
    assert not lineage.is_at_least(batch, 9)
    assert lineage.is_at_least(3 * batch, batch + 16)
    assert not lineage.is_at_least(16, batch)
    assert lineage.is_at_least(2, 2)
    assert not lineage.is_at_least(1, 2)


def test_one_of_branches_whose_order_is_unknown_counts() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    args = [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (batch, 64)]
    program = jax.make_jaxpr(
        lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x + (w @ w).sum())
    )(*args)
    for found in (cost.program_cost(program), *cost.decisive_costs(program, program, known={})):
        assert found.flops in (2 * 64 * 64 * batch, 2 * 64 * 64 * 64)


def test_a_program_that_may_cost_more_is_refused() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    row, rows = (jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (64, batch))
    original, grown = (
        cost.program_cost(jax.make_jaxpr(lambda x: x @ jnp.ones((512, 512)))(x).jaxpr)
        for x in (row, rows)
    )
    assert "batch" in cost.refusal(grown, original)
    assert not cost.refusal(grown, cost.Cost(2 * grown.flops, 2 * grown.nbytes))

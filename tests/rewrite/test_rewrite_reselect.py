"""Looked-up rows that are sliced, shuffled, rolled, padded or joined along the looked-up axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import both, check_values_and_gradients, close, computed, equations, report_of

import ikbo_jax as ikbo

B, U, R, D, S = 256, 8, 3, 16, 6
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
SORTED = jnp.sort(INDEX)
#: The candidates of all users but the last one, in SORTED.
OTHERS = int((np.asarray(INDEX) < U - 1).sum())
TO_REQUEST = jnp.asarray(problems.ragged_index(RNG, R, U, "unsorted"))
SHUFFLE = jnp.asarray(RNG.permutation(B), jnp.int32)
OUTSIDE = SHUFFLE.at[0].set(5 * B).at[7].set(-9 * B)
INDEX_OUTSIDE = INDEX.at[3].set(99).at[4].set(-3)


def random(*shape):
    return problems.random_array(RNG, shape, "float32") / 2


USER, CAND, WEIGHT = random(U, D), random(B, D), random(2 * D, D) / 2
REQUEST, HISTORY = random(R, D), random(U, S, D)


def dense(rows, cand, w):
    return jax.nn.relu(jnp.concatenate([rows, cand[: len(rows)]], axis=1) @ w)


def two(first, second, cand, w):
    """Two looked-up features, which the program may join only if their rows agree."""
    x = jnp.concatenate([first, second, cand[: len(first)]], axis=1)
    return jax.nn.relu(x @ jnp.concatenate([w, w[:D]], axis=0))


def start_of(cand):
    return jnp.argmax(cand[0])


#: Programs of user, candidates and weights whose only broadcast is removed.
REMOVED = {
    "slice": lambda u, c, w: dense(u[INDEX][:128], c, w),
    "stride": lambda u, c, w: dense(u[INDEX][::2], c, w),
    "reversal": lambda u, c, w: dense(u[INDEX][::-1], c, w),
    "slice of two axes": lambda u, c, w: dense(u[INDEX][9:200, 3:], c[:, :3] + c[:, :3], w[:D])
    + c[:191] @ w[D:],
    "shuffle": lambda u, c, w: dense(u[INDEX][SHUFFLE], c, w),
    "take": lambda u, c, w: dense(jnp.take(u[INDEX], SHUFFLE, axis=0, mode="clip"), c, w),
    "sort by score": lambda u, c, w: dense(u[INDEX][jnp.argsort(c[:, 0])], c, w),
    "out of bounds": lambda u, c, w: dense(u[INDEX][OUTSIDE], c, w),
    "both out of bounds": lambda u, c, w: dense(u[INDEX_OUTSIDE][OUTSIDE], c, w),
    "filled": lambda u, c, w: dense(
        jnp.take(u[INDEX], OUTSIDE, axis=0, mode="fill", fill_value=3.0), c, w
    ),
    "roll": lambda u, c, w: dense(jnp.roll(u[INDEX], 1, axis=0), c, w),
    "roll of a number": lambda u, c, w: dense(jnp.roll(u[INDEX], start_of(c), axis=0), c, w),
    "dynamic slice": lambda u, c, w: dense(
        jax.lax.dynamic_slice_in_dim(u[INDEX], start_of(c), 128, 0), c, w
    ),
    "halves": lambda u, c, w: sum(dense(x, c, w) for x in jnp.split(u[INDEX], 2)),
    "halves swapped": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX][128:], u[INDEX][:128]]), c, w
    ),
    "twice": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX], u[INDEX]]), jnp.concatenate([c, c[SHUFFLE]]), w
    ),
    "two indices": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX], u[SORTED]]), jnp.concatenate([c, c]), w
    ),
    "two tables": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX], jnp.tanh(u)[INDEX]]), jnp.concatenate([c, c]), w
    ),
    "tiled": lambda u, c, w: dense(jnp.tile(u[INDEX], (2, 1)), jnp.tile(c, (2, 1)), w),
    "padded": lambda u, c, w: dense(
        jnp.pad(u[INDEX], ((8, 24), (0, 0))), jnp.pad(c, ((8, 24), (0, 0))), w
    ),
    "padded with zeros": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX], jnp.zeros((24, D))]), jnp.pad(c, ((0, 24), (0, 0))), w
    ),
    "features and candidates": lambda u, c, w: jax.nn.relu(
        jnp.concatenate([u[INDEX], c], axis=1)[SHUFFLE][:128] @ w
    ),
    "positives and negatives": lambda u, c, w: jax.nn.relu(
        jnp.concatenate([jnp.concatenate([u[INDEX], x], axis=1) for x in (c, c[SHUFFLE])]) @ w
    ),
    "two features": lambda u, c, w: two(u[INDEX][:128], jnp.tanh(u)[INDEX][:128], c, w),
    "two rolls": lambda u, c, w: two(
        jnp.roll(u[INDEX], 3, axis=0), jnp.roll(jnp.tanh(u[INDEX]), 3, axis=0), c, w
    ),
    "two shuffles": lambda u, c, w: two(u[INDEX][OUTSIDE], jnp.tanh(u[INDEX])[OUTSIDE], c, w),
    "request and user": lambda u, c, w: two(
        REQUEST[TO_REQUEST][INDEX][::2], u[INDEX][::2], c[::2], w
    ),
    "another axis": lambda u, c, w: (
        jnp.concatenate([u.T[:, INDEX][:, ::-1], c.T]).T @ w
    ),
    "repeated users": lambda u, c, w: dense(jnp.repeat(u, B // U, axis=0)[5:], c, w),
    "shards in a loop": lambda u, c, w: jax.lax.map(
        lambda n: dense(*(jax.lax.dynamic_slice_in_dim(x, n * 64, 64) for x in (u[INDEX], c)), w),
        jnp.arange(4),
    ),
    "the best by score": lambda u, c, w: (lambda best: dense(u[INDEX][best], c[best], w))(
        jax.lax.top_k(((u[INDEX] @ w[:D]) * c).sum(-1), 128)[1]
    ),
}  # fmt: skip

COLUMN = INDEX[:, None]
ROWS = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))


def slice_at(rows, start):
    """128 rows from `start`, which is clamped to the rows and never counted from the end."""
    sizes = (128, rows.shape[1])
    return jax.lax.dynamic_slice(rows, (start, 0), sizes, allow_negative_indices=False)


@pytest.mark.parametrize("start", [-3 * B // 2, -B - 40, -40, -1, 3 * B])
def test_a_dynamic_slice_out_of_bounds(start):
    """JAX counts a negative start from the end once; a start that is still negative becomes 0."""

    def counted(start, user, cand, w):
        return dense(jax.lax.dynamic_slice_in_dim(user[INDEX], start, 128), cand, w)

    for fn in (counted, lambda start, user, cand, w: dense(slice_at(user[INDEX], start), cand, w)):
        fixed = functools.partial(fn, jnp.int32(start))
        check_values_and_gradients(fixed, USER, CAND, WEIGHT)
        assert report_of(fixed, USER, CAND, WEIGHT).changed
        close(*both(fn, jnp.int32(start), USER, CAND, WEIGHT))


def test_an_index_whose_rows_are_concatenated():
    """Index vectors of one column may be concatenated along the candidates."""

    def fn(column, user, cand, w):
        index = jnp.concatenate([column[5:6], column[1:]])
        return dense(jax.lax.gather(user, index, ROWS, (1, D), mode="clip"), cand, w)

    close(*both(fn, COLUMN, USER, CAND, WEIGHT))


IDS = jnp.asarray(RNG.integers(0, S, U), jnp.int32)
PROMISED = {
    "embedding": lambda h, c: h[0].at[IDS[SORTED]].get(indices_are_sorted=True, mode="clip") * c,
    "positions": lambda h, c: (
        h[SORTED].at[jnp.arange(B), IDS[SORTED]].get(indices_are_sorted=True, mode="clip") * c
    ),
    "update": lambda h, c: (
        h[SORTED].at[jnp.arange(B), IDS[SORTED]].set(1.0, indices_are_sorted=True).sum(1) * c
    ),
}


@pytest.mark.parametrize("name", PROMISED)
def test_an_order_that_is_promised_of_candidates_is_not_one_of_users(name):
    """Ids may be sorted in the order of the candidates, and unsorted in the order of the users."""

    def fn(history, cand, w):
        return jnp.tanh(PROMISED[name](jnp.tanh(history @ w[:D]), cand))

    assert report_of(fn, HISTORY, CAND, WEIGHT).changed
    check_values_and_gradients(fn, HISTORY, CAND, WEIGHT)
    eqns = equations(fn, HISTORY, CAND, WEIGHT)
    assert not any(eqn.params.get("indices_are_sorted") for eqn in eqns)


#: Programs that keep copies: few rows, rows of candidates among them.
KEPT = {
    "few rows": lambda u, c, w: dense(u[INDEX][3:7], c, w),
    "with candidates": lambda u, c, w: dense(
        jnp.concatenate([u[INDEX], c]), jnp.concatenate([c, c]), w
    ),
    "cut by padding": lambda u, c, w: dense(
        jax.lax.pad(u[INDEX], 0.0, ((-5, 5, 0), (0, 0, 0))), c, w
    ),
    "mean over candidates": lambda u, c, w: dense(u[INDEX] - u[INDEX].mean(0, keepdims=True), c, w),
}


@pytest.mark.parametrize("name", REMOVED)
def test_chosen_rows_are_a_lookup_again(name):
    args = USER, CAND, WEIGHT
    check_values_and_gradients(REMOVED[name], *args)
    report = report_of(REMOVED[name], *args)
    assert report.changed, report
    assert not report.materialised, report.details
    # The user's half of the first product. XLA fuses the lookup with what reads it.
    assert report.flops_saved > 0.4 * report.costs.original.flops * (name != "slice of two axes")
    # Another axis is transposed before the product with weights. Chosen rows are few beside scores.
    # In a loop, users are looked up once.
    least = {"another axis": -0.07, "the best by score": 0.07, "shards in a loop": 0.07}
    saved = least.get(name, 0.12)
    assert report.bytes_saved > saved * report.costs.original.nbytes


@pytest.mark.parametrize("name", KEPT)
def test_other_rows_stay(name):
    check_values_and_gradients(KEPT[name], USER, CAND, WEIGHT)
    # The mean is subtracted from copies; nothing is gained in the other programs.
    assert report_of(KEPT[name], USER, CAND, WEIGHT).changed == (name == "mean over candidates")


def norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


USER_IDS = jnp.arange(U, dtype=jnp.int32)
UNUSED = {
    "sliced": lambda u: norm(u[SORTED][:OTHERS]),
    "rolled": lambda u: norm(jnp.roll(u[SORTED][:OTHERS], 3, axis=0)),
    "shuffled": lambda u: norm(u[SORTED][jnp.clip(SHUFFLE[:200], 0, OTHERS - 1)]),
    "sliced later": lambda u: norm(jnp.tanh(u[SORTED])[:OTHERS]),
    "repeated": lambda u: norm(jnp.repeat(u, B // U, axis=0)[: B - B // U]),
    # Nothing but integers is looked up, and an unused one names a row without a norm.
    "ids never looked up": lambda u: norm(u[USER_IDS[jnp.minimum(INDEX, U - 2)]]),
    "ids sliced": lambda u: norm(u[USER_IDS[SORTED][:OTHERS]]),
}


@pytest.mark.parametrize("name", UNUSED)
def test_users_that_are_not_chosen_have_no_effect(name):
    """Not even on the gradient, if their rows become NaN at user batch."""

    def fn(user, cand, w):
        return dense(UNUSED[name](user.at[U - 1].set(0.0)), cand, w)

    slope = jax.grad(lambda *args: fn(*args).sum(), 2)
    assert not np.isnan(computed(slope, USER, CAND, WEIGHT)).any()
    check_values_and_gradients(fn, USER, CAND, WEIGHT)
    assert report_of(fn, USER, CAND, WEIGHT).changed


def test_attention_to_shuffled_histories():
    def fn(history, cand, w):
        rows, query = history[INDEX][SHUFFLE], cand[SHUFFLE] @ w[:D]
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", query, rows), axis=-1)
        return jnp.einsum("bs,bsd->bd", weights, jnp.tanh(history)[INDEX][SHUFFLE])

    check_values_and_gradients(fn, HISTORY, CAND, WEIGHT)
    assert "attention: B=256 U=8" in str(ikbo.explain(ikbo.rewrite(fn), HISTORY, CAND, WEIGHT))


POSITIONS = jnp.asarray(RNG.integers(-3, S + 3, (B, 2)), jnp.int32)
RETRIEVED = {
    "along an axis": lambda h: jnp.take_along_axis(h[INDEX], POSITIONS[..., None], 1),
    "clipped": lambda h: jnp.take_along_axis(h[INDEX], POSITIONS[..., None], 1, mode="clip"),
    "filled": lambda h: jnp.take_along_axis(h[INDEX], POSITIONS[..., None], 1, mode="fill"),
    "vmap": lambda h: jax.vmap(lambda row, at: row[at])(h[INDEX], POSITIONS),
    "vmap of one": lambda h: jax.vmap(lambda row, at: row[at])(h[INDEX], POSITIONS[:, 0]),
    "another batch axis": lambda h: jax.vmap(lambda row, at: row[at], (1, 0), 1)(
        h.swapaxes(0, 1)[:, INDEX], POSITIONS
    ),
    "along features": lambda h: jnp.take_along_axis(
        h[INDEX], jnp.broadcast_to(POSITIONS[..., None], (B, 2, D)), 1
    ),
    "8 bits": lambda h: jnp.take_along_axis(h[INDEX], POSITIONS.astype(jnp.int8)[..., None], 1),
    "shuffled": lambda h: jnp.take_along_axis(h[INDEX][SHUFFLE], POSITIONS[..., None], 1),
    "two batch axes": lambda h: jnp.take_along_axis(
        h[INDEX], jnp.broadcast_to(POSITIONS[:, None], (B, S, 2)), 2
    ),
}


@pytest.mark.parametrize("name", RETRIEVED)
def test_items_retrieved_by_candidates_are_looked_up_in_users_rows(name):
    """As in SIM and ETA: no candidate has a copy of the whole history."""

    def fn(history, cand, w):
        return RETRIEVED[name](history) * cand[0, 0] * w[0, 0]

    check_values_and_gradients(fn, HISTORY, CAND, WEIGHT)
    report = report_of(fn, HISTORY, CAND, WEIGHT)
    assert report.changed
    # XLA fuses both lookups of the original, too.
    assert f"f32[{B},{S},{D}]" not in str(jax.make_jaxpr(ikbo.rewrite(fn))(HISTORY, CAND, WEIGHT))
    assert not report.materialised, report.details

"""Every rule by itself: what stays at the smaller batch, and what is refused for a reason."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rewrite_basics import both, close, computed, equations, report_of

from ikbo_jax.rewrite import RewriteReport

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("models_may_promote")]

B, U, D, C = 24, 4, 6, 5
RNG = np.random.default_rng(0)
USER = problems.random_array(RNG, (U, D), "float32")
DEEP = problems.random_array(RNG, (U, 3, D), "float32")
CAND = problems.random_array(RNG, (B, C), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
OTHER = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
W = problems.random_array(RNG, (D, D), "float32")
W_ALL = problems.random_array(RNG, (D + C, 3), "float32")
IDS = jnp.asarray(RNG.integers(0, 9, (U, 2)), jnp.int32)


def check(fn, *args) -> RewriteReport:
    """Asserts that a function and its rewrite agree, and returns the report."""
    for x, y in zip(*map(jax.tree.leaves, both(fn, *args)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    report = report_of(fn, *args)
    assert "raised" not in report.details
    return report


#: Of a looked-up [B, D] and a looked-up [B, 3, D]; all of it can be done before the lookup.
STAY_LAZY = {
    "arithmetic": lambda x, y: (x + 1) * x / 3 - x**2,
    "cast": lambda x, y: x.astype(jnp.bfloat16) * jnp.bfloat16(2),
    "compare": lambda x, y: (x > 0) & (x < 1) | ~(x == x),
    "select": lambda x, y: jnp.where(x > 0, x, 0),
    "log2": lambda x, y: jnp.log2(jnp.abs(x) + 1),
    "gradient_of_tanh": lambda x, y: jax.grad(lambda x: jnp.tanh(x).sum())(x),
    "special": lambda x, y: (
        jax.scipy.special.i0e(x),
        jax.scipy.special.i1e(x),
        jax.scipy.special.betainc(abs(x) + 1, 2.0, 0.5),
        jax.scipy.special.zeta(abs(x) + 2, 1.5),
    ),
    "select_by_scalar": lambda x, y: lax.select(W[0, 0] > 0, x, -x),
    "clamp": lambda x, y: jnp.clip(x, -0.5, 0.5) + lax.clamp(0.0, x, 1.0),
    "bias": lambda x, y: x + W[0],
    "bias_of_another_shape": lambda x, y: y * W[:3],
    "broadcast": lambda x, y: x[:, None] + y,
    "batch_free_mask": lambda x, y: jnp.where(jnp.arange(D) < 4, x, -1.0),
    "reduce": lambda x, y: (x.sum(-1), y.max(1), y.min((1, 2)), y.prod(2), (y > 0).all(1)),
    "argmax": lambda x, y: (jnp.argmax(x, axis=1), jnp.argmin(y, axis=2)),
    "cumulative": lambda x, y: jnp.cumsum(x, 1) + jnp.cumprod(x, 1) + lax.cummax(x, 1),
    "sort": lambda x, y: jnp.sort(y, axis=1),
    "reverse": lambda x, y: x[:, ::-1],
    "transpose": lambda x, y: y.transpose(2, 0, 1),
    "reshape": lambda x, y: y.reshape(B, -1)[:, : 3 * D].reshape(B, D, 3),
    "reshape_with_ones": lambda x, y: x.reshape(1, B, 1, D, 1).squeeze(),
    "slice": lambda x, y: y[:, 1:, ::2],
    "split": lambda x, y: jnp.split(x, [2, 3], axis=1),
    "pad": lambda x, y: jnp.pad(x, ((0, 0), (1, 2)), constant_values=7),
    "expand": lambda x, y: jnp.expand_dims(x, (0, 2)),
    "concatenate": lambda x, y: jnp.concatenate([x, y[:, 0]], axis=1),
    "concatenate_with_shared": lambda x, y: jnp.concatenate(
        [x, jnp.broadcast_to(W[:1], (B, D))], axis=1
    ),
    "matmul": lambda x, y: y @ W,
    "matmul_from_the_left": lambda x, y: W @ x.T,
    "product_by_row": lambda x, y: jnp.einsum("bd,bkd->bk", x, y),
    "tensordot": lambda x, y: jnp.einsum("bkd,de->ebk", y, W),
    "features": lambda x, y: x[:, jnp.asarray([0, 2, 2, 5])],
    "position": lambda x, y: y[:, 1],
    "softmax": lambda x, y: jax.nn.softmax(y, axis=-1) + jax.nn.log_softmax(y),
    "activations": lambda x, y: jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.gelu(x) + jax.nn.elu(x),
    "more_activations": lambda x, y: jax.nn.leaky_relu(x) + jax.nn.softplus(x) + jax.nn.relu6(x),
    "logsumexp": lambda x, y: jax.nn.logsumexp(y, axis=1),
    "norm": lambda x, y: jax.nn.standardize(x, axis=-1),
    "barrier": lambda x, y: lax.optimization_barrier((x, y))[1] * 2,
    "stop_gradient": lambda x, y: lax.stop_gradient(x) * 2,
    "jit": lambda x, y: jax.jit(lambda x: jnp.sin(x) @ W)(x),
    "checkpoint": lambda x, y: jax.checkpoint(lambda x: jnp.sin(x) @ W)(x),
    "checkpoint_name": lambda x, y: checkpoint_name(x, "a") * 2,
    "scan_carry": lambda x, y: lax.scan(lambda c, w: (c * w, c[:, 0]), x, W),
    "scan_constant": lambda x, y: lax.scan(lambda c, w: (c + w[0], x @ W * c), 0.0, W)[1],
    "scan_over_tokens": lambda x, y: lax.scan(lambda c, t: (c + t, t), x, y.transpose(1, 0, 2)),
    "cond": lambda x, y: lax.cond(W[0, 0] > 0, lambda x: x * 2, lambda x: x + 1, x),
    "switch": lambda x, y: lax.switch(2, [jnp.sin, jnp.cos, lambda x: x @ W], x),
}


def of_looked_up(name: str) -> Callable:
    return lambda x, y: STAY_LAZY[name](x[INDEX], y[INDEX])


#: Of those, the ones that compute nothing; a barrier says that its values are wanted as they are.
MOVES = {"transpose", "expand", "position", "barrier", "split", "slice"}


@pytest.mark.parametrize("name", STAY_LAZY)
def test_stays_at_the_smaller_batch(name: str) -> None:
    report = check(of_looked_up(name), USER, DEEP)
    assert {place.reason for place in report.materialised} <= {"returned by the function"}
    # Moving data alone gains nothing.
    assert name not in MOVES or report.changed == (name == "barrier")


@pytest.mark.parametrize("name", sorted(MOVES))
def test_work_on_what_was_moved_stays_at_the_smaller_batch(name: str) -> None:
    def worked(*args):
        return jnp.sin(jax.tree.leaves(of_looked_up(name)(*args))[0])

    assert check(worked, USER, DEEP).changed


#: Of a concatenation of looked-up and candidates' [B, D + C]: parts are worked on by themselves.
BY_PARTS = {
    "elementwise": lambda x: jnp.tanh(x * jnp.sin(x) + 1) @ W_ALL,
    "relu": lambda x: jax.nn.relu(x) @ W_ALL,
    "with_a_bias": lambda x: (x + W_ALL[:, 0]) @ W_ALL,
    "cast": lambda x: x.astype(jnp.float16).astype(jnp.float32) @ W_ALL,
    "transposed": lambda x: W_ALL.T @ x.T,
    "expanded": lambda x: jnp.einsum("bok,kn->bon", x[:, None], W_ALL),
    "reshaped": lambda x: x.reshape(B, 1, -1).squeeze(1) @ W_ALL,
    "cut_within_a_part": lambda x: x[:, 2:] @ W_ALL[2:],
    "cut_to_one_part": lambda x: x[:, 1:5] @ W_ALL[:4],
    "split_back": lambda x: jnp.split(x, [D], axis=1)[0] @ W,
    "summed": lambda x: (x * 2).sum(axis=1) + x.max(axis=1),
    "concatenated_again": lambda x: jnp.concatenate([x, CAND], 1) @ jnp.ones((D + 2 * C, 2)),
    "best_two_padded": lambda x: lax.top_k(jnp.pad(x[..., None], ((0, 0), (1, 2), (0, 1))), 2),
    "product_at_each_position": lambda x: jnp.einsum("bf,bfk->bfk", x, x[..., None] * W_ALL),
    "product_over_positions": lambda x: jnp.einsum("bf,bfk->bk", x, x[..., None] * W_ALL),
    "accumulated": lambda x: jnp.cumsum(x, axis=1) * lax.cumprod(1 + x / 9, 1, reverse=True),
    "in_a_checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(x) @ W_ALL)(x),
    "in_a_scan": lambda x: lax.scan(lambda c, w: (c + x @ w, None), jnp.zeros((B, 3)), W_ALL[None]),
    "in_a_cond": lambda x: lax.cond(W[0, 0] > 0, lambda x: x @ W_ALL, lambda x: x[:, :3], x),
    "carried_from_zeros": lambda x: lax.scan(
        lambda c, w: (c + x * w, None), jnp.zeros((B, D + C)), W_ALL.T
    ),
    "scanned": lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), c * r), 0.0 * x[:, 0], x.T),
    "scanned_back": lambda x: lax.scan(lambda c, r: (c * r, c), jnp.ones(B), x.T, reverse=True),
    "merged_with_the_batch": lambda x: (
        (x[:, :, None] * W_ALL).reshape(-1, 3).max(axis=1).reshape(B, -1)
    ),
}


@pytest.mark.parametrize("name", BY_PARTS)
@pytest.mark.parametrize("user_first", [True, False])
def test_a_concatenation_is_worked_on_by_parts(name: str, user_first: bool) -> None:
    def fn(user, cand):
        parts = [user[INDEX], cand]
        return BY_PARTS[name](jnp.concatenate(parts if user_first else parts[::-1], axis=1))

    materialised = check(fn, USER, CAND).materialised
    assert all(type(place.nbytes) is int for place in materialised)
    assert {place.reason for place in materialised} <= {
        "returned by the function",
        # A branch that returns candidates' values, or a loop, cannot be lazy.
        "the branches of a cond return it in different forms",
        "carried through a scan whose body returns it in another form",
    }


#: Of looked-up [B, D]: refused, and why.
REFUSED = {
    "sum_over_candidates": (lambda x: x.sum(0), "reduce_sum over the looked-up axis"),
    "product_over_candidates": (lambda x: x.T @ x, "product that sums over the looked-up axis"),
    "merged": (
        lambda x: jnp.sort(x.reshape(-1)),
        "sort of a value whose looked-up axis is merged by a reshape",
    ),
    "split": (
        lambda x: x.reshape(2, -1, D).sum(1),
        "an operation along dimensions that look rows up together",
    ),
    "cumulative": (lambda x: jnp.cumsum(x, axis=0), "cumsum along the looked-up axis"),
    "padded": (
        lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0))),
        "pad that cuts or spaces the looked-up axis",
    ),
    "stacked": (
        lambda x: jnp.concatenate([x, CAND[:, :1] * W[:1]]),
        "concatenation along the looked-up axis",
    ),
    "scanned": (lambda x: lax.scan(lambda c, r: (c + r, c), W[0], x)[1], "scan over"),
    "loop": (
        lambda x: lax.fori_loop(0, IDS[0, 0], lambda _, x: x + x[::-1], x),
        "carried through a while loop whose body returns it in another form",
    ),
    "carry_that_meets_candidates": (
        lambda x: lax.scan(lambda c, w: (c + CAND[:, :1] * w, None), x, W[0])[0],
        "carried through a scan whose body returns it in another form",
    ),
}


@pytest.mark.parametrize(("fn", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_for_a_reason(fn, reason: str) -> None:
    report = check(lambda user: fn(jnp.sin(user[INDEX])), USER)
    assert any(place.reason.startswith(reason) for place in report.materialised), report


def test_what_every_step_needs_is_copied_once() -> None:
    def fn(user, cand):
        users = user[INDEX]
        body = lambda c, w: (jnp.sort(users + w[:, None], axis=0)[:, :C] * c, None)  # noqa: E731
        return lax.scan(body, cand, jnp.ones((3, B)))[0]

    report = check(lambda *args: fn(jnp.sin(args[0]), args[1]), USER, CAND)
    (place,) = report.materialised
    assert place.reason == "needed in every iteration of a scan"


def test_random_numbers_prints_and_loops() -> None:
    def fn(user, cand, key):
        users = jnp.tanh(user[INDEX])
        users = jnp.where(jax.random.bernoulli(key, 0.5, users.shape), users, 0.0)
        jax.debug.print("{x}", x=users[0, 0])
        x = jnp.concatenate([users, cand], axis=1) @ W_ALL
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: x * x + 1, x)

    assert check(fn, USER, CAND, jax.random.key(0)).changed


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[INDEX, 1],
        lambda x: jnp.take(x.T, INDEX, axis=2, mode="clip").T,
        lambda x: jnp.take(x.swapaxes(0, 1), INDEX, axis=1, mode="clip").swapaxes(0, 1),
        lambda x: x[INDEX, :, 2],
        lambda x: x[INDEX, 0, 3],
        lambda x: x[:, 1][INDEX],
        lambda x: x.at[INDEX].get(mode="promise_in_bounds"),
        lambda x: jax.vmap(lambda i: x[i])(INDEX),
        lambda x: jax.vmap(lambda i: lax.dynamic_index_in_dim(x, i, keepdims=False))(INDEX),
        lambda x: jnp.take_along_axis(x, INDEX[:, None, None], axis=0),
        # As `torch.gather` is spelled, whose index has the features' size.
        lambda x: jnp.take_along_axis(x, jnp.full((B, *x.shape[1:]), INDEX[:, None, None]), 0),
        lambda x: jnp.take_along_axis(x.T, jnp.full((D, 3, B), INDEX), axis=2).T,
        lambda x: jnp.take_along_axis(x[:, 0], jnp.repeat(INDEX[:, None], D, axis=1), axis=0),
        lambda x: x[INDEX[:, None], jnp.arange(3)],
        lambda x: x[INDEX[:, None, None], jnp.arange(3)[:, None], jnp.arange(D)],
        lambda x: x[INDEX.astype(jnp.int16)],
        lambda x: x[np.asarray(INDEX)],
        lambda x: x[jnp.asarray([0, 1, 2, 3])[INDEX]],
        lambda x: jnp.tensordot((jnp.arange(U) == INDEX[:, None]).astype(x.dtype), x, 1),
        lambda x: jnp.repeat(x, B // U, axis=0),
    ],
)
def test_lookups_in_other_words(look) -> None:
    assert check(lambda x: jnp.sin(look(x)).sum(axis=-1), DEEP).changed


@pytest.mark.parametrize(
    "look",
    [
        lambda x, index: x[index],
        lambda x, index: x[index, 1],
        lambda x, index: x[:, :1][index],
        lambda x, index: jnp.take(x, index, axis=0),
        lambda x, index: jnp.take(jnp.moveaxis(x, 0, 2), index, axis=2, mode="clip").sum(0),
        lambda x, index: jax.vmap(lambda i: x[i])(index),
        lambda x, index: jax.vmap(lambda i: x[i, :1])(index),
        lambda x, index: x[np.zeros(B, np.int32)],
    ],
)
def test_lookups_of_a_requests_only_user(look) -> None:
    def fn(*args):
        return jnp.sin(look(*args)).sum(axis=-1)

    assert check(fn, DEEP[:1], np.zeros(B, np.int32)).changed


@pytest.mark.parametrize("rows", [U, 1])
@pytest.mark.parametrize("position", [0, 3])
def test_a_position_out_of_bounds_fills_every_row(position: int, rows: int) -> None:
    def at(x, index):
        return jnp.sin(x.at[index, position].get(mode="fill", fill_value=jnp.nan))

    report = check(at, DEEP[:rows, :1], np.asarray(INDEX) % rows)
    assert report.changed == (position == 0)


@pytest.mark.parametrize("mode", ["clip", None])
def test_the_same_index_twice_is_one_lookup(mode: str | None) -> None:
    """Also if it is out of bounds, where one of the operands alone is filled."""
    index = INDEX if mode else INDEX.at[0].set(99)

    def fn(user, deep):
        return jnp.sin(user[index] * jnp.take(deep, index, axis=0, mode=mode)[:, 0])

    report = check(fn, USER, DEEP)
    assert "looked up in place" not in report.details
    assert np.isnan(computed(fn, USER, DEEP)[0]).all() == (mode is None)


@pytest.mark.parametrize("mode", ["clip", "fill", None])
def test_a_product_of_lookups_in_other_words_is_computed_for_users(mode: str | None) -> None:
    def fn(user, deep, cand):
        by_feature = jnp.broadcast_to(INDEX[:, None], (B, D))
        rows = jnp.take_along_axis(user, by_feature, axis=0, mode=mode)
        return jnp.einsum("bd,bsd->bs", rows, deep[INDEX]) @ W[:3, :C] * cand

    report = check(fn, USER, DEEP, CAND)
    assert report.changed
    assert not report.materialised, report.details


def test_an_index_that_is_moved_among_copies_is_another_index() -> None:
    """Columns of a repeated index: of copies of its first element, and from its second element."""

    def fn(user, cand):
        copies = jnp.broadcast_to(INDEX[None], (B, B))[:, :1]
        later = jnp.tile(INDEX[:, None], (2, 1))[1 : B + 1]
        rows = [jnp.take_along_axis(user, x, axis=0) for x in (copies, later, INDEX[:, None])]
        return jnp.sin(rows[0] + 2 * rows[1] + 3 * rows[2])[:, :C] * cand

    assert check(fn, USER, CAND).changed


def test_a_lookup_in_what_was_looked_up_is_one_lookup() -> None:
    parent = jnp.asarray([0, 1, 1, 0], jnp.int32)

    def fn(request, user):
        return jnp.sin(request[parent] @ W)[INDEX], (jnp.sin(request[parent]) + user)[INDEX] @ W

    assert check(fn, USER[:2], USER).changed


def test_lookups_by_fill_in_what_was_looked_up() -> None:
    parent = jnp.asarray([0, 5, 1, 0], jnp.int32)
    outside = INDEX.at[0].set(99)

    def fn(request):
        return jnp.take(jnp.take(request, parent, axis=0), outside, axis=0) @ W

    report = check(fn, USER[:2])
    assert report.changed
    assert np.isnan(computed(fn, USER[:2])).any(axis=1).sum() >= 2


def test_one_shared_value_is_not_reported_unless_a_product_is_saved() -> None:
    assert check(lambda x: x + jnp.broadcast_to(W[0, :C], (B, C)), CAND).broadcasts == ()
    report = check(lambda x: jnp.broadcast_to(USER[:1], (B, D)) @ W, CAND)
    assert [found.what for found in report.broadcasts] == [
        f"float32[1,{D}] broadcast -> float32[{B},{D}]"
    ]


def test_a_token_that_all_candidates_share_beside_their_own_tokens() -> None:
    def fn(token, cand):
        x = jnp.concatenate([jnp.broadcast_to(token, (B, 1, C)), cand[:, None]], axis=1)
        return jnp.einsum("bqs,bsd->bqd", jnp.tanh(jnp.einsum("bqd,bsd->bqs", x, x)), x)

    check(fn, W[0, :C], CAND)


@pytest.mark.parametrize(("queries", "batches"), [(4, 1), (40, 0)])
def test_a_broadcast_weight_stays_batched_if_one_product_would_transpose_the_features(
    queries, batches
) -> None:
    """[T, K] by [B, K, N]: as one product, XLA would move K to an end of the features."""
    rng = np.random.default_rng(0)
    shapes = ((queries, 6), (B, 6, 8), (U, 400), (400, 8))
    args = [problems.random_array(rng, shape, "float32") for shape in shapes]

    def fn(weight, x, user, w):
        rows = jnp.broadcast_to(weight, (B, *weight.shape)) @ x
        return rows + (user[INDEX] @ w)[:, None]

    found = equations(fn, *args)
    of_users, product = (eqn for eqn in found if eqn.primitive.name == "dot_general")
    assert of_users.invars[0].aval.shape == (U, 400)
    _, (batch, _) = product.params["dimension_numbers"]
    assert len(batch) == batches
    close(*both(fn, *args))

"""Arguments, indices out of bounds in forward mode, checks, and sharding constraints."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_basics import useful_flops

import ikbo_jax as ikbo

B, U, D = 16, 3, 8
RNG, USER, CAND, W, INDEX = problems.vectors(U, B, D)


@pytest.mark.parametrize("what", [None, 3, [jnp.sin]])
def test_what_is_no_function_is_refused_at_once(what):
    with pytest.raises(TypeError, match="fn must be a function, but is (None|3|.<)"):
        ikbo.rewrite(what)


def layers(user, count, flag, scale):
    """Needs the values of its last three arguments while it is traced."""
    x = user[INDEX]
    for _ in range(count):
        x = jnp.tanh(x @ W)
    return {"x": x * CAND * scale if flag and scale > 1 else x, "count": count}


SCALARS = (np.int64(2), np.bool_(True), np.float32(1.5))


def test_numpy_scalars_are_passed_as_they_are():
    ours, theirs = ikbo.rewrite(layers)(USER, *SCALARS), layers(USER, *SCALARS)
    np.testing.assert_allclose(ours["x"], theirs["x"], rtol=1e-5)
    assert type(ours["count"]) is np.int64
    ours, theirs = (
        jax.grad(lambda u, fn=fn: fn(u, *SCALARS)["x"].sum())(USER)
        for fn in (ikbo.rewrite(layers), layers)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    (report,) = ikbo.explain(ikbo.rewrite(layers), USER, *SCALARS).notes
    assert report.flops_saved > 0


def test_static_numpy_scalars_of_a_jitted_function():
    jitted = jax.jit(layers, static_argnums=(1, 2), static_argnames="scale")
    ours = ikbo.rewrite(jitted)(USER, *SCALARS[:2], scale=SCALARS[2])["x"]
    np.testing.assert_allclose(ours, layers(USER, *SCALARS)["x"], rtol=1e-5)


def test_numpy_scalars_have_a_derivative_and_arrays_of_rank_0_are_traced():
    def scaled(user, scale):
        seen.append(type(scale))
        return (user[INDEX] @ W * CAND * scale).sum()

    seen = []
    ours, theirs = (jax.grad(f, 1)(USER, np.float32(2)) for f in (ikbo.rewrite(scaled), scaled))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ikbo.rewrite(scaled)(USER, np.array(2, np.float32))
    assert issubclass(seen[-1], jax.core.Tracer)


# Indices out of bounds, in forward mode.

OUTSIDE = jnp.array([0, 3, 1, 1, -4])
MODES: dict[str, dict] = {
    "default": {},
    "no wrap": {"wrap_negative_indices": False},
    "clip": {"mode": "clip"},
    "fill": {"mode": "fill", "fill_value": 2.0},
    "drop": {"mode": "drop", "wrap_negative_indices": False},
}
#: Functions of the users' rows [U, D].
OF_ROWS = {
    "rows": lambda u, how: jnp.sin(u.at[OUTSIDE].get(**how)).sum(axis=1),
    "rows of rows": lambda u, how: jnp.sin(
        u[INDEX[:5]].at[jnp.array([5, 0, -6, 4, 0])].get(**how)
    ).sum(axis=1),
    "pairs": lambda u, how: u.at[OUTSIDE, jnp.array([1, 9, 0, 1, 2])[OUTSIDE]].get(**how),
    "beside rows in bounds": lambda u, how: (
        jnp.tanh(u.at[OUTSIDE].get(**how) @ W) * u.at[OUTSIDE].get(mode="clip")
    ).sum(axis=1),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_derivatives_of_indices_out_of_bounds_are_jaxs(name):
    tangent = jnp.arange(1.0, 1 + USER.size).reshape(USER.shape)

    @jax.jit
    def of_all(user):
        def derivatives(fn):
            value, pushed = jax.jvp(fn, (user,), (tangent,))
            back = jax.vjp(fn, user)[1](jnp.arange(1.0, 6))[0]
            # The gradient of a directional derivative, and the derivative of a gradient.
            mixed = jax.grad(lambda u: jax.jvp(fn, (u,), (tangent,))[1].sum())(user)
            again = jax.jvp(jax.grad(lambda u: jnp.sin(fn(u)).sum()), (user,), (tangent,))[1]
            many = jax.vmap(lambda t: jax.linearize(fn, user)[1](t))(jnp.stack([tangent, user]))
            return value, pushed, back, mixed, again, many

        return {
            mode: [derivatives(f) for f in (ikbo.rewrite(fn), fn)]
            for mode, how in MODES.items()
            for fn in [functools.partial(OF_ROWS[name], how=how)]
        }

    for mode, (ours, theirs) in of_all(USER).items():
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=mode)


def attention(user, index):
    keys = jnp.stack([user.at[index].get(mode="clip")] * 4, axis=1)
    mask = jnp.arange(4)[None, None] < jnp.array([4, 0, 2])[index % U][:, None, None]
    logits = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", CAND[:, None], keys), -jnp.inf)
    return (jax.nn.softmax(logits, axis=-1, where=mask) @ keys)[:, 0]


def one_user(user, index):
    """A user's history at all candidates: this program has one variant."""
    keys = jnp.broadcast_to(jnp.log(user)[None], (B, U, D))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", CAND[:, None], keys), axis=-1)
    return jnp.einsum("bqk,bkd->bqd", weights, keys)[:, 0] * index[:, None].astype(jnp.float32)


CHECKED = {
    "logarithms": lambda user, index: (jnp.log(user[index] @ W) * CAND).sum(axis=1),
    "divided": lambda user, index: 1 / user.at[index].get(mode="clip").sum(axis=1) * CAND[:, 0],
    "attention": attention,
    "one_user": one_user,
}
#: A user with a row of NaN, of zeros, and of ones, and which users have candidates.
ROWS = jnp.stack([jnp.full(D, jnp.nan), jnp.zeros(D), jnp.ones(D)])
INDICES = {
    "without NaN": jnp.arange(B) % 2 + 1,
    "all": jnp.arange(B) % U,
    "last user": jnp.full(B, 2),
    "above": jnp.where(jnp.arange(B) == 5, 7, 2),
    "below": jnp.where(jnp.arange(B) == 5, -9, 2),
}


def reports(fn, errors, arguments):
    """What `checkify` reports for each of the arguments, without the line."""
    checked = jax.jit(checkify.checkify(fn, errors=errors))
    return [(checked(*args)[0].get() or "").split(" (`check`")[0] for args in arguments]


def slopes(fn):
    return jax.grad(lambda *args: jnp.sum(fn(*args)))


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_reports_what_the_original_has(name):
    fn, arguments = CHECKED[name], list(itertools.product((ROWS, jnp.abs(USER)), INDICES.values()))
    errors = checkify.float_checks | checkify.index_checks
    ours, theirs = (reports(f, errors, arguments) for f in (jax.jit(ikbo.rewrite(fn)), fn))
    assert ours == theirs
    assert len(set(ours)) > 1
    ours, theirs = (reports(slopes(f), errors, arguments) for f in (ikbo.rewrite(fn), fn))
    for x, y in zip(ours, theirs, strict=True):
        # The first equation with NaN may be another one.
        assert x[:3] == y[:3]
        assert x == y or "out-of-bounds" not in x + y


def test_checkify_finds_indices_out_of_bounds_beside_effects_in_constants_and_under_vmap():
    outside = jnp.array([0, 1, 2, 9])

    def constant(user):
        return user.at[outside].get(mode="clip") @ W

    def beside_effects(user):
        jax.debug.callback(lambda _: None, user[0, 0])
        return user[outside, jnp.array([8, 0, 0, 0])]

    def batched(change):
        """In forward mode: JAX cannot check the batched scatter of a gradient."""

        def tangents(user, index):
            fn = change(lambda user: jnp.sin(user[index]))
            return jax.jvp(fn, (user,), (user,))[1]

        return lambda user: jax.vmap(tangents, (None, 0))(user, jnp.stack([outside, outside]))

    changes = (ikbo.rewrite, lambda f: f)
    made = [*([c(f) for c in changes] for f in (constant, beside_effects)), map(batched, changes)]
    for functions in made:
        ours, theirs = (reports(f, checkify.index_checks, [(USER,)])[0] for f in functions)
        assert ours == theirs
        assert "out-of-bounds" in ours


@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs"])
def test_debugging_settings_report_what_the_original_has(setting):
    def fn(user, index):
        return (jnp.log(user @ jnp.eye(D))[index] * CAND[:, :1] + jnp.sqrt(user[index])).sum(axis=1)

    def error(fn, *args):
        try:
            fn(*args)
        except FloatingPointError as error:
            return str(error)
        return None

    found, tables = [], (ROWS, ROWS.at[0].set(jnp.inf), jnp.ones((U, D)))
    requests = [(rows, INDICES["last user"]) for rows in tables]
    batches = [[x[None] for x in request] for request in requests]
    with getattr(jax, setting)(True):
        for of in (lambda f: f, slopes, lambda f: jax.jit(slopes(f)), jax.vmap):
            for args in batches if of is jax.vmap else requests:
                found.append([error(of(f), *args) for f in (ikbo.rewrite(fn), fn)])
    assert all(ours == theirs for ours, theirs in found), found


# Sharding constraints on looked-up rows.


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def on(x, *spec):
    """`x`, constrained on a mesh of eight devices."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))


def divided_attention(on, user, index, w, cand):
    keys = on(user.reshape(U, 2, 4)[index], "x")
    logits = jnp.einsum("bqd,bkd->bqk", cand.reshape(B, 2, 4), keys)
    return jax.nn.softmax(logits, axis=-1) @ keys


def in_a_scan(on, user, index, w, cand):
    def body(x, _):
        return on(jnp.tanh(x @ w), "x"), None

    return jax.lax.scan(body, user[index], None, length=2)[0] * cand


def called_twice(on, user, index, w, cand):
    tower = jax.jit(lambda x: jnp.sin(jnp.tanh(on(jnp.tanh(jnp.sin(x) @ w) + 1, "x") @ w)) * 2)
    return tower(user[index]) * cand + tower(user[index] + 1)


CONSTRAINED = {
    "multiplied": lambda on, u, i, w, c: on(jnp.tanh(u[i] @ w), "x") * c,
    "features": lambda on, u, i, w, c: on(jnp.tanh(u[i] @ w), None, "x") * c,
    "returned": lambda on, u, i, w, c: on(jnp.tanh(u[i] @ w), None, "x"),
    "concatenated": lambda on, u, i, w, c: on(jnp.concatenate([u[i], c], axis=1), "x") * 2,
    "product by parts": lambda on, u, i, w, c: (
        jnp.concatenate([on(u[i], "x"), c], axis=1) @ jnp.concatenate([w, w])
    ),
    "no longer there": lambda on, u, i, w, c: jnp.tanh(on(u[i], "x") @ w).sum(axis=1) * c[:, 0],
    "out_shardings": lambda on, u, i, w, c: (
        jax.jit(jnp.sin, out_shardings=NamedSharding(mesh(), P("x")))(u[i]) + c
    ),
    "attention": divided_attention,
    "scan": in_a_scan,
    "called twice": called_twice,
}


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("name", CONSTRAINED)
def test_work_stays_divided_as_constrained(name):
    fn = functools.partial(CONSTRAINED[name], on)

    def value_and_slopes(fn):
        def loss(user, w, *rest):
            value = fn(user, rest[0], w, rest[1])
            return jnp.sin(value).sum(), value

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    spread = [jax.device_put(x, NamedSharding(mesh(), P("x"))) for x in (INDEX, CAND)]
    for index, cand in ((INDEX, CAND), spread):
        args = USER, W, index, cand
        ((_, ours), slopes), ((_, theirs), expected) = (
            value_and_slopes(f)(*args) for f in (ikbo.rewrite(fn), fn)
        )
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        alone = jax.jit(ikbo.rewrite(fn))(USER, index, W, cand)
        assert alone.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        for x, y in zip((ours, alone, *slopes), (theirs, theirs, *expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    flops = [
        useful_flops(f, USER, INDEX, W, CAND)
        for f in (fn, functools.partial(CONSTRAINED[name], lambda x, *_: x))
    ]
    assert flops[0] == flops[1]


def test_a_fill_far_above_the_logits_leaves_no_sum():
    """Its exponential is the largest, and becomes 0: the original divides 0 by 0."""

    def attention(query, key, kept):
        logits = jnp.where(kept[INDEX], jnp.einsum("bd,bsd->bs", query, key[INDEX]), 1e30)
        shifted = jnp.exp(logits - logits.max(-1, keepdims=True))
        exponentials = jnp.where(kept[INDEX], shifted, 0)
        weights = exponentials / exponentials.sum(-1, keepdims=True)
        return jnp.einsum("bs,bsd->bd", weights, key[INDEX])

    key = problems.random_array(RNG, (U, 5, D), "float32")
    args = CAND, key, jnp.arange(U * 5).reshape(U, 5) % 4 > 0
    found = ikbo.rewrite(attention)(*args)
    assert np.isnan(found).any()
    np.testing.assert_allclose(found, attention(*args), rtol=1e-5)


def test_checkify_finds_constant_positions_outside_in_derivatives():
    def loss(user, cand):
        x = jax.lax.dynamic_update_slice(user[INDEX], cand[:, :2], (0, D - 1))
        return jnp.tanh(x @ W).sum()

    for fn in (loss, ikbo.rewrite(loss)):
        checked = checkify.checkify(jax.grad(fn), errors=checkify.index_checks)
        error, _ = jax.jit(checked)(USER, CAND)
        assert "out-of-bounds" in str(error.get())

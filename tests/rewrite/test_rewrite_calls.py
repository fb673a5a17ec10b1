"""Jitted functions that are called again and again, and what tracing costs."""

import jax
import jax.numpy as jnp
import pytest
from rewrite_basics import (
    ARGS,
    A,
    B,
    C,
    D,
    H,
    U,
    check,
    check_values_and_gradients,
    close,
    equations,
    report_of,
)
from test_rewrite_shared import check_calls

import ikbo_jax as ikbo

# Jitted functions that are called again and again.


@jax.jit
def block(w, x, scale):
    """More than a few equations, so that it is worth keeping."""
    centred = x - x.mean(axis=1, keepdims=True)
    x = x + jnp.tanh(centred @ w) * scale
    return jnp.where(x > 0, x, jnp.exp(x) - 1), x.sum(axis=1)


@jax.jit
def meeting(w, x, cand):
    x = jnp.sin(x @ w) * 2 + 1
    return x * cand.sum(axis=1, keepdims=True), jnp.concatenate([x, cand], axis=1).sum(axis=1)


def repeated(w, user, cand, index):
    x, y, total = user[index], cand @ jnp.ones((C, D)), 0.0
    for layer in range(4):
        x, sums = block(w[:D, :D] * (layer + 1), x, 0.5)
        y, _ = block(w[:D, :D], y, 0.5)
        met, more = meeting(w[:D, :D], x, cand)
        total = total + sums + more + met.sum(axis=1)
    return total + y.sum(axis=1)


def test_a_jitted_function_called_again_is_rewritten_once() -> None:
    args = ARGS
    eqns = equations(repeated, *args)
    calls = [e.params["jaxpr"] for e in eqns if e.params.get("name") == "block"]
    at_user_batch = [inner for inner in calls if inner.in_avals[1].shape == (U, D)]
    # All of them by one program of their own.
    assert len(at_user_batch) == 4
    assert len(set(map(id, at_user_batch))) == 1
    (found,) = report_of(repeated, *args).broadcasts
    line = block.__wrapped__.__code__.co_firstlineno + 4
    assert f"product at the smaller batch, test_rewrite_calls.py:{line} (block)" in found.became
    check_values_and_gradients(repeated, *args)


def looking_up(jit):
    """Layers that look users up again, share what is materialised, and run inside a scan too."""

    @jit
    def layer(w, x, users, user, index, scale):
        met = jnp.tanh(users @ w) * scale + jnp.take(user, index, axis=0)
        x = x * met + jnp.sort(users, axis=0) + jnp.sort(users * 2, axis=0)
        return x, jnp.where(users > 0, users, jnp.sin(users)), users

    def fn(w, user, cand, index):
        x, users = cand @ w[D:, :D], user[index]
        for n in range(3):
            x, _, users = layer(w[:D, :D] * (n + 1), x, users, user, index, 0.5)

        def step(carry, w):
            x, users = carry
            for n in range(3):
                x, users, _ = layer(w * (n + 1), x, users, user, index, 0.5)
            return (x, users), None

        weights = jnp.stack([w[:D, :D], w[:D, :D] / 2])
        (x, users), _ = jax.lax.scan(step, (x, users), weights)
        return x + layer(w[:D, :D], x, users, user, index, 0.5)[0]

    return fn


def test_a_program_of_its_own_does_and_reports_what_one_in_place_does() -> None:
    # All but the first, those in the scan, and the last, of which one result alone is needed.
    check_calls(looking_up, ARGS, 1, 2)


def in_a_row(jit):
    """Layers with nothing in between, whose results are used later as well."""

    @jit
    def layer(w, x, users, scale):
        users = jnp.tanh(users @ w) * scale
        x = jnp.tanh(jnp.concatenate([users, x], axis=1) @ jnp.concatenate([w, w]))
        return x, users, w, x, users + 1

    def fn(w, user, cand, index):
        x, users, results = cand @ w[D:, :D], user[index], []
        weights = [w[:D, :D] * (n + 1) for n in range(5)]
        for weight in weights:
            with jax.named_scope("deep"):
                results.append(layer(weight, x, users, 0.5))
            x, users, *_ = results[-1]
        (_, _, _, third, more), (*_, w, last, _) = results[3], results[-1]
        return x + users @ w + third + more * last

    return fn


def test_calls_in_a_row_share_a_program_and_keep_their_names() -> None:
    jitted, in_place = in_a_row(jax.jit), in_a_row(lambda f: f)
    eqns = equations(jitted, *ARGS)
    calls = [e for e in eqns if e.params.get("name") == "layer"]
    # The fourth and the fifth, of which other results are needed, stand in place.
    assert [str(e.source_info.name_stack) for e in calls] == ["deep"] * 3
    assert len({id(e.params["jaxpr"]) for e in calls}) == 1

    def batched(f):
        return lambda w, *args: jax.vmap(lambda w: f(w, *args))(jnp.stack([w] * 2))

    check_values_and_gradients(jitted, *ARGS)
    check(batched, jitted, *ARGS)
    both = [report_of(fn, *ARGS) for fn in (jitted, in_place)]
    # What one call writes for another one's product, XLA may write inside.
    assert len({(x.flops_saved, x.materialised, x.lookups, x.repetitions) for x in both}) == 1
    assert len({tuple(b.became for b in x.broadcasts) for x in both}) == 1


@pytest.mark.parametrize("name", ["_attention", "attend"])
def test_a_function_with_an_op_s_name_that_calls_the_op(name: str) -> None:
    """It is rewritten like any other function: the op alone is left as it is."""

    def fn(w, user, cand, index):
        rows = jnp.tanh(user[index] @ w)
        query, key = (x.reshape(len(index), 1, 2, -1) for x in (cand @ w, rows))
        return ikbo.attention(query, key, key * 2, jnp.arange(len(index), dtype=jnp.int32))

    fn.__name__ = name
    model = jax.jit(fn)
    args = A.w[:D], A.user, A.user[A.index] + 1, A.index
    report = report_of(model, *args)
    assert report.flops_saved >= 2 * (B - U) * D * H
    close(ikbo.rewrite(model)(*args), model(*args))


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_checkpointed_layer_knows_the_mask_that_it_closes_over(dtype: str) -> None:
    """As `flax.linen.make_causal_mask` and `remat` have it, and padding."""
    history = jnp.sin(jnp.arange(U * 8.0 * D)).reshape(U, 8, D)
    lengths = jnp.arange(U, dtype=jnp.int32) % 8 + 1

    def fn(w, history, lengths, cand, index):
        x = jnp.concatenate([history[index], cand[:, None]], axis=1)
        kept = jnp.arange(8)[None] < lengths[index, None]
        kept = jnp.concatenate([kept, jnp.ones((len(index), 1), bool)], axis=1)
        seen = jnp.tri(9, dtype=bool)[None] & kept[:, None] | jnp.eye(9, dtype=bool)[None]
        mask = seen.astype(dtype)

        @jax.checkpoint
        def layer(x):
            logits = jnp.einsum("bqd,bkd->bqk", x, x @ w)
            weights = jax.nn.softmax(jnp.where(mask.astype(bool), logits, -1e9))
            return x + jnp.einsum("bqk,bkd->bqd", weights, jnp.tanh(x @ w))

        return layer(x)[:, -1]

    args = A.w[:D, :D], history, lengths, jnp.cos(A.user[A.index]), A.index
    check_values_and_gradients(fn, *args)
    costs = report_of(fn, *args).costs
    assert costs.rewritten.flops < 0.6 * costs.original.flops


@pytest.mark.parametrize(
    "run",
    [
        lambda layer, x: jax.checkpoint(layer)(jax.checkpoint(layer)(x)),
        lambda layer, x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0],
    ],
    ids=["checkpoint", "scan"],
)
def test_layers_over_the_history_of_one_user(run) -> None:
    history = jnp.sin(jnp.arange(8.0 * D)).reshape(1, 8, D)
    mask = jnp.tri(9, dtype=bool)[None]

    def fn(w, history, cand):
        def layer(x):
            logits = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x, x @ w), -1e9)
            return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(logits), jnp.tanh(x @ w))

        x = jnp.broadcast_to(history, (len(cand), 8, D))
        return run(layer, jnp.concatenate([x, cand[:, None]], axis=1))[:, -1]

    args = A.w[:D, :D], history, jnp.cos(A.user[A.index])
    check_values_and_gradients(fn, *args)
    costs = report_of(fn, *args).costs
    assert costs.rewritten.flops < 0.4 * costs.original.flops

"""Lookups by an index of several dimensions: what the flattened index saves is saved."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewrite_basics import check, check_values_and_gradients, report_of, share_saved

R, T, U, S, D, H = 5, 7, 4, 6, 8, 12
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(RNG.integers(0, U, (R, T)), jnp.int32)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


USER, HISTORY, CAND = normal(U, D), normal(U, S, D), normal(R, T, D)
W, W2 = normal(D, H), normal(H, D)
IDS, TABLE = jnp.asarray(RNG.integers(0, 90, (U, S))), normal(90, D)

SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "take": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
    "filled": lambda x, i: jnp.take(x, i, axis=0),
    "vmap": lambda x, i: jax.vmap(lambda j: x[j])(i),
    "vmap_over_both": lambda x, i: jax.vmap(lambda y, j: y[j], in_axes=(None, 0))(x, i),
    "vmap_of_slots": lambda x, i: jax.vmap(lambda j: x[j], in_axes=-1, out_axes=-2)(i),
    "embed": lambda x, i: nn.Embed(U, D).apply({"params": {"embedding": x}}, i),
    "one_hot": lambda x, i: jax.nn.one_hot(i, U) @ x,
    "one_hot_dot": lambda x, i: jnp.einsum("ud,rtu->rtd", x, jax.nn.one_hot(i, U)),
    "flattened": lambda x, i: x[i.reshape(-1)].reshape(*i.shape, -1),
    "in_columns": lambda x, i: jnp.stack([x, x], axis=1)[i, 1],
}


def assert_saves_as_flattened(fn: Callable[..., Any], flattened: Any = None) -> None:
    """Asserts that `fn` of index and candidates saves what it saves with one dimension of them."""
    wanted = share_saved(flattened or fn, INDEX.reshape(-1), CAND.reshape(R * T, D))
    report = report_of(fn, INDEX, CAND)
    assert share_saved(fn, INDEX, CAND) >= 0.9 * wanted > 0.38, report.details
    assert "raised" not in report.details


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_an_index_of_two_dimensions_is_found(name: str) -> None:
    def fn(user: Any, index: Any, cand: Any, name: str = name) -> Any:
        tower = jax.nn.relu(SPELLINGS[name](user, index) @ W)
        return jnp.concatenate([tower, cand], axis=-1) @ jnp.concatenate([W2, W2[:D]])

    flattened = functools.partial(fn, USER, name="index")
    assert_saves_as_flattened(functools.partial(fn, USER), flattened)
    check_values_and_gradients(fn, USER, INDEX, CAND)


def _gru(x: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        return jnp.tanh(x @ W + state), None

    return lax.scan(step, jnp.zeros((*x.shape[:-2], H)), jnp.moveaxis(x, -2, 0))[0]


def _sequence(history: Any, cand: Any) -> Any:
    x = jnp.concatenate([history, cand[..., None, :]], axis=-2)
    logits = jnp.einsum("...qd,...kd->...qk", x, x)
    mask = jnp.broadcast_to(jnp.tri(S + 1, dtype=bool), logits.shape)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    return jnp.einsum("...qk,...kd->...qd", weights, x)[..., -1, :]


def _din(x: Any, c: Any) -> Any:
    q = jnp.broadcast_to(c[..., None, :], x.shape)
    unit = jnp.concatenate([q, x, q - x, q * x], axis=-1) @ jnp.tile(W, (4, 1))
    return (jax.nn.sigmoid(unit).sum(-1, keepdims=True) * x).sum(-2)


def _unit_of_flattened_positions(x: Any, c: Any) -> Any:
    rows = [y.reshape(-1, D) for y in (x, jnp.broadcast_to(c[..., None, :], x.shape))]
    unit = jnp.concatenate(rows, axis=1) @ jnp.tile(W, (2, 1))
    return jax.nn.relu(unit).reshape(*x.shape[:-1], -1)


def _attention(x: Any, c: Any, weigh: Any = lambda logits, _: jax.nn.softmax(logits)) -> Any:
    logits, values = jnp.einsum("...d,...sd->...s", c, x @ W @ W2), jnp.sin(x) @ W @ W2
    return jnp.einsum("...s,...sd->...d", weigh(logits, x[..., 0] > 0), values)


#: Of histories [..., S, D] that are looked up; each ends with values of the user or the candidate.
OPS: dict[str, Callable[..., Any]] = {
    "norm": lambda x, c: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True)) @ W,
    "pooling": lambda x, c: jnp.tanh(x @ W).mean(-2),
    "sorted": lambda x, c: jnp.sort(x, axis=-2) @ W,
    "cumsum": lambda x, c: jnp.cumsum(x, axis=-2) @ W,
    "top_k": lambda x, c: lax.top_k(x, 3)[0] @ W[:3],
    "argmax": lambda x, c: jax.nn.one_hot(jnp.argmax(x, -1), D) @ W,
    "reversed": lambda x, c: x[..., ::-1, :] @ W,
    "sliced": lambda x, c: x[..., 1:4, :] @ W,
    "split": lambda x, c: jnp.split(x, 2, axis=-1)[1] @ W[: D // 2],
    "rolled": lambda x, c: jnp.roll(x, 1, axis=-2) @ W,
    "padded": lambda x, c: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])[..., 1:] @ W,
    "updated": lambda x, c: x.at[..., 0].set(1.0) @ W,
    "features": lambda x, c: x[..., jnp.array([3, 1, 2])] @ W[:3],
    "dynamic": lambda x, c: lax.dynamic_slice_in_dim(x, c.shape[0] - 4, 2, x.ndim - 1) @ W[:2],
    "transposed": lambda x, c: jnp.swapaxes(x, -1, -2) @ jnp.ones((S, 3)),
    "heads": lambda x, c: (x @ W).reshape(*x.shape[:-1], 3, 4).max(-2) @ W2[:4],
    "stacked": lambda x, c: jnp.stack([x, x * 2], axis=-2) @ W,
    "fft": lambda x, c: jnp.abs(jnp.fft.fft(x)) @ W,
    "masked": lambda x, c: jnp.where(x > 0, x, -1) @ W,
    "checkpoint": lambda x, c: jax.checkpoint(lambda x: jnp.sin(x @ W))(x),
    "jitted": lambda x, c: jax.jit(lambda x: jax.nn.silu(jax.nn.gelu(x @ W)) @ W2)(x),
    "along": lambda x, c: jnp.take_along_axis(x, jnp.argsort(x, axis=-2), axis=-2) @ W,
    "recurrence": lambda x, c: _gru(x),
    "attention": lambda x, c: _attention(x, c),
    "sequence": lambda x, c: _sequence(x, c),
    "din": _din,
    "flattened": _unit_of_flattened_positions,
    "branches": lambda x, c: lax.cond(c.sum() > 0, lambda x: jnp.sin(x @ W), lambda x: x @ W, x),
    "product": lambda x, c: jnp.einsum("...sd,...d->...s", jnp.tanh(x @ W) @ W2, c),
    "first": lambda x, c: jnp.concatenate([x[..., 0, :] @ W, c @ W], -1) @ jnp.ones((2 * H, 3)),
}


@pytest.mark.parametrize("name", OPS)
def test_every_operation_keeps_an_index_of_two_dimensions(name: str) -> None:
    def fn(history: Any, index: Any, cand: Any) -> Any:
        return OPS[name](history[index], cand)

    assert_saves_as_flattened(functools.partial(fn, HISTORY))
    check(lambda fn: fn, fn, HISTORY, INDEX, CAND)


def test_ids_of_users_and_features_of_requests_are_looked_up() -> None:
    def fn(request: Any, ids: Any, index: Any, cand: Any) -> Any:
        embedded = TABLE[ids[index]].mean(-2)
        parts = embedded @ W, jnp.broadcast_to(request[:, None], cand.shape), cand
        return jnp.concatenate(parts, axis=-1) @ jnp.ones((H + 2 * D, 3))

    args = normal(R, D), IDS, INDEX, CAND
    assert share_saved(fn, *args) >= 0.5
    check_values_and_gradients(fn, *args)


def test_an_operation_along_the_slots_says_why_rows_are_copied() -> None:
    report = report_of(lambda user: jnp.sin(user @ W)[INDEX].sum(1) @ W2, USER)
    assert any("along dimensions that look rows up" in x.reason for x in report.materialised)
    check_values_and_gradients(lambda user: (user[INDEX] @ W).sum(1), USER)


#: Of histories [..., S, D] and candidates' queries [..., D].
ATTENTION: dict[str, tuple[Callable[..., Any], str]] = {
    "softmax": (_attention, "attention"),
    "of_jax": (
        lambda x, c: jax.nn.dot_product_attention(
            *(y.reshape(*y.shape[:-1], 2, -1) for y in (c[..., None, :], x @ W @ W2, x @ W @ W2))
        ).reshape(c.shape),
        "attention",
    ),
    "activation": (
        functools.partial(_attention, weigh=lambda x, mask: jax.nn.relu(x) * mask.astype(x.dtype)),
        "gdpa",
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_requests(name: str) -> None:
    """By `vmap`, between dimensions in another order, of some slots, and of fewer in a loop."""
    of_rows, op = ATTENTION[name]

    def in_turns(history: Any, index: Any, cand: Any) -> Any:
        def step(r: Any, out: Any) -> Any:
            keys = jnp.take(history, index[r, : U - 1], axis=0)
            return out.at[r].set(of_rows(keys, cand[r, : U - 1]))

        return lax.fori_loop(0, R, step, jnp.zeros((R, U - 1, D)))

    for fn in (
        lambda h, i, c: jax.vmap(lambda i, c: of_rows(h[i], c))(i, c),
        lambda h, i, c: jax.vmap(of_rows)(*(x.swapaxes(0, 1)[1:] for x in (h[i], c))),
        in_turns,
    ):
        assert f"-> {op}" in report_of(fn, HISTORY, INDEX, CAND).details
        check_values_and_gradients(fn, HISTORY, INDEX, CAND, bound=3e-5)


#: Weights of logits [..., S] and a mask.
WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, mask: jax.nn.softmax(jnp.where(mask, x / 2, -1e9)),
    "capped": lambda x, mask: jax.nn.softmax(5 * jnp.tanh(x / 5) + jnp.where(mask, 0, -1e9)),
    "by_hand": lambda x, mask: (lambda e: e / e.sum(-1, keepdims=True))(
        jnp.where(mask, jnp.exp(x - x.max(-1, keepdims=True)), 0)
    ),
    "activation": lambda x, mask: jax.nn.silu(x / 3) / S * mask.astype(x.dtype),
}


@pytest.mark.parametrize("values", ["index", "take", "filled", "flattened"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_heads_between_requests_and_slots_of_numbers_out_of_bounds(name: str, values: str) -> None:
    def fn(key: Any, index: Any, query: Any) -> Any:
        logits = jnp.einsum("rsnh,rsknh->rnsk", query, key[index])
        kept = (IDS > 9).at[index].get(mode="clip")[:, None]
        value = SPELLINGS[values](jnp.sin(key).reshape(U, -1), index).reshape(R, T, *key.shape[1:])
        return jnp.einsum("rnsk,rsknh->rsnh", WEIGHTS[name](logits, kept), value)

    args = normal(U, S, 2, 4), 3 * INDEX - 5, normal(R, T, 2, 4)
    assert f"-> {'gdpa' if name == 'activation' else 'attention'}" in report_of(fn, *args).details
    check_values_and_gradients(fn, *args, bound=3e-5)


def test_rows_of_an_index_beside_its_transposed_rows() -> None:
    """The index is square. Another dimension stands between its two."""

    def fn(user: Any, index: Any) -> Any:
        rows = jnp.tanh(user.reshape(U, -1) @ W)[index].reshape(R, R, 3, 4)
        return rows.transpose(0, 2, 1, 3) + rows.transpose(1, 2, 0, 3)

    check_values_and_gradients(fn, USER, INDEX[:, :R])


@pytest.mark.parametrize(("step", "reverse"), [(2, False), (1, True)])
def test_counters_of_loops(step: int, reverse: bool) -> None:
    """A loop counts by twos, or counts up while it takes candidates from the last one on."""

    def fn(user: Any, index: Any, cand: Any) -> Any:
        def one(carry: Any, cand: Any) -> Any:
            r, total = carry
            return (r + step, total + jnp.tanh(user[index[r]] @ W) @ W2 * cand), None

        return lax.scan(one, (0, jnp.zeros((T, D))), cand[: R // 2], reverse=reverse)[0][1]

    check_values_and_gradients(fn, USER, INDEX, CAND)

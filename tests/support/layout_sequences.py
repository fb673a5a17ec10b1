"""Layouts of models of histories, and of sequences [history, candidate]."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from layout_table import HEADS, B, D, S, U, layout

# DIN's activation unit.


@layout("history cand index w_unit w_out", 0.63)
def din(history, cand, index, w_unit, w_out):
    h = history[index]
    q = jnp.broadcast_to(cand[:, None], h.shape)
    x = jnp.concatenate([q, h, q - h, q * h], axis=-1)
    return jax.nn.sigmoid(x @ w_unit) @ w_out


@layout("history cand w_unit w_out", 0.63)
def din_tiled(history, cand, w_unit, w_out):
    h = jnp.tile(history, (1, B // U, 1)).reshape(B, S, D)
    q = jnp.repeat(cand, S, axis=0).reshape(B, S, D)
    x = jnp.concatenate([q, h, q - h, q * h], axis=-1)
    return (jax.nn.sigmoid(x.reshape(B * S, -1) @ w_unit) @ w_out).reshape(B, S, 1)


@layout("user_ids buckets user_fields cand w_tower", 0.86)
def embedded_ids_repeated(user_ids, buckets, user_fields, cand, w_tower):
    x = jnp.stack([buckets[user_ids % 8], user_fields], axis=2)
    x = jnp.repeat(x, B // U, axis=0) @ w_tower
    return jax.nn.relu(x + (cand @ w_tower)[:, None, None]).sum((1, 2))


# Causal transformers over a history and a candidate.


def _norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _block(block, x, attend):
    q, k, v = jnp.split(_norm(x) @ block["qkv"], 3, axis=-1)
    heads = (*x.shape[:-1], HEADS, D)
    y = attend(q.reshape(heads), k.reshape(heads), v.reshape(heads))
    x = x + y.reshape(x.shape) @ block["out"]
    return x + jax.nn.gelu(_norm(x) @ block["up"]) @ block["down"]


def _softmax_attention(q, k, v, mask=None):
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * D**-0.5
    logits = logits if mask is None else jnp.where(mask, logits, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), v)


def transformer(
    attend: Callable[..., Any] = _softmax_attention,
    wrapper: Callable[..., Any] = lambda layer: layer,
    masks: Callable[[Any], Sequence[Any]] = lambda causal: [causal],
    result: Callable[[Any], Any] = lambda x: x[:, -1],
    tokens: Callable[[Any], Any] = lambda x: x,
) -> Callable[..., Any]:
    """Makes a model of layers over [history, candidate].

    Args:
      attend: attention by query, key, value and mask.
      wrapper: `jax.jit`, say, of a layer; the layer is another function whenever the model runs.
      masks: takes the causal mask; returns those that the layers have in turn.
      result: of the last layer's result.
      tokens: of the sequence, before the first layer.
    """

    def fn(blocks, long, token, index):
        x = tokens(jnp.concatenate([long[index], token[:, None]], axis=1))
        length = x.shape[1]
        in_turn = masks(jnp.tril(jnp.ones((length, length), bool))[None, None])

        @wrapper
        def layer(block, x, mask):
            return _block(block, x, functools.partial(attend, mask=mask))

        for n, block in enumerate(blocks):
            x = layer(block, x, in_turn[n % len(in_turn)])
        return result(x)

    return fn


def _hstu(q, k, v, mask):
    weights = jax.nn.silu(jnp.einsum("btnh,bsnh->bnts", q, k)) / (S + 1) * mask.astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _with_types(x):
    """Adds embeddings of the tokens' types, which are the same in every row."""
    types = jnp.broadcast_to(jnp.asarray([0] * S + [1]), x.shape[:2])
    return x + jnp.linspace(0, 1, 2 * x.shape[2]).reshape(2, -1)[types]


_COPIES = ((B, S, HEADS, D), (B, S, D * HEADS), (B, HEADS, S, D), (B, S + 1, HEADS, D))
for _name, _model in {
    "causal_transformer": transformer(),
    "causal_transformer_of_jitted_layers": transformer(wrapper=jax.jit),
    "hstu": transformer(_hstu),
    "causal_transformer_with_types": transformer(tokens=_with_types),
}.items():
    layout("blocks2 long token index", 0.85, _COPIES, name=_name)(_model)


@layout("stacked long token index", 0.84)
def causal_transformer_in_a_scan(stacked, long, token, index):
    x = jnp.concatenate([long[index], token[:, None]], axis=1)
    mask = jnp.tril(jnp.ones((S + 1, S + 1), bool))[None, None]

    @jax.checkpoint
    def layer(x, block):
        return _block(block, x, functools.partial(_softmax_attention, mask=mask))

    return lax.scan(lambda x, block: (layer(x, block), None), x, stacked)[0][:, -1]


# Attention of a candidate to a history, with a bias of the user, and by addition.


@layout("history cand index bias w_tower w_out", 0.79)
def attention_with_a_bias_of_the_user(history, cand, index, bias, w_tower, w_out):
    """The temperature is learned; the bias is the user's."""
    h = history[index]
    logits = (
        jnp.einsum("bd,bsd->bs", cand @ w_tower, h @ w_tower) / jnp.exp(w_out[:1]) + bias[index]
    )
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(logits, axis=-1), h @ (2 * w_tower))


@layout("history items lengths index w_tower", 0.95)
def pooled_by_learned_queries(history, items, lengths, index, w_tower):
    """As a Perceiver or a token for a class: three items stand for the queries."""
    keys, seen = history[index], jnp.arange(S)[None] < lengths[index][:, None]
    logits = jnp.broadcast_to(items[:3], (B, 3, D)) @ keys.swapaxes(1, 2)
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e9), axis=-1)
    return jax.nn.relu((weights @ keys).sum(1) @ w_tower)


@layout("history cand index w_tower w_out", 0.7)
def additive_attention(history, cand, index, w_tower, w_out):
    h = history[index]
    x = (cand @ w_tower)[:, None] + h @ w_tower
    weights = jax.nn.softmax((jnp.tanh(x) @ w_out)[..., 0], axis=-1)
    return jnp.einsum("bs,bsd->bd", weights, h)


@layout("history cand kept index w_state", 0.91)
def interests_by_routing(history, cand, kept, index, w_state):
    """MIND, whose interests are the user's alone."""
    rows, mask = history[index] @ w_state[:D, :D], kept[index][:, None]

    def routed(logits):
        weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=1), 0)
        interests = jnp.einsum("bks,bsd->bkd", weights, rows)
        square = (interests**2).sum(-1, keepdims=True)
        return square / (1 + square) * interests / jnp.sqrt(square + 1e-6)

    logits = jnp.arange(3.0)[None, :, None] * jnp.full((B, 1, S), 0.1)
    agreement = jnp.einsum("bkd,bsd->bks", routed(logits), lax.stop_gradient(rows))
    interests = routed(logits + agreement)
    weights = jax.nn.softmax(jnp.einsum("bkd,bd->bk", interests, cand) ** 2, axis=-1)
    return jnp.einsum("bk,bkd->bd", weights, interests)

"""Layouts of models of histories, and of sequences [history, candidate]."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from layout_table import HEADS, B, D, S, layout

# DIN's activation unit.


@layout("history cand index w_unit w_out", 0.63)
def din(history, cand, index, w_unit, w_out):
    h = history[index]
    q = jnp.broadcast_to(cand[:, None], h.shape)
    x = jnp.concatenate([q, h, q - h, q * h], axis=-1)
    return jax.nn.sigmoid(x @ w_unit) @ w_out


@layout("history cand index w_unit w_out", 0.63)
def din_tiled(history, cand, index, w_unit, w_out):
    h = history[index]
    q = jnp.tile(cand[:, None], (1, S, 1))
    x = jnp.concatenate([q, h, q - h, q * h], axis=-1)
    return (jax.nn.sigmoid(x.reshape(B * S, -1) @ w_unit) @ w_out).reshape(B, S, 1)


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


def causal_transformer(blocks, long, token, index, attention=_softmax_attention):
    """The candidate is the last token of a causal sequence."""
    x = jnp.concatenate([long[index], token[:, None]], axis=1)
    length = x.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    for block in blocks:
        x = _block(block, x, functools.partial(attention, mask=mask))
    return x[:, -1]


_COPIES = ((B, S, HEADS, D), (B, S, D * HEADS), (B, HEADS, S, D), (B, S + 1, HEADS, D))
layout("blocks2 long token index", 0.85, _COPIES)(causal_transformer)


@layout("blocks2 long token index", 0.85, _COPIES)
def causal_transformer_of_jax_nn(blocks, long, token, index):
    def attention(q, k, v, mask):
        del mask
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return causal_transformer(blocks, long, token, index, attention)


@layout("stacked long token index", 0.84)
def causal_transformer_in_a_scan(stacked, long, token, index):
    x = jnp.concatenate([long[index], token[:, None]], axis=1)
    mask = jnp.tril(jnp.ones((S + 1, S + 1), bool))[None, None]

    @jax.checkpoint
    def layer(x, block):
        return _block(block, x, functools.partial(_softmax_attention, mask=mask))

    return lax.scan(lambda x, block: (layer(x, block), None), x, stacked)[0][:, -1]


@layout("blocks2 long token index", 0.85, _COPIES)
def causal_transformer_of_jitted_layers(blocks, long, token, index):
    x = jnp.concatenate([long[index], token[:, None]], axis=1)
    mask = jnp.tril(jnp.ones((S + 1, S + 1), bool))[None, None]

    @jax.jit
    def layer(block, x, mask):
        return _block(block, x, functools.partial(_softmax_attention, mask=mask))

    for block in blocks:
        x = layer(block, x, mask)
    return x[:, -1]


def _hstu_attention(q, k, v, mask=None):
    weights = jax.nn.silu(jnp.einsum("btnh,bsnh->bnts", q, k)) / (S + 1)
    weights = weights if mask is None else weights * mask.astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@layout("blocks2 long token index", 0.85, _COPIES)
def hstu(blocks, long, token, index):
    return causal_transformer(blocks, long, token, index, _hstu_attention)


# Attention of a candidate to a history, with a bias of the user, and by addition.


@layout("history cand index bias w_tower", 0.79)
def attention_with_a_bias_of_the_user(history, cand, index, bias, w_tower):
    h = history[index]
    logits = jnp.einsum("bd,bsd->bs", cand @ w_tower, h @ w_tower) + bias[index]
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(logits, axis=-1), h @ (2 * w_tower))


@layout("history cand index w_tower w_out", 0.7)
def additive_attention(history, cand, index, w_tower, w_out):
    h = history[index]
    x = (cand @ w_tower)[:, None] + h @ w_tower
    weights = jax.nn.softmax((jnp.tanh(x) @ w_out)[..., 0], axis=-1)
    return jnp.einsum("bs,bsd->bd", weights, h)

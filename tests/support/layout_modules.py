"""Models of `layout_models`' kinds as modules of Flax: NNX and Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

B, U, S = 96, 4, 9
F_USER, F_CAND, D, VOCABULARY = 6, 3, 8, 50
WIDTH = 16
RNG = np.random.default_rng(1)


def _normal(*shape: int) -> jax.Array:
    return jax.device_put(RNG.standard_normal(shape, np.float32))


def _ids(*shape: int) -> jax.Array:
    return jax.device_put(RNG.integers(0, VOCABULARY, shape).astype(np.int32))


INDEX = jnp.asarray(RNG.integers(0, U, B), jnp.int32)
USER_IDS, CAND_IDS = _ids(U, F_USER), _ids(B, F_CAND)
HISTORY, TOKEN = _normal(U, S, WIDTH), _normal(B, WIDTH)


class LinenFields(linen.Module):
    """Embedded fields, flattened, and a network."""

    @linen.compact
    def __call__(self, user_ids: Any, cand_ids: Any, index: Any) -> Any:
        ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
        x = linen.Embed(VOCABULARY, D)(ids).reshape(len(index), -1)
        x = linen.relu(linen.Dense(24)(x))
        return linen.Dense(1)(x)


class NnxFields(nnx.Module):
    """Embedded fields, flattened, and a network."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.first = nnx.Linear((F_USER + F_CAND) * D, 24, rngs=rngs)
        self.second = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, user_ids: Any, cand_ids: Any, index: Any) -> Any:
        ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
        x = self.embed(ids).reshape(len(index), -1)
        return self.second(nnx.relu(self.first(x)))


class LinenTransformer(linen.Module):
    """A causal transformer over [history, candidate]."""

    layers: int = 2

    @linen.compact
    def __call__(self, history: Any, token: Any, index: Any) -> Any:
        x = jnp.concatenate([history[index], token[:, None]], axis=1)
        positions = self.param("positions", linen.initializers.normal(0.1), (1, S + 1, WIDTH))
        x = x + positions
        mask = linen.make_causal_mask(x[..., 0])
        for _ in range(self.layers):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(y, y, mask=mask)
            y = linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))
            x = x + linen.Dense(WIDTH)(linen.gelu(y))
        return linen.Dense(1)(linen.LayerNorm()(x)[:, -1])


class NnxLayer(nnx.Module):
    """One layer of `NnxTransformer`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.second = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class NnxTransformer(nnx.Module):
    """A causal transformer over [history, candidate]."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2) -> None:
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(layers)])
        self.score = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, history: Any, token: Any, index: Any) -> Any:
        x = jnp.concatenate([history[index], token[:, None]], axis=1)
        mask = nnx.make_causal_mask(jnp.ones((1, S + 1)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.score(x[:, -1])


def _linen(module: linen.Module, *request: Any) -> tuple[Any, tuple[Any, ...]]:
    params = jax.jit(module.init)(jax.random.key(0), *request)
    return module.apply, (params, *request)


def _nnx(module: Any, *request: Any) -> tuple[Any, tuple[Any, ...]]:
    graph, state = nnx.split(module)
    return lambda state, *request: nnx.merge(graph, state)(*request), (state, *request)


def models() -> dict[str, tuple[Any, tuple[Any, ...], int]]:
    """By name: a model, its arguments, and its FLOPs by hand."""
    fields = (USER_IDS, CAND_IDS, INDEX)
    tokens = (HISTORY, TOKEN, INDEX)
    by_hand = 2 * 24 * D * (U * F_USER + B * F_CAND) + 2 * 24 * B
    layer = 2 * (U * S + B) * WIDTH * WIDTH * (4 + 8)
    attended = 4 * WIDTH * (U * S * S + B * (S + 1))
    transformer = 2 * (layer + attended) + 2 * B * WIDTH
    return {
        "linen_fields": (*_linen(LinenFields(), *fields), by_hand),
        "nnx_fields": (*_nnx(NnxFields(nnx.Rngs(0)), *fields), by_hand),
        "linen_transformer": (*_linen(LinenTransformer(), *tokens), transformer),
        "nnx_transformer": (*_nnx(NnxTransformer(nnx.Rngs(0)), *tokens), transformer),
    }

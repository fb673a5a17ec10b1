"""A causal transformer as modules of Flax: NNX and Linen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

B, U, S = 96, 4, 9
WIDTH = 16
RNG = np.random.default_rng(1)


def _normal(*shape: int) -> jax.Array:
    return jax.device_put(RNG.standard_normal(shape, np.float32))


INDEX = jnp.asarray(RNG.integers(0, U, B), jnp.int32)
HISTORY, TOKEN = _normal(U, S, WIDTH), _normal(B, WIDTH)


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


def models() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By name: a model and its arguments."""
    tokens = (HISTORY, TOKEN, INDEX)
    return {
        "linen": _linen(LinenTransformer(), *tokens),
        "nnx": _nnx(NnxTransformer(nnx.Rngs(0)), *tokens),
    }

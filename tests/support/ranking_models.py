"""Small ranking models from their published descriptions, with users copied at the first layer.

Every model takes a dictionary of arrays. Its users are looked up by `INDEX`, its candidates by
`ITEMS`; padding of a history is the id 0, and one user has an empty history.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import problems

B, U, S, D, V, F = 192, 6, 8, 16, 40, 4  # candidates, users, history, width, items, fields
_RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(_RNG, U, B, "unsorted"))
ITEMS = jnp.asarray(_RNG.integers(1, V, B), jnp.int32)
_LENGTHS = _RNG.integers(1, S + 1, U)
_LENGTHS[int(INDEX[0])] = 0
HISTORY = jnp.asarray(
    np.where(np.arange(S) < _LENGTHS[:, None], _RNG.integers(1, V, (U, S)), 0), jnp.int32
)
#: Arrays by name.
Arrays = dict[str, jax.Array]
PAIRS = np.triu_indices(2 * F, 1)


def _random(*shape: int) -> jax.Array:
    return problems.random_array(_RNG, shape, "float32") / max(shape[0], 4) ** 0.5


def arrays() -> Arrays:
    """The arrays of all models, by name."""
    return {
        "items": _random(V, D) * 2,
        "user": _random(U, D) * 2,
        "cand": _random(B, D) * 4,
        "user_fields": _random(U, F, D) * 2,
        "cand_fields": _random(B, F, D) * 4,
        "score": _random(D, 1),
        "square": _random(D, D),
        "wide": _random(D, 3 * D),
        "first": _random(2 * D, D),
        "gates": _random(3, D, 4),
        "experts": _random(4, 2 * D, D) / 4,
    }


class Ranking(NamedTuple):
    """A model, and what its rewrite must save.

    Attributes:
      fn: the model.
      flops: the share of the FLOPs of its products.
      nbytes: the share of the bytes that it moves.
    """

    fn: Callable[[Arrays], Any]
    flops: float
    nbytes: float


MODELS: dict[str, Ranking] = {}


def _model(flops: float, nbytes: float) -> Callable[[Callable], Callable]:
    def add(fn: Callable) -> Callable:
        MODELS[fn.__name__] = Ranking(fn, flops, nbytes)
        return fn

    return add


def _history(a: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The history [B, S, D], the candidate's item [B, D] and the mask [B, S]."""
    ids = HISTORY[INDEX]
    return a["items"][ids], a["items"][ITEMS], ids > 0


def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


@_model(0.85, 0.45)
def target_attention(a: Arrays) -> Any:
    """Attention with heads, whose mask is applied again after the softmax."""
    history, item, mask = _history(a)

    def heads(x: Any) -> Any:
        return x.reshape(B, -1, 2, D // 2).transpose(0, 2, 1, 3)

    query, key, value = heads(item @ a["square"]), *map(heads, (history @ a["square"], history))
    logits = query @ key.swapaxes(-1, -2) / 4
    mask = mask[:, None, None]
    weights = jnp.where(mask, _softmax(jnp.where(mask, logits, -jnp.inf)), 0)
    return (weights @ value).transpose(0, 2, 1, 3).reshape(B, D)


@_model(0.9, 0.7)
def mind(a: Arrays) -> Any:
    """Interests by dynamic routing, then an attention to them."""
    history, item, mask = _history(a)
    history, mask = history @ a["square"], mask[:, None]
    logits = jnp.arange(3, dtype=jnp.float32)[None, :, None] * jnp.full((B, 1, S), 0.1)
    for _ in range(2):
        weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=1), 0)
        interests = jnp.einsum("bks,bsd->bkd", weights, history)
        square = (interests**2).sum(-1, keepdims=True)
        interests = square / (1 + square) * interests / jnp.sqrt(square + 1e-6)
        logits = logits + jnp.einsum("bkd,bsd->bks", interests, jax.lax.stop_gradient(history))
    weights = _softmax(jnp.einsum("bkd,bd->bk", interests, item) ** 2)
    return jnp.einsum("bk,bkd->bd", weights, interests)


@_model(0.5, 0.1)
def fibinet(a: Arrays) -> Any:
    """Fields scaled by squeeze and excitation, and their bilinear products."""
    x = jnp.concatenate([a["user_fields"][INDEX], a["cand_fields"]], axis=1)
    gates = jax.nn.relu(x.mean(-1) @ a["gates"][0][: 2 * F] @ a["gates"][1][:4].repeat(2, axis=1))
    first, second = PAIRS
    out = [(y[:, first] @ a["square"]) * y[:, second] for y in (x, x * gates[..., None])]
    return jnp.concatenate(out, axis=1).sum(-1)


@_model(0.0, 0.5)
def fm(a: Arrays) -> Any:
    """Products of all pairs of fields, by sums."""
    x = jnp.concatenate([a["user_fields"][INDEX], a["cand_fields"]], axis=1)
    return 0.5 * (x.sum(1) ** 2 - (x**2).sum(1)).sum(-1)


@_model(0.6, 0.0)
def two_tower(a: Arrays) -> Any:
    """In-batch negatives, without those of the same user."""
    user, item = (jax.nn.relu(x @ a["square"]) @ a["wide"] for x in (a["user"][INDEX], a["cand"]))
    user, item = (x / jnp.linalg.norm(x + 1e-3, axis=-1, keepdims=True) for x in (user, item))
    same = (INDEX[:, None] == INDEX[None]) & ~jnp.eye(B, dtype=bool)
    logits = jnp.where(same, -1e9, user @ item.T / 0.1)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.diagonal(logits)


@_model(0.4, 0.4)
def rank_mixer(a: Arrays) -> Any:
    """Networks of single tokens: every field has its own matrix."""
    x = jnp.concatenate([a["user_fields"][INDEX], a["cand_fields"]], axis=1)
    matrices = a["experts"].reshape(2 * F, D, D)
    return x + jax.nn.gelu(jnp.einsum("btd,tdh->bth", x, matrices)) @ a["square"]


@_model(0.16, 0.0)
def wukong(a: Arrays) -> Any:
    """Products of fields with mixtures of them, whose norm reads them several times."""
    x = jnp.concatenate([a["user_fields"][INDEX], a["cand_fields"]], axis=1)
    mixtures = jnp.swapaxes(x, 1, 2) @ a["square"][: 2 * F, :4]
    pairs = (x @ mixtures).reshape(B, -1)
    pairs = pairs - pairs.mean(axis=-1, keepdims=True)
    pairs = pairs * jax.lax.rsqrt((pairs * pairs).mean(axis=-1, keepdims=True) + 1e-5)
    return jax.nn.relu(pairs @ a["first"])

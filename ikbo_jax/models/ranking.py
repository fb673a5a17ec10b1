"""A representative ranking network, in the manner of InterFormer and Kunlun, written three times.

A request holds users (dense features, tokens, a history) and their candidates (tokens). Each layer

1. attends over the history by itself, at user batch;
2. pools the history to a few rows (PMA), at user batch;
3. lets every candidate's queries attend to its user's history (target attention);
4. sends them through a feed-forward net made of the user's pooled rows (PFFN);
5. compresses the embeddings of user and candidate together (linear compression), lets the
   compressed rows interact (a factorisation machine) and adds that to the queries;

and a multi-layer perceptron makes two logits of what user and candidate have become.

`materialised` is how such models are written: where user meets candidate, the user is copied. All
versions are pure functions of the same parameters; `ways` says in what they differ.

Source of the layers: InterFormer (sequences and features learn from each other), Wukong (linear
compression beside a factorisation machine) and Kunlun (PMA and PFFN by GDPA), all by Meta; Guo et
al., "DeepFM", 2017, for the interaction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.layers import functional
from ikbo_jax.models import ways
from ikbo_jax.models.ways import Ways


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of network and request.

    Attributes:
      candidates: B.
      users: U.
      layers: number of layers.
      width: N, of tokens, history and queries.
      user_dense: dense features of a user.
      dense_tokens: tokens that are made of them.
      user_tokens: tokens of a user beside those.
      pooled: rows that a history is pooled to; keys and values of the feed-forward net.
      cand_tokens: K_cand, tokens of a candidate.
      history: S, events of a user.
      queries: T, of a candidate.
      heads: of every attention.
      head_dim: H.
      compressed: M, rows that user and candidate are compressed to.
      rank: of the factorisation machine: factors of a row.
      hidden: width of the head's hidden layer.
      tasks: logits of a candidate.
      dtype: name of the dtype of parameters and inputs.
    """

    candidates: int = 1024
    users: int = 15
    layers: int = 3
    width: int = 256
    user_dense: int = 512
    dense_tokens: int = 32
    user_tokens: int = 1018
    pooled: int = 128
    cand_tokens: int = 866
    history: int = 1024
    queries: int = 64
    heads: int = 2
    head_dim: int = 128
    compressed: int = 433
    rank: int = 16
    hidden: int = 512
    tasks: int = 2
    dtype: str = "bfloat16"

    @property
    def user_rows(self) -> int:
        """K_user: rows of a user that are compressed."""
        return self.user_tokens + self.dense_tokens + self.pooled


#: What a CPU is given. CPUs multiply bfloat16 slowly, hence float32.
SMALL = Sizes(
    candidates=256,
    users=4,
    layers=2,
    width=64,
    user_dense=64,
    dense_tokens=8,
    user_tokens=255,
    pooled=32,
    cand_tokens=217,
    history=256,
    queries=4,
    head_dim=32,
    compressed=109,
    hidden=64,
    dtype="float32",
)


class Request(NamedTuple):
    """What is scored; sorted by user.

    Attributes:
      user_dense: [U, user_dense].
      user_tokens: [U, user_tokens, N].
      history: [U, S, N].
      cand_tokens: [B, K_cand, N].
      cand_to_user: [B] int32.
    """

    user_dense: jax.Array
    user_tokens: jax.Array
    history: jax.Array
    cand_tokens: jax.Array
    cand_to_user: jax.Array


def candidate_counts(sizes: Sizes, seed: int = 0) -> np.ndarray:
    """Candidates of every user, [U] int64: ragged around B / U, B in all, zero not excluded."""
    rng = np.random.default_rng(seed)
    popularity = rng.uniform(0.5, 1.5, sizes.users)
    return rng.multinomial(sizes.candidates, popularity / popularity.sum())


def make_request(sizes: Sizes, seed: int = 0) -> Request:
    """A seeded random request with a ragged number of candidates per user."""
    return Request._make([*draw_request(sizes, seed), user_index(sizes, seed)])


def user_index(sizes: Sizes, seed: int = 0) -> jax.Array:
    """The user of every candidate, [B] int32, sorted."""
    counts = candidate_counts(sizes, seed)
    return jnp.asarray(np.repeat(np.arange(sizes.users, dtype=np.int32), counts))


def draw_request(sizes: Sizes, seed: int | jax.Array) -> tuple[jax.Array, ...]:
    """The seeded values of a request, all but the index; `seed` may be traced."""
    shapes = (
        (sizes.users, sizes.user_dense),
        (sizes.users, sizes.user_tokens, sizes.width),
        (sizes.users, sizes.history, sizes.width),
        (sizes.candidates, sizes.cand_tokens, sizes.width),
    )
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.dtype(sizes.dtype))
        for key, shape in zip(keys, shapes, strict=True)
    )


def init(sizes: Sizes, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Seeded parameters: nested dicts, with the names that the Flax layers give them.

    `seed` may be traced: one program for all of them compiles much faster than one for each shape.
    """
    dtype = jnp.dtype(sizes.dtype)
    # A stream of its own, so that parameters differ from what a request of this seed draws.
    stream = jax.random.fold_in(jax.random.key(seed), 1)
    shapes: list[tuple[int, ...]] = []

    def note(shape: tuple[int, ...]) -> jax.Array:
        shapes.append(shape)
        return jnp.zeros(shape, dtype)

    # One draw for all: a generator for each of some sixty shapes would compile for half a minute.
    jax.eval_shape(lambda: _parameters(sizes, note))
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    values = jax.random.normal(stream, (int(ends[-1]),), jnp.float32)
    # Else XLA might put the generator into the kernel of every slice.
    values = jax.lax.optimization_barrier(values)
    remaining = iter(ends)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        """A matrix that keeps the variance of what it is multiplied by."""
        end = int(next(remaining))
        matrix = values[end - math.prod(shape) : end].reshape(shape)
        return (matrix * jnp.float32(max(1, shape[0]) ** -0.5)).astype(dtype)

    return _parameters(sizes, normal)


def _parameters(sizes: Sizes, normal: Callable[[tuple[int, ...]], jax.Array]) -> dict[str, Any]:
    """The tree of the parameters, whose matrices `normal` makes from their shapes."""
    dtype = jnp.dtype(sizes.dtype)

    def made(specs: dict[str, functional.Spec]) -> dict[str, jax.Array]:
        return {name: make(normal) for name, (_, make) in specs.items()}

    width, heads = sizes.width, (sizes.heads, sizes.head_dim)
    attention = functools.partial(functional.attention_specs, width, width, width, *heads)

    def layer() -> dict[str, Any]:
        both = normal((sizes.user_rows + sizes.cand_tokens, sizes.compressed))
        return {
            "self_attention": made(attention()),
            "pma": made(functional.pma_specs(sizes.pooled, width, width, *heads)),
            "attention": made(attention()),
            "pffn": made(attention()),
            "compression": {
                "w_user": both[: sizes.user_rows].T,
                "w_cand": both[sizes.user_rows :].T,
            },
            "interaction": {
                "w_factors": normal((width, sizes.rank)),
                "w_out": normal(((sizes.compressed + 1) * sizes.rank, width)),
            },
        }

    user = width + sizes.user_dense
    cand = width * (1 + sizes.layers)
    return {
        "w_dense": normal((sizes.user_dense, sizes.dense_tokens * width)),
        "w_queries": normal((sizes.cand_tokens, sizes.queries)).T,
        "layers": [layer() for _ in range(sizes.layers)],
        "head": {
            "w_hidden": normal((user + cand, sizes.hidden)),
            "b_hidden": jnp.zeros(sizes.hidden, dtype),
            "w_logits": normal((sizes.hidden, sizes.tasks)),
            "b_logits": jnp.zeros(sizes.tasks, dtype),
        },
    }


def materialised(params: dict[str, Any], request: Request, *, tuned: bool = False) -> jax.Array:
    """The network as it is usually written: every user is copied to its candidates.

    Args:
      params: of `init`.
      request: a request of the same sizes.
      tuned: makes the most of the copies: the compressed rows are padded to a multiple of 8, and
        cuDNN attends where there is an NVIDIA GPU.

    Returns:
      [B, tasks] f32 logits.
    """
    return _network(params, request, ways.TUNED if tuned else ways.MATERIALISED)


def co_designed(params: dict[str, Any], request: Request) -> jax.Array:
    """The network on this library's layers, which copy no user; `materialised` otherwise."""
    return _network(params, request, ways.CO_DESIGNED)


def hand_optimised(params: dict[str, Any], request: Request, *, most: int) -> jax.Array:
    """The network as an expert writes it for XLA, without this library.

    User and candidate are compressed apart; the queries of a user's candidates are folded into one
    sequence, so that cuDNN attends (off NVIDIA GPUs, XLA) to keys that nobody copied.

    Args:
      params: of `init`.
      request: a request of the same sizes.
      most: candidates of one user, at most. A user's further candidates get wrong scores.

    Returns:
      [B, tasks] f32 logits.
    """
    index = request.cand_to_user
    fold = ways.fold_by_user(index, request.history.shape[0], most)
    return _network(params, request, ways.by_hand(fold))


def _network(params: dict[str, Any], request: Request, how: Ways) -> jax.Array:
    index, width = request.cand_to_user, request.history.shape[-1]
    users = request.history.shape[0]
    # One user's product is a sum over a vector, which XLA would make anew, and slowly, inside every
    # layer's concatenation: 0.12 ms each.
    (dense,) = how.finish((request.user_dense @ params["w_dense"],))
    dense = dense.reshape(users, -1, width)
    history, cand_tokens = request.history, how.prepare(request.cand_tokens)
    queries = jnp.einsum("tk,bkn->btn", params["w_queries"], request.cand_tokens)
    interactions = []
    for layer in params["layers"]:
        history = history + _self_attention(layer["self_attention"], rms_norm(history))
        seen = rms_norm(history)
        pooled = rms_norm(how.pool(layer["pma"], seen))
        queries = queries + how.attend(layer["attention"], rms_norm(queries), seen, index)
        queries = queries + how.feed_forward(layer["pffn"], rms_norm(queries), pooled, index)
        rows = jnp.concatenate([request.user_tokens, dense, pooled], axis=1)
        rows, queries = how.finish((rows, queries))
        compressed = how.compress(layer["compression"], rows, cand_tokens, index)
        interaction = _interaction(layer["interaction"], compressed)
        queries = queries + interaction[:, None]
        history, queries, interaction = how.finish((history, queries, interaction))
        interactions.append(interaction)
    user = jnp.concatenate([jnp.mean(pooled, axis=1), request.user_dense], axis=1)
    cand = jnp.concatenate([jnp.mean(rms_norm(queries), axis=1), *interactions], axis=1)
    head = params["head"]
    hidden = how.join(head["w_hidden"], user, cand, index) + head["b_hidden"][None]
    logits = jax.nn.gelu(hidden) @ head["w_logits"] + head["b_logits"][None]
    return logits.astype(jnp.float32)


def rms_norm(x: jax.Array) -> jax.Array:
    """Rows of the last axis over their root mean square, in f32, rounded to `x`'s dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def _self_attention(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    query, key, value = (
        functional.project(x, params[name]) for name in ("w_query", "w_key", "w_value")
    )
    out = ways.softmax_attention(query, key, value, tuned=True)
    return functional.merge_heads(out, params["w_out"])


def _interaction(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    """Factors of every row, and the sum of their products over all pairs of rows, [B, N]."""
    factors = rows @ params["w_factors"]
    wide = factors.astype(jnp.float32)
    # Of the pairs' products the sum is half of (Σ f)² - Σ f². M of them are as large as one.
    pairs = jnp.sum(wide, axis=1) ** 2 - jnp.sum(wide * wide, axis=1)
    pairs = (pairs * jnp.float32(0.5 / rows.shape[1])).astype(rows.dtype)
    found = jnp.concatenate([factors.reshape(rows.shape[0], -1), pairs], axis=1)
    return rms_norm(found @ params["w_out"])

"""HSTU: a request is one sequence of [history, impressions], and every impression is a target.

    u, v, q, k = split(silu(norm(x) · w_in))
    x = x + (norm(gdpa(q, k, v) / length) ∘ u) · w_out

with silu as the activation of attention. Targets see the history and themselves, so one pass scores
all impressions of a request. Positions are embedded; there is no relative bias.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", 2024, which RecML implements.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ikbo_jax as ikbo
from examples.movielens.impressions import IMPRESSIONS, Batch
from examples.movielens.model import AGES, RATINGS
from ikbo_jax.layers import hstu_layer

#: Rows of a batch of jagged sequences are a multiple of this number, so that few programs compile.
ROWS = 1024
#: Number that the norms add to the variance.
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the network: `history` are a history's rows, with its start."""

    movies: int = 1683
    history: int = 64
    layers: int = 2
    width: int = 32
    heads: int = 2
    head_dim: int = 16


class Tokens(NamedTuple):
    """The rows of all sequences: sequence after sequence, or padded to one length.

    Attributes:
      fields: movie, rating, age and place, counted from the first target; [rows] int32 each.
      cu_seqlens: [U + 1] int32, offsets of the sequences without padding.
      target: [U · IMPRESSIONS] int32, the rows of the impressions.
      label: [U · IMPRESSIONS] float32, 1 for watched movies.
    """

    fields: tuple[jax.Array, ...]
    cu_seqlens: jax.Array
    target: jax.Array
    label: jax.Array


def tokens_of(batch: Batch, *, is_jagged: bool) -> Tokens:
    """Makes sequences of a batch's histories and impressions, in NumPy."""
    users = jax.tree.map(np.asarray, batch.users)
    num_users, history = users.movie.shape
    length, longest = users.length[:, None], history + IMPRESSIONS
    position = np.arange(longest)[None]
    is_event, is_row = position < length, position < length + IMPRESSIONS
    movies = np.asarray(batch.candidates.movie).reshape(num_users, -1)
    of_target = np.take_along_axis(movies, np.clip(position - length, 0, IMPRESSIONS - 1), axis=1)
    padding = ((0, 0), (0, IMPRESSIONS))
    events = [np.pad(x, padding) * is_event for x in (users.movie, users.rating, users.age)]
    events[0] = events[0] + of_target * (is_row & ~is_event)
    fields = [*events, np.where(is_event, length - position, 0)]
    cu_seqlens = np.concatenate([[0], np.cumsum(users.length + IMPRESSIONS)])
    first = cu_seqlens[:-1] if is_jagged else np.arange(num_users) * longest
    if is_jagged:
        spare = -int(cu_seqlens[-1]) % ROWS
        fields = [np.pad(x[is_row], (0, spare)) for x in fields]
    target = (first + users.length)[:, None] + np.arange(IMPRESSIONS)
    rows = [jnp.asarray(x.reshape(-1), jnp.int32) for x in (*fields, cu_seqlens, target)]
    return Tokens(tuple(rows[:4]), rows[4], rows[5], batch.label)


class Hstu(nnx.Module):
    """HSTU with this library's ops, on jagged sequences."""

    is_jagged = True

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        rows = (sizes.movies, RATINGS, AGES, sizes.history + 1)
        width, inner = sizes.width, sizes.heads * sizes.head_dim
        normal, fan_in = nnx.initializers.normal(width**-0.5), nnx.initializers.lecun_normal()

        def params(init: Any, *shapes: tuple[int, int]) -> nnx.List[Any]:
            return nnx.List(nnx.Param(init(rngs.params(), shape, jnp.float32)) for shape in shapes)

        self.tables = params(normal, *((n, width) for n in rows))
        self.w_in = params(fan_in, *[(width, 4 * inner)] * sizes.layers)
        self.w_out = params(fan_in, *[(inner, width)] * sizes.layers)
        self.w_logit = params(normal, (width, 1))[0]

    def __call__(self, tokens: Tokens) -> jax.Array:
        """The logits of the impressions, [U · IMPRESSIONS] f32."""
        tables = (table[...] for table in self.tables)
        x: Any = sum(map(self.look_up, tables, tokens.fields))
        for w_in, w_out in zip(self.w_in, self.w_out, strict=True):
            x = self.layer(x, w_in[...], w_out[...], tokens)
        found = layer_norm(self.look_up(x, tokens.target)) @ self.w_logit[...]
        return found[:, 0].astype(jnp.float32)

    def look_up(self, table: jax.Array, index: jax.Array) -> jax.Array:
        """Looks up rows of a table."""
        return ikbo.look_up(table, index)

    def layer(self, x: Any, w_in: Any, w_out: Any, tokens: Tokens) -> jax.Array:
        """Applies a layer to all rows; attention is divided by the length."""
        length = tokens.cu_seqlens[1:] - tokens.cu_seqlens[:-1]
        return hstu_layer(
            {"uvqk_weight": w_in, "output_weight": w_out},
            x,
            tokens.cu_seqlens,
            num_heads=self.sizes.heads,
            mask=ikbo.masks.hstu(jnp.full_like(length, IMPRESSIONS)),
            max_seqlen=self.sizes.history + IMPRESSIONS,
            activations=("silu",) * 4,
            output_scale=1 / length.astype(jnp.float32),
            concat=False,
            eps=EPS,
        )


class PlainHstu(Hstu):
    """The function of `Hstu`, of the same parameters, in plain XLA on padded sequences."""

    is_jagged = False

    def look_up(self, table: jax.Array, index: jax.Array) -> jax.Array:
        return table[index]

    def layer(self, x: Any, w_in: Any, w_out: Any, tokens: Tokens) -> jax.Array:
        length = (tokens.cu_seqlens[1:] - tokens.cu_seqlens[:-1])[:, None, None, None]
        heads = (4, self.sizes.heads, self.sizes.head_dim)
        projected = jax.nn.silu(layer_norm(x) @ w_in).reshape(len(length), -1, *heads)
        gate, value, query, key = (projected[:, :, part] for part in range(4))
        place = jnp.arange(query.shape[1], dtype=jnp.int32)
        row, column = place[None, None, :, None], place[None, None, None]
        mask = (column < row) & (column < length - IMPRESSIONS) | (column == row)
        scores = jnp.einsum("uinh,ujnh->unij", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.silu(scores * jnp.float32(self.sizes.head_dim**-0.5))
        weights = jnp.where(mask & (column < length), weights, 0) / length.astype(jnp.float32)
        out = jnp.einsum("unij,ujnh->uinh", weights.astype(value.dtype), value)
        return x + (layer_norm(out.reshape(len(x), -1)) * gate.reshape(len(x), -1)) @ w_out


def layer_norm(x: jax.Array) -> jax.Array:
    """Normalises rows to mean 0 and variance 1, in f32."""
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=EPS).astype(x.dtype)

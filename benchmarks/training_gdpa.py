"""A network of generalised attention over jagged sequences, trained in three versions.

A sequence is a user's history. Each block adds self-attention and a feed-forward net whose weights
are the sequence's pooled rows (PFFN); the rows are pooled by seeds (PMA). A perceptron computes one
logit of a sequence from its last pooled rows. All three attentions have one activation:

- `ikbo`: `ikbo_jax.gdpa`, on the jagged rows as they lie.
- `xla`: products over sequences padded to the longest one, scores of all pairs in memory.
- `cudnn-softmax`: another function, softmax attention by cuDNN over the padded sequences; it tells
  what a network costs that has the fastest attention that XLA offers.

The projections work on the jagged rows in all versions: padding would double their cost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from benchmarks import yardsticks
from ikbo_jax.cases.gdpa import offsets_of, uniform_lengths
from ikbo_jax.layers import functional, parameters
from ikbo_jax.models.ranking import rms_norm
from ikbo_jax.models.strategies import einsum_f32
from ikbo_jax.reference.activations import elementwise

ACTIVATION, APPROX = "gelu_tanh", "tanh"
#: The number of rows of all sequences is rounded up to a multiple of this.
MULTIPLE = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of network and inputs.

    Attributes:
      batch: number of sequences, whose lengths are uniform in 1..max_length.
      max_length: rows of the longest sequence.
      width: of the rows.
      heads: number of heads of every attention.
      head_dim: H, width of a head.
      seeds: rows that a sequence is pooled to.
      blocks: number of blocks.
      dtype: name of the dtype of the inputs, and of the parameters in the network.
    """

    batch: int = 1152
    max_length: int = 512
    width: int = 256
    heads: int = 4
    head_dim: int = 128
    seeds: int = 32
    blocks: int = 2
    dtype: str = "bfloat16"

    @property
    def lengths(self) -> np.ndarray:
        """[batch] rows of every sequence."""
        return uniform_lengths(self.batch, self.max_length)


class Inputs(NamedTuple):
    """Jagged sequences: rows [total, width], offsets [batch + 1]. Rows past the last are unused."""

    rows: jax.Array
    offsets: jax.Array


class Attention(NamedTuple):
    """The three attentions of a block, on projected arrays.

    Attributes:
      over_itself: takes query, key and value [total, N, H]; returns [total, N, H].
      pool: takes seeds' queries [seeds, N, H], key and value [total, N, H]; returns
        [batch · seeds, N, H].
      over_pooled: takes query [total, N, H], key and value [batch · seeds, N, H]; returns
        [total, N, H].
    """

    over_itself: Callable[..., jax.Array]
    pool: Callable[..., jax.Array]
    over_pooled: Callable[..., jax.Array]


def init(sizes: Sizes, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Seeded float32 parameters."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))
    width, heads = sizes.width, (sizes.heads, sizes.head_dim)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[0] ** -0.5

    def made(specs: dict[str, parameters.Spec]) -> dict[str, jax.Array]:
        return {name: spec.make(normal) for name, spec in specs.items()}

    def block() -> dict[str, Any]:
        return {
            "attention": made(parameters.pffn_specs(width, width, *heads)),
            "pma": made(parameters.pma_specs(sizes.seeds, width, width, *heads)),
            "pffn": made(parameters.pffn_specs(width, width, *heads)),
        }

    return {
        "blocks": [block() for _ in range(sizes.blocks)],
        "w_hidden": normal((width, width)),
        "w_logits": normal((width, 1)),
    }


def draw(sizes: Sizes, seed: int = 0) -> tuple[Inputs, jax.Array]:
    """Seeded inputs and labels [batch, 1] in {-1, 1}."""
    offsets = jnp.asarray(offsets_of(sizes.lengths), jnp.int32)
    keys = jax.random.split(jax.random.key(seed))
    # Room for a multiple of rows, as where every step has other lengths; XLA would copy an odd
    # number of rows before every product.
    total = -(-int(sizes.lengths.sum()) // MULTIPLE) * MULTIPLE
    rows = jax.random.normal(keys[0], (total, sizes.width), sizes.dtype)
    labels = jax.random.rademacher(keys[1], (sizes.batch, 1), jnp.float32)
    return Inputs(rows, offsets), labels


def network(
    make: Callable[[Sizes, Inputs], Attention], sizes: Sizes, params: Any, inputs: Inputs
) -> jax.Array:
    """Logits [batch, 1] f32; `make` takes sizes and inputs and returns the attentions."""
    attention, rows = make(sizes, inputs), inputs.rows
    pooled = rows
    for block in params["blocks"]:
        normed = rms_norm(rows)
        with jax.named_scope("self_attention"):
            out = attention.over_itself(*functional.projected(block["attention"], normed, normed))
            rows = rows + functional.merge_heads(out, block["attention"]["w_out"])
        normed = rms_norm(rows)
        with jax.named_scope("pma"):
            out = attention.pool(*functional.projected(block["pma"], block["pma"]["seeds"], normed))
            pooled = rms_norm(functional.merge_heads(out, block["pma"]["w_out"]))
        with jax.named_scope("pffn"):
            out = attention.over_pooled(*functional.projected(block["pffn"], normed, pooled))
            rows = rows + functional.merge_heads(out, block["pffn"]["w_out"])
    final = jnp.mean(pooled.reshape(sizes.batch, sizes.seeds, -1), axis=1)
    logits = jax.nn.gelu(final @ params["w_hidden"]) @ params["w_logits"]
    return logits.astype(jnp.float32)


def ours(sizes: Sizes, inputs: Inputs) -> Attention:
    """`ikbo_jax.gdpa`."""
    offsets = inputs.offsets
    pooled = jnp.arange(sizes.batch + 1, dtype=jnp.int32) * sizes.seeds
    gdpa = functools.partial(
        ikbo_jax.gdpa, activation=ACTIVATION, approx=APPROX, scale=sizes.head_dim**-0.5
    )
    of_sequence = {"output_scale": sizes.max_length**-0.5, "max_seqlen_kv": sizes.max_length}
    return Attention(
        lambda q, k, v: gdpa(
            q, k, v, offsets, offsets, max_seqlen_q=sizes.max_length, **of_sequence
        ),
        lambda q, k, v: gdpa(q, k, v, None, offsets, broadcast_q=True, **of_sequence),
        lambda q, k, v: gdpa(
            *(q, k, v, offsets, pooled),
            max_seqlen_q=sizes.max_length,
            max_seqlen_kv=sizes.seeds,
            output_scale=sizes.seeds**-0.5,
        ),
    )


#: Takes query [B, T, N, H], key and value [B, S, N, H], lengths of queries and of keys [B] int32 or
#: None, and the scale of the result; returns [B, T, N, H]. Rows beyond a length are arbitrary.
Dense = Callable[..., jax.Array]


def _activated(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
    output_scale: float,
) -> jax.Array:
    del q_lengths
    scores = einsum_f32("btnh,bsnh->bnts", query, key) * jnp.float32(query.shape[-1] ** -0.5)
    weights = elementwise(ACTIVATION, None).value(scores).astype(value.dtype)
    if kv_lengths is not None:
        is_key = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < kv_lengths[:, None]
        weights = jnp.where(is_key[:, None, None], weights, 0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return out * jnp.asarray(output_scale, out.dtype)


def _softmax(implementation: Literal["xla", "cudnn"]) -> Dense:
    if implementation == "cudnn":
        yardsticks.cudnn()  # Raises NotImplementedError without a GPU.

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        q_lengths: jax.Array | None,
        kv_lengths: jax.Array | None,
        output_scale: float,
    ) -> jax.Array:
        del output_scale
        with jax.numpy_dtype_promotion("standard"):
            out: jax.Array = jax.nn.dot_product_attention(
                query,
                key,
                value,
                query_seq_lengths=q_lengths,
                key_value_seq_lengths=kv_lengths,
                implementation=implementation,
            )
        return out

    return attend


def _padded(sizes: Sizes, inputs: Inputs, attend: Dense) -> Attention:
    """The attentions by `attend`, over sequences padded to the longest one."""
    batch, longest, seeds = sizes.batch, sizes.max_length, sizes.seeds
    offsets = inputs.offsets
    lengths = offsets[1:] - offsets[:-1]
    pad, unpad = yardsticks.padding(offsets, inputs.rows.shape[0], longest)

    def over_itself(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = map(pad, (query, key, value))
        return unpad(attend(*arrays, lengths, lengths, longest**-0.5))

    def pool(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = jnp.broadcast_to(query, (batch, *query.shape))
        # cuDNN takes both lengths or none.
        every = jnp.full_like(lengths, seeds)
        out = attend(query, pad(key), pad(value), every, lengths, longest**-0.5)
        return out.reshape(-1, *out.shape[2:])

    def over_pooled(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (x.reshape(batch, seeds, *x.shape[1:]) for x in (key, value))
        every = jnp.full_like(lengths, seeds)
        return unpad(attend(pad(query), key, value, lengths, every, seeds**-0.5))

    return Attention(over_itself, pool, over_pooled)


def xla(sizes: Sizes, inputs: Inputs) -> Attention:
    """Products over padded sequences, by XLA."""
    return _padded(sizes, inputs, _activated)


def softmax(
    sizes: Sizes, inputs: Inputs, implementation: Literal["xla", "cudnn"] = "cudnn"
) -> Attention:
    """Softmax attention in place of all three; raises NotImplementedError without cuDNN."""
    return _padded(sizes, inputs, _softmax(implementation))

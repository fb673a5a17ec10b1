"""Gradient of broadcast attention: a persistent Mosaic GPU kernel for Hopper, five products.

    P  = exp(scale * query @ key.T - lse),    delta = sum(d_out * out) - d_lse
    dS = P * (d_out @ value.T - delta)
    d_query = scale * dS @ key,   d_key = scale * dS.T @ query,   d_value = P.T @ d_out

The last two are summed over all queries of a user: of its candidates, and of the query heads that
share a key head. `rows` puts these queries side by side, and `statistics` computes lse and delta
of each.

An *item* is a tile of 128 keys of one user and key head. Keys and values stay in shared memory,
their gradients in registers, while blocks of the user's queries follow one another. Scores are
computed transposed, keys by queries, so that weights P.T and gradients of scores dS.T multiply
d_out and queries from registers. d_query of a block needs dS of all 128 keys, so dS passes through
shared memory; a tile's part of d_query goes to device memory, where one more launch adds
the parts of the user's tiles. Either way, each sum is computed in one order, and a repeated launch
gives the same bits.

With `d_query="stored"`, dS goes to device memory instead, and `stored` multiplies it by the keys.
Heads wider than 128 columns have no registers for two sums: the first launch computes d_value and
stores dS, by which `stored` multiplies queries and keys.

Rows of a block past the user's last query are zeroed in shared memory, and get an lse of infinity,
so that another user's queries have no effect. Keys past the user's length are zeroed and get
weights 0.

Warpgroups: 0 and 1 are the consumers, with 64 keys each; of warpgroup 2, one warp loads, and one
stores parts of d_query. A consumer issues, for each block: the gradients of weights; d_value behind
them; after it has stored dS, d_key; and when the other consumer has stored its dS, half of the
columns of d_query and the next block's scores.

Synchronisations:
  1. `item_ready[s]`, `kv_ready[s]`  slot s has an item's descriptor (or the end), and its keys and
                                     values, if it has any query.
  2. `kv_free[s]`                    TMA has read the gradients that were staged in slot s.
  3. `queries_ready[s]`, `queries_free[s]`  stage s has a block of queries, d_out and statistics.
  4. `part_ready[0]`, `part_free[0]`  consumers -> writer and back: a staged part of d_query and its
                                     descriptor (or the end).
  5. A named barrier: the consumers wait for each other when dS is stored, when rows past the last
     query are zeroed, and before gradients overwrite keys.

CTAs take items from a counter.

Source: two consumers of 64 keys, scores transposed, and d_query through shared memory follow Shah
et al., "FlashAttention-3", 2024. No code is shared.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.attention_backward import parts, stored
from ikbo_jax.pallas.attention_backward import rows as query_rows
from ikbo_jax.pallas.attention_backward.consumer import consume
from ikbo_jax.pallas.attention_backward.context import BackwardContext, Operands, Outputs, Shape
from ikbo_jax.pallas.attention_backward.d_query import d_query_kernel
from ikbo_jax.pallas.attention_backward.producer import produce, write
from ikbo_jax.pallas.attention_backward.statistics import Inputs
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist.numbering import Sizes
from ikbo_jax.pallas.worklist.rows import Rows
from ikbo_jax.problems.attention_backward import BLOCK_KV, AttentionBackwardConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS


def attention_backward_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    scale: float,
    indices_are_sorted: bool,
    config: AttentionBackwardConfig,
    num_sms: int,
    logit_cap: float | None = None,
    dtype: Any = None,
    keeps_delta: bool = False,
) -> tuple[jax.Array, ...]:
    """Pulls cotangents of `out` and `lse` back to query, key and value.

    Args (the others are as for `ops.attention`; the configuration is legal):
      out: [B, T, N, H], the result of the forward pass; `lse`: [B, T, N] f32.
      d_out: [B, T, N, H], the query's dtype; `d_lse`: [B, T, N] f32, or None for zeros.
      indices_are_sorted: whether `cand_to_user` never decreases. If not, queries and cotangents are
        copied into the order of users. If True is wrong, all gradients of users with candidates are
        NaN.
      dtype: dtype of the gradients of key and value, the inputs' or f32; None means the inputs'.

    Returns:
      Gradients of query, key and value, each summed in f32, in the same order in every run, and
      rounded once. Zeros for keys past a user's length, users without candidates, and queries
      without keys. With `keeps_delta`, also sum(d_out * out) - d_lse, [B, T, N] f32.
    """
    batch, q_len, q_heads, head_dim = query.shape
    users, kv_len, kv_heads, _ = key.shape
    sizes = Sizes(
        *(batch, users, kv_len, q_len, q_heads // kv_heads, config.block_q, config.splits),
        is_sorted=indices_are_sorted,
        tile_rows=config.tile_rows,
    )
    shape = Shape(sizes, kv_len, kv_heads, head_dim, num_sms, scale, logit_cap)
    rows, statistics, packed, delta = query_rows.with_statistics(
        cand_to_user,
        key_value_seq_lengths,
        Inputs(out, d_out, lse, d_lse, query),
        sizes,
        kv_heads=kv_heads,
        count=shape.targets,
        keeps_delta=keeps_delta,
    )
    operands = Operands(*packed, statistics, key, value, rows.parts)
    dtypes = query.dtype, jnp.dtype(dtype or key.dtype)
    if config.stores_d_scores:
        gradients = _stored(operands, rows, shape, config, dtypes)
    else:
        gradients = _launch(operands, rows, shape, config, dtypes)
    if config.d_query == "launch":
        gradients = d_query_kernel(operands, rows, shape, config), *gradients
    d_query, d_key, d_value = gradients
    more = () if delta is None else (delta.reshape(lse.shape),)
    return d_query.reshape(query.shape), d_key, d_value, *more


def _stored(
    operands: Operands,
    rows: Rows,
    shape: Shape,
    config: AttentionBackwardConfig,
    dtypes: tuple[Any, Any],
) -> tuple[jax.Array, ...]:
    """d_query [B * T, N, H], d_key and d_value, for as many keys at a time as can be stored."""
    chunk = BLOCK_KV * config.stored_tiles(shape.kv_tiles, shape.kv_heads, shape.blocks)
    found, is_one = [], chunk >= shape.kv_len
    for first in range(0, shape.kv_len, chunk):
        keys = min(chunk, shape.kv_len - first)
        part = dataclasses.replace(shape, first_key=first, kv_len=keys)
        d_scores, *d_key, d_value = _launch(operands, rows, part, config, dtypes)
        if not d_key:
            d_key = [stored.d_key_kernel(d_scores, operands, part, config, dtypes[1])]
        dtype = dtypes[0] if is_one else jnp.float32
        d_query = stored.d_query_kernel(d_scores, operands, rows, part, config, dtype)
        found.append((d_query, d_key[0], d_value))
    if is_one:
        return found[0]
    d_queries, *of_keys = zip(*found, strict=True)
    total = functools.reduce(jnp.add, d_queries).astype(dtypes[0])
    return total, *(jnp.concatenate(parts, axis=1) for parts in of_keys)


def _launch(
    operands: Operands,
    rows: Rows,
    shape: Shape,
    config: AttentionBackwardConfig,
    dtypes: tuple[Any, Any],
) -> tuple[jax.Array, ...]:
    """Launches the kernel; returns the arrays of `Outputs` that are not None.

    A launch adds the parts of gradients, in `dtypes`; interpreted, XLA does.
    """
    planes, key = shape.kv_heads * shape.kv_tiles, operands.key
    sums = (planes, shape.targets, shape.head_dim)
    d_scores = (planes * NUM_CONSUMERS, shape.targets, BLOCK_K)
    gradient = query_rows.gradient_type(shape, key.dtype, dtypes[1])
    outputs = Outputs(
        jax.ShapeDtypeStruct(sums, jnp.float32) if config.has_d_query else None,
        jax.ShapeDtypeStruct(d_scores, key.dtype) if config.stores_d_scores else None,
        gradient if shape.has_key else None,
        gradient,
    )
    found = launch(
        Roles(
            functools.partial(BackwardContext, shape, config),
            produce,
            consume,
            ((write, 1),) if config.has_d_query else (),
        ),
        operands,
        outputs,
        config.shared(shape.head_dim),
        dtype=key.dtype,
        name="ikbo_attention_backward" + ("" if shape.has_key else "_d_value"),
        workers=shape.workers,
        has_counter=shape.items > shape.workers,
    )
    number = 2 if shape.has_key else 1
    first, gradients = found[:-number], found[-number:]
    if config.has_parts and not mosaic.is_interpreted():
        of_queries, of_keys = parts.add_parts(
            first[0] if config.has_d_query else None,
            gradients if config.splits > 1 else (),
            *(rows, shape, dtypes),
        )
        first = of_queries or first
        if of_keys:
            return *first, *of_keys
    elif config.has_d_query:
        first = (query_rows.unpack_d_query(first[0], rows, shape, dtypes[0]),)
    return *first, *(query_rows.add_parts(x, shape, dtypes[1]) for x in gradients)

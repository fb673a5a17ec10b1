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
stores dS, by which `d_key` and `stored` multiply.

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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.attention_backward import parts
from ikbo_jax.pallas.attention_backward import rows as query_rows
from ikbo_jax.pallas.attention_backward.consumer import consume
from ikbo_jax.pallas.attention_backward.context import BackwardContext, Operands, Outputs, Shape
from ikbo_jax.pallas.attention_backward.d_key import d_key_kernel
from ikbo_jax.pallas.attention_backward.d_query import d_query_kernel
from ikbo_jax.pallas.attention_backward.producer import produce, write
from ikbo_jax.pallas.attention_backward.statistics import Inputs
from ikbo_jax.pallas.attention_backward.stored import stored_kernel
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist.numbering import Sizes
from ikbo_jax.pallas.worklist.rows import Rows
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    AttentionBackwardConfig,
    most_blocks,
)
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
    group = q_heads // kv_heads
    sizes = Sizes(
        *(batch, users, kv_len, q_len, group, config.block_q, config.splits),
        is_sorted=indices_are_sorted,
        tile_rows=config.tile_rows,
    )
    shape = Shape(
        rows=sizes.rows,
        q_len=q_len,
        group=group,
        users=users,
        kv_len=kv_len,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_tiles=pl.cdiv(kv_len, BLOCK_KV),
        blocks=most_blocks(batch, users, sizes.per_candidate, config.block_q),
        splits=config.splits,
        scale=scale,
        logit_cap=logit_cap,
    )
    workers = 1 if mosaic.is_interpreted() else min(num_sms, shape.items)
    sum_dtype = jnp.dtype(dtype or key.dtype)
    rows, statistics, packed, *delta = query_rows.with_statistics(
        cand_to_user,
        key_value_seq_lengths,
        Inputs(out, d_out, lse, d_lse, query),
        sizes,
        kv_heads=kv_heads,
        count=shape.blocks * config.block_q,
        keeps_delta=keeps_delta,
    )
    more = tuple(x.reshape(lse.shape) for x in delta if x is not None)
    operands = Operands(*packed, statistics, key, value, rows.parts)
    add = functools.partial(_add_parts, rows=rows, sizes=sizes, dtypes=(query.dtype, sum_dtype))
    run = functools.partial(_launch, add, dtype=sum_dtype, config=config, workers=workers)
    if config.stores_d_scores:
        of_keys = functools.partial(d_key_kernel, dtype=sum_dtype, num_sms=num_sms)
        multiply = functools.partial(
            stored_kernel, tiles=rows.tiles, order=rows.order, num_sms=num_sms
        )
        result, d_key, d_value = _stored(operands, shape, config, run, of_keys, multiply)
        return result.reshape(query.shape), d_key, d_value, *more
    if config.d_query == "launch":
        d_key, d_value = run(operands, shape=shape)
        result = d_query_kernel(operands, rows, shape, config, num_sms=num_sms)
        return result.reshape(query.shape), d_key, d_value, *more
    of_query, of_key, of_value = run(operands, shape=shape)
    return of_query, of_key, of_value, *more


def _stored(
    operands: Operands,
    shape: Shape,
    config: AttentionBackwardConfig,
    run: Callable[..., tuple[jax.Array, ...]],
    multiply_by_queries: Callable[..., jax.Array],
    multiply: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d_query [B * T, N, H], d_key and d_value, for as many keys at a time as can be stored.

    `run` stores gradients of scores (of wide heads, `multiply_by_queries` computes d_key).
    """
    chunk = BLOCK_KV * config.stored_tiles(shape.kv_tiles, shape.kv_heads, shape.blocks)
    found, is_one = [], chunk >= shape.kv_len
    for first in range(0, shape.kv_len, chunk):
        keys = min(chunk, shape.kv_len - first)
        tiles = pl.cdiv(keys, BLOCK_KV)
        part = dataclasses.replace(shape, first_key=first, kv_len=keys, kv_tiles=tiles)
        d_scores, *d_key, d_value = run(operands, shape=part)
        if not d_key:
            d_key = [multiply_by_queries(d_scores, operands, part, config)]
        dtype = operands.query.dtype if is_one else jnp.float32
        d_query = multiply(d_scores, operands, shape=part, config=config, dtype=dtype)
        found.append((d_query, d_key[0], d_value))
    if is_one:
        return found[0]
    d_queries, *of_keys = zip(*found, strict=True)
    total = functools.reduce(jnp.add, d_queries).astype(operands.query.dtype)
    whole_d_key, whole_d_value = (jnp.concatenate(parts, axis=1) for parts in of_keys)
    return total, whole_d_key, whole_d_value


def _add_parts(
    found: Sequence[jax.Array],
    shape: Shape,
    config: AttentionBackwardConfig,
    *,
    rows: Rows,
    sizes: Sizes,
    dtypes: tuple[Any, Any],
) -> tuple[jax.Array, ...]:
    """Adds the parts of a launch's results, in `dtypes`, by a launch; interpreted, by XLA."""
    number = 2 if shape.has_key else 1
    first, gradients = tuple(found[:-number]), tuple(found[-number:])
    size: dict[str, Any] = {"kv_heads": shape.kv_heads, "scale": shape.scale}
    by_launch = config.has_parts and not mosaic.is_interpreted()
    if by_launch:
        of_queries, of_keys = parts.add_parts(
            first[0] if config.has_d_query else None,
            gradients if shape.splits > 1 else (),
            rows,
            sizes,
            keys=shape.kv_len,
            dtypes=dtypes,
            **size,
        )
        first, gradients = of_queries or first, of_keys or gradients
    elif config.has_d_query:
        first = (query_rows.unpack_d_query(first[0], rows, sizes, dtype=dtypes[0], **size),)
    splits = 1 if by_launch else shape.splits
    keys = (shape.users, shape.kv_len, shape.kv_heads, shape.head_dim)
    add = functools.partial(query_rows.add_parts, shape=keys, splits=splits, dtype=dtypes[1])
    return *first, *map(add, gradients)


def _launch(
    add: Callable[..., tuple[jax.Array, ...]],
    operands: Operands,
    *,
    dtype: Any,
    shape: Shape,
    config: AttentionBackwardConfig,
    workers: int,
) -> tuple[jax.Array, ...]:
    """Launches the kernel; returns the arrays of `Outputs` that are not None, added by `add`."""
    planes = shape.kv_heads * shape.kv_tiles
    key, sums = operands.key, (planes, shape.blocks * config.block_q, shape.head_dim)
    keys = (shape.users, shape.kv_len, *key.shape[2:])
    gradient = query_rows.gradient_type(keys, key.dtype, shape.splits, dtype)
    d_scores = (planes * NUM_CONSUMERS, shape.blocks * config.block_q, BLOCK_K)
    outputs = Outputs(
        jax.ShapeDtypeStruct(sums, jnp.float32) if config.has_d_query else None,
        jax.ShapeDtypeStruct(d_scores, key.dtype) if config.stores_d_scores else None,
        gradient if shape.has_key else None,
        gradient,
    )
    context = functools.partial(BackwardContext, shape, config)
    found = launch(
        Roles(context, produce, consume, ((write, 1),) if config.has_d_query else ()),
        operands,
        outputs,
        config.shared(shape.head_dim),
        dtype=key.dtype,
        name="ikbo_attention_backward" + ("" if shape.has_key else "_d_value"),
        workers=workers,
        has_counter=shape.items > workers,
    )
    return add(found, shape, config)

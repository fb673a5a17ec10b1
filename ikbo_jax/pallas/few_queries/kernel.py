"""Broadcast attention of users with few queries: one persistent Mosaic GPU kernel for Hopper.

    out[b] = softmax(scale * query[b] @ key[u(b)].T) @ value[u(b)],  u(b) = cand_to_user[b]

If a user has few queries, reading keys and values takes the time. The kernel reads them once for
each item of work.

An *item* is a user, a group of query heads with one key head, up to 64 or 128 of the user's rows
(a row is a candidate's query of all heads) and one part of the user's keys. Rows of several heads
fill one tile of 64 rows of WGMMA. Items are numbered by *row slots*, which the producer finds in
the index (`rows`), or in a table that the consumers make of the index (`user_table`). If the index
is not sorted, the producer sends each run of candidates of one user as an item; or the consumers
list the candidates of a user (`listing`). A CTA's first block of keys and values is loaded before
its rows are found; if no row needs the block, an item without rows takes it.

Warpgroups 0 and 1 are the consumers; one warp of warpgroup 2 is the producer, which loads keys and
values through two rings of blocks that continue across items. Where the consumers list candidates,
the other warps of warpgroup 2 gather their queries. The consumers share an item: each takes 64 of
its rows and all its blocks of keys; or all its rows and every other block, and consumer 1 hands its
sums to consumer 0; or one consumer takes an item with a single block.

The softmax subtracts a running maximum before scores are scaled, which is exact for every input. If
the keys are split, the sums and statistics of each part go to device memory in f32, and XLA adds
them.

Synchronisations:
  1. `items.ready[s]`            producer -> consumers: slot s describes an item (or the end).
  2. `query.ready[s]`, `.free`   query slot s.
  3. `key.ready[s]`, `.free`     stage s of the ring of key blocks.
  4. `value.ready[s]`, `.free`   stage s of the ring of value blocks. The producer waits for `.free`
     from the second use of a slot or stage on. `own.ready[s]`, `.free` likewise, if own tokens
     have a ring.
  5. `exchange_ready[0]`, `exchange_free[0]`  consumer 1 -> 0 and back: sums over half of the keys.
  6. Named barriers: the consumers wait for each other after consumer 0 has zeroed values past a
     user's length, if both use them; with `turns`, they take turns at issuing products.
  7. `listing` and `user_table` have more. Gathering warps fill query slots in launches that list
     candidates, and both they and the producer wait for `.free`.

Both consumers wait for every block, and free it, whether they use it or not. A consumer waits for
block n only after it has freed block n - 1 of the same ring, and for values only after it has freed
the same block's keys; so two stages of each ring suffice for progress.

Source: the idea of splitting keys is Dao et al., "Flash-Decoding for long-context inference", 2023.
No code is shared.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations.cap import Cap, scale_and_cap
from ikbo_jax.pallas.few_queries import gathering
from ikbo_jax.pallas.few_queries.consumer import consume
from ikbo_jax.pallas.few_queries.context import Context, Operands, Outputs, Shape
from ikbo_jax.pallas.few_queries.producer import produce
from ikbo_jax.pallas.flash.softmax import LN_2, further
from ikbo_jax.pallas.hopper import own_tokens
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.problems.attention import AttentionProblem
from ikbo_jax.problems.few_queries import (
    CACHE_BYTES,
    GATHERING_WARPS,
    LEAST_BUNDLES,
    FewQueriesConfig,
    head_group,
    rows_of_head,
)
from ikbo_jax.problems.hopper import WGMMA_M

#: Registers per thread of a consumer and of the producer, which searches: with 24, it spills where
#: query heads share a tile.
REGISTERS = (224, 56)
#: Registers where a consumer multiplies all columns of the values of heads wider than 128, and
#: blocks have more than 32 keys. With smaller blocks, the producer would spill with 40 registers.
WIDE_REGISTERS = (232, 40)


def _registers(shape: Shape, config: FewQueriesConfig, *, has_ranges: bool) -> tuple[int, int]:
    """Returns the registers per thread of a consumer and of the producer."""
    is_large = config.has_all_columns(shape.head_dim) and (has_ranges or config.block_kv > 32)
    if has_ranges:  # a range of each of a thread's two rows; h = 128 spills 80 bytes
        is_large |= shape.head_dim > 64 and config.block_kv > 64
    return WIDE_REGISTERS if is_large else REGISTERS


def few_queries_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None,
    key_value_ranges: jax.Array | None = None,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
    page_table: jax.Array | None = None,
    *,
    scale: float,
    return_residuals: bool,
    config: FewQueriesConfig,
    num_sms: int,
    logit_cap: float | None = None,
    targets: jax.Array | None = None,
    lists: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes `ops.attention`; arguments and results are as for `flash.attention_kernel`.

    `cand_to_user` [B] int32 should be sorted unless `lists`: otherwise keys are read for each run
    of candidates of one user. `lists` says that CTAs list the candidates of their users.
    `key_value_ranges` are in the order of the results. `block_kv` divides the pages of
    a `page_table`.
    """
    assert targets is None or not lists
    if scale == 0:  # every score is 0, as with queries of zeros
        query, scale = jnp.zeros_like(query), 1.0
    scale, cap = scale_and_cap(scale, logit_cap)
    shape = _shape(query, key, scale, config, num_sms, lists=lists, cap=cap, pages=page_table)
    if self_key is not None:
        shape = dataclasses.replace(shape, own=config.own_stages(shape.q_len, shape.group))
        assert shape.own
        assert not lists
    operands = Operands(
        query.reshape(shape.rows, shape.q_heads, shape.head_dim),
        key,
        value,
        cand_to_user if shape.users > 1 else None,
        key_value_seq_lengths,
        targets,
        None if key_value_ranges is None else key_value_ranges.reshape(-1),
        own_tokens.in_order(self_key, targets),
        own_tokens.in_order(self_value, targets),
        None if page_table is None else page_table.reshape(-1),
    )
    out, lse = _launch(operands, shape, config, return_residuals)
    return out.reshape(query.shape), None if lse is None else lse.reshape(query.shape[:-1])


def _shape(
    query: jax.Array,
    key: jax.Array,
    scale: float,
    config: FewQueriesConfig,
    num_sms: int,
    *,
    lists: bool,
    cap: Cap | None = None,
    pages: jax.Array | None = None,
) -> Shape:
    """Divides a launch's work; arguments as for `few_queries_kernel`."""
    batch, q_len, q_heads, head_dim = query.shape
    users, kv_len, kv_heads, _ = key.shape
    page, nbytes = 0, key.nbytes
    if pages is not None:
        page, (users, most) = kv_len, pages.shape
        kv_len = most * page
        nbytes = nbytes // key.shape[0] * pages.size
    group = head_group(q_heads, kv_heads)
    head_rows = rows_of_head(group)
    item_rows = head_rows * config.tile_rows // WGMMA_M
    splits = config.parts(kv_len)
    groups = q_heads // group
    cached = 2 * nbytes <= CACHE_BYTES
    listed, slots = 0, users + batch * q_len // item_rows
    bundle = groups if slots * splits >= LEAST_BUNDLES * num_sms else 1
    sizes = (batch, users, q_len, kv_len, q_heads, kv_heads, head_dim)
    problem = AttentionProblem(*sizes, query.dtype.name)
    if lists and users > 1:
        listing = config.listings(problem, num_sms)
        if listing.candidates:
            listed, slots, bundle, *_ = listing
    return Shape(
        batch=batch,
        q_len=q_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        kv_len=kv_len,
        users=users,
        head_dim=head_dim,
        group=group,
        head_rows=head_rows,
        item_rows=item_rows,
        slots=slots,
        splits=splits,
        bundle=bundle,
        log2_scale=scale * math.log2(math.e),
        workers=min(num_sms, slots * splits * groups // bundle),
        listed=listed,
        alternates=not (listed or cached) and 1 < users < slots,
        prefetches=listed > 0 and 2 * (nbytes + query.nbytes) > CACHE_BYTES,
        table=None if listed else config.table(problem),
        cap=cap,
        page=page,
    )


def _launch(
    operands: Operands, shape: Shape, config: FewQueriesConfig, return_residuals: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the kernel; returns out [rows, N, H], and lse [rows, N] or None."""
    dtype, rows_and_heads = operands.query.dtype, (shape.rows, shape.q_heads)
    statistics = jax.ShapeDtypeStruct((shape.splits * shape.rows, shape.q_heads), jnp.float32)
    if shape.splits > 1:
        sums = jax.ShapeDtypeStruct((*statistics.shape, shape.head_dim), jnp.float32)
        outputs = Outputs(sums, None, statistics, statistics)
    else:
        out = jax.ShapeDtypeStruct((*rows_and_heads, shape.head_dim), dtype)
        of_rows = jax.ShapeDtypeStruct(rows_and_heads, jnp.float32)
        outputs = Outputs(out, of_rows if return_residuals else None, None, None)
    config, shared = config.shared_with_own(
        shape.own,
        shape.head_dim,
        shape.group,
        lists=shape.listed > 0,
        table=shape.table,
        has_lengths=operands.lengths is not None,
        has_ranges=operands.ranges is not None,
    )
    results = launch(
        Roles(
            functools.partial(Context, shape, config),
            produce,
            consume,
            ((gathering.gather, GATHERING_WARPS),) if shape.listed else (),
            registers=_registers(shape, config, has_ranges=operands.ranges is not None),
        ),
        operands,
        outputs,
        shared,
        dtype=dtype,
        name="ikbo_few_queries_attention",
        workers=shape.workers,
    )
    if shape.splits == 1:
        return results[0], results[1] if return_residuals else None
    parts = [x.reshape(shape.splits, *rows_and_heads, *x.shape[2:]) for x in results]
    merged, lse = merge(*parts, log2_scale=shape.log2_scale)
    return merged.astype(dtype), lse if return_residuals else None


def merge(
    acc: jax.Array, maximum: jax.Array, sums: jax.Array, *, log2_scale: float
) -> tuple[jax.Array, jax.Array]:
    """Merges a softmax's parts, `Outputs` by split: (out [rows, N, H], lse [rows, N]), f32."""
    # Unrolled over the parts, all of it is elementwise: XLA makes one kernel of it instead of one
    # for each reduction. As in the kernel, the maximum is subtracted before the scale is applied,
    # which is exact for huge scores.
    largest = functools.reduce(further(log2_scale), maximum)
    has_no_sum = functools.reduce(jnp.logical_and, [x == 0 for x in sums])
    finite = jnp.where(jnp.isinf(largest) & has_no_sum, 0.0, largest)
    weights = [jnp.exp2((x - finite) * jnp.float32(log2_scale)) for x in maximum]
    total = functools.reduce(jnp.add, [w * x for w, x in zip(weights, sums, strict=True)])
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    parts = [x * (w * inverse)[..., None] for w, x in zip(weights, acc, strict=True)]
    lse = jnp.log(total) + finite * jnp.float32(log2_scale * LN_2)
    return functools.reduce(jnp.add, parts), jnp.where(total == 0, -jnp.inf, lse)

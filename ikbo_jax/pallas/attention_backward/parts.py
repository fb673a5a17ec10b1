"""A small kernel that adds parts of gradients (`AttentionBackwardConfig.has_parts`).

    d_query[b] = scale * sum of its parts, one of each tile of the user's keys
    d_key[u] = sum of the parts of the user's rows,   d_value[u] likewise

Parts are f32; sums have 16 or 32 bits. XLA takes a kernel of 1.5 to 2 us for each of the three.
Each thread adds eight columns, in the order of the parts. The first CTAs, of one warpgroup each,
add rows of d_query, in the caller's order, the next ones rows of both other gradients.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from ikbo_jax.pallas.attention_backward import context
from ikbo_jax.pallas.hopper import inline, per_thread, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.worklist.numbering import USER_WORDS
from ikbo_jax.pallas.worklist.rows import Rows
from ikbo_jax.problems import memory
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Columns of a thread: of 16 bits, one access of 16 bytes.
VECTOR = 8
#: Parts whose loads overlap.
UNROLL = 4


class Operands(NamedTuple):
    """Device memory that the launch reads; None without parts of d_query, or of the others."""

    d_query: Any  # [tiles of keys * K, rows, H] f32, see `context.Outputs`
    gradients: tuple[Any, ...]  # of keys or values, each [U * splits * S, K, H] f32
    index: Any  # [B] int32: the user of a candidate
    position: Any  # [B] int32: places of candidates in user order; None if that is their order
    users: Any  # [U, USER_WORDS] int32, see `worklist.rows.Rows`
    poison: Any  # [1] int32, the bits of 0 or NaN, which is added to d_query; None: nothing is


class Outputs(NamedTuple):
    """Device memory that the launch fills."""

    d_query: Any  # [B * T * N, H]
    gradients: tuple[Any, ...]  # each [U, S, K, H]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch: vectors of `VECTOR` columns of all gradients of a user's
    keys, and of all of d_query; 0 without their parts.
    """

    of_parts: context.Shape
    vectors: int
    query_vectors: int

    @property
    def query_workers(self) -> int:
        """CTAs of d_query, the first ones."""
        return pl.cdiv(self.query_vectors, WARPGROUP_SIZE)

    @property
    def workers(self) -> int:
        return self.query_workers + pl.cdiv(
            self.of_parts.sizes.users * self.vectors, WARPGROUP_SIZE
        )


def _add_queries(ctx: WarpgroupContext) -> None:
    """Adds parts of d_query; those of tiles of keys past the user's length are arbitrary."""
    shape, operands = ctx.shape.of_parts, ctx.operands
    sizes, query_vectors = shape.sizes, ctx.shape.query_vectors

    def read(ref: Any, at: jax.Array) -> jax.Array:
        return per_thread.gather(ref, at, "global")

    number = ctx.worker * WARPGROUP_SIZE + per_thread.number()
    is_wanted = number < query_vectors
    row, column = per_thread.divided(
        jnp.minimum(number, query_vectors - 1), shape.head_dim // VECTOR
    )
    query, head = per_thread.divided(row, shape.kv_heads * sizes.group)
    candidate, q = per_thread.divided(query, sizes.q_len)
    kv_head, in_group = per_thread.divided(head, sizes.group)
    user = jnp.clip(read(operands.index, candidate), 0, sizes.users - 1)
    place = candidate if operands.position is None else read(operands.position, candidate)
    first_row, first_target, keys = (read(operands.users, user * USER_WORDS + i) for i in (0, 2, 3))
    within = place * sizes.per_candidate - first_row + q * sizes.group + in_group
    poison = per_thread.same(0)
    if operands.poison is not None:
        poison = read(operands.poison, poison)
    planes, rows, _ = operands.d_query.shape
    tiles = planes // shape.kv_heads
    numbers = (
        is_wanted.astype(jnp.int32),
        row,
        column,
        kv_head,
        first_target + within,
        per_thread.cdiv(keys, BLOCK_KV),
        poison,
    )

    @inline.code(operands.d_query, ctx.outputs.d_query, *numbers)
    def add(parts: ir.Value, output: ir.Value, *numbers: Any) -> None:
        is_wanted, row, column, kv_head, target, count, poison = map(per_thread.scalar, numbers)
        width = shape.head_dim
        terms = [(kv_head, rows * width), (target, width), (column, VECTOR)]
        first = stores.device_address(parts, terms, 4)
        total = _sum(first, shape.kv_heads * rows * width * 4, tiles, count)
        added, scale = mgpu.utils.bitcast(poison, ir.F32Type.get()), inline.f32(shape.scale)
        total = [arith.addf(arith.mulf(x, scale), added) for x in total]
        store(output, [(row, width), (column, VECTOR)], total, is_wanted)


def _add_keys(ctx: WarpgroupContext) -> None:
    shape, sizes = ctx.shape, ctx.shape.of_parts.sizes
    number = (ctx.worker - shape.query_workers) * WARPGROUP_SIZE + per_thread.number()
    most = sizes.users * shape.vectors
    user, at = per_thread.divided(jnp.minimum(number, most - 1), shape.vectors)
    numbers = (number < most).astype(jnp.int32), user, at
    count = len(ctx.operands.gradients)

    @inline.code(*ctx.operands.gradients, *ctx.outputs.gradients, *numbers)
    def _(*arguments: Any) -> None:
        is_wanted, user, at = map(per_thread.scalar, arguments[2 * count :])
        size = shape.vectors * VECTOR
        for parts, output in zip(arguments[:count], arguments[count:], strict=False):
            terms = [(user, sizes.splits * size), (at, VECTOR)]
            total = _sum(stores.device_address(parts, terms, 4), size * 4, sizes.splits)
            store(output, [(user, size), (at, VECTOR)], total, is_wanted)


def _sum(first: ir.Value, stride: int, parts: int, count: Integer | None = None) -> list[ir.Value]:
    """Sums `VECTOR` f32 numbers of the first `count` parts, or all, `stride` bytes apart."""
    zero, total = inline.i32(0), [inline.f32(0.0)] * VECTOR
    end = inline.i32(parts) if count is None else count
    if parts <= UNROLL:
        return _add_group(first, stride, zero, parts, end, total, is_cut=count is not None)
    # A loop, since straight code of many parts is long. Compilers unroll it for up to 13 parts
    # (218 registers for two gradients): the loads of a few warps then fill the SM's bandwidth.
    step = inline.i32(UNROLL)
    make_loop: Any = scf.ForOp
    loop = make_loop(zero, end, step, total)
    with ir.InsertionPoint(loop.body):
        sums = [*loop.inner_iter_args]
        begin = Integer(loop.induction_variable)
        scf.yield_(_add_group(first, stride, begin, UNROLL, end, sums, is_cut=True))
    return [*loop.results]


def _add_group(
    first: ir.Value,
    stride: int,
    begin: Integer,
    parts: int,
    end: Integer,
    total: list[ir.Value],
    *,
    is_cut: bool,
) -> list[ir.Value]:
    """Adds `parts` parts from `begin` on to `total`; with `is_cut`, only those before `end`."""
    f32, byte = ir.F32Type.get(), ir.IntegerType.get_signless(8)
    i64 = ir.IntegerType.get_signless(64)
    one, zero, found = inline.i32(1), inline.i32(0), []
    last = (end - one).at_least(zero)
    for i in range(parts):
        part = begin + i
        exists = part < end
        at = Integer(arith.extsi(i64, part.at_most(last) if is_cut else part)) * stride
        words: list[ir.Value] = []
        for half in range(VECTOR // per_thread.VECTOR):
            offset = at + half * per_thread.VECTOR * 4
            address = mgpu.utils.getelementptr(first, [offset], byte)
            words += per_thread.load_words(address, per_thread.VECTOR)
        values = [mgpu.utils.bitcast(word, f32) for word in words]
        found.append((exists, values))
    for exists, values in found:
        if is_cut:
            values = [exists.select(x, inline.f32(0.0)) for x in values]
        total = [arith.addf(x, y) for x, y in zip(total, values, strict=True)]
    return total


def store(
    output: ir.Value,
    terms: Sequence[tuple[ir.Value, int]],
    values: Sequence[ir.Value],
    is_wanted: Integer,
) -> None:
    """Stores `VECTOR` numbers from the element whose number is sum(value * stride) on."""
    f32, is_wanted = ir.F32Type.get(), is_wanted.differs(0)
    dtype = ir.MemRefType(output.type).element_type
    if dtype == f32:
        size, words = 4, [inline.word(x) for x in values]
    else:
        pair, pair_f32 = ir.VectorType.get((2,), dtype), ir.VectorType.get((2,), f32)
        pairs = [
            vector.from_elements(pair_f32, list(values[i : i + 2])) for i in range(0, VECTOR, 2)
        ]
        size, words = 2, [inline.word(arith.truncf(pair, x)) for x in pairs]
    address = stores.device_address(output, terms, size)
    for i in range(0, len(words), per_thread.VECTOR):
        per_thread.store_words(address, words[i : i + per_thread.VECTOR], is_wanted, 4 * i)


def _add(ctx: WarpgroupContext) -> None:
    begin = ctx.shape.query_workers
    if begin:
        pl.when(ctx.worker < begin)(lambda: _add_queries(ctx))
    if ctx.operands.gradients:
        pl.when(ctx.worker >= begin)(lambda: _add_keys(ctx))


def add_parts(
    d_query: jax.Array | None,
    gradients: Sequence[jax.Array],
    rows: Rows,
    of_parts: context.Shape,
    dtypes: tuple[Any, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Adds parts by one launch; `d_query` and `gradients` are as in `Operands`.

    Returns a tuple of d_query [B * T * N, H], if there is one, times the scale, and the gradients
    [U, S, K, H], in `dtypes`.
    """
    queries, heads, width = of_parts.d_query
    users, *of_user = of_parts.keys
    has_rows = d_query is not None
    shape = Shape(
        of_parts,
        vectors=math.prod(of_user) // VECTOR if gradients else 0,
        query_vectors=queries * heads * width // VECTOR if has_rows else 0,
    )
    operands = Operands(
        d_query,
        tuple(gradients),
        *((rows.cand_to_user, rows.position, rows.users, rows.poison) if has_rows else (None,) * 4),
    )
    of_keys = jax.ShapeDtypeStruct((users, *of_user), dtypes[1])
    declared = Outputs(
        jax.ShapeDtypeStruct((queries * heads, width), dtypes[0]) if has_rows else None,
        (of_keys,) * len(operands.gradients),
    )
    results: Outputs = launch_threads(
        _add,
        shape,
        operands,
        declared,
        memory.shared(),
        name="ikbo_attention_backward_parts",
        workers=shape.workers,
    )
    return () if results.d_query is None else (results.d_query,), results.gradients

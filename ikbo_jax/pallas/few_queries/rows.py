"""Which rows an item has: users' first candidates, computed by XLA, and searches in the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

LANES = 32
#: Largest product of candidates and users whose pairs are all compared.
MOST_COMPARED = 2**26


def first_candidates(users_of: jax.Array, users: int) -> jax.Array:
    """[U + 1] int32: number of candidates of the users before user u.

    If the index is sorted, user u has the candidates from element u to element u + 1. If not, these
    ranges still hold every candidate once, and the kernel finds the user of each.

    Args:
      users_of: [B] int32, within [0, U).
      users: U.
    """
    user = jnp.arange(users + 1, dtype=jnp.int32)
    if users_of.size * users <= MOST_COMPARED:
        return jnp.sum(users_of[None] < user[:, None], axis=1, dtype=jnp.int32)
    # Unrolled, the search is one fused kernel. The bounds hold in an unsorted index as well.
    found = jnp.searchsorted(users_of, user, side="left", method="scan_unrolled")
    return found.astype(jnp.int32).at[-1].set(users_of.size)


def slots(batch: int, users: int, q_len: int, item_rows: int) -> int:
    """Number of slots: user u's items fill slots from u + starts[u] * T // item_rows on.

    A user with n rows from row s on has 1 + (s + n) // item_rows - s // item_rows slots, which is
    at least n / item_rows, rounded up. Slots that it does not need are empty.
    """
    return users + batch * q_len // item_rows


def _lane() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("mov.u32 $0, %laneid;", result_types=i32)


def _load(ref: ir.Value, index: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], i32)
    return mgpu.utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=i32)


def _ballot(predicate: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        arith.extui(i32, predicate),
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )


def _unary(instruction: str, x: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(f"{instruction} $0, $1;", x, result_types=i32)


def _splat(value: ir.Value) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


_SCALAR = plgpu.Layout.WG_SPLAT(())
_INTEGER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)


def user_of_slot(starts: Any, slot: Any, q_len: int, item_rows: int, *, interpret: bool) -> Any:
    """The last user u whose first slot, u + starts[u] * T // item_rows, is not past `slot`.

    One warp tests 32 users at once.

    Args:
      starts: device memory [U + 1] int32.
      slot: int32.
      q_len: T.
      item_rows: rows of an item.
    """
    users = starts.shape[0] - 1
    if interpret:

        def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
            low, high = bounds
            middle = (low + high) // 2
            is_low = middle + starts[middle] * q_len // item_rows <= slot
            return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

        bounds = (jnp.int32(0), jnp.int32(users))
        return lax.fori_loop(0, users.bit_length(), halve, bounds)[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=_INTEGER)
    def search(_: Any, starts: ir.Value, slot: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        lane, low, step = _lane(), mgpu.c(0, i32), 1
        while step * LANES < users:
            step *= LANES
        while step:
            user = arith.addi(low, arith.muli(lane, mgpu.c(step, i32)))
            start = _load(starts, arith.minsi(user, mgpu.c(users, i32)))
            row = arith.muli(start, mgpu.c(q_len, i32))
            first_slot = arith.addi(user, arith.divui(row, mgpu.c(item_rows, i32)))
            is_low = arith.andi(
                arith.cmpi(predicates.slt, user, mgpu.c(users, i32)),
                arith.cmpi(predicates.sle, first_slot, slot.registers.item()),
            )
            passed = arith.subi(_unary("popc.b32", _ballot(is_low)), mgpu.c(1, i32))
            low = arith.addi(low, arith.muli(passed, mgpu.c(step, i32)))
            step //= LANES
        return _splat(low)

    return search(starts, slot)


def end_of_run(
    cand_to_user: Any, first: Any, stop: Any, most: int, users: int, *, interpret: bool
) -> Any:
    """The first candidate from `first` on, up to `stop`, that has another user than `first`.

    Args:
      cand_to_user: device memory [B] int32; clamped to [0, U).
      first: a candidate.
      stop: past `first`, at most B.
      most: the largest `stop` - `first`.
      users: U.
    """
    if interpret:
        user = jnp.clip(cand_to_user[first], 0, users - 1)

        def is_same(position: Any) -> Any:
            other = cand_to_user[jnp.minimum(position, cand_to_user.shape[0] - 1)]
            return (position < stop) & (jnp.clip(other, 0, users - 1) == user)

        return lax.while_loop(is_same, lambda position: position + 1, first)

    batch = cand_to_user.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=_INTEGER)
    def search(
        _: Any, index: ir.Value, first: mgpu.FragmentedArray, stop: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        begin, end = first.registers.item(), stop.registers.item()

        def user_at(position: ir.Value) -> ir.Value:
            user = _load(index, arith.minsi(position, mgpu.c(batch - 1, i32)))
            return arith.minsi(arith.maxsi(user, mgpu.c(0, i32)), mgpu.c(users - 1, i32))

        user, lane, result = user_at(begin), _lane(), end
        for offset in range(0, most, LANES):
            position = arith.addi(begin, arith.addi(lane, mgpu.c(offset, i32)))
            is_other = arith.cmpi(predicates.ne, user_at(position), user)
            others = _ballot(is_other)
            lowest = _unary("brev.b32", others)
            lowest = _unary("bfind.shiftamt.u32", lowest)  # 2^32 - 1 without a bit
            found = arith.addi(arith.addi(begin, mgpu.c(offset, i32)), lowest)
            is_found = arith.cmpi(predicates.ne, others, mgpu.c(0, i32))
            result = arith.select(is_found, arith.minsi(result, found), result)
        return _splat(result)

    return search(cand_to_user, first, stop)

"""Values of which each of a warpgroup's 128 threads has one.

Arrays [128] in `LAYOUT`: arithmetic on them is each thread's own. Pallas has no loads and stores at
addresses that differ by thread, so these are inline PTX, with an equal formulation under
interpretation. `Threads` are the threads of all warpgroups of a CTA.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, warps
from ikbo_jax.pallas.hopper.inline import INTEGER, Integer
from ikbo_jax.pallas.hopper.warps import LANES, LEAST, ballot
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE,), vec_size=1)
INT32 = jax.ShapeDtypeStruct((WARPGROUP_SIZE,), jnp.int32)
FLOAT32 = jax.ShapeDtypeStruct((WARPGROUP_SIZE,), jnp.float32)
#: Warps of a warpgroup.
WARPS = 4
#: Words of 32 bits of the widest access of a thread.
VECTOR = 4
#: Numbers of one turn of a loop, whose loads overlap.
UNROLL = 8
#: Named barrier of all threads of a CTA; lower numbers are the warpgroups' own.
_CTA_BARRIER = 8


def number() -> jax.Array:
    """Numbers the threads of a warpgroup."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_SIZE,), 0, layout=LAYOUT)


def same(value: int) -> jax.Array:
    """Gives each thread the same number."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_SIZE,), value, jnp.int32), LAYOUT)


def select(condition: jax.Array, on_true: int, on_false: Any) -> jax.Array:
    """Selects integers by thread, where `on_true` is the same in all threads.

    `jnp.where` would make them unsigned: Mosaic GPU would give the array the sign of the bools.
    """
    return jnp.where(condition, same(on_true), on_false)


def scalar(array: mgpu.FragmentedArray) -> Integer:
    """Extracts a thread's value, in inline code; of an f32, use it as an `ir.Value`."""
    return Integer(vector.extract(array.registers.item(), [], [0]))


def array(value: ir.Value, like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Makes an array in the layout of `like`; `value` is a thread's element."""
    return inline.array([value], like.shape)


def load_words(address: ir.Value, count: int, *, is_early: bool = False) -> list[Integer]:
    """Loads words of 32 bits of constant device memory; `is_early`: LLVM does not delay them."""
    names = ", ".join(f"${i}" for i in range(count))
    kind, names = ("b32", names) if count == 1 else (f"v{count}.b32", f"{{{names}}}")
    found = mgpu.utils.inline_ptx(
        f"ld.global.nc.{kind} {names}, [${count}];",
        address,
        result_types=[ir.IntegerType.get_signless(32)] * count,
        has_side_effects=is_early,
    )
    return [Integer(x) for x in found]


def store_words(
    address: ir.Value,
    words: Sequence[ir.Value],
    predicate: ir.Value,
    offset: int = 0,
    *,
    streams: bool = False,
) -> None:
    """Stores four, two or one words of 32 bits to an aligned address plus `offset`, in inline code.

    With `streams`, L2 evicts the words first.
    """
    names = ", ".join(f"${i}" for i in range(1, len(words) + 1))
    kind, names = ("b32", names) if len(words) == 1 else (f"v{len(words)}.b32", f"{{{names}}}")
    inline.issue(
        f"st.global{'.cs' * streams}.{kind} [$0 + {offset}], {names};",
        address,
        *words,
        predicate=predicate,
    )


def gather(ref: Any, index: jax.Array, space: str = "shared") -> jax.Array:
    """Loads ref[index], one element for each thread; `space` is "shared" or "global"."""
    if mosaic.is_interpreted():
        return jnp.take(ref[...], index, mode="clip")
    is_float = ref.dtype == jnp.float32

    @inline.code(ref, index, returns=FLOAT32 if is_float else INT32)
    def loaded(ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        element = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [scalar(index)], element)
        return inline.issue(f"ld.{space}.b32 $0, [$1];", address, result_types=element)

    return loaded


def gather_vectors(ref: Any, index: jax.Array, space: str) -> tuple[jax.Array, ...]:
    """Gathers ref[4 * index : 4 * index + 4] of int32 "shared", or "global" that is constant."""

    @inline.code(ref, index, returns=(INT32,) * VECTOR)
    def loaded(ref: ir.Value, index: mgpu.FragmentedArray) -> Any:
        address = inline.address(ref, scalar(index) * VECTOR)
        if space == "global":
            return tuple(load_words(address, VECTOR, is_early=True))
        ptx = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        return tuple(inline.issue_words(ptx, VECTOR, address))

    return loaded


def any_of_warp(values: jax.Array, *, layout: Any = LAYOUT) -> jax.Array:
    """Whether any thread of a warp has true: a scalar that differs by warp.

    For branches without synchronisations. A thread has one or several bools, by `layout`.
    """
    if mosaic.is_interpreted():
        return jnp.any(values)

    @inline.code(inline.Typed(values.astype(jnp.int32), layout), returns=INTEGER)
    def votes(values: mgpu.FragmentedArray) -> Integer:
        zero = inline.i32(0)
        own = (
            vector.extract(x, [], [i])
            for x in values.registers.flat
            for i in range(x.type.shape[0])
        )
        return ballot(Integer(functools.reduce(arith.ori, own)).differs(zero))

    return votes != 0


def scatter(
    ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array, *, space: str = "shared"
) -> None:
    """ref[index] = values, for each thread that wants it; `space` is "shared" or "global"."""
    if mosaic.is_interpreted():

        @in_turn(is_wanted)
        def _(i: Any) -> None:
            ref[index[i]] = values[i]

    else:
        _each(f"st.{space}.b32 [$0], $1;", ref, index, values, is_wanted)


def add(ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array) -> None:
    """ref[index] += values in shared memory, for each thread that wants it; threads may collide."""
    if mosaic.is_interpreted():

        @in_turn(is_wanted)
        def _(i: Any) -> None:
            ref[index[i]] = ref[index[i]] + values[i]

    else:
        _each("red.shared.add.u32 [$0], $1;", ref, index, values, is_wanted)


def add_one(ref: Any, index: jax.Array) -> None:
    """ref[index] += 1 in shared memory, for each thread; not for interpretation.

    Threads may collide. Without a predicate, which would be a branch for each addition.
    """

    @inline.code(ref, index)
    def _(ref: ir.Value, index: mgpu.FragmentedArray) -> None:
        inline.issue("red.shared.add.u32 [$0], 1;", inline.address(ref, scalar(index)))


def in_turn(is_wanted: jax.Array) -> Callable[[Callable[[Any], None]], None]:
    """Runs the decorated function for each thread that wants it, by number; interpreted only."""

    def run(function: Callable[[Any], None]) -> None:
        @pl.loop(0, WARPGROUP_SIZE)
        def _(thread: Any) -> None:
            pl.when(is_wanted[thread])(lambda: function(thread))

    return run


def _each(
    instruction: str, ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array
) -> None:
    """Issues an instruction with the address of ref[index] ($0) and the value ($1), if wanted."""

    @inline.code(ref, index, values, is_wanted.astype(jnp.int32))
    def _(ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        index, value, wanted = map(scalar, arrays)
        address = inline.address(ref, index)
        inline.issue(instruction, address, value, predicate=wanted.differs(0))


def divided(values: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Computes quotients and remainders."""
    quotient = lax.div(values, same(size))
    return quotient, values - quotient * size


def cdiv(values: jax.Array, size: int) -> jax.Array:
    """Divides values that are not negative, rounding up."""
    return lax.div(values + (size - 1), same(size))


@dataclasses.dataclass(frozen=True)
class Threads:
    """The threads of a CTA of one or several warpgroups; `warpgroup` is the number of this one."""

    warpgroups: int
    warpgroup: Any
    read: ClassVar = staticmethod(gather)
    #: Stores of elements to device memory, and to shared memory.
    write: ClassVar = staticmethod(functools.partial(scatter, space="global"))
    keep: ClassVar = staticmethod(scatter)
    add: ClassVar = staticmethod(add)

    @property
    def count(self) -> int:
        return self.warpgroups * WARPGROUP_SIZE

    @property
    def warps(self) -> int:
        return self.warpgroups * WARPS

    def number(self) -> jax.Array:
        """Numbers the threads of the CTA."""
        return number() if self.warpgroups == 1 else number() + self.warpgroup * WARPGROUP_SIZE

    def commit(self) -> None:
        """Makes what a thread stored in shared memory visible to all threads."""
        if self.warpgroups == 1:
            plgpu.commit_smem()
        else:
            mosaic.named_barrier("sync", jnp.int32(_CTA_BARRIER), self.count)

    def rounds(
        self, count: int, *, unroll: int = UNROLL
    ) -> tuple[int, Callable[[Any], list[jax.Array]]]:
        """Divides a loop over `count` numbers into rounds; also returns a round's numbers by
        thread.

        All loads of a round should stand before the first use of one: each takes 300 ns.
        """
        turns, thread = pl.cdiv(count, self.count), self.number()
        number_of_rounds = pl.cdiv(turns, unroll)
        each = pl.cdiv(turns, max(number_of_rounds, 1))

        def numbers(turn: Any) -> list[jax.Array]:
            return [(turn * each + i) * self.count + thread for i in range(each)]

        return number_of_rounds, numbers

    def parts(self, count: int) -> tuple[int, int, int]:
        """(rounds, numbers of a round, numbers of a thread) of consecutive numbers of a thread.

        A thread has an odd count of them, so that threads read different banks.
        """
        each = pl.cdiv(count, self.count)
        turns = pl.cdiv(each, UNROLL + 1) | 1
        step = pl.cdiv(each, turns) | 1
        return turns, step, turns * step

    def sums_before(
        self, values: Sequence[jax.Array], scratch: Any, at: int = 0, *, neutral: int = 0
    ) -> list[jax.Array]:
        """Adds, for each thread and each array, the values of the threads before; synchronises
        once.

        `scratch` is shared memory, whose `warps` words from `at` on are overwritten for each array.
        """
        combine = jnp.maximum if neutral else jnp.add
        if mosaic.is_interpreted():
            lane = jnp.arange(WARPGROUP_SIZE, dtype=jnp.int32)
            is_before, reduce = lane[None] < lane[:, None], jnp.max if neutral else jnp.sum
            earlier = (jnp.where(is_before, x[None], neutral) for x in values)
            return [reduce(x, axis=1).astype(jnp.int32) for x in earlier]
        found = [_scan_warp(x, neutral) for x in values]
        _keep_totals([total for _, total in found], scratch, at, self)
        self.commit()
        warp = lax.div(self.number(), same(LANES))
        return [
            combine(before, self._of_warps(scratch, at + i * self.warps, warp, neutral))
            for i, (before, _) in enumerate(found)
        ]

    #: Like `sums_before`, the largest values; -2^31 before the first thread.
    maxima_before = functools.partialmethod(sums_before, neutral=LEAST)

    def total(self, values: jax.Array, scratch: Any, at: int = 0, *, neutral: int = 0) -> jax.Array:
        """Adds the values to a scalar; synchronises like `sums_before`."""
        if mosaic.is_interpreted():
            return jnp.max(values) if neutral else jnp.sum(values, dtype=jnp.int32)
        _keep_totals([_of_lanes(values, neutral)], scratch, at, self)
        self.commit()
        return self._of_warps(scratch, at, self.warps, neutral, INTEGER)

    #: Finds the largest value, a scalar, like `total`.
    largest = functools.partialmethod(total, neutral=LEAST)

    def _of_warps(
        self, scratch: Any, at: int, count: Any, neutral: int, kind: Any = INT32
    ) -> jax.Array:
        """Combines the numbers that the first `count` warps stored; each lane reads one."""
        lane = lax.rem(self.number(), same(LANES))
        part = self.read(scratch, jnp.minimum(lane, self.warps - 1) + at)
        return _of_lanes(jnp.where(lane < count, part, neutral), neutral, kind)


def sums_by_warp(values: Sequence[jax.Array], scratch: Any) -> None:
    """scratch[WARPS * i + w] = the sum of the values of warp w in array i; not for interpretation.

    `scratch` is shared memory. The warpgroup's threads see the sums after `commit_smem`.
    """
    _keep_totals([_of_lanes(x, 0) for x in values], scratch, 0, Threads(1, 0))


def _keep_totals(totals: Sequence[jax.Array], scratch: Any, at: int, threads: Threads) -> None:
    """Stores numbers that are the same in all threads of a warp."""
    thread, lanes = threads.number(), same(LANES)
    warp, is_first = lax.div(thread, lanes), lax.rem(thread, lanes) == 0
    for i, total in enumerate(totals):
        where = warp + (at + i * threads.warps)
        scatter(scratch, where, total, is_first)


def _of_lanes(values: jax.Array, neutral: int, kind: Any = INT32) -> jax.Array:
    """Adds the values of a warp's lanes; the largest, if `neutral` is not 0."""

    @inline.code(values, returns=kind)
    def found(values: mgpu.FragmentedArray) -> Any:
        own = scalar(values)
        return warps.reduced(own, "max") if neutral else warps.total(own)

    return found


def _scan_warp(values: jax.Array, neutral: int) -> tuple[jax.Array, jax.Array]:
    """Adds values of lower lanes, and of all lanes; the largest, if `neutral` is not 0."""

    @inline.code(values, returns=(INT32, INT32))
    def totals(values: mgpu.FragmentedArray) -> tuple[Integer, Integer]:
        own = scalar(values)
        return warps.maxima(own) if neutral else warps.sums(own)

    return totals

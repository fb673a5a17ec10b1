"""Shared memory of the CTAs of a cluster, for arrays of which each thread has one element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ikbo_jax.pallas.hopper import inline, per_thread
from ikbo_jax.pallas.hopper.per_thread import FLOAT32, INT32, LAYOUT


def synchronise() -> None:
    """Synchronises all threads of the cluster, which see each other's shared memory."""

    @plgpu.inline_mgpu()
    def issue(_: Any) -> None:
        inline.issue("barrier.cluster.arrive.release.aligned;", convergent=True)
        inline.issue("barrier.cluster.wait.acquire.aligned;", convergent=True)

    issue()


def _address(ref: ir.Value, index: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), inline.address(ref, index))


def _pieces(count: int) -> list[tuple[int, int]]:
    step = min(count, per_thread.VECTOR)
    return [(i, step) for i in range(0, count, step)]


def keep_floats(
    ref: Any,
    index: jax.Array,
    values: Sequence[jax.Array],
    is_wanted: jax.Array,
    *,
    interpret: bool,
) -> None:
    """Stores ref[index], ref[index + 1], ... of this CTA, for each thread that wants it."""
    if interpret:
        for i, x in enumerate(values):
            per_thread.scatter(ref, index + i, x, is_wanted, interpret=True)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(LAYOUT,) * (2 + len(values))))
    def issue(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        index, wanted, *numbers = map(per_thread.scalar, arrays)
        address = _address(ref, index)
        is_wanted = arith.cmpi(arith.CmpIPredicate.ne, wanted, inline.i32(0))
        for first, count in _pieces(len(numbers)):
            names = ", ".join(f"${i + 1}" for i in range(count))
            kind, names = ("b32", names) if count == 1 else (f"v{count}.b32", f"{{{names}}}")
            inline.issue(
                f"st.shared.{kind} [$0 + {4 * first}], {names};",
                address,
                *map(inline.word, numbers[first : first + count]),
                predicate=is_wanted,
            )

    issue(ref, index, is_wanted.astype(jnp.int32), *values)


def load(ref: Any, index: jax.Array, count: int, cta: int, *, interpret: bool) -> list[jax.Array]:
    """Loads ref[index], ..., ref[index + count - 1] of a CTA of the cluster."""
    if interpret:
        return [per_thread.gather(ref, index + i, "shared", interpret=True) for i in range(count)]
    is_float = ref.dtype == jnp.float32

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT),
        return_type=(FLOAT32 if is_float else INT32,) * count,
    )
    def issue(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> Any:
        element = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        address = inline.compute_word(
            f"mapa.shared::cluster.u32 $0, $1, {cta};", _address(ref, per_thread.scalar(index))
        )
        words: list[ir.Value] = []
        for first, size in _pieces(count):
            names = ", ".join(f"${i}" for i in range(size))
            kind, names = ("b32", names) if size == 1 else (f"v{size}.b32", f"{{{names}}}")
            loaded = inline.issue(
                f"ld.shared::cluster.{kind} {names}, [${size} + {4 * first}];",
                address,
                result_types=[element] * size if size > 1 else element,
            )
            words += [loaded] if size == 1 else list(loaded)
        return tuple(per_thread.array(x, index) for x in words)

    found = issue(ref, index)
    return list(found)

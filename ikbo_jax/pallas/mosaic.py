"""Small parts that the Mosaic GPU kernels share: compiler parameters, shared memory tiles, fences.

Whatever Pallas' GPU interpreter cannot run sits in one function here, in `accumulator` or in
`fragment`, beside an equal formulation for interpretation, so that the tests on a CPU exercise the
kernel body that runs on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

#: Bytes of a shared memory row under the widest swizzle, which every operand tile here uses.
SWIZZLE = 128


def compiler_params() -> plgpu.CompilerParams:
    """Parameters under which a kernel places every barrier itself."""
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def swizzle_columns(dtype: Any) -> int:
    """Elements of one swizzled shared memory row."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def operand_transforms(dtype: Any) -> tuple[Any, Any]:
    """How WGMMA and stmatrix see an `operand_tile`: tiles of 8 rows, swizzled."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform  # both look abstract to type checkers
    return tiling((8, swizzle_columns(dtype))), swizzle(SWIZZLE)


def operand_tile(shape: tuple[int, ...], dtype: Any, *, interpret: bool) -> Any:
    """Type of a shared memory tile [..., rows, 64] that TMA fills and WGMMA reads, or the reverse.

    WGMMA and stmatrix address tiles of 8 rows.  TMA would refuse such a tile where the array's rows
    are no multiple of 8 (K = 866, M = 433), but needs none: with one swizzled column block a
    row-major tile is the same bytes.  So the tile is a union of both views (see `tile_views`).
    The interpreter gives the members of a union separate memory; there, one plain tile is both.
    """
    if shape[-1] != swizzle_columns(dtype) or shape[-2] % 8:
        raise ValueError(f"a tile needs {swizzle_columns(dtype)} columns and 8n rows, got {shape}")
    if interpret:
        return plgpu.SMEM(shape, dtype)
    tiling, swizzle = operand_transforms(dtype)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)),
        plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
    )


def tile_views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """(view for WGMMA and register stores, view for TMA) of an `operand_tile`."""
    if interpret:
        return ref, ref
    matrix_view, copy_view = ref
    return matrix_view, copy_view


def on_one_warp(body: Callable[[], None], *, interpret: bool) -> None:
    """Runs `body` on the first warp of this warpgroup: a producer needs no more, and saves power.

    The interpreter runs it as the warpgroup; four more threads a warpgroup exhaust its pool.
    """
    if interpret:
        body()
        return

    @functools.partial(pl.kernel, mesh=plgpu.WarpMesh(axis_name="warp"))
    def warps() -> None:
        pl.when(lax.axis_index("warp") == 0)(body)

    warps()


def release_to_device(*, interpret: bool) -> None:
    """Makes this thread's writes to device memory visible to whoever is signalled after it."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    fence()

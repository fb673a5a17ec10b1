"""Small parts that the Mosaic GPU kernels share: compiler parameters, operand tiles, fences.

Each operation that Pallas' GPU interpreter cannot run is a small function beside an equivalent for
interpretation. So the tests on a CPU exercise the kernel body that runs on the GPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.hopper import BLOCK_K

#: Bytes of a shared memory row under the widest swizzle, which every operand tile here uses.
SWIZZLE = 128
#: Context in which kernels run on a CPU, with the value `plgpu.InterpretGPUParams`; kernels with
#: named barriers need its `inline_mgpu="_hack_model_inline_mgpu_tokamax"`. False: for the device.
interpreted = jax.make_user_context(False)


def is_interpreted() -> bool:
    """Whether kernels that are traced now are for the interpreter."""
    return bool(interpreted.value)


def _cache_ptxas_version() -> None:
    """Makes Mosaic GPU cache the version of ptxas, which it queries at every cast of a bool.

    Starting ptxas for it was half of the lowering time. Some versions of JAX lack the function.
    """
    extension: Any = getattr(fragmented_array.mgpu_lib, "_mosaic_gpu_ext", None)
    version = getattr(extension, "_get_ptxas_isa_version", None)
    if version is not None and not hasattr(version, "cache_info"):
        extension._get_ptxas_isa_version = functools.cache(version)


_cache_ptxas_version()


def kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Calls `plgpu.kernel`, traced with 32-bit integers even if `jax_enable_x64` is set.

    With it, Python integers would become int64, which neither the kernels nor Mosaic GPU accept.

    XLA does not look through the barriers. Without them, a kernel would read a slice of an array in
    place, and write into one, wherever it begins. Mosaic GPU's launch raises INVALID_ARGUMENT for
    an address that is not a multiple of 256 bytes, such as that of `cand_to_user[1:1025]`.
    """
    launch = plgpu.kernel(body, **options)

    def call(*operands: jax.Array) -> Any:
        with jax.enable_x64(False):
            if is_interpreted():
                return launch(*operands)
            return lax.optimization_barrier(launch(*lax.optimization_barrier(operands)))

    return call


def compiler_params() -> plgpu.CompilerParams:
    """Makes compiler parameters: kernels place all barriers; tanh is tanh.approx.f32."""
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def swizzle_columns(dtype: Any) -> int:
    """Counts the elements of one swizzled shared memory row."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def operand_transforms(dtype: Any) -> tuple[Any, Any]:
    """Describes an `operand_tile` as WGMMA and stmatrix see it: swizzled groups of 8 rows."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform  # both classes look abstract to type checkers
    return tiling((8, swizzle_columns(dtype))), swizzle(SWIZZLE)


def operand(tiles: Any) -> inline.Typed:
    """Makes an operand of inline code of an `operand_tile`, as WGMMA sees it."""
    return inline.Typed(tiles, plgpu.RefType(operand_transforms(tiles.dtype)))


def operand_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Declares shared memory [..., rows, 64] that TMA writes and WGMMA reads, or the reverse.

    WGMMA and stmatrix address groups of 8 rows. TMA rejects this tiling if the array's rows are not
    a multiple of 8 (K = 866, M = 433), but a row-major layout with one swizzled column block has
    the same bytes. So the type is a union of both views; for the interpreter, one plain array.
    """
    columns = swizzle_columns(dtype)
    if shape[-1] != columns or shape[-2] % 8:
        raise ValueError(f"an operand tile needs {columns} columns and 8n rows, got {shape}")
    if is_interpreted():
        return plgpu.SMEM(shape, dtype)
    tiling, swizzle = operand_transforms(dtype)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)),
        plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
    )


def column_blocks(shape: tuple[int, ...], dtype: Any) -> Any:
    """Declares shared memory [..., rows, width] with swizzled rows of 32, 64 or 128 bytes."""
    return plgpu.SMEM(
        shape, dtype, transforms=() if is_interpreted() else (row_swizzle(shape, dtype),)
    )


def row_swizzle(shape: tuple[int, ...], dtype: Any) -> Any:
    """Makes the swizzle of `column_blocks`, which is as wide as a row."""
    swizzle: Any = plgpu.SwizzleTransform
    return swizzle(shape[-1] * jnp.dtype(dtype).itemsize)


def block_columns(block: int, width: int, worker: Any) -> Any:
    """Selects 64 columns, of which TMA drops those past `width`; `worker` is not constant."""
    begin: Any = block * BLOCK_K
    if begin + BLOCK_K > width:
        begin = begin + 0 * worker  # a static start would be rejected as out of bounds
    return pl.ds(begin, BLOCK_K)


def on_warps(bodies: Sequence[tuple[Callable[[], None], int]]) -> None:
    """Runs each body on a number of warps of this warpgroup, from the first warp on.

    The interpreter runs the first body as the warpgroup: its thread pool is small.
    """
    if is_interpreted():
        bodies[0][0]()
        return

    @functools.partial(pl.kernel, mesh=plgpu.WarpMesh(axis_name="warp"))
    def run() -> None:
        warp, first = lax.axis_index("warp"), 0
        for body, number in bodies:
            is_own = warp == first
            for i in range(first + 1, first + number):
                is_own |= warp == i
            pl.when(is_own)(body)
            first += number

    run()


def synchronise_warp() -> None:
    """Orders accesses to shared memory among the lanes of a warp, which may diverge."""
    if is_interpreted():
        return

    inline.code()(mgpu.utils.warp_barrier)


def fence_accesses() -> None:
    """Orders this thread's accesses to shared memory before TMA's, once an arrival tells of them.

    `plgpu.commit_smem` also waits for the other threads of the warpgroup.
    """
    if is_interpreted():
        plgpu.commit_smem()
        return

    inline.code()(lambda: inline.issue("fence.proxy.async.shared::cta;"))


def copy_words(source: Any, begin: Any, target: Any, at: Any, count: int) -> None:
    """Copies at most 32 words from device to shared memory, one by each lane of a warp."""
    if is_interpreted():
        for i in range(count):
            row, column = (lax.div(begin + i, source.shape[1]), lax.rem(begin + i, source.shape[1]))
            place = (lax.div(at + i, target.shape[1]), lax.rem(at + i, target.shape[1]))
            target[place] = source[row, column]
        return

    @inline.code(source, begin, target, at)
    def _(source: ir.Value, begin: Integer, target: ir.Value, at: Integer) -> None:
        lane = warps.lane()
        is_wanted = lane < count
        begin, at = begin + lane, at + lane
        warps.store_shared(target, at, warps.load(source, begin, is_wanted), is_wanted)
        mgpu.utils.warp_barrier()


def opaque(value: Any) -> Any:
    """Hides an int32 scalar from LLVM, so that LLVM hoists no computation on it.

    Values that LLVM computes once for all tiles occupy registers, of which a consumer has too few.
    """
    if is_interpreted():
        return value

    @inline.code(value, returns=inline.INTEGER)
    def hidden(value: Integer) -> Integer:
        return inline.issue_word("mov.u32 $0, $1;", value)

    return hidden


def warpgroup_index() -> Any:
    """Computes `lax.axis_index` of the warpgroups from the thread's number at each use.

    LLVM would keep `lax.axis_index` from the kernel's beginning on, in a register or spilled.
    """
    if is_interpreted():
        return lax.axis_index("warpgroup")

    @inline.code(returns=inline.INTEGER)
    def index() -> Integer:
        return inline.issue_word(
            "{ .reg .u32 thread; mov.u32 thread, %tid.x; shr.u32 thread, thread, 7; "
            "shfl.sync.idx.b32 $0, thread, 0, 31, 0xffffffff; }",
            convergent=True,
        )

    return index


def device_counter() -> Any:
    """Allocates a device-wide counter, zero when the kernel starts; None under interpretation."""
    return None if is_interpreted() else pl.get_global(plgpu.SemaphoreType.REGULAR)


def next_ticket(counter: Any, i: Any) -> Any:
    """Returns the counter's value and adds one to the counter; for a single warp.

    Under interpretation, the `i`-th ticket of the only CTA is number `i`.
    """
    if is_interpreted():
        return i

    @inline.code(counter, returns=inline.INTEGER)
    def ticket(counter: ir.Value) -> Integer:
        return inline.issue_word(
            "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
            "mov.u32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; "
            "shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
            mgpu.utils.memref_ptr(counter),
            convergent=True,
        )

    return ticket


def signal(counter: Any) -> None:
    """Adds one to the counter, after all writes of this warpgroup to device memory."""
    if is_interpreted():
        return

    @inline.code()
    def _() -> None:
        inline.issue("fence.acq_rel.gpu;")
        mgpu.utils.warpgroup_barrier()

    plgpu.semaphore_signal(counter, memory_scope="gpu")


def wait(counter: Any, value: int) -> None:
    """Waits until the counter is `value`; later reads see all writes before its signals."""
    if not is_interpreted():
        plgpu.semaphore_wait(counter, value, decrement=False, memory_scope="gpu")


def named_barrier(operation: str, barrier_id: Any, num_threads: int) -> None:
    """Arrives at one of the SM's 16 named barriers, and under "sync" waits for `num_threads`.

    Mosaic GPU uses the first four. The interpreter knows the function below by its name and its
    closure, which `inline.code` would wrap.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def bar_op(_: Any, barrier_id: mgpu.FragmentedArray) -> None:
        inline.issue(
            f"barrier.{operation} $0, {num_threads};", barrier_id.registers.item(), convergent=True
        )

    bar_op(barrier_id)

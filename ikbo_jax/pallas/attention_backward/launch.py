"""The launch of a kernel whose producer warpgroup has three busy warps: one loads, two store.

It differs from `pallas.hopper.launch` in these warps, in counters in device memory, and in shared
memory of f32. Under interpretation, where a warp cannot be a thread, each warp that stores is a
warpgroup of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from ikbo_jax.problems.hopper import NUM_CONSUMERS


@dataclasses.dataclass(frozen=True)
class OperandTile:
    """Type of an operand in shared memory; inside the kernel, the field holds two views of it."""

    shape: tuple[int, ...]
    dtype: Any


def barrier(arrivals: int, count: int) -> Any:
    """Type of `count` barriers that complete after `arrivals` arrivals each."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


class Roles(NamedTuple):
    """What the kernel's warps do.

    Attributes:
      context: called as `context(shared, operands, outputs, counters)`; returns a NamedTuple with
        fields `worker`, `consumer` and `interpret`.
      produce: takes the context, on one warp.
      write: takes the context and a consumer's number, on a warp for each consumer; None if the
        producer has one busy warp.
      consume: takes the context, on each consumer warpgroup.
    """

    context: Callable[[Any, Any, Any, Any], Any]
    produce: Callable[[Any], None]
    write: Callable[[Any, int], None] | None
    consume: Callable[[Any], None]


def launch(
    roles: Roles,
    operands: Any,
    outputs: Any,
    shared: Any,
    counters: tuple[int, ...],
    *,
    name: str,
    workers: int,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Launches a kernel.

    Args:
      roles: what the warps do.
      operands: a NamedTuple of arrays.
      outputs: a NamedTuple of `jax.ShapeDtypeStruct`; None for absent ones.
      shared: a NamedTuple of types of shared memory and barriers; None for absent ones.
      counters: the sizes of arrays of int32 in device memory that are zero at first.
      name: of the kernel.
      workers: number of CTAs.
      interpret: False, or `plgpu.InterpretGPUParams`.

    Returns:
      The arrays of `outputs` that are not None.
    """
    is_interpreted = bool(interpret)
    types = {name: kind for name, kind in shared._asdict().items() if kind is not None}
    present = {name: kind for name, kind in outputs._asdict().items() if kind is not None}

    def body(*refs: Any) -> None:
        inputs, refs = refs[: len(operands)], refs[len(operands) :]
        results, scratch = refs[: len(present)], refs[len(present) :]
        fields = dict(zip(types, scratch, strict=True))
        for field, kind in types.items():
            if isinstance(kind, OperandTile):
                fields[field] = mosaic.tile_views(fields[field], interpret=is_interpreted)
        arrays = [_counters(size, interpret=is_interpreted) for size in counters]
        written = outputs._replace(**dict(zip(present, results, strict=True)))
        ctx = roles.context(shared._replace(**fields), type(operands)(*inputs), written, arrays)
        warpgroup = lax.axis_index("warpgroup")
        _dispatch(roles, ctx._replace(worker=lax.axis_index("worker"), consumer=warpgroup))

    results: tuple[jax.Array, ...] = mosaic.kernel(
        body,
        out_type=tuple(present.values()),
        scratch_types=tuple(_type(kind, is_interpreted) for kind in types.values()),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=NUM_CONSUMERS + 1 + (NUM_CONSUMERS if is_interpreted and roles.write else 0),
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )(*operands)
    return results


def _counters(size: int, *, interpret: bool) -> Any:
    return None if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR((size,)))


def _type(kind: Any, interpret: bool) -> Any:
    if isinstance(kind, OperandTile):
        return mosaic.operand_tile(kind.shape, kind.dtype, interpret=interpret)
    return kind


def _dispatch(roles: Roles, ctx: Any) -> None:
    """Dispatches each warpgroup, and each warp of the last one, to its role."""
    warpgroup, writers = ctx.consumer, []
    if roles.write is not None:
        writers = [functools.partial(roles.write, ctx, i) for i in range(NUM_CONSUMERS)]

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _on_warps((functools.partial(roles.produce, ctx), *writers), ctx)

    for number, writer in enumerate(writers if ctx.interpret else ()):
        pl.when(warpgroup == NUM_CONSUMERS + 1 + number)(writer)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        roles.consume(
            ctx._replace(consumer=mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret))
        )


def _on_warps(bodies: tuple[Callable[[], None], ...], ctx: Any) -> None:
    """Runs one body on each warp of the warpgroup; under interpretation, the first body alone."""
    if ctx.interpret:
        bodies[0]()
        return

    @functools.partial(pl.kernel, mesh=plgpu.WarpMesh(axis_name="warp"))
    def warps() -> None:
        for number, body in enumerate(bodies):
            pl.when(lax.axis_index("warp") == number)(body)

    warps()

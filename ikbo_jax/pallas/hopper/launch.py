"""The launch that every kernel has: persistent CTAs of two consumer warpgroups and a producer.

A kernel names its shared memory and barriers as fields of a NamedTuple, its `Shared`. The same
NamedTuple holds the types before the launch, and the references inside the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems.hopper import NUM_CONSUMERS

#: Registers per thread of a consumer and of the producer warpgroup: 2 x 240 + 24 <= 3 x 168.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class OperandTile:
    """A field of `Shared` that becomes two views, (for WGMMA, for TMA): see `mosaic.tile_views`."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the kernel's warpgroups do.

    Attributes:
      context: called as `context(shared, operands, outputs)`; returns the warpgroups' context, a
        NamedTuple with fields `worker`, `consumer` and `interpret`.
      produce: takes the context, on one warp of the producer.
      consume: takes the context, whose `consumer` is 0 or 1, on each consumer warpgroup.
    """

    context: Callable[[Any, Any, Any], Any]
    produce: Callable[[Any], None]
    consume: Callable[[Any], None]


def barrier(arrivals: int, count: int) -> Any:
    """`count` barriers that complete after `arrivals` arrivals each."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def as_consumer(ctx: Any) -> Any:
    """The context with the consumer's number in a form that is uniform over the warpgroup."""
    return ctx._replace(consumer=mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret))


def launch(
    roles: Roles,
    operands: Any,
    outputs: Any,
    shared: Any,
    *,
    name: str,
    workers: int,
    cluster: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Launches a kernel.

    Args:
      roles: what the warpgroups do.
      operands: a tree of arrays; None for those that the launch does not use.
      outputs: a tree of `jax.ShapeDtypeStruct`, likewise.
      shared: a NamedTuple of types of shared memory and barriers; None for absent ones.
      name: of the kernel.
      workers: number of CTAs, or of clusters.
      cluster: CTAs of a cluster.
      interpret: False, or `plgpu.InterpretGPUParams`.

    Returns:
      The arrays of `outputs` that are not None.
    """
    is_interpreted = bool(interpret)
    present = [name for name, kind in shared._asdict().items() if kind is not None]
    body = functools.partial(
        _body,
        roles=roles,
        tree=jax.tree.structure((operands, outputs, (0,) * len(present))),
        shared=shared,
        present=present,
        interpret=is_interpreted,
    )
    clustered: dict[str, Any] = {}
    if cluster > 1:
        clustered = {"cluster": (cluster,), "cluster_names": ("cluster",)}
    results: tuple[jax.Array, ...] = mosaic.kernel(
        body,
        out_type=tuple(jax.tree.leaves(outputs)),
        scratch_types=tuple(_type(getattr(shared, name), is_interpreted) for name in present),
        grid=(workers,),
        grid_names=("worker",),
        **clustered,
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )(*jax.tree.leaves(operands))
    return results


def _type(kind: Any, interpret: bool) -> Any:
    if isinstance(kind, OperandTile):
        return mosaic.operand_tile(kind.shape, kind.dtype, interpret=interpret)
    return kind


def _body(
    *refs: Any, roles: Roles, tree: Any, shared: Any, present: list[str], interpret: bool
) -> None:
    """Dispatches each warpgroup to its role."""
    operands, outputs, scratch = jax.tree.unflatten(tree, refs)
    fields = dict(zip(present, scratch, strict=True))
    for name in present:
        if isinstance(getattr(shared, name), OperandTile):
            fields[name] = mosaic.tile_views(fields[name], interpret=interpret)
    ctx = roles.context(shared._replace(**fields), operands, outputs)
    warpgroup = lax.axis_index("warpgroup")
    ctx = ctx._replace(worker=lax.axis_index("worker"), consumer=warpgroup)

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        mosaic.on_one_warp(functools.partial(roles.produce, ctx), interpret=interpret)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        roles.consume(ctx)

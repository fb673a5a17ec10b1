"""The launch that every kernel has: persistent CTAs of two consumer warpgroups and a producer.

Without a producer, CTAs have one warpgroup, or several that do the same. A kernel's configuration
declares its shared memory and barriers by `problems.memory.shared`. Inside the kernel the same
tuple holds references: an operand has two views, (for WGMMA, for TMA), see `mosaic.operand_tile`;
a ring is a `rings.Ring`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic, rings
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import NUM_CONSUMERS

#: Registers per thread of a consumer and of the producer warpgroup: 2 x 240 + 24 <= 3 x 168.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class WarpgroupContext:
    """Arguments that all functions of a warpgroup share.

    Attributes:
      shape: static description of the launch.
      shared: references to shared memory and barriers.
      operands: device memory that the launch reads; `outputs`: that it fills.
      worker: CTA or cluster.
      counter: an int32 in device memory, zero when the kernel starts; None under interpretation,
        and if the launch has none.
    """

    shape: Any
    config: Any
    shared: Any
    operands: Any
    outputs: Any
    worker: Any = None
    consumer: Any = None
    counter: Any = None

    @property
    def interpret(self) -> bool:
        """Whether the kernel is for the interpreter."""
        return mosaic.is_interpreted()

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def as_consumer(self) -> Self:
        """Gives the consumer's number a form that is uniform over the warpgroup."""
        return self.replace(consumer=mosaic.warpgroup_index())

    def take(self, number: Any, items: int) -> Any:
        """Takes the CTA's next item by the counter, after `number` items.

        Without the counter, each CTA takes the item of its own number; XLA fills counters with
        zeros by a kernel of 1 to 2 us.
        """
        if not self.interpret and self.counter is None:
            return jnp.where(number == 0, self.worker, items)
        return mosaic.next_ticket(self.counter, number)

    def load(self, source: Any, index: tuple[Any, ...], tiles: Any, ready: Any) -> None:
        """Loads source[*index], [rows, width], into operand tiles [column blocks, rows, 64]."""
        for i in range(tiles.shape[0]):
            columns = mosaic.block_columns(i, source.shape[-1], self.worker)
            plgpu.copy_gmem_to_smem(source.at[*index, columns], tiles.at[i], ready)

    def store(self, tiles: Any, target: Any, index: tuple[Any, ...]) -> None:
        """Stores operand tiles to target[*index] by TMA; the reverse of `load`."""
        for i in range(tiles.shape[0]):
            columns = mosaic.block_columns(i, target.shape[-1], self.worker)
            plgpu.copy_smem_to_gmem(tiles.at[i], target.at[*index, columns])

    def staging(self, *index: Any) -> Any:
        """This warpgroup's part of the memory that only an interpreted kernel has, or None."""
        return self.shared.staging.at[self.consumer, *index] if self.interpret else None


@dataclasses.dataclass(frozen=True)
class ItemContext(WarpgroupContext):
    """The context of a warpgroup of a persistent kernel, whose CTAs take `shape.items` in turn."""

    def item(self, i: Any) -> Any:
        """Describes item `i` of the CTA."""
        raise NotImplementedError

    def number(self, i: Any) -> Any:
        """Numbers item `i` of the CTA among the items of all CTAs."""
        return i * lax.axis_size("worker") + self.worker

    @property
    def count(self) -> Any:
        """Counts the items of the CTA."""
        workers = lax.axis_size("worker")
        return lax.div(self.shape.items - self.worker + (workers - 1), workers)

    def for_items(self, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Calls `body(i, item, carry)`, which returns the next carry, for all items of the CTA."""
        return lax.fori_loop(0, self.count, lambda i, carry: body(i, self.item(i), carry), carry)


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the kernel's warpgroups do.

    Attributes:
      context: makes a `WarpgroupContext` of (shared, operands, outputs).
      produce: takes the context, on one warp of the producer; None: the CTA has `warpgroups`
        consumers alone, which have the registers that ptxas gives them.
      consume: takes the context, whose `consumer` is 0 or 1, on each consumer warpgroup.
      assist: functions that take the context on other warps of the producer, and each one's number
        of warps; under interpretation, each has a warpgroup.
      registers: per thread of a consumer and of the producer warpgroup.
    """

    context: Callable[[Any, Any, Any], WarpgroupContext]
    produce: Callable[[Any], None] | None
    consume: Callable[[Any], None]
    assist: tuple[tuple[Callable[[Any], None], int], ...] = ()
    registers: tuple[int, int] = (CONSUMER_REGISTERS, PRODUCER_REGISTERS)
    warpgroups: int = 1


def launch(
    roles: Roles,
    operands: Any,
    outputs: Any,
    shared: Any,
    *,
    dtype: Any,
    name: str,
    workers: int,
    cluster: int = 1,
    has_counter: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches a kernel; returns the arrays of `outputs` that are not None.

    Args:
      operands: a tree of arrays; None for those that the launch does not use.
      outputs: a tree of `jax.ShapeDtypeStruct`, likewise.
      shared: shared memory and barriers, as `memory.shared` declares them.
      workers: number of CTAs, or of clusters of `cluster` CTAs.
    """
    kinds, shared_tree = jax.tree.flatten(shared)
    order = _order(kinds)
    tree = jax.tree.structure((operands, outputs, (0,) * len(order)))

    def body(*refs: Any) -> None:
        operands, outputs, scratch = jax.tree.unflatten(tree, refs)
        fields: list[Any] = [None] * len(kinds)
        for i, ref in zip(order, scratch, strict=True):
            if isinstance(kinds[i], memory.Tiles):
                ref = (ref, ref) if mosaic.is_interpreted() else tuple(ref)
            fields[i] = ref
        shared = jax.tree.unflatten(shared_tree, fields)
        shared = shared._make(rings.Ring(*x) if isinstance(x, memory.Ring) else x for x in shared)
        ctx = roles.context(shared, operands, outputs)
        if has_counter and not mosaic.is_interpreted():
            ctx = ctx.replace(counter=pl.get_global(plgpu.SemaphoreType.REGULAR((1,))))
        _dispatch(roles, ctx)

    num_threads = NUM_CONSUMERS + 1 + len(roles.assist) * mosaic.is_interpreted()
    clustered: Any = {"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}
    return mosaic.kernel(
        body,
        out_type=tuple(jax.tree.leaves(outputs)),
        scratch_types=tuple(_type(kinds[i], dtype) for i in order),
        grid=(workers,),
        grid_names=("worker",),
        **clustered,
        num_threads=num_threads if roles.produce else roles.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.compiler_params(),
        interpret=mosaic.interpreted.value,
    )(*jax.tree.leaves(operands))


def launch_threads(
    consume: Callable[[Any], None],
    shape: Any,
    operands: Any,
    outputs: Any,
    shared: Any,
    *,
    name: str,
    workers: int,
    warpgroups: int = 1,
    config: Any = None,
    context: Callable[..., WarpgroupContext] = WarpgroupContext,
) -> Any:
    """Launches CTAs whose warpgroups all run `consume`; returns arrays in the tree of `outputs`.

    The arguments are those of `launch`, and the first two fields of the `context`.
    """
    roles = Roles(functools.partial(context, shape, config), None, consume, warpgroups=warpgroups)
    found = launch(roles, operands, outputs, shared, dtype=jnp.int32, name=name, workers=workers)
    return jax.tree.unflatten(jax.tree.structure(outputs), found)


def _order(kinds: list[Any]) -> list[int]:
    """Orders declarations as in memory: tiles, numbers, barriers, and interpreted ones' staging."""
    tiles = (memory.Tiles, memory.Blocks, memory.Rows)
    ranks = (*tiles, memory.Floats, memory.Words, memory.Staging, memory.Barriers)
    order = sorted(range(len(kinds)), key=lambda i: ranks.index(type(kinds[i])))
    return [i for i in order if mosaic.is_interpreted() or not isinstance(kinds[i], memory.Staging)]


def _type(kind: Any, dtype: Any) -> Any:
    match kind:
        case memory.Tiles(shape):
            return mosaic.operand_tile(shape, dtype)
        case memory.Blocks(shape):
            return mosaic.column_blocks(shape, dtype)
        case memory.Rows(shape) | memory.Staging(shape):
            return plgpu.SMEM(shape, dtype)
        case memory.Floats(shape, is_swizzled=True):
            return mosaic.column_blocks(shape, jnp.float32)
        case memory.Floats(shape):
            return plgpu.SMEM(shape, jnp.float32)
        case memory.Words(shape):
            return plgpu.SMEM(shape, jnp.int32)
    options = {"num_arrivals": kind.arrivals, "num_barriers": kind.count}
    if kind.is_clustered:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), **options)
    return plgpu.Barrier(**options)


def _dispatch(roles: Roles, ctx: WarpgroupContext) -> None:
    worker, is_alone = lax.axis_index("worker"), roles.produce is None and roles.warpgroups == 1
    warpgroup: Any = 0 if is_alone else lax.axis_index("warpgroup")
    ctx = ctx.replace(worker=worker, consumer=warpgroup)
    if roles.produce is None:
        roles.consume(ctx)
        return
    warps = [(functools.partial(x, ctx), n) for x, n in ((roles.produce, 1), *roles.assist)]

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(roles.registers[1], action="decrease")
        mosaic.on_warps(warps)

    for i, (assist, _) in enumerate(warps[1:], start=NUM_CONSUMERS + 1):
        if ctx.interpret:
            pl.when(warpgroup == i)(assist)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(roles.registers[0], action="increase")
        roles.consume(ctx)

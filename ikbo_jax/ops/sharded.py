"""Runs an op's local computation on every device of a mesh.

Three ways, by what is known while the op is traced:

- Inside `shard_map` over all axes of a mesh, arrays are one device's part already: the computation
  runs as it is.
- With Explicit mesh axes, also inside `shard_map` over others, the types of the arrays say how they
  are divided: a `shard_map` inside the op runs the computation.
- With Auto axes, XLA decides when it compiles: `custom_partitioning` tells it how the op divides,
  and traces the computation for one device's shapes when XLA asks.

A program of one device is the same in all three: the computation as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ikbo_jax.ops import dispatch
from ikbo_jax.ops.partition import Dimension, Division, Rule, divide

#: An op's computation: takes the operands of one device, and how the call is divided (None: it is
#: not); returns the results.
Local = Callable[[Sequence[Any], Division | None], Sequence[Any]]

_collectors: list[dict[Any, Any]] = []


@contextlib.contextmanager
def reports() -> Iterator[dict[Any, Any]]:
    """Collects what is reported while XLA compiles: plans of calls, to plans of their parts."""
    found: dict[Any, Any] = {}
    _collectors.append(found)
    try:
        yield found
    finally:
        _collectors.remove(found)


def report(plan: Any, part_plan: Any) -> None:
    """Tells every `reports` how one device's part of a call runs."""
    for collector in _collectors:
        collector[plan] = part_plan


def run(local: Local, rule: Rule, identity: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs `local` on every device, with the operands that it needs there.

    Args:
      local: the computation, which also sums over devices what lacks a divided dimension
        (`Division.sum`).
      rule: how it divides.
      identity: a hashable description with a stable `repr`: equal identities, rules and shapes
        mean equal programs.
      operands: arrays.
    """
    mesh = _explicit_mesh(operands)
    if mesh is not None:
        return _by_shard_map(local, rule, mesh, operands)
    if _is_manual():
        return tuple(local(operands, None))
    # An exported program with symbolic sizes has no place for `custom_partitioning` either.
    is_symbolic = any(dispatch.is_symbolic(size) for x in operands for size in x.shape)
    if jax.device_count() > 1 and not is_symbolic:
        return _by_xla(local, rule, identity, operands)
    return tuple(local(operands, None))


def run_by_types(local: Local, rule: Rule, operands: Sequence[Any]) -> tuple[Any, ...]:
    """`run` for a computation of JAX's own functions, which XLA can divide: only types need help.

    With Explicit axes, JAX's functions refuse operands that are divided in different ways. The
    operands have floating-point types.
    """
    mesh = _explicit_mesh(operands)
    if mesh is None:
        return tuple(local(operands, None))
    dtypes = [operand.dtype for operand in operands]

    def in_own_dtypes(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        return local([x.astype(d) for x, d in zip(parts, dtypes, strict=True)], division)

    # Gradients of arrays that devices share are summed in this type, in float32.
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in operands]
    return _by_shard_map(in_own_dtypes, rule, mesh, wide)


def _is_manual() -> bool:
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def _explicit_mesh(operands: Sequence[Any]) -> Any:
    """The mesh with Explicit axes that the operands' types name; None if there is none."""
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _by_shard_map(local: Local, rule: Rule, mesh: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    axes = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Explicit
    }
    sizes = {name: mesh.shape[name] for name in mesh.axis_names if name in axes}
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    division = divide(rule, operands, specs, sizes)
    in_specs = tuple(map(division.spec, rule.operands))
    moved = [
        jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(operands, in_specs, strict=True)
    ]

    def on_device(*parts: Any) -> tuple[Any, ...]:
        return tuple(local(vary_over_same_axes(parts), division))

    sharded = jax.shard_map(
        # Inside a caller's `shard_map`, what a gradient keeps of an inner one would get the outer
        # one's axes a second time (jax 0.11.2).
        _keeping_operands(on_device) if AxisType.Manual in mesh.axis_types else on_device,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(map(division.spec, rule.results)),
        axis_names=axes,
    )
    # What was gathered to be computed is divided again, so that results are as their operands are.
    return tuple(
        jax.sharding.reshard(result, NamedSharding(mesh, division.spec(dims, again=True)))
        for result, dims in zip(sharded(*moved), rule.results, strict=True)
    )


def _keeping_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose derivatives of all orders keep nothing but operands.

    They compute `fn` again, which XLA merges with the first time.
    """

    def pull_back(operands: Any, cotangents: Any) -> Any:
        return jax.vjp(fn, *operands)[1](cotangents)

    kept = jax.custom_vjp(fn)
    kept.defvjp(
        lambda *operands: (kept(*operands), operands),
        lambda operands, cotangents: _keeping_operands(pull_back)(operands, cotangents),
    )
    return kept


def typed_like(gradient: Any, operand: Any) -> Any:
    """A gradient, sharded as its operand's type says, which may have been gathered; or None."""
    sharding = None if gradient is None else jax.typeof(operand).sharding
    if sharding is None or sharding == jax.typeof(gradient).sharding:
        return gradient
    return jax.sharding.reshard(gradient, sharding)


def _by_xla(local: Local, rule: Rule, identity: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    # Traced once; `custom_partitioning` traces what it is given again.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    traced = jax.make_jaxpr(lambda *operands: tuple(local(operands, None)))(*shapes)
    # `jit` keeps constants of the computation, for which `custom_partitioning` has no place.
    compute = jax.jit(jaxpr_as_fun(traced))

    def whole(*operands: Any) -> tuple[Any, ...]:
        return tuple(compute(*operands))

    # An interpreted kernel has effects, for which `custom_partitioning` has no place either.
    if traced.effects:
        return whole(*operands)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        specs = [
            spec_of(mesh, array.sharding, len(array.shape)) for array in (*arguments, *results)
        ]
        division = divide(rule, arguments, specs, mesh.shape)

        def on_device(*parts: Any) -> tuple[Any, ...]:
            return tuple(unlocated_p.bind(*local(parts, division)))

        def shardings(arrays: Any) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, division.spec(dims)) for dims in arrays)

        return mesh, on_device, shardings(rule.results), shardings(rule.operands)

    divided = custom_partitioning(whole)
    divided.def_partition(
        partition,
        sharding_rule=_sharding_rule(rule, [array.shape for array in operands]),
        decode_shardings=False,
    )

    def run_batched(size: int, batched: Any, arrays: Any) -> Any:
        del size
        axes = tuple(0 if is_batched else None for is_batched in batched)

        def local_batched(parts: Sequence[Any], division: Division | None) -> Any:
            return jax.vmap(lambda *one: tuple(local(one, division)), axes)(*parts)

        name = ("vmap", axes, identity)
        return _by_xla(local_batched, rule.batched(batched), name, arrays)

    # A function with its own derivative and vmap rule, since `custom_partitioning` has neither.
    @jax.custom_jvp
    def call(*operands: Any) -> tuple[Any, ...]:
        batchable = jax.custom_batching.custom_vmap(divided)

        @batchable.def_vmap
        def rule_of_vmap(size: int, batched: Any, *arrays: Any) -> Any:
            results = run_batched(size, batched, arrays)
            return results, (True,) * len(results)

        # The callback's address, which is not the same in another process, can be left out of the
        # key of JAX's compilation cache; what it does must then stand in the program's text.
        with set_xla_metadata(ikbo_jax=_digest(identity, rule)):
            found: tuple[Any, ...] = batchable(*operands)
        return found

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(whole, primals, tangents)

    results = call(*operands)
    return results


def spec_of(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """The mesh axes of every dimension of an array that XLA divides.

    XLA may divide a dimension over a part of a mesh axis: four heads over an axis of eight devices,
    in pairs. A `PartitionSpec` cannot say this, and JAX fails to decode it. Such a dimension gets
    no axes here, so it is gathered.
    """
    # A shape that every product of axes divides.
    indices = sharding.devices_indices_map((mesh.size,) * ndim)
    units = [tuple(unit) for unit in np.eye(mesh.devices.ndim, dtype=int)]

    def axes_of(dim: int) -> tuple[str, ...]:
        begins = np.vectorize(lambda device: indices[device][dim].start or 0)(mesh.devices)
        axes = [n for n, size in enumerate(begins.shape) if size > 1 and begins[units[n]]]
        axes.sort(key=lambda n: -begins[units[n]])  # the major axis first
        others = [n for n in range(begins.ndim) if n not in axes]
        parts = math.prod(begins.shape[n] for n in axes)
        by_part = begins.transpose(axes + others).reshape(parts, -1)
        is_divided_so = by_part == np.arange(0, mesh.size, mesh.size // parts)[:, None]
        return tuple(mesh.axis_names[n] for n in axes) if is_divided_so.all() else ()

    return PartitionSpec(*(axes_of(dim) or None for dim in range(ndim)))


def _sharding_rule(rule: Rule, shapes: Sequence[tuple[int, ...]]) -> SdyShardingRule:
    sizes = rule.sizes(shapes)

    def parts(dim: Dimension) -> Dimension:
        # Shardy refuses a part of size 1 beside another one.
        large = tuple(name for name in dim if len(dim) > 1 and sizes[name] > 1)
        return large or dim[:1]

    arrays = [[parts(dim) for dim in dims] for dims in rule.arrays]
    mappings = [
        ArrayMapping(*(dim[0] if len(dim) == 1 else CompoundFactor(*dim) for dim in dims))
        for dims in arrays
    ]
    # In order of appearance, which Shardy demands.
    names = list(dict.fromkeys(name for dims in arrays for dim in dims for name in dim))
    alone = {dim[0] for dims in arrays for dim in dims if len(dim) == 1}
    can_split = dict(rule.split)
    minor: dict[str, Any] = {name: sizes[name] for name in names if name not in alone}
    return SdyShardingRule(
        tuple(mappings[: len(rule.operands)]),
        tuple(mappings[len(rule.operands) :]),
        need_replication_factors=tuple(name for name in names if name not in can_split),
        **minor,
    )


def _digest(identity: Any, rule: Rule) -> str:
    text = f"{_source_digest()} {identity!r} {rule!r}"
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _source_digest() -> str:
    """A digest of this package's code."""
    root = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


# The identity on the results of a part. XLA takes the part's source locations into a program that
# has other ones (jaxlib 0.11.2 warns "Invalid stack_frame_id"), and a pass that compares them may
# then loop for ever. So the part has none.
unlocated_p = Primitive("ikbo_unlocated")
unlocated_p.multiple_results = True
unlocated_p.def_impl(lambda *results: list(results))
unlocated_p.def_abstract_eval(lambda *results: list(results))


def _lower_unlocated(ctx: Any, *results: Any) -> Any:
    nowhere = mlir.ir.Location.unknown(ctx.module_context.context)

    def forget(op: Any) -> Any:
        op.location = nowhere
        return mlir.ir.WalkResult.ADVANCE

    ctx.module_context.module.operation.walk(forget)
    return list(results)


mlir.register_lowering(unlocated_p, _lower_unlocated)


def run_kernel(fn: Callable[..., Any], *arrays: Any) -> Any:
    """`fn(*arrays)` for a function that launches kernels.

    Inside `shard_map`, values have types that say over which mesh axes they vary, and Pallas
    refuses such types in a kernel. The function is traced without them.
    """
    if all(jax.typeof(x).manual_axis_type.empty for x in jax.tree.leaves(arrays)):
        return fn(*arrays)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*plain)
    arrays = vary_over_same_axes(arrays)
    results = device_p.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


_NO_MESH = jax.sharding.AbstractMesh((), ())
# A computation on one device, whose jaxpr has no types of `shard_map`.
device_p = Primitive("ikbo_device")
device_p.multiple_results = True
device_p.def_impl(lambda *arrays, jaxpr: jaxpr_as_fun(jaxpr)(*arrays))


def _lower_device(ctx: Any, *arrays: Any, jaxpr: Any) -> Any:
    plain = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr))(plain, *arrays)


mlir.register_lowering(device_p, _lower_device)


@device_p.def_abstract_eval
def _results_vary_as_operands(*operands: Any, jaxpr: Any) -> list[Any]:
    operand = operands[0]
    return [
        operand.update(
            shape=result.shape,
            dtype=result.dtype,
            weak_type=False,
            sharding=operand.sharding.update(spec=PartitionSpec(*(None,) * len(result.shape))),
        )
        for result in jaxpr.out_avals
    ]


def vary_over_same_axes(arrays: Any) -> Any:
    """Inside `shard_map`, marks every array as varying over all mesh axes that one varies over.

    `shard_map` requires a gradient to vary over the same axes as its input, but the gradient of a
    replicated array differs between shards. The transpose of this cast sums it over the shards.
    """

    def varying(x: jax.Array) -> frozenset[str]:
        axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
        return axes

    all_axes = frozenset().union(*map(varying, jax.tree.leaves(arrays)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(all_axes - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)

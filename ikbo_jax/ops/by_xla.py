"""Runs an op's local computation on every device where mesh axes are Auto.

XLA decides how arrays divide when it compiles: `custom_partitioning` tells it how the op divides,
and traces the computation for one device's shapes when XLA asks. Inside `shard_map` over some axes
of a mesh, XLA decides so over the axis that is left; over several axes left, nothing divides.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ikbo_jax.ops import dispatch, platforms
from ikbo_jax.ops.partition import Dimension, Local, Rule, divide, vmapped


def run(local: Local, rule: Rule, identity: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs `sharded.run` where XLA decides how operands divide."""
    # An exported program with symbolic sizes has no place for `custom_partitioning`.
    if any(dispatch.is_symbolic(size) for x in operands for size in x.shape):
        return tuple(local(operands, None))
    context = jax.sharding.get_abstract_mesh()
    # `custom_partitioning` would trace `local` several times; this traces it once.
    traced = jax.make_jaxpr(lambda *operands: tuple(local(operands, None)))(*operands)
    # `jit` keeps constants of the computation, for which `custom_partitioning` has no place.
    compute = jax.jit(jaxpr_as_fun(traced))

    def whole(*operands: Any) -> tuple[Any, ...]:
        return tuple(compute(*operands))

    # An interpreted kernel has effects, for which `custom_partitioning` has no place either. That a
    # mesh axis has a name, for a sum over it, is an effect, too, for which JAX exports no type.
    if any(type(effect).__name__ != "NamedAxisEffect" for effect in traced.effects):
        return whole(*operands)

    divisible = rule if len(free_axes(context)) < 2 else dataclasses.replace(rule, split=())

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        layouts = _layouts(mesh, context, (*arguments, *results))
        division = divide(divisible, arguments, layouts.specs, layouts.sizes)

        def on_device(*parts: Any) -> tuple[Any, ...]:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parts]
            with jax.sharding.use_abstract_mesh(NO_MESH):
                jaxpr = jax.make_jaxpr(lambda *parts: tuple(local(parts, division)))(*shapes)
            return tuple(part_p.bind(*parts, jaxpr=jaxpr))

        def shardings(arrays: Any) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(layouts.group, division.spec(dims)) for dims in arrays)

        return layouts.mesh, on_device, shardings(rule.results), shardings(rule.operands)

    divided = custom_partitioning(whole)
    divided.def_partition(
        partition,
        sharding_rule=_sharding_rule(divisible, [array.shape for array in operands]),
        decode_shardings=False,
    )

    def batched(size: int, is_batched: Sequence[bool], arrays: Sequence[Any]) -> Sequence[Any]:
        name = ("vmap", *is_batched, identity)
        return run(vmapped(local, is_batched), rule.batched(size, is_batched), name, arrays)

    # The callback's address, which is not the same in another process, can be left out of the key
    # of JAX's compilation cache; what it does must then stand in the program's text.
    with set_xla_metadata(ikbo_jax=_digest(identity, rule)):
        jaxpr = jax.make_jaxpr(_with_devices(divided))(*operands)
        forms = {"jaxpr": jaxpr, "whole": lambda: traced, "batched": batched}
        return tuple(divided_p.bind(*operands, **forms))


def _with_devices(divided: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `divided` be lowered inside a `shard_map` over an abstract mesh, too."""
    if not free_axes(jax.sharding.get_abstract_mesh()):
        return divided

    def run_in_region(*operands: Any) -> tuple[Any, ...]:
        return tuple(region_p.bind(*operands, jaxpr=jax.make_jaxpr(divided)(*operands)))

    return run_in_region


def free_axes(context: Any) -> tuple[str, ...]:
    """Returns the Auto axes left inside `shard_map` over some axes of a mesh; empty outside."""
    if AxisType.Manual not in context.axis_types:
        return ()
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind is AxisType.Auto and context.shape[name] > 1)


class _Layouts(NamedTuple):
    """How XLA divides the arrays of a call: the mesh axes of every array, of those of `group`.

    Inside `shard_map` over some axes of the mesh of all devices, XLA numbers the devices along the
    axes left from 0.
    """

    mesh: Any
    group: Any
    specs: list[PartitionSpec]

    @property
    def sizes(self) -> Any:
        """Number of devices along every axis that may divide."""
        return self.group.shape


def _layouts(mesh: Any, context: Any, arrays: Sequence[Any]) -> _Layouts:
    """Reads layouts; `context` is the abstract mesh that the call was traced in."""
    if free := free_axes(context):
        # XLA's numbers do not tell several axes from each other, so they stand together here.
        size = math.prod(context.shape[name] for name in free)
        group = AbstractMesh(tuple(context.shape[name] for name in free), free)
        specs = []
        for array in arrays:
            part = array.sharding.shard_shape((size,) * len(array.shape))
            specs.append(PartitionSpec(*((free if n == 1 else None) for n in part)))
        return _Layouts(context, group, specs)
    if mesh.empty:
        # JAX passes no mesh where no argument of the program is on one.
        devices = list(arrays[0].sharding.devices_indices_map((1,) * len(arrays[0].shape)))
        is_known = context.size == len(devices)
        sizes, names = (
            (context.axis_sizes, context.axis_names)
            if is_known
            else ((len(devices),), ("devices",))
        )
        mesh = Mesh(np.array(devices).reshape(sizes), names)
    specs = [spec_of(mesh, array.sharding, len(array.shape)) for array in arrays]
    return _Layouts(mesh, mesh, specs)


def spec_of(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """Finds the mesh axes of every dimension of an array that XLA divides.

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
    """Digests this package's code."""
    root = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def jaxpr_primitive(name: str) -> Primitive:
    """Makes a primitive that evaluates its parameter `jaxpr`; callers may replace its lowering."""
    found = Primitive(name)
    found.multiple_results = True
    found.def_impl(lambda *operands, jaxpr, **_: jaxpr_as_fun(jaxpr)(*operands))
    found.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
    mlir.register_lowering(found, mlir.lower_fun(found.impl))
    return found


# A call that XLA divides, with a derivative and a rule of `vmap`, which `custom_partitioning` does
# not have. `whole` returns the jaxpr of the undivided computation; behind a function, `explain`
# does not find its plans a second time.
divided_p = jaxpr_primitive("ikbo_divided")
platforms.differentiate(divided_p, lambda whole, **_: whole())


def _batch(operands: Any, axes: Any, *, batched: Any, **_: Any) -> tuple[Any, Any]:
    is_batched = [isinstance(axis, int) for axis in axes]
    arrays = [
        jnp.moveaxis(x, axis, 0) if moves else x
        for x, axis, moves in zip(operands, axes, is_batched, strict=True)
    ]
    size = arrays[is_batched.index(True)].shape[0]
    results = batched(size, is_batched, arrays)
    return results, [0] * len(results)


batching.primitive_batchers[divided_p] = _batch


# A call inside `shard_map`. `custom_partitioning` asks its mesh for devices, which it only counts;
# the mesh that a program's types name has none.
region_p = jaxpr_primitive("ikbo_region")


def _lower_region(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    axes = ctx.module_context.axis_context
    if isinstance(getattr(axes, "mesh", None), AbstractMesh):
        devices = np.resize(np.array(jax.devices()), axes.mesh.axis_sizes)
        axes = dataclasses.replace(axes, mesh=Mesh(devices, axes.mesh.axis_names))
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))
    return mlir.lower_fun(jaxpr_as_fun(jaxpr))(ctx, *operands)


mlir.register_lowering(region_p, _lower_region)

NO_MESH = AbstractMesh((), ())
# One device's part. Under `jax.set_mesh`, JAX would write shardings into it, which XLA cannot
# compile there. And XLA takes the part's source locations into a program that has other ones
# (jaxlib 0.11.2 warns "Invalid stack_frame_id"); a pass that compares them may then loop for ever.
# So the part has neither. JAX lowers a cacheable primitive beside the module, out of a walk's way.
part_p = jaxpr_primitive("ikbo_part")


def lower_without_mesh(ctx: Any, *arrays: Any, jaxpr: Any) -> Any:
    """Lowers a primitive of `jaxpr_primitive` as if no mesh was set."""
    plain = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr))(plain, *arrays)


def _lower_part(ctx: Any, *parts: Any, jaxpr: Any) -> Any:
    results = lower_without_mesh(ctx, *parts, jaxpr=jaxpr)
    nowhere = mlir.ir.Location.unknown(ctx.module_context.context)

    def forget(op: Any) -> Any:
        op.location = nowhere
        return mlir.ir.WalkResult.ADVANCE

    ctx.module_context.module.operation.walk(forget)
    return results


mlir.register_lowering(part_p, _lower_part, cacheable=False)

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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ikbo_jax.ops import by_xla
from ikbo_jax.ops.partition import Division, Local, Rule, divide, vmapped
from ikbo_jax.ops.settings import as_now

#: By identity: two threads may collect at once, and empty dicts are equal.
_collectors: dict[int, dict[Any, Any]] = {}


@contextlib.contextmanager
def reports() -> Iterator[dict[Any, Any]]:
    """Collects what is reported while XLA compiles: names of calls, to plans of their parts."""
    found: dict[Any, Any] = {}
    _collectors[id(found)] = found
    try:
        yield found
    finally:
        del _collectors[id(found)]


def report(call: Any, part_plan: Any) -> None:
    """Tells every `reports` how one device's part of a call runs."""
    for collector in list(_collectors.values()):
        collector[call] = part_plan


def run(local: Local, rule: Rule, identity: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs `local` on every device, with the operands that it needs there.

    `local` also sums over devices what lacks a divided dimension (`Division.sum`). `identity` is a
    hashable description with a stable `repr`: equal identities, rules and shapes mean equal
    programs.
    """
    local = as_now(local)
    if is_typed(operands):
        return _by_types(_over_axes_left(local, rule, identity), rule, operands)
    context = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in context.axis_types and not by_xla.free_axes(context):
        return tuple(local(operands, None))
    # Without jit, nothing asks how a call divides, and JAX raises for a program with constants.
    if jax.device_count() > 1 and not jax.config.jax_disable_jit:
        return by_xla.run(local, rule, identity, operands)
    return tuple(local(operands, None))


def run_by_types(local: Local, rule: Rule, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs JAX's own functions, which XLA can divide, so that only Explicit types need help.

    With Explicit axes, JAX's functions refuse operands that are divided in different ways. The
    operands have floating-point types.
    """
    if not is_typed(operands):
        return tuple(local(operands, None))
    dtypes = [operand.dtype for operand in operands]

    @as_now
    def in_own_dtypes(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        return local([x.astype(d) for x, d in zip(parts, dtypes, strict=True)], division)

    # Gradients of arrays that devices share are summed in this type, in float32.
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in operands]
    return _by_types(_varied(in_own_dtypes), rule, wide)


def _over_axes_left(local: Local, rule: Rule, identity: Any) -> Local:
    """Divides `local` over a mesh's Auto axes, inside of the op's own `shard_map`."""
    varied = _varied(local)

    def divided(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        if division is None or not by_xla.free_axes(jax.sharding.get_abstract_mesh()):
            return varied(parts, division)
        name = ("inside", division, identity)
        return by_xla.run(lambda x, left: varied(x, division.joined(left)), rule, name, parts)

    return divided


def aligned(rule: Rule, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Moves operands into one layout, where their types say how they divide.

    All dimensions of the rule are alike for the functions.
    """
    return tuple(_moved(rule, operands)[1] if is_typed(operands) else operands)


def _moved(rule: Rule, operands: Sequence[Any]) -> tuple[Division, list[Any]]:
    """Decides by their types how operands divide, and moves them where they are needed."""
    mesh = _explicit_mesh(operands)
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    division = divide(rule, operands, specs, _explicit_sizes(mesh))
    return division, [
        jax.sharding.reshard(x, NamedSharding(mesh, division.spec(dims)))
        for x, dims in zip(operands, rule.operands, strict=True)
    ]


def is_typed(operands: Sequence[Any]) -> bool:
    """Whether types name Explicit mesh axes, so that `run_by_types` has no forward mode."""
    return _explicit_mesh(operands) is not None


def _explicit_mesh(operands: Sequence[Any]) -> Any:
    """Finds the mesh with Explicit axes that the operands' types name; None if there is none."""
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _by_types(local: Local, rule: Rule, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs `local` in a `shard_map` with the layout that the operands' types have.

    `vmap` and reverse mode have rules, which come here again: JAX's rule of `vmap` cannot divide
    the problems, and its residuals of a `shard_map` inside another one have the outer one's axes
    twice (jax 0.11.2). So derivatives keep nothing but operands. They compute `local` again, which
    XLA merges with the first time.
    """

    def shard_mapped(*operands: Any) -> tuple[Any, ...]:
        return _by_shard_map(local, rule, operands)

    batchable = jax.custom_batching.custom_vmap(shard_mapped)

    @batchable.def_vmap
    def rule_of_vmap(size: int, batched: Any, *arrays: Any) -> Any:
        results = _by_types(vmapped(local, batched), rule.batched(size, batched), arrays)
        return results, (True,) * len(results)

    # custom_vjp wraps custom_vmap because custom_vmap has no reverse mode.
    @jax.custom_vjp
    def call(*operands: Any) -> tuple[Any, ...]:
        return batchable(*operands)

    def pull_back(operands: Any, cotangents: Any) -> tuple[Any, ...]:
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]
        pulled = _by_types(
            _pulled_back(local, is_float), rule.gradient(is_float), (*operands, *cotangents)
        )
        gradients = iter(pulled)
        return tuple(
            typed_like(next(gradients), x) if wanted else None
            for x, wanted in zip(operands, is_float, strict=True)
        )

    call.defvjp(lambda *operands: (call(*operands), operands), pull_back)
    return call(*operands)


def _pulled_back(local: Local, is_float: Sequence[bool]) -> Local:
    """Makes the gradients of `local`: takes its operands and its results' cotangents.

    Types say over which axes an operand does not vary: its gradient is summed over them, where
    `local` makes it vary.
    """

    def merged(operands: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
        given = iter(floats)
        return [next(given) if wanted else x for x, wanted in zip(operands, is_float, strict=True)]

    def gradients(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        operands, cotangents = parts[: len(is_float)], parts[len(is_float) :]
        floats = [x for x, wanted in zip(operands, is_float, strict=True) if wanted]
        if division is not None:
            # Every problem of a `vmap` has its own gradients.
            problems = dict(division.rule.problems)
            axes = frozenset().union(*map(division.axes_of, problems))
            floats = [_vary_over(x, axes) for x in floats]

        def of(*floats: Any) -> list[Any]:
            results = local(merged(operands, floats), division)
            return [
                _vary_over(x, _varying(like)) for x, like in zip(results, cotangents, strict=True)
            ]

        results, pull = jax.vjp(of, *floats)
        return pull(
            [_vary_over(x, _varying(like)) for x, like in zip(cotangents, results, strict=True)]
        )

    return gradients


def _by_shard_map(local: Local, rule: Rule, operands: Sequence[Any]) -> tuple[Any, ...]:
    mesh, (division, moved) = _explicit_mesh(operands), _moved(rule, operands)

    def on_device(*parts: Any) -> tuple[Any, ...]:
        # XLA cannot compile what reads an operand without elements here: the process dies
        # (jaxlib 0.11.2). Such an operand is made in place of being read.
        made = [zeros(x.shape, x.dtype, x) if 0 in x.shape else x for x in parts]
        return tuple(local(made, division))

    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(map(division.spec, rule.operands)),
        out_specs=tuple(map(division.spec, rule.results)),
        # The empty set: all axes but those that divide the problems of a caller's `vmap`.
        axis_names=frozenset(_explicit_sizes(mesh))
        if AxisType.Auto in mesh.axis_types
        else frozenset(),
    )
    # What was gathered to be computed is divided again, so that results are as their operands are.
    return tuple(
        jax.sharding.reshard(result, NamedSharding(mesh, division.spec(dims, again=True)))
        for result, dims in zip(sharded(*moved), rule.results, strict=True)
    )


def _explicit_sizes(mesh: Any) -> dict[str, int]:
    """Counts the devices along every Explicit axis."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind is AxisType.Explicit}


def typed_like(gradient: Any, operand: Any) -> Any:
    """Shards a gradient (or None) as its operand's type says, which may have been gathered."""
    if gradient is None:
        return None
    found, wanted = jax.typeof(gradient).sharding, jax.typeof(operand).sharding
    # The type of an array that is on no mesh, such as one of NumPy, names none.
    if found.spec == wanted.spec or found.mesh.empty:
        return gradient
    mesh = found.mesh if wanted.mesh.empty else wanted.mesh
    return jax.sharding.reshard(gradient, NamedSharding(mesh, wanted.spec))


def run_kernel(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Runs `fn(*arrays)`, a function that launches kernels.

    Inside `shard_map`, values have types that say over which mesh axes they vary, and Pallas
    refuses such types in a kernel. The function is traced without them.
    """
    if all(jax.typeof(x).manual_axis_type.empty for x in jax.tree.leaves(arrays)):
        return fn(*arrays)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with jax.sharding.use_abstract_mesh(by_xla.NO_MESH):
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*plain)
    arrays = vary_over_same_axes(arrays)
    results = device_p.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


# A computation on one device, whose jaxpr has no types of `shard_map`.
device_p = by_xla.jaxpr_primitive("ikbo_device")


mlir.register_lowering(device_p, by_xla.lower_without_mesh)


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
    """Marks every array as varying over all `shard_map` axes that one varies over.

    `shard_map` requires a gradient to vary over the same axes as its input, but the gradient of a
    replicated array differs between shards. The transpose of this cast sums it over the shards.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _vary_over(x, axes), arrays)


def zeros(shape: tuple[int, ...], dtype: Any, arrays: Any) -> jax.Array:
    """Makes zeros, the result of a call in which nothing runs.

    Inside `shard_map`, they vary over the mesh axes that one of the call's arrays varies over, as
    the result of other calls does.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    return _vary_over(jnp.zeros(shape, dtype), axes)


def _varied(local: Local) -> Local:
    def varied(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        return local(vary_over_same_axes(parts), division)

    return varied


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _vary_over(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

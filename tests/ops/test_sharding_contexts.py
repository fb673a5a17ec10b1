"""Ops on several devices where the program around them says how, or where only some arrays are."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    KINDS,
    LAYOUTS,
    close,
    collectives,
    drawn,
    mesh_of,
    on,
    reductions,
    step_of,
)

import ikbo_jax as ikbo
from ikbo_jax.layers import functional


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("linear", [None, None, P("x"), None, P("x")]),
        ("linear", [P("x"), P("x"), None, None, None]),
        ("own_tokens", [P("x"), None, None, P("x"), None, P("x"), None]),
        ("own_tokens", [None, P(None, None, "x"), None, None, None, None, None]),
        ("jagged", [P("x"), None, None, None]),
        *((name, [None] * len(specs)) for name, specs in LAYOUTS.items()),
    ],
)
def test_some_arrays_on_no_mesh(name: str, specs: list[P | None], kind: str) -> None:
    """Under `jax.set_mesh`, JAX runs a program on all devices, if no type names the mesh, too."""
    op, arrays = drawn(name)
    mesh = mesh_of("2x2", kind)
    step = step_of(op)
    expected = step(*arrays)
    divided = on(mesh, arrays, specs)
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:
            close(step(*divided), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_jit_is_given(name: str, kind: str) -> None:
    op, arrays = drawn(name)
    mesh = mesh_of("2x2", kind)
    shardings = [NamedSharding(mesh, spec) for spec in LAYOUTS[name]]
    program = jax.jit(op, in_shardings=shardings).lower(*arrays).compile()
    out = program(*on(mesh, arrays, LAYOUTS[name]))
    close(out, step_of(op)(*arrays)[1])
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), out.ndim)
    if name != "jagged":
        assert not collectives(program.as_text())


def merged(*arrays):
    out, lse = ikbo.merge_attention(*arrays)
    return out + lse[..., None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "specs",
    [
        [P("x"), P("x"), P(), P()],
        [P("x"), P("x"), P(None, None, "x"), P(None, None, "x")],
        [P(), P(), P("x"), P("y")],
    ],
)
def test_merged_results_in_other_layouts(specs: list[P], kind: str) -> None:
    """Explicit axes: JAX's functions would refuse such operands."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in [(8, 2, 4, 8), (8, 2, 4)] * 2]
    step = step_of(merged)
    found = step(*on(mesh_of("2x2", kind), arrays, specs))
    close(found, step(*arrays))
    assert found[1].sharding.spec[0] == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_an_uneven_constraint(kind: str) -> None:
    """Ten candidates on four devices: XLA pads them elsewhere; the op's part cannot be padded."""
    rng = np.random.default_rng(0)
    shapes = (7, 5), (7, 6), (10, 5, 3), (3, 6, 3)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays.append(rng.integers(0, 3, 10).astype(np.int32))
    mesh = mesh_of("2x2", kind)

    def constrained(w_cand, w_user, e_cand, e_user, index):
        if kind == "auto":
            layout = NamedSharding(mesh, P(("x", "y")))
            e_cand = jax.lax.with_sharding_constraint(e_cand, layout)
        return ikbo.linear_compression(w_cand, w_user, e_cand, e_user, index)

    found = step_of(constrained)(*on(mesh, arrays, [P()] * 5))
    close(found, step_of(ikbo.linear_compression)(*arrays))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_inside_shard_map_over_all_axes(name: str) -> None:
    """Arrays that are on no mesh; jagged sequences are whole, so that heads are divided."""
    op, arrays = drawn(name)
    heads = P(None, "x")
    specs = LAYOUTS[name] if name != "jagged" else [heads, heads, heads, P()]
    out = P("x") if name != "jagged" else heads
    parts = jax.shard_map(op, mesh=mesh_of("2", "auto"), in_specs=tuple(specs), out_specs=out)
    close(step_of(parts)(*arrays), step_of(op)(*arrays))


def several(query, key, value, index):
    """Attention in a scan of rematerialised layers, and under vmap."""
    layer = jax.checkpoint(lambda query: ikbo.attention(query, key, value, index))
    out, _ = jax.lax.scan(lambda query, _: (layer(query), None), query, length=2)
    scales = jnp.arange(2, dtype=jnp.float32)
    return out + jnp.sum(jax.vmap(lambda scale: layer(query * scale))(scales), axis=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["x", "xy"])
def test_loops_inside_shard_map(axes: str, kind: str) -> None:
    """Scan, remat and vmap, over all axes of a mesh and over some."""
    _, arrays = drawn("grouped_heads")
    mesh = mesh_of("2x2", kind)
    specs = P(tuple(axes)), P(), P(), P(tuple(axes))
    manual = jax.shard_map(
        several, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=set(axes)
    )
    found = step_of(manual)(*on(mesh, arrays, specs))
    close(found, step_of(several)(*arrays), 1e-3)


@pytest.mark.parametrize("has_mask", [False, True])
def test_inside_shard_map_every_device_has_its_own_sequences(has_mask: bool) -> None:
    """Offsets, the index and targets vary over the devices; the memory does not."""
    mesh = mesh_of("8", "auto")
    rng = np.random.default_rng(0)
    query, memory = (rng.normal(size=(n, 2, 4)).astype(np.float32) for n in (40, 9))
    offsets = np.tile(np.asarray([0, 2, 5], np.int32), 8)
    targets = np.asarray(rng.integers(0, 3, 16), np.int32)
    index = np.asarray(rng.integers(0, 2, 16), np.int32)
    memory_offsets = np.asarray([0, 4, 9], np.int32)

    def part(query: Any, memory: Any, offsets: Any, targets: Any, index: Any) -> jax.Array:
        options = {"activation": ("softmax", "silu"), "q_to_kv": index}
        mask = ikbo.masks.hstu(targets) if has_mask else None
        return ikbo.gdpa(query, memory, memory, offsets, memory_offsets, mask=mask, **options)

    def op(*arrays: Any) -> jax.Array:
        specs = (P("x"), P(), P("x"), P("x"), P("x"))
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("x"))(*arrays)

    found, out = step_of(op)(query, memory, offsets, targets, index)

    def alone(query: Any, memory: Any, *others: Any) -> jax.Array:
        parts = zip(*(x.reshape(8, -1, *x.shape[1:]) for x in (query, *others)), strict=True)
        return jnp.concatenate([part(q, memory, *rest) for q, *rest in parts])

    expected, exact = step_of(alone)(query, memory, offsets, targets, index)
    close(out, exact, 1e-5)
    close(found, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_x64(name: str, kind: str) -> None:
    op, arrays = drawn(name)
    step = step_of(op)
    expected = step(*arrays)
    with jax.enable_x64(True):
        divided = on(mesh_of("2x2", kind), arrays, LAYOUTS[name])
        program = step.lower(*divided).compile()
        close(program(*divided), expected)
        assert reductions(program.as_text()) == {"linear": 3}.get(name, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "grouped_heads", "jagged"])
def test_gradients_of_bfloat16_are_summed_in_float32(name: str, kind: str) -> None:
    op, arrays = drawn(name)
    arrays = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in arrays]
    step = step_of(op)
    divided = on(mesh_of("2x2", kind), arrays, LAYOUTS[name])
    program = step.lower(*divided).compile()
    close(program(*divided), step(*arrays), 5e-2)
    assert collectives(program.as_text()) == {"all-reduce"}
    assert "bf16[" not in "".join(
        line.split(" all-reduce")[0]
        for line in program.as_text().splitlines()
        if " all-reduce(" in line
    )


def test_cotangents_of_the_index_are_float0() -> None:
    op, arrays = drawn("grouped_heads")
    divided = on(mesh_of("2x2", "auto"), arrays, LAYOUTS["grouped_heads"])
    loss = lambda *arrays: jnp.sum(jnp.sin(op(*arrays)))  # noqa: E731
    of_query, of_index = jax.grad(loss, (0, 3), allow_int=True)(*divided)
    assert of_index.dtype == jax.dtypes.float0
    close(of_query, step_of(op)(*arrays)[0][0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("explicit", ["x", "y"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mesh_with_explicit_and_auto_axes(name: str, explicit: str) -> None:
    """Inside the `shard_map` over Explicit axes, XLA divides over the other one."""
    kinds = tuple(KINDS["explicit" if axis == explicit else "auto"] for axis in "xy")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    op, arrays = drawn(name)
    specs = {
        "linear": [P("y"), P("y"), P("x"), P(), P("x")],
        "grouped_heads": [P("x", None, "y"), P(None, None, "y"), P(None, None, "y"), P("x")],
        "own_tokens": LAYOUTS["own_tokens"],
        "jagged": [P("y", "x"), P(None, "x"), P(None, "x"), P()],
    }[name]
    forward = jax.jit(op).lower(*on(mesh, arrays, specs)).compile()
    assert not collectives(forward.as_text())
    close(step_of(op)(*on(mesh, arrays, specs)), step_of(op)(*arrays))
    if name != "own_tokens":
        (plan,) = ikbo.explain(op, *on(mesh, arrays, specs)).plans
        assert "over 'x'" in plan.division
        assert "over 'y'" in plan.division
        assert name == "jagged" or "gathers" not in plan.division


def attend(x_cand, x_user, index, *weights):
    return functional.attend(dict(zip(WEIGHTS, weights, strict=True)), x_cand, x_user, index)


def pool(x, seeds, *weights):
    params = dict(zip(WEIGHTS, weights, strict=True))
    return functional.pma(params | {"seeds": seeds}, x, np.array([0, 3, 3, 9, 16], np.int32))


WEIGHTS = "w_query", "w_key", "w_value", "w_out"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [attend, pool])
def test_layers_whose_heads_are_divided(layer: Callable[..., Any], kind: str) -> None:
    """Explicit axes: JAX does not choose the layout of a sum over heads."""
    rng = np.random.default_rng(0)
    shapes = [(16, 2, 8), (4, 5, 8)] if layer is attend else [(16, 8), (4, 8)]
    shapes += [(8, 4, 8)] * 3 + [(4, 8, 8)]
    arrays = [rng.normal(size=shape, scale=0.3).astype(np.float32) for shape in shapes]
    specs = [P("x"), P()] if layer is attend else [P(), P()]
    specs += [P(None, "y")] * 3 + [P("y")]
    if layer is attend:
        arrays.insert(2, rng.integers(0, 4, 16).astype(np.int32))
        specs.insert(2, P("x"))
    step = step_of(layer)
    close(step(*on(mesh_of("2x2", kind), arrays, specs)), step(*arrays))


OFFSETS = np.array([0, 2, 4], np.int32)


@pytest.mark.parametrize(
    ("op", "carry", "shapes"),
    [
        (ikbo.attention, (0, 4, 2, 8), [(3, 5, 2, 8), (3, 5, 2, 8), (0,)]),
        (lambda q, k, v: ikbo.gdpa(q, k, v, OFFSETS, 0 * OFFSETS), (8, 2, 8), [(0, 2, 8)] * 2),
        (
            lambda e, *rest: ikbo.linear_compression(rest[0], rest[1], e, *rest[2:]),
            (0, 5, 3),
            [(5, 5), (5, 6), (3, 6, 3), (0,)],
        ),
    ],
)
def test_calls_in_which_nothing_runs_vary_as_their_arrays(op, carry, shapes) -> None:
    """Inside `shard_map`, a loop's carry must have one type."""
    arrays = [np.zeros(shape, np.float32 if len(shape) > 1 else np.int32) for shape in shapes]

    def loop(first: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (op(x, *arrays), None), first, None, length=2)[0]

    mesh = mesh_of("2", "auto")
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    assert not np.any(program(np.zeros(carry, np.float32)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k_cand", "k_user"), [(0, 0), (5, 0), (0, 6)])
def test_levels_without_rows(k_cand: int, k_user: int, kind: str) -> None:
    """Explicit axes: XLA ended the process when a device's part read an array without elements."""
    rng = np.random.default_rng(0)
    shapes = (4, k_cand), (4, k_user), (8, k_cand, 3), (2, k_user, 3)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays.append(rng.integers(0, 2, 8).astype(np.int32))
    found = step_of(ikbo.linear_compression)(*on(mesh_of("2", kind), arrays, LAYOUTS["linear"]))
    close(found, step_of(ikbo.linear_compression)(*arrays))
    assert found[1].sharding.spec[0] == "x"

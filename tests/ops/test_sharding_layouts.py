"""Ops on arrays in layouts that are not all alike: drawn ones, and those of older kinds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import attend_with_everything

import ikbo_jax as ikbo
from ikbo_jax.ops import by_xla

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
MESHES = [((8,), "x"), ((4, 2), "xy"), ((2, 2, 2), "xyz")]
B, U, T, N, S, H = 16, 8, 2, 8, 8, 8
OFFSETS = np.array([0, 3, 3, 9, 16], np.int32)


def with_own_tokens(query, key, value, self_key, self_value, index, lengths):
    return attend_with_everything(query, key, value, index, lengths, self_key, self_value)


def jagged(query, key, value, index):
    return ikbo.gdpa(query, key, value, OFFSETS, OFFSETS, activation="softmax", q_to_kv=index)


#: Ops, shapes of their arrays, and lengths and bounds of their index arrays.
OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, int]]]] = {
    "linear": (
        ikbo.linear_compression, [(16, 8), (16, 8), (B, 8, 8), (U, 8, 8)], [(B, U)]
    ),
    "grouped_heads": (ikbo.attention, [(B, T, N, H), (U, S, 4, H), (U, S, 4, H)], [(B, U)]),
    "own_tokens": (
        with_own_tokens,
        [(B, T, N, H), (U, S, 4, H), (U, S, 4, H), (B, T, 4, H), (B, T, 4, H)],
        [(B, U), (U, S + 1)],
    ),
    "jagged": (jagged, [(16, N, H), (16, 4, H), (16, 4, H)], [(4, 4)]),
}  # fmt: skip


def spec(draw: random.Random, shape: Sequence[int], sizes: dict[str, int]) -> P:
    """A layout: every mesh axis divides a dimension, or none."""
    axes: list[tuple[str, ...]] = [()] * len(shape)
    parts = [1] * len(shape)
    for name in draw.sample(list(sizes), len(sizes)):
        dim = draw.randrange(len(shape))
        if draw.random() < 0.6 and shape[dim] % (parts[dim] * sizes[name]) == 0:
            parts[dim] *= sizes[name]
            axes[dim] = (*axes[dim], name)
    return P(*(entry or None for entry in axes))


def check(
    op: Callable[..., Any],
    arrays: Sequence[Any],
    specs: Sequence[P],
    mesh: Any,
    on_mesh: Callable[..., Any] | None = None,
) -> jax.Array:
    """Results and gradients are those of one device; returns the result.

    `on_mesh` is the op on divided arrays, where that is another function.
    """
    floats = tuple(n for n, x in enumerate(arrays) if x.dtype == np.float32)

    def step(op):
        def loss(*arrays):
            out = op(*arrays)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, floats, has_aux=True))

    expected = step(op)(*arrays)
    divided = [
        jax.device_put(x, NamedSharding(mesh, one)) for x, one in zip(arrays, specs, strict=True)
    ]
    found = step(on_mesh or op)(*divided)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)
    out: jax.Array = found[1]
    return out


def drawn(name: str, seed: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    op, shapes, indices = OPS[name]
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return op, arrays + [rng.integers(0, bound, n).astype(np.int32) for n, bound in indices]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_drawn_layouts(name: str, kind: str) -> None:
    for seed in range(2):
        draw = random.Random(f"{name} {seed}")
        op, arrays = drawn(name, seed)
        shape, axes = draw.choice(MESHES)
        mesh = jax.make_mesh(shape, tuple(axes), axis_types=(KINDS[kind],) * len(axes))
        sizes = dict(zip(axes, shape, strict=True))
        check(op, arrays, [spec(draw, x.shape, sizes) for x in arrays], mesh)


@pytest.mark.parametrize("kind", KINDS)
def test_query_heads_over_more_devices_than_key_heads(kind: str) -> None:
    """XLA proposes to divide four key heads over a part of the mesh axis of eight devices."""
    op, arrays = drawn("own_tokens", 0)
    specs = [P(None, None, "x"), P(), P(), P(), P(None, None, None, "x"), P(), P()]
    check(op, arrays, specs, jax.make_mesh((8,), ("x",), axis_types=(KINDS[kind],)))


def test_own_tokens_that_are_divided_in_another_way() -> None:
    """Explicit axes: JAX's own functions would refuse such operands."""
    op, arrays = drawn("own_tokens", 0)
    specs = [P("x"), P(), P(), P(), P(None, None, None, "x"), P("x"), P()]
    check(op, arrays, specs, jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,)))


def test_gradients_of_own_tokens_that_devices_share_are_rounded_once() -> None:
    """Explicit axes: the sum over the heads of a token, on eight devices, in float32."""
    _, arrays = drawn("own_tokens", 0)
    arrays = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in arrays]
    arrays[1:5] = [x[:, :, :1] for x in arrays[1:5]]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    heads = NamedSharding(mesh, P(None, None, "x"))
    whole = NamedSharding(mesh, P())

    def loss(own, *arrays):
        out = ikbo.attention(*arrays, self_key=own[0], self_value=own[1])
        return jnp.sum(out.astype(jnp.float32))

    query, key, value, *own, index, _ = arrays
    divided = [jax.device_put(query, heads)]
    divided += [jax.device_put(x, whole) for x in (key, value, index)]
    text = str(jax.make_jaxpr(jax.grad(loss))([jax.device_put(x, whole) for x in own], *divided))
    sums = [line for line in text.splitlines() if "psum" in line]
    assert sums
    assert all(":f32[" in line for line in sums), sums


@pytest.mark.parametrize(("shape", "names"), MESHES)
def test_layouts_are_read_back(shape: tuple[int, ...], names: str) -> None:
    mesh = jax.make_mesh(shape, tuple(names), axis_types=(AxisType.Auto,) * len(names))
    for order in itertools.permutations(names):
        for dims in itertools.product(range(4), repeat=len(names)):
            axes = [
                tuple(name for name, dim in zip(order, dims, strict=True) if dim == wanted)
                for wanted in range(3)
            ]
            one = P(*(entry or None for entry in axes))
            assert by_xla.spec_of(mesh, NamedSharding(mesh, one), 3) == one


#: How the arrays of `OPS` are divided over "x", which `shard_map` makes manual, and "y".
PARTS: dict[str, list[tuple[str, list[P], P]]] = {
    "linear": [
        ("m", [P("y"), P("y"), P("x"), P(), P("x")], P("x", "y")),
        ("candidates", [P(), P(), P(("x", "y")), P(), P(("x", "y"))], P(("x", "y"))),
        ("users", [P(), P(), P("x"), P("y"), P("x")], P("x")),
    ],
    "grouped_heads": [
        ("heads", [P("x", None, "y"), *[P(None, None, "y")] * 2, P("x")], P("x", None, "y")),
        ("candidates", [P(("x", "y")), P(), P(), P(("x", "y"))], P(("x", "y"))),
    ],
    "own_tokens": [
        (
            "heads",
            [
                P("x", None, "y"), P(None, None, "y"), P(None, None, "y"),
                P("x", None, "y"), P("x", None, "y"), P("x"), P(),
            ],
            P("x", None, "y"),
        ),
        ("tokens", [P("x", "y"), P(), P(), P("x"), P("x", "y"), P("x"), P()], P("x", "y")),
    ],
    "jagged": [
        ("rows", [P("y", "x"), P(None, "x"), P(None, "x"), P()], P("y", "x")),
        ("heads", [P(None, ("x", "y"))] * 3 + [P()], P(None, ("x", "y"))),
    ],
}  # fmt: skip


def only(axis: str, spec: P) -> P:
    """The part of a layout that names `axis`."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return P(*(axis if axis in entry else None for entry in entries))


def over_x(name: str, layout: str, kind: str) -> tuple[Any, ...]:
    """An op, its `shard_map` over "x", arrays, their layouts, the result's, and the mesh."""
    specs, out = next(x[1:] for x in PARTS[name] if x[0] == layout)
    op, arrays = drawn(name, 0)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(KINDS[kind],) * 2)
    manual = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=tuple(only("x", one) for one in specs),
        out_specs=only("x", out),
        axis_names={"x"},
    )
    return op, manual, arrays, specs, out, mesh


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "layout"), [(name, x[0]) for name, layouts in PARTS.items() for x in layouts]
)
def test_shard_map_over_some_axes_of_a_mesh(name: str, layout: str, kind: str) -> None:
    """Inside `shard_map` over "x", the other axis still divides as the arrays are divided."""
    op, manual, arrays, specs, out, mesh = over_x(name, layout, kind)
    found = check(op, arrays, specs, mesh, manual)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, out), found.ndim)


@pytest.mark.parametrize(
    ("name", "layout"), [("linear", "m"), ("own_tokens", "heads"), ("jagged", "rows")]
)
def test_second_derivatives_inside_shard_map_over_some_axes(name: str, layout: str) -> None:
    """Explicit axes: JAX would give residuals of the op's own `shard_map` the outer axes again."""
    op, manual, arrays, specs, _, mesh = over_x(name, layout, "explicit")
    floats = tuple(n for n, x in enumerate(arrays) if x.dtype == np.float32)

    def curvature(op, arrays):
        def slopes(*arrays):
            found = jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), floats)(*arrays)
            return sum(jnp.sum(jnp.cos(x)) for x in found)

        return jax.jit(jax.grad(slopes, floats))(*arrays)

    found = curvature(manual, [
        jax.device_put(x, NamedSharding(mesh, one)) for x, one in zip(arrays, specs, strict=True)
    ])  # fmt: skip
    for x, y in zip(found, curvature(op, arrays), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "manual", "specs"),
    [
        ("linear", "xz", [P("y"), P("y"), P(("z", "x")), P(), P(("z", "x"))]),
        ("own_tokens", "xz", [P(("z", "y", "x")), P(), P(), *[P(("z", "y", "x"))] * 3, P()]),
        ("jagged", "xz", [P("y", ("z", "x")), *[P(None, ("z", "x"))] * 2, P()]),
        ("linear", "y", [P("x"), P("x"), P(("y", "z")), P("z"), P(("y", "z"))]),
    ],
)
def test_auto_axes_that_shard_map_leaves(name: str, manual: str, specs: list[P]) -> None:
    """One axis divides, wherever it stands in the mesh; several are gathered, which is right too.

    Dimensions are divided by manual axes first.
    """
    op, arrays = drawn(name, 0)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)

    def part(spec: P) -> P:
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        return P(*(tuple(n for n in entry if n and n in manual) or None for entry in entries))

    out = part(specs[2] if name == "linear" else specs[0])
    on_mesh = jax.shard_map(
        op, mesh=mesh, in_specs=tuple(map(part, specs)), out_specs=out, axis_names=set(manual)
    )
    check(op, arrays, specs, mesh, on_mesh)


@pytest.mark.parametrize(("shape", "left"), [((2, 4), "y"), ((2, 2, 2), "yz")])
def test_explain_says_what_auto_axes_that_shard_map_leaves_do(
    shape: tuple[int, ...], left: str
) -> None:
    names = "xyz"[: len(shape)]
    mesh = jax.make_mesh(shape, tuple(names), axis_types=(AxisType.Auto,) * len(shape))
    op, arrays = drawn("grouped_heads", 0)
    specs = [P(("x", *left)), P(), P(), P(("x", *left))]
    divided = [
        jax.device_put(x, NamedSharding(mesh, one)) for x, one in zip(arrays, specs, strict=True)
    ]
    manual = jax.shard_map(
        op, mesh=mesh, in_specs=(P("x"), P(), P(), P("x")), out_specs=P("x"), axis_names={"x"}
    )
    (plan,) = ikbo.explain(manual, *divided).plans
    if len(left) == 1:
        assert "candidates over 'y' (4 devices)" in plan.division
        assert "gathers" not in plan.division
    else:
        assert "not divided" in plan.division
        assert f"gathers query over 'y', 'z', {8 * T * N * H * 4:,} bytes" in plan.division

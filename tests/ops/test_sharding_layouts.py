"""Ops on arrays in layouts that are not all alike: drawn, of older kinds, of `vmap`."""

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
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
    floats,
    mesh_of,
    on,
    reductions,
    step_of,
)

import ikbo_jax as ikbo
from ikbo_jax.ops import by_xla

MESHES = ["8", "4x2", "2x2x2"]


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


def check(op, arrays, specs, mesh, on_mesh=None) -> None:
    """Results and gradients are those of one device.

    `on_mesh` is the op on divided arrays, where that is another function.
    """
    close(step_of(on_mesh or op)(*on(mesh, arrays, specs)), step_of(op)(*arrays))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_drawn_layouts(name: str, kind: str) -> None:
    for seed in range(2):
        draw = random.Random(f"{name} {seed}")
        op, arrays = drawn(name, seed)
        mesh = mesh_of(draw.choice(MESHES), kind)
        check(op, arrays, [spec(draw, x.shape, dict(mesh.shape)) for x in arrays], mesh)


HEADS_AND_WIDTH = [P(None, None, "x"), P(), P(), P(), P(None, None, None, "x"), P(), P()]
CANDIDATES_AND_WIDTH = [P("x"), P(), P(), P(), P(None, None, None, "x"), P("x"), P()]


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        # XLA proposes to divide four key heads over a part of the mesh axis of eight devices.
        (HEADS_AND_WIDTH, "auto"),
        (HEADS_AND_WIDTH, "explicit"),
        # JAX's own functions would refuse such operands.
        (CANDIDATES_AND_WIDTH, "explicit"),
    ],
    ids=["query_heads-auto", "query_heads-explicit", "candidates"],
)
def test_own_tokens_that_are_divided_in_another_way(specs: list[P], kind: str) -> None:
    op, arrays = drawn("own_tokens")
    check(op, arrays, specs, mesh_of("8", kind))


@pytest.mark.parametrize("copies", [1, 8])
def test_gradients_of_own_tokens_that_devices_share_are_rounded_once(copies: int) -> None:
    """Explicit axes: the sum over the heads of a token, on eight devices, in float32.

    A kernel takes the one token of a candidate with eight copies of the columns.
    """
    _, arrays = drawn("own_tokens")
    arrays = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in arrays]
    arrays[1:5] = [x[:, :, :1] for x in arrays[1:5]]
    arrays[:5] = [jnp.tile(x, copies) for x in arrays[:5]]
    mesh = mesh_of("8", "explicit")

    def loss(own, *arrays):
        out = ikbo.attention(*arrays, self_key=own[0], self_value=own[1])
        return jnp.sum(out.astype(jnp.float32))

    query, key, value, *own, index, _ = arrays
    own = [x[:, :1] for x in own]
    divided = on(mesh, (query, key, value, index), [P(None, None, "x"), P(), P(), P()])
    text = str(jax.make_jaxpr(jax.grad(loss))(on(mesh, own, [P(), P()]), *divided))
    sums = [line for line in text.splitlines() if "psum" in line]
    assert sums
    assert all(":f32[" in line for line in sums), sums


@pytest.mark.parametrize("shape", MESHES)
def test_layouts_are_read_back(shape: str) -> None:
    mesh = mesh_of(shape, "auto")
    names = mesh.axis_names
    for order in itertools.permutations(names):
        for dims in itertools.product(range(4), repeat=len(names)):
            axes = [
                tuple(name for name, dim in zip(order, dims, strict=True) if dim == wanted)
                for wanted in range(3)
            ]
            one = P(*(entry or None for entry in axes))
            assert by_xla.spec_of(mesh, NamedSharding(mesh, one), 3) == one


#: How the arrays of an op are divided over "x", which `shard_map` makes manual, and "y".
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
        ("candidates", [P(("x", "y")), P(), P(), *[P(("x", "y"))] * 3, P()], P(("x", "y"))),
    ],
    "jagged": [
        ("rows", [P("y", "x"), P(None, "x"), P(None, "x"), P()], P("y", "x")),
        ("heads", [P(None, ("x", "y"))] * 3 + [P()], P(None, ("x", "y"))),
    ],
}  # fmt: skip


def over(axes: str, op: Callable[..., Any], specs: Sequence[P], out: P, mesh: Any) -> Any:
    """The op in a `shard_map` over some axes, which has of every layout what names these axes."""

    def part(spec: P) -> P:
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        return P(*(tuple(n for n in entry if n and n in axes) or None for entry in entries))

    return jax.shard_map(
        op, mesh=mesh, in_specs=tuple(map(part, specs)), out_specs=part(out), axis_names=set(axes)
    )


def over_x(name: str, layout: str, kind: str, *, in_context: bool = False) -> tuple[Any, ...]:
    """An op, its `shard_map` over "x", arrays, their layouts, the result's, and the mesh."""
    specs, out = next(x[1:] for x in PARTS[name] if x[0] == layout)
    op, arrays = drawn(name)
    mesh = mesh_of("2x2", kind)
    manual = over("x", op, specs, out, None if in_context else mesh)
    return op, manual, arrays, specs, out, mesh


LAYOUTS_OF_PARTS = [(name, x[0]) for name, layouts in PARTS.items() for x in layouts]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "layout", "in_context"),
    [
        *((*case, False) for case in LAYOUTS_OF_PARTS),
        *((*case, True) for case in LAYOUTS_OF_PARTS if case[1] in ("candidates", "rows")),
    ],
)
def test_shard_map_over_some_axes_of_a_mesh(name, layout, in_context, kind) -> None:
    """Inside `shard_map` over "x", the other axis still divides as the arrays are divided.

    Under `jax.set_mesh`, `shard_map` has an abstract mesh, without devices.
    """
    context = jax.set_mesh(mesh_of("2x2", kind)) if in_context else contextlib.nullcontext()
    with context:
        op, manual, arrays, specs, out, mesh = over_x(name, layout, kind, in_context=in_context)
        found = step_of(manual)(*on(mesh, arrays, specs))
    close(found, step_of(op)(*arrays))
    assert found[1].sharding.is_equivalent_to(NamedSharding(mesh, out), found[1].ndim)


@pytest.mark.parametrize(
    ("name", "layout"), [("linear", "m"), ("own_tokens", "heads"), ("jagged", "rows")]
)
def test_second_derivatives_inside_shard_map_over_some_axes(name: str, layout: str) -> None:
    """Explicit axes: JAX would give residuals of the op's own `shard_map` the outer axes again."""
    op, manual, arrays, specs, _, mesh = over_x(name, layout, "explicit")
    chosen = floats(arrays)

    def curvature(op, arrays):
        def slopes(*arrays):
            found = jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), chosen)(*arrays)
            return sum(jnp.sum(jnp.cos(x)) for x in found)

        return jax.jit(jax.grad(slopes, chosen))(*arrays)

    close(curvature(manual, on(mesh, arrays, specs)), curvature(op, arrays), 1e-3)


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
    op, arrays = drawn(name)
    mesh = mesh_of("2x2x2", "auto")
    out = specs[2] if name == "linear" else specs[0]
    check(op, arrays, specs, mesh, over(manual, op, specs, out, mesh))


@pytest.mark.parametrize(("shape", "left"), [("2x4", "y"), ("2x2x2", "yz")])
def test_explain_says_what_auto_axes_that_shard_map_leaves_do(shape: str, left: str) -> None:
    mesh = mesh_of(shape, "auto")
    op, arrays = drawn("grouped_heads")
    specs = [P(("x", *left)), P(), P(), P(("x", *left))]
    divided = on(mesh, arrays, specs)
    manual = over("x", op, specs, specs[0], mesh)
    (plan,) = ikbo.explain(manual, *divided).plans
    if len(left) == 1:
        assert "candidates over 'y' (4 devices)" in plan.division
        assert "gathers" not in plan.division
    else:
        assert "not divided" in plan.division
        assert f"gathers query over 'y', 'z', {arrays[0].nbytes // 2:,} bytes" in plan.division


SIZE = 4
#: Op, which of its arrays have problems, how one problem is divided over "y", and the result's
#: layout, whose first axis is that of all problems: "x", or None where they are not divided.
CASES: dict[str, tuple[str, Sequence[bool], Sequence[P], P]] = {
    "linear": (
        "linear", [False, False, True, False, True], [P(), P(), P("y"), P(), P("y")], P("x", "y")
    ),
    "linear_weights_too": (
        "linear", [True] * 5, [P("y"), P("y"), P(), P(), P()], P("x", None, "y")
    ),
    "linear_users_alone": (
        "linear", [False, False, False, True, False], [P(), P(), P("y"), P(), P("y")], P("x", "y")
    ),
    "attention": (
        "grouped_heads", [True] * 4,
        [P(None, None, "y"), P(None, None, "y"), P(None, None, "y"), P()], P("x", None, None, "y"),
    ),
    "attention_shared_users": (
        "grouped_heads", [True, False, False, True], [P("y"), P(), P(), P("y")], P("x", "y")
    ),
    "attention_keys_alone": (
        "grouped_heads", [False, True, False, False], [P("y"), P(), P(), P("y")], P("x", "y")
    ),
    "attention_whole_problems": (
        "grouped_heads", [True, True, True, False], [P("y"), P(), P(), P("y")], P(None, "y")
    ),
    "own_tokens": (
        "own_tokens", [True, False, False, True, True, True, False],
        [P("y"), P(), P(), P("y"), P("y"), P("y"), P()], P("x", "y"),
    ),
    "jagged": (
        "jagged", [True, True, True, False], [P(None, "y"), P(None, "y"), P(None, "y"), P()],
        P("x", None, "y"),
    ),
    "jagged_shared_memory": (
        "jagged", [True, False, False, False], [P("y"), P(), P(), P()], P("x", "y")
    ),
}  # fmt: skip


def problems(name: str, kind: str) -> tuple[Any, Any, list[Any], list[Any], Any]:
    """An op, its axes of problems, its arrays on one device and on a mesh, and the mesh."""
    op_name, batched, specs, (over, *_) = CASES[name]
    op, one = drawn(op_name)
    rng = np.random.default_rng(1)
    arrays = [
        np.stack([rng.permutation(x) for _ in range(SIZE)]) if is_batched else x
        for x, is_batched in zip(one, batched, strict=True)
    ]
    mesh = mesh_of("2x2", kind)
    layouts = [P(over, *x) if one else x for x, one in zip(specs, batched, strict=True)]
    axes = tuple(0 if is_batched else None for is_batched in batched)
    return op, axes, arrays, on(mesh, arrays, layouts), mesh


@pytest.mark.parametrize("name", CASES)
def test_problems_are_divided(name: str) -> None:
    """Results, gradients of all problems' sum, and every problem's own gradients.

    Programs of gradients compile for seconds: the kinds of mesh take turns.
    """
    op, axes, arrays, _, _ = problems(name, "auto")
    with_gradients = list(KINDS)[list(CASES).index(name) % len(KINDS)]
    chosen = floats(arrays)

    def loss(*arrays):
        return jnp.sum(jnp.sin(op(*arrays)))

    def total(*arrays):
        return jnp.sum(jax.vmap(loss, axes)(*arrays))

    def everything(*arrays):
        each = jax.vmap(jax.grad(loss, chosen), axes)
        return jax.grad(total, chosen)(*arrays), each(*arrays)

    one_by_one = [
        step_of(op)(*(x if axis is None else x[n] for x, axis in zip(arrays, axes, strict=True)))
        for n in range(SIZE)
    ]
    each, expected = jax.tree.map(lambda *xs: np.stack(xs), *jax.device_get(one_by_one))
    totals = [x if axes[n] == 0 else x.sum(0) for n, x in zip(chosen, each, strict=True)]
    forward = jax.jit(jax.vmap(op, axes))
    for kind in KINDS:
        *_, divided, mesh = problems(name, kind)
        program = forward.lower(*divided).compile()
        assert not collectives(program.as_text())
        out = program(*divided)
        close(out, expected)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, CASES[name][3]), out.ndim)
        if kind == with_gradients:
            close(jax.jit(everything)(*divided), (totals, each))


@pytest.mark.parametrize("kind", KINDS)
def test_division_is_explained_and_gradients_of_shared_arrays_are_summed_once(kind: str) -> None:
    """Over problems and candidates: one reduction for each of keys and values."""
    op, axes, _, divided, _ = problems("attention_shared_users", kind)
    mapped = jax.vmap(op, axes)
    (plan,) = ikbo.explain(mapped, *divided).plans
    assert "problems over 'x' (2 devices)" in plan.division
    assert "candidates over 'y' (2 devices)" in plan.division
    assert "gathers" not in plan.division

    def total(*arrays):
        return jnp.sum(jnp.sin(mapped(*arrays)))

    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*divided).compile().as_text()
    assert collectives(text) == {"all-reduce"}
    assert reductions(text) <= 4


def test_forward_mode_of_own_tokens_is_refused_on_explicit_axes() -> None:
    """Reverse mode has a rule there, so that it divides under `vmap`; forward mode has none."""
    op, arrays = drawn("own_tokens")
    divided = on(mesh_of("2", "explicit"), arrays, [P()] * len(arrays))

    with pytest.raises(NotImplementedError, match="attention has no forward-mode derivative"):
        jax.jvp(lambda own: op(*divided[:3], own, *divided[4:]), (divided[3],), (divided[3],))

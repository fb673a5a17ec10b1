"""`vmap` of ops over an axis of problems that devices divide."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import KINDS, close, collectives, drawn, floats, mesh_of, on, reductions, step_of

import ikbo_jax as ikbo

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

    def of_own(own):
        return op(*divided[:3], own, *divided[4:])

    with pytest.raises(NotImplementedError, match="attention has no forward-mode derivative"):
        jax.jvp(of_own, (divided[3],), (divided[3],))

"""Which calls of `norm_linear` and `gated_linear` take their kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import close, mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch, gated_linear
from ikbo_jax.pallas.linear import gated_rows
from ikbo_jax.problems.gated_linear import GatedLinearConfig
from ikbo_jax.problems.norm_linear import NormLinearConfig
from ikbo_jax.reference import norm_linear as reference

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("bfloat16", {}, ""),
        ("float32", {}, "float32"),
        ("bfloat16", {"features": 648}, "at most F=640 in shared memory, but F=648"),
        ("bfloat16", {"rows": 1}, "at least 2 rows, for TMA, but there is 1"),
        ("bfloat16", {"rows": 128}, "XLA is faster for at most 128 rows"),
    ],
)
def test_programs_for_hopper_have_the_kernel_where_it_takes_the_call(
    dtype: str, changes: dict[str, int], reason: str
) -> None:
    sizes = {"rows": 300, "features": 64} | changes
    x = jax.ShapeDtypeStruct((sizes["rows"], sizes["features"]), dtype)
    w = jax.ShapeDtypeStruct((sizes["features"], 2, 64), dtype)
    (plan,) = ikbo.explain(lambda x, w: ikbo.norm_linear(x, [w, w]), x, w).plans
    assert (plan.cuda.implementation, plan.cuda.backward[:3]) == (
        "xla" if reason else "mosaic_gpu",
        "XLA",
    )
    assert isinstance(plan.cuda.config, type(None) if reason else NormLinearConfig)
    assert reason in plan.cuda.reason


@pytest.mark.parametrize("recompute", [(), ("norm", "projection")])
def test_the_kernel_runs_below_a_gradient(recompute: tuple[str, ...]) -> None:
    x = jnp.ones((512, 8), jnp.bfloat16)
    w = jnp.ones((8, 16), jnp.bfloat16)

    def loss(x: Any, w: Any) -> jax.Array:
        options = {"activations": ["silu"], "recompute": recompute}
        return ikbo.norm_linear(x, [w], **options)[0].astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss))
    assert "mosaic_gpu" in jax.export.export(step, platforms=["cuda"])(x, w).mlir_module()
    mesh = mesh_of("2", "auto")
    for args in ((x, w), on(mesh, [x, w], [P("x"), P()])):
        (plan,) = ikbo.explain(step, *args).plans
        assert plan.cuda.implementation == "mosaic_gpu"
    assert plan.division.startswith("rows over")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"width": 128}, {}, ""),
        ({"width": 128}, {"by_head": True}, ""),
        ({"rows": 512}, {}, "XLA is faster for at most 512 rows"),
        ({"width": 72}, {"by_head": True}, "heads of a multiple of 64 columns, but there are 2 of"),
        ({"width": 66}, {}, "multiples of 8 (16 bytes, for TMA), but columns=132"),
        ({}, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "the kernel drops nothing"),
    ],
)
def test_gated_linear_takes_the_kernel_with_and_without_a_gradient(
    changes: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    rows, width = (changes.get(name, size) for name, size in (("rows", 600), ("width", 64)))
    u, w, x = (
        jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 2, width), (6 * width, 16), (rows, 16))
    )

    def loss(u: Any, w: Any, x: Any) -> jax.Array:
        found = ikbo.gated_linear(u, u, w, x, concat=True, **options)
        return found.astype(jnp.float32).sum()

    def slope(u: Any, w: Any, x: Any) -> jax.Array:
        return jax.grad(loss)(u, w, x).astype(jnp.float32).sum()

    why_not = "" if width == 128 and not options else "gradient's kernel normalises 256 or 512"
    found = []
    for fn in (jax.jit(loss), jax.jit(jax.value_and_grad(loss))):
        exported = jax.export.export(fn, platforms=["cuda"])(u, w, x)
        assert ("mosaic_gpu" in exported.mlir_module()) == (not reason)
        found.append("ikbo_gated_rows" in exported.mlir_module())
        plan = ikbo.explain(fn, u, w, x).plans[0]
        assert (plan.cuda.implementation == "xla") == bool(reason)
        assert (plan.cuda.backward_config is None) == bool(why_not)
        assert ("XLA" if reason else why_not or "a warp for each row") in plan.cuda.backward
        assert isinstance(plan.cuda.config, type(None) if reason else GatedLinearConfig)
        assert reason in plan.cuda.reason
    assert found == [False, not why_not]
    # A second derivative, by XLA.
    jax.export.export(jax.jit(jax.grad(slope)), platforms=["cuda"])(u, w, x)


def test_the_gradient_s_kernel_has_a_derivative_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA stands in for the kernel, in dtypes of its results; problems of a vmap run in turn."""
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((2, 5, 6), (2, 5, 6), (6,), (6,), (2, 5, 18), (2, 5, 6))
    *operands, d_a = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    gate = reference.Gate(reference.Norm(eps=0.1), concat=True)
    by_xla = functools.partial(reference.gated_rows_vjp, gate, None)
    monkeypatch.setattr(gated_rows, "gated_rows_kernel", lambda *xs, **_: by_xla(xs))
    call = gated_linear._Call(dispatch.Request("gated_linear", None, None), gate)
    axes = (0, 0, None, None, 0)

    def slopes(pull_back: Any) -> Any:
        def loss(operands: Any) -> jax.Array:
            found = jax.vmap(pull_back, (axes,))(operands)
            return jnp.sum(found.d_a * d_a) + jnp.sum(found.d_scale) + jnp.sum(found.rows**2)

        return jax.jit(jax.value_and_grad(loss))(tuple(operands))

    by_kernel = functools.partial(gated_linear._GRADIENT.differentiable, call)
    close(slopes(by_kernel), slopes(by_xla), 1e-5)


@pytest.mark.parametrize("rows", [8192, 8200, 8209])
def test_sums_of_many_rows_have_equal_parts(rows: int) -> None:
    """8,209 rows have no parts."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, columns)).astype(np.float32) for columns in (3, 130))
    program = jax.jit(reference._sum_of_rows).trace(a, b)
    parts = {8192: 128, 8200: 100, 8209: 1}[rows]
    assert f"f32[{parts},{rows // parts},3]" in str(program.jaxpr)
    np.testing.assert_array_equal(program.lower().compile()(a, b), a.T @ b)

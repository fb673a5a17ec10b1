"""Which calls of `norm_linear` and `gated_linear` take their kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.problems.norm_linear import GatedLinearConfig, NormLinearConfig
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
def test_programs_for_hopper_have_the_kernel_where_it_takes_the_call(dtype, changes, reason):
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
        ({}, {"by_head": True}, ""),
        ({"rows": 512}, {}, "XLA is faster for at most 512 rows"),
        ({"width": 72}, {"by_head": True}, "heads of a multiple of 64 columns, but there are 2 of"),
        ({"width": 66}, {}, "multiples of 8 (16 bytes, for TMA), but columns=132"),
        ({}, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "the kernel drops nothing"),
    ],
)
def test_gated_linear_takes_the_kernel_with_and_without_a_gradient(changes, options, reason):
    rows, width = (changes.get(name, size) for name, size in (("rows", 600), ("width", 64)))
    u, w, x = (
        jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 2, width), (6 * width, 16), (rows, 16))
    )

    def loss(u: Any, w: Any, x: Any) -> jax.Array:
        found = ikbo.gated_linear(u, u, w, x, concat=True, **options)
        return found.astype(jnp.float32).sum()

    for fn in (jax.jit(loss), jax.jit(jax.value_and_grad(loss))):
        exported = jax.export.export(fn, platforms=["cuda"])(u, w, x)
        assert ("mosaic_gpu" in exported.mlir_module()) == (not reason)
        (plan,) = ikbo.explain(fn, u, w, x).plans
        assert (plan.cuda.implementation == "xla", plan.cuda.backward[:3]) == (bool(reason), "XLA")
        assert isinstance(plan.cuda.config, type(None) if reason else GatedLinearConfig)
        assert reason in plan.cuda.reason


@pytest.mark.parametrize("rows", [8192, 8200, 8209])
def test_sums_of_many_rows_have_equal_parts(rows: int) -> None:
    """8,209 rows have no parts."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, columns)).astype(np.float32) for columns in (3, 130))
    program = jax.jit(reference._sum_of_rows).trace(a, b)
    parts = {8192: 256, 8200: 164, 8209: 1}[rows]
    assert f"f32[{parts},{rows // parts},3]" in str(program.jaxpr)
    np.testing.assert_array_equal(program.lower().compile()(a, b), a.T @ b)

"""Which calls of `norm_linear` and `gated_linear` take their kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.problems.gated_linear import GatedLinearConfig
from ikbo_jax.problems.norm_linear import NormLinearConfig

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("bfloat16", {}, ""),
        ("float32", {}, "float32"),
        ("bfloat16", {"features": 648}, "at most F=640 in shared memory, but F=648"),
        ("bfloat16", {"rows": 1}, "at least 2 rows, for TMA, but there is 1"),
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


@pytest.mark.parametrize(
    ("recompute", "activation", "kept"),
    [
        ((), "silu", "'norm' and 'projection'"),
        ("norm", "silu", "'projection'"),
        ("norm", "identity", ""),
        (("norm", "projection"), "silu", ""),
    ],
)
def test_the_kernel_runs_below_a_gradient_that_keeps_nothing_else(
    recompute: Any, activation: str, kept: str
) -> None:
    x = jnp.ones((16, 8), jnp.bfloat16)
    w = jnp.ones((8, 16), jnp.bfloat16)
    options = {"activations": [activation], "recompute": recompute}

    def loss(x: Any, w: Any) -> jax.Array:
        return ikbo.norm_linear(x, [w], **options)[0].astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss))
    exported = jax.export.export(step, platforms=["cuda"])(x, w)
    assert ("mosaic_gpu" in exported.mlir_module()) == (not kept)
    (plan,) = ikbo.explain(step, x, w).plans
    assert plan.cuda.implementation == ("xla" if kept else "mosaic_gpu")
    assert (f"the gradient keeps {kept}, which" in plan.cuda.reason) == bool(kept)
    mesh = mesh_of("2", "auto")
    (plan,) = ikbo.explain(step, *on(mesh, [x, w], [P("x"), P()])).plans
    assert plan.division.startswith("rows over")
    assert plan.cuda.implementation == ("xla" if kept else "mosaic_gpu")
    assert plan.cuda.implementation == "xla"


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"by_head": True}, ""),
        ({"width": 72}, {"by_head": True}, "heads of a multiple of 64 columns, but there are 2 of"),
        ({"width": 66}, {}, "multiples of 8 (16 bytes, for TMA), but columns=132"),
        ({}, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "the kernel drops nothing"),
    ],
)
def test_gated_linear_takes_the_kernel_with_and_without_a_gradient(
    changes: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    width = changes.get("width", 64)
    u = jnp.ones((16, 2, width), jnp.bfloat16)
    w, x = jnp.ones((6 * width, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16)

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

"""The kernels are lowered for CUDA on every kind of mesh, values and gradients."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch

B, U, T, S, N, H = 256, 4, 64, 256, 4, 64
BF16, INT = jnp.bfloat16, jnp.int32


def attend(query, key, value, index):
    return ikbo.attention(query, key, value, index, implementation="mosaic_gpu")


def compress(w_cand, w_user, e_cand, e_user, index):
    return ikbo.linear_compression(
        w_cand, w_user, e_cand, e_user, index, implementation="mosaic_gpu"
    )


def act(query, key, value, offsets):
    return ikbo.gdpa(query, key, value, offsets, offsets, implementation="mosaic_gpu")


#: Op, shapes, layouts, layout of the result, and how many kernels value and gradient launch; the
#: gradient inside `shard_map`, if other.
CANDIDATES, HEADS = P("x"), P(None, "x")
CASES = {
    "attention": (
        attend,
        ((B, T, N, H), (U, S, N, H), (U, S, N, H), (B,)),
        (CANDIDATES, P(), P(), CANDIDATES),
        CANDIDATES,
        (1, 2),
    ),
    "linear_compression": (
        compress,
        ((128, 64), (128, 128), (B, 64, 64), (U, 128, 64), (B,)),
        (P(), P(), CANDIDATES, P(), CANDIDATES),
        CANDIDATES,
        # Where the op sums it over devices, XLA computes the users' gradient in f32.
        (1, 4, 5),
    ),
    "gdpa": (act, ((512, N, H),) * 3 + ((5,),), (HEADS,) * 3 + (P(),), HEADS, (1, 2)),
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> collections.Counter:
    """Counts the modules that Mosaic GPU makes; the device seems to be a Hopper."""
    counts: collections.Counter = collections.Counter()
    real = lowering.lower_jaxpr_to_module

    def counted(*args, **kwargs):
        result = real(*args, **kwargs)
        counts[str(result.module.operation.attributes["sym_name"])] += 1
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_module", counted)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
    jax.clear_caches()
    yield counts
    jax.clear_caches()


def lowered(kind: str, name: str, with_gradient: bool):
    op, shapes, specs, out, kernels = CASES[name]
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis,))
    if name == "gdpa":
        mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,), devices=jax.devices()[:2])
    if kind == "shard_map":
        op = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=out)
    args = [
        jax.ShapeDtypeStruct(
            shape, INT if len(shape) == 1 else BF16, sharding=NamedSharding(mesh, spec)
        )
        for shape, spec in zip(shapes, specs, strict=True)
    ]

    def loss(floats, ints):
        return op(*floats, *ints).astype(jnp.float32).sum()

    fn = jax.grad(loss) if with_gradient else lambda floats, ints: op(*floats, *ints)
    floats = [x for x in args if x.dtype == BF16]
    ints = [x for x in args if x.dtype == INT]
    program = jax.jit(fn).trace(floats, ints).lower(lowering_platforms=("cuda",))
    if with_gradient and kind == "shard_map":
        return program, kernels[-1]
    return program, kernels[with_gradient]


@pytest.mark.parametrize("with_gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_in_the_program(kind, name, with_gradient, modules):
    program, kernels = lowered(kind, name, with_gradient)
    assert sum(modules.values()) == kernels, modules
    assert len(set(re.findall(r"mosaic_gpu_v2", program.as_text()))) == bool(kernels)


@pytest.mark.parametrize("with_gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_lowered_when_xla_divides_the_program(name, with_gradient, modules):
    """XLA for CPUs asks for one device's part; it has no kernels, which shows that they came."""
    program, kernels = lowered("auto", name, with_gradient)
    assert not modules
    if not kernels:
        program.compile()
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="mosaic_gpu_v2"):
        program.compile()
    assert sum(modules.values()) == kernels, modules

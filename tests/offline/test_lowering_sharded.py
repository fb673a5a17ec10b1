"""The kernels are lowered for CUDA on every kind of mesh, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig

B, U, T, S, N, H = 256, 4, 64, 256, 4, 64
BF16, INT = jnp.bfloat16, jnp.int32


def attend(query, key, value, index, config=None):
    return ikbo.attention(query, key, value, index, implementation="mosaic_gpu", config=config)


def compress(w_cand, w_user, e_cand, e_user, index):
    return ikbo.linear_compression(
        w_cand, w_user, e_cand, e_user, index, implementation="mosaic_gpu"
    )


def act(query, key, value, offsets, activation="gelu"):
    return ikbo.gdpa(
        *(query, key, value, offsets, offsets),
        activation=activation,
        implementation="mosaic_gpu",
    )


#: Op, shapes, layouts, layout of the result, and how many kernels value and gradient launch; the
#: gradient inside `shard_map`, if other.
CANDIDATES, HEADS = P("x"), P(None, "x")
CASES = {
    "attention": (
        attend,
        ((B, T, N, H), (U, S, N, H), (U, S, N, H), (B,)),
        (CANDIDATES, P(), P(), CANDIDATES),
        CANDIDATES,
        # The gradient: statistics of query rows, then two launches.
        (1, 4),
    ),
    # A list of tiles as well.
    "attention_by_user": (
        functools.partial(attend, config=AttentionConfig(one_user=True)),
        ((B, T, N, H), (U, S, N, H), (U, S, N, H), (B,)),
        (CANDIDATES, P(), P(), CANDIDATES),
        CANDIDATES,
        (2, 5),
    ),
    "linear_compression": (
        compress,
        ((128, 64), (128, 128), (B, 64, 64), (U, 128, 64), (B,)),
        (P(), P(), CANDIDATES, P(), CANDIDATES),
        CANDIDATES,
        # Where the op sums it over devices, XLA computes the users' gradient in f32.
        (1, 4, 5),
    ),
    # A list of tiles, and the kernel.
    "gdpa": (act, ((512, N, H),) * 3 + ((5,),), (HEADS,) * 3 + (P(),), HEADS, (2, 3)),
    "gdpa_softmax": (
        functools.partial(act, activation="softmax"),
        ((512, N, H),) * 3 + ((5,),),
        (HEADS,) * 3 + (P(),),
        HEADS,
        (2, 5),  # the gradient needs lse
    ),
}


def lowered(kind: str, name: str, with_gradient: bool):
    op, shapes, specs, out, kernels = CASES[name]
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis,))
    if name.startswith("gdpa"):
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("with_gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_in_the_program(kind, name, with_gradient, lowered_kernels):
    program, kernels = lowered(kind, name, with_gradient)
    assert sum(lowered_kernels.values()) == kernels, lowered_kernels
    assert "mosaic_gpu_v2" in program.as_text()


# XLA for CPUs ends the process in the gradient of a softmax, whose forward kernel has two results.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("with_gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gdpa_softmax"}))
def test_kernels_are_lowered_when_xla_divides_the_program(name, with_gradient, lowered_kernels):
    """XLA for CPUs asks for one device's part; it has no kernels, which shows that they came."""
    program, kernels = lowered("auto", name, with_gradient)
    assert not lowered_kernels
    with pytest.raises(jax.errors.JaxRuntimeError, match="mosaic_gpu_v2"):
        program.compile()
    assert sum(lowered_kernels.values()) == kernels, lowered_kernels

"""The kernels on two or more Hopper GPUs: values, gradients, layouts, no traffic."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import KINDS, collectives, on

import ikbo_jax as ikbo

pytestmark = pytest.mark.several_gpus

B, U, T, S, N, H = 128, 6, 24, 300, 4, 64
BF16 = jnp.bfloat16
#: Two roundings of bfloat16, relative to the largest value: a part may have another configuration,
#: and so another order of sums.
ROUNDING = 2.0**-7


#: The ops on their arrays; the last one of attention are lengths, of gdpa the index.
compress = functools.partial(ikbo.linear_compression, implementation="mosaic_gpu")


def attend(*arrays):
    options = {"key_value_seq_lengths": arrays[-1], "return_residuals": True}
    out, lse = ikbo.attention(*arrays[:-1], **options, implementation="mosaic_gpu")
    return out + lse[..., None].astype(out.dtype)


def act(*arrays):
    options = {"q_to_kv": arrays[-1], "max_seqlen_q": T}
    return ikbo.gdpa(*arrays[:-1], **options, implementation="mosaic_gpu")


def inputs(name: str):
    """Floating-point arrays, integer arrays, their layouts, and the layout of the result."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), BF16)

    index = jnp.asarray(rng.integers(0, U, B), jnp.int32)
    if name == "attention":
        floats = (normal(B, T, N, H), normal(U, S, 2, H), normal(U, S, 2, H))
        ints = (index, jnp.asarray([5, 1, 17, 256, 299, 300], jnp.int32))
        return floats, ints, (P("x"), P(), P()), (P("x"), P())
    if name == "linear_compression":
        floats = (normal(120, 72), normal(120, 100), normal(B, 72, 64), normal(U, 100, 64))
        return floats, (index,), (P(), P(), P("x"), P()), (P("x"),)
    # Sequences of T rows, so that devices hold whole ones, and a memory of 40 rows a user.
    floats = (normal(B * T, N, H), normal(U * 40, N, H), normal(U * 40, N, H))
    offsets = jnp.arange(B + 1, dtype=jnp.int32) * T
    memory = jnp.arange(U + 1, dtype=jnp.int32) * 40
    return floats, (offsets, memory, index), (P("x"), P(), P()), (P(), P(), P())


OPS = {"attention": attend, "linear_compression": compress, "gdpa": act}


def value_and_gradients(op, floats, ints):
    def loss(floats):
        out = op(*floats, *ints)
        return 0.5 * jnp.sum(out.astype(jnp.float32)), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
    return out, gradients


def assert_close(actual, expected):
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wanted = np.asarray(wanted, np.float32)
        finite = np.isfinite(wanted)
        largest = np.abs(wanted[finite]).max()
        found = np.asarray(found, np.float32)
        np.testing.assert_array_equal(np.isfinite(found), finite)
        np.testing.assert_allclose(found[finite], wanted[finite], atol=ROUNDING * largest, rtol=0)


def devices():
    found = jax.devices()
    assert len(found) > 1, "these tests need two or more GPUs"
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_plain_jit(name, kind):
    mesh = jax.make_mesh((len(devices()),), ("x",), axis_types=(KINDS[kind],))
    op = OPS[name]
    floats, ints, float_specs, int_specs = inputs(name)
    expected = jax.jit(functools.partial(value_and_gradients, op))(floats, ints)
    args = on(mesh, floats, float_specs), on(mesh, ints, int_specs)
    out, gradients = jax.jit(functools.partial(value_and_gradients, op))(*args)
    assert_close((out, gradients), expected)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), out.ndim)
    text = jax.jit(lambda floats, ints: op(*floats, *ints)).lower(*args).compile().as_text()
    assert "mosaic_gpu" in text
    assert not collectives(text)
    assert "over 'x'" in str(ikbo.explain(lambda f, i: op(*f, *i), *args))


@pytest.mark.parametrize("name", ["attention", "linear_compression"])
def test_shard_map_with_its_defaults(name):
    mesh = jax.make_mesh((len(devices()),), ("x",), axis_types=(KINDS["auto"],))
    op = OPS[name]
    floats, ints, float_specs, int_specs = inputs(name)
    expected = jax.jit(functools.partial(value_and_gradients, op))(floats, ints)
    mapped = jax.shard_map(op, mesh=mesh, in_specs=(*float_specs, *int_specs), out_specs=P("x"))
    args = on(mesh, floats, float_specs), on(mesh, ints, int_specs)
    assert_close(jax.jit(functools.partial(value_and_gradients, mapped))(*args), expected)


def test_every_device_gets_the_same_results_again():
    """Results of ten launches are equal to the bit."""
    mesh = jax.make_mesh((len(devices()),), ("x",))
    floats, ints, float_specs, int_specs = inputs("attention")
    args = (*on(mesh, floats, float_specs), *on(mesh, ints, int_specs))
    fn = jax.jit(attend)
    first = fn(*args)
    for _ in range(10):
        chex.assert_trees_all_equal(fn(*args), first)

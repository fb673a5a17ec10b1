"""Programs that were exported without a GPU give on a Hopper GPU what the op gives there."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import pytest
from jax import export

import ikbo_jax as ikbo

pytestmark = pytest.mark.gpu

#: Defines `CASES`: functions and their shapes. Both processes run it.
DEFINITIONS = """
import jax, jax.numpy as jnp
import ikbo_jax as ikbo

BF16, INT = jnp.bfloat16, jnp.int32
B, U, T, S, N, H = 256, 8, 64, 512, 2, 128

def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)

def attend(query, key, value, index, lengths):
    out, lse = ikbo.attention(
        query, key, value, index, key_value_seq_lengths=lengths, return_residuals=True
    )
    return out + lse[..., None].astype(out.dtype)

def act(query, key, value, offsets):
    return ikbo.gdpa(query, key, value, offsets, offsets, implementation="mosaic_gpu")

CASES = {
    "attention": (
        attend,
        (of(B, T, N, H), of(U, S, N, H), of(U, S, N, H), of(B, dtype=INT), of(U, dtype=INT)),
    ),
    "linear_compression": (
        ikbo.linear_compression,
        (of(128, 200), of(128, 304), of(B, 200, 256), of(U, 304, 256), of(B, dtype=INT)),
    ),
    "gdpa": (act, ((of(1024, N, H),) * 3) + (of(9, dtype=INT),)),
}
"""
EXPORT = """
import sys
from jax import export

assert jax.default_backend() == "cpu"
for name, (fn, shapes) in CASES.items():
    platforms = ["cuda"] if name == "gdpa" else ["cpu", "cuda"]
    with ikbo.export_target(sys.argv[2], num_sms=int(sys.argv[3])):
        exported = export.export(jax.jit(fn), platforms=platforms)(*shapes)
        artefact = exported.serialize(vjp_order=1)
    with open(f"{sys.argv[1]}/{name}", "wb") as file:
        file.write(artefact)
"""
namespace: dict = {}
exec(DEFINITIONS, namespace)
CASES = namespace["CASES"]


@pytest.fixture(scope="module", params=["this card", "a card with other SMs"])
def artefacts(request, tmp_path_factory) -> tuple[pathlib.Path, bool]:
    """A folder of artefacts from a process without a GPU; whether they are for this card."""
    folder = tmp_path_factory.mktemp("artefacts")
    device, is_this = jax.devices()[0], request.param == "this card"
    # More CTAs than fit at once, too: no kernel waits for a CTA that may not be running.
    num_sms = device.core_count if is_this else device.core_count + 13
    arguments = folder, device.device_kind, num_sms
    on_gpu.run_python(DEFINITIONS + EXPORT, *arguments, JAX_PLATFORMS="cpu")
    return folder, is_this


def inputs(name: str) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    b, u, s = (namespace[letter] for letter in "BUS")
    integers = {
        (b,): rng.integers(0, u, b),
        (u,): rng.integers(1, s, u),
        (9,): np.linspace(0, 1024, 9),
    }
    return [
        jnp.asarray(integers[x.shape], x.dtype)
        if x.dtype == jnp.int32
        else jnp.asarray(rng.normal(size=x.shape), x.dtype)
        for x in CASES[name][1]
    ]


#: Two roundings of bfloat16, relative to the largest value.
assert_near = functools.partial(problems.assert_near, part=2.0**-7)


@pytest.mark.parametrize("name", CASES)
def test_artefact_gives_what_the_op_gives(name: str, artefacts) -> None:
    folder, is_this_card = artefacts
    fn, arrays = CASES[name][0], inputs(name)
    (plan,) = ikbo.explain(fn, *arrays).plans
    assert plan.implementation == "mosaic_gpu", plan.reason
    loaded = export.deserialize(bytearray((folder / name).read_bytes()))
    assert "mosaic_gpu_v2" in loaded.mlir_module()
    found, expected = jax.jit(loaded.call)(*arrays), jax.jit(fn)(*arrays)
    assert_near(found, expected)
    # With another number of CTAs, a sum may be divided otherwise.
    if is_this_card:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


LOAD = """
import sys
import jax, jax.numpy as jnp
from jax import export
import jax.experimental.mosaic.gpu
with open(sys.argv[1], "rb") as file:
    loaded = export.deserialize(bytearray(file.read()))
arrays = [jnp.zeros(x.shape, x.dtype) for x in loaded.in_avals]
jax.block_until_ready(jax.jit(loaded.call)(*arrays))
assert not [name for name in sys.modules if name.startswith("ikbo_jax")]
"""


@pytest.mark.parametrize("name", CASES)
def test_artefact_runs_where_no_kernel_was_traced(name: str, artefacts) -> None:
    folder, _ = artefacts
    on_gpu.run_python(LOAD, folder / name, XLA_PYTHON_CLIENT_PREALLOCATE="false")


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_an_artefact_is_that_of_the_op(name: str, artefacts) -> None:
    folder, _ = artefacts
    fn, arrays = CASES[name][0], inputs(name)
    loaded = export.deserialize(bytearray((folder / name).read_bytes()))
    floats = [n for n, x in enumerate(arrays) if x.dtype == jnp.bfloat16]

    def gradient(op):
        def loss(*arrays):
            return jnp.sum(op(*arrays).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, floats))(*arrays)

    assert_near(gradient(loaded.call), gradient(fn))


def test_a_program_planned_for_another_target_runs_in_this_process() -> None:
    """`export_target` on the machine with the GPU: exported, and called in the same process."""
    fn, shapes = CASES["attention"]
    arrays = inputs("attention")
    with ikbo.export_target("H100"):
        exported = export.export(jax.jit(fn), platforms=["cpu", "cuda"])(*shapes)
    assert_near(exported.call(*arrays), jax.jit(fn)(*arrays))

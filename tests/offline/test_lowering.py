"""Kernels lowered for CUDA: how often, for every kind of mesh, and those of exported programs."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import offline
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of
from small_kernels import prefer_kernels

import ikbo_jax as ikbo
from ikbo_jax.models import ranking
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.rewrite import rewrite

#: Small, and legal for every kernel of the network.
SIZES = ranking.Sizes(
    candidates=8, users=2, layers=3, width=128, user_dense=16, dense_tokens=4, user_tokens=60,
    pooled=64, cand_tokens=40, history=128, queries=64, compressed=32, hidden=16,
)  # fmt: skip


def lower(fn, layers: int) -> str:
    sizes = dataclasses.replace(SIZES, layers=layers)
    args = jax.eval_shape(lambda: (ranking.init(sizes), ranking.make_request(sizes)))
    # JAX's own attention promotes in its gradient.
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def loss(params, request):
    return ranking.co_designed(params, request).sum()


@pytest.mark.slow
@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    "fn",
    [ranking.co_designed, rewrite(ranking.materialised), jax.grad(loss)],
    ids=["co-designed", "rewritten", "training step"],
)
def test_layers_share_the_kernels_that_are_equal(fn, lowered_kernels, monkeypatch):
    """Three layers need as many modules as two layers do, and so as many compiled kernels.

    The first layer's compression also makes the queries. A layer may call a kernel with several
    shapes: attention pools histories, too. The cost model leaves linear compressions as small as
    these to XLA. XLA has no loop: kernels are launched one after another, without the host in
    between.
    """
    prefer_kernels(monkeypatch)
    assert "stablehlo.while" not in lower(fn, 2)
    of_two = dict(lowered_kernels)
    assert {'"ikbo_linear_compression"', '"ikbo_attention"'} <= of_two.keys()
    lowered_kernels.clear()
    jax.clear_caches()
    lower(fn, 3)
    assert dict(lowered_kernels) == of_two


def test_lowering_starts_ptxas_once_for_its_version():
    extension = mosaic.fragmented_array.mgpu_lib._mosaic_gpu_ext
    before = extension._get_ptxas_isa_version.cache_info()
    extension._get_ptxas_isa_version()
    extension._get_ptxas_isa_version()
    after = extension._get_ptxas_isa_version.cache_info()
    assert after.misses <= 1
    assert after.hits + after.misses == before.hits + before.misses + 2


B, U, T, S, N, H = 256, 4, 64, 256, 4, 64
BF16, INT = jnp.bfloat16, jnp.int32


attend = functools.partial(ikbo.attention, implementation="mosaic_gpu")
compress = functools.partial(ikbo.linear_compression, implementation="mosaic_gpu")


def act(query, key, value, offsets, activation="gelu"):
    return ikbo.gdpa(
        *(query, key, value, offsets, offsets), activation=activation, implementation="mosaic_gpu"
    )


#: Op, shapes, layouts, layout of the result, and how many kernels value and gradient launch; the
#: gradient inside `shard_map`, if other.
CANDIDATES, HEADS = P("x"), P(None, "x")
SHAPES = (B, T, N, H), (U, S, N, H), (U, S, N, H), (B,)
ATTENTION = SHAPES, (CANDIDATES, P(), P(), CANDIDATES), CANDIDATES
GDPA = ((512, N, H),) * 3 + ((5,),), (HEADS,) * 3 + (P(),), HEADS
CASES = {
    # The order of candidates, and the result. The gradient: statistics of query rows, then two.
    "attention": (attend, *ATTENTION, (2, 5)),
    # A list of tiles as well.
    "attention_by_user": (
        functools.partial(attend, config=AttentionConfig(one_user=True)),
        *ATTENTION,
        (3, 6),
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
    "gdpa": (act, *GDPA, (2, 3)),
    # The gradient needs lse, and delta.
    "gdpa_softmax": (functools.partial(act, activation="softmax"), *GDPA, (2, 6)),
}


def lowered(kind: str, name: str, with_gradient: bool):
    op, shapes, specs, out, kernels = CASES[name]
    devices = "2" if name.startswith("gdpa") else "8"
    mesh = mesh_of(devices, "explicit" if kind == "explicit" else "auto")
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


def of(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def model(w_cand, w_user, e_cand, e_user, query, history, index):
    out = ikbo.linear_compression(w_cand, w_user, e_cand, e_user, index)
    return out, ikbo.attention(query, history, history, index, indices_are_sorted=True)


def test_kernels_of_an_artefact_compile_as_those_of_jit(on_cpu, compiler: offline.Compiler) -> None:
    # The cost model leaves small linear compressions to XLA.
    floats = (of(224, 864), of(224, 1184), of(256, 864, 128), of(4, 1184, 128))
    arrays = (*floats, of(256, 64, 2, 128), of(4, 64, 2, 128), of(256, dtype=INT))
    exported = export.export(jax.jit(model), platforms=["cuda"])(*arrays)
    modules = offline.exported_modules(exported)
    found = {offline.kernel_name(module): compiler.assemble(module) for module in modules}
    assert found == {kernel.name: kernel.ptxas for kernel in compiler.compile(model, *arrays)}
    assert len(found) == 2
    for report in found.values():
        assert (report.spill_bytes, report.stack_bytes, report.serialized) == (0, 0, ())


#: By the major number of the compute capability: since jax 0.12, LLVM refuses what MLIR did.
REFUSALS = {
    8: "'nvvm.wgmma.fence.aligned' op is not supported on sm_80",
    10: "'nvvm.wgmma.fence.aligned' op is not supported on sm_100a",
}
if jax.__version_info__ >= (0, 12):
    REFUSALS = {
        8: "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.elect.sync",
        10: "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.wgmma.commit_group.sync.aligned",
    }


@pytest.mark.parametrize("major", REFUSALS)
def test_another_gpu_refuses_the_kernels(major: int, on_cpu, tmp_path, monkeypatch) -> None:
    driver = offline._STAND_IN_DRIVER.replace("? 9 :", f"? {major} :")
    monkeypatch.setattr(offline, "_STAND_IN_DRIVER", driver)
    shapes = (of(8, 64, 2, 64), of(2, 64, 2, 64), of(2, 64, 2, 64), of(8, dtype=INT))
    attend = functools.partial(ikbo.attention, indices_are_sorted=True)
    exported = export.export(jax.jit(attend), platforms=["cuda"])(*shapes)
    (module,) = offline.exported_modules(exported)
    with (
        contextlib.closing(offline.Compiler(tmp_path)) as other,
        pytest.raises(ValueError, match=rf"(?m){re.escape(REFUSALS[major])}$"),
    ):
        other.assemble(module)

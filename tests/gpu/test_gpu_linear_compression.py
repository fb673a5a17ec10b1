"""The linear-compression kernel on a Hopper GPU: numerics, determinism, isolation, progress."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import ikbo_jax as ikbo
from ikbo_jax.pallas.linear_compression.kernel import linear_compression_kernel
from ikbo_jax.problems import (
    LinearCompressionConfig,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.reference import linear_compression as reference

pytestmark = pytest.mark.gpu

DEFAULT = problems.LinearCompressionShape(15, 1024, 433, 1178, 866, 256, "unsorted")
CONFIGS = {
    "default": LinearCompressionConfig(),
    "separate": LinearCompressionConfig(single_launch=False),
    "separate_alone": LinearCompressionConfig(single_launch=False, cluster=1),
    "trimmed": LinearCompressionConfig(trim=True),
    "alone": LinearCompressionConfig(cluster=1),
    "deep": LinearCompressionConfig(block_m=128, num_stages=5, epilogue_rows=64),
    "shallow": LinearCompressionConfig(num_stages=2),
    "narrow": LinearCompressionConfig(block_m=48, num_stages=3, epilogue_rows=24),
    "two_chunks": LinearCompressionConfig(block_m=64, epilogue_rows=32, cluster=1),
}
KERNEL_SHAPES = {
    name: shape
    for name, shape in problems.LINEAR_COMPRESSION_SHAPES.items()
    if shape.n % 8 == 0 and min(shape.k_user, shape.k_cand) > 0
}
run_kernel = functools.partial(ikbo.linear_compression, implementation="mosaic_gpu")
# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
materialised = jax.jit(reference.materialised, static_argnames="precision")


def check(actual: jax.Array, levels: tuple[tuple, tuple, tuple]) -> None:
    """Holds `actual` to the error rule against the f32 oracle."""
    weights, embeddings, parents = levels
    to_f32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    oracle = materialised(to_f32(weights), to_f32(embeddings), parents)
    same_dtype = materialised(weights, embeddings, parents, precision=None)
    chex.assert_equal_shape([actual, oracle])
    problems.assert_within_error_rule(actual, oracle, same_dtype)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", KERNEL_SHAPES)
def test_every_shape_and_dtype(name, dtype):
    inputs = problems.make_inputs(KERNEL_SHAPES[name], dtype)
    check(run_kernel(*inputs), inputs.levels)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_config(name):
    shape = problems.LinearCompressionShape(3, 37, 433, 154, 866, 200, "unsorted")
    inputs = problems.make_inputs(shape, "bfloat16")
    check(run_kernel(*inputs, config=CONFIGS[name]), inputs.levels)


PACKED = {
    "wide": PackedCompressionConfig(512, 16, 3, 16),
    "wide_cluster": PackedCompressionConfig(256, 48, 4, 24, cluster=2),
    "separate": PackedCompressionConfig(256, 32, 4, 32, single_launch=False),
    "most_rows": PackedCompressionConfig(128, 224, 4, 56),
    "shared": PackedCompressionConfig(64, 32, 8, 8),
    "shared_cluster": PackedCompressionConfig(64, 96, 8, 24, cluster=2),
    "shared_most_rows": PackedCompressionConfig(64, 448, 3, 56, single_launch=False),
}


@pytest.mark.parametrize("n", [32, 96])
@pytest.mark.parametrize("single_launch", [True, False])
@pytest.mark.parametrize(("block_n", "block_m"), [(256, 48), (64, 96)])
def test_levels_of_tiles_that_span_candidates(block_n, block_m, single_launch, n):
    levels = problems.make_levels((3, 17, 400), (70, 130, 90), 40, n, "bfloat16")
    terms = [ikbo.Term(*term) for term in zip(*levels, strict=True)]
    config = PackedCompressionConfig(block_n, block_m, 4, 24, single_launch=single_launch)
    actual = ikbo.multilevel_linear_compression(terms, implementation="mosaic_gpu", config=config)
    check(actual, levels)


RESIDENT = {
    "fragments": ResidentCompressionConfig(2, 32, 2, 2),
    "groups_splits": ResidentCompressionConfig(1, 16, 1, 3, coarse_k=64, groups=2),
    "gathered": ResidentCompressionConfig(1, 48, 1, 2, gathers=True),
    "gathered_three_accumulators": ResidentCompressionConfig(3, 16, 1, 1, gathers=True),
}


#: Users, candidates, M and both K. Candidates that fill no whole number of tiles; users without
#: candidates, and one user, whose product a CTA with resident weights computes once.
PACKED_SIZES = ((7, 531, 41, 154, 136), (1, 2, 16, 154, 136), (90, 4000, 33, 154, 136))
#: Odd K, too, which TMA cannot load.
RESIDENT_SIZES = ((7, 531, 41, 154, 137), (1, 2, 16, 153, 137), (1, 700, 33, 136, 137))


@pytest.mark.parametrize("n", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("name", [*PACKED, *RESIDENT])
def test_tiles_that_span_candidates_and_resident_weights(name, n):
    dtype = "float16" if n == 48 else "bfloat16"
    for sizes in PACKED_SIZES if name in PACKED else RESIDENT_SIZES:
        shape = problems.LinearCompressionShape(*sizes, n, "unsorted")
        inputs = problems.make_inputs(shape, dtype)
        check(run_kernel(*inputs, config=(PACKED | RESIDENT)[name]), inputs.levels)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
def test_default_request(dtype):
    inputs = problems.make_inputs(DEFAULT, dtype)
    assert "mosaic_gpu" in str(ikbo.explain(ikbo.linear_compression, *inputs))
    check(ikbo.linear_compression(*inputs), inputs.levels)


@pytest.mark.parametrize("single_launch", [True, False])
@pytest.mark.parametrize("users", [1, 3])
def test_the_empty_half_of_a_cluster_stores_nothing(users, single_launch):
    """One candidate, two CTAs: the other one's row must not land on the only one that exists.

    Inputs change from launch to launch, so that no earlier result can pass for this one.
    """
    shape = problems.LinearCompressionShape(users, 1, 433, 1178, 866, 256)
    config = LinearCompressionConfig(single_launch=single_launch, cluster=2)
    run = jax.jit(functools.partial(run_kernel, config=config))
    for seed in range(12):
        inputs = problems.make_inputs(shape, "bfloat16", seed)
        check(run(*inputs), inputs.levels)


@pytest.mark.parametrize("single_launch", [True, False])
@pytest.mark.parametrize("batches", [(40,), (3, 7, 40), (2, 3, 5, 40)])
def test_levels(batches, single_launch):
    ks = (70, 130, 90, 66)[: len(batches)]
    levels = problems.make_levels(batches, ks, 240, 136, "bfloat16")
    terms = [ikbo.Term(*term) for term in zip(*levels, strict=True)]
    config = LinearCompressionConfig(single_launch=single_launch)
    actual = ikbo.multilevel_linear_compression(terms, implementation="mosaic_gpu", config=config)
    check(actual, levels)


@pytest.mark.parametrize("part", range(5))
@on_gpu.drawn
@on_gpu.draws_linear_compressions
def test_drawn_shapes(part, users, candidates, m, k_user, k_cand, n, index, dtype):
    shape = problems.LinearCompressionShape(users, candidates, m, k_user, k_cand, n, index)
    inputs = problems.make_inputs(shape, dtype)
    check(run_kernel(*inputs), inputs.levels)


def test_vmap_folds_into_the_kernel():
    shape = problems.LINEAR_COMPRESSION_SHAPES["unsorted"]
    cases = [problems.make_inputs(shape, "bfloat16", seed) for seed in range(3)]
    w_cand, w_user = cases[0][:2]
    stacked = [jnp.stack(part) for part in list(zip(*cases, strict=True))[2:]]
    batched = jax.vmap(functools.partial(run_kernel, w_cand, w_user))(*stacked)
    for out, case in zip(batched, cases, strict=True):
        chex.assert_trees_all_equal(out, run_kernel(w_cand, w_user, *case[2:]))


def test_index_out_of_range_reads_nothing_outside():
    """Clamped, with NaNs in whatever memory a wild read could meet."""
    inputs = problems.make_inputs(
        problems.LinearCompressionShape(4, 33, 100, 70, 90, 128), "bfloat16"
    )
    wild = inputs.cand_to_user.at[::3].set(4).at[1::3].set(-1).at[2::9].set(2**31 - 1)
    poison = jax.block_until_ready(jnp.full((1 << 28,), jnp.nan, jnp.float32))
    del poison
    actual = run_kernel(*inputs[:4], wild)
    expected = run_kernel(*inputs[:4], jnp.clip(wild, 0, 3))
    assert bool(jnp.all(jnp.isfinite(actual)))
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_with_their_user(bad):
    inputs = problems.make_inputs(
        problems.LinearCompressionShape(5, 64, 240, 130, 66, 136, "unsorted"), "bfloat16"
    )
    spoiled = inputs.e_user.at[2, 7, 3].set(bad)
    clean = run_kernel(*inputs)
    actual = run_kernel(*inputs[:3], spoiled, inputs.cand_to_user)
    hit = inputs.cand_to_user == 2
    assert not bool(jnp.any(jnp.isfinite(actual[hit][:, :, 3])))
    chex.assert_trees_all_equal(actual[~hit], clean[~hit])
    other_columns = jnp.delete(actual[hit], 3, axis=2)
    chex.assert_trees_all_equal(other_columns, jnp.delete(clean[hit], 3, axis=2))


SMALL_TILES = problems.LinearCompressionShape(100, 8192, 16, 200, 40, 32, "unsorted")


@pytest.mark.parametrize(
    ("shape", "config"),
    [(DEFAULT, None), (SMALL_TILES, PACKED["wide"]), (SMALL_TILES, PACKED["shared_cluster"])],
)
def test_a_hundred_repeats_are_bitwise_equal(shape, config):
    inputs = problems.make_inputs(shape, "bfloat16")
    run = jax.jit(functools.partial(run_kernel, config=config))
    check(on_gpu.assert_repeats(run, inputs, 100), inputs.levels)


def test_ten_thousand_single_launches():
    shape = problems.LinearCompressionShape(15, 128, 433, 256, 128, 256, "unsorted")
    inputs = problems.make_inputs(shape, "bfloat16")
    run = jax.jit(functools.partial(run_kernel, config=CONFIGS["default"]))
    on_gpu.assert_repeats(run, inputs, 10_000)


def test_single_launch_while_long_kernels_hold_half_of_the_sms():
    cupy = pytest.importorskip("cupy", reason="CuPy launches the kernels that hold the SMs")
    spin = cupy.RawKernel(
        r"""extern "C" __global__ void spin(long long cycles) {
            extern __shared__ char keep_others_off[];
            long long begin = clock64();
            while (clock64() - begin < cycles) {}
        }""",
        "spin",
    )
    spin.max_dynamic_shared_size_bytes = 200 * 1024
    stream = cupy.cuda.Stream(non_blocking=True)
    inputs = problems.make_inputs(
        problems.LinearCompressionShape(60, 256, 433, 512, 128, 256, "unsorted"), "bfloat16"
    )
    run = jax.jit(functools.partial(run_kernel, config=CONFIGS["default"]))
    expected = run(*inputs)
    wrong = jnp.int32(0)
    for _ in range(100):
        with stream:
            spin((66,), (64,), (np.int64(2_000_000),), shared_mem=200 * 1024)
        for _ in range(10):
            wrong = on_gpu.count_if_different(wrong, run(*inputs), expected)
        jax.block_until_ready(wrong)
    stream.synchronize()
    assert int(wrong) == 0


@pytest.fixture
def torch(monkeypatch):
    """PyTorch, in which kernels run on the current stream; XLA has one stream for everything."""
    torch = pytest.importorskip("torch", reason="PyTorch launches kernels on streams of its own")
    # What `plgpu.as_torch_kernel` asks for is the default stream.
    monkeypatch.setattr(torch.cuda, "default_stream", torch.cuda.current_stream)
    broadcast_to = torch.broadcast_to
    # Its zeros for all counters would be one word, seen through a stride of 0.
    contiguous = lambda *args: broadcast_to(*args).contiguous()  # noqa: E731
    monkeypatch.setattr(torch, "broadcast_to", contiguous)
    # The module that it reads has a kernel and constants; a launch's barriers are for XLA.
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda operands: operands)
    return torch


def test_two_single_launches_at_once(torch):
    """Each partly resident, with user tiles of its own to wait for: none may wait for ever."""
    config = CONFIGS["default"]
    # Rows of 128 bytes need no packing: the kernel is all there is.
    shape = problems.LinearCompressionShape(60, 256, 433, 512, 128, 256, "unsorted")
    inputs = problems.make_inputs(shape, "bfloat16")
    num_sms = jax.devices()[0].core_count

    def kernel(w_cand, w_user, e_cand, e_user, cand_to_user):
        return linear_compression_kernel(
            (w_user, w_cand), (e_user, e_cand), (None, cand_to_user), config=config, num_sms=num_sms
        )

    run = plgpu.as_torch_kernel(kernel)
    *arguments, expected = map(
        torch.from_dlpack, (*inputs, jax.block_until_ready(run_kernel(*inputs, config=config)))
    )
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(2_000):
        for stream, count in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += (run(*arguments) != expected).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


def test_scratch_memory_is_the_user_result_and_less_than_a_mebibyte():
    inputs = problems.make_inputs(DEFAULT, "bfloat16")
    compiled = jax.jit(run_kernel).lower(*inputs).compile()
    user_result = DEFAULT.users * DEFAULT.m * DEFAULT.n * 4
    assert compiled.memory_analysis().temp_size_in_bytes < user_result + 2**20


SANITIZED = """
import dataclasses, jax, jax.numpy as jnp, problems, ikbo_jax as ikbo
from ikbo_jax.problems import LinearCompressionConfig, PackedCompressionConfig
shape = problems.LinearCompressionShape(3, 9, 120, 70, 134, 136, "unsorted")
inputs = problems.make_inputs(shape, "bfloat16")
wild = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
for cluster in (1, 2):
    config = LinearCompressionConfig(block_m=96, epilogue_rows=48, cluster=cluster)
    out = ikbo.linear_compression(*inputs[:4], wild, implementation="mosaic_gpu", config=config)
    jax.block_until_ready(out)
shape = problems.LinearCompressionShape(3, 70, 120, 48, 134, 144, "unsorted")
inputs = problems.make_inputs(shape, "bfloat16")
wild = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
usual = PackedCompressionConfig(256, 48, 4, 24)
shared = {"block_n": 64, "block_m": 96}
for options in ({}, {"cluster": 2}, {"single_launch": False}, shared, shared | {"cluster": 2}):
    config = dataclasses.replace(usual, **options)
    out = ikbo.linear_compression(*inputs[:4], wild, implementation="mosaic_gpu", config=config)
    jax.block_until_ready(out)
print("FINISHED")
"""
test_sanitizer = on_gpu.sanitizer_test(SANITIZED)

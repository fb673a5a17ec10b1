"""The kernels of lookups and segment sums, compiled for sm_90a without a GPU."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.problems.look_up import LookUpProblem, SegmentSumConfig, SegmentSumProblem

pytestmark = pytest.mark.slow

PROBLEMS = {
    "listed": SegmentSumProblem(1024, 15, 384, "bfloat16"),
    "listed_by_two_warpgroups_f16": SegmentSumProblem(6587, 180, 568, "float16"),
    "listed_by_user": SegmentSumProblem(8192, 256, 384, "bfloat16"),
    "listed_in_parts": SegmentSumProblem(33265, 1128, 48, "bfloat16"),
    "shared": SegmentSumProblem(65536, 4096, 1024, "bfloat16", True),
    "shared_f32": SegmentSumProblem(65536, 4096, 1000, "float32"),
    "two_numbers_f16": SegmentSumProblem(65536, 1000, 2, "float16", True),
    "odd": SegmentSumProblem(65536, 1000, 3, "bfloat16", True),
}


@pytest.mark.parametrize("result", [None, "float32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_offline_sums_are_fit(name: str, result: str | None, compiler: offline.Compiler) -> None:
    problem = PROBLEMS[name]
    config = problem.default_config()
    assert (config.users > 0) == name.startswith("listed")
    options = {"config": config, "is_sorted": problem.is_sorted, "dtype": result}
    kernel = functools.partial(segment_sum_kernel, users=problem.users, **options)
    values = jax.ShapeDtypeStruct((problem.batch, problem.width), jnp.dtype(problem.dtype))
    index = jax.ShapeDtypeStruct((problem.batch,), jnp.int32)
    kernels = compiler.compile_fit(kernel, values, index)
    names = Counter(kernel.name for kernel in kernels)
    has_order = not problem.is_sorted and not config.users
    assert names == Counter(["ikbo_segment_sum", *["ikbo_user_order"] * has_order])
    # Several CTAs share an SM.
    (sums,) = [x for x in kernels if x.name == "ikbo_segment_sum"]
    assert sums.ptxas.registers <= (128 if config.users else 96)


def test_offline_kernel_of_most_candidates_in_flight(compiler: offline.Compiler) -> None:
    kernel = functools.partial(
        segment_sum_kernel, users=300, config=SegmentSumConfig(16, 16, 8, 4), is_sorted=True
    )
    shapes = jax.ShapeDtypeStruct((9000, 384), jnp.bfloat16), jax.ShapeDtypeStruct((9000,), "int32")
    assert len(compiler.compile_fit(kernel, *shapes)) == 1


@pytest.mark.parametrize(("width", "dtype"), [(384, "bfloat16"), (6, "float16"), (1, "float32")])
def test_offline_lookups_are_fit(width: int, dtype: str, compiler: offline.Compiler) -> None:
    config = LookUpProblem(65536, 256, width, dtype).default_config()
    kernel = functools.partial(look_up_kernel, config=config)
    user = jax.ShapeDtypeStruct((256, width), jnp.dtype(dtype))
    (compiled,) = compiler.compile_fit(kernel, user, jax.ShapeDtypeStruct((65536,), jnp.int32))
    assert compiled.name == "ikbo_look_up"

"""The kernels of lookups, segment sums and counts of candidates, compiled for sm_90a."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.problems.look_up import (
    STREAMED_BYTES,
    LookUpProblem,
    SegmentSumConfig,
    SegmentSumProblem,
)

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
    has_shares = problem.bytes_read >= STREAMED_BYTES
    others = ["ikbo_user_order"] * has_order + ["ikbo_segment_sum_shares"] * has_shares
    assert names == Counter(["ikbo_segment_sum", *others])
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


MOST = counted_order.MOST_CANDIDATES, counted_order.MOST_USERS
#: Candidates, users, and [T, N, H] of queries that are copied.
CASES = {
    "three": (3, 2, (1, 1, 64)),
    "one_user": (4097, 1, (3, 1, 64)),
    "production": (10985, 700, (1, 2, 64)),
    "large_queries": (16384, 4096, (9, 4, 256)),
    "most": (*MOST, (1, 1, 96)),
    "most_without_queries": (*MOST, None),
}


@pytest.mark.parametrize("name", CASES)
def test_offline_counting_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    batch, users, shape = CASES[name]
    query = None if shape is None else jax.ShapeDtypeStruct((batch, *shape), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def count(query: Any, index: Any) -> Any:
        return counted_order.count_order(query, index, users, has_position=query is None)

    (kernel,) = compiler.compile_fit(count, query, index)
    # A CTA has 512 threads.
    assert kernel.ptxas.registers <= 128

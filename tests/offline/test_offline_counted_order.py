"""The kernel that counts candidates compiled for sm_90a without a GPU: no spills, and it fits."""

from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.worklist import counted_order

pytestmark = pytest.mark.slow

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

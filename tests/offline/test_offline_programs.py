"""Which kernels of XLA programs for an H100 have beside the library's own, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import hopper_programs
import jax
import jax.numpy as jnp
import pytest

import ikbo_jax
from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel
from ikbo_jax.problems import AttentionBackwardProblem
from ikbo_jax.tuning import table

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Case:
    """A gradient of attention, and what its program has beside launches.

    `copies`: of a zero, the counter of items, if some CTA has more than one.
    """

    sizes: tuple[int, int, int, int, int, int, int]  # B, U, T, S, N, K, H
    launches: tuple[str, ...] = ("_statistics", "", "_stored")
    copies: int = 0
    kernels: int = 0
    is_sorted: bool = True
    has_lengths: bool = False


CASES = {
    "two_users": Case((235, 2, 4, 628, 8, 8, 64)),
    # XLA adds the parts of d_query, and in the next case gradients of keys and values.
    "one_candidate_a_user": Case(
        (512, 512, 1, 256, 2, 2, 64), ("_statistics", ""), 1, 1, has_lengths=True
    ),
    "split_rows": Case((64, 1, 16, 512, 2, 2, 64), kernels=2),
    # Beside such parts, XLA copies queries and cotangents into the order of key heads, and d_query
    # back.
    "grouped_heads": Case((300, 3, 4, 512, 4, 2, 128), kernels=5),
    # XLA copies queries and cotangents, and d_query back, and sorts many candidates in two kernels.
    "unsorted": Case((300, 3, 4, 256, 2, 2, 128), kernels=2, is_sorted=False),
    "many_unsorted": Case(
        (6033, 182, 9, 66, 1, 1, 64), ("_rows", "_statistics", "", "_stored"), 1, 4, is_sorted=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_small_gradients_have_few_kernels_of_xla(name: str) -> None:
    case = CASES[name]
    batch, users, q_len, kv_len, q_heads, kv_heads, width = case.sizes
    problem = AttentionBackwardProblem(*case.sizes, "bfloat16")
    run = functools.partial(
        attention_backward_kernel,
        scale=width**-0.5,
        indices_are_sorted=case.is_sorted,
        config=table.lookup(problem, with_user_rows=False).config,
        num_sms=132,
    )
    query, key, lse, index, lengths = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((batch, q_len, q_heads, width), jnp.bfloat16),
            ((users, kv_len, kv_heads, width), jnp.bfloat16),
            ((batch, q_len, q_heads), jnp.float32),
            ((batch,), jnp.int32),
            ((users,), jnp.int32),
        )
    )
    arguments: tuple[Any, ...] = (query, key, key, index, lengths if case.has_lengths else None)
    found = hopper_programs.operations(run, *arguments, query, lse, query, None)
    launches = [x for x in found if x.startswith("ikbo_")]
    assert launches == [f"ikbo_attention_backward{suffix}" for suffix in case.launches]
    copies = [x for x in found if x.startswith("copy")]
    assert len(copies) == case.copies, found
    assert len(found) - len(launches) - len(copies) == case.kernels, found


@pytest.fixture
def full_locations() -> Iterator[None]:
    """Without them, the names of launches inside of ops are lost."""
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", False)


@pytest.mark.usefixtures("full_locations")
@pytest.mark.parametrize(
    ("kind", "activation", "bound", "kernels"),
    [
        ("self-attention", "gelu_tanh", 512, 0),
        ("self-attention", "gelu_tanh", None, 0),
        # Statistics: delta, and their order.
        ("self-attention", "softmax", 512, 2),
        ("pffn", "gelu_tanh", 512, 0),
        # The sum over sequences of queries' gradients.
        ("pma", "gelu_tanh", 512, 1),
    ],
)
def test_gdpa_s_gradient_has_few_kernels_of_xla(
    kind: str, activation: str, bound: int | None, kernels: int
) -> None:
    batch, rows, seeds = 1152, 1152 * 256, 32
    batch_kv = batch // 16 if kind == "pffn" else batch
    is_broadcast = kind == "pma"

    def array(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, 4, 64), jnp.bfloat16)

    def offsets(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), jnp.int32)

    def run(tensors: Any, offsets: Any, index: Any, d_out: Any) -> Any:
        def attend(*tensors: Any) -> Any:
            return ikbo_jax.gdpa(
                *tensors,
                *offsets,
                q_to_kv=index,
                activation=activation,
                broadcast_q=is_broadcast,
                max_seqlen_q=None if is_broadcast else bound,
                max_seqlen_kv=bound,
                implementation="mosaic_gpu",
            )

        out, pull_back = jax.vjp(attend, *tensors)
        return out, pull_back(d_out)

    key = array(batch_kv * 256)
    found = hopper_programs.operations(
        run,
        (array(seeds if is_broadcast else rows), key, key),
        (None if is_broadcast else offsets(batch + 1), offsets(batch_kv + 1)),
        offsets(batch) if kind == "pffn" else None,
        array(batch * seeds if is_broadcast else rows),
    )
    launches = [x for x in found if x.startswith("ikbo_")]
    assert "ikbo_gdpa_backward_lists" in launches, found
    assert len(launches) == 5, found
    assert len(found) - len(launches) == kernels, found

"""Which kernels of XLA programs for an H100 have beside the library's own, without a GPU."""

import dataclasses
import functools
import math
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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_kernels")]


ORDER = "ikbo_user_order"
STORED = ("_statistics", "", "_stored")
#: One launch adds the parts of all gradients.
PARTS = ("_statistics", "", "_parts")


@dataclasses.dataclass(frozen=True)
class Case:
    """A gradient of attention, and what its program has beside launches.

    `copies`: of a zero, the counter of items, if some CTA has more than one.
    """

    sizes: tuple[int, int, int, int, int, int, int]  # B, U, T, S, N, K, H
    launches: tuple[str, ...] = STORED
    copies: int = 0
    kernels: int = 0
    is_sorted: bool = True
    has_lengths: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the configuration


CASES = {
    "two_users": Case((235, 2, 4, 628, 8, 8, 64)),
    "one_candidate_a_user": Case((512, 512, 1, 256, 2, 2, 64), PARTS, 1, has_lengths=True),
    "split_rows": Case((64, 1, 16, 512, 2, 2, 64), PARTS),
    # Queries and cotangents are copied into the order of key heads, and d_query back, by launches.
    "grouped_heads": Case((300, 3, 4, 512, 4, 2, 128), PARTS),
    # So they are if candidates are in any order. A launch of its own puts many into order.
    "unsorted": Case((300, 3, 4, 256, 2, 2, 128), PARTS, is_sorted=False),
    "many_unsorted": Case((6033, 182, 9, 66, 1, 1, 64), ("_rows", *STORED), 1, is_sorted=False),
    "stored_split_rows": Case(
        (64, 1, 16, 512, 2, 2, 64),
        ("_statistics", "", "_stored", "_parts"),
        changes={"stages": 2, "d_query": "stored"},
    ),
}


def shapes(sizes) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Queries, keys, and users of candidates, of (B, U, T, S, N, K, H)."""
    batch, users, q_len, kv_len, q_heads, kv_heads, width = sizes
    query = jax.ShapeDtypeStruct((batch, q_len, q_heads, width), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((users, kv_len, kv_heads, width), jnp.bfloat16)
    return query, keys, jax.ShapeDtypeStruct((batch,), jnp.int32)


def launches_of(operations: list[str]) -> list[str]:
    return [x for x in operations if x.startswith("ikbo_")]


@pytest.mark.parametrize("name", CASES)
def test_small_gradients_have_few_kernels_of_xla(name: str) -> None:
    case = CASES[name]
    query, key, index = shapes(case.sizes)
    lse = jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32)
    lengths = jax.ShapeDtypeStruct(key.shape[:1], jnp.int32) if case.has_lengths else None
    problem = AttentionBackwardProblem(*case.sizes, "bfloat16")
    config = table.lookup(problem, with_user_rows=False).config
    run = functools.partial(
        attention_backward_kernel,
        scale=query.shape[-1] ** -0.5,
        indices_are_sorted=case.is_sorted,
        config=dataclasses.replace(config, **case.changes),
        num_sms=132,
    )
    found = hopper_programs.operations(
        run, query, key, key, index, lengths, query, lse, query, None
    )
    launches = launches_of(found)
    expected = [f"ikbo_attention_backward{suffix}" for suffix in case.launches]
    # The order may be found before users' rows are numbered, or afterwards.
    is_counted = name == "many_unsorted"
    assert launches.count(ORDER) == is_counted
    # Launches that do not depend on each other have any order.
    assert sorted(x for x in launches if x != ORDER) == sorted(expected)
    copies = [x for x in found if x.startswith("copy")]
    assert len(copies) == case.copies, found
    assert len(found) - len(launches) - len(copies) == case.kernels, found


PACK, FEW, FLASH = "ikbo_attention_pack", "ikbo_few_queries_attention", "ikbo_attention"


#: A result of attention and its gradient, in one program: sizes (B, U, T, S, N, K, H), launches of
#: the result and of the gradient, kernels of XLA, copies among them, whether the index is sorted.
WHOLE = {
    "sorted": ((235, 2, 4, 628, 8, 8, 64), (FEW,), STORED, 0, True),
    "unsorted": ((230, 6, 5, 273, 1, 1, 128), (FEW,), PARTS, 0, False),
    "unsorted_in_parts": ((1252, 7, 7, 111, 1, 1, 64), (FEW,), PARTS, 0, False),
    # Launches put the candidates into order. It copies a counter.
    "many_unsorted": (
        *((6033, 182, 9, 66, 1, 1, 64), (PACK, FEW, ORDER), ("_rows", *STORED)),
        *(1, False),
    ),
    # Tiles of 64 queries of several candidates.
    "unsorted_t96": ((20, 3, 96, 400, 2, 2, 128), (PACK, FLASH), PARTS, 0, False),
}


@pytest.mark.parametrize("name", WHOLE)
def test_results_and_gradients_have_few_kernels_of_xla(name: str) -> None:
    sizes, of_result, suffixes, kernels, is_sorted = WHOLE[name]
    query, key, index = shapes(sizes)

    def run(query: Any, key: Any, value: Any, index: Any, d_out: Any) -> Any:
        def result(*arrays: Any) -> Any:
            return ikbo_jax.attention(*arrays, index, indices_are_sorted=is_sorted)

        out, pull_back = jax.vjp(result, query, key, value)
        return out, pull_back(d_out)

    with ikbo_jax.export_target("H100"):
        found = hopper_programs.operations(run, query, key, key, index, query)
    launches = launches_of(found)
    of_gradient = [f"ikbo_attention_backward{suffix}" for suffix in suffixes]
    # A launch for the gradient that needs the index alone may come first.
    assert sorted(launches) == sorted([*of_result, *of_gradient]), found
    assert len(found) - len(launches) == kernels, found


#: Sizes, whether the index is sorted, and kernels beside the launch, of XLA unless a line says so.
FORWARD = {
    # An index that is not sorted: CTAs list the candidates of their users.
    "unsorted": ((4723, 98, 1, 172, 2, 1, 64), False, 0),
    # One listing serves several heads.
    "unsorted_many_heads": ((1500, 27, 1, 230, 8, 8, 128), False, 0),
    "unsorted_many_keys": ((68, 22, 1, 2799, 4, 4, 64), False, 0),
    # More items than are worth listing, or of one user they might be: another launch puts
    # candidates into order.
    "unsorted_many_users": ((10985, 159, 1, 99, 4, 4, 64), False, 1),
    "unsorted_many_items": ((9000, 3000, 1, 64, 4, 4, 64), False, 1),
    "unsorted_in_place": ((8192, 64, 64, 128, 4, 4, 64), False, 1),
    # XLA clamps and sorts users, and gathers users and queries.
    "unsorted_too_many": ((66000, 3000, 1, 64, 4, 4, 64), False, 4),
    # XLA adds parts of the keys.
    "splits": ((101, 1, 1, 832, 2, 1, 64), True, 2),
    # Tiles with several candidates of one user.
    "one_user": ((3725, 1, 8, 576, 4, 4, 64), True, 0),
    "queries_32": ((3588, 87, 32, 105, 2, 2, 128), True, 0),
}


@pytest.mark.parametrize("name", FORWARD)
def test_small_forward_passes_have_few_kernels_of_xla(name: str) -> None:
    sizes, is_sorted, kernels = FORWARD[name]
    query, keys, index = shapes(sizes)
    run = functools.partial(ikbo_jax.attention, indices_are_sorted=is_sorted)
    found = hopper_programs.operations(run, query, keys, keys, index)
    assert len(found) == 1 + kernels, found


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
        # The order of statistics; a launch computes delta.
        ("self-attention", "softmax", 512, 1),
        ("pffn", "gelu_tanh", 512, 0),
        # The sum over sequences of queries' gradients.
        ("pma", "gelu_tanh", 512, 1),
    ],
)
def test_gdpa_s_gradient_has_few_kernels_of_xla(kind, activation, bound, kernels) -> None:
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
    launches = launches_of(found)
    assert "ikbo_gdpa_backward_lists" in launches, found
    # Forward, the list of its tiles, unless its CTAs find them; three kernels of the gradient.
    assert len(launches) == (4 if is_broadcast else 5) + (activation == "softmax"), found
    assert ("ikbo_short_gdpa" in launches) == is_broadcast
    assert len(found) - len(launches) == kernels, found


#: Calls on arrays `x(number, *shapes)` and numbers `i(size)`.
SLICED = {
    "attention": lambda x, i: ikbo_jax.attention(*x(3, (64, 4, 2, 64), (4, 256, 2, 64)), i(64)),
    "gdpa": lambda x, i: ikbo_jax.gdpa(
        *x(3, (512, 2, 64)), *(i(128),) * 2, max_seqlen_q=64, max_seqlen_kv=64
    ),
    "linear_compression": lambda x, i: ikbo_jax.linear_compression(
        *x(2, (64, 64)), *x(1, (512, 64, 128)), *x(1, (16, 64, 128)), i(512)
    ),
    "norm_linear": lambda x, _: ikbo_jax.norm_linear(
        *x(1, (4096, 256)), x(2, (256, 256)), norm="rms"
    ),
    "gated_linear": lambda x, _: ikbo_jax.gated_linear(
        None, *x(1, (4096, 256)), *x(1, (256, 256)), norm="rms"
    ),
    "look_up": lambda x, i: ikbo_jax.look_up(*x(1, (64, 1024)), i(4096)),
}


@pytest.mark.parametrize("name", SLICED)
def test_no_kernel_reads_or_writes_slices_in_place(name: str) -> None:
    """Mosaic GPU refuses arrays that begin at other addresses than multiples of 256 bytes."""

    def run(rows: jax.Array, numbers: jax.Array) -> Any:
        begin = 1  # of the next slice: no address is a multiple of 256 bytes

        def cut(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            nonlocal begin
            size = math.prod(shape)
            found = flat[begin : begin + size].reshape(shape)
            begin += size + 1
            return found

        def arrays(count: int, *sizes: tuple[int, ...]) -> list[jax.Array]:
            return [cut(rows, sizes[min(i, len(sizes) - 1)]) for i in range(count)]

        results = SLICED[name](arrays, lambda size: cut(numbers, (size,)))
        for result in jax.tree.leaves(results):
            rows = rows.at[begin : begin + result.size].set(result.ravel())
            begin += result.size + 1
        return rows

    shapes = [jax.ShapeDtypeStruct((1 << 24,), x) for x in (jnp.bfloat16, jnp.int32)]
    with ikbo_jax.export_target("H100"):
        found = hopper_programs.operations(run, *shapes)
    assert launches_of(found)
    assert not [x for x in found if x.startswith(("dynamic_slice", "dynamic-slice"))], found

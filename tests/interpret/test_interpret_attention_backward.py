"""The backward kernel of broadcast attention, interpreted under a race detector."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest
from problems import AttentionInputs, AttentionShape

from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel
from ikbo_jax.problems import AttentionProblem
from ikbo_jax.problems.attention_backward import MAX_BOTH_SUMS
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig as Config
from ikbo_jax.reference import attention, attention_grouped

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and how the kernel cuts it."""

    shape: AttentionShape
    config: Config
    dtype: str = "bfloat16"
    has_d_lse: bool = True
    sum_dtype: str | None = None
    logit_cap: float | None = None

    @property
    def of_scores(self) -> dict[str, Any]:
        return {"scale": self.scale, "logit_cap": self.logit_cap}

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def problem(self) -> AttentionProblem:
        users, candidates, *sizes = self.shape[:7]
        return AttentionProblem(candidates, users, *sizes, self.dtype)

    @property
    def launches(self) -> int:
        of_keys = 1 if self.shape.head_dim <= MAX_BOTH_SUMS else 2
        return of_keys + (not self.config.has_d_query)


CASES = {
    # Two query heads a key head; partial blocks of queries; a user without keys.
    "unsorted_grouped_heads": Case(
        AttentionShape(3, 4, 21, 200, 2, 1, 64, "unsorted", "ragged"), Config(32)
    ),
    "parts_h128_f16": Case(
        AttentionShape(3, 4, 21, 200, 2, 1, 128, "gaps", "ragged"),
        Config(48, d_query="parts"),
        "float16",
    ),
    "users_without_candidates_h96_f16": Case(
        AttentionShape(5, 4, 5, 100, 2, 2, 96, "gaps", "ragged"), Config(16, 2, 2), "float16"
    ),
    "one_query": Case(
        AttentionShape(3, 9, 1, 130, 1, 1, 64), Config(16, 3, 2, d_query="parts"), has_d_lse=False
    ),
    "two_launches": Case(
        AttentionShape(3, 5, 21, 100, 2, 1, 64, "gaps", "ragged"),
        Config(32, d_query="launch", block_kv=32, kv_stages=2),
        logit_cap=1.5,
    ),
    "two_launches_h96_f16": Case(
        AttentionShape(2, 3, 64, 129, 1, 1, 96), Config(64, d_query="launch"), "float16"
    ),
    "two_launches_two_slots": Case(
        AttentionShape(3, 5, 33, 200, 2, 1, 64, "gaps", "ragged"),
        Config(64, 3, 2, "launch", block_kv=32, kv_stages=2),
    ),
    "two_launches_two_slots_h128_f16": Case(
        AttentionShape(3, 4, 21, 150, 1, 1, 128, "unsorted", "ragged"),
        Config(64, 2, 2, "launch"),
        "float16",
    ),
    "f32_sums": Case(
        AttentionShape(3, 4, 21, 200, 2, 1, 64, "gaps", "ragged"), Config(32), sum_dtype="float32"
    ),
    "f32_sums_two_launches": Case(
        AttentionShape(2, 3, 64, 129, 1, 1, 96),
        Config(64, d_query="launch"),
        "float16",
        sum_dtype="float32",
    ),
    "split_queries": Case(
        AttentionShape(2, 9, 21, 150, 1, 1, 64, "gaps", "ragged"), Config(32, splits=3)
    ),
    # As small gradients are cut: a block of queries a part.
    "parts_split_grouped_heads_h128": Case(
        AttentionShape(3, 7, 13, 200, 2, 1, 128, "unsorted", "ragged"),
        Config(32, 2, 1, "parts", splits=4),
    ),
    "split_queries_two_launches": Case(
        AttentionShape(1, 150, 1, 129, 2, 2, 64), Config(32, d_query="launch", splits=2)
    ),
    "stored_grouped_heads": Case(
        AttentionShape(3, 5, 21, 100, 2, 1, 64, "gaps", "ragged"),
        Config(32, d_query="stored", kv_stages=2),
        logit_cap=1.5,
    ),
    "stored_h128_f16": Case(
        AttentionShape(2, 4, 40, 200, 1, 1, 128, "unsorted", "ragged"),
        Config(64, 3, d_query="stored"),
        "float16",
    ),
    "stored_h96": Case(AttentionShape(2, 9, 33, 129, 1, 1, 96), Config(64, d_query="stored")),
    "stored_split_queries": Case(
        AttentionShape(1, 150, 1, 129, 2, 2, 64), Config(32, d_query="stored", splits=2)
    ),
    "stored_grouped_heads_h192": Case(
        AttentionShape(3, 5, 21, 129, 2, 1, 192, "gaps", "ragged"),
        Config(32, d_query="stored", kv_stages=2),
    ),
    "stored_h192_f16": Case(
        AttentionShape(2, 5, 33, 300, 1, 1, 192, "unsorted", "ragged"),
        Config(64, d_query="stored", kv_stages=2),
        "float16",
    ),
    "stored_f32_sums_h256": Case(
        AttentionShape(3, 4, 40, 200, 1, 1, 256, "unsorted", "ragged"),
        Config(48, d_query="stored"),
        sum_dtype="float32",
    ),
    "stored_split_h256": Case(
        AttentionShape(1, 70, 1, 129, 1, 1, 256), Config(16, 3, d_query="stored", splits=2)
    ),
    "many_blocks_h128": Case(AttentionShape(1, 3, 64, 300, 1, 1, 128), Config(64)),
    "tile_of_keys_minus_one": Case(AttentionShape(2, 2, 33, 127, 1, 1, 64), Config(32)),
    "tile_of_keys_plus_one": Case(AttentionShape(1, 2, 32, 129, 1, 1, 64), Config(64)),
}
#: For the emulator: where the kernels are interpreted, XLA adds parts.
ADDED_BY_LAUNCH = {
    "added_unsorted_grouped_heads": Case(
        AttentionShape(3, 4, 21, 200, 2, 1, 128, "unsorted", "ragged"), Config(48, d_query="parts")
    ),
    "added_split_h96_f16": Case(
        AttentionShape(2, 9, 13, 300, 1, 1, 96, "gaps", "ragged"),
        Config(32, d_query="parts", splits=3),
        "float16",
    ),
    # More parts than are loaded at once.
    "added_five_parts": Case(
        AttentionShape(3, 4, 5, 600, 2, 1, 64, "unsorted", "ragged"), Config(16, d_query="parts")
    ),
    # A part for each block of queries.
    "added_many_parts_of_rows": Case(
        AttentionShape(2, 21, 3, 150, 4, 2, 64, "gaps", "ragged"),
        Config(16, 2, 1, "parts", splits=7),
    ),
    "added_sum": Case(AttentionShape(3, 4, 5, 140, 1, 1, 64), Config(16)),
    "added_stored_split_f32_sums": Case(
        AttentionShape(1, 150, 1, 129, 2, 2, 64),
        Config(32, d_query="stored", splits=2),
        sum_dtype="float32",
    ),
    "added_split_h256": Case(
        AttentionShape(1, 70, 1, 129, 1, 1, 256),
        Config(32, d_query="stored", kv_stages=2, splits=5),
    ),
}


# One program instead of one for each operation; its conversions round.
@functools.partial(
    jax.jit, static_argnums=(1, 2), compiler_options={"xla_allow_excess_precision": False}
)
def forward(inputs, scale, logit_cap=None) -> tuple[jax.Array, jax.Array]:
    return attention.materialised(*inputs, scale=scale, logit_cap=logit_cap)


def make(case: Case) -> tuple[AttentionInputs, tuple[Any, ...]]:
    """Inputs, and (out, lse, d_out, d_lse)."""
    inputs = problems.make_attention_inputs(case.shape, case.dtype)
    out, lse = forward(inputs, case.scale, case.logit_cap)
    rng = np.random.default_rng(1)
    d_out = problems.random_array(rng, out.shape, case.dtype)
    d_lse = problems.random_array(rng, lse.shape, "float32") if case.has_d_lse else None
    return inputs, (out, lse, d_out, d_lse)


# One program instead of one for each operation.
@functools.partial(jax.jit, static_argnums=(2, 3))
def gradients(
    inputs: AttentionInputs, tensors: tuple[Any, ...], case: Case, num_sms: int = 1
) -> Any:
    return attention_backward_kernel(
        *inputs,
        *tensors,
        **case.of_scores,
        indices_are_sorted=case.shape.index == "sorted",
        config=case.config,
        num_sms=num_sms,
        dtype=case.sum_dtype,
    )


# Its conversions round.
@functools.partial(
    jax.jit, static_argnums=2, compiler_options={"xla_allow_excess_precision": False}
)
def plain(inputs: AttentionInputs, tensors: tuple[Any, ...], case: Case) -> Any:
    """What plain jnp makes of the arrays in their own dtype."""
    run = functools.partial(attention_grouped.decomposed_vjp, **case.of_scores)
    return run(*inputs, *tensors[2:], dtype=case.sum_dtype)


def expected(inputs: AttentionInputs, tensors: tuple[Any, ...], case: Case) -> Any:
    """Gradients in f64."""
    _, lse, d_out, d_lse = tensors
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
    return oracle_attention.numpy_attention_gradients(inputs, d_out, d_lse, **case.of_scores)


def assert_correct(results, inputs, tensors, case) -> None:
    """Holds every gradient to the error rule, against the oracle in f64."""
    want, rounded = expected(inputs, tensors, case), plain(inputs, tensors, case)
    for result, w, p in zip(results, want, rounded, strict=True):
        problems.assert_within_error_rule(np.asarray(result), w, np.asarray(p))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_interpreted_gradients_are_right_and_free_of_races(name, launches) -> None:
    case = CASES[name]
    assert case.config.illegal_reason(case.problem) is None
    inputs, tensors = make(case)
    results = jax.block_until_ready(gradients(inputs, tensors, case))
    launches.assert_no_races(case.launches)
    sum_dtype = case.sum_dtype or case.dtype
    assert [x.dtype for x in results] == [case.dtype, sum_dtype, sum_dtype]
    assert_correct(results, inputs, tensors, case)


@pytest.mark.parametrize("name", ["stored_h128_f16", "stored_h96"])
def test_interpreted_stored_gradients_by_chunks_of_keys(name, launches, monkeypatch) -> None:
    """Two launches for every tile of keys, if no more may be stored."""
    monkeypatch.setattr(Config, "stored_tiles", lambda *sizes: 1)
    case = dataclasses.replace(CASES[name], sum_dtype="float32")
    inputs, tensors = make(case)
    tiles = -(-case.shape.kv_len // 128)
    results = jax.block_until_ready(gradients.__wrapped__(inputs, tensors, case))
    launches.assert_no_races(2 * tiles)
    assert_correct(results, inputs, tensors, case)


@pytest.mark.parametrize(
    ("d_query", "head_dim"), [("parts", 64), ("launch", 64), ("stored", 64), ("stored", 192)]
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_nan_of_one_user_stays_there(d_query, head_dim, launches) -> None:
    """Nor do keys and values past a user's length matter."""
    shape = AttentionShape(3, 4, 21, 140, 1, 1, head_dim, "sorted", "ragged")
    case = Case(shape, Config(32, d_query=d_query))
    inputs, tensors = make(case)
    inputs = inputs._replace(key_value_seq_lengths=jnp.asarray([130, 40, 140], jnp.int32))
    inputs = inputs._replace(cand_to_user=jnp.asarray([0, 1, 1, 2], jnp.int32))
    out, lse = forward(inputs, case.scale)
    tensors = (out, lse, *tensors[2:])
    query, key, value, d_out = (np.array(x) for x in (*inputs[:3], tensors[2]))
    query[1:3], d_out[1:3], key[1], value[1] = np.nan, np.nan, np.nan, np.nan
    key[0, 130:], value[0, 130:] = np.nan, np.nan
    spoiled = inputs._replace(
        query=jnp.asarray(query), key=jnp.asarray(key), value=jnp.asarray(value)
    )
    results = gradients(spoiled, (out, lse, jnp.asarray(d_out), tensors[3]), case)
    assert not launches.with_races
    want, rounded = expected(inputs, tensors, case), plain(inputs, tensors, case)
    for result, w, p, others in zip(results, want, rounded, ([0, 3], [0, 2], [0, 2]), strict=True):
        actually, plainly = np.asarray(result), np.asarray(p)
        problems.assert_within_error_rule(actually[others], w[others], plainly[others])


@pytest.mark.parametrize("d_query", ["parts", "launch", "stored"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_wrong_promise_of_a_sorted_index_gives_nan(d_query: str) -> None:
    """A user's rows would be another user's candidates: nothing may look like a gradient."""
    shape = AttentionShape(2, 4, 5, 140, 1, 1, 64, "sorted")
    case = Case(shape, Config(16, d_query=d_query))
    inputs, tensors = make(case)
    unsorted = inputs._replace(cand_to_user=jnp.asarray([1, 0, 1, 0], jnp.int32))
    for result in gradients(unsorted, tensors, case):
        assert np.all(np.isnan(np.asarray(result, np.float32)))

"""The attention kernel's own body, interpreted on a CPU under a race detector.

The interpreter runs one CTA after another.  Memory starts as NaN, reads outside of an array raise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, attention_consumer, softmax
from ikbo_jax.pallas import attention as kernel
from ikbo_jax.reference import attention as reference
from ikbo_jax.tuning.configs import (
    NUM_CONSUMERS,
    AttentionConfig,
    AttentionProblem,
    attention_illegal_reason,
)

# The op's own interpreted tests are the ones that run with every jax.
pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: With named barriers, which the interpreter knows under this name.
PARAMS = dataclasses.replace(interpreter.PARAMS, inline_mgpu="_hack_model_inline_mgpu_tokamax")
#: Blocks of 32 keys, so that few keys are several blocks.
TWO_SLOTS = AttentionConfig(block_kv=32, k_stages=2, v_stages=2, q_slots=2, chunk=2)
ONE_SLOT = dataclasses.replace(TWO_SLOTS, q_slots=1, v_stages=3)
DEEP = dataclasses.replace(TWO_SLOTS, k_stages=3, v_stages=4)
REUSE = dataclasses.replace(TWO_SLOTS, reuse=True)
BALANCE = dataclasses.replace(TWO_SLOTS, balance=True)
EARLY = dataclasses.replace(TWO_SLOTS, early_scores=True)
ALL = dataclasses.replace(
    DEEP, v_stages=3, reuse=True, balance=True, early_scores=True, late_turns=True
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its index (users by candidate), lengths, order of work, and a config."""

    index: tuple[int, ...]
    keys: int
    q_len: int = 64
    users: int = 2
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 64
    config: AttentionConfig = TWO_SLOTS
    lengths: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    num_sms: int = 1
    dtype: str = "bfloat16"
    scale: float | None = None

    @property
    def problem(self) -> AttentionProblem:
        sizes = (len(self.index), self.users, self.q_len, self.keys, *self.heads, self.head_dim)
        return AttentionProblem(*sizes, self.dtype)

    def inputs(self, seed: int = 0) -> problems.AttentionInputs:
        rng = np.random.default_rng(seed)
        problem = self.problem
        of_user = (problem.users, problem.kv_len, problem.kv_heads, problem.head_dim)
        of_cand = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
        lengths = None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        return problems.AttentionInputs(
            *(problems.random_array(rng, s, self.dtype) for s in (of_cand, of_user, of_user)),
            jnp.asarray(self.index, jnp.int32),
            lengths,
        )


CASES = {
    # Blocks of keys: the pipeline runs on across tiles, of which there are two or more.
    "one_masked_block": Case((0, 0, 1, 1), 5),
    # Tiles, and indices out of range.
    "odd_pairs": Case((0, 1, 1, 1, 0), 64),
    "gqa_of_two_ctas": Case((-5, 2, 2**31 - 1), 40, heads=(4, 2), num_sms=2),
    "t128_ordered": Case((1, 0, 1), 40, q_len=128, order=(1, 0, 2)),
    "t1": Case((0, -5, 0, -(2**31), 0, 1, 2, 2**31 - 1), 40, q_len=1),
    # Blocks that stay from pass to pass: see also below.
    "reuse_balanced_early": Case((0, 1, 1, 1, 1, 1, 0), 50, config=ALL),
    "reuse_t16_gqa_lengths": Case(
        (0,) * 9 + (1,) * 9, 60, q_len=16, heads=(2, 1), lengths=(33, 60), config=REUSE, num_sms=2
    ),
    # Scores that are multiplied while the pass before is stored.
    "early_odd_pairs_lengths": Case(
        (0, 1, 1, 2, 3, 3), 70, users=4, lengths=(70, 33, 0, 1), config=EARLY
    ),
    # Tiles that are cut where users end.
    "balance_ordered": Case(
        (1, 0, 1, 0, 1), 40, order=(1, 3, 2, 0, 4), heads=(2, 1), config=BALANCE, num_sms=3
    ),
    # Heads.
    "h256": Case((0, 1), 40, head_dim=256, config=ONE_SLOT),
}


@pytest.fixture
def launches() -> Iterator[interpreter.Launches]:
    with interpreter.watched() as launches:
        yield launches


def scale_of(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def interpret(inputs: problems.AttentionInputs, case: Case) -> tuple[jax.Array, jax.Array]:
    out, lse = kernel.attention_kernel(
        *inputs,
        scale=scale_of(case),
        order=None if case.order is None else jnp.asarray(case.order, jnp.int32),
        return_residuals=True,
        config=case.config,
        num_sms=case.num_sms,
        interpret=PARAMS,
    )
    assert lse is not None
    return jax.block_until_ready((out, lse))


materialised = jax.jit(reference.materialised, static_argnames="scale")


def assert_correct(
    results: tuple[jax.Array, jax.Array],
    inputs: problems.AttentionInputs,
    case: Case,
    where: Any = ...,
) -> None:
    """Holds both results to the error rule, against the materialised oracle in f32.

    What plain jnp makes of the inputs in their own dtype rounds the weights, as the kernel does.
    """
    wide = inputs._replace(query=inputs.query.astype(jnp.float32))
    oracle, oracle_lse = materialised(*wide, scale=scale_of(case))
    plain = rounded_weights(inputs, scale_of(case))
    out, lse = results
    problems.assert_within_error_rule(out[where], oracle[where], plain[where])
    np.testing.assert_allclose(lse[where], oracle_lse[where], rtol=1e-5, atol=1e-5)


# One program instead of one for each operation; its conversions round.
@functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
def rounded_weights(inputs: problems.AttentionInputs, scale: jax.Array) -> jax.Array:
    """Attention whose weights are rounded to the inputs' dtype before they meet the values."""
    query, key, value, index, lengths = inputs
    rows = jnp.clip(index, 0, key.shape[0] - 1)
    group = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(x[rows], group, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->btns", query, keys, preferred_element_type=jnp.float32)
    length = jnp.full(key.shape[:1], key.shape[1]) if lengths is None else lengths
    seen = jnp.arange(key.shape[1])[None] < length[rows][:, None]
    scores = jnp.where(seen[:, None, None], scores * jnp.asarray(scale, jnp.float32), -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = jnp.maximum(jnp.sum(weights, axis=-1), 1e-30)
    values = jnp.where(seen[:, :, None, None], values, jnp.zeros((), value.dtype))
    out = jnp.einsum(
        "btns,bsnh->btnh",
        weights.astype(query.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return (out / total[..., None]).astype(query.dtype)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(
    name: str, launches: interpreter.Launches
) -> None:
    case = CASES[name]
    assert attention_illegal_reason(case.problem, case.config) is None
    inputs = case.inputs()
    results = interpret(inputs, case)
    launches.assert_no_races(1)
    assert_correct(results, inputs, case)


def test_interpreted_blocks_that_stay_are_not_brought_again(
    monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    case = Case((0, 0, 0, 0, 0, 1), 64, config=REUSE)
    copies: list[None] = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def counted(*args: Any, **kwargs: Any) -> Any:
        copies.append(None)
        return copy(*args, **kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", counted)
    inputs = case.inputs()
    results = interpret(inputs, case)
    launches.assert_no_races(1)
    assert_correct(results, inputs, case)
    # Two tiles of queries for each of four passes; two blocks of keys and values for each user.
    assert len(copies) == 4 * 2 + 2 * 4


# Where the first maximum does not do: every such tile is computed again.


@pytest.mark.parametrize(("config", "candidate"), [(ONE_SLOT, 0), (ALL, 2)])
def test_interpreted_growing_scores_are_computed_again(
    candidate: int,
    config: AttentionConfig,
    launches: interpreter.Launches,
) -> None:
    """One candidate's queries, in every position of its tile and CTA, meet a huge later key."""
    case = Case((0, 0, 1, 1, 1), 75, config=config)
    assert attention_illegal_reason(case.problem, case.config) is None
    inputs = case.inputs()
    query = inputs.query.at[candidate].multiply(30)
    user = case.index[candidate]
    key = inputs.key.at[user, 70].multiply(8)
    inputs = inputs._replace(query=query, key=key)
    results = interpret(inputs, case)
    launches.assert_no_races(1)
    assert_correct(results, inputs, case)


@pytest.mark.filterwarnings("ignore:overflow encountered in matmul:RuntimeWarning")
def test_interpreted_growing_scores_need_the_second_try(
    monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    case = Case((0, 0), 40)
    inputs = case.inputs()
    hard = inputs._replace(query=inputs.query * 30, key=inputs.key.at[:, 38].multiply(8))
    monkeypatch.setattr(softmax, "flag_rows", lambda *args: None)
    results = interpret(hard, case)
    with pytest.raises(AssertionError):
        assert_correct(results, hard, case)
    launches.assert_no_races(1)


def test_interpreted_good_scores_need_no_second_try(
    monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    """Nor do users without keys, or lengths out of range."""
    monkeypatch.setattr(attention_consumer, "_recompute", lambda *args: None)
    case = Case((0, 1, 2, 2, 3), 70, users=4, lengths=(0, 64, -3, 1000))
    inputs = case.inputs()
    assert_correct(interpret(inputs, case), inputs, case)
    launches.assert_no_races(1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_nan_of_one_user_stays_with_its_candidates(
    launches: interpreter.Launches,
) -> None:
    """And keys and values past a user's length may be anything."""
    case = Case((0, 1, 1, 2, 0), 75, users=3, lengths=(70, 33, 75))
    inputs = case.inputs()
    past = jnp.arange(75)[None] >= jnp.asarray(case.lengths)[:, None]
    spoiled = inputs._replace(
        key=jnp.where(past[..., None, None], jnp.nan, inputs.key.at[2, 50].set(jnp.nan)),
        value=jnp.where(past[..., None, None], jnp.nan, inputs.value),
    )
    out, lse = interpret(spoiled, case)
    launches.assert_no_races(1)
    hit = np.asarray(case.index) == 2
    assert np.all(np.isnan(out.astype(jnp.float32)[hit]))
    assert np.all(np.isnan(lse[hit]))
    assert_correct((out, lse), inputs, case, ~hit)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_rows_of_minus_infinity(launches: interpreter.Launches) -> None:
    """The first block's scores, or all of them, are -inf."""
    case = Case((0, 1), 75)
    inputs = case.inputs()
    query = jnp.abs(inputs.query)
    key = inputs.key.at[0, :32].set(-jnp.inf).at[1].set(-jnp.inf)
    inputs = inputs._replace(query=query, key=key)
    out, lse = interpret(inputs, case)
    launches.assert_no_races(1)
    wide = inputs._replace(query=query.astype(jnp.float32))
    oracle, oracle_lse = materialised(*wide, scale=scale_of(case))
    np.testing.assert_allclose(out.astype(jnp.float32), oracle, atol=0.02)
    np.testing.assert_allclose(lse, oracle_lse, rtol=1e-5)
    assert np.all(np.asarray(lse[1]) == -np.inf)
    assert np.all(np.asarray(out[1].astype(jnp.float32)) == 0)


def test_order_needs_whole_warpgroup_tiles() -> None:
    case = Case((0, 1), 40, q_len=16, order=(1, 0))
    with pytest.raises(ValueError, match=r"multiple of 64, but T=16"):
        interpret(case.inputs(), case)


# The checks themselves: each of them must be able to fail.


def is_handed_back(barrier: Any) -> bool:
    """Whether a barrier says that consumers have read something, not that it is there."""
    return jax.typeof(barrier.ref).inner_aval.dtype.num_arrivals == NUM_CONSUMERS


def assert_found(case: Case, launches: interpreter.Launches) -> None:
    """Runs `case` and expects races, or the interpreter's own complaint."""
    try:
        interpret(case.inputs(), case)
    except jax.errors.JaxRuntimeError as error:
        complaints = ("no threads observed", "had only observed", "RACE DETECTED", "first time")
        if any(complaint in str(error) for complaint in complaints):
            return
        raise
    with pytest.raises(AssertionError, match="races in launches"):
        launches.assert_no_races(1)


def test_interpreted_output_that_is_not_waited_for_is_found(
    monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    wait = plgpu.wait_smem_to_gmem

    def planted(n: int, wait_read_only: bool) -> None:
        if not wait_read_only:  # without this one, the interpreter does not end a kernel
            wait(n, wait_read_only=wait_read_only)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", planted)
    assert_found(Case((0,) * 6, 32), launches)


@pytest.mark.parametrize("pending", [0, 1])
def test_interpreted_stage_handed_back_too_early_is_found(
    pending: int, monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    """Keys (1 group pending) or values (0) go back before the wait that says they were read."""
    wait, arrive = accumulator.wait, plgpu.barrier_arrive
    held: list[int] = []

    def late_wait(n: int, *, interpret: bool) -> None:
        if n == pending:
            held.append(n)
        else:
            wait(n, interpret=interpret)

    def arrive_then_wait(barrier: Any) -> None:
        arrive(barrier)
        if held and is_handed_back(barrier):
            wait(held.pop(), interpret=True)

    monkeypatch.setattr(accumulator, "wait", late_wait)
    monkeypatch.setattr(plgpu, "barrier_arrive", arrive_then_wait)
    assert_found(Case((0, 0), 32 * 6), launches)


def test_wrong_user_is_found() -> None:
    case = Case((0, 1), 40)
    inputs = case.inputs()
    mistaken = inputs._replace(cand_to_user=jnp.asarray((0, 0), jnp.int32))
    _, lse = materialised(*mistaken, scale=scale_of(case))
    results = rounded_weights(mistaken, scale_of(case)), lse
    with pytest.raises(AssertionError, match="largest error"):
        assert_correct(results, inputs, case)

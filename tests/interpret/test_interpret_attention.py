"""The attention kernel's own body, interpreted on a CPU under a race detector.

The interpreter runs one CTA after another.  Memory starts as NaN, reads outside of an array raise.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import planted
import problems
import pytest
from indexed_attention import IndexedAttention
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from ikbo_jax.pallas.flash import attention as kernel
from ikbo_jax.pallas.flash import attention_producer
from ikbo_jax.problems import AttentionConfig

# The op's own interpreted tests are the ones that run with every jax.
pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts a head's tiles into several chunks, as those of large problems are."""
    monkeypatch.setattr(attention_producer, "CHUNK", 2)


#: Blocks of 32 keys, so that few keys are several blocks.
TWO_SLOTS = AttentionConfig(block_kv=32, k_stages=2, v_stages=2, q_slots=2)
ONE_SLOT = dataclasses.replace(TWO_SLOTS, q_slots=1, v_stages=3)
ONE_USER = dataclasses.replace(TWO_SLOTS, one_user=True)
REUSE = dataclasses.replace(TWO_SLOTS, reuse=True)
BALANCE = dataclasses.replace(TWO_SLOTS, balance=True)
EARLY = dataclasses.replace(TWO_SLOTS, early_scores=True)
ALL = dataclasses.replace(
    TWO_SLOTS, k_stages=3, v_stages=3, reuse=True, balance=True, early_scores=True, late_turns=True
)


@dataclasses.dataclass(frozen=True)
class Case(IndexedAttention):
    """A problem, the order of its work, and a config.

    With `is_packed`, candidates are put into the order of users, and results back by the kernel.

    `copies` is how often the producer brings something: the queries of a pass's two warpgroups, a
    block of keys, one of values; blocks that stay are brought once, and no pass has a second try.
    """

    config: AttentionConfig = TWO_SLOTS
    order: tuple[int, ...] | None = None
    copies: int | None = None
    is_packed: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = {
    # Passes of one block of keys that follow each other, and some of two.
    "t128_ordered_lengths": Case(
        (1, 0, 0, 1), 40, q_len=128, order=(1, 2, 0, 3), lengths=(5, 40), copies=4 * 2 + 2 * 6
    ),
    "t1_fewer_keys_than_a_block": Case((0, -5, 0, -(2**31), 0, 1, 2, 2**31 - 1), 5, q_len=1),
    "t3_packed_gqa_lengths": Case(
        (1, 0, -5, 2**31 - 1, 0) * 9,
        40,
        q_len=3,
        heads=(2, 1),
        lengths=(5, 40),
        logit_cap=1.5,
        is_packed=True,
    ),
    "t100_packed_one_slot": Case(
        (2, 0, 1), 33, q_len=100, users=3, config=ONE_SLOT, num_sms=2, is_packed=True
    ),
    # Blocks that stay from pass to pass, in tiles that are cut where users end or are not.
    "reuse_balanced_early": Case((0, 1, 1, 1, 1, 1, 0), 50, config=ALL, copies=5 * 2 + 2 * 2 * 3),
    "reuse_t16_gqa_lengths": Case(
        (0,) * 9 + (1,) * 9, 60, q_len=16, heads=(2, 1), lengths=(33, 60), config=REUSE, num_sms=2
    ),
    # Neighbours with one user: two query heads share the blocks that stay, the next two do not.
    "reuse_key_heads": Case((0,), 20, users=1, heads=(4, 2), config=REUSE, copies=4 * 2 + 2 * 2),
    # Scores that are multiplied while the pass before is stored; lengths that are out of range.
    "early_odd_pairs_lengths": Case(
        (0, 1, 1, 2, 3, 3),
        70,
        lengths=(1000, 33, -3, 64),
        config=EARLY,
        copies=5 * 2 + 2 * (3 + 2 + 2 + 1 + 2),
    ),
    # Tiles that are cut where users end; indices out of range.
    "balance_ordered_gqa": Case(
        (2**31 - 1, -5, 2),
        64,
        order=(1, 2, 0),
        heads=(4, 2),
        config=BALANCE,
        num_sms=3,
        copies=4 * 3 * (2 + 2 * 2),
    ),
    # Tiles of one user each, which a launch lists: one pass each, of users without keys as well.
    "one_user_t16_gqa_lengths": Case(
        (0,) * 9 + (1,) * 3 + (3,) * 9,
        60,
        q_len=16,
        heads=(2, 1),
        lengths=(33, 60, 9, 0, 50),
        config=ONE_USER,
        num_sms=2,
    ),
    "one_user_t3_packed_f16": Case(
        (1, 0, -5, 2**31 - 1, 0) * 9, 40, q_len=3, dtype="float16", config=ONE_USER, is_packed=True
    ),
    "one_user_t64_ordered_lengths": Case(
        (2, 0, 1, 0, 0, 2),
        50,
        order=(1, 3, 4, 2, 0, 5),
        lengths=(50, 1000, 20, 7),
        config=dataclasses.replace(ONE_USER, early_scores=True, late_turns=True),
        num_sms=2,
    ),
    # An index that is not sorted although it should be.
    "one_user_unsorted_h256_one_slot": Case(
        (1, 0, 0, 2, 1, 0, 0),
        40,
        users=3,
        q_len=8,
        head_dim=256,
        config=dataclasses.replace(ONE_SLOT, one_user=True),
    ),
    "one_user_of_one": Case((0,) * 5, 40, users=1, q_len=30, config=ONE_USER),
}
#: Cases whose candidates have an own token, too.
OWN = (
    *("t128_ordered_lengths", "t3_packed_gqa_lengths", "t100_packed_one_slot"),
    *("early_odd_pairs_lengths", "balance_ordered_gqa"),
    *("one_user_t16_gqa_lengths", "one_user_unsorted_h256_one_slot"),
)
for name in OWN:
    case = dataclasses.replace(CASES[name], has_own=True, logit_cap=None, copies=None)
    if case.config.own_stages(case.q_len) is None:  # a stage holds the tokens of a tile
        case = dataclasses.replace(case, config=dataclasses.replace(case.config, block_kv=96))
    CASES[f"{name}_own"] = case
#: Cases whose keys and values are in pages of one or two blocks.
CASES |= {
    f"{name}_pages_{page}": dataclasses.replace(
        CASES[name], keys=keys, page=page, lengths=lengths, copies=None
    )
    for name, keys, page, lengths in (
        ("t3_packed_gqa_lengths", 96, 32, (5, 96)),
        ("reuse_t16_gqa_lengths", 64, 64, (33, 60)),
        ("early_odd_pairs_lengths", 96, 32, (1000, 33, -3, 64)),
        ("one_user_t16_gqa_lengths", 128, 64, (33, 128, 70, 0, 50)),
    )
}


def interpret(inputs: problems.AttentionInputs, case: Case) -> tuple[jax.Array, jax.Array]:
    order = None if case.order is None else jnp.asarray(case.order, jnp.int32)
    return launched(kernel.attention_kernel, inputs, case, order=order)


def launched(run: Any, inputs: Any, case: Any, **arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Results of a kernel in one program instead of one for each operation."""
    inputs, pages = case.in_pages(inputs)
    inputs, targets = packed(inputs, case)
    options = {"scale": case.scale, "logit_cap": case.logit_cap, "config": case.config}
    options |= {"num_sms": case.num_sms, "return_residuals": True}
    run = jax.jit(functools.partial(run, **case.own, **pages, **options))
    return jax.block_until_ready(run(*inputs, targets=targets, **arrays))


def packed(inputs, case) -> tuple[problems.AttentionInputs, np.ndarray | None]:
    """Inputs in the order of users, and their places, if the case is packed."""
    if not case.is_packed:
        return inputs, None
    query, *rest, index, lengths = inputs
    targets = np.argsort(np.clip(index, 0, case.users - 1), stable=True).astype(np.int32)
    return problems.AttentionInputs(query[targets], *rest, index[targets], lengths), targets


def assert_correct(results, inputs, case, where=...) -> None:
    """Holds both results to the error rule, against the oracle in f64.

    What is plain of the inputs in their own dtype rounds the weights, as the kernel does.
    """
    options: Any = {"scale": case.scale, "logit_cap": case.logit_cap, "ranges": case.ranges}
    oracle, oracle_lse = oracle_attention.numpy_attention_oracle(inputs, **options, **case.own)
    plain, _ = oracle_attention.materialised(*inputs, **options, **case.own)
    out, lse = map(np.asarray, results)
    problems.assert_within_error_rule(out[where], oracle[where], plain[where])
    np.testing.assert_allclose(lse[where], oracle_lse[where], rtol=1e-5, atol=1e-5)


def check(case: Any, interpret: Callable[..., Any] = interpret) -> None:
    """Runs a case, interpreted or emulated, and holds its results to the error rule."""
    assert case.config.illegal_reason(case.problem) is None
    inputs = case.inputs()
    assert_correct(interpret(inputs, case), inputs, case)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for everything that a kernel brings to shared memory."""
    entries: list[None] = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def counted(*args: Any, **kwargs: Any) -> Any:
        entries.append(None)
        return copy(*args, **kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", counted)
    return entries


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name, launches, copies) -> None:
    case = CASES[name]
    check(case)
    launches.assert_no_races(1 + (case.config.one_user and case.users > 1))
    assert case.copies in (None, len(copies))


# Where the first maximum does not do: every such tile is computed again.


@pytest.mark.parametrize(
    ("config", "head_dim", "candidate"),
    [(ONE_SLOT, 192, 0), (ALL, 64, 2), (ONE_USER, 64, 0)],
    ids=["one_slot", "all", "one_user"],
)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_interpreted_hard_tiles_are_computed_again(config, head_dim, candidate, launches) -> None:
    """One candidate's queries meet a huge later key; a user has a NaN, which stays with its
    candidates; one's first block of scores is -inf, and all of another's are.

    Keys and values past a user's length may be anything.
    """
    lengths = (41, 43, 36, 43, 43)
    index = (0, 0, 1, 1, 1, 2, 3, 4)
    case = Case(index, 43, users=5, head_dim=head_dim, config=config, lengths=lengths)
    assert case.config.illegal_reason(case.problem) is None
    query, key, value, *rest = case.inputs()
    user = index[candidate]
    query, key, value = (np.array(x) for x in (query, key, value))
    query[candidate] *= 30
    query[6:] = np.abs(query[6:])
    key[user, 40] *= 8
    key[2, 34] = np.nan
    key[3, :32] = key[4] = -np.inf
    past = np.arange(43)[None] >= np.asarray(lengths)[:, None]
    key[past] = value[past] = np.nan
    # Powers of the scores less the first block's maximum are beyond f32.
    scores = query[candidate, :, 0].astype(float) @ key[user, :41, 0].astype(float).T * case.scale
    assert np.max(scores[:, 40] - np.max(scores[:, :32], axis=1)) > np.log(np.finfo(np.float32).max)
    inputs = problems.AttentionInputs(*map(jnp.asarray, (query, key, value)), *rest)
    out, lse = map(np.asarray, interpret(inputs, case))
    launches.assert_no_races(1 + config.one_user)
    hit = np.asarray(index) == 2
    assert np.all(np.isnan(out[hit].astype(np.float32)))
    assert np.all(np.isnan(lse[hit]))
    assert_correct((out, lse), inputs, case, ~hit)
    assert np.all(lse[7] == -np.inf)
    assert np.all(out[7].astype(np.float32) == 0)


def test_order_needs_whole_warpgroup_tiles() -> None:
    case = Case((0, 1), 40, q_len=16, order=(1, 0))
    with pytest.raises(ValueError, match=r"multiple of 64, but T=16"):
        interpret(case.inputs(), case)


# The checks themselves: each of them must be able to fail.


@pytest.mark.parametrize("pending", [0, 1])
def test_interpreted_stage_handed_back_too_early_is_found(pending, monkeypatch, launches) -> None:
    """Keys (1 group pending) or values (0) go back before the wait that says they were read."""
    planted.early_hand_back(monkeypatch, pending)
    case = Case((0, 0), 32 * 6)
    planted.assert_found(lambda: interpret(case.inputs(), case), launches)

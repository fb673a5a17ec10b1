"""Attention weights: masks before the softmax, and what a model does after it.

Masks again, NaN, sums, logarithms.
"""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import both, check_values_and_gradients, largest_outside_ops, report_of

import ikbo_jax as ikbo

# As many users as keys, so that a mask and its transpose have one shape.
B, U, S, N, H = 192, 8, 8, 2, 8
D = N * H
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
#: A user without kept keys, who has candidates.
EMPTY = int(INDEX[0])


@pytest.fixture(autouse=True)
def masks_may_be_multiplied_as_people_do():
    with jax.numpy_dtype_promotion("standard"):
        yield


def random(*shape):
    return problems.random_array(RNG, shape, "float32") / 2


def bits(*shape):
    return jnp.asarray(RNG.integers(0, 2, shape), bool)


CAND, HISTORY = random(B, D), random(U, S, D)
KEPT, OTHER = (bits(U, S).at[EMPTY].set(False) for _ in range(2))
OTHER = OTHER.at[EMPTY, 1].set(True)
OF_CANDIDATES, BY_HEAD, ROW = bits(B, S), bits(U, N, 1, S), bits(S)
AGE = jnp.asarray(RNG.uniform(0.1, 2, (U, S)), jnp.float32)
LENGTHS = jnp.asarray(RNG.integers(1, S + 1, U), jnp.int32)
#: How many keys each user keeps: 0 for one of them.
COUNTS = KEPT.sum(1).astype(jnp.float32)


def kept():
    return KEPT[INDEX]


def other():
    return OTHER[INDEX]


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def infinite(x):
    return jnp.where(kept(), x, -jnp.inf)


def finite(x):
    return jnp.where(kept(), x, -1e9)


def over_sum(weights, eps):
    return weights / (weights.sum(-1, keepdims=True) + eps)


def over_at_least(weights, number):
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), number)


def shifted(x):
    return jnp.exp(x - x.max(-1, keepdims=True))


def guarded(x):
    largest = x.max(-1, keepdims=True)
    return jnp.exp(x - jnp.where(jnp.isfinite(largest), largest, 0))


def lse(x):
    return jax.scipy.special.logsumexp(x, axis=-1, keepdims=True)


#: Functions of logits that the op computes.
BY_THE_OP = {
    "masked by -1e9": lambda x: softmax(finite(x)),
    "masked by -inf": lambda x: softmax(infinite(x)),
    "masked by min": lambda x: softmax(jnp.where(kept(), x, jnp.finfo(x.dtype).min)),
    "masked by lengths": lambda x: softmax(
        jnp.where(KEPT.sum(1)[INDEX][:, None] > jnp.arange(S)[None], x, -1e9)
    ),
    "added -1e9": lambda x: softmax(x + jnp.where(kept(), 0.0, -1e9)),
    "added -1e9 at user batch": lambda x: softmax(x + jnp.where(KEPT, 0, -1e9)[INDEX]),
    "added min": lambda x: softmax(x + jnp.where(kept(), 0, jnp.finfo(x.dtype).min)),
    "added (1 - mask) * -1e9": lambda x: softmax(x + (1.0 - kept().astype(jnp.float32)) * -1e9),
    "masked again": lambda x: softmax(infinite(x)) * kept(),
    "masked again by numbers": lambda x: softmax(infinite(x)) * kept().astype(jnp.float32),
    "masked again after -1e9": lambda x: softmax(finite(x)) * kept(),
    "selected": lambda x: jnp.where(kept(), softmax(infinite(x)), 0),
    "selected after -1e9": lambda x: jnp.where(kept(), softmax(finite(x)), 0),
    "hidden": lambda x: jnp.where(~kept(), 0, softmax(finite(x))),
    "selected by users with keys": lambda x: jnp.where(
        kept().any(-1, keepdims=True), softmax(infinite(x)), 0
    ),
    "another mask": lambda x: softmax(infinite(x)) * other(),
    "another mask selects": lambda x: jnp.where(other(), softmax(infinite(x)), 0),
    "the inverted mask": lambda x: softmax(infinite(x)) * ~kept(),
    "two masks": lambda x: jnp.where(kept(), jnp.where(other(), softmax(infinite(x)), 0), 0),
    "only after the softmax": lambda x: softmax(x) * kept(),
    "added and masked again": lambda x: softmax(x + jnp.where(kept(), 0, -1e9)) * kept(),
    "nan_to_num": lambda x: jnp.nan_to_num(softmax(infinite(x))),
    "nan_to_num of masked": lambda x: jnp.nan_to_num(softmax(infinite(x)) * kept()),
    "where isnan": lambda x: (lambda p: jnp.where(jnp.isnan(p), 0, p))(softmax(infinite(x))),
    "scaled": lambda x: softmax(finite(x)) * 2 / 3,
    "by age": lambda x: softmax(finite(x)) * AGE[INDEX],
    "by age, masked, over a length": lambda x: (
        softmax(infinite(x)) * kept() * AGE[INDEX] / LENGTHS[INDEX][:, None]
    ),
    "by position": lambda x: softmax(x) * jnp.linspace(0, 1, S)[None],
    "masked over its sum": lambda x: over_sum(softmax(finite(x)) * kept(), 1e-9),
    "masked over its sum and a half": lambda x: over_sum(softmax(finite(x)) * kept(), 0.5),
    "masked over its sum alone": lambda x: over_sum(softmax(x) * kept(), 0),
    "masked twice over its sum alone": lambda x: over_sum(softmax(finite(x)) * kept(), 0),
    "masked and scaled, over its sum alone": lambda x: over_sum(2 * (softmax(x) * kept()), 0),
    "scaled after -1e9, over its sum": lambda x: over_sum(3 * (softmax(finite(x)) * kept()), 0.4),
    "scaled after -1e9, over at least more": lambda x: over_at_least(
        softmax(finite(x)) * kept() / 2, 0.9
    ),
    "exponentials": lambda x: over_sum(jnp.exp(x) * kept(), 0.5),
    "exponentials over at least a half": lambda x: (lambda e: (
        e / jnp.maximum(e.sum(-1, keepdims=True), 0.5)
    ))(jnp.exp(x) * kept()),
    "exponentials selected": lambda x: over_sum(jnp.where(kept(), jnp.exp(x), 0), 0),
    "shifted, -1e9, masked": lambda x: over_sum(shifted(finite(x)) * kept(), 1e-9),
    "shifted, -inf, selected": lambda x: over_sum(
        jnp.where(kept(), shifted(infinite(x)), 0), 1e-9
    ),
    "guarded maximum": lambda x: over_sum(guarded(infinite(x)), 1e-9),
    "guarded maximum, sum alone": lambda x: over_sum(guarded(infinite(x)), 0),
    "softmax of some": lambda x: jax.nn.softmax(x, axis=-1, where=kept()),
    "log_softmax": lambda x: jnp.exp(jax.nn.log_softmax(finite(x), axis=-1)),
    "log_softmax of some": lambda x: jnp.exp(jax.nn.log_softmax(x, axis=-1, where=kept())),
    "less logsumexp": lambda x: jnp.exp(infinite(x) - lse(infinite(x))) * kept(),
    "twice over its sum": lambda x: over_sum(over_sum(guarded(infinite(x)), 1e-9), 0.5),
    "selected, twice over its sum": lambda x: over_at_least(
        over_sum(jnp.where(kept(), shifted(infinite(x)), 0), 1e-9) / 3, 0.5
    ),
    "over a length of 0, selected": lambda x: jnp.where(
        kept(), softmax(finite(x)) / COUNTS[INDEX][:, None], 0
    ),
    "relu, selected": lambda x: jnp.where(kept(), jax.nn.relu(x), 0),
    "silu by age over a length": lambda x: (
        3 * jax.nn.silu(x) * AGE[INDEX] * kept() / LENGTHS[INDEX][:, None]
    ),
    "linear, masked": lambda x: x * kept() / S,
}  # fmt: skip

#: Functions that another attention would compute; they stay as written.
AS_WRITTEN = {
    "mask of candidates": lambda x: softmax(finite(x)) * OF_CANDIDATES,
    "candidates select": lambda x: jnp.where(OF_CANDIDATES, softmax(finite(x)), 0),
    "1 instead of 0": lambda x: jnp.where(kept(), softmax(finite(x)), 1.0),
    "5 instead of NaN": lambda x: jnp.nan_to_num(softmax(infinite(x)), nan=5.0),
    "another mask over its sum": lambda x: over_sum(softmax(finite(x)) * other(), 1e-9),
    "the transposed mask over its sum": lambda x: over_sum(
        softmax(finite(x)) * KEPT.T[INDEX], 1e-9
    ),
    "users for keys over their sum": lambda x: over_sum(
        softmax(jnp.where(ROW[INDEX][:, None], x, -1e9)) * ROW[None], 1e-9
    ),
    "the inverted mask over its sum": lambda x: over_sum(softmax(finite(x)) * ~kept(), 1e-9),
    "over another sum": lambda x: (
        softmax(x) * kept() / ((softmax(x) * other()).sum(-1, keepdims=True) + 1e-9)
    ),
    "times a number below 0, over its sum": lambda x: over_sum(-2 * (softmax(x) * kept()), 0),
    "age over its sum": lambda x: over_sum(softmax(finite(x)) * AGE[INDEX], 1e-9),
    "a number added to an unknown sum": lambda x: over_sum(shifted(x) * kept(), 1e-3),
    "a small number added to an unknown sum": lambda x: over_sum(shifted(x) * kept(), 1e-9),
    "a large number added": lambda x: over_sum(shifted(finite(x)), 0.5),
    "over at least a half, masked, less a larger number": lambda x: over_at_least(
        shifted(jnp.where(kept(), x, 5.0)) * kept(), 0.5
    ),
    "over its sum, and over the sum of some": lambda x: over_sum(
        other() * over_sum(guarded(infinite(x)), 1e-9), 0.5
    ),
    "NaN of a factor becomes 0": lambda x: jnp.nan_to_num(
        softmax(x) * AGE.at[0, 0].set(jnp.nan)[INDEX]
    ),
    "another mask of exponentials": lambda x: over_sum(shifted(infinite(x)) * other(), 1e-9),
    "exponentials halved": lambda x: over_sum(jnp.exp(x) / 2, 0),
    "something added": lambda x: softmax(x) * kept() + 0.1,
    "stopped": lambda x: jax.lax.stop_gradient(softmax(x) * kept()),
    "squared": lambda x: (softmax(x) * kept()) ** 2,
    "logarithm doubled": lambda x: jnp.exp(jax.nn.log_softmax(x, axis=-1) * 2),
    "less another logsumexp": lambda x: jnp.exp(x - lse(infinite(x))),
    "less another logsumexp, masked": lambda x: jnp.exp(x - lse(finite(x))) * kept(),
    "relu over its sum": lambda x: over_sum(jax.nn.relu(x) * kept(), 1e-3),
    "logits, masked, softmax": lambda x: softmax(x * kept()),
}  # fmt: skip


def pooled(weights):
    def fn(cand, history):
        logits = jnp.einsum("bd,bsd->bs", cand, history[INDEX]) / 2
        return jnp.einsum("bs,bsd->bd", weights(logits), history[INDEX])

    return fn


def explained(fn, *args):
    """The report of a rewritten function, and whether it attends by an op."""
    explanation = ikbo.explain(ikbo.rewrite(fn), *args)
    text = str(explanation)
    return explanation.notes[0], "attention: B=" in text or "gdpa: " in text


def check(fn, *args):
    """Compares values and gradients; returns what `explained` returns."""
    check_values_and_gradients(fn, *args)
    return explained(fn, *args)


@pytest.mark.parametrize("name", BY_THE_OP)
def test_changed_weights_attend_by_the_op(name):
    fn = pooled(BY_THE_OP[name])
    report, is_by_the_op = check(fn, CAND, HISTORY)
    assert report.changed, report
    assert largest_outside_ops(fn, CAND, HISTORY) < B * S * D
    assert is_by_the_op


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_weights_of_another_attention_stay_as_written(name):
    _, is_by_the_op = check(pooled(AS_WRITTEN[name]), CAND, HISTORY)
    assert not is_by_the_op


def of_heads(weights):
    def fn(cand, history):
        query, key = cand.reshape(B, 1, N, H), history[INDEX].reshape(B, S, N, H)
        logits = jnp.einsum("bqnh,bknh->bnqk", query, key) / 2
        return jnp.einsum("bnqk,bknh->bqnh", weights(logits), key)

    return fn


def kept_by_heads():
    return kept()[:, None, None]


PER_HEAD = jnp.asarray([0.5, 2.0])[None, :, None, None]
HEADS = {
    "masked again": lambda x: (
        softmax(jnp.where(kept_by_heads(), x, -jnp.inf)) * kept_by_heads() * PER_HEAD
    ),
    "exponentials over a sum": lambda x: over_sum(
        jnp.where(jnp.broadcast_to(kept_by_heads(), x.shape), jnp.exp(x), 0), 0
    ),
    "masked by head": lambda x: jnp.where(BY_HEAD[INDEX], softmax(x), 0),
    "softmax of some": lambda x: jax.nn.softmax(x, axis=-1, where=kept_by_heads()),
    "exponentials": lambda x: over_sum(jnp.exp(x) * kept_by_heads(), 0.3),
    "relu": lambda x: jnp.where(kept_by_heads(), jax.nn.relu(x), 0) * PER_HEAD,
}


HEADS_AS_WRITTEN = {
    # A user without keys has NaN gradients, which a select would stop.
    "product with a broadcast mask over its sum alone": lambda x: over_sum(
        jnp.exp(x) * kept_by_heads(), 0
    ),
    "masks by head of a softmax that may be NaN": lambda x: jnp.where(
        BY_HEAD[INDEX], softmax(jnp.where(kept_by_heads(), x, -jnp.inf)), 0
    ),
}


@pytest.mark.parametrize("name", [*HEADS, *HEADS_AS_WRITTEN])
def test_changed_weights_of_heads(name):
    weights = {**HEADS, **HEADS_AS_WRITTEN}[name]
    _, is_by_the_op = check(of_heads(weights), CAND, HISTORY)
    assert is_by_the_op == (name in HEADS)


OVER_THE_SUM_OF_SOME = {
    "plus a number": lambda x: over_sum(softmax(x) * kept(), 0.2),
    "scaled": lambda x: over_sum(softmax(x) * kept() / 4, 0.3),
    "scaled, at least a number": lambda x: over_at_least(softmax(x) * kept() / 2, 0.3),
}


@pytest.mark.parametrize("name", OVER_THE_SUM_OF_SOME)
def test_probabilities_of_all_keys_over_the_sum_of_some(name):
    """Two attentions, which projections at user batch pay for."""

    def fn(cand, history):
        key = jnp.tanh(history[INDEX] @ W) @ W
        logits = jnp.einsum("bd,bsd->bs", cand, key)
        return jnp.einsum("bs,bsd->bd", OVER_THE_SUM_OF_SOME[name](logits), key)

    _, is_by_the_op = check(fn, CAND, HISTORY)
    assert is_by_the_op


W = random(D, D)


def assert_values_without_nan(fn, *args):
    rewritten, original = both(fn, *args)
    assert not np.isnan(original).any()
    np.testing.assert_allclose(rewritten, original, atol=1e-5)
    _, is_by_the_op = explained(fn, *args)
    assert is_by_the_op


def test_a_select_hides_an_activation_over_a_length_of_zero():
    """The original's gradient, 0 / 0, is NaN."""
    fn = pooled(lambda x: jnp.where(kept(), jax.nn.relu(x) / COUNTS[INDEX][:, None], 0))
    assert_values_without_nan(fn, CAND, HISTORY)


@pytest.mark.parametrize("bounded", [over_sum, over_at_least])
def test_masked_logits_that_are_no_smaller_than_others_count_in_the_sum(bounded):
    cand, history = jnp.abs(CAND), jnp.abs(HISTORY)
    factor = -100 / float(jnp.einsum("bd,bsd->bs", cand, history[INDEX]).mean())

    def fn(cand, history):
        logits = jnp.einsum("bd,bsd->bs", cand, history[INDEX]) * factor
        weights = bounded(softmax(jnp.where(kept(), logits, -100.0)) * kept(), 0.4)
        return jnp.einsum("bs,bsd->bd", weights, history[INDEX])

    _, is_by_the_op = check(fn, cand, history)
    assert is_by_the_op


def test_nan_of_a_hidden_key_stays_hidden():
    """Padding may be NaN where an activation and a select hide it."""
    history = HISTORY.at[1, 2].set(jnp.nan)
    shown = jnp.ones((U, S), bool).at[1, 2].set(False)

    def fn(cand, history):
        mask, values = shown[INDEX], jnp.nan_to_num(history)[INDEX]
        weights = jax.nn.relu(jnp.einsum("bd,bsd->bs", cand, history[INDEX]))
        return jnp.einsum("bs,bsd->bd", jnp.where(mask, weights, 0), values)

    assert_values_without_nan(fn, CAND, history)


NAN = {
    "softmax": lambda x, mask: (softmax(infinite(x)) * mask) ** 2,
    "infinity": lambda x, mask: jnp.exp(x - lse(finite(x))) * mask,
}


def check_compiled_hides_nan(fn, cand, history, rtol, atol):
    original, rewritten = jax.jit(fn)(cand, history), jax.jit(ikbo.rewrite(fn))(cand, history)
    assert not jnp.isnan(original).any()
    np.testing.assert_allclose(rewritten, original, rtol=rtol, atol=atol)
    assert report_of(fn, cand, history).changed


@pytest.mark.parametrize("mask", [kept, lambda: kept().astype(jnp.float32)])
@pytest.mark.parametrize("name", NAN)
def test_a_product_with_a_cast_mask_hides_nan_as_xla_does(name, mask):
    """XLA compiles `x * mask` to a select, also in a softmax that stays as it is written."""
    check_compiled_hides_nan(pooled(lambda x: NAN[name](x, mask())), CAND, HISTORY, 1e-7, 1e-5)


def test_a_product_with_a_cast_mask_at_user_batch_hides_nan():
    def fn(cand, history):
        rows = history[INDEX]
        return jnp.log(rows - 5).mean(-1) * kept() + cand[:, :1]

    original, rewritten = jax.jit(fn)(CAND, HISTORY), jax.jit(ikbo.rewrite(fn))(CAND, HISTORY)
    np.testing.assert_array_equal(jnp.isnan(original), jnp.isnan(rewritten))


def test_a_product_with_a_cast_mask_of_merged_rows_hides_nan():
    shown = jnp.broadcast_to(KEPT[..., None], HISTORY.shape)

    def fn(cand, history):
        rows = jnp.log(history[INDEX].reshape(B * S, D) - 0.2)
        masked = rows * shown[INDEX].reshape(B * S, D).astype(jnp.float32)
        return masked.reshape(B, S, D).sum(1) @ W + cand

    history = jnp.where(shown & (HISTORY < 0.3), 1, HISTORY)
    check_compiled_hides_nan(fn, CAND, history, 1e-4, 1e-4)


def test_a_sum_with_a_mask_pools_at_user_batch():
    def fn(cand, history):
        rows, mask = history[INDEX], kept()[..., None]
        total = jnp.sum(rows, axis=1, where=mask) / jnp.maximum(mask.sum(1), 1)
        largest = jnp.max(rows, axis=1, where=mask, initial=-10.0)
        mean = jnp.nan_to_num(jnp.mean(rows, axis=1, where=mask))
        return jnp.concatenate([total, largest, mean], -1) @ jnp.tile(W, (3, 1)) + cand

    report, _ = check(fn, CAND, HISTORY)
    assert report.bytes_saved > 0.8 * report.costs.original.nbytes
    assert report.flops_saved > 0.9 * report.costs.original.flops

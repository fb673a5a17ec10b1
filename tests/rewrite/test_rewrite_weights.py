"""Attention weights: masks before the softmax, and what a model does after it.

Masks again, NaN, sums, logarithms.
"""

from typing import Any

import jax
import jax.numpy as jnp
import lookalikes
import numpy as np
import problems
import pytest
from rewrite_basics import both, check_values_and_gradients, largest_outside_ops, report_of
from rounding_rule import Case, assert_same

import ikbo_jax as ikbo

pytestmark = pytest.mark.usefixtures("models_may_promote")

#: Further names of the programs below: logits that are masked, another mask that keeps a key of
#: every user, ages of keys, biases by head and position, the number of a user's keys (0 of the
#: first user), and functions.
NAMES = """
x = L(q) / 2
infinite, finite = jnp.where(M, x, -inf), jnp.where(M, x, -1e9)
other = at < N + 1
of_user = lambda x: x[i].reshape(M.shape)
ages, alibi = (jnp.linspace(0.1, 2, n * S).reshape(-1, S) for n in (U, 4))
age, alibi = of_user(ages), -alibi.reshape(2, 2, S)
count = m.sum(1).astype(f32)[i].reshape(N.shape)
over = lambda p, number: p / (p.sum(-1, keepdims=True) + number)
over_at_least = lambda p, number: p / jnp.maximum(p.sum(-1, keepdims=True), number)
shifted = lambda x: jnp.exp(x - x.max(-1, keepdims=True))
finite_or_0 = lambda x: jnp.where(jnp.isfinite(x), x, 0)
guarded = lambda x: jnp.exp(x - finite_or_0(x.max(-1, keepdims=True)))
lse = lambda x: nn.logsumexp(x, axis=-1, keepdims=True)
end = (q.reshape(B, -1).sum(1) > 0).astype(int).reshape(N.shape) * 2 + i[0] % 2
row = jnp.arange(2)[:, None]
per_head = jnp.array([0.5, 2.0])[:, None, None]
by_head = (jnp.arange(2 * U * S) % 3 > 0).reshape(U, 2, 1, S)[i]
"""
#: Functions of logits that the op computes.
BY_THE_OP = (
    "softmax(x + jnp.where(M, 0.0, -1e9))",
    "softmax(x + of_user(jnp.where(m, 0, -1e9)))",
    "softmax(x + (1.0 - M.astype(f32)) * -1e9)",
    # A bias of the user.
    "softmax(x - 0.1 * age)",
    "softmax(x - of_user(0.1 * ages))",
    "softmax((x + age) / 3)",
    "softmax(2 * jnp.tanh(x / 2) - 0.1 * age)",
    "softmax(x + of_user(jnp.where(m, -0.1 * ages, -1e9)))",
    "softmax(x + of_user(jnp.where(m, -0.1 * ages, -inf)))",
    "softmax(x + of_user(jnp.where(m, 0, jnp.nan)))",
    "(lambda p: jnp.where(jnp.isnan(p), 0, p))(softmax(x + of_user(jnp.where(m, -ages, -inf))))",
    "softmax(jnp.where(M, x - 0.1 * age, -1e9))",
    "softmax(jnp.where(M, x - 0.1 * age, -inf))",
    "softmax(jnp.where(M, x + of_user(jnp.where(m, -ages, -inf)), jnp.finfo(x.dtype).min))",
    "softmax(x + jnp.where(M, 0, -1e9) - 0.1 * age)",
    "softmax(x - 0.1 * age + jnp.where(M, 0, -inf))",
    "softmax(x - 0.1 * age) * jnp.exp(-age)",
    "over(jnp.where(M, softmax(x - 0.1 * age), 0.0), 1e-9)",
    # Masked again.
    "softmax(infinite) * M",
    "softmax(finite) * M",
    "jnp.where(M, softmax(infinite), 0)",
    "jnp.where(M, softmax(finite), 0)",
    "jnp.where(~M, 0, softmax(finite))",
    "jnp.where(M.any(-1, keepdims=True), softmax(infinite), 0)",
    "softmax(infinite) * ~M",
    "jnp.where(M, jnp.where(other, softmax(infinite), 0), 0)",
    "softmax(x) * M",
    "softmax(x + jnp.where(M, 0, -1e9)) * M",
    "jnp.nan_to_num(softmax(infinite))",
    "jnp.nan_to_num(softmax(infinite) * M)",
    "(lambda p: jnp.where(jnp.isnan(p), 0, p))(softmax(infinite))",
    # Scaled, and divided by sums.
    "softmax(finite) * 2 / 3",
    "softmax(finite) * age",
    "softmax(infinite) * M * age / (1 + N)",
    "softmax(x) * jnp.linspace(0, 1, S)",
    "over(softmax(finite) * M, 1e-9)",
    "over(softmax(x) * M, 0)",
    "over(softmax(x) * M, 0.2)",
    "over(softmax(finite) * M, 0)",
    "over(jnp.where(M, softmax(x), 0), 0)",
    "over(3 * (softmax(finite) * M), 0.4)",
    "over_at_least(softmax(finite) * M / 2, 0.9)",
    # Logits below the number that the mask puts in count in the sum.
    "over(softmax(jnp.where(M, 100 * x, -100.0)) * M, 0.4)",
    "over(jnp.exp(x) * M, 0.5)",
    "over_at_least(jnp.exp(x) * M, 0.5)",
    "over(jnp.where(jnp.broadcast_to(M, x.shape), jnp.exp(x), 0), 0)",
    "over(shifted(finite) * M, 1e-9)",
    "over(jnp.where(M, shifted(infinite), 0), 1e-9)",
    "over(guarded(infinite), 1e-9)",
    "over(guarded(infinite), 0)",
    "nn.softmax(x, axis=-1, where=M)",
    "jnp.exp(nn.log_softmax(finite, axis=-1))",
    "jnp.exp(nn.log_softmax(x, axis=-1, where=M))",
    "jnp.exp(infinite - lse(infinite)) * M",
    "over(over(guarded(infinite), 1e-9), 0.5)",
    "over_at_least(over(jnp.where(M, shifted(infinite), 0), 1e-9) / 3, 0.5)",
    "jnp.where(M, softmax(finite) / count, 0)",
    "jnp.where(M, nn.relu(x), 0)",
    "3 * nn.silu(x) * age * M / (1 + N)",
    "x * M / S",
)
#: Functions that another attention would compute; they stay as written.
AS_WRITTEN = (
    "softmax(finite) * C",
    "jnp.where(M, softmax(finite), 1.0)",
    "jnp.nan_to_num(softmax(infinite), nan=5.0)",
    "over(softmax(finite) * other, 1e-9)",
    "softmax(x) * M / ((softmax(x) * other).sum(-1, keepdims=True) + 1e-9)",
    "over(-2 * (softmax(x) * M), 0)",
    "over(softmax(finite) * age, 1e-9)",
    # A number that is added to a sum that is not known.
    "over(shifted(x) * M, 1e-3)",
    "over(shifted(x) * M, 1e-9)",
    "over(shifted(finite), 0.5)",
    "over_at_least(shifted(jnp.where(M, x, 5.0)) * M, 0.5)",
    "over(other * over(guarded(infinite), 1e-9), 0.5)",
    "jnp.nan_to_num(softmax(x) * jnp.where(age == age.min(), jnp.nan, age))",
    "over(shifted(infinite) * other, 1e-9)",
    "over(jnp.exp(x) / 2, 0)",
    "softmax(x) * M + 0.1",
    "stop(softmax(x) * M)",
    "softmax(x) * stop(nn.sigmoid(x))",
    "(softmax(x) * M) ** 2",
    "jnp.exp(nn.log_softmax(x, axis=-1) * 2)",
    "jnp.exp(x - lse(infinite))",
    "over(nn.relu(x) * M, 1e-3)",
    "softmax(x * M)",
)
#: Of logits with heads, and whether the op computes them.
OF_HEADS = {
    "softmax(infinite) * M * per_head": True,
    "jnp.where(M, nn.relu(x), 0) * per_head": True,
    "jnp.where(by_head, softmax(x), 0)": True,
    "jnp.where(by_head, softmax(x + of_user(jnp.where(m, -ages, -inf))), 0)": True,
    "over(jnp.exp(x) * M, 0.3)": True,
    "over(jnp.where(jnp.broadcast_to(M, x.shape), jnp.exp(x), 0), 0)": True,
    "jnp.where(by_head, softmax(infinite), 0)": False,
    # Masks by query and by candidate, that keep intervals of keys; and caps.
    "softmax(jnp.where(jnp.tri(2, S, dtype=bool), x, -1e30))": True,
    "softmax(jnp.where((at <= row + 2) & (at > row), x, -inf))": True,
    "softmax(jnp.where(jnp.ones((2, S), bool).at[1, 3:].set(False), x, -1e30))": True,
    "softmax(x + jnp.triu(jnp.full((2, S), -inf, q.dtype), 1))": True,
    "softmax(x + (1 - jnp.tril(jnp.ones((2, S), q.dtype))) * -1e9)": True,
    "over(softmax(x) * M, 0)": True,
    "softmax(jnp.where(at < end, x, -inf))": True,
    "softmax(x + (1 - (end > at).astype(q.dtype)) * -1e9)": True,
    "softmax(jnp.where((at >= end - 1) & (end + 2 > at), x, -1e30))": True,
    "softmax(jnp.where((at < end) | (at > end + 1), -1e30, x))": True,
    "softmax(jnp.where(at // 2 == end - 1, x, -1e30))": True,
    "softmax(jnp.where((at < N) & (at >= end - 1), x, -1e30))": True,
    "softmax(jnp.where(M & (at >= end), x, -inf))": True,
    "softmax(jnp.where(M.astype(f32) * (at >= end), x, -1e30))": True,
    "softmax(jnp.where(at <= end, jnp.where(M, x, -1e30), -1e30))": True,
    "over_at_least((1 - M) * softmax(x) * 0.5, 0.2)": True,
    "softmax(-3 * jnp.tanh(x / 3))": True,
    "softmax(jnp.where(M, 3 * jnp.tanh(x / 3), -1e30))": True,
    "softmax(3 * jnp.tanh(x / 3) + jnp.where(at < end, 0, -1e9))": True,
    "softmax(x + alibi)": True,
    "softmax(x + alibi[:1, 1:])": True,
    "softmax(x + (ages[:, None] * per_head[:, :, 0])[i][:, :, None])": True,
    "softmax(x + alibi + jnp.where(jnp.tri(2, S, S - 2, dtype=bool), 0, -1e9))": True,
    # A user without keys has NaN gradients, which a select would stop.
    "over(jnp.exp(x) * M, 0)": False,
}


def program(text: str, dtype: str = "float32", heads: bool | None = True) -> Case:
    case = lookalikes.attention(f"{NAMES}out = {text}", dtype, heads)
    return case._replace(name=case.name.removeprefix(NAMES))


def mixed(text: str, *form: Any) -> Case:
    """The program that sums the values with these weights."""
    return program(f"mix(({text}).astype(v.dtype))", *form)


def is_by_the_op(case: Case) -> bool:
    """Whether a program attends by an op; then it copies no keys."""
    with np.errstate(all="ignore"):  # A fill of -1e9 overflows float16.
        explanation = ikbo.explain(ikbo.rewrite(case.fn), *case.args)
    if not {"attention", "gdpa"}.intersection(plan.op for plan in explanation.plans):
        return False
    (report,) = explanation.notes
    assert report.changed, report
    copied = lookalikes.B * lookalikes.S * lookalikes.N * lookalikes.H
    # Without heads, the program has the first head alone.
    heads = 1 if "one query" in case.name or "no heads" in case.name else lookalikes.N
    assert largest_outside_ops(case.fn, *case.args) < copied * heads // lookalikes.N
    return True


@pytest.mark.parametrize("text", [*BY_THE_OP, *AS_WRITTEN])
def test_changed_weights(text: str) -> None:
    """Recognised with one query; values and gradients also with several, with heads in turn."""
    one, turn = mixed(text, "float32", None), [*BY_THE_OP, *AS_WRITTEN].index(text)
    assert is_by_the_op(one) == (text in BY_THE_OP)
    # XLA compiles a product with a mask to a select, which hides NaN.
    check_values_and_gradients(one.fn, *one.args)
    narrow = lookalikes.DTYPES[1 + turn % 2], turn % 4 < 2
    assert_same([mixed(text, "float32", turn % 2 == 0), mixed(text, *narrow)])


@pytest.mark.parametrize("text", OF_HEADS)
def test_changed_weights_of_heads(text: str) -> None:
    assert is_by_the_op(mixed(text)) == OF_HEADS[text]
    assert_same([mixed(text)])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_bias_of_half_precision(dtype: str) -> None:
    """Also where all keys of a user have -1e4, beside which bfloat16 keeps no logit."""
    bias = "of_user(jnp.where(m, -0.1 * ages, -1e4))"
    case = mixed(f"softmax((x.astype({dtype}) + {bias}.astype({dtype})).astype(f32))", "bfloat16")
    assert is_by_the_op(case)
    assert_same([case])


#: Programs with a second mask, which hides some weights after the softmax.
MASKED_AGAIN = (
    "jnp.where(other, softmax(infinite), 0)",
    "jnp.where(at > 0, by_log(jnp.where(at < 3, infinite, -inf)), 0) / (1 + N)",
    "jnp.where(other, softmax(infinite) * age, 0)",
    "jnp.where(other, softmax(jnp.where(M, x - 0.1 * age, -inf)), 0)",
    "jnp.where(other, softmax(x + of_user(jnp.where(m, -ages, -inf))), 0)",
    "jnp.where(M, softmax(x + of_user(jnp.where(m, -ages, -inf))), 0)",
    "jnp.where(at < 4, softmax(x + of_user(jnp.where(m, 0, jnp.nan))), 0)",
    "over(jnp.where(M, softmax(x + of_user(jnp.where(m, 0, jnp.nan))), 0), 0)",
    "over(jnp.where(at < 4, softmax(x + of_user(jnp.where(m, 0, jnp.nan))), 0), 1e-9)",
    "over(jnp.where(at > 0, softmax(x + of_user(jnp.where(m | (at < 1), -ages, -inf))), 0), 0)",
)


@pytest.mark.parametrize("text", MASKED_AGAIN)
def test_another_mask_shows_keys_of_a_user_without_keys(text: str) -> None:
    """The weight of a shown key is NaN, that of a hidden one 0, also in the values' gradients."""
    one = mixed(text, "float32", None)
    assert is_by_the_op(one)
    check_values_and_gradients(one.fn, *one.args)
    assert_same([one, mixed(text), mixed(text, "float32", False)])


@pytest.mark.parametrize(
    "text",
    [
        # The sum of no key's mask.
        "mix(jnp.where(M, nn.relu(x) / count, 0))",
        # Padding may be NaN where an activation and a select hide it.
        "mix(jnp.where(M, nn.relu(jnp.einsum('bh,bsh->bs', q, PADDED)), 0))",
    ],
)
def test_a_select_hides_nan(text: str) -> None:
    """Of values; the original's gradient is NaN."""
    case = program(text.replace("PADDED", "jnp.where(m[..., None], k, jnp.nan)[i]"), heads=None)
    assert is_by_the_op(case)
    rewritten, original = both(case.fn, *case.args)
    assert not np.isnan(original).any()
    np.testing.assert_allclose(rewritten, original, atol=1e-5)


def check_compiled_hides_nan(fn: Any, *args: Any, rtol: float, atol: float) -> None:
    original, rewritten = (jax.jit(f)(*args) for f in (fn, ikbo.rewrite(fn)))
    assert not jnp.isnan(original).any()
    np.testing.assert_allclose(rewritten, original, rtol=rtol, atol=atol)
    assert report_of(fn, *args).changed


#: Products with a mask, and whether the op computes them.
HIDE_NAN = {
    "softmax(infinite) * MASK": True,
    "(softmax(infinite) * MASK) ** 2": False,
    "jnp.exp(x - lse(finite)) * MASK": False,
}


@pytest.mark.parametrize("mask", ["M", "M.astype(f32)"])
@pytest.mark.parametrize("text", HIDE_NAN)
def test_a_product_with_a_cast_mask_hides_nan_as_xla_does(text: str, mask: str) -> None:
    """XLA compiles `x * mask` to a select, also in a softmax that stays as it is written."""
    case = mixed(text.replace("MASK", mask), "float32", None)
    check_compiled_hides_nan(case.fn, *case.args, rtol=1e-7, atol=1e-5)
    check_values_and_gradients(case.fn, *case.args)
    assert is_by_the_op(case) == HIDE_NAN[text]


# As many users as keys, so that a mask and its transpose have one shape.
B, U, D = 192, 8, 16
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))


def random(*shape: int) -> jax.Array:
    return problems.random_array(RNG, shape, "float32") / 2


CAND, HISTORY, W = random(B, D), random(U, U, D), random(D, D)
#: A user without kept keys has candidates.
KEPT = jnp.asarray(RNG.integers(0, 2, (U, U)), bool).at[int(INDEX[0])].set(False)


@pytest.mark.parametrize(
    ("mask", "other"),
    [
        (lambda: KEPT[INDEX], lambda: KEPT.T[INDEX]),
        (lambda: KEPT[1][INDEX][:, None], lambda: KEPT[1][None]),
    ],
)
def test_a_transposed_mask_is_another_one(mask: Any, other: Any) -> None:
    """A softmax with a mask, times another mask of users and keys, over its sum."""

    def fn(cand: Any, history: Any) -> Any:
        logits = jnp.einsum("bd,bsd->bs", cand, history[INDEX]) / 2
        weights = jax.nn.softmax(jnp.where(mask(), logits, -1e9), axis=-1) * other()
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-9)
        return jnp.einsum("bs,bsd->bd", weights, history[INDEX])

    check_values_and_gradients(fn, CAND, HISTORY)
    assert not ikbo.explain(ikbo.rewrite(fn), CAND, HISTORY).plans


def test_a_product_with_a_cast_mask_at_user_batch_hides_nan() -> None:
    def fn(cand: Any, history: Any) -> Any:
        rows = history[INDEX]
        return jnp.log(rows - 5).mean(-1) * KEPT[INDEX] + cand[:, :1]

    original, rewritten = (jax.jit(f)(CAND, HISTORY) for f in (fn, ikbo.rewrite(fn)))
    np.testing.assert_array_equal(jnp.isnan(original), jnp.isnan(rewritten))


def test_a_product_with_a_cast_mask_of_merged_rows_hides_nan() -> None:
    shown = jnp.broadcast_to(KEPT[..., None], HISTORY.shape)

    def fn(cand: Any, history: Any) -> Any:
        rows = jnp.log(history[INDEX].reshape(-1, D) - 0.2)
        masked = rows * shown[INDEX].reshape(-1, D).astype(jnp.float32)
        return masked.reshape(B, U, D).sum(1) @ W + cand

    history = jnp.where(shown & (HISTORY < 0.3), 1, HISTORY)
    check_compiled_hides_nan(fn, CAND, history, rtol=1e-4, atol=1e-4)


def test_a_sum_with_a_mask_pools_at_user_batch() -> None:
    def fn(cand: Any, history: Any) -> Any:
        rows, mask = history[INDEX], KEPT[INDEX][..., None]
        total = jnp.sum(rows, axis=1, where=mask) / jnp.maximum(mask.sum(1), 1)
        largest = jnp.max(rows, axis=1, where=mask, initial=-10.0)
        mean = jnp.nan_to_num(jnp.mean(rows, axis=1, where=mask))
        return jnp.concatenate([total, largest, mean], -1) @ jnp.tile(W, (3, 1)) + cand

    check_values_and_gradients(fn, CAND, HISTORY)
    report = report_of(fn, CAND, HISTORY)
    assert report.bytes_saved > 0.8 * report.costs.original.nbytes
    assert report.flops_saved > 0.9 * report.costs.original.flops

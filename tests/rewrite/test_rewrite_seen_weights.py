"""Attention weights that a rewrite took for others: masks, and relatives of softmax.

`rounding_rule` says what "the same" means, for values and gradients. `test_rewrite_weights` has
what a model does to weights after the softmax.
"""

from lookalike_grammar import MASKS, OF_EXPONENTIALS, RELATIVES, masked, once, weights
from lookalikes import BF16, DTYPES, F16, F32, SOFTMAXES, are_same, attention, every

ADDED = ("x + jnp.where(M, 0, -1e9)", "x + jnp.where(M, 0, 1e4)")


def masks():
    for count, (masked_logits, scale) in enumerate(masked()):
        spelling = SOFTMAXES[count % len(SOFTMAXES)].__name__
        if spelling == "without_max" and (scale in ("x * -1", "x * 30") or "1e4" in masked_logits):
            spelling = "softmax"  # exp would overflow.
        text = weights(masked_logits, scale, f"{spelling}(x)")
        # Two whose gradients of a user without keys are undetermined, and differ by a rounding.
        if scale != "x * 30" or not masked_logits.startswith(ADDED):
            yield attention(text, DTYPES[count % 3], count % 2 == 0)


test_masks_are_judged_where_the_softmax_sees_them = are_same(masks(), 12)


OTHER_MASKS = [
    # Two masks over users without keys.
    "mix(softmax(jnp.where(at < N, jnp.where(M, L(q), -1e9), -1e30)))",
    "mix(softmax(jnp.where(at < N, jnp.where(M, L(q), -1e30), -1e9)))",
    "mix(softmax(jnp.where(at < 3, jnp.where(M, L(q), -inf), -1e9)))",
    "mix(softmax(jnp.where(at < 3, jnp.where(M, L(q), -1e9), -inf)))",
    "mix(softmax(jnp.where(at < N, jnp.where(M, L(q), -1e4), -1e5)))",
    "mix(softmax(jnp.where(M, L(q), -1e4) + jnp.where(at < N, 0, -1e4)))",
    "mix(softmax(jnp.where(at < N, 0.1 * jnp.where(M, L(q), -1e5), -1e5)))",
    # Logits below the fill.
    "mix(softmax(jnp.where(M, L(q) - 3e4, -1e4)))",
    "mix(softmax(jnp.where(M, 1e4 * L(q), -1e4)))",
    "mix(softmax(jnp.where(M, 1e4 * L(q), -2e4) * 1e-3))",
    "mix(softmax(jnp.where(M, L(1e3 * q), -1e4) * 1e-2))",
    # A mask of numbers that are added, and fills that hide little.
    "mix(softmax(L(q) + jnp.where(m, 0.0, -3.0).astype(q.dtype)[i][:, None, None]))",
    "mix(softmax(L(q) + jnp.where(m, 1.0, -1e9).astype(q.dtype)[i][:, None, None]))",
    "mix(softmax(jnp.where(M, L(q), jnp.nan)))",
    "mix(nn.relu(jnp.where(M, L(q), -1e9)))",
    "mix(nn.silu(jnp.where(M, L(q), 0)))",
    # Users without keys, set to 0 afterwards: the gradient is 0, too.
    "jnp.where(m.any(), mix(softmax(jnp.where(M, L(q), -inf))), 0)",
    "jnp.where(m[i].any(-1)[:, None, None, None], mix(softmax(jnp.where(M, L(q), -1e9))), 0)",
    "jnp.where(m[i].any(-1)[:, None, None, None], mix(softmax(jnp.where(M, L(q), -inf))), 0)",
    "mix(softmax(jnp.where(M | ~m.any(-1)[i][:, None, None, None], L(q), -inf)))",
]
NO_KEYS_AT_ALL = [
    "jnp.where(m.any(), mix(softmax(jnp.where(M & False, L(q), -inf))), 0)",
    "jnp.where((m & False).any(), mix(softmax(jnp.where((m & False)[i][:, None, None], L(q),"
    " -inf))), 0)",
]
#: Further masks by a number of each user, which neither the grammar nor `test_lengths` has.
OF_LENGTHS = (
    "at + 1 <= N",
    "at - 1 < N",
    "at * 2 < N",
    "at < N - 1",
    "jnp.arange(S).astype(q.dtype) < N + 0.5",
    "at < jnp.where(N > 2, 4, 1)",
    "at < (2 * n)[i][:, None, None, None]",
    "at < -N",
)
LENGTH_MASKS = [
    weights(f"jnp.where({mask}, x, -1e9)", "softmax(x)") for mask in (*once(MASKS), *OF_LENGTHS)
]


test_other_masks = are_same(
    every(OTHER_MASKS, F32)
    + every(OTHER_MASKS[::2], BF16)
    + every(OTHER_MASKS[1::2], F16)
    + every(NO_KEYS_AT_ALL, DTYPES)
    + every(LENGTH_MASKS, F32)
    + every(LENGTH_MASKS[::4], BF16),
    10,
)


# Relatives of softmax.

OTHERS = [
    "mix(softmax(30 * jnp.tanh(L(q) / 3) / 10))",
    "mix(nn.relu(softmax(L(q)) - 0.1))",
    "mix(jnp.exp(L(q) - nn.logsumexp(2 * L(q), axis=-1, keepdims=True)))",
    "mix(softmax(L(q)).astype(jnp.float8_e4m3fn).astype(q.dtype))",
    "mix(softmax(L(q)), precision='highest')",
    "mix(softmax(L(q, precision='highest').astype(f32))).astype(q.dtype)",
    "mix(softmax(L(q, preferred_element_type=f32)))",
    "mix(softmax(L(q, preferred_element_type=f32)).astype(q.dtype))",
    "mix(softmax(L(q)), preferred_element_type=f32)",
    "mix(nn.silu(L(q, preferred_element_type=f32)).astype(q.dtype))",
    "mix(nn.silu(L(q)), preferred_element_type=f32)",
    *map(weights, (*RELATIVES, *OF_EXPONENTIALS)),
]


# The log of the number of keys is lost beside such a number: weights of a user without keys are 1.
LOST = [
    f"mix(jnp.exp((lambda x: x - nn.logsumexp(x, axis=-1, keepdims=True))({masked})))"
    for masked in (
        "jnp.where(M, L(q), -1e30)",
        "jnp.where(M, L(q), -1e9)",
        "0.5 * jnp.where(M, L(q), -1e5)",
        "jnp.where(M, L(q), -100.0)",
        "jnp.where(M, L(q), -inf)",
        "L(q) + jnp.where(M, 0, -1e9).astype(q.dtype)",
        "jnp.where(at < N, L(q), -1e30)",
    )
]

test_a_log_of_a_sum_beside_a_large_number = are_same(every(LOST), 7)

test_relatives_of_softmax = are_same(every(OTHERS, F32 + BF16), 10)

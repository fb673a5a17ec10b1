"""Attention weights that a rewrite took for others: masks, relatives of softmax, later changes.

`rounding_rule` says what "the same" means, for values and gradients.
"""

from lookalikes import BF16, DTYPES, F16, F32, are_same, attention, every

FILLS = ("-inf", "-1e30", "jnp.finfo(x.dtype).min", "-1e9", "-1e5", "-1e4")
PUT_IN = (
    "jnp.where(M, x, FILL)",
    "jnp.where(~M, FILL, x)",
    "x + jnp.where(M, 0, FILL).astype(x.dtype)",
    "x + (1 - M.astype(x.dtype)) * FILL",
)
SCALED = ("(MASKED)", "(MASKED) * 1e-6", "(MASKED) * 0.5", "(MASKED) * -1", "(MASKED) * 30")
SOFTMAXES = ("softmax", "by_hand", "by_hand_stopped", "without_max", "by_log")


def masks():
    """Every pair of a fill, a spelling of the mask and a scale: half of the triples."""
    triples = [
        (n + m + k // 2, fill, put_in, scaled)
        for n, fill in enumerate(FILLS)
        for m, put_in in enumerate(PUT_IN)
        for k, scaled in enumerate(SCALED)
        if fill != "-inf" or "(1 -" not in put_in  # 0 * inf: all of it is NaN.
    ]
    for count, (turn, fill, put_in, scaled) in enumerate(triples):
        if turn % 2:
            continue
        spelling = SOFTMAXES[count % len(SOFTMAXES)]
        text = scaled.replace("MASKED", put_in).replace("FILL", fill)
        if spelling == "without_max" and ("-1" in scaled or "30" in scaled):
            spelling = "by_hand"  # exp would overflow.
        dtype = DTYPES[count % 3]
        yield attention(f"mix((lambda x: {spelling}({text}))(L(q)))", dtype, count % 2 == 0)


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
    "mix(softmax(L(q) + jnp.where(m, 0.0, -1e9).astype(q.dtype)[i][:, None, None]))",
    "mix(softmax(L(q) + jnp.where(m, 0.0, -3.0).astype(q.dtype)[i][:, None, None]))",
    "mix(softmax(L(q) + jnp.where(m, 1.0, -1e9).astype(q.dtype)[i][:, None, None]))",
    "mix(softmax(jnp.where(M, L(q), -30.0)))",
    "mix(softmax(jnp.where(M, L(q), 1e4)))",
    "mix(softmax(jnp.where(M, L(q), jnp.nan)))",
    "mix(softmax(L(q) * M))",
    "mix(softmax(L(q)) * M)",
    "mix(jnp.where(M, softmax(jnp.where(M, L(q), -inf)), 0))",
    "mix(softmax(jnp.where(M, L(q), -inf), ) * 2)",
    "mix(nn.softmax(L(q), axis=-1, where=M))",
    "mix((lambda e: e / e.sum(-1, keepdims=True))(jnp.exp(L(q)) * M))",
    "mix((lambda e: e / (1e-6 + e.sum(-1, keepdims=True)))(jnp.where(M, jnp.exp(L(q)), 0)))",
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
LENGTH_MASKS = [
    f"mix({spelling}(jnp.where({mask}, L(q), {fill})))"
    for mask, spelling, fill in (
        ("at < N", "softmax", "-1e30"),
        ("at <= N", "softmax", "-1e30"),
        ("at > N", "softmax", "-1e30"),
        ("at >= N", "softmax", "-1e9"),
        ("at == N", "softmax", "-1e9"),
        ("at != N", "by_hand", "-inf"),
        ("N > at", "by_hand", "-1e30"),
        ("N >= at", "softmax", "-1e9"),
        ("N < at", "softmax", "-1e9"),
        ("N <= at", "softmax", "-inf"),
        ("N == at", "softmax", "-1e9"),
        ("at + 1 <= N", "softmax", "-1e9"),
        ("at - 1 < N", "softmax", "-1e9"),
        ("~(at < N)", "softmax", "-1e9"),
        ("at[::-1] < N", "softmax", "-1e9"),
        ("at * 2 < N", "softmax", "-1e9"),
        ("at < N - 1", "softmax", "-1e9"),
        ("(at < N) & (at > 0)", "softmax", "-1e9"),
        ("(at < N) | (at > 3)", "softmax", "-1e9"),
        ("jnp.arange(S).astype(q.dtype) < N + 0.5", "softmax", "-1e9"),
        ("at < jnp.where(N > 2, 4, 1)", "softmax", "-1e9"),
        ("at < (2 * n)[i][:, None, None, None]", "softmax", "-1e9"),
        ("at < -N", "softmax", "-1e9"),
    )
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

RELATIVES = [
    "mix((lambda e: e / (1 + e.sum(-1, keepdims=True)))(jnp.exp(L(q))))",
    "mix((lambda e: e / jnp.maximum(e.sum(-1, keepdims=True), 9))(jnp.exp(L(q))))",
    "mix((lambda e: e / (e.sum(-1, keepdims=True) + 1e-2))(jnp.exp(L(q))))",
    "mix(softmax(30 * jnp.tanh(L(q) / 3) / 10))",
    "mix(softmax(jnp.clip(L(q), -1, 1)))",
    "mix(softmax(L(q) ** 2))",
    "mix(softmax(L(q)) ** 2)",
    "mix(nn.softmax(L(q), axis=-2))",
    "mix(nn.softmax(L(q), axis=1))",
    "mix(nn.softmax(L(q), axis=0))",
    "mix(nn.softmax(L(q), axis=(-1, -2)))",
    "mix(softmax(L(q) / (1 + q[:, :1, :, :1].swapaxes(1, 2) ** 2)))",
    "mix(softmax(L(q) * m[0, 0]))",
    "mix(softmax(L(q) * (n[1] - 4).astype(q.dtype)))",
    "mix(softmax(softmax(L(q))))",
    "mix(nn.log_softmax(L(q), axis=-1))",
    "mix(softmax(-L(q)))",
    "mix(1 - softmax(L(q)))",
    "mix(softmax((lambda x: jnp.where(x >= lax.top_k(x, 2)[0][..., -1:], x, -1e9))(L(q))))",
    "mix((lambda x: softmax(x - x.mean(-1, keepdims=True)))(L(q)))",
    "mix((lambda x: jnp.exp(x - x.max(-1, keepdims=True)))(L(q)))",
    "mix((lambda e: e / e.max(-1, keepdims=True))(jnp.exp(L(q))))",
    "mix((lambda e: e / e.sum())(jnp.exp(L(q))))",
    "mix((lambda e: e / e.sum(-2, keepdims=True))(jnp.exp(L(q))))",
    "mix((lambda e: e / jnp.sum(e ** 2, -1, keepdims=True) ** 0.5)(jnp.exp(L(q))))",
    "mix((lambda e: e / jnp.exp(2 * L(q)).sum(-1, keepdims=True))(jnp.exp(L(q))))",
    "mix(jnp.exp2(L(q)) / jnp.exp2(L(q)).sum(-1, keepdims=True))",
    "mix(nn.relu(softmax(L(q)) - 0.1))",
    "mix(softmax(L(q)) + 0.1)",
    "mix(softmax(nn.relu(L(q))))",
    "mix(jnp.exp(L(q) - nn.logsumexp(2 * L(q), axis=-1, keepdims=True)))",
    "mix(softmax(L(q)).astype(jnp.float8_e4m3fn).astype(q.dtype))",
    "mix(softmax(L(q)), precision='highest')",
    "mix(softmax(L(q, precision='highest').astype(f32))).astype(q.dtype)",
    "mix(softmax(L(q, preferred_element_type=f32)))",
    "mix(softmax(L(q, preferred_element_type=f32)).astype(q.dtype))",
    "mix(softmax(L(q)), preferred_element_type=f32)",
    "mix(nn.silu(L(q, preferred_element_type=f32)).astype(q.dtype))",
    "mix(nn.silu(L(q)), preferred_element_type=f32)",
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

test_relatives_of_softmax = are_same(every(RELATIVES, F32) + every(RELATIVES, BF16), 10)


# Attention weights that are changed after the softmax or the activation.

CHANGED = [
    "mix(softmax(jnp.where(M, L(q), -inf)) * M.astype(q.dtype))",
    "mix(softmax(jnp.where(M, L(q), -1e9)) * M.astype(q.dtype))",
    "mix(jnp.where(M, softmax(jnp.where(M, L(q), -inf)), 0))",
    "mix(jnp.where(~M, 0, softmax(jnp.where(M, L(q), -1e9))))",
    "mix(jnp.where(C, softmax(jnp.where(M, L(q), -1e9)), 0))",
    "mix(jnp.nan_to_num(softmax(jnp.where(M, L(q), -inf))))",
    "mix(jnp.nan_to_num(softmax(L(q))))",
    "mix(softmax(L(q)) * jnp.linspace(0, 2, S).astype(q.dtype))",
    "mix(softmax(L(q)) * M.astype(q.dtype) / N.astype(q.dtype))",
    "mix((lambda p: p / (p.sum(-1, keepdims=True) + 1e-3))(jnp.where(M, softmax(L(q)), 0)))",
    "mix((lambda p: p / p.sum(-1, keepdims=True))(jnp.where(M, softmax(L(q)), 0)))",
    "mix((lambda e: e / (e.sum(-1, keepdims=True) + 0.1))(jnp.where(M, jnp.exp(L(q)), 0)))",
    "mix((lambda e: e / jnp.maximum(e.sum(-1, keepdims=True), 0.1))(jnp.exp(L(q))))",
    "mix(nn.softmax(L(q), axis=-1, where=M))",
    "mix(jnp.exp(nn.log_softmax(jnp.where(M, L(q), -1e9), axis=-1)))",
    "mix(jnp.exp(L(q) - nn.logsumexp(L(q), axis=-1, keepdims=True)))",
    "mix(jnp.where(M, nn.relu(L(q)), 0))",
    "mix(nn.silu(L(q)) * M.astype(q.dtype))",
    "mix(L(q) * M.astype(q.dtype))",
    "mix(jnp.where(M, L(q), 0))",
    "mix(stop(softmax(L(q)) * M.astype(q.dtype)))",
    "mix(softmax(L(q)) * stop(nn.sigmoid(L(q))))",
    "mix(with_slope(lambda x: x, 2.0)(softmax(L(q)) * M.astype(q.dtype)))",
]

test_changed_weights = are_same(every(CHANGED, F32) + every(CHANGED[::2], BF16 + F16), 10)

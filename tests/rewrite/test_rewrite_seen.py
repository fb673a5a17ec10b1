"""Programs that a rewrite took for others, or could not run: each as it was found, and its kin.

`rounding_rule` says what "the same" means, for values and gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookalike_grammar import ACTIVATIONS, changed, once, weights
from lookalikes import (
    BF16,
    CONSUMERS,
    DTYPES,
    F16,
    F32,
    MODES,
    are_same,
    attention,
    every,
    looked_up,
    lookup,
)
from rewrite_basics import share_saved
from rounding_rule import Case, assert_same

import ikbo_jax as ikbo

# 1 to 3: activations that are no known one, stops, and derivatives of their own.

FUNCTIONS = (
    "nn.relu(x)",
    "nn.silu(x)",
    "softmax(x)",
    "nn.gelu(x)",
    "by_hand(x)",
    "nn.relu(x) ** 2",
)
CURVES = [
    *(attention(weights(text, scale=8)) for text in once(ACTIVATIONS)),
    *every(map(weights, once(ACTIVATIONS)), BF16 + F16),
    *every(changed(FUNCTIONS), F32),
    *every(changed(FUNCTIONS[1:]), BF16),
]
test_activations_and_changes_are_not_mistaken = are_same(CURVES, 12)

STOPS = [
    "mix(softmax(L(stop(q))))",
    "mix(softmax(0.5 * stop(2 * L(q))))",
    "mix((lambda x: softmax(jnp.where(M, stop(x), -1e9)))(L(q)))",
    "stop(mix(softmax(L(q)))) + mix(nn.relu(L(q)))",
]
test_derivatives_are_the_original_ones = are_same(every(STOPS, F32 + BF16), 8)


# 5: indices out of bounds.


def every_lookup():
    for count, (mode, consumer) in enumerate((m, c) for m in MODES for c in CONSUMERS):
        yield looked_up(mode, consumer, DTYPES[count % 3] if count % 2 else "float32")


test_indices_out_of_bounds = are_same(every_lookup(), 22)


def test_the_evaluation_is_what_jax_compiles() -> None:
    """The tests above evaluate programs with NumPy: XLA's results obey the same rule."""
    cases = [looked_up(mode, "times") for mode in MODES]
    cases += [looked_up(mode, "attention", "bfloat16") for mode in ("index", "take")]
    cases += every(["mix(softmax(jnp.where(M, L(q), -1e9)))"], F32 + F16)
    cases += every(["mix(nn.silu(L(q)))"], BF16)
    cases += every(["mix(nn.softmax(L(q), axis=-2))", "mix(jnp.minimum(nn.relu(L(q)), 1))"], F16)
    assert_same(cases, compiled=True)


# 10: what changed code did without a test that failed.

CONCATENATIONS = [
    "jnp.concatenate([u[i], c], 1) + jnp.concatenate([c, u[i]], 1)",
    "jnp.concatenate([u[i], c[:, :2]], 1) * jnp.concatenate([c[:, :2], u[i]], 1)",
    "jnp.concatenate([u[i], c], 1) + jnp.concatenate([c[:, :1], u[i], c[:, :3]], 1)",
    "jnp.concatenate([u[i], c], 1) * jnp.concatenate([c, c], 1)",
    "jnp.maximum(jnp.concatenate([u[i], c, c], 1), jnp.concatenate([c, c, u[i]], 1)).sum(1)",
    "jnp.where(jnp.concatenate([u[i], c], 1) > 0, jnp.concatenate([c, u[i]], 1), 0.5) @ w2",
    "(jnp.concatenate([u[i], c], 1) + jnp.concatenate([c, u[i]], 1)) @ w2",
    "(jnp.concatenate([u[i], c], 0) @ w) * jnp.concatenate([c, u[i]], 0)",
    "jnp.concatenate([u[i], c], 1) @ w2 + jnp.concatenate([c, u[i]], 1) @ w2",
    "jnp.stack([u[i], c], 1) + jnp.stack([c, u[i]], 1)",
    "jnp.concatenate([u[i][:, :1], u[i], c[:, :3]], 1) @ w2",
    "lax.select(jnp.concatenate([u[i], c], 1) > 0, *[jnp.concatenate([c, u[i]], 1)] * 2)",
    "jnp.clip(jnp.concatenate([u[i], c], 1), jnp.concatenate([c, u[i]], 1), 1.0)",
    # Rows that may be filled, beside rows that are not.
    "jnp.concatenate([u[i], jnp.take(u, j, axis=0)], 1) @ w2",
    "jnp.concatenate([jnp.take(u, j, axis=0), u[i]], 1) @ w2",
    "jnp.concatenate([jnp.take(u, j, axis=0), u[j]], 1) * 2",
    "jnp.concatenate([u[j], jnp.take(u, j, axis=0)], 1).sum(1)",
    "jnp.concatenate([jnp.take(u, j, axis=0), jnp.take(u, i, axis=0)], 1) @ w2",
    "jnp.concatenate([jnp.take(u, j, axis=0, mode='clip'), jnp.take(u, j, axis=0)], 1) ** 2",
    "jnp.einsum('mk,bkn->bmn', r, jnp.concatenate([jnp.take(e, j, axis=0), e[i][:, :2]], 1))",
    "jnp.einsum('mk,bkn->bmn', r, jnp.concatenate([e[j], jnp.take(e, j, axis=0)[:, :2]], 1))",
    "jnp.take(u, j, axis=0) + u[j]",
    "u[jnp.clip(j, 0, len(u) - 1)] * jnp.take(jnp.sin(u), j, axis=0, mode='clip')",
    "u[jnp.clip(j, 0, len(u) - 2)] * jnp.take(jnp.sin(u), j, axis=0, mode='clip')",
    "jnp.take(u, j, axis=0) * u[i] + c",
]

test_concatenations_of_different_parts = are_same(every(CONCATENATIONS, F32, lookup), 12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_a_user_with_many_candidates_are_summed_in_f32(dtype: str) -> None:
    many = 2000
    i = jnp.zeros(many, jnp.int32)

    def compression(e_user, e_cand, w):
        return jnp.einsum("mk,bkn->bmn", w, jnp.concatenate([e_user[i], e_cand], 1))

    def concatenated(user, cand, w):
        return jnp.concatenate([user[i], cand], 1) @ w

    for fn, sizes, width in (
        (compression, ((2, 1, 2), (many, 1, 2), (1, 2)), 2),
        (concatenated, ((2, 2), (many, 1), (3, 1)), 1),
    ):
        slope = jax.grad(lambda *x, fn=fn: ikbo.rewrite(fn)(*x).astype(jnp.float32).sum(), (0, 2))
        of_user, of_w = slope(*(jnp.ones(s, dtype) for s in sizes))
        np.testing.assert_array_equal(
            of_user.astype(np.float32).reshape(2, 2), [[many] * 2, [0] * 2]
        )
        # Of the compression, both columns of the weight sum two features.
        np.testing.assert_array_equal(of_w.astype(np.float32).reshape(-1)[:2], [width * many] * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_by_parts_are_added_in_f32(dtype: str) -> None:
    """Most of what a user adds is subtracted for the candidate."""
    users, cands = jnp.full((2, 64), 3, dtype), jnp.ones((256, 64), dtype)
    of_user = jnp.ones((64, 8), dtype).at[0].set(1 + 2**-7)
    w = jnp.concatenate([of_user, jnp.full((64, 8), -2 - 63 / 64, dtype)])

    def concatenated(users, cands, w):
        return jnp.concatenate([users[jnp.arange(256) // 128], cands], 1) @ w

    assert share_saved(concatenated, users, cands, w) > 0.4
    out = ikbo.rewrite(concatenated)(users, cands, w)
    np.testing.assert_array_equal(out.astype(np.float32), np.full((256, 8), 1 + 3 / 128))


# 11: what drawn programs did beyond those that every run draws.

OWN_RULE = """
g = jax.custom_jvp(lambda x: jnp.tanh(x))
g.defjvp(lambda x, t: (jnp.tanh(x[0]), RULE))
out = nn.relu(g((u @ w)[i])) * c + jnp.nan_to_num((u @ w)[i])
"""
RULES = [
    "jnp.zeros_like(t[0])",
    "jnp.broadcast_to(jnp.zeros(4), t[0].shape)",
    "jnp.where(x[0] > 0, t[0], 0.0)",
    "lax.scan(lambda s, y: (s, y * 2), 0.0, t[0])[1]",
    "jax.checkpoint(lambda y: y * 2)(t[0])",
    # These do not work row by row.
    "t[0] - t[0].mean(0, keepdims=True)",
    "t[0] * jnp.arange(1.0 * t[0].shape[0])[:, None]",
    "t[0][::-1]",
    "jnp.cumsum(t[0], 0)",
    "t[0] * (jnp.sum(x[0]) > 0).astype(f32)",
]
DERIVED_AFTERWARDS = [
    "x = jnp.take(nn.relu(u @ w), j, axis=0, mode='clip')\n"
    "x = jnp.nan_to_num(nn.relu(x @ w))\nout = x.sum(-1)",
    *(OWN_RULE.replace("RULE", rule) for rule in RULES),
    # A rule that mixes rows, after one of the same shape that is elementwise.
    OWN_RULE.replace("RULE", RULES[-2]).replace(
        "out =", "out = with_slope(jnp.sin, 2.0)((u @ w)[i]) +"
    ),
]


def test_derivatives_hold_no_values_of_the_program_around_them() -> None:
    """JAX takes them when the trace that the program was rewritten in has ended."""
    assert_same(every(DERIVED_AFTERWARDS, F32, lookup))


def test_large_logits_are_compared_by_what_they_determine() -> None:
    text = "x = L(8 * q)\nx = jnp.where(~(at < 3), jnp.finfo(x.dtype).min, x)\n"
    text += "out = mix(softmax(x * 30))"
    by_query = "out = mix(softmax(L(q) * jnp.abs(q[:, :1]).sum()))"
    cases = [attention(text), attention("mix(softmax(L(30 * q)))", "bfloat16")]
    assert_same([*cases, attention(by_query, "bfloat16", False)])


COUNTED = [
    "jnp.cumsum(jnp.zeros(6, int).at[jnp.arange(6)].add(jnp.ones(6, int)))",
    "jnp.cumsum(jnp.zeros(6, int).at[jnp.arange(6)].add(2))",
    "jnp.cumsum(jnp.ones(6, int))",
    "jnp.cumsum(-jnp.ones(6, int))",
    "jnp.where(j < jnp.zeros_like(j), j + U, j)",
    "jnp.where(j < jnp.ones_like(j), j + U, j)",
]


def test_bounds_of_indices_that_are_counted() -> None:
    """Of numbers that are broadcast: every one of them counts."""
    text = "x = jnp.take(u, INDEX, axis=0, mode='MODE')\nout = jnp.tanh(x @ w)"
    texts = [text.replace("INDEX", x).replace("MODE", m) for x in COUNTED for m in ("fill", "clip")]
    cases = every(texts, F32, lookup)
    assert_same(cases)
    assert not any("raised" in str(ikbo.explain(ikbo.rewrite(c.fn), *c.args)) for c in cases)


def test_counts_that_wrap_around_have_no_bounds() -> None:
    rows = jnp.arange(1000.0).reshape(250, 4) / 1000

    def fn(rows, w, marks):
        marks = jnp.zeros_like(marks).at[jnp.arange(200)].add(jnp.ones(200, jnp.int8))
        return jnp.tanh(jnp.take(rows, jnp.cumsum(marks), axis=0, mode="clip") @ w)

    case = Case("int8", fn, (rows, jnp.ones((4, 4)), jnp.ones(400, jnp.int8)))
    assert_same([case])

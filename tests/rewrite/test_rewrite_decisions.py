"""One small program for each decision of `ikbo.rewrite`, which a changed decision makes wrong.

The larger collections draw on the same names; here each program is its own test, so that a failure
names the decision. `tools/mutate_rewrite.py` changes the decisions.
"""

import jax
import numpy as np
import pytest
from lookalikes import U, attention, lookup
from rounding_rule import Case, assert_same

import ikbo_jax as ikbo

#: Each is the original in value and gradient.
ATTENTION = {
    "another slope": "mix(nn.relu(stop(L(q))))",
    "negative logits": "mix((lambda x: jnp.where(x < -40, -1, nn.relu(x)))(L(60 * q)))",
    "stopped probabilities": "mix(stop(softmax(L(q))))",
    "softmax over the queries": "mix(nn.softmax(L(q), axis=-2))",
    "softmax over a dimension of one": "mix(nn.softmax(L(q)[..., None], axis=-1)[..., 0])",
    "sum of other exponentials": "mix(jnp.exp(L(q)) / jnp.exp(2 * L(q)).sum(-1, keepdims=True))",
    "maximum with a number": "mix((lambda x: (lambda e: e / e.sum(-1, keepdims=True))"
    "(jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), 200))))(L(q)))",
    "scaled probabilities": "mix(2 * softmax(L(q)))",
    "number over logits": "mix(softmax(2 / L(q)))",
    "logits over a number": "mix(softmax(L(q) / 3))",
    "fill scaled later": "mix(softmax(jnp.where(M, L(q), -1e5) * 1e-6))",
    "mask the other way round": "mix(softmax(jnp.where(~M, -1e9, L(q))))",
    "mask that leaves out what others keep": "mix(softmax(jnp.where(M, -1e9, L(q))))",
    "logits below the fill": "mix(softmax(jnp.where(M, L(1e5 * q), -2e3)))"
    " + mix(softmax(jnp.where(M, L(-1e5 * q), -2e3)))",
    "two masks": "mix(softmax(jnp.where(at < 3, jnp.where(M, L(q), -1e9), -1e9)))",
    "no keys": "mix(softmax(jnp.where(M, L(q), -inf)))",
    "two fills": "mix(softmax(jnp.where(at < 3, jnp.where(M, L(q), -inf), -1e9)))",
    "a fill that is added": "mix(softmax(L(q) + jnp.where(M, 0, -101.0)))",
    "order of keys": "mix(softmax(jnp.where(M, L(q), -1e9)))",
    "slope of a user without keys": "mix(softmax(L(q) + jnp.where(M, 0, -1e9)))",
    "lengths, at most": "mix(softmax(jnp.where(at <= N, L(q), -1e9)))",
    "lengths, above": "mix(softmax(jnp.where(N < at, L(q), -1e9)))",
    "values of others": "jnp.einsum('bnts,bsnh->btnh', softmax(L(q)), v[i[::-1]])",
    "positions in another order": "mix(softmax(jnp.where(J[:S] < N, L(q), -1e9)))",
}
NOT_RECOGNISED = {
    "maximum of other logits": "mix((lambda x: (lambda e: e / e.sum(-1, keepdims=True))"
    "(jnp.exp(x - (2 * x).max(-1, keepdims=True))))(L(q)))",
    "heads merged first": "jnp.einsum('bms,bsh->bmh', softmax(L(q)).reshape(B, -1, S),"
    " v[i].sum(2))",
    "rounded logits": "mix(softmax(jnp.round(L(q))))",
    "sigmoid": "mix(nn.sigmoid(L(q)))",
    "shifted activation": "mix(nn.gelu(L(q) + 0.1))",
    "gate of a row": "(lambda x: mix(x * nn.sigmoid(x.max(-1, keepdims=True))))(L(q))",
    "gate by other logits": "mix(L(q) * nn.sigmoid(L(q + 1)))",
    "mask before an activation": "mix(nn.relu(jnp.where(C, L(q), -1e9)))",
}
#: What is left as it is, and the reason that the report gives.
LEFT = {
    **{name: (text, "attention is not recognised: ") for name, text in NOT_RECOGNISED.items()},
    "mask by candidate": ("mix(softmax(jnp.where(C, L(q), -1e9)))", "differs by candidate"),
    "cap of masked logits": ("mix(softmax(3 * jnp.tanh(jnp.where(M, L(q), -1e9))))", "not recog"),
    "mask by head": (
        "mix(softmax(jnp.where(jnp.arange(S) <= jnp.arange(2)[:, None, None], L(q), -1e9)))",
        "differs by head",
    ),
    "fill that hides little": ("mix(softmax(jnp.where(M, L(q), -30.0)))", "masked logits are -30"),
    "fill that becomes infinite": (
        "mix(softmax(jnp.where(M, L(q), -1e38) * -1e3))",
        "masked logits become inf",
    ),
    "fill that removes few logits": (
        "mix(softmax((L(q) + jnp.where(M, 0, -1e4)).astype(jnp.bfloat16)))",
        "-9984 is added to its logits",
    ),
    "bias of other logits": (
        "x = L(q)\nout = mix(softmax(x + jnp.sin(x[:, :1])))",
        "slice of its logits",
    ),
    "bias of masked logits": (
        "mix(softmax(jnp.where(M, L(q), -1e9) + n[i][:, None, None, None] * at))",
        "a bias is added to masked logits",
    ),
    "bias of another lookup": (
        "mix(softmax(L(q) + jnp.repeat(n[:, None] * at, B // U, axis=0)[:, None, None]))",
        "not looked up like its keys",
    ),
    "logits also returned": ("x = L(q)\nout = mix(softmax(x)), x", ""),
}
#: Masks by candidate, with a number from 0 to S: two ends, a product, and what may wrap around.
for _mask in ("(at < END) | (at > 3)", "at * END < 3", "at + END < 3"):
    _text = _mask.replace("END", "((q.sum((1, 2, 3)) > 0) * 2 + i[0] % 2)[:, None, None, None]")
    _reason = "not by intervals of keys"
    LEFT[f"mask of {_mask}"] = f"mix(softmax(jnp.where({_text}, L(q), -1e9)))", _reason
LOOKUPS = {
    "bound reached": "jnp.tanh(nn.relu(u[jnp.clip(j, 0, U)] @ w) @ w)",
    "bound kept": "jnp.tanh(nn.relu(u[jnp.clip(j, 0, U - 1)] @ w) @ w)",
    "filled": "jnp.tanh(nn.relu(jnp.take(u, j, axis=0) @ w) @ w)",
    "clamped": "jnp.tanh(nn.relu(jnp.take(u, j, axis=0, mode='clip') @ w) @ w)",
    "dropped": "jnp.tanh(nn.relu(u[j] @ w) @ w)",
    "different parts": "jnp.where(jnp.concatenate([u[i], c[:, :1]], 1) > 0,"
    " jnp.concatenate([c[:, :1], u[i]], 1), 0.5)",
    "two lookups": "jnp.concatenate([u[i], u[i[::-1]]], 1) * 2",
    "positions of other rows": "t[i][jnp.arange(B)[::-1], jnp.argmax(u[i], 1)] * c",
    "positions by another lookup": "t[i][jnp.arange(B), jnp.argmax(u[i[::-1]], 1)] * c",
    "positions out of bounds": "jnp.take_along_axis(t[i], jnp.argmax(u[i], 1)[:, None, None] + 3,"
    " axis=1)[:, 0] * c",
    "rows out of bounds": "t[j, jnp.argmax(u[j], 1)] * c",
    "rows out of bounds that are filled": "t.at[j, jnp.argmax(u[j], 1)].get(mode='fill') * c",
    "an update at positions of other rows": "u[i].at[jnp.arange(B)[::-1], jnp.argmax(u[i], 1)]"
    ".set(2.0) * c",
    "sort along the batch": "jnp.sort(u[i], axis=0) * 2",
    "windows of candidates": "lax.reduce_window(u[i], 0.0, lax.add, (2, 1), (1, 1), 'SAME') * 2",
    "a carry that mixes rows": "lax.scan(lambda h, y: (jnp.tanh(h[::-1] + y), None),"
    " jnp.zeros(B), u[i].T)[0]",
}


def reasons(case: Case) -> list[str]:
    (report,) = ikbo.explain(ikbo.rewrite(case.fn), *case.args).notes
    return [place.reason for place in report.materialised]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    assert_same([attention(ATTENTION[name])])


@pytest.mark.parametrize("name", LEFT)
def test_left_for_a_reason(name: str) -> None:
    text, reason = LEFT[name]
    case = attention(text)
    assert any(reason in found for found in reasons(case)), reasons(case)
    assert_same([case])


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name: str) -> None:
    assert_same([lookup(LOOKUPS[name])])


def test_a_product_with_a_precision_of_its_own_starts_no_attention() -> None:
    case = attention("mix(softmax(L(q, precision='highest')))")
    assert not ikbo.explain(ikbo.rewrite(case.fn), *case.args).plans


def test_a_fixed_position_below_0_is_no_row_from_the_end() -> None:
    """`x[index, -1]` is the last row only because indexing adds the size; a gather clamps it."""

    def fn(x, index):
        last = jax.numpy.full((9,), -1, "int32")
        at = jax.numpy.concatenate([index[:, None], last[:, None]], 1)
        numbers = jax.lax.GatherDimensionNumbers((1,), (0, 1), (0, 1))
        return jax.lax.gather(x, at, numbers, (1, 1, 4), mode="clip") * 2

    x = jax.numpy.arange(U * 2 * 4, dtype="float32").reshape(U, 2, 4)
    index = jax.numpy.asarray(np.arange(9, dtype=np.int32) % U)
    np.testing.assert_array_equal(ikbo.rewrite(fn)(x, index), fn(x, index))
    (report,) = ikbo.explain(ikbo.rewrite(fn), x, index).notes
    assert "raised" not in str(report)

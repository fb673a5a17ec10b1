"""Spellings of attention that are right stay recognised, each as itself, in every dtype.

What is left as it is, with the reasons, stands in `test_rewrite_decisions`.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookalikes import INDEX, KEPT, KEY, LENGTHS, QUERY, VALUE, B, H, N, S, T, attention
from rounding_rule import Case, assert_same

import ikbo_jax as ikbo

pytestmark = pytest.mark.usefixtures("models_may_promote")

DTYPES = ("float32", "bfloat16", "float16")
EACH_DTYPE = ("float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:]))
#: Of gdpa's activations, in the programs that people write.
ACTIVATIONS = {
    "mix(nn.silu(L(q)))": "silu",
    "mix(nn.silu(L(q) * 0.5) / S)": "silu",
    "mix((lambda x: x * nn.sigmoid(x))(L(q)))": "silu",
    "mix((lambda x: x / (1 + jnp.exp(-x)))(L(q)))": "silu",
    "mix(nn.gelu(L(q)))": "gelu_tanh",
    "mix(nn.gelu(0.5 * L(q)) * 0.25)": "gelu_tanh",
    "mix(nn.gelu(L(q), approximate=False))": "gelu",
    "mix((lambda x: 0.5 * x * (1 + lax.erf(x / 2**0.5)))(L(q)))": "gelu",
    "mix(nn.relu(L(q)))": "relu",
    "mix(nn.relu(8 * L(q)) / S)": "relu",
    "mix(jnp.maximum(L(q), 0))": "relu",
    "mix(nn.relu(L(q)) ** 2)": "relu_squared",
    "mix(jnp.square(nn.relu(L(q) * 0.5)))": "relu_squared",
    "mix(nn.leaky_relu(L(q)))": "leaky_relu",
    "mix(nn.leaky_relu(L(q) * 0.5))": "leaky_relu",
    "mix(nn.hard_swish(L(q)))": "hardswish",
}
#: A bias by head and position.
ALIBI = -np.linspace(0.1, 1, N * T * S, dtype=np.float32).reshape(1, N, T, S)
SOFTMAXES = [
    "mix(softmax(L(q) * 0.5))",
    "mix(softmax(L(0.5 * q)))",
    "mix(softmax(0.5 * jnp.where(M, L(q), -1e30)))",
    "mix(softmax(jnp.where(~M, -1e9, L(q))))",
    "mix(softmax(jnp.where(M, L(q), -inf)))",
    "mix(softmax(jnp.where(M, L(q), jnp.finfo(q.dtype).min)))",
    "mix(softmax(jnp.where(at < N, L(q), -1e30)))",
    "mix(softmax(jnp.where(N > at, L(q) * 0.5, -1e9)))",
    "mix(softmax(jnp.where(jnp.arange(S) < 4, L(q), -1e9)))",
    "mix(softmax(jnp.where(at < N, jnp.where(M, L(q), -1e9), -1e9)))",
    "mix(softmax(L(q) + jnp.where(M, 0.0, -1e4)))",
    "mix(without_max(L(q)))",
    "mix(nn.softmax(L(q).astype(f32), axis=-1).astype(q.dtype))",
    "mix(by_hand(jnp.where(M, L(q), -1e9)))",
    "mix(by_hand_stopped(jnp.where(M, L(q), -1e9)))",
]


def _args(dtype: str) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x).astype(dtype) for x in (QUERY, KEY, VALUE))


def became(case: Case, op: str) -> ikbo.Explanation:
    """Asserts that a program became an op and copies nothing; returns the explanation."""
    with np.errstate(all="ignore"):
        explanation = ikbo.explain(ikbo.rewrite(case.fn), *case.args)
    (report,) = explanation.notes
    texts = [text for found in report.broadcasts for text in found.became]
    assert any(text.startswith(f"{op}, ") for text in texts), f"{case.name}\n{report}"
    assert report.materialised == (), f"{case.name}\n{report}"
    return explanation


def check_activations(cases: Iterable[Case], names: Iterable[str]) -> None:
    for case, name in zip(cases, names, strict=True):
        found = [plan.problem.activations for plan in became(case, "gdpa").plans]
        assert found == [(name,)], f"{case.name}: {found}"


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_activations_are_recognised_each_as_itself(dtype: str) -> None:
    cases = [attention(text, dtype) for text in ACTIVATIONS]
    check_activations(cases, ACTIVATIONS.values())
    assert_same(cases[:: 1 if dtype == "float32" else 3])


def test_scales_of_an_activation_are_kept() -> None:
    """Negative ones as well: relu(-x) is an activation of -x, not of x."""
    texts = {
        "mix(nn.relu(-L(q)))": "relu",
        "mix(-nn.relu(L(q)))": "relu",
        "mix(nn.silu(-2 * L(q)) * -3)": "silu",
        "mix(nn.gelu(L(q) / -3))": "gelu_tanh",
        "mix(nn.relu(L(q) * 1e-3) ** 2 * 1e3)": "relu_squared",
        "mix(nn.hard_swish(1e-4 * L(q)) * 1e4)": "hardswish",
    }
    check_activations(map(attention, texts), texts.values())
    assert_same([attention(text, dtype) for text in texts for dtype in DTYPES[:2]])


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_masked_softmax_is_recognised(dtype: str) -> None:
    # -1e9 and -1e30 are infinite in float16, where a user without keys has NaN. Beside -1e4, some
    # bits of a bfloat16 logit are left, some are not: that is no attention of the op's.
    cases = [attention(text, dtype, heads=n % 2 == 0) for n, text in enumerate(SOFTMAXES)]
    if left_out := {"bfloat16": "1e4", "float16": "1e"}.get(dtype):
        cases = [case for case in cases if left_out not in case.name]
    for case in cases:
        became(case, "attention")
    assert_same(cases)


def test_keys_are_put_in_order_only_if_the_mask_is_no_length() -> None:
    def sorts(fn, *args) -> int:
        return str(jax.make_jaxpr(fn)(*args)).count(" sort[")

    # Of the candidates, by user.
    of_the_op = sorts(ikbo.attention, *_args("float32"), jnp.asarray(INDEX))
    assert of_the_op == 1
    for mask, of_keys in (("at < N", 0), ("M", 1)):
        case = attention(f"mix(softmax(jnp.where({mask}, L(q), -1e30)))")
        assert sorts(ikbo.rewrite(case.fn), *case.args) == of_keys + of_the_op


@pytest.mark.parametrize("rows", ["X[j]", "jnp.take(X, j, axis=0)"])
@pytest.mark.parametrize("take", ["X[j]", "X.at[j].get(mode='fill', fill_value=2)"])
def test_keys_out_of_bounds_are_recognised(rows: str, take: str) -> None:
    """Values, masks and biases may be looked up by the same index in another spelling."""
    texts = [
        "softmax(L(q))",
        "softmax(jnp.where(TAKE(m)[:, None, None] | (at < 1), L(q), -inf))",
        "softmax(jnp.where(at <= TAKE(n)[:, None, None, None], L(q), -1e9)) / 2",
        "softmax(L(q) + TAKE(v)[:, :, 0, 0][:, None, None])",
        "softmax(L(q)) * TAKE(m)[:, None, None]",
    ]
    codes = [f"jnp.einsum('bnts,bsnh->btnh', {text}, TAKE(v))" for text in texts]
    cases = [attention(x.replace("TAKE", f"(lambda X: {take})"), rows=rows) for x in codes]
    for case in cases:
        became(case, "attention")
    assert_same(cases)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_attention_of_jax_and_under_vmap(dtype: str) -> None:
    def masked(q, k, v, i, kept, scale=None):
        mask = kept[i][:, None, None, :]
        return jax.nn.dot_product_attention(q, k[i], v[i], mask=mask, scale=scale)

    def with_lengths(q, k, v, i, lengths):
        return jax.nn.dot_product_attention(q, k[i], v[i], key_value_seq_lengths=lengths[i])

    def biased(q, k, v, i, bias, by_user=False, mask=None):
        bias = bias[i][:, None, None] if by_user else bias
        mask = None if mask is None else mask[i][:, None, None]
        return jax.nn.dot_product_attention(q, k[i], v[i], bias=bias, mask=mask)

    def of_one_key_head(q, k, v, i):
        return jax.nn.dot_product_attention(q, k[i][:, :, :1], v[i][:, :, :1])

    def of_one_user(q, k, v):
        copies = (jnp.broadcast_to(x[:1], (B, S, N, H)) for x in (k, v))
        return jax.nn.dot_product_attention(q, *copies)

    def of_candidates_under_vmap(q, k, v, i):
        def one(query, user):
            logits = jnp.einsum("tnh,snh->nts", query, k[user]) / H**0.5
            return jnp.einsum("nts,snh->tnh", jax.nn.softmax(logits, axis=-1), v[user])

        return jax.vmap(one)(q, i)

    def of_tasks_under_vmap(q, k, v, i):
        """The tasks have their own queries and keys, of one head each, and share the values."""

        def task(query, key):
            logits = jnp.einsum("bth,bsh->bts", query, key[i])
            return jax.nn.softmax(logits, axis=-1) @ v[i][:, :, 0]

        return jax.vmap(task, in_axes=(2, 2), out_axes=2)(q, k)

    # With a key for each user: what jax.nn makes of a user without keys is another test's matter.
    kept, lengths = jnp.asarray(KEPT).at[0, 1].set(True), jnp.asarray(LENGTHS).at[0].set(1)
    index = jnp.asarray(INDEX)
    cases = [
        Case("mask", masked, (*_args(dtype), index, kept)),
        Case("lengths", with_lengths, (*_args(dtype), index, lengths)),
        Case("scale", functools.partial(masked, scale=0.2), (*_args(dtype), index, kept)),
        Case("one user", of_one_user, _args(dtype)),
        *(
            Case(f"bias {n}", fn, (*_args(dtype), index, bias.astype(dtype)))
            for n, (fn, bias) in enumerate(
                [
                    (biased, ALIBI[:, :1, :1]),
                    (biased, ALIBI),
                    (functools.partial(biased, by_user=True), KEY[..., 0, 0]),
                    (functools.partial(biased, by_user=True, mask=kept), KEY[..., 0, 0]),
                ]
            )
        ),
        *(
            Case(fn.__name__, fn, (*_args(dtype), index))
            for fn in (of_one_key_head, of_candidates_under_vmap, of_tasks_under_vmap)
        ),
        Case("users without keys", masked, (*_args(dtype), index, jnp.asarray(KEPT))),
        Case("lengths of 0", with_lengths, (*_args(dtype), index, jnp.asarray(LENGTHS))),
    ]
    for case in cases[:-2]:
        became(case, "attention")
    assert_same(cases)

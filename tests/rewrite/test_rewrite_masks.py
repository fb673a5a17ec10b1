"""Masks and soft caps of a sequence [history, candidates] that attends to itself.

As models write them, they are recognised, and equal in value and gradient. `test_rewrite_weights`
has masks of candidates' queries that attend to looked-up keys.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite_basics import check_values_and_gradients, share_saved, useful_flops

import ikbo_jax as ikbo
from ikbo_jax.rewrite.attention import block_attention
from ikbo_jax.rewrite.facts import masks


def explained(fn, *args):
    explanation = ikbo.explain(ikbo.rewrite(fn), *args)
    (report,) = explanation.notes
    return [plan.op for plan in explanation.plans], [x.reason for x in report.materialised]


B, U, S, C, N, H = 8, 2, 5, 3, 2, 4
D, L = N * H, S + C
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(np.sort(np.arange(B) % U).astype(np.int32))
HISTORY, CANDIDATES = (RNG.standard_normal(x, np.float32) / 2 for x in ((U, S, D), (B, C, D)))
WEIGHTS = RNG.standard_normal((4, D, D), np.float32) / 4
LENGTHS, STARTS = jnp.asarray([[3, S], [S, 2]], jnp.int32)
AT = jnp.arange(L)


def recsys_mask():
    """A causal history, and candidates that see the history and themselves."""
    mask = jnp.tril(jnp.ones((1, 1, L, L)))
    mask = mask.at[:, :, S:, S:].set(0)
    own = jnp.arange(S, L)
    return mask.at[:, :, own, own].set(1)


def valid(x, at_least_one=True, dtype=bool):
    lengths = jnp.maximum(x.lengths, 1) if at_least_one else x.lengths
    history = jnp.arange(S)[None] < lengths[x.index][:, None]
    history, own = history.astype(dtype), jnp.ones((B, C), dtype)
    return jnp.concatenate([history, own], axis=1)[:, None, None]


def padded(x, without=None):
    """Which tokens are no padding, which comes first; the first user has padding alone.

    So are the candidates of the user `without`.
    """
    history = jnp.arange(S)[None] >= STARTS[x.index][:, None]
    own = jnp.ones((B, 1), bool) if without is None else (x.index != without)[:, None]
    return jnp.concatenate([history, jnp.broadcast_to(own, (B, C))], axis=1)


def pairs(x, **kwargs):
    """As Flax's `make_attention_mask` of the same tokens of queries and keys."""
    kept = padded(x, **kwargs).astype("float32")
    return (kept[:, None, :, None] * kept[:, None, None, :]) != 0


def masked(mask, fill=-1e30, cap=None):
    def attend(x):
        logits = jnp.einsum("btnh,bsnh->bnts", x.q, x.k)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        logits = jnp.where(mask(x), logits, fill)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), x.v)

    return attend


def biased(bias):
    def attend(x):
        logits = jnp.einsum("btnh,bsnh->bnts", x.q, x.k) + bias(x)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), x.v)

    return attend


def grouped(x):
    """As in Phoenix: two query heads of a key head, a cap, and padding that sees itself alone."""
    q, k, v = x.q[:, :, None], x.k[:, :, :1], x.v[:, :, :1]
    logits = 2 * jnp.tanh(jnp.einsum("btgnh,bsgh->bgnts", q, k) / 2)
    seen = jnp.maximum(valid(x, False).astype("float32") * recsys_mask(), jnp.eye(L)[None, None])
    weights = jax.nn.softmax(jnp.where((seen != 0)[:, :, None], logits, -1e30), axis=-1)
    return jnp.einsum("bgnts,bsgh->btgnh", weights, v)[:, :, 0]


def of_jax(**kwargs):
    return lambda x: jax.nn.dot_product_attention(x.q, x.k, x.v, **kwargs)


CAUSAL = (AT[:, None] >= AT[None])[None, None]
SEQUENCES = {
    "tri": masked(lambda x: jnp.tri(L, dtype=bool)[None, None], -jnp.inf),
    "window": masked(lambda x: CAUSAL & (AT[:, None] - AT[None] < 4)[None, None]),
    "is_causal": of_jax(is_causal=True),
    "local_window_size": of_jax(is_causal=True, local_window_size=(4, 0)),
    "at set": masked(lambda x: recsys_mask()),
    "at set, cap": masked(lambda x: recsys_mask() > 0, cap=2.0),
    "triu bias": biased(lambda x: jnp.triu(jnp.full((L, L), -jnp.inf), 1)[None, None]),
    "1 - mask": biased(lambda x: -1e9 * (1 - recsys_mask())),
    "lengths": masked(lambda x: CAUSAL & valid(x)),
    "left padding": masked(lambda x: CAUSAL & padded(x)[:, None, None]),
    "left padding, pairs": masked(lambda x: CAUSAL & pairs(x), -1e9),
    "left padding, jitted": lambda x: jax.jit(
        lambda q, k, v, i: masked(lambda x: CAUSAL & padded(x)[:, None, None], -1e9)(
            types.SimpleNamespace(q=q, k=k, v=v, index=i)
        )
    )(x.q, x.k, x.v, x.index),
    "left padding, added": biased(lambda x: jnp.where(CAUSAL & padded(x)[:, None, None], 0, -1e9)),
    "lengths, window": masked(lambda x: CAUSAL & valid(x) | jnp.eye(L, dtype=bool)[None, None]),
    "padding times mask": masked(lambda x: valid(x).astype("float32") * recsys_mask(), cap=2.0),
    "numbers times mask": masked(lambda x: valid(x, dtype="float32") * recsys_mask(), cap=2.0),
    "grouped heads": grouped,
    "repeated heads": lambda x: masked(lambda x: CAUSAL)(
        types.SimpleNamespace(**{name: jnp.repeat(getattr(x, name), 2, axis=2) for name in "qkv"})
    )[:, :, ::2],
    "ends by candidate": masked(
        lambda x: CAUSAL & ((AT[None] < x.ends[:, None]) | (AT[None] >= S))[:, None, None]
    ),
}


def model(attend, layers=2, whole=False):
    def fn(history, candidates, weights, index, lengths, ends):
        x = jnp.concatenate([history[index], candidates], axis=1)
        for _ in range(layers):
            q, k, v = ((x @ w).reshape(B, L, N, H) for w in weights[:3])
            request = types.SimpleNamespace(q=q, k=k, v=v, index=index, lengths=lengths, ends=ends)
            x = x + jnp.tanh(attend(request).reshape(x.shape) @ weights[3])
        return x if whole else x[:, S:]

    return fn


ENDS = jnp.asarray(RNG.integers(0, S + 1, B), jnp.int32)
ARGS = (HISTORY, CANDIDATES, WEIGHTS, INDEX, LENGTHS, ENDS)


@pytest.mark.parametrize("name", SEQUENCES)
def test_masks_of_a_sequence(name: str) -> None:
    fn = model(SEQUENCES[name])
    with jax.numpy_rank_promotion("allow"):
        check_values_and_gradients(fn, *ARGS, bound=3e-5)
        ops, reasons = explained(fn, *ARGS)
    if name == "ends by candidate":
        # The ends hide keys from the history's queries, which so differ by candidate.
        assert ops == []
        return
    assert ops == ["attention", "attention"], reasons
    # History's queries, projections and attention run for users, not for candidates.
    assert share_saved(fn, *ARGS) > 0.4


def test_a_history_that_sees_the_candidate(monkeypatch) -> None:
    """As in BERT4Rec: the first layer's history attends to itself for users, no other layer's."""
    monkeypatch.setattr(block_attention, "FEW_KEYS", 0)
    layers = 3
    fn = model(masked(lambda x: valid(x)), layers)
    check_values_and_gradients(fn, *ARGS, bound=3e-5)
    (_, reasons), (original, ours) = explained(fn, *ARGS), useful_flops(fn, *ARGS)
    assert any("as in every later layer" in reason for reason in reasons), reasons
    first_layer = 3 * 2 * S * D * D + 2 * 2 * S * S * D
    assert original - ours >= (B - U) * first_layer


#: What reads rows of padding, or may: of a padded sequence x of two layers.
READERS = {
    "all": lambda x, mask: x,
    "a padded row": lambda x, mask: x[:, 1],
    "mean": lambda x, mask: x.mean(1),
    "rows in order": lambda x, mask: jnp.cumsum(x, axis=1)[:, S:],
    "other masks": lambda x, mask: jnp.einsum("bs,bsd->bd", (~mask).astype(x.dtype), x),
    "unmasked": lambda x, mask: jnp.einsum(
        "bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)), x
    )[:, S:],
    "reversed": lambda x, mask: (x + x[:, ::-1])[:, S:],
    # This reads none.
    "norm": lambda x, mask: jax.nn.standardize(x)[:, S:],
}


@pytest.mark.parametrize(
    ("name", "without"),
    [*((name, None) for name in READERS), ("mean", 0), ("norm", 0), ("norm", 1)],
)
def test_rows_of_padding_differ_only_if_nothing_reads_them(name: str, without: Any) -> None:
    """Of candidates that are padding, those of the user without history keep no key."""

    attend = masked(lambda x: CAUSAL & padded(x, without)[:, None, None], -1e9)

    def fn(history, candidates, weights, index, lengths, ends):
        x = model(attend, whole=True)(history, candidates, weights, index, lengths, ends)
        return READERS[name](x, padded(types.SimpleNamespace(index=index), without))

    with jax.numpy_rank_promotion("allow"):
        check_values_and_gradients(fn, *ARGS, bound=3e-5)
        ops, reasons = explained(fn, *ARGS)
    if name == "norm":
        assert ops == ["attention", "attention"], reasons


def test_intervals_of_rows() -> None:
    rows = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], bool)
    assert masks.are_intervals(rows)
    assert not masks.are_intervals(np.array([[1, 0, 1, 1]], bool))

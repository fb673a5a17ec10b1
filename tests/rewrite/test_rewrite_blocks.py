"""Attention over [history, candidate]: programs with many masks, fills and softmaxes.

`rounding_rule` compares values and gradients. What must be recognised is listed, too.
"""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookalikes import by_hand, by_hand_stopped, without_max
from rewrite_basics import became, report_of
from rounding_rule import Case, assert_same

from ikbo_jax.rewrite.attention import block_attention

B, U, S, C, N, H = 7, 3, 4, 2, 2, 4
RNG = np.random.default_rng(0)
HISTORY = RNG.standard_normal((U, S, N, H), np.float32)
OWN = RNG.standard_normal((B, C, N, H), np.float32)
SCALES = RNG.uniform(0.5, 1.5, (3, N, H)).astype(np.float32)
INDEX = np.array([1, 0, 2, 2, 0, 2, 1], np.int32)
#: The first user has no valid token.
VALID = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]], bool)
L = S + C
ROWS, COLUMNS = np.mgrid[:L, :L]
SELF = np.eye(L, dtype=bool)[None, None]
#: Own tokens see the history and themselves.
ISOLATED = (COLUMNS <= ROWS) & ((COLUMNS < S) | (COLUMNS == ROWS))


@pytest.fixture(autouse=True)
def attends_to_few_keys(monkeypatch):
    """As with many keys: the models of this file have six."""
    monkeypatch.setattr(block_attention, "FEW_KEYS", 0)


def _valid(index, valid):
    return jnp.concatenate([valid[index], jnp.ones((B, C), bool)], axis=1)[:, None, None, :]


def _own_may_be_hidden(index, valid):
    """Some candidates of the user without a valid token keep no key, either."""
    own = jnp.broadcast_to((jnp.arange(B) % 2 == 0)[:, None], (B, C))
    return jnp.concatenate([valid[index], own], axis=1)[:, None, None, :]


#: By name: what an attention may see, of the index and the valid tokens of users.
MASKS: dict[str, Any] = {
    "none": lambda i, v: None,
    "tril": lambda i, v: jnp.tril(jnp.ones((L, L), bool))[None, None],
    "traced": lambda i, v: (jnp.arange(L)[:, None] >= jnp.arange(L)[None])[None, None],
    "constant": lambda i, v: (COLUMNS <= ROWS)[None, None],
    "strict": lambda i, v: (COLUMNS < ROWS)[None, None],
    "reversed": lambda i, v: (COLUMNS >= ROWS)[None, None],
    "isolated": lambda i, v: ISOLATED[None, None],
    "prefix": lambda i, v: ((COLUMNS < S) | (COLUMNS == ROWS))[None, None],
    "contextual": lambda i, v: (ISOLATED | ((ROWS < 2) & (COLUMNS < S)))[None, None],
    "whole_history": lambda i, v: (ISOLATED | ((ROWS < S) & (COLUMNS < S)))[None, None],
    "only_own": lambda i, v: ((COLUMNS < S) == (ROWS < S))[None, None],
    "leak": lambda i, v: ((COLUMNS <= ROWS) | ((ROWS == 1) & (COLUMNS == S)))[None, None],
    "banded": lambda i, v: ((COLUMNS <= ROWS) & (COLUMNS > ROWS - 3))[None, None],
    "valid": _valid,
    "own_may_be_hidden": _own_may_be_hidden,
    "valid_and_strict": lambda i, v: _valid(i, v) & (COLUMNS < ROWS)[None, None],
    "valid_and_causal": lambda i, v: _valid(i, v) & jnp.tril(jnp.ones((L, L), bool))[None, None],
    "valid_or_self": lambda i, v: (_valid(i, v) | SELF) & (COLUMNS <= ROWS)[None, None],
    "by_head": lambda i, v: np.stack([COLUMNS <= ROWS, COLUMNS >= ROWS])[None],
    "by_candidate": lambda i, v: (jnp.arange(B * L).reshape(B, 1, 1, L) % 5 > 1) | SELF,
}
FILLS = ("-jnp.inf", "-1e30", "-1e9", "-1e4", "-3.0", "jnp.finfo(x.dtype).min")
PUT_IN = {
    "where": lambda x, mask, fill: jnp.where(mask, x, fill),
    "not_where": lambda x, mask, fill: jnp.where(~mask, fill, x),
    "add": lambda x, mask, fill: x + jnp.where(mask, 0, fill).astype(x.dtype),
    "scaled": lambda x, mask, fill: jnp.where(mask, x, fill) * 0.5,
    "twice": lambda x, mask, fill: jnp.where(mask, jnp.where(mask, x, fill), fill * 2),
}
SOFTMAXES = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "by_hand": by_hand,
    "stopped": by_hand_stopped,
    "without_max": without_max,
    "over_queries": lambda x: jax.nn.softmax(x, axis=-2),
    "squared": lambda x: jax.nn.softmax(x, axis=-1) ** 2,
    "f32": lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype),
}
#: Weights of the logits x and the mask m; after the first two, no softmax.
POINTWISE = {
    "masked_softmax": lambda x, m: jax.nn.softmax(x, axis=-1, where=m),
    "masked_again": lambda x, m: jax.nn.softmax(jnp.where(m, x, -1e9), axis=-1) * m.astype(x.dtype),
    "hstu": lambda x, m: jax.nn.silu(x) / L * m.astype(x.dtype),
    "by_sigmoid": lambda x, m: x * jax.nn.sigmoid(x) / L * m.astype(x.dtype) * 2.0,
    "where_silu": lambda x, m: jnp.where(m, jax.nn.silu(x), 0) * 0.125,
    "where_first": lambda x, m: jax.nn.silu(jnp.where(m, x, 0)),
    "gelu": lambda x, m: jnp.where(m, jax.nn.gelu(x * 0.5), 0),
    "relu": lambda x, m: jax.nn.relu(x) * m.astype(x.dtype),
    "squared_relu": lambda x, m: jnp.where(m, jnp.square(jax.nn.relu(x)), 0),
    "maximum": lambda x, m: jnp.maximum(x, 0) * m.astype(x.dtype),
    "sigmoid": lambda x, m: jnp.where(m, jax.nn.sigmoid(x), 0),
    "one_less": lambda x, m: jnp.where(m, jax.nn.silu(x), -1),
    "transposed": lambda x, m: (
        jax.nn.silu(x).transpose(0, 1, 3, 2) * m.astype(x.dtype).transpose(0, 1, 3, 2)
    ).transpose(0, 1, 3, 2),
    "biased": lambda x, m: (
        jax.nn.silu(x + jnp.asarray(COLUMNS - ROWS, x.dtype)[None, None] / 9) * m.astype(x.dtype)
    ),
    "linear": lambda x, m: x * m.astype(x.dtype),
    "minus": lambda x, m: jax.nn.silu(x) - (1 - m.astype(x.dtype)),
}


#: Logits with a mask and a bias: of the ages of keys [B, 1, 1, L], and of a table [1, N, L, L].
BIASED = {
    "table": lambda x, m, ages, table: jnp.where(
        m,
        x + table.reshape(-1, N)[:5][np.clip(ROWS - COLUMNS, 0, 4)].transpose(2, 0, 1)[None],
        -1e9,
    ),
    "subtracted": lambda x, m, ages, table: jnp.where(m, x - table, -jnp.inf),
    "after a temperature": lambda x, m, ages, table: jnp.where(m, x / table[:, :, :1, :1], -1e9),
    "alibi": lambda x, m, ages, table: jnp.where(m, x - np.abs(np.float32(COLUMNS[:1] - S)), -1e30),
    "age of keys": lambda x, m, ages, table: jnp.where(m, x - ages, -1e9),
    "scaled sum of several": lambda x, m, ages, table: jnp.where(m, (x + table - ages) / 2, -1e9),
    "after an added mask": lambda x, m, ages, table: x + jnp.where(m, 0, -1e9) + table,
    "before an added mask": lambda x, m, ages, table: x + table + jnp.where(m, 0, -1e9),
    "an added mask before": lambda x, m, ages, table: jnp.where(
        m, x + jnp.where(ages > 1.5, -1e9, 0.0), 0.7 * jnp.finfo(x.dtype).min
    ),
    "a lower added mask before": lambda x, m, ages, table: jnp.where(
        m, x + jnp.where(ages > 1.5, -jnp.inf, 0.0), -1e30
    ),
    "that holds the mask": lambda x, m, ages, table: x + jnp.where(m, table / 2, -1e9),
    "summed with the mask": lambda x, m, ages, table: x + (table - ages + jnp.where(m, 0, -1e9)),
    "after a cap": lambda x, m, ages, table: jnp.where(m, 5 * jnp.tanh(x / 5) + table, -1e9),
    # Masks alone, as a number that is added, whose dimensions another one lacks.
    "a mask in a mask": lambda x, m, *_: x + jnp.where(SELF, 0.0, jnp.where(m, 0.0, -1e9)),
    "a mask outside a mask": lambda x, m, *_: x + jnp.where(m, 0.0, jnp.where(SELF, 0.0, -1e9)),
    "a product": lambda x, m, *_: x + (1.0 - m.astype(x.dtype)) * -1e9,
    "a lifted mask": lambda x, m, *_: x + jnp.where(m[:, None], 0.0, -1e9).squeeze(1),
    "two dimensions": lambda x, m, *_: x + jnp.where(COLUMNS <= ROWS, 0.0, -1e9)[None, None],
    "by candidate": lambda x, m, ages, table: jnp.where(
        m, x + jnp.sin(jnp.arange(B, dtype=x.dtype))[:, None, None, None] * table, -1e9
    ),
}
AGES = RNG.uniform(0, 3, (U, S)).astype(np.float32)
TABLE = RNG.standard_normal((1, N, L, L), np.float32)


def pointwise(name, mask, layers=1, dtype="float32") -> Case:
    """Weights by `POINTWISE`, or by a softmax of `BIASED`."""

    def fn(history, own, index, valid, ages, table):
        scales = jnp.asarray(SCALES, own.dtype)
        x = jnp.concatenate([history[index], own], axis=1)
        ages = jnp.concatenate([ages[index], jnp.zeros((B, C))], axis=1)[:, None, None]
        seen = MASKS[mask](index, valid)
        for _ in range(layers):
            q, k, v = (x * s[None, None] for s in scales)
            logits = jnp.einsum("btnh,bsnh->bnts", q, k)
            if name in POINTWISE:
                weights = POINTWISE[name](logits, seen).astype(v.dtype)
            else:
                weights = jax.nn.softmax(BIASED[name](logits, seen, ages, table), axis=-1)
            x = x + jnp.tanh(jnp.einsum("bnts,bsnh->btnh", weights, v))
        return x

    args = tuple(jnp.asarray(x, dtype) for x in (HISTORY, OWN))
    text = f"{dtype} {name} {mask} {layers}"
    return Case(text, fn, (*args, *map(jnp.asarray, (INDEX, VALID, AGES, TABLE))))


@pytest.mark.parametrize("mask", ["isolated", "valid_or_self"])
@pytest.mark.parametrize("name", BIASED)
@pytest.mark.usefixtures("models_may_promote")
def test_a_bias_leaves_the_history_at_user_batch(name: str, mask: str) -> None:
    biased = pointwise(name, mask, 2)
    details = report_of(biased.fn, *biased.args).details
    if name == "by candidate":
        assert "bias differs by candidate" in details
    elif name == "a lower added mask before":
        assert "one mask is added, another put in by where" in details
    elif name.endswith("a mask") and mask == "valid_or_self":
        assert "its mask differs by query" in details
    else:
        assert "attention with own tokens" in details
        assert "not recognised" not in details
    assert_same([biased])


@pytest.mark.parametrize("name", POINTWISE)
def test_other_functions_than_the_softmax(name: str) -> None:
    masks = [mask for mask in MASKS if mask != "none"]
    # Two layers of weights without a bound amplify a float32 rounding, by other amounts with other
    # versions of XLA, beyond what the rule's evaluations of the original show.
    is_unbounded = name in ("relu", "maximum", "squared_relu", "gelu")
    # Every function has every other mask, and every mask has every other function. One in four of
    # these pairs has two layers, which take twice the time.
    turn = list(POINTWISE).index(name)
    cases = [
        pointwise(name, mask, 1 if is_unbounded or (n + turn) % 8 else 2)
        for n, mask in enumerate(masks)
        if (n + turn) % 2 == 0
    ]
    cases.append(pointwise(name, "tril", 1, "bfloat16"))
    assert_same(cases)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *((name, "tril") for name in ("where_silu", "gelu", "relu", "squared_relu", "maximum")),
        *itertools.product(("masked_softmax", "masked_again"), ("tril", "valid_or_self")),
        *itertools.product(
            ("hstu", "by_sigmoid", "where_first"),
            ("tril", "isolated", "banded", "contextual", "whole_history", "valid_and_causal"),
        ),
    ],
)
def test_functions_that_are_recognised(name: str, mask: str) -> None:
    recognised = pointwise(name, mask, 2)
    assert "attention with own tokens" in became(recognised.fn, *recognised.args)


#: What the attention attends to and from, of the sequence.
SEQUENCES = {
    "all": lambda x: (x, x, x),
    "candidate": lambda x: (x[:, S:], x, x),
    "history": lambda x: (x[:, :S], x, x),
    "last": lambda x: (x[:, -1:], x, x),
}
LAYERS = (1, 2)
#: The history of every candidate.
HISTORIES = {
    "index": lambda x, i: x[i],
    "one_user": lambda x, i: jnp.broadcast_to(x[:1], (B, *x.shape[1:])),
}


def program(mask, fill, put_in, softmax, sequence, layers, order, users) -> Any:
    def fn(history, own, index, valid):
        scales = jnp.asarray(SCALES, own.dtype)
        parts = [HISTORIES[users](history, index), own]
        x = jnp.concatenate(parts if order else parts[::-1], axis=1)
        for _ in range(layers):
            q, k, v = (
                y * s[None, None] for y, s in zip(SEQUENCES[sequence](x), scales, strict=True)
            )
            logits = jnp.einsum("btnh,bsnh->bnts", q, k)
            seen = MASKS[mask](index, valid)
            if seen is not None:
                rows = slice(L - q.shape[1], None) if sequence != "history" else slice(S)
                seen = seen[:, :, rows] if seen.shape[2] != 1 else seen
                number = eval(fill, {"jnp": jnp, "x": logits})
                logits = PUT_IN[put_in](logits, seen, number)
            y = jnp.einsum("bnts,bsnh->btnh", SOFTMAXES[softmax](logits).astype(v.dtype), v)
            x = jnp.tanh(y) + x if sequence == "all" else y
            if sequence != "all":
                break
        return x

    return fn


def case(dtype="float32", **choices) -> Case:
    chosen = {
        "mask": "tril",
        "fill": "-1e30",
        "put_in": "where",
        "softmax": "softmax",
        "sequence": "all",
        "layers": 1,
        "order": True,
        "users": "index",
    } | choices
    args = tuple(jnp.asarray(x, dtype) for x in (HISTORY, OWN))
    name = " ".join(map(str, (dtype, *chosen.values())))
    return Case(name, program(**chosen), (*args, jnp.asarray(INDEX), jnp.asarray(VALID)))


RECOGNISED = [
    case(mask="tril", layers=2),
    case(mask="traced", fill="-1e9"),
    case(mask="constant", fill="-jnp.inf"),
    case(mask="isolated", put_in="add", fill="-1e9"),
    case(mask="prefix", softmax="by_hand"),
    case(mask="valid_or_self", sequence="last"),
    case(mask="isolated", layers=2),
    case(mask="valid", sequence="candidate"),
    case(mask="valid_and_causal", sequence="last"),
    case(mask="banded", softmax="stopped", sequence="last"),
    case(mask="only_own"),
    case(mask="tril", layers=2, users="one_user"),
    case("bfloat16", mask="tril", softmax="f32"),
    case(mask="none"),
    # Without a maximum, the exponentials of a row without kept keys are 0, and its weights NaN.
    case(mask="own_may_be_hidden", softmax="without_max", fill="-1e9", sequence="last"),
    *(
        case(dtype, mask=mask, sequence="candidate", fill=fill, put_in=how)
        for mask in ("own_may_be_hidden", "valid_and_strict")
        for dtype, fill, how in (
            ("float32", "-1e9", "where"),
            ("bfloat16", "jnp.finfo(x.dtype).min", "not_where"),
            ("float32", "-jnp.inf", "where"),
            ("float32", "-1e9", "add"),
        )
    ),
]


@pytest.mark.parametrize("number", range(len(RECOGNISED)))
def test_recognised(number: int) -> None:
    recognised = RECOGNISED[number]
    assert "attention with own tokens" in became(recognised.fn, *recognised.args), recognised.name
    assert_same([recognised])


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    """With every fill and with every sequence, which take turns: half of their pairs each mask."""
    turn = list(MASKS).index(mask)
    pairs = itertools.product(enumerate(FILLS), enumerate(SEQUENCES))
    cases = [
        case(mask=mask, fill=fill, sequence=sequence)
        for (n, fill), (m, sequence) in pairs
        if (n + m + turn) % 2 == 0
    ]
    cases.append(case(mask=mask, fill="-jnp.inf", put_in="add", sequence="candidate"))
    cases.append(case(mask=mask, fill="-1e9", users="one_user"))
    assert_same(cases)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_drawn(first: int) -> None:
    cases = []
    for number in range(first, first + 10):
        rng = random.Random(number)
        cases.append(
            case(
                rng.choice(("float32", "float32", "bfloat16", "float16")),
                mask=rng.choice(sorted(MASKS)),
                fill=rng.choice(FILLS),
                put_in=rng.choice(sorted(PUT_IN)),
                softmax=rng.choice(sorted(SOFTMAXES)),
                sequence=rng.choice(sorted(SEQUENCES)),
                layers=rng.choice(LAYERS),
                order=rng.random() < 0.8,
            )
        )
    assert_same(list({x.name: x for x in cases}.values()))


@pytest.mark.parametrize("fill", ["-3.0", "-1e9"])
@pytest.mark.parametrize("mask", ["reversed", "leak", "strict", "valid_and_strict"])
def test_fills_under_a_softmax_over_the_queries(mask: str, fill: str) -> None:
    """A key that no query sees has weights other than 0, whatever the number that was put in."""
    assert_same([case(mask=mask, fill=fill, softmax="over_queries")])


@pytest.mark.parametrize(("user_fields", "by_parts"), [(24, False), (56, False), (57, True)])
def test_fields_attend_as_written_where_they_are_few(monkeypatch, user_fields, by_parts) -> None:
    """AutoInt's layer over fields of the user and 8 of the candidate, slower by parts on a GPU."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    user, cand = (rng.standard_normal((n, m, 8), np.float32) for n, m in ((U, user_fields), (B, 8)))
    weights = rng.standard_normal((3, 8, N, H), np.float32)

    def fn(user, cand, weights, index):
        fields = jnp.concatenate([user[index], cand], axis=1)
        query, key, value = (jnp.einsum("bfd,dnh->bfnh", fields, w) for w in weights)
        logits = jnp.einsum("binh,bjnh->bnij", query, key) * 0.1
        weights = jax.nn.softmax(logits, axis=-1)
        return jnp.einsum("bnij,bjnh->binh", weights, value)

    found = became(fn, user, cand, weights, INDEX)
    assert ("attention with own tokens" in found) == by_parts
    assert_same([Case("fields", fn, (user, cand, weights, INDEX))])

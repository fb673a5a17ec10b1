"""Tables of items with fewer rows than candidates: a second lookup beside the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import both, check_values_and_gradients, close, largest_outside_ops, report_of

import ikbo_jax as ikbo

B, U, S, D, V = 48, 4, 8, 16, 40
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
IDS = jnp.asarray(RNG.integers(0, V, B), jnp.int32)


def random(*shape):
    return problems.random_array(RNG, shape, "float32")


ITEMS, USER, HISTORY, ITEM_HISTORY = random(V, D), random(U, D), random(U, S, D), random(V, S, D)
WEIGHTS = tuple(random(D, D) / 4 for _ in range(4))


def softmax_pooling(items, history):
    query, key = items[IDS], history[INDEX]
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", query, key) / 4, axis=-1)
    return jnp.einsum("bs,bsd->bd", weights, key)


def with_heads(items, history):
    query = (items[IDS] @ WEIGHTS[0]).reshape(B, 1, 4, 4)
    key = (history[INDEX] @ WEIGHTS[1]).reshape(B, S, 4, 4)
    return jax.nn.dot_product_attention(query, key, key).reshape(B, D)


def as_many_queries_as_keys(items, history):
    query = jnp.concatenate([items] * S, axis=1).reshape(V, S, D)[IDS].reshape(B, S, 4, 4)
    key = (history[INDEX] @ WEIGHTS[1]).reshape(B, S, 4, 4)
    return jax.nn.dot_product_attention(query, key, key).reshape(B, -1)


def transformer(items, history):
    x = jnp.concatenate([history[INDEX], items[IDS][:, None]], axis=1)
    for _ in range(2):
        query, key, value = ((x @ w).reshape(B, S + 1, 4, 4) for w in WEIGHTS[:3])
        x = x + jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
    return x[:, -1]


def ops_of(fn, *args):
    text = str(ikbo.explain(ikbo.rewrite(fn), *args))
    return [line for line in text.splitlines() if "attention:" in line or "gdpa:" in line]


@pytest.mark.parametrize(
    ("fn", "largest"),
    [
        (softmax_pooling, B * S * D // 2),
        (with_heads, B * S * D // 2),
        (as_many_queries_as_keys, B * S * D),
        (transformer, B * S * D // 2),
    ],
)
def test_queries_of_an_items_table_attend_by_the_op(fn, largest):
    check_values_and_gradients(fn, ITEMS, HISTORY)
    assert largest_outside_ops(fn, ITEMS, HISTORY) <= largest
    ops = ops_of(fn, ITEMS, HISTORY)
    assert ops
    if fn is transformer:  # A looked-up candidate token is an own token of the op.
        assert len(ops) == 1, ops
        assert ops[0].startswith("1, 2.")


def test_history_of_items_attends_by_the_op():
    def fn(item_history, user):
        query, key = user[INDEX] @ WEIGHTS[0], item_history[IDS]
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", query, key) / 4, axis=-1)
        return jnp.einsum("bs,bsd->bd", weights, key)

    close(*both(fn, ITEM_HISTORY, USER))
    assert len(ops_of(fn, ITEM_HISTORY, USER)) == 1


def test_values_by_another_index_than_the_keys_are_no_attention():
    def fn(items, history):
        query, key = items[IDS], history[INDEX]
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", query, key) / 4, axis=-1)
        return jnp.einsum("bs,bsd->bd", weights, history[IDS % U])

    close(*both(fn, ITEMS, HISTORY))
    assert not ops_of(fn, ITEMS, HISTORY)


def wide(index, ids):
    # The product of items is wide, and returned: looked up, it would be read and written again.
    return lambda items, user, w_user, w_item: (
        jax.nn.relu(user[index] @ w_user),
        items[ids] @ w_item,
    )


def test_an_items_table_that_would_cost_more_does_not_hide_the_users():
    args = random(2048, D), USER, random(D, D), random(D, 512)
    fn = wide(jnp.tile(INDEX, 64), jnp.asarray(RNG.integers(0, 2048, 64 * B), jnp.int32))
    check_values_and_gradients(fn, *args)
    report = report_of(fn, *args)
    assert report.changed
    assert [(x.outcome, "2048 rows" in x.reason) for x in report.lookups] == [
        ("removed", False),
        ("refused", True),
    ]
    assert report.bytes_saved > 0
    assert report.flops_saved > 0


def test_small_costs_keep_every_lookup():
    args = ITEMS, USER, WEIGHTS[0], WEIGHTS[1]
    fn = wide(INDEX, IDS)
    close(*both(fn, *args))
    assert [x.outcome for x in report_of(fn, *args).lookups] == ["removed", "removed"]


def test_a_table_with_as_many_rows_as_candidates_stays():
    def fn(items, user):
        return (items[IDS] @ WEIGHTS[0]) * (user[INDEX] @ WEIGHTS[1])

    items = random(B, D)
    close(*both(fn, items, USER))
    assert sorted(x.outcome for x in report_of(fn, items, USER).lookups) == ["kept", "removed"]

"""The attention kernel for few queries on a Hopper GPU, and candidates in the order of users."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import oracle_attention
import problems
import pytest
from attention_basics import own_tokens
from problems_look_up import draw_index
from test_gpu_attention import check, check_repeats, problem_of, run

import ikbo_jax as ikbo
from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.problems import FewQueriesConfig

pytestmark = pytest.mark.gpu

Shape = problems.AttentionShape
CONFIGS = {
    "plain": FewQueriesConfig(64, 1, 64, 3, 3),
    "wide": FewQueriesConfig(128, 1, 64, 3, 3),
    "split": FewQueriesConfig(64, 3, 64, 3, 3),
    "wide_split": FewQueriesConfig(128, 2, 64, 2, 2),
    "narrow": FewQueriesConfig(64, 1, 32, 4, 4, 3),
    "narrow_split": FewQueriesConfig(64, 8, 32, 4, 3),
}
#: Users, candidates, T, S, N, K, H, index, lengths.
SHAPES = {
    "one_candidate": Shape(1, 1, 1, 1, 1, 1, 64),
    "one_user": Shape(1, 700, 1, 3000, 2, 2, 64),
    "one_user_t7": Shape(1, 100, 7, 515, 2, 1, 128),
    "a_user_each": Shape(500, 500, 1, 130, 4, 4, 64, "sorted"),
    "a_user_each_t8": Shape(300, 300, 8, 256, 4, 4, 64, "unsorted", "ragged"),
    "users_without_candidates": Shape(900, 100, 2, 200, 2, 2, 64, "gaps", "ragged"),
    "many_users": Shape(5000, 6000, 1, 20, 1, 1, 64, "sorted", "ragged"),
    "few_users": Shape(3, 300, 4, 1000, 4, 4, 64, "sorted", "ragged"),
    "t16": Shape(7, 130, 16, 300, 2, 2, 128, "unsorted", "ragged"),
    "gqa_4": Shape(17, 200, 3, 300, 8, 2, 64, "sorted", "ragged"),
    "gqa_3": Shape(17, 200, 3, 300, 6, 2, 64, "sorted"),
    "mqa_16": Shape(17, 100, 1, 300, 16, 1, 128, "sorted"),
    "h96": Shape(5, 50, 3, 300, 2, 2, 96, "sorted", "ragged"),
    # CTAs list the candidates of their users.
    "listed": Shape(90, 4723, 1, 172, 2, 1, 64, "unsorted"),
    "listed_gaps": Shape(60, 70, 5, 900, 4, 4, 128, "unsorted", "ragged"),
    # One listing serves several heads.
    "listed_heads": Shape(159, 10985, 1, 99, 4, 4, 64, "unsorted"),
    "listed_heads_gqa": Shape(27, 4836, 2, 230, 16, 4, 128, "unsorted", "ragged"),
    "listed_heads_parts": Shape(60, 1200, 1, 300, 4, 4, 64, "unsorted", "ragged"),
}


#: Heads whose columns the consumers share.
WIDE_HEADS = {
    "h192": Shape(17, 200, 3, 300, 6, 2, 192, "sorted", "ragged"),
    "h192_one_user": Shape(1, 400, 1, 1500, 2, 2, 192),
    "h256": Shape(9, 700, 2, 515, 2, 2, 256, "unsorted", "ragged"),
    "h256_listed_gqa": Shape(40, 300, 5, 77, 8, 2, 256, "unsorted"),
}
CONFIGS_OF_WIDE_HEADS = {
    "plain": FewQueriesConfig(64, 1, 64, 2, 2),
    "split": FewQueriesConfig(64, 3, 32, 4, 4, turns=True),
    "tall": FewQueriesConfig(128, 1, 32, 3, 3, 2),
    "tall_split": FewQueriesConfig(128, 2, 32, 3, 3, 1),
    "tall_one_slot": FewQueriesConfig(128, 1, 64, 2, 2, 1),
}
#: CTAs list candidates once for several groups of heads.
LISTED_HEADS = {
    "h128": Shape(27, 1500, 1, 230, 8, 8, 128, "unsorted"),
    "h64": Shape(150, 5000, 1, 40, 4, 4, 64, "unsorted", "ragged"),
    "h192_gqa": Shape(60, 2000, 1, 90, 8, 4, 192, "unsorted", "ragged"),
}


#: Every shape with one of the configurations, and two shapes with all.
PAIRS = list(zip(SHAPES, itertools.cycle(CONFIGS), strict=False))
PAIRS += [("listed_heads", "plain"), ("listed_heads", "wide"), ("listed_heads_gqa", "wide")]
PAIRS += [("listed_heads_parts", c) for c in ("plain", "split")]
PAIRS += [(n, c) for n in ("few_users", "gqa_4") for c in CONFIGS if (n, c) not in PAIRS]


@pytest.mark.parametrize(("name", "config"), PAIRS)
def test_few_queries_shapes_and_configs(name, config):
    shape, chosen = SHAPES[name], CONFIGS[config]
    assert chosen.illegal_reason(problem_of(shape)) is None
    inputs = problems.make_attention_inputs(shape)
    check(run(inputs, config=chosen), inputs)


@pytest.mark.parametrize(("name", "config"), [*PAIRS, *((name, "plain") for name in WIDE_HEADS)])
@pytest.mark.parametrize("has_own", [False, True], ids=["", "own"])
def test_few_queries_ranges_of_keys_and_own_tokens(name, config, has_own):
    shape = (SHAPES | WIDE_HEADS)[name]
    chosen = (CONFIGS_OF_WIDE_HEADS if name in WIDE_HEADS else CONFIGS)[config]
    inputs = problems.make_attention_inputs(shape)
    own = own_tokens(shape, 1, "bfloat16") if has_own else {}
    ranges = jnp.asarray(oracle_attention.ranges_of_keys(shape.candidates, shape.kv_len))
    results = run(inputs, config=chosen, key_value_ranges=ranges, **own)
    check(results, inputs, ranges=ranges, **own)


@pytest.mark.parametrize("name", WIDE_HEADS)
@pytest.mark.parametrize("config", CONFIGS_OF_WIDE_HEADS)
def test_few_queries_wide_heads(name, config):
    chosen = CONFIGS_OF_WIDE_HEADS[config]
    assert chosen.illegal_reason(problem_of(WIDE_HEADS[name])) is None
    inputs = problems.make_attention_inputs(WIDE_HEADS[name])
    check_repeats(inputs, 5, config=chosen)


@pytest.mark.parametrize("name", LISTED_HEADS)
def test_few_queries_listed_for_several_heads(name):
    shape = LISTED_HEADS[name]
    chosen = FewQueriesConfig(64, 1, 64, 2, 2)
    assert chosen.lists(problem_of(shape), 132)
    inputs = problems.make_attention_inputs(shape)
    check_repeats(inputs, 5, config=chosen)


@pytest.mark.parametrize("name", ["one_candidate", "a_user_each_t8", "one_user_t7", "t16"])
def test_few_queries_default_in_f16(name):
    inputs = problems.make_attention_inputs(SHAPES[name], "float16")
    check(run(inputs), inputs)


@pytest.mark.parametrize("order", ["unsorted", "falling", "one_misplaced"])
def test_few_queries_wrong_promise_of_a_sorted_index(order):
    inputs = problems.make_attention_inputs(Shape(40, 900, 1, 150, 2, 2, 64, "unsorted", "ragged"))
    index = np.sort(np.asarray(inputs.cand_to_user))
    if order == "unsorted":
        index = np.asarray(inputs.cand_to_user)
    elif order == "falling":
        index = index[::-1]
    else:
        index[[3, 800]] = index[[800, 3]]
    inputs = inputs._replace(cand_to_user=jnp.asarray(index.copy()))
    check(run(inputs, indices_are_sorted=True, config=FewQueriesConfig()), inputs)


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("config", ["plain", "wide_split", "narrow_split"])
def test_few_queries_repeats_bit_for_bit(config, order):
    inputs = problems.make_attention_inputs(Shape(30, 800, 2, 700, 4, 2, 64, order, "ragged"))
    check_repeats(inputs, 20, config=CONFIGS[config])


@pytest.mark.parametrize("config", ["plain", "wide", "wide_split", "narrow_split"])
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
def test_few_queries_nan_of_a_user_stays_there(config, order):
    inputs = problems.make_attention_inputs(Shape(6, 60, 2, 300, 2, 2, 64, order, "ragged"))
    length = int(inputs.key_value_seq_lengths[2])
    lengths = inputs.key_value_seq_lengths.at[2].set(min(length, 200))
    past = inputs._replace(
        key=inputs.key.at[2, 200:].set(jnp.nan),
        value=inputs.value.at[2, 200:].set(jnp.nan),
        key_value_seq_lengths=lengths,
    )
    clean = inputs._replace(key_value_seq_lengths=lengths)
    for a, b in zip(*(run(x, config=CONFIGS[config]) for x in (past, clean)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    poisoned = clean._replace(value=clean.value.at[2].set(jnp.nan))
    out, _ = run(poisoned, config=CONFIGS[config])
    others = np.asarray(clean.cand_to_user) != 2
    expected, _ = run(clean, config=CONFIGS[config])
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_array_equal(out[others], expected[others])
    assert np.isnan(out[~others]).all() == bool(lengths[2])


@pytest.mark.parametrize("config", ["plain", "split"])
def test_few_queries_huge_scores(config):
    inputs = problems.make_attention_inputs(Shape(4, 40, 2, 300, 2, 2, 64, "sorted"))
    inputs = inputs._replace(query=inputs.query * 30, key=inputs.key * 30)
    check(run(inputs, config=CONFIGS[config]), inputs)


SANITIZED = """
import jax, problems
import ikbo_jax as ikbo
from ikbo_jax.problems import FewQueriesConfig
shape = problems.AttentionShape(5, 90, 2, 150, 4, 2, 64, "unsorted", "ragged")
inputs = problems.make_attention_inputs(shape, "bfloat16")
wild = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
wide = problems.make_attention_inputs(shape._replace(head_dim=192), "bfloat16")
for inputs, configs in (
    (inputs, ((64, 1), (128, 1), (64, 2), (64, 4))), (wide, ((64, 1), (64, 2)))
):
    for tile_rows, splits in configs:
        config = FewQueriesConfig(tile_rows, splits, 32, 3, 3)
        for is_sorted in (False, True):
            out = ikbo.attention(
                inputs.query, inputs.key, inputs.value, wild, config=config,
                implementation="mosaic_gpu", indices_are_sorted=is_sorted,
                key_value_seq_lengths=inputs.key_value_seq_lengths, return_residuals=True,
            )
            jax.block_until_ready(out)
print("FINISHED")
"""
test_few_queries_sanitizer = on_gpu.sanitizer_test(SANITIZED)


def test_few_queries_gradient_uses_its_lse():
    inputs = problems.make_attention_inputs(Shape(7, 60, 2, 150, 4, 2, 64, "sorted"))

    def loss(query, implementation):
        out = ikbo.attention(query, *inputs[1:4], implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    kernel, xla = (jax.grad(loss)(inputs.query, x) for x in ("mosaic_gpu", "xla"))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (kernel, xla)), atol=0.05)


# Candidates in the order of users, by launches.

#: Candidates, users, their distribution, and [T, N, H].
PACKED = {
    "compared": (4096, 300, "uniform", (1, 2, 64)),
    "large_queries": (2000, 30, "beyond", (64, 4, 128)),
    "one_more": (4097, 4096, "uniform", (1, 1, 64)),
    "zipf": (10985, 700, "zipf", (1, 4, 64)),
    "one_user": (16381, 1, "uniform", (3, 1, 64)),
    "beyond": (16384, 4096, "beyond", (2, 2, 128)),
    "distinct": (counted_order.MOST_USERS, counted_order.MOST_USERS, "distinct", (1, 1, 96)),
    "most": (counted_order.MOST_CANDIDATES, counted_order.MOST_USERS, "beyond", (1, 1, 64)),
    "most_of_one": (counted_order.MOST_CANDIDATES, 2, "zipf", (1, 4, 128)),
    "by_xla": (counted_order.MOST_CANDIDATES + 1, 900, "uniform", (1, 1, 64)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_candidates_are_the_stable_sort_s(name: str) -> None:
    batch, users, kind, shape = PACKED[name]
    query = jax.random.normal(jax.random.key(0), (batch, *shape), jnp.bfloat16)
    index = draw_index(kind, batch, users)
    run = jax.jit(lambda query, index: counted_order.ordered(query, index, users))
    user = np.clip(index, 0, users - 1)
    order = np.argsort(user, stable=True)
    copied = np.asarray(query)[order].view(np.uint16)
    for _ in range(10):
        found = run(query, jnp.asarray(index))
        np.testing.assert_array_equal(found.order, order)
        np.testing.assert_array_equal(found.user, user[order])
        np.testing.assert_array_equal(np.asarray(found.query).view(np.uint16), copied)
    if name in ("one_more", "zipf", "most"):  # also without queries
        run = jax.jit(lambda x: counted_order.count_order(None, x, users, has_position=True))
        found = run(jnp.asarray(index))
        np.testing.assert_array_equal(found.order, order)
        np.testing.assert_array_equal(found.user, user[order])
        np.testing.assert_array_equal(np.asarray(found.position)[order], np.arange(len(order)))

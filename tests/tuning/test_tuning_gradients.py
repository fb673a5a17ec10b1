"""Gradients in the dispatch table and in the autotuner: legality, candidates, the op's choice."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from fake_tuning import HERE, row
from fake_tuning import LINEAR as LINEAR_FORWARD

import ikbo_jax as ikbo
from ikbo_jax.autotuner import autotune
from ikbo_jax.autotuner.bench import lower
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import gdpa_backward as gdpa_op
from ikbo_jax.ops import linear_compression_backward as linear_op
from ikbo_jax.problems import (
    AttentionBackwardProblem,
    GdpaBackwardProblem,
    GdpaProblem,
    LinearCompressionBackwardProblem,
    LinearCompressionProblem,
    memory,
)
from ikbo_jax.problems import gdpa_backward as gdpa_configs
from ikbo_jax.problems import linear_compression_backward as linear_configs
from ikbo_jax.problems.attention_backward import HEAD_DIMS, most_blocks
from ikbo_jax.problems.attention_backward_problem import small_configs
from ikbo_jax.problems.hopper import MAX_SMEM_BYTES, NUM_SMS
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig
from ikbo_jax.tuning import table

LINEAR = LinearCompressionBackwardProblem.of(LINEAR_FORWARD)


@hypothesis.given(
    m=st.integers(1, 5000),
    n=st.integers(1, 100).map(lambda eighth: 8 * eighth),
    ks=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_the_default_configuration_is_legal(m: int, n: int, ks: list[int], dtype: str) -> None:
    """It is what runs without a row of the dispatch table."""
    problem = LinearCompressionProblem(tuple(range(1, len(ks) + 1)), tuple(ks), m, n, dtype)
    assert linear_configs.illegal_reason(problem) is None
    weight = linear_configs.default_config(problem)
    gradient = LinearCompressionBackwardProblem.of(problem)
    default = gradient.default_config()
    assert default is not None
    assert default == weight
    assert weight.stages == linear_configs.MAX_STAGES or (
        memory.smem_bytes(dataclasses.replace(weight, stages=weight.stages + 1).shared)
        > MAX_SMEM_BYTES
    )
    # Tiles cover M with no more padding than one tile less would need.
    tiles = -(-m // weight.block_m)
    assert tiles * weight.block_m < m + 8 * tiles


@hypothesis.given(
    batch=st.integers(1, 20_000),
    k=st.integers(1, 4000),
    m=st.integers(1, 2000),
    problems=st.integers(1, 40),
)
def test_every_part_of_a_batch_has_an_entry(batch: int, k: int, m: int, problems: int) -> None:
    config = WeightGradientConfig()
    splits = config.splits(batch, k, m, 256, problems=problems, num_sms=132)
    assert 1 <= splits <= batch


def test_parts_of_the_default_sizes_fill_the_sms() -> None:
    config = linear_configs.default_config(LINEAR_FORWARD)
    assert config.block_m == 224
    tiles = 2 * 7  # of 224 x 128
    splits = config.splits(1024, 866, 433, 256, problems=1, num_sms=132)
    assert tiles * splits <= 132 < tiles * (splits + 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WeightGradientConfig(260), "a multiple of 8 from 8 to 256, but is 260"),
        (WeightGradientConfig(20), "a multiple of 8 from 8 to 256, but is 20"),
        (WeightGradientConfig(stages=1), "at least 2, but is 1"),
        (WeightGradientConfig(256, 5), "but a CTA has 232448"),
    ],
)
def test_illegal_configurations_are_refused(config: WeightGradientConfig, message: str) -> None:
    assert message in str(config.illegal_reason(LINEAR_FORWARD))


GDPA_FORWARD = GdpaProblem(
    *(1152, 1152, 1152 * 512, 1152 * 512, 4, 4, 128, "bfloat16"),
    *(("gelu",), None, False, 1024, 1024),
)
GDPA = GdpaBackwardProblem.of(GDPA_FORWARD)
SOFTMAX = dataclasses.replace(GDPA, activations=("softmax",))
OTHER_GDPA = dataclasses.replace(GDPA.default_config(), block=48, stages=2)
CANDIDATES = [
    LINEAR,
    dataclasses.replace(LINEAR, batches=(1024,), ks=(300,), m=64),
    dataclasses.replace(LINEAR, batches=(3, 30, 300), ks=(64, 40, 70)),
    *(
        dataclasses.replace(GDPA, head_dim=head_dim, activations=(activation,))
        for head_dim in gdpa_configs.HEAD_DIMS
        for activation in ("gelu", "softmax")
    ),
]


@pytest.mark.parametrize("problem", CANDIDATES, ids=lambda x: x.describe())
def test_candidates_are_legal_and_begin_with_the_default(problem, builtin):
    """Without a row, the kernels run as they did before there was a table."""
    builtin()
    found = list(problem.configs())
    assert found[0] == problem.default_config() == table.lookup(problem).config
    assert len(set(found)) == len(found)
    assert 4 <= len(found) <= 120
    assert all(config.illegal_reason(problem) is None for config in found)
    if isinstance(problem, GdpaBackwardProblem):
        assert found[0] == gdpa_configs.default_config(problem.head_dim)
    if problem == LINEAR or isinstance(problem, GdpaBackwardProblem):
        for field in dataclasses.fields(found[0]):
            assert len({getattr(config, field.name) for config in found}) > 1, field.name


def gradients(implementation=None):
    def loss(*arrays):
        index = jnp.asarray([1, 0, 2, 1], jnp.int32)
        out = ikbo.linear_compression(*arrays, index, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2, 3))


def arrays():
    shapes = ((16, 7), (16, 9), (4, 7, 8), (3, 9, 8))
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


SMALL = LinearCompressionBackwardProblem((3, 4), (9, 7), 16, 8, "bfloat16")


def test_the_op_takes_the_row_and_explains_it(fake_hopper, builtin):
    tuned = dataclasses.replace(SMALL.default_config(), stages=3)
    builtin(row(SMALL, tuned, device=HERE))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert plan.backward_config == tuned
    assert f"{tuned}; sm90.json, B=3,4" in plan.backward
    gradients()(*arrays())
    used = [call["config"] for call in fake_hopper.calls]
    embeddings = (linear_configs.embedding_config(SMALL, level) for level in range(2))
    assert {tuned, *embeddings} <= set(used)


def test_a_row_may_prefer_xla_and_the_caller_may_not(fake_hopper, builtin):
    builtin(row(SMALL, None, device=HERE))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert (plan.implementation, plan.backward_config) == ("mosaic_gpu", None)
    assert plan.backward.startswith("XLA, at user and candidate batch size: sm90.json")
    by_xla = gradients()(*arrays())
    assert not [
        c for c in fake_hopper.calls if isinstance(c["config"], linear_configs.WeightGradientConfig)
    ]
    plan = ikbo.explain(gradients("mosaic_gpu"), *arrays()).plans[0]
    assert plan.backward_config == SMALL.default_config()
    problems.assert_near(gradients("mosaic_gpu")(*arrays()), by_xla, 0.02)


def test_a_folded_problem_has_a_choice_of_its_own(fake_hopper, builtin):
    folded = dataclasses.replace(SMALL, batches=(3 * 5, 4 * 5))
    tuned = dataclasses.replace(folded.default_config(), stages=3)
    builtin(row(folded, tuned, device=HERE), row(SMALL, device=HERE))
    request = dispatch.Request("linear_compression", None, None)
    assert (
        linear_op.choose(request, LinearCompressionProblem(**dataclasses.asdict(folded)))[0]
        == tuned
    )
    w_cand, w_user, e_cand, e_user = arrays()
    many = [jnp.stack([x] * 5) for x in (e_cand, e_user)]
    fake_hopper.calls.clear()
    jax.vmap(gradients(), (None, None, 0, 0))(w_cand, w_user, *many)
    used = {call["config"] for call in fake_hopper.calls}
    assert tuned in used


def test_gdpa_takes_the_row_or_xla(seems_hopper, builtin):
    builtin(row(GDPA, OTHER_GDPA, device=HERE))
    request = dispatch.Request("gdpa", None, None)
    config, reason = gdpa_op.choose(request, GDPA_FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (OTHER_GDPA, True)
    builtin(row(GDPA, None, device=HERE))
    config, reason = gdpa_op.choose(request, GDPA_FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (None, True)
    insisting = dispatch.Request("gdpa", "mosaic_gpu", None)
    assert gdpa_op.choose(insisting, GDPA_FORWARD)[0] == GDPA.default_config()
    builtin()
    assert gdpa_op.choose(request, GDPA_FORWARD)[0] == GDPA.default_config()


# The tuner.


def test_worker_lowers_the_kernels_without_a_device():
    problem = dataclasses.replace(SOFTMAX, batch=4, batch_kv=4, q_rows=400, kv_rows=400)
    assert not isinstance(lower(problem, list(problem.configs())[-1], 132), str)


def test_rows_that_do_not_fill_the_sequences_are_not_tuned():
    with pytest.raises(ValueError, match="do not fill 1152 sequences"):
        autotune.tune(dataclasses.replace(GDPA, q_rows=100), run=pytest.fail)


#: Users of equally many rows, a block or more each: the model allows for other numbers of rows, and
#: so takes more parts than are best for these.
EVEN = {
    (48, 6, 8, 273, 1, 1, 128): 1,
    (192, 6, 8, 273, 1, 1, 128): 4,
    (384, 6, 8, 273, 1, 1, 128): 4,
}


def attention_of(sizes: tuple[int, ...]) -> AttentionBackwardProblem:
    return AttentionBackwardProblem(*sizes, "bfloat16")


@pytest.mark.parametrize(("sizes", "best"), EVEN.items(), ids=str)
def test_users_of_any_numbers_of_rows_have_a_few_more_parts(sizes, best):
    config = table.lookup(attention_of(sizes), with_user_rows=False).config
    assert config.d_query == "parts"
    assert best <= config.splits <= best + 2


def test_configurations_of_larger_gradients_that_were_timed():
    """Us: 47.17 against 54.35 with two parts; 48.35 against 52.30 with blocks of 16 rows."""
    uneven = table.lookup(attention_of((1397, 7, 3, 422, 4, 4, 128)), with_user_rows=False).config
    assert (uneven.d_query, uneven.splits) == ("stored", 1)
    many = table.lookup(attention_of((813, 101, 5, 87, 4, 4, 128)), with_user_rows=False).config
    assert (many.d_query, many.block_q, many.kv_slots) == ("parts", 32, 2)
    assert many.has_parts


@hypothesis.given(
    batch=st.one_of(st.integers(1, 64), st.integers(1, 5000)),
    users=st.integers(1, 200),
    q_len=st.integers(1, 64),
    kv_len=st.integers(1, 20_000),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2), (16, 1)]),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_parts_of_small_gradients_take_little_memory(batch, users, q_len, kv_len, heads, head_dim):
    problem = attention_of((batch, users, q_len, kv_len, *heads, head_dim))
    for config in small_configs(problem):
        tiles = problem.items // users
        blocks = most_blocks(batch, users, q_len * heads[0] // heads[1], config.block_q)
        of_queries = tiles * blocks * config.block_q * head_dim * 4
        of_keys = 2 * config.splits * users * kv_len * heads[1] * head_dim * 4
        total = of_queries * (config.d_query == "parts") + of_keys * (config.splits > 1)
        assert total < 40 * 2**20
        assert problem.items * config.splits <= NUM_SMS


@pytest.mark.parametrize("kv_len", [2048, 4096, 8192])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_queries_have_no_small_configurations(kv_len, head_dim):
    for batch, users in ((2048, 32), (10_000, 1), (math.prod((64, 128)), 8)):
        assert not small_configs(attention_of((batch, users, 8, kv_len, 8, 8, head_dim)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"head_dim": 8}, {"head_dim": 80}, {"dtype": "float32"}),
        *({name: 0} for name in ("batch", "users", "q_len", "kv_len", "q_heads")),
    ],
    ids=str,
)
def test_small_gradients_without_a_kernel_or_of_nothing_have_no_configuration(changes):
    problem = dataclasses.replace(attention_of((40, 3, 2, 9, 4, 2, 64)), **changes)
    assert small_configs(problem) == ()
    assert table.lookup(problem, with_user_rows=False).config is None or problem.q_heads == 0

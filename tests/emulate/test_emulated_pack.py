"""The op of attention whose candidates launches put into the order of users, executed on a CPU.

`test_emulated_gathering` has the launches themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest
from attention_basics import attend
from problems_look_up import draw_index

from ikbo_jax.ops import attention, dispatch
from ikbo_jax.pallas.attention_backward import statistics
from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.problems.few_queries import FewQueriesConfig
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped


@pytest.mark.parametrize(
    ("limit", "number", "launches"),
    [("MOST_COPIED", 0, ["ikbo_user_order_mosaic_gpu_kernel"]), ("MOST_CANDIDATES", 1299, [])],
)
def test_what_the_launch_does_not_take_is_for_xla(
    limit, number, launches, sm90, monkeypatch
) -> None:
    """Copies of large queries, or all of too many candidates."""
    query = problems.random_array(np.random.default_rng(0), (1300, 1, 1, 64), "bfloat16")
    index, users = draw_index("beyond", 1300, 7), 7
    monkeypatch.setattr(counted_order, limit, number)
    monkeypatch.setattr(counted_order, "MOST_CTAS", 5)
    with sm90.emulated(0) as launched:
        found = counted_order.ordered(query, jnp.asarray(index), users, has_position=True)
    assert launched == launches
    user = np.clip(index, 0, users - 1)
    order = np.argsort(user, stable=True)
    np.testing.assert_array_equal(found.user, user[order])
    np.testing.assert_array_equal(found.query, np.asarray(query)[found.order])
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(np.asarray(found.position)[order], np.arange(len(order)))


#: T, heads, width, how the index is, and dtype.
OPS = {
    "unsorted": (3, (4, 2), 64, "unsorted", "bfloat16"),
    "packed": (3, (4, 2), 64, "packed", "bfloat16"),
    "packed_h128_f16": (5, (1, 1), 128, "packed", "float16"),
    "sorted": (2, (4, 2), 64, "sorted", "bfloat16"),
    "many": (3, (4, 2), 64, "many", "bfloat16"),
}


@pytest.mark.parametrize("name", OPS)
def test_emulated_op_and_gradient(name, sm90, monkeypatch) -> None:
    """All launches, one after another, of an unsorted index or of grouped heads.

    The kernel for few queries lists unsorted candidates itself, unless it may not ("packed"). They
    may be too many for comparisons of all pairs ("many").
    """
    q_len, heads, width, index, dtype = OPS[name]
    is_packed, is_many = index in ("packed", "many"), index == "many"
    if is_many:
        monkeypatch.setattr(statistics, "MOST_CTAS", 0)
    if is_packed:
        index = "unsorted"
        monkeypatch.setattr(FewQueriesConfig, "lists", lambda *_: False)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 2)
    shape = problems.AttentionShape(3, 9, q_len, 70, *heads, width, index, "ragged")
    inputs = problems.make_attention_inputs(shape, dtype)
    d_out = problems.random_array(np.random.default_rng(1), inputs.query.shape, dtype)

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = inputs._replace(query=query, key=key, value=value)
        return attend(arrays, indices_are_sorted=index != "unsorted", implementation="mosaic_gpu")

    attention._OP.jitted.clear_cache()
    with sm90.emulated(0) as launched:
        out, pull_back = jax.vjp(run, *inputs[:3])
        results = jax.block_until_ready([out, *pull_back(d_out)])
    attention._OP.jitted.clear_cache()
    assert ("ikbo_attention_pack_mosaic_gpu_kernel" in launched) == is_packed
    # One for the gradient.
    assert launched.count("ikbo_user_order_mosaic_gpu_kernel") == is_many
    assert "ikbo_attention_backward_mosaic_gpu_kernel" in launched
    scale = width**-0.5
    out, lse = oracle_attention.numpy_attention_oracle(inputs, scale=scale)
    d_lse = np.zeros_like(lse)
    exact = out, *oracle_attention.numpy_attention_gradients(inputs, d_out, d_lse, scale=scale)
    out, _ = reference.materialised(*inputs, scale=scale)
    rest = attention_grouped.decomposed_vjp(*inputs, d_out, None, scale=scale)
    for x, e, p in zip(results, exact, (out, *rest), strict=False):
        problems.assert_within_error_rule(np.asarray(x), e, np.asarray(p))


def test_emulated_op_reads_queries_of_whole_tiles_in_place(sm90, monkeypatch) -> None:
    """In the order of users of more candidates than are compared with each other."""
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 2)
    shape = problems.AttentionShape(2, 5, 64, 40, 1, 1, 64, "unsorted")
    inputs = problems.make_attention_inputs(shape, "bfloat16")
    attention._OP.jitted.clear_cache()
    with sm90.emulated(0) as launched:
        out = attend(inputs, implementation="mosaic_gpu").block_until_ready()
    attention._OP.jitted.clear_cache()
    kinds = "user_order", "attention"
    assert launched == [f"ikbo_{kind}_mosaic_gpu_kernel" for kind in kinds]
    scale = 64**-0.5
    exact, _ = oracle_attention.numpy_attention_oracle(inputs, scale=scale)
    plain, _ = reference.materialised(*inputs, scale=scale)
    problems.assert_within_error_rule(np.asarray(out), exact, np.asarray(plain))

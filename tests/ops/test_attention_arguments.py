"""Bad arguments of `attention` and `merge_attention`: what is raised, and what it says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import problems
import pytest
import refusals
from refusals import misfit, not_int32, of_list, of_rank, ones

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.problems.attention import HEAD_DIMS

# B=7, U=3, T=2, S=5, N=4, K=2, H=8
SHAPE = problems.AttentionShape(3, 7, 2, 5, 4, 2, 8)
INPUTS = problems.make_attention_inputs(SHAPE)
ARRAYS = dict(zip(INPUTS._fields[:4], INPUTS[:4], strict=True))
BF16 = jnp.bfloat16


OWN = ones(7, 3, 2, 8)


def own(message: str, key: jax.Array = OWN, value: jax.Array = OWN) -> refusals.Refusal:
    return {"self_key": key, "self_value": value}, message


BAD_ARRAYS = {
    "query_rank": of_rank("query", "[B, T, N, H]", ones(7, 2, 8)),
    "key_rank": of_rank("key", "[U, S, K, H]", ones(3, 5, 8)),
    "value_rank": of_rank("value", "[U, S, K, H]", ones(3, 5, 2, 8, 1)),
    "not_an_array": of_list("value", "[U, S, K, H]"),
    "key_and_value_users": ({"value": ones(4, 5, 2, 8)}, "key has U=3 but value has U=4"),
    "key_and_value_lengths": ({"value": ones(3, 6, 2, 8)}, "key has S=5 but value has S=6"),
    **refusals.of_heads((7, 2), (3, 5)),
    **refusals.of_indices("query"),
    "lengths_of_candidates": misfit("key_value_seq_lengths", (7,), "key has U=3"),
    "lengths_rank": misfit("key_value_seq_lengths", (3, 5), "key has U=3"),
    "lengths_float": not_int32("key_value_seq_lengths", jnp.zeros(3, jnp.float32)),
    "lengths_list": not_int32("key_value_seq_lengths", [1, 2, 3]),
    "ranges_float": not_int32("key_value_ranges", jnp.zeros((7, 2), jnp.float32)),
    "ranges_of_others": misfit("key_value_ranges", (6, 2), "query has B=7"),
    "ranges_rank": misfit("key_value_ranges", (7,), "query has B=7"),
    **refusals.of_dtypes(ARRAYS, "query", ["key", "value", "query", "key", "value"]),
    "no_users": (
        {"key": ones(0, 5, 2, 8), "value": ones(0, 5, 2, 8)},
        "key has no rows, shape (0, 5, 2, 8), but query has B=7",
    ),
    "self_key_alone": (
        {"self_key": OWN},
        "self_key and self_value go together, but self_key is bfloat16[7, 3, 2, 8] and "
        "self_value is None",
    ),
    "self_value_alone": (
        {"self_value": OWN},
        "self_key and self_value go together, but self_key is None and self_value is bfloat16",
    ),
    "self_rank": of_rank("self_key", "[B, T_self, K, H]", OWN[:, 0], self_value=OWN),
    "self_of_users": own("query has B=7 but self_key has B=3", key=ones(3, 3, 2, 8)),
    "self_heads": own("key has K=2 but self_key has K=4", key=ones(7, 3, 4, 8)),
    "self_width": own("query has H=8 but self_value has H=4", value=ones(7, 3, 2, 4)),
    "self_lengths": own("self_key has T_self=3 but self_value has T_self=2", value=OWN[:, :2]),
    "self_dtype": own("query is bfloat16 but self_value is float16", value=OWN.astype(jnp.float16)),
}


@pytest.mark.parametrize(
    ("changes", "dtype", "words"),
    [
        ({"head_dim": 8}, "bfloat16", (*map(str, HEAD_DIMS), "H=8")),
        ({"head_dim": 320}, "float16", (*map(str, HEAD_DIMS), "H=320")),
        ({"head_dim": 64}, "float32", ("bfloat16", "float16", "float32")),
    ],
    ids=["narrow", "wide", "dtype"],
)
def test_mosaic_gpu_says_what_it_cannot_do(fake_attention, changes, dtype, words) -> None:
    inputs = problems.make_attention_inputs(SHAPE._replace(**changes), dtype)
    with pytest.raises(NotImplementedError) as raised:
        ikbo.attention(*inputs[:4], implementation="mosaic_gpu")
    for word in words:
        assert word in str(raised.value)
    assert jax.eval_shape(ikbo.attention, *inputs[:4]).dtype == dtype
    assert fake_attention.calls == []


def test_mosaic_gpu_refuses_an_illegal_config(fake_attention) -> None:
    inputs = problems.make_attention_inputs(SHAPE._replace(head_dim=64))
    config = dataclasses.replace(AttentionConfig(), k_stages=99)
    with pytest.raises(NotImplementedError, match="k_stages=99"):
        ikbo.attention(*inputs[:4], implementation="mosaic_gpu", config=config)


OUT, LSE = ones(7, 2, 4, 8), jnp.zeros((7, 2, 4), jnp.float32)
BAD_MERGES = {
    "rank": ((OUT[0], LSE, OUT, LSE), "out1 must have shape [B, T, N, H], but has shape (2, 4, 8)"),
    "shape": (
        (OUT, LSE, OUT[1:], LSE),
        "out1 has shape (7, 2, 4, 8) but out2 has shape (6, 2, 4, 8)",
    ),
    "dtype": ((OUT, LSE, OUT.astype(jnp.float16), LSE), "out1 is bfloat16 but out2 is float16"),
    "lse_dtype": (
        (OUT, LSE, OUT, LSE.astype(BF16)),
        "lse2 must be a float32 array, but is bfloat16[7, 2, 4]",
    ),
    "lse_shape": (
        (OUT, LSE.mT, OUT, LSE),
        "lse1 has shape (7, 4, 2) but out1 has shape (7, 2, 4, 8)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_MERGES.values(), ids=BAD_MERGES)
def test_bad_merge_raises_and_names_both_values(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ikbo.merge_attention(*arguments)

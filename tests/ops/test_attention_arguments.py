"""Bad arguments of `attention` and `merge_attention`: what is raised, and what it says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import problems
import pytest
import refusals
from refusals import of_rank, ones

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.problems.attention import HEAD_DIMS

# B=7, U=3, T=2, S=5, N=4, K=2, H=8
SHAPE = problems.AttentionShape(3, 7, 2, 5, 4, 2, 8)
INPUTS = problems.make_attention_inputs(SHAPE)
ARRAYS = dict(zip(INPUTS._fields[:4], INPUTS[:4], strict=True))
BF16 = jnp.bfloat16


OWN = ones(7, 3, 2, 8)

BAD_ARRAYS = {
    "query_rank": of_rank("query", "[B, T, N, H]", ones(7, 2, 8)),
    "key_rank": of_rank("key", "[U, S, K, H]", ones(3, 5, 8)),
    "value_rank": of_rank("value", "[U, S, K, H]", ones(3, 5, 2, 8, 1)),
    "not_an_array": (
        {"value": [[[[1.0]]]]},
        "value must be an array of shape [U, S, K, H], but is a list",
    ),
    "key_and_value_users": ({"value": ones(4, 5, 2, 8)}, "key has U=3 but value has U=4"),
    "key_and_value_lengths": ({"value": ones(3, 6, 2, 8)}, "key has S=5 but value has S=6"),
    **refusals.of_heads((7, 2), (3, 5)),
    **refusals.of_indices("query"),
    "lengths_of_candidates": (
        {"key_value_seq_lengths": jnp.zeros(7, jnp.int32)},
        "key_value_seq_lengths has shape (7,) but key has U=3",
    ),
    "lengths_rank": (
        {"key_value_seq_lengths": jnp.zeros((3, 5), jnp.int32)},
        "key_value_seq_lengths has shape (3, 5) but key has U=3",
    ),
    "lengths_float": (
        {"key_value_seq_lengths": jnp.zeros(3, jnp.float32)},
        "key_value_seq_lengths must be an int32 array, but is float32[3]",
    ),
    "lengths_list": (
        {"key_value_seq_lengths": [1, 2, 3]},
        "key_value_seq_lengths must be an int32 array, but is a list",
    ),
    "ranges_float": (
        {"key_value_ranges": jnp.zeros((7, 2), jnp.float32)},
        "key_value_ranges must be an int32 array, but is float32[7, 2]",
    ),
    "ranges_of_others": (
        {"key_value_ranges": jnp.zeros((6, 2), jnp.int32)},
        "key_value_ranges has shape (6, 2) but query has B=7",
    ),
    "ranges_rank": (
        {"key_value_ranges": jnp.zeros(7, jnp.int32)},
        "key_value_ranges has shape (7,) but query has B=7",
    ),
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
    "self_of_users": (
        {"self_key": ones(3, 3, 2, 8), "self_value": OWN},
        "query has B=7 but self_key has B=3",
    ),
    "self_heads": (
        {"self_key": ones(7, 3, 4, 8), "self_value": OWN},
        "key has K=2 but self_key has K=4",
    ),
    "self_width": (
        {"self_key": OWN, "self_value": ones(7, 3, 2, 4)},
        "query has H=8 but self_value has H=4",
    ),
    "self_lengths": (
        {"self_key": OWN, "self_value": OWN[:, :2]},
        "self_key has T_self=3 but self_value has T_self=2",
    ),
    "self_dtype": (
        {"self_key": OWN, "self_value": OWN.astype(jnp.float16)},
        "query is bfloat16 but self_value is float16",
    ),
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

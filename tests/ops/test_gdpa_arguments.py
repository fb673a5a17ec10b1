"""Bad arguments of `gdpa`: what is raised, and what it says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
from refusals import misfit, not_int32, of_list, of_rank, ones

import ikbo_jax as ikbo
from ikbo_jax.problems import GdpaConfig

BF16 = jnp.bfloat16


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# total_q=7, total_kv=5, N=4, K=2, H=8, batch=2
ARRAYS = {
    "query": ones(7, 4, 8),
    "key": ones(5, 2, 8),
    "value": ones(5, 2, 8),
    "cu_seqlens_q": ints(0, 3, 7),
    "cu_seqlens_kv": ints(0, 2, 5),
}
BAD_ARRAYS = {
    "query_rank": of_rank("query", "[total_q, N, H]", ones(7, 8)),
    "key_rank": of_rank("key", "[total_kv, K, H]", ones(1, 5, 2, 8)),
    "not_an_array": of_list("value", "[total_kv, K, H]"),
    "rows": ({"value": ones(6, 2, 8)}, "key has total_kv=5 but value has total_kv=6"),
    **refusals.of_heads((7,), (5,)),
    **refusals.of_dtypes(ARRAYS, "query", ["key", "key", "query", "key", "value"]),
    "offsets_list": not_int32("cu_seqlens_q", [0, 3, 7]),
    "offsets_rank": of_rank("cu_seqlens_q", "[batch + 1]", ints(0, 3, 7)[None]),
    "offsets_empty": of_rank("cu_seqlens_kv", "[batch_kv + 1]", ints()),
    "batches": (
        {"cu_seqlens_kv": ints(0, 2, 3, 5)},
        "cu_seqlens_q has batch=2 sequences but cu_seqlens_kv has batch_kv=3; pass q_to_kv",
    ),
    "index_size": misfit("q_to_kv", (3,), "cu_seqlens_q has batch=2"),
    "index_dtype": not_int32("q_to_kv", jnp.zeros(2, jnp.uint32)),
    "nothing_to_index": (
        {"q_to_kv": ints(0, 0), "cu_seqlens_kv": ints(0)},
        "cu_seqlens_kv has no sequences, shape (1,), but q_to_kv has batch=2",
    ),
    "broadcast_with_offsets": (
        {"broadcast_q": True},
        "so cu_seqlens_q must be None, but is int32[3]",
    ),
    "broadcast_index_dtype": not_int32(
        "q_to_kv", jnp.zeros(2, jnp.float32), broadcast_q=True, cu_seqlens_q=None
    ),
    "broadcast_index_rank": of_rank(
        "q_to_kv", "[batch]", ints(0, 0)[:, None], broadcast_q=True, cu_seqlens_q=None
    ),
    "broadcast_too_long": (
        {"broadcast_q": True, "cu_seqlens_q": None, "max_seqlen_q": 6},
        "max_seqlen_q is 6 but every sequence has the query's T=7 rows",
    ),
}


KNOWN = (
    "known: 'identity', 'relu', 'leaky_relu', 'relu_squared', 'gelu', 'gelu_tanh', 'silu', "
    "'hardswish', 'softmax'"
)
NO_BOUND = "must be an integer of at least 0, known while tracing, but is"
BAD_OPTIONS = {
    "activation": ({"activation": "swish"}, f"unknown activation 'swish'; {KNOWN}"),
    "activation_none": ({"activation": None}, f"unknown activation None; {KNOWN}"),
    "activation_function": ({"activation": jnp.tanh}, "unknown activation <"),
    "activation_of_a_head": (
        {"activation": ("relu", "gelu", "ReLU", "gelu")},
        f"unknown activation 'ReLU'; {KNOWN}",
    ),
    "activations_of_key_heads": (
        {"activation": ("relu", "gelu")},
        "activation has 2 names but query has N=4 heads",
    ),
    "approx": (
        {"approx": "fast"},
        "unknown approx 'fast'; known: None, 'tanh', 'tanh_bf16', 'polynomial'",
    ),
    "approx_of_another": (
        {"approx": "tanh", "activation": ("gelu", "relu", "gelu", "relu")},
        "approx='tanh' applies to gelu_tanh and silu, but activation is gelu, relu",
    ),
    "max_q_negative": ({"max_seqlen_q": -1}, "an integer of at least 0, but is -1"),
    "max_kv_float": ({"max_seqlen_kv": 4.0}, f"max_seqlen_kv {NO_BOUND} 4.0"),
    "max_kv_bool": ({"max_seqlen_kv": True}, f"max_seqlen_kv {NO_BOUND} True"),
    "scales": (
        {"output_scale": np.ones(3, np.float32)},
        "output_scale has shape (3,) but the queries have",
    ),
    "scales_f64": ({"output_scale": np.ones(2)}, "a number or a float32 array, but is float64[2]"),
    "scales_rank": ({"output_scale": np.ones((2, 1), np.float32)}, "output_scale has shape (2, 1)"),
    "cap_zero": ({"logit_cap": 0.0}, "logit_cap must be above 0 in float32, but is 0.0"),
    "cap_negative": ({"logit_cap": -3}, "logit_cap must be above 0 in float32, but is -3"),
    "cap_nan": ({"logit_cap": np.nan}, "logit_cap must be a finite number, but is nan"),
    "cap_array": ({"logit_cap": np.ones(2)}, "logit_cap must be a number known while"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_option_raises_and_says_what_is_known(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ikbo.gdpa(**ARRAYS, **options)


def test_bounds_must_be_known_while_tracing() -> None:
    with pytest.raises(ValueError, match=r"max_seqlen_q .* known while tracing, but is JitTracer"):
        jax.jit(lambda x: ikbo.gdpa(**ARRAYS, max_seqlen_q=x))(jnp.int32(1))


NOT_FOR_THE_KERNEL = {
    "dtype": ({"dtype": jnp.float32}, {}, "the kernel takes bfloat16 and float16"),
    "width": ({}, {}, "the kernel takes head widths 64, 96, 128, 256, but H=8"),
    "softmax": (
        {"width": 64},
        {"activation": ("softmax", "gelu", "softmax", "relu")},
        "softmax in all heads or in none, but the activations are softmax, gelu, softmax, relu",
    ),
    "softmax_run": (
        {"width": 64},
        {"activation": "softmax", "config": GdpaConfig(v_stages=2, run=2)},
        "softmax needs run=1 and none of skip_empty, half_blocks, tickets, "
        "but the config has run=2",
    ),
    "softmax_memory": (
        {"width": 128},
        {"activation": "softmax", "config": GdpaConfig(v_stages=4, q_slots=1, k_stages=3)},
        "bytes of shared memory",
    ),
    "block_kv": (
        {"width": 128},
        {"config": GdpaConfig(block_kv=144)},
        "block_kv must be a multiple of 16 from 16 to 128",
    ),
    "stages": ({"width": 64}, {"config": GdpaConfig(k_stages=1)}, "must be at least 2"),
    "q_slots": ({"width": 64}, {"config": GdpaConfig(q_slots=4)}, "q_slots must be 1, 2 or 3"),
    "memory": ({"width": 128}, {"config": GdpaConfig(k_stages=9)}, "bytes of shared memory"),
    "run": ({"width": 64}, {"config": GdpaConfig(run=0)}, "run must be at least 1, but is 0"),
    "half_blocks": (
        {"width": 64},
        {"config": GdpaConfig(block_kv=48, half_blocks=True)},
        "half_blocks needs a block_kv that is a multiple of 32, but it is 48",
    ),
}


@pytest.mark.parametrize(
    ("array", "options", "message"), NOT_FOR_THE_KERNEL.values(), ids=NOT_FOR_THE_KERNEL
)
def test_mosaic_gpu_says_what_it_cannot_run(array, options, message, seems_hopper) -> None:
    width, dtype = array.get("width", 8), array.get("dtype", BF16)
    shapes = {"query": (7, 4, width), "key": (5, 2, width), "value": (5, 2, width)}
    arrays = ARRAYS | {name: ones(*shape, dtype=dtype) for name, shape in shapes.items()}
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        ikbo.gdpa(**arrays, **options, implementation="mosaic_gpu")
    if "config" not in options:
        (plan,) = ikbo.explain(functools.partial(ikbo.gdpa, **options), **arrays).plans
        assert plan.implementation == "xla"
        assert message in plan.reason

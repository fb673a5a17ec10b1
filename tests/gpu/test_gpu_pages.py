"""Attention to keys and values in pages on a Hopper GPU, by the kernel for few queries and by the
kernel of tiles: the results of the same keys and values in one array, bit for bit."""

import jax.numpy as jnp
import numpy as np
import problems
import pytest
from indexed_attention import in_pages
from test_gpu_attention import check, problem_of, run

from ikbo_jax.problems import AttentionConfig, FewQueriesConfig

pytestmark = pytest.mark.gpu

Shape = problems.AttentionShape
#: A shape, its configuration, and positions of a page.
CASES = {
    "few_queries": (
        Shape(17, 300, 1, 1024, 2, 2, 64, "sorted", "ragged"),
        FewQueriesConfig(64, 1, 128, 3, 3),
        128,
    ),
    "few_queries_split_gqa": (
        Shape(9, 200, 3, 768, 8, 2, 128, "unsorted", "ragged"),
        FewQueriesConfig(64, 3, 64, 3, 3),
        64,
    ),
    "few_queries_listed": (
        Shape(60, 4000, 1, 256, 4, 4, 64, "unsorted", "ragged"),
        FewQueriesConfig(64, 1, 64, 3, 3),
        128,
    ),
    "tiles": (
        Shape(32, 512, 64, 1024, 2, 2, 128, "sorted", "ragged"),
        AttentionConfig(early_scores=True, late_turns=True),
        128,
    ),
    "tiles_blocks_of_64": (
        Shape(7, 90, 16, 384, 4, 2, 192, "unsorted", "ragged"),
        AttentionConfig(64, 3, 3, 1),
        192,
    ),
    "tiles_reuse": (
        Shape(20, 300, 64, 256, 2, 2, 64, "unsorted", "ragged"),
        AttentionConfig(128, 2, 2, 3, reuse=True, balance=True),
        256,
    ),
    "tiles_one_user": (
        Shape(64, 2000, 3, 1024, 2, 2, 64, "gaps", "ragged"),
        AttentionConfig(128, 4, 4, one_user=True),
        128,
    ),
    "tiles_one_user_pages_of_64": (
        Shape(11, 50, 64, 640, 4, 4, 96, "unsorted", "ragged"),
        AttentionConfig(64, one_user=True),
        64,
    ),
}


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention_reads_pages_as_one_array(name, dtype):
    shape, config, page = CASES[name]
    inputs = problems.make_attention_inputs(shape, dtype)
    assert config.illegal_reason(problem_of(shape)) is None
    # Positions past a user's length may hold anything.
    past = jnp.arange(shape.kv_len)[None] >= inputs.key_value_seq_lengths[:, None]
    key, value = (jnp.where(past[..., None, None], jnp.nan, x) for x in inputs[1:3])
    dirty = inputs._replace(key=key.astype(dtype), value=value.astype(dtype))
    expected = run(dirty, config=config)
    check(expected, inputs)
    pages, table = in_pages(dirty, page)
    for found in (run(pages, config=config, **table), run(pages, config=config, **table)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

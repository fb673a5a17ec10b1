"""Attention to keys and values in pages, compared with the same keys and values in one array."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax as ikbo

PAGE, MOST, USERS, PAGES = 4, 3, 5, 20
LENGTHS = np.array([12, 0, 5, 9, 4], np.int32)


def inputs(dtype: str = "float32") -> dict[str, Any]:
    """Users' pages in any order; positions that no user has are NaN."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    table = rng.permutation(PAGES)[: USERS * MOST].reshape(USERS, MOST).astype(np.int32)
    found = {"query": draw(7, 2, 4, 8), "page_table": table, "key_value_seq_lengths": LENGTHS}
    found["cand_to_user"] = np.array([0, 2, 2, 1, 4, 3, 0], np.int32)
    for name in ("key", "value"):
        pages = draw(PAGES, PAGE, 2, 8)
        free = np.ones((PAGES, PAGE), bool)
        for user, length in enumerate(LENGTHS):
            position = np.arange(length)
            free[table[user, position // PAGE], position % PAGE] = False
        pages[free] = np.nan
        found[name] = pages
    return {name: jnp.asarray(array) for name, array in found.items()}


def unpaged(arrays: dict[str, Any]) -> dict[str, Any]:
    table = np.asarray(arrays["page_table"])
    laid_out = {
        name: jnp.asarray(np.asarray(arrays[name])[table].reshape(USERS, MOST * PAGE, 2, 8))
        for name in ("key", "value")
    }
    return {name: x for name, x in arrays.items() if name != "page_table"} | laid_out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_are_read_as_one_array(dtype):
    arrays = inputs(dtype)
    found = jax.jit(functools.partial(ikbo.attention, return_residuals=True))(**arrays)
    expected = ikbo.attention(**unpaged(arrays), return_residuals=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(np.asarray(found[0], np.float32)).all()


def test_gradients_go_to_the_pages():
    arrays = inputs()

    def loss(query, key, value, **rest):
        return jnp.sum(ikbo.attention(query, key, value, **rest) ** 2)

    floats = [arrays.pop(name) for name in ("query", "key", "value")]
    found = jax.grad(loss, argnums=(0, 1, 2))(*floats, **arrays)
    whole = unpaged(dict(zip(("query", "key", "value"), floats, strict=True)) | arrays)
    rows = [whole.pop(name) for name in ("query", "key", "value")]
    expected = jax.grad(loss, argnums=(0, 1, 2))(*rows, **whole)
    table = np.asarray(arrays["page_table"])
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    for pages, rows in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(
            np.asarray(pages)[table], np.asarray(rows).reshape(USERS, MOST, PAGE, 2, 8), atol=1e-6
        )


def test_pages_out_of_range_are_clamped():
    arrays = inputs()
    table = np.array(arrays["page_table"])
    table[1], table[0, 0], table[2, 2] = -5, PAGES + 7, 2**31 - 1
    clamped = arrays | {"page_table": jnp.asarray(np.clip(table, 0, PAGES - 1))}
    np.testing.assert_array_equal(
        ikbo.attention(**arrays | {"page_table": jnp.asarray(table)}), ikbo.attention(**clamped)
    )


def test_explain_says_that_no_kernel_reads_pages():
    arrays = inputs("bfloat16")
    note = "XLA gathers the pages first, no kernel reads them"
    assert note in str(ikbo.explain(ikbo.attention, **arrays))
    assert note not in str(ikbo.explain(ikbo.attention, **unpaged(arrays)))
    with pytest.raises(NotImplementedError, match="no kernel that reads pages"):
        ikbo.attention(**arrays, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_value_seq_lengths": None}, "page_table needs key_value_seq_lengths"),
        ({"page_table": jnp.zeros((USERS, 2))}, "page_table must be an int32 array"),
        ({"page_table": jnp.zeros(USERS, jnp.int32)}, "page_table must be an int32 array"),
        ({"key": jnp.zeros((3, PAGE, 2, 8))}, "key has 3 pages of 4 .* value has 20 pages of 4"),
        ({"key": jnp.zeros((PAGES, 8, 2, 8))}, "key has 20 pages of 8 .* value has 20 pages of 4"),
        ({"key": jnp.zeros((PAGES, 2, 8))}, r"key must have shape \[pages, page, K, H\]"),
        ({"page_table": jnp.zeros((4, MOST), jnp.int32)}, "key_value_seq_lengths has .*U=4"),
        (
            {name: jnp.zeros((0, PAGE, 2, 8)) for name in ("key", "value")},
            r"page_table has shape \(5, 3\) but key has no pages",
        ),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        ikbo.attention(**inputs() | changes)

"""Attention to keys and values in pages, compared with the same keys and values in one array."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from indexed_attention import in_pages

import ikbo_jax as ikbo
from ikbo_jax.problems import FewQueriesConfig

PAGE, MOST, USERS = 4, 3, 5
PAGES = 2 * USERS * MOST
LENGTHS = np.array([12, 0, 5, 9, 4], np.int32)


def whole(dtype: str = "float32") -> dict[str, Any]:
    """Users' keys and values in one array; positions that no user has are NaN."""
    shape = problems.AttentionShape(USERS, 7, 2, MOST * PAGE, 4, 2, 8, "unsorted")
    hidden = (np.arange(MOST * PAGE) >= LENGTHS[:, None])[..., None, None]
    query, *keys, index, _ = problems.make_attention_inputs(shape, dtype)
    keys = [jnp.where(hidden, jnp.nan, x).astype(dtype) for x in keys]
    return problems.AttentionInputs(query, *keys, index, jnp.asarray(LENGTHS))._asdict()


def inputs(dtype: str = "float32") -> dict[str, Any]:
    pages, table = in_pages(problems.AttentionInputs(**whole(dtype)), PAGE)
    return pages._asdict() | table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_are_read_as_one_array(dtype):
    arrays = inputs(dtype)
    found = jax.jit(functools.partial(ikbo.attention, return_residuals=True))(**arrays)
    expected = ikbo.attention(**whole(dtype), return_residuals=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(np.asarray(found[0], np.float32)).all()


def test_gradients_go_to_the_pages():
    arrays = inputs()

    def loss(query, key, value, **rest):
        return jnp.sum(ikbo.attention(query, key, value, **rest) ** 2)

    floats = [arrays.pop(name) for name in ("query", "key", "value")]
    found = jax.grad(loss, argnums=(0, 1, 2))(*floats, **arrays)
    others = whole()
    rows = [others.pop(name) for name in ("query", "key", "value")]
    expected = jax.grad(loss, argnums=(0, 1, 2))(*rows, **others)
    table = np.clip(arrays["page_table"], 0, PAGES - 1)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    for pages, rows in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(
            np.asarray(pages)[table], np.asarray(rows).reshape(USERS, MOST, PAGE, 2, 8), atol=1e-6
        )


@pytest.mark.parametrize(("users", "most"), [(0, MOST), (USERS, 0)])
def test_no_users_or_no_pages_of_them(users: int, most: int):
    arrays = inputs()
    batch = 7 if users else 0
    arrays |= {name: arrays[name][:batch] for name in ("query", "cand_to_user")}
    arrays["key_value_seq_lengths"] = jnp.zeros(users, jnp.int32)
    arrays["page_table"] = jnp.zeros((users, most), jnp.int32)
    out = ikbo.attention(**arrays)
    assert out.shape == arrays["query"].shape
    assert not np.asarray(out).any()


def test_pages_out_of_range_are_clamped():
    arrays = inputs()
    table = np.array(arrays["page_table"])
    table[1], table[0, 0], table[2, 2] = -5, PAGES + 7, 2**31 - 1
    clamped = arrays | {"page_table": jnp.asarray(np.clip(table, 0, PAGES - 1))}
    np.testing.assert_array_equal(
        ikbo.attention(**arrays | {"page_table": jnp.asarray(table)}), ikbo.attention(**clamped)
    )


def wide(page: int = 32, q_len: int = 2, batch: int = 40, users: int = 3) -> dict[str, Any]:
    """bfloat16 arrays of a size that the kernel takes; `page` positions."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    most = 4
    pages = (users * most + 2, page, 2, 64)
    return {
        "query": draw(batch, q_len, 4, 64),
        "key": draw(*pages),
        "value": draw(*pages),
        "page_table": jnp.asarray(rng.integers(-1, pages[0] + 1, (users, most)), jnp.int32),
        "key_value_seq_lengths": jnp.asarray([most * page, 0, page + 3], jnp.int32)[:users],
        "cand_to_user": jnp.asarray(rng.integers(0, users, batch), jnp.int32),
    }


@pytest.mark.parametrize(("page", "q_len"), [(32, 2), (32, 40), (64, 40), (128, 64)])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_kernel_reads_pages_in_place(fake_attention, is_sorted: bool, page: int, q_len: int):
    arrays = wide(page, q_len)
    if is_sorted:
        arrays["cand_to_user"] = jnp.sort(arrays["cand_to_user"])
    attend = functools.partial(ikbo.attention, indices_are_sorted=is_sorted)
    found = jax.jit(attend)(**arrays)
    (call,) = fake_attention.calls
    assert call["page"] == page
    assert page % call["config"].block_kv == 0
    assert isinstance(call["config"], FewQueriesConfig) == (page == 32 or q_len == 2)
    expected = ikbo.attention(**arrays, implementation="xla")
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), atol=0.02)


def test_gradients_of_pages_that_a_kernel_reads_run_in_xla(fake_attention):
    arrays = wide()
    floats = [arrays.pop(name) for name in ("query", "key", "value")]

    def gradients(**options):
        def loss(query, key, value):
            out = ikbo.attention(query, key, value, **arrays, **options)
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(*floats)

    for ours, xla in zip(gradients(), gradients(implementation="xla"), strict=True):
        # Pages that users share have sums of gradients, in f32 here and in bfloat16 there.
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, xla)), atol=0.02)
    assert fake_attention.calls
    assert not fake_attention.backward_calls


def test_a_vmap_of_tables_reads_the_same_pages(fake_attention):
    arrays = wide()
    tables = jnp.stack([arrays["page_table"], arrays["page_table"][::-1]])
    run = lambda table: ikbo.attention(**arrays | {"page_table": table})  # noqa: E731
    found = jax.vmap(run)(tables)
    for one, table in zip(found, tables, strict=True):
        np.testing.assert_array_equal(one, run(table))


def test_explain_says_why_xla_gathers_the_pages():
    note = "XLA gathers the pages first"
    with ikbo.export_target("H100"):
        in_place = str(ikbo.explain(ikbo.attention, **wide()))
        gathered = str(ikbo.explain(ikbo.attention, **wide(page=20)))
    assert note not in in_place
    assert "pages of 32" in in_place
    why = "block_kv must divide pages of 20 positions"
    assert f"{note}: " in gathered
    assert why in gathered
    by_kernel = functools.partial(ikbo.attention, implementation="mosaic_gpu")
    with ikbo.export_target("H100"), pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(by_kernel, **wide(page=20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_value_seq_lengths": None}, "page_table needs key_value_seq_lengths"),
        ({"page_table": jnp.zeros((USERS, 2))}, "page_table must be an int32 array"),
        ({"page_table": jnp.zeros(USERS, jnp.int32)}, r"page_table must have shape \[U, most"),
        ({"key": jnp.zeros((3, PAGE, 2, 8))}, "key has pages=3 but value has pages=30"),
        ({"key": jnp.zeros((PAGES, 8, 2, 8))}, "key has page=8 but value has page=4"),
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

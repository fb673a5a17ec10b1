"""The PTX of launches beside the gradient kernel: rows, lse and delta, own tokens; on a CPU."""

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest

from ikbo_jax.pallas.attention_backward import rows, statistics
from ikbo_jax.pallas.attention_backward.own import add_own_tokens
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import rows as worklist
from ikbo_jax.pallas.worklist import work_order

#: Whether each CTA of the launch numbers the rows, or another launch does.
BY_LAUNCHES = pytest.mark.parametrize("is_numbered_before", [False, True])


def names(*, is_numbered_before: bool, is_ordered_before: bool = False) -> list[str]:
    kinds = ["attention_backward_rows"] * is_numbered_before + ["attention_backward_statistics"]
    kinds = ["user_order"] * is_ordered_before + kinds
    return [f"ikbo_{kind}_mosaic_gpu_kernel" for kind in kinds]


#: Dtype, width, key heads, query heads of each, whether there is a d_lse, whether the index is
#: sorted, and parts of the keys.
CASES = {
    "sorted": ("bfloat16", 64, 2, 1, True, True, 1),
    "unsorted_grouped_f16": ("float16", 96, 1, 3, False, False, 1),
    "unsorted_parts": ("bfloat16", 256, 2, 2, True, False, 3),
    "sorted_grouped_f16": ("float16", 64, 1, 2, False, True, 1),
}


@pytest.mark.parametrize("name", CASES)
@BY_LAUNCHES
def test_emulated_statistics_and_packed_rows_are_those_of_xla(
    name: str, is_numbered_before: bool, sm90: emulator.Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptions of users, parts and tiles are equal, and so are copies of rows."""
    dtype, head_dim, kv_heads, group, has_d_lse, is_sorted, splits = CASES[name]
    sizes = rows.Sizes(9, 4, 100, 3, group, 32, splits, is_sorted, tile_rows=16)
    rng = np.random.default_rng(0)
    shape = (sizes.batch, sizes.q_len, kv_heads * group, head_dim)
    out, d_out, query = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(3))
    lse = rng.normal(size=shape[:3]).astype(np.float32)
    lse[0, 0], lse[1, 0], lse[2, 0] = -np.inf, 3e6, -3e6
    d_lse = jnp.asarray(rng.normal(size=shape[:3]), jnp.float32) if has_d_lse else None
    index = rng.integers(-1, sizes.users + 1, sizes.batch)
    index = jnp.asarray(np.sort(index) if is_sorted else index, jnp.int32)
    lengths = jnp.asarray([100, -3, 50, 200], jnp.int32)
    inputs = rows.Inputs(out, d_out, jnp.asarray(lse), d_lse, query)
    if is_numbered_before:
        monkeypatch.setattr(statistics, "MOST_CTAS", 0)
        # As for more pairs of a candidate and a user, XLA counts candidates by a sum.
        monkeypatch.setattr(work_order, "MAX_COMPARED", 0)
    options = {"kv_heads": kv_heads, "count": 8 * sizes.block_q}
    keeps_delta = {"keeps_delta": has_d_lse}
    with sm90.emulated(0) as launched:
        found, emulated, packed, delta = rows.with_statistics(
            index, lengths, inputs, sizes, **options, **keeps_delta
        )
    is_ordered_before = is_numbered_before and not is_sorted
    assert launched == names(
        is_numbered_before=is_numbered_before, is_ordered_before=is_ordered_before
    )
    with mosaic.interpreted(True):
        by_xla = worklist.by_xla(index, lengths, sizes)
    assert jax.tree.structure(found) == jax.tree.structure(by_xla)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(by_xla), strict=True):
        np.testing.assert_array_equal(x, y)
    for array, copied in zip((query, d_out), packed, strict=True):
        np.testing.assert_array_equal(copied, rows.pack(array, by_xla.order, kv_heads))
    if has_d_lse:
        expected = rows.delta_by_xla(inputs).ravel()
        np.testing.assert_allclose(delta, expected, rtol=2e-6, atol=2e-5)
    want = np.asarray(rows.statistics_by_xla(inputs, by_xla, sizes, kv_heads, options["count"]))
    at = np.asarray(by_xla.targets(sizes)).ravel()
    np.testing.assert_allclose(np.asarray(emulated)[:, :, at], want[:, :, at], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("has_x64", [False, True])
@BY_LAUNCHES
def test_emulated_statistics_are_nan_where_a_promised_order_is_wrong(
    has_x64: bool,
    is_numbered_before: bool,
    sm90: emulator.Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Users keep as many rows as they have candidates."""
    shape = (4, 2, 1, 64)
    out, lse = jnp.ones(shape, jnp.bfloat16), jnp.zeros(shape[:3], jnp.float32)
    sizes = rows.Sizes(4, 3, 100, 2, 1, 16, 1, is_sorted=True)
    inputs = rows.Inputs(out, out, lse, None, out)
    if is_numbered_before:
        monkeypatch.setattr(statistics, "MOST_CTAS", 0)
    orders = ([0, 0, 1, 2], False), ([1, 0, 1, 2], True), ([0, 0, 2, 1], True), ([2, 0, 0, 0], True)
    for index, is_nan in orders:
        with sm90.emulated(0) as launched, jax.enable_x64(has_x64):
            numbers, emulated, *_ = rows.with_statistics(
                jnp.asarray(index, jnp.int32), None, inputs, sizes, kv_heads=1, count=64
            )
        assert launched == names(is_numbered_before=is_numbered_before)
        assert bool(numbers.is_valid) != is_nan
        rows_of_users = np.bincount(index, minlength=sizes.users) * sizes.per_candidate
        np.testing.assert_array_equal(numbers.users[:, 1], rows_of_users)
        # All rows that the next launches read, not only those to which the wrong order leads.
        at = np.concatenate(
            [first + np.arange(n) for _, n, first, _ in np.asarray(numbers.users).tolist()]
        ).astype(int)
        found = np.asarray(emulated)[:, :, at]
        assert np.isnan(found).all() == np.isnan(found).any() == is_nan
        # Memory that nobody wrote is NaN, too.
        assert (found.view(np.uint32) != 2**32 - 1).all()


MANY = {
    "many_users": (700, 300, False, True, None),
    "one_user": (1100, 1, True, True, 128),
    "unsorted_parts_lengths": (300, 130, False, False, 128),
    "more_users_than_candidates": (5, 1000, True, True, 256),
}


@pytest.mark.parametrize("name", MANY)
def test_emulated_numbers_are_those_of_xla(name: str, sm90: emulator.Emulator) -> None:
    """More candidates and users than threads."""
    batch, users, is_even, is_sorted, tile_rows = MANY[name]
    splits = 1 if is_even else 3
    sizes = rows.Sizes(batch, users, 300, 3, 2, 32, splits, is_sorted, tile_rows)
    rng = np.random.default_rng(0)
    index = rng.integers(-1, users + 1, batch)
    index = jnp.asarray(np.sort(index) if is_sorted else index, jnp.int32)
    lengths = None if is_even else jnp.asarray(rng.integers(-5, 305, users), jnp.int32)
    with sm90.emulated(0) as launched:
        found = worklist.make_rows(index, lengths, sizes)
    assert len(launched) == 1 + (not is_sorted)
    with mosaic.interpreted(True):
        want = worklist.by_xla(index, lengths, sizes)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


# The launch that adds own tokens to attention's gradient.

#: Dtype, candidates, T, key heads, query heads of each, head width, and whether tokens' gradients
#: are f32.
OWN = {
    "one_row_each": ("bfloat16", 37, 1, 2, 1, 128, True),
    "grouped_f16_h96": ("float16", 5, 3, 1, 3, 96, False),
    "t8_h64": ("bfloat16", 9, 8, 2, 1, 64, True),
    "h256": ("bfloat16", 3, 2, 1, 2, 256, False),
}


@pytest.mark.parametrize("name", OWN)
def test_emulated_gradients_of_own_tokens(name: str, sm90: emulator.Emulator) -> None:
    dtype, batch, q_len, kv_heads, group, width, is_f32 = OWN[name]
    rng = np.random.default_rng(0)
    rows, tokens = (batch, q_len, kv_heads * group, width), (batch, 1, kv_heads, width)
    shapes = rows, rows, tokens, tokens
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    d_out = jnp.asarray(rng.normal(size=rows), dtype)
    others, delta = (jnp.asarray(rng.normal(size=rows[:3]), jnp.float32) for _ in range(2))
    options: Any = {"scale": width**-0.5, "dtype": "float32" if is_f32 else None}
    query, key = arrays[1].astype(jnp.float32), arrays[2].astype(jnp.float32)
    scores = options["scale"] * jnp.sum(query * jnp.repeat(key, group, axis=2), axis=-1)
    lse = jnp.logaddexp(scores, others)  # of the token and of other keys
    operands = *arrays, lse, d_out, delta
    with sm90.emulated(0) as launched:
        found = add_own_tokens(*operands, **options)
    assert launched == ["ikbo_attention_backward_own_mosaic_gpu_kernel"]
    want = oracle_attention.own_gradient(*operands, **options)
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.01, atol=0.003
        )


def test_emulated_weights_of_huge_logits_are_at_most_one(sm90: emulator.Emulator) -> None:
    """lse is rounded to multiples of 2 there; the weight is 1 of a token that is all of it."""
    rng, tokens = np.random.default_rng(1), (16, 1, 1, 64)
    query, key, value, d_out = (
        jnp.asarray(rng.normal(size=tokens), jnp.bfloat16) for _ in range(4)
    )
    scale, has_all = 4e6, np.arange(16) % 2 == 0
    scores = scale * np.sum(np.float64(query) * np.float64(key), axis=-1)
    lse = jnp.asarray(np.where(has_all[:, None, None], scores, scores + 2e7), jnp.float32)
    assert jnp.max(jnp.abs(lse)) > 2.0**24
    delta = jnp.sum(d_out.astype(jnp.float32) * value.astype(jnp.float32), axis=-1)
    with sm90.emulated(0):
        *_, found = add_own_tokens(
            query, query, key, value, lse, d_out, delta, scale=scale, dtype="float32"
        )
    np.testing.assert_allclose(found, np.where(has_all[:, None, None, None], d_out, 0), rtol=1e-3)

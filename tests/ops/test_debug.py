"""The checks of `debug`: eager, under checkify, and inside a plain jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import ikbo_jax as ikbo

GOOD = np.array([2, 0, 1, 2], np.int32)


BAD_INDICES = [
    ([3, 0, 1, 2], 3, r"cand_to_user\[0\] is 3, outside \[0, 3\); 1 of 4"),
    ([2, 0, 1, -1], 3, r"cand_to_user\[3\] is -1, outside \[0, 3\); 1 of 4"),
    ([2, 0, 2**31 - 1, 2], 3, r"cand_to_user\[2\] is 2147483647, outside \[0, 3\); 1 of 4"),
    ([2, -(2**31), 1, 2], 3, r"cand_to_user\[1\] is -2147483648, outside \[0, 3\); 1 of 4"),
    ([[0, 1], [9, -4]], 3, r"cand_to_user\[1, 0\] is 9, outside \[0, 3\); 2 of 4"),
    ([0, 0], 0, r"cand_to_user\[0\] is 0, outside \[0, 0\)"),
]


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("index", "num_users", "message"), BAD_INDICES)
def test_eager_names_position_value_and_bound(as_array, index, num_users: int, message) -> None:
    with pytest.raises(ValueError, match=message):
        ikbo.debug.check_index(as_array(np.asarray(index, np.int32)), num_users)
    with pytest.raises(ValueError, match=message.replace("cand_to_user", "q_to_kv")):
        ikbo.debug.check_index(as_array(np.asarray(index, np.int32)), num_users, "q_to_kv")


@pytest.mark.parametrize(
    ("index", "num_users"), [(GOOD, 3), (np.zeros(0, np.int32), 0), (np.zeros(1, np.int32), 1)]
)
def test_good_index_passes(index: np.ndarray, num_users: int) -> None:
    assert ikbo.debug.check_index(jnp.asarray(index), num_users) is None


@pytest.mark.parametrize("wrong", [[0, 1], np.zeros(2, np.float32), None])
def test_not_an_index(wrong) -> None:
    with pytest.raises(TypeError, match="array of integers"):
        ikbo.debug.check_index(wrong, 3)


def gather(index: jax.Array) -> jax.Array:
    ikbo.debug.check_index(index, 3)
    return index + 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["traced", "jit"])
def test_checkify_finds_it(wrap) -> None:
    checked = jax.jit(checkify.checkify(wrap(gather)))
    error, out = checked(jnp.asarray(GOOD))
    assert error.get() is None
    np.testing.assert_array_equal(out, GOOD + 1)
    error, _ = checked(jnp.asarray([0, 1, -7, 5], jnp.int32))
    assert "cand_to_user.ravel()[2] is -7, outside [0, 3)" in error.get()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
@pytest.mark.parametrize("num_users", [0, 3, 300, 70_000, 2**31, 2**40])
def test_checkify_agrees_with_eager_for_every_integer(dtype: str, num_users: int) -> None:
    """A bound that the index's dtype does not hold is not wrapped to that dtype."""
    index = np.array([2, 120, 0], dtype)
    if num_users in (0, 3):
        position = {0: 0, 3: 1}[num_users]
        with pytest.raises(ValueError, match=rf"\[{position}\] is {index[position]}, outside"):
            ikbo.debug.check_index(index, num_users)
    else:
        ikbo.debug.check_index(index, num_users)

    def run(index: jax.Array) -> jax.Array:
        ikbo.debug.check_index(index, num_users)
        return index

    error, _ = checkify.checkify(jax.jit(run))(index)
    message = error.get()
    assert (message is not None) == (num_users in (0, 3)), message


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_checkify_of_narrow_offsets(dtype: str) -> None:
    def run(offsets: jax.Array, max_seqlen: int) -> jax.Array:
        ikbo.debug.check_offsets(offsets, 1000, max_seqlen)
        return offsets

    offsets = np.array([0, 3, 3, 110], dtype)
    for max_seqlen, expected in ((500, None), (106, "sequence 2 of cu_seqlens has 107 rows")):
        error, _ = checkify.checkify(jax.jit(run, static_argnums=1))(offsets, max_seqlen)
        message = error.get()
        assert message is None if expected is None else expected in message


def test_plain_jit_cannot_raise() -> None:
    out = jax.jit(gather)(jnp.asarray([0, 1, -7, 5], jnp.int32))
    np.testing.assert_array_equal(out, [1, 2, -6, 6])


def test_checkify_goes_through_an_op() -> None:
    def run(index: jax.Array) -> jax.Array:
        ikbo.debug.check_index(index, 2)
        ones = jnp.ones((2, 2), jnp.float32)
        return ikbo.linear_compression(ones, ones, ones[None], jnp.stack([ones, ones]), index)

    error, out = checkify.checkify(jax.jit(run))(jnp.asarray([2], jnp.int32))
    assert "is 2, outside [0, 2)" in error.get()
    np.testing.assert_array_equal(out, np.full((1, 2, 2), 4.0))


@pytest.mark.parametrize(("position", "value"), [(0, 9), (2, -1), (1, 2**31 - 1), (3, -(2**31))])
def test_lengths_name_position_value_and_bound(position: int, value: int) -> None:
    lengths = np.array([8, 0, 1, 7], np.int32)
    assert ikbo.debug.check_lengths(jnp.asarray(lengths), 8) is None
    lengths[position] = value
    message = rf"key_value_seq_lengths\[{position}\] is {value}, outside \[0, 8\]; 1 of 4 lengths"
    with pytest.raises(ValueError, match=message):
        ikbo.debug.check_lengths(jnp.asarray(lengths), 8)


def test_checkify_finds_wrong_lengths() -> None:
    def run(lengths: jax.Array) -> jax.Array:
        ikbo.debug.check_lengths(lengths, 3)
        ones = jnp.ones((2, 3, 1, 2), jnp.float32)
        index = jnp.zeros(2, jnp.int32)
        return ikbo.attention(ones, ones, ones, index, key_value_seq_lengths=lengths)

    error, out = checkify.checkify(jax.jit(run))(jnp.asarray([1, 4], jnp.int32))
    assert "key_value_seq_lengths.ravel()[1] is 4, outside [0, 3]" in error.get()
    np.testing.assert_array_equal(out, np.ones((2, 3, 1, 2)))


OFFSETS = np.array([0, 3, 3, 10, 12], np.int32)


@pytest.mark.parametrize("max_seqlen", [None, 7, 2**31])
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_good_offsets_pass(as_array, max_seqlen: int | None) -> None:
    assert ikbo.debug.check_offsets(as_array(OFFSETS), 12, max_seqlen) is None
    assert ikbo.debug.check_offsets(as_array(OFFSETS[:1]), 0, max_seqlen) is None


BAD_OFFSETS = {
    "beyond": ({4: 13}, None, r"cu_seqlens_q\[4\] is 13, outside \[0, 12\]; 1 of 5 offsets"),
    "negative": ({0: -1}, None, r"cu_seqlens_q\[0\] is -1, outside \[0, 12\]"),
    "falling": (
        {2: 1},
        None,
        r"cu_seqlens_q\[2\] is 1, below cu_seqlens_q\[1\], which is 3; 1 of 4 lengths",
    ),
    "too_long": (
        {},
        6,
        r"sequence 2 of cu_seqlens_q has 7 rows, but max_seqlen is 6; 1 of 4 sequences",
    ),
}


@pytest.mark.parametrize(
    ("changes", "max_seqlen", "message"), BAD_OFFSETS.values(), ids=BAD_OFFSETS
)
def test_bad_offsets_name_position_values_and_bound(changes, max_seqlen, message: str) -> None:
    offsets = OFFSETS.copy()
    for position, value in changes.items():
        offsets[position] = value
    for array in (offsets, jnp.asarray(offsets)):
        with pytest.raises(ValueError, match=message):
            ikbo.debug.check_offsets(array, 12, max_seqlen, "cu_seqlens_q")


def test_offsets_of_wrong_shape_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"shape \[batch \+ 1\], but has shape \(2, 2\)"):
        ikbo.debug.check_offsets(np.zeros((2, 2), np.int32), 3)
    with pytest.raises(ValueError, match=r"shape \[batch \+ 1\], but has shape \(0,\)"):
        ikbo.debug.check_offsets(np.zeros(0, np.int32), 3)
    with pytest.raises(TypeError, match="cu_seqlens must be an array of integers, but is float32"):
        ikbo.debug.check_offsets(np.zeros(2, np.float32), 3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0, 3, 3, 10, 12], None),
        ([0, 3, 3, 10, 13], "cu_seqlens_kv.ravel()[4] is 13, outside [0, 12]"),
        ([0, 3, 1, 2, 12], "cu_seqlens_kv decreases from 3 to 1 in sequence 1"),
        ([0, 0, 9, 12, 12], "sequence 1 of cu_seqlens_kv has 9 rows, but max_seqlen is 7"),
    ],
)
def test_checkify_finds_wrong_offsets(values: list[int], words: str | None) -> None:
    def run(offsets: jax.Array) -> jax.Array:
        ikbo.debug.check_offsets(offsets, 12, 7, "cu_seqlens_kv")
        return offsets + 1

    offsets = jnp.asarray(values, jnp.int32)
    error, out = checkify.checkify(jax.jit(run))(offsets)
    assert error.get() is None if words is None else words in error.get()
    np.testing.assert_array_equal(jax.jit(run)(offsets), out)

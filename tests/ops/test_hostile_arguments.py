"""What a newcomer passes by mistake, and the checks of `debug`: answers in words of their own."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from refusals import ones

import ikbo_jax as ikbo
from ikbo_jax.debug import check_index, check_lengths, check_offsets
from ikbo_jax.layers import HstuCache, functional, hstu_layer

INDEX = np.zeros(7, np.int32)
OFFSETS = np.array([0, 3, 5], np.int32)
#: Every op with its arrays, by name; the integers among them are last.
OPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (
        ikbo.attention,
        {
            "query": ones(7, 2, 4, 8),
            "key": ones(3, 5, 2, 8),
            "value": ones(3, 5, 2, 8),
            "cand_to_user": INDEX,
        },
    ),
    "linear_compression": (
        ikbo.linear_compression,
        {
            "w_cand": ones(4, 5),
            "w_user": ones(4, 6),
            "e_cand": ones(7, 5, 8),
            "e_user": ones(3, 6, 8),
            "cand_to_user": INDEX,
        },
    ),
    "gdpa": (
        ikbo.gdpa,
        {
            "query": ones(5, 2, 8),
            "key": ones(5, 2, 8),
            "value": ones(5, 2, 8),
            "cu_seqlens_q": OFFSETS,
            "cu_seqlens_kv": OFFSETS,
        },
    ),
    "look_up": (ikbo.look_up, {"user": ones(3, 8), "cand_to_user": INDEX}),
    "segment_sum": (
        lambda values, cand_to_user: ikbo.segment_sum(values, cand_to_user, 3),
        {"values": ones(7, 8), "cand_to_user": INDEX},
    ),
}
OPS["dot_product_attention"] = (ikbo.dot_product_attention, OPS["attention"][1])
OPS["merge_attention"] = (
    ikbo.merge_attention,
    {f"out{i}": ones(7, 2, 4, 8) for i in (1, 2)}
    | {f"lse{i}": ones(7, 2, 4, dtype=np.float32) for i in (1, 2)},
)
OPS["multilevel_linear_compression"] = (
    lambda **a: ikbo.multilevel_linear_compression(
        [
            ikbo.Term(a["terms[0].weight"], a["terms[0].embedding"]),
            ikbo.Term(ones(4, 5), ones(7, 5, 8), a["terms[1].parent"]),
        ]
    ),
    {"terms[0].weight": ones(4, 5), "terms[0].embedding": ones(3, 5, 8), "terms[1].parent": INDEX},
)
OPS["norm_linear"] = (
    lambda **a: ikbo.norm_linear(a["x"], [a["weights[0]"]]),
    {"x": ones(5, 8), "weights[0]": ones(8, 16)},
)
OPS["gated_linear"] = (
    lambda **a: ikbo.gated_linear(None, **a),
    {"a": ones(5, 2, 4), "weight": ones(8, 16)},
)
ARGUMENTS = [(op, name) for op, (_, arrays) in OPS.items() for name in arrays]
LENGTHS = np.ones(3, np.int32)
HSTU = {"uvqk_weight": ones(8, 32), "output_weight": ones(24, 8)}
CACHE = HstuCache(ones(5, 2, 4), ones(5, 2, 4), OFFSETS)


#: The same with arguments that may be None, and the layers, whose own errors name an argument.
ALL = OPS | {
    "attention_pages": (
        ikbo.attention,
        OPS["attention"][1]
        | {"key_value_seq_lengths": LENGTHS, "page_table": np.zeros((3, 2), np.int32)},
    ),
    "attention_self": (
        ikbo.attention,
        OPS["attention"][1]
        | {"key_value_ranges": np.zeros((7, 2), np.int32)}
        | {"self_key": ones(7, 2, 2, 8), "self_value": ones(7, 2, 2, 8)},
    ),
    "attention_biased": (
        ikbo.attention,
        OPS["attention"][1] | {"bias": ones(3, 1, 1, 5, dtype=np.float32)},
    ),
    "dot_product_attention_masked": (
        ikbo.dot_product_attention,
        OPS["attention"][1]
        | {"bias": ones(3, 1, 1, 5, dtype=np.float32), "mask": ones(3, 1, 1, 5, dtype=bool)}
        | {"query_seq_lengths": INDEX, "key_value_seq_lengths": LENGTHS},
    ),
    "gdpa_of_users": (
        ikbo.gdpa,
        OPS["gdpa"][1]
        | {"q_to_kv": np.zeros(2, np.int32), "output_scale": ones(2, dtype=np.float32)},
    ),
    "gdpa_masked": (
        lambda num_targets, **arrays: ikbo.gdpa(**arrays, mask=ikbo.masks.hstu(num_targets)),
        OPS["gdpa"][1] | {"num_targets": np.ones(2, np.int32)},
    ),
    "gated_residual": (
        ikbo.gated_linear,
        OPS["gated_linear"][1]
        | {"u": ones(5, 2, 4), "residual": ones(5, 16), "shared_residual": ones(1, 16)},
    ),
    "hstu_layer": (
        lambda x, cu_seqlens, **params: hstu_layer(
            params, x, cu_seqlens, num_heads=2, max_seqlen=3
        ),
        {"x": ones(5, 8), "cu_seqlens": OFFSETS} | HSTU,
    ),
    "hstu_cache": (
        lambda **a: hstu_layer(
            HSTU, ones(5, 8), OFFSETS, num_heads=2, max_seqlen=3, cache=HstuCache(*a.values())
        ),
        {f"cache.{name}": x for name, x in CACHE._asdict().items()},
    ),
    "compress": (
        lambda e_user, e_cand, cand_to_user, **params: functional.compress(
            params, e_user, e_cand, cand_to_user
        ),
        OPS["linear_compression"][1],
    ),
    "look_up_layer": (
        lambda table, index: functional.look_up({"table": table}, index),
        {"table": ones(3, 8), "index": INDEX},
    ),
}


def refused(op: str, changes: dict[str, Any], error: type[Exception] = ValueError) -> str:
    fn, arrays = ALL[op]
    with pytest.raises(error) as raised:
        fn(**arrays | changes)
    return str(raised.value)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_none_names_the_argument(op: str, name: str) -> None:
    kind = r"an? (array of shape .*|(int32|float32) array), but is None"
    assert re.match(rf"{re.escape(name)} must be {kind}", refused(op, {name: None}))


@pytest.mark.parametrize("op", ALL)
def test_shapes_without_values_are_sent_to_explain(op: str) -> None:
    for name, x in ALL[op][1].items():
        text = refused(op, {name: jax.ShapeDtypeStruct(x.shape, x.dtype)})
        kind = f"{x.dtype}{list(x.shape)}"
        assert text.endswith(
            f"takes arrays, but one is a ShapeDtypeStruct, {kind}; shapes go to ikbo_jax.explain "
            "or jax.eval_shape, with the function"
        )


@pytest.mark.parametrize("op", ALL)
def test_numpy_s_default_index_names_the_remedy(op: str) -> None:
    for name, x in ALL[op][1].items():
        if x.dtype == np.int32:
            text = refused(op, {name: np.asarray(x, np.int64)})
            assert text.startswith(f"{name} must be an int32 array")
            assert text.endswith(f" int64{list(x.shape)}; convert it by .astype(np.int32)")


@pytest.mark.parametrize("op", ALL)
def test_arrays_on_other_devices_are_named(op: str) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    first, second = jax.devices()[:2]
    arrays = {name: jax.device_put(x, first) for name, x in ALL[op][1].items()}
    for name in arrays:
        text = refused(op, arrays | {name: jax.device_put(arrays[name], second)})
        assert f" is on {second}" in text
        assert f" is on {first}" in text
        assert text.endswith("; jax.device_put moves arrays")


@pytest.mark.parametrize("wrong", [None, jnp.ones(3), "f"])
def test_results_in_place_of_functions(wrong: Any) -> None:
    for caller in (ikbo.explain, ikbo.tune, ikbo.benchmark):
        with pytest.raises(TypeError, match="pass the function and its arguments"):
            caller(wrong)
    with pytest.raises(TypeError, match="fn must be a function"):
        ikbo.rewrite(wrong)


def test_there_is_no_time_of_shapes() -> None:
    with pytest.raises(ValueError, match="benchmark takes arrays, but one is a ShapeDtypeStruct"):
        ikbo.benchmark(jnp.sin, jax.ShapeDtypeStruct((2,), np.float32))


def test_numbers_of_numpy_are_integers_and_shapes_are_no_weights() -> None:
    assert ikbo.benchmark(jnp.sin, jnp.ones(2), rounds=np.int64(1), window_s=0.001).ms > 0
    with pytest.raises(ValueError, match="pad_weight takes arrays, but one is a ShapeDtypeStruct"):
        ikbo.pad_weight(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))


@pytest.mark.parametrize("size", ["2", None, 2.0, True, -1])
def test_sizes_of_checks_are_integers(size: Any) -> None:
    def message(name: str) -> str:
        return re.escape(f"{name} must be an integer of at least 0, but is {size!r}")

    with pytest.raises(ValueError, match=message("num_users")):
        ikbo.debug.check_index(INDEX, size)
    with pytest.raises(ValueError, match=message("kv_len")):
        ikbo.debug.check_lengths(INDEX, size)
    with pytest.raises(ValueError, match=message("total")):
        ikbo.debug.check_offsets(OFFSETS, size)
    if size is not None:
        with pytest.raises(ValueError, match=message("max_seqlen")):
            ikbo.debug.check_offsets(OFFSETS, 5, size)


def test_numpy_s_sizes_are_welcome() -> None:
    ikbo.debug.check_index(INDEX, np.int64(1))
    ikbo.debug.check_offsets(OFFSETS, np.int32(5), np.int32(3))


#: For each check: its array, its other arguments, and what it raises.
BAD = {
    check_index: [
        ([3, 0, 1, 2], (3,), "cand_to_user[0] is 3, outside [0, 3); 1 of 4"),
        ([2, 0, 1, -1], (3,), "cand_to_user[3] is -1, outside [0, 3); 1 of 4"),
        ([2, 0, 2**31 - 1], (3,), "cand_to_user[2] is 2147483647, outside [0, 3); 1 of 3"),
        ([2, -(2**31)], (3,), "cand_to_user[1] is -2147483648, outside [0, 3); 1 of 2"),
        ([[0, 1], [9, -4]], (3,), "cand_to_user[1, 0] is 9, outside [0, 3); 2 of 4"),
        ([0, 0], (0,), "cand_to_user[0] is 0, outside [0, 0)"),
        ([3, 0], (3, "q_to_kv"), "q_to_kv[0] is 3, outside [0, 3); 1 of 2"),
    ],
    check_lengths: [
        ([9, 0], (8,), "key_value_seq_lengths[0] is 9, outside [0, 8]; 1 of 2 lengths"),
        ([8, 2**31 - 1], (8,), "key_value_seq_lengths[1] is 2147483647, outside [0, 8]; 1 of 2 le"),
        ([8, 0, -1], (8,), "key_value_seq_lengths[2] is -1, outside [0, 8]; 1 of 3 lengths"),
        ([8, -(2**31)], (8,), "key_value_seq_lengths[1] is -2147483648, outside [0, 8]; 1 of 2 le"),
    ],
    check_offsets: [
        ([0, 3, 13], (12, None, "cu"), "cu[2] is 13, outside [0, 12]; 1 of 3 offsets"),
        ([-1, 3, 12], (12, None, "cu"), "cu[0] is -1, outside [0, 12]"),
        ([0, 3, 1, 12], (12, None, "cu"), "cu decreases from 3 to 1 in sequence 1; 1 of 3 lengths"),
        ([0, 3, 3, 10], (12, 6, "cu"), "sequence 2 of cu has 7 rows, but max_seqlen is 6; 1 of 3"),
    ],
}
GOOD = [
    (check_index, [2, 0, 1, 2], (3,)),
    (check_index, [], (0,)),
    (check_index, [0], (1,)),
    (check_lengths, [8, 0, 1, 7], (8,)),
    *(
        (check_offsets, values, (values[-1], max_seqlen))
        for values in ([0, 3, 3, 10, 12], [0])
        for max_seqlen in (None, 7, 2**31)
    ),
]


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("check", "values", "arguments", "message"),
    [(check, *case) for check, cases in BAD.items() for case in cases],
)
def test_eager_names_position_value_and_bound(as_array, check, values, arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(as_array(np.asarray(values, np.int32)), *arguments)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("check", "values", "arguments"), GOOD)
def test_good_arrays_pass(as_array, check, values, arguments) -> None:
    assert check(as_array(np.asarray(values, np.int32)), *arguments) is None


@pytest.mark.parametrize(
    "wrong", [[0, 1], np.zeros(2, np.float32), None, jax.ShapeDtypeStruct((2,), np.int32)]
)
@pytest.mark.parametrize("check", [check_index, check_offsets])
def test_not_an_array_of_integers(check, wrong) -> None:
    kind = wrong.dtype if isinstance(wrong, np.ndarray) else type(wrong).__name__
    with pytest.raises(TypeError, match=f"array of integers, but is {kind}"):
        check(wrong, 3)


@pytest.mark.parametrize("shape", [(2, 2), (0,)])
def test_offsets_of_wrong_shape(shape: tuple[int, ...]) -> None:
    words = re.escape(f"shape [batch + 1], but has shape {shape}")
    with pytest.raises(ValueError, match=words):
        check_offsets(np.zeros(shape, np.int32), 3)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["traced", "jit"])
@pytest.mark.parametrize(
    ("check", "values", "arguments", "words"),
    [
        (check_index, [2, 0, 1, 2], (3,), None),
        (check_index, [0, 1, -7, 5], (3,), "cand_to_user.ravel()[2] is -7, outside [0, 3)"),
        *(
            (check_offsets, values, (12, 7, "cu_seqlens_kv"), words)
            for values, words in (
                ([0, 3, 3, 10, 12], None),
                ([0, 3, 3, 10, 13], "cu_seqlens_kv.ravel()[4] is 13, outside [0, 12]"),
                ([0, 3, 1, 2, 12], "cu_seqlens_kv decreases from 3 to 1 in sequence 1"),
                ([0, 0, 9, 12, 12], "sequence 1 of cu_seqlens_kv has 9 rows, but max_seqlen is 7"),
            )
        ),
    ],
)
def test_checkify_finds_it_and_plain_jit_cannot_raise(wrap, check, values, arguments, words):
    def run(array: jax.Array) -> jax.Array:
        check(array, *arguments)
        return array + 1

    array = jnp.asarray(values, jnp.int32)
    error, out = jax.jit(checkify.checkify(wrap(run)))(array)
    assert error.get() is None if words is None else words in error.get()
    np.testing.assert_array_equal(jax.jit(run)(array), array + 1)
    if words is None:
        np.testing.assert_array_equal(out, array + 1)


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


def test_checkify_goes_through_an_op() -> None:
    def run(index: jax.Array) -> jax.Array:
        ikbo.debug.check_index(index, 2)
        ones = jnp.ones((2, 2), jnp.float32)
        return ikbo.linear_compression(ones, ones, ones[None], jnp.stack([ones, ones]), index)

    error, out = checkify.checkify(jax.jit(run))(jnp.asarray([2], jnp.int32))
    assert "is 2, outside [0, 2)" in error.get()
    np.testing.assert_array_equal(out, np.full((1, 2, 2), 4.0))


def test_checkify_finds_wrong_lengths() -> None:
    def run(lengths: jax.Array) -> jax.Array:
        ikbo.debug.check_lengths(lengths, 3)
        ones = jnp.ones((2, 3, 1, 2), jnp.float32)
        index = jnp.zeros(2, jnp.int32)
        return ikbo.attention(ones, ones, ones, index, key_value_seq_lengths=lengths)

    error, out = checkify.checkify(jax.jit(run))(jnp.asarray([1, 4], jnp.int32))
    assert "key_value_seq_lengths.ravel()[1] is 4, outside [0, 3]" in error.get()
    np.testing.assert_array_equal(out, np.ones((2, 3, 1, 2)))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([3, 0, 7], None),
        ([3, 1, 7], "sequence 1 of cu_seqlens has 0 rows but 1 targets"),
        ([3, 0, 2**31 - 1], "sequence 2 of cu_seqlens has 7 rows but 2147483647 targets"),
        ([-1, 0, 7], "is -1, outside [0, 2147483647]"),
    ],
)
def test_targets_beyond_a_length_are_found(targets: list[int], message: str | None) -> None:
    arrays = jnp.asarray([0, 3, 3, 10], jnp.int32), jnp.asarray(targets, jnp.int32)

    def run(offsets: jax.Array, targets: jax.Array) -> None:
        check_offsets(offsets, 10, num_targets=targets)

    error, _ = jax.jit(checkify.checkify(run))(*arrays)
    if message is None:
        run(*arrays)
        assert error.get() is None
    else:
        assert message in error.get()
        with pytest.raises(ValueError, match=re.escape(message)):
            run(*map(np.asarray, arrays))
    jax.jit(run)(*arrays)


def test_targets_of_another_batch() -> None:
    with pytest.raises(ValueError, match=re.escape("has shape (2,) but cu has batch=1")):
        check_offsets(np.asarray([0, 3], np.int32), 3, None, "cu", num_targets=np.zeros(2, int))

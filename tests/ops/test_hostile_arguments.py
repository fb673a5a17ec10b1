"""What a newcomer passes by mistake, and the checks of `debug`: answers in words of their own."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_arguments as of_attention
import test_gdpa_arguments as of_gdpa
import test_linear_compression_arguments as of_compression
from jax.experimental import checkify
from refusals import ones

import ikbo_jax as ikbo
from ikbo_jax.debug import check_index, check_lengths, check_offsets
from ikbo_jax.layers import HstuCache, attention_fn, functional, hstu_layer

INDEX = np.zeros(7, np.int32)
OFFSETS = np.array([0, 3, 5], np.int32)
#: Every op with its arrays, by name; the integers among them are last.
OPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (ikbo.attention, of_attention.ARRAYS),
    "linear_compression": (ikbo.linear_compression, of_compression.ARRAYS),
    "gdpa": (ikbo.gdpa, of_gdpa.ARRAYS),
    "look_up": (ikbo.look_up, {"user": ones(3, 8), "cand_to_user": INDEX}),
    "segment_sum": (
        lambda values, cand_to_user: ikbo.segment_sum(values, cand_to_user, 3),
        {"values": ones(7, 8), "cand_to_user": INDEX},
    ),
}
OPS["dot_product_attention"] = (ikbo.dot_product_attention, of_attention.ARRAYS)
OPS["merge_attention"] = (
    ikbo.merge_attention,
    {f"out{i}": of_attention.OUT for i in (1, 2)} | {f"lse{i}": of_attention.LSE for i in (1, 2)},
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
        of_attention.ARRAYS
        | {"key_value_seq_lengths": LENGTHS, "page_table": np.zeros((3, 2), np.int32)},
    ),
    "attention_self": (
        ikbo.attention,
        of_attention.ARRAYS
        | {"key_value_ranges": np.zeros((7, 2), np.int32)}
        | {"self_key": ones(7, 2, 2, 8), "self_value": ones(7, 2, 2, 8)},
    ),
    "attention_biased": (
        ikbo.attention,
        of_attention.ARRAYS | {"bias": ones(3, 1, 1, 5, dtype=np.float32)},
    ),
    "dot_product_attention_masked": (
        ikbo.dot_product_attention,
        of_attention.ARRAYS
        | {"bias": ones(3, 1, 1, 5, dtype=np.float32), "mask": ones(3, 1, 1, 5, dtype=bool)}
        | {"query_seq_lengths": INDEX, "key_value_seq_lengths": LENGTHS},
    ),
    "gdpa_of_users": (
        ikbo.gdpa,
        of_gdpa.ARRAYS
        | {"q_to_kv": np.zeros(2, np.int32), "output_scale": ones(2, dtype=np.float32)},
    ),
    "gdpa_masked": (
        lambda num_targets, **arrays: ikbo.gdpa(**arrays, mask=ikbo.masks.hstu(num_targets)),
        of_gdpa.ARRAYS | {"num_targets": np.ones(2, np.int32)},
    ),
    "gated_residual": (
        ikbo.gated_linear,
        OPS["gated_linear"][1]
        | {"u": ones(5, 2, 4), "residual": ones(5, 16), "shared_residual": ones(1, 16)},
    ),
    "attention_fn": (
        lambda cand_to_user, **arrays: attention_fn(cand_to_user)(**arrays),
        of_attention.ARRAYS,
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
        of_compression.ARRAYS,
    ),
    "look_up_layer": (
        lambda table, index: functional.look_up({"table": table}, index),
        {"table": ones(3, 8), "index": INDEX},
    ),
}


def refused(op: str, changes: dict[str, Any]) -> str:
    fn, arrays = ALL[op]
    with pytest.raises(ValueError) as raised:
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
def test_masked_arrays_are_refused(op: str) -> None:
    """JAX refuses them, too, but not where a compiled program for their shapes exists."""
    for name, x in ALL[op][1].items():
        text = refused(op, {name: np.ma.masked_array(np.asarray(x), mask=False)})
        kind = f"{x.dtype}{list(x.shape)}"
        assert text.endswith(f"takes no masked array, but one is {kind}; fill it by .filled()")


LAYERS = ("compress", "look_up_layer", "hstu_layer")


@pytest.mark.parametrize("op", LAYERS)
@pytest.mark.parametrize("dtype", ["complex64", "object", "float8_e4m3fn"])
def test_layers_name_the_dtypes_that_have_no_product(op: str, dtype: str) -> None:
    for name, x in ALL[op][1].items():
        if x.dtype != np.int32:
            text = refused(op, {name: np.asarray(x).astype(dtype)})
            assert f" computes in bfloat16, float16 or float32, but {name} is {dtype}" in text


def test_layers_name_a_dtype_in_which_they_do_not_compute() -> None:
    _, arrays = ALL["compress"]
    params = {name: arrays[name] for name in ("w_user", "w_cand")}
    inputs = [arrays[name] for name in ("e_user", "e_cand", "cand_to_user")]
    with pytest.raises(ValueError, match=r"LinearCompression computes in .*, but dtype is int32"):
        functional.compress(params, *inputs, dtype="int32")
    with pytest.raises(ValueError, match=r"LookUp computes in .*, but its arrays promote to int32"):
        functional.look_up({"table": np.ones((3, 8), np.int32)}, INDEX)
    with pytest.raises(ValueError, match=r"LinearCompression computes in .*, but dtype is \[1\]"):
        functional.compress(params, *inputs, dtype=[1])
    for wrong in ("HIGHEST", ["highest"]):
        with pytest.raises(
            ValueError, match=rf"precision must be .*, but is {re.escape(repr(wrong))}"
        ):
            functional.compress(params, *inputs, precision=wrong)


@pytest.mark.parametrize("option", ["activation", "approx"])
def test_arrays_in_place_of_names(option: str) -> None:
    text = refused("gdpa", {option: np.ones((2, 2))})
    assert text.startswith(f"unknown {option} array")
    for name, what in (("norm", "unknown norm"), ("recompute", "recompute has the unknown name")):
        with pytest.raises(ValueError, match=rf"{what} array"):
            ikbo.norm_linear(ones(5, 8), [ones(8, 16)], **{name: np.ones((2, 2))})


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
    with pytest.raises(
        ValueError, match=r"benchmark takes arrays with values, but .* float32\[2\]"
    ):
        jax.jit(lambda x: ikbo.benchmark(jnp.sin, x).ms)(jnp.ones(2))


def test_what_has_a_shape_and_a_dtype_is_not_yet_an_array() -> None:
    padded, reference = ikbo.pad_weight(ones(3, 8)), jax.new_ref(jnp.ones((3, 8)))
    with pytest.raises(ValueError, match="user must be an array .*, but is a PaddedWeight"):
        ikbo.look_up(padded, INDEX)
    for fn in (ikbo.look_up, lambda x, i: functional.look_up({"table": x}, i)):
        with pytest.raises(
            ValueError, match="takes arrays of JAX or NumPy, but one is a .*asarray"
        ):
            fn(reference, INDEX)
    with pytest.raises(ValueError, match="is_causal must be a bool .*, but is key<fry>"):
        ikbo.dot_product_attention(**of_attention.ARRAYS, is_causal=jax.random.key(0))
    with pytest.raises(ValueError, match=r"unknown card \['H100'\]; known"):
        ikbo.export_target(["H100"], num_sms=3).__enter__()


def test_other_values_than_arrays_are_passed_to_what_is_timed() -> None:
    timing = ikbo.benchmark(
        lambda x, size, name: jnp.ones(size) * x[name], {"a": jnp.ones(())}, 3, "a", window_s=0.001
    )
    assert timing.ms > 0


def test_numbers_of_numpy_are_integers_and_shapes_are_no_weights() -> None:
    assert ikbo.benchmark(jnp.sin, jnp.ones(2), rounds=np.int64(1), window_s=0.001).ms > 0
    ikbo.debug.check_index(INDEX, np.int64(1))
    ikbo.debug.check_offsets(OFFSETS, np.int32(5), np.int32(3))
    with pytest.raises(ValueError, match="pad_weight takes arrays, but one is a ShapeDtypeStruct"):
        ikbo.pad_weight(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))


@pytest.mark.parametrize("size", ["2", None, 2.0, True, -1, np.ones((1, 1))])
def test_sizes_of_checks_are_integers(size: Any) -> None:
    def message(name: str) -> str:
        end = f"{', known while tracing' * (repr(size) != '-1')}, but is {size!r}"
        return re.escape(f"{name} must be an integer of at least 0{end}")

    with pytest.raises(ValueError, match=message("num_users")):
        ikbo.debug.check_index(INDEX, size)
    with pytest.raises(ValueError, match=message("kv_len")):
        ikbo.debug.check_lengths(INDEX, size)
    with pytest.raises(ValueError, match=message("total")):
        ikbo.debug.check_offsets(OFFSETS, size)
    if size is not None:
        with pytest.raises(ValueError, match=message("max_seqlen")):
            ikbo.debug.check_offsets(OFFSETS, 5, size)


def check_targets(both: Any) -> None:
    """Checks three sequences' offsets, of ten rows and another dtype, with the targets behind."""
    check_offsets(both[:4].astype(np.int16), 10, num_targets=both[4:])


#: For each check: its array, its other arguments, and what it raises, or None.
CHECKED: dict[Any, list[tuple[list[Any], tuple[Any, ...], str | None]]] = {
    check_index: [
        ([3, 0, 1, 2], (3,), "cand_to_user[0] is 3, outside [0, 3); 1 of 4"),
        ([2, 0, 1, -1], (3,), "cand_to_user[3] is -1, outside [0, 3); 1 of 4"),
        ([2, 0, 2**31 - 1], (3,), "cand_to_user[2] is 2147483647, outside [0, 3); 1 of 3"),
        ([2, -(2**31)], (3,), "cand_to_user[1] is -2147483648, outside [0, 3); 1 of 2"),
        ([[0, 1], [9, -4]], (3,), "cand_to_user[1, 0] is 9, outside [0, 3); 2 of 4"),
        ([0, 0], (0,), "cand_to_user[0] is 0, outside [0, 0); 2 of 2"),
        ([3, 0], (3, "q_to_kv"), "q_to_kv[0] is 3, outside [0, 3); 1 of 2"),
        ([2, 0, 1, 2], (3,), None),
        ([], (0,), None),
        ([0], (1,), None),
    ],
    check_lengths: [
        ([9, 0], (8,), "key_value_seq_lengths[0] is 9, outside [0, 8]; 1 of 2 lengths"),
        ([8, 2**31 - 1], (8,), "key_value_seq_lengths[1] is 2147483647, outside [0, 8]; 1 of 2 le"),
        ([8, 0, -1], (8,), "key_value_seq_lengths[2] is -1, outside [0, 8]; 1 of 3 lengths"),
        ([8, -(2**31)], (8,), "key_value_seq_lengths[1] is -2147483648, outside [0, 8]; 1 of 2 le"),
        ([8, 0, 1, 7], (8,), None),
    ],
    check_offsets: [
        ([0, 3, 13], (12, None, "cu"), "cu[2] is 13, outside [0, 12]; 1 of 3 offsets"),
        ([-1, 3, 12], (12, None, "cu"), "cu[0] is -1, outside [0, 12]; 1 of 3 offsets"),
        ([0, 3, 1, 12], (12, None, "cu"), "cu decreases from 3 to 1 in sequence 1; 1 of 3 lengths"),
        ([0, 3, 1, 2, 12], (12, 7), "cu_seqlens decreases from 3 to 1 in sequence 1; 1 of 4"),
        ([0, 3, 3, 10], (12, 6, "cu"), "sequence 2 of cu has 7 rows, but max_seqlen is 6; 1 of 3"),
        ([0, 0, 9, 12], (12, 7), "sequence 1 of cu_seqlens has 9 rows, but max_seqlen is 7; 1 of"),
        *(
            (values, (values[-1], max_seqlen), None)
            for values in ([0, 3, 3, 10, 12], [0])
            for max_seqlen in (None, 7, 2**31)
        ),
    ],
    check_targets: [
        ([0, 3, 3, 10, 3, 0, 7], (), None),
        ([0, 3, 3, 10, 3, 1, 7], (), "sequence 1 of cu_seqlens has 0 rows but 1 targets; 1 of 3"),
        (
            [0, 3, 3, 10, 3, 0, 2**31 - 1],
            (),
            "sequence 2 of cu_seqlens has 7 rows but 2147483647 targets; 1 of 3 sequences",
        ),
        ([0, 3, 3, 10, -1, 0, 7], (), "num_targets[0] is -1, outside [0, 2147483647]; 1 of 3"),
        ([0, 3, 1, 10, 0, 0, 0], (), "cu_seqlens decreases from 3 to 1 in sequence 1; 1 of 3"),
    ],
}
#: The same for integers of 8 to 32 bits. A bound that a dtype does not hold is not wrapped to it.
NARROW: dict[Any, list[tuple[list[Any], tuple[Any, ...], str | None]]] = {
    check_index: [
        ([2, 120, 0], (0,), "cand_to_user[0] is 2, outside [0, 0); 3 of 3"),
        ([2, 120, 0], (3,), "cand_to_user[1] is 120, outside [0, 3); 1 of 3"),
        *(([2, 120, 0], (number,), None) for number in (300, 70_000, 2**31, 2**40)),
    ],
    check_offsets: [
        ([0, 3, 3, 110], (1000, 500), None),
        ([0, 3, 3, 110], (1000, 106), "sequence 2 of cu_seqlens has 107 rows, but max_seqlen is"),
    ],
}


@pytest.mark.parametrize(
    ("check", "values", "arguments", "message", "dtype"),
    [
        *((check, *case, "int32") for check, cases in CHECKED.items() for case in cases),
        *(
            (check, *case, dtype)
            for dtype in ("int8", "uint8", "int16", "uint32")
            for check, cases in NARROW.items()
            for case in cases
        ),
    ],
)
def test_checks_name_position_value_and_bound(check, values, arguments, message, dtype) -> None:
    """Eagerly, and under checkify, where the count is not known and a position is that in a row.

    Compiled without checkify, a check cannot raise.
    """
    array = np.asarray(values, dtype)
    for eager in (array, jnp.asarray(array)):
        if message is None:
            check(eager, *arguments)
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                check(eager, *arguments)

    def run(array: jax.Array) -> jax.Array:
        check(array, *arguments)
        return array + jnp.asarray(1, dtype)

    def in_a_row(found: re.Match[str]) -> str:
        place = np.ravel_multi_index(tuple(map(int, found[1].split(", "))), array.shape)
        return f".ravel()[{place}] is"

    for wrapped in (run, jax.jit(run)):
        error, _ = jax.jit(checkify.checkify(wrapped))(array)
        words = message and re.sub(r"\[([\d, ]+)\] is", in_a_row, message.split(";")[0])
        assert error.get() is None if words is None else error.get().startswith(words), error.get()
    np.testing.assert_array_equal(jax.jit(run)(array), array + np.asarray(1, dtype))


@pytest.mark.parametrize(
    ("check", "wrong", "error", "words"),
    [
        *(
            (check, wrong, TypeError, f"array of integers, but is {kind}")
            for check in (check_index, check_offsets)
            for wrong, kind in (
                ([0, 1], "list"),
                (np.zeros(2, np.float32), "float32"),
                (None, "NoneType"),
                (jax.ShapeDtypeStruct((2,), np.int32), "ShapeDtypeStruct"),
            )
        ),
        *(
            (check_offsets, np.zeros(x, int), ValueError, f"[batch + 1], but has shape {x}")
            for x in ((2, 2), (0,))
        ),
    ],
)
def test_checks_of_what_is_no_array_of_theirs(check, wrong, error, words) -> None:
    with pytest.raises(error, match=re.escape(words)):
        check(wrong, 3)


@pytest.mark.parametrize("traced", [0, 1])
def test_targets_beside_offsets_of_which_one_is_a_constant(traced: int) -> None:
    arrays = [np.asarray([0, 3, 10], np.int32), np.asarray([1, 9], np.int32)]

    def run(x: jax.Array) -> None:
        offsets, targets = (x if i == traced else array for i, array in enumerate(arrays))
        check_offsets(offsets, 10, num_targets=targets)

    error, _ = checkify.checkify(jax.jit(run))(arrays[traced])
    assert "sequence 1 of cu_seqlens has 7 rows but 9 targets" in error.get()


def test_targets_of_another_batch() -> None:
    with pytest.raises(ValueError, match=re.escape("has shape (2,) but cu has batch=1")):
        check_offsets(np.asarray([0, 3], np.int32), 3, None, "cu", num_targets=np.zeros(2, int))


def test_checkify_goes_through_an_op() -> None:
    def run(index: jax.Array) -> jax.Array:
        ikbo.debug.check_index(index, 2)
        ones = jnp.ones((2, 2), jnp.float32)
        return ikbo.linear_compression(ones, ones, ones[None], jnp.stack([ones, ones]), index)

    def attend(lengths: jax.Array) -> jax.Array:
        ikbo.debug.check_lengths(lengths, 3)
        ones, index = jnp.ones((2, 3, 1, 2), jnp.float32), jnp.zeros(2, jnp.int32)
        return ikbo.attention(ones, ones, ones, index, key_value_seq_lengths=lengths)

    for fn, array, message, expected in (
        (run, [2], "is 2, outside [0, 2)", np.full((1, 2, 2), 4.0)),
        (attend, [1, 4], "lengths.ravel()[1] is 4, outside [0, 3]", np.ones((2, 3, 1, 2))),
    ):
        error, out = checkify.checkify(jax.jit(fn))(jnp.asarray(array, jnp.int32))
        assert message in error.get()
        np.testing.assert_array_equal(out, expected)

"""What a newcomer passes by mistake: every public function answers in its own words."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import ones

import ikbo_jax as ikbo
from ikbo_jax.layers import functional

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
ARGUMENTS = [(op, name) for op, (_, arrays) in OPS.items() for name in arrays]


def refused(op: str, changes: dict[str, Any], error: type[Exception] = ValueError) -> str:
    fn, arrays = OPS[op]
    with pytest.raises(error) as raised:
        fn(**arrays | changes)
    return str(raised.value)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_none_names_the_argument(op: str, name: str) -> None:
    text = refused(op, {name: None})
    assert text.startswith(name)
    assert "None" in text


@pytest.mark.parametrize("op", OPS)
def test_shapes_without_values_are_sent_to_explain(op: str) -> None:
    for name, x in OPS[op][1].items():
        text = refused(op, {name: jax.ShapeDtypeStruct(x.shape, x.dtype)})
        kind = f"{x.dtype}{list(x.shape)}"
        assert text.endswith(
            f"takes arrays, but one is a ShapeDtypeStruct, {kind}; shapes go to ikbo_jax.explain "
            "or jax.eval_shape, with the function"
        )


@pytest.mark.parametrize("op", OPS)
def test_numpy_s_default_index_names_the_remedy(op: str) -> None:
    for name, x in OPS[op][1].items():
        if x.dtype == np.int32:
            text = refused(op, {name: np.asarray(x, np.int64)})
            assert text == (
                f"{name} must be an int32 array, but is int64[{x.size}]; convert it by "
                ".astype(np.int32)"
            )


def test_masks_and_offsets_of_layers_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"not int64\[2\]; convert it by \.astype\(np\.int32\)"):
        ikbo.masks.hstu(np.array([1, 2]))
    with pytest.raises(ValueError, match=r"but is int64\[2\]; convert it by \.astype"):
        functional.check_offsets("cu_seqlens", "batch", np.array([0, 2]))


@pytest.mark.parametrize("op", OPS)
def test_arrays_on_other_devices_are_named(op: str) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    first, second = jax.devices()[:2]
    arrays = {name: jax.device_put(x, first) for name, x in OPS[op][1].items()}
    name = next(iter(arrays))
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


TERM = ikbo.Term(ones(4, 5), ones(3, 5, 8))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (None, "terms must be a sequence of Term, coarsest level first, but is None"),
        (TERM, "coarsest level first, but is one Term"),
        ([ones(4, 5)], "terms[0] must be a Term, but is bfloat16[4, 5]: a level's weight [M, K],"),
        ([None], "terms[0] must be a Term, but is None: a level's weight [M, K], embedding"),
        (
            [TERM._replace(weight=ikbo.PaddedWeight(ones(4, 64), "6"))],
            "terms[0].weight has k='6', but needs an integer K",
        ),
        (
            [TERM._replace(weight=ikbo.PaddedWeight(None, 5))],
            "terms[0].weight must be an array of shape [M, K], but is a PaddedWeight",
        ),
    ],
)
def test_terms(terms: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ikbo.multilevel_linear_compression(terms)


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

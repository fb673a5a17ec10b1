"""Weights whose rows are padded once: the same bits, gradients, transformations, errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import offline
import problems
import pytest
from small_kernels import prefer_kernels

import ikbo_jax as ikbo
from ikbo_jax.layers import functional

# U=3, B=7, M=10, K_user=11, K_cand=5, N=8
INPUTS = problems.make_inputs(problems.LinearCompressionShape(3, 7, 10, 11, 5, 8))
ARRAYS = (INPUTS.e_cand, INPUTS.e_user, INPUTS.cand_to_user)
DTYPES = ("bfloat16", "float16", "float32")


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def loss(w_cand: Any, w_user: Any, *arrays: Any) -> jax.Array:
    return jnp.sum(jnp.sin(ikbo.linear_compression(w_cand, w_user, *arrays).astype(jnp.float32)))


#: Of every dtype's unpadded weights, the program is compiled once.
value_and_gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


def compress(w_cand: Any, w_user: Any, *arrays: Any) -> jax.Array:
    return ikbo.linear_compression(w_cand, w_user, *arrays)


@pytest.mark.parametrize(
    ("k", "columns", "dtype"),
    [(1, 64, "bfloat16"), (866, 896, "float16"), (128, 128, "bfloat16"), (33, 64, "float32")],
)
def test_rows_are_padded_with_zeros_to_128_bytes(k: int, columns: int, dtype: str) -> None:
    weight = jnp.ones((3, k), dtype)
    padded = ikbo.pad_weight(weight)
    assert (padded.shape, padded.ndim, padded.dtype) == ((3, k), 2, dtype)
    assert padded.rows.shape == (3, columns)
    assert_same(padded.rows, jnp.zeros((3, columns), dtype).at[:, :k].set(1))
    assert_same(padded.weight, weight)
    assert ikbo.pad_weight(padded) is padded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_results_and_gradients_are_the_same_bits(dtype: str, which: tuple[bool, bool]) -> None:
    *weights, e_cand, e_user, index = INPUTS
    floats = [jnp.asarray(x, dtype) for x in (*weights, e_cand, e_user)]
    padded = [ikbo.pad_weight(w) if p else w for w, p in zip(floats[:2], which, strict=True)]
    expected = value_and_gradients(*floats, index)
    value, found = value_and_gradients(*padded, *floats[2:], index)
    for n, is_padded in enumerate(which):
        if is_padded:
            assert isinstance(found[n], ikbo.PaddedWeight)
            assert not np.asarray(found[n].rows, np.float32)[:, found[n].k :].any()
    unpadded = tuple(g.weight if isinstance(g, ikbo.PaddedWeight) else g for g in found)
    assert_same((value, unpadded), expected)


def vmapped(pad: Any, axis: int | None) -> jax.Array:
    two = [jnp.stack([x, x[::-1]]) for x in (*INPUTS[:2], *ARRAYS)]
    pad = pad if axis is None else jax.vmap(pad)
    weights = [pad(w) for w in (INPUTS[:2] if axis is None else two[:2])]
    return jax.jit(jax.vmap(compress, (axis, axis, 0, 0, 0)))(*weights, *two[2:])


def scanned(pad: Any) -> jax.Array:
    """Weights of several layers are one `PaddedWeight` with a leading axis."""
    step = lambda sums, layer: (sums + compress(*layer, *ARRAYS), None)  # noqa: E731
    layers = tuple(jax.vmap(pad)(jnp.stack([w, 2 * w])) for w in INPUTS[:2])
    zeros = jnp.zeros((7, 10, 8), jnp.bfloat16)
    return jax.jit(lambda layers: jax.lax.scan(step, zeros, layers)[0])(layers)


def of_levels(pad: Any) -> jax.Array:
    """Of three levels, the weights of two are padded."""
    weights, *others = problems.make_levels((2, 3, 5), (4, 6, 9), 10, 8, "bfloat16")
    weights = pad(weights[0]), weights[1], pad(weights[2])
    return ikbo.multilevel_linear_compression(list(map(ikbo.Term, weights, *others)))


def functional_layer(pad: Any, dtype: str | None) -> jax.Array:
    params = {"w_cand": pad(INPUTS.w_cand), "w_user": pad(INPUTS.w_user)}
    return functional.compress(params, ARRAYS[1], ARRAYS[0], ARRAYS[2], dtype=dtype)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (vmapped, {"axis": None}),
        (vmapped, {"axis": 0}),
        (scanned, {}),
        (of_levels, {}),
        (functional_layer, {"dtype": None}),
        (functional_layer, {"dtype": "float32"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_programs_have_the_same_bits(run: Any, options: dict[str, Any]) -> None:
    assert_same(run(ikbo.pad_weight, **options), run(lambda weight: weight, **options))


def test_a_program_for_cuda_pads_no_padded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the rows as they are; the rows without padding have no use and vanish."""
    prefer_kernels(monkeypatch)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    arrays = (of(8, 40, 128), of(2, 70, 128), jax.ShapeDtypeStruct((8,), jnp.int32))
    weights = of(1100, 40), of(1100, 70)  # resident weights, whose rows nothing pads, have M below

    def lowered(*weights: Any) -> str:
        # A new function, so that no program of another test is in the caches.
        fn = jax.jit(lambda *operands: compress(*operands))
        return fn.trace(*weights, *arrays).lower(lowering_platforms=("cuda",)).as_text()

    moves = re.compile(r"stablehlo\.(pad|concatenate|slice)")
    assert "mosaic_gpu_v2" in lowered(*weights)
    assert moves.search(lowered(*weights))
    padded = jax.eval_shape(lambda *w: tuple(map(ikbo.pad_weight, w)), *weights)
    assert "mosaic_gpu_v2" in lowered(*padded)
    assert not moves.search(lowered(*padded))
    assert offline.mosaic_modules(lambda *operands: compress(*operands), *padded, *arrays)


def test_errors_name_both_values() -> None:
    w_cand, w_user = map(ikbo.pad_weight, INPUTS[:2])
    other_k, other_m = (ikbo.pad_weight(jnp.ones(s, jnp.bfloat16)) for s in ((10, 6), (9, 5)))
    for weight, message in (
        (other_k, "w_cand has K=6 but e_cand has K=5"),
        (other_m, "w_user has M=10 but w_cand has M=9"),
        (ikbo.pad_weight(jnp.ones((10, 5))), "w_user is bfloat16 but w_cand is float32"),
        (
            ikbo.PaddedWeight(jnp.ones((10, 4), jnp.bfloat16), 5),
            "w_cand has K=5 but rows of shape (10, 4)",
        ),
        (
            ikbo.PaddedWeight(jnp.ones(10, jnp.bfloat16), 5),
            "w_cand has K=5 but rows of shape (10,)",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            compress(weight, w_user, *ARRAYS)
    with pytest.raises(ValueError, match=re.escape("weight must have shape [M, K], but has shape")):
        ikbo.pad_weight(jnp.ones((1, 2, 3)))
    with pytest.raises(ValueError, match="weight must be bfloat16, float16 or float32, but is int"):
        ikbo.pad_weight(jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=re.escape("weight must be an array of shape [M, K]")):
        ikbo.pad_weight([[1.0]])
    with pytest.raises(ValueError, match=re.escape("user_rows=11 (K=11), but e_user has shape")):
        functional.compress(
            {"w_cand": w_cand, "w_user": w_user}, INPUTS.e_user[:, :3], *(ARRAYS[0], ARRAYS[2])
        )

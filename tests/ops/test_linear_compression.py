"""The public ops on the XLA path, and the way to the kernel: values, gradients, memory, NaN."""

import collections
import math
import re
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import offline
import problems
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import LAYOUTS, mesh_of, on
from small_kernels import prefer_kernels

import ikbo_jax as ikbo
from ikbo_jax.layers import functional
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig
from ikbo_jax.problems.look_up import SegmentSumConfig
from ikbo_jax.reference import linear_compression as reference
from ikbo_jax.tuning import table

SHAPES = problems.LINEAR_COMPRESSION_SHAPES


materialised = jax.jit(reference.materialised)


def as_terms(weights, embeddings, parents) -> list[ikbo.Term]:
    return [ikbo.Term(*level) for level in zip(weights, embeddings, parents, strict=True)]


#: Users, candidates, m, k_user, k_cand, n and dtype: as odd as any, but few, since each takes
#: programs.
DRAWN = [
    (4, 9, 7, 3, 5, 6, "float32"),
    (9, 1, 1, 8, 1, 3, "bfloat16"),
    (1, 6, 5, 1, 9, 1, "float16"),
    (3, 0, 2, 2, 2, 2, "bfloat16"),
]


@hypothesis.given(data=st.data())
def test_any_index_is_within_the_error_rule(data: st.DataObject) -> None:
    users, candidates, m, k_user, k_cand, n, dtype = data.draw(st.sampled_from(DRAWN), "sizes")
    values = st.one_of(st.integers(0, users - 1), st.integers(-(2**31), 2**31 - 1))
    index = data.draw(st.lists(values, min_size=candidates, max_size=candidates), "index")
    shape = problems.LinearCompressionShape(users, 1, m, k_user, k_cand, n)
    inputs = problems.make_inputs(shape, dtype)
    e_cand = problems.random_array(np.random.default_rng(1), (candidates, k_cand, n), dtype)
    inputs = inputs._replace(e_cand=e_cand, cand_to_user=np.asarray(index, np.int32))
    problems.assert_within_error_rule(
        ikbo.linear_compression(*inputs),
        problems.numpy_oracle(*inputs.levels),
        materialised(*inputs.levels) if candidates else np.zeros((0, m, n), dtype),
    )


@pytest.mark.parametrize(
    ("batches", "dtype"), problems.in_turn([(5,), (3, 7), (2, 3, 5, 11)]), ids=str
)
def test_multilevel_is_within_the_error_rule(batches: tuple[int, ...], dtype: str) -> None:
    levels = problems.make_levels(batches, (12, 5, 9, 16)[: len(batches)], 10, 8, dtype)
    out = ikbo.multilevel_linear_compression(as_terms(*levels))
    problems.assert_within_error_rule(out, problems.numpy_oracle(*levels), materialised(*levels))


def test_nan_reaches_the_candidates_of_its_user_alone() -> None:
    inputs = problems.make_inputs(SHAPES["unsorted"])
    poisoned = inputs._replace(e_user=inputs.e_user.at[2, 3, 4].set(jnp.nan))
    out = np.asarray(ikbo.linear_compression(*poisoned), np.float32)
    clean = np.asarray(ikbo.linear_compression(*inputs), np.float32)
    of_user = np.asarray(inputs.cand_to_user) == 2
    assert 0 < of_user.sum() < len(of_user)
    assert np.isnan(out[of_user][:, :, 4]).all()
    out[:, :, 4][of_user] = clean[:, :, 4][of_user]
    np.testing.assert_array_equal(out, clean)


#: Parents of two and of three levels, and the entries of each level without candidates. Of three
#: levels, entry 1 of the coarsest has a child, which has no candidates.
WITHOUT_CANDIDATES = {
    "two_levels": ([None, [2, -1, 0, 0, 9]], [[1], []]),
    "three_levels": ([None, [0, 2, 0, 1], [2, -1, 0, 0, 1, 2]], [[1], [3], []]),
}


@pytest.mark.parametrize("name", WITHOUT_CANDIDATES)
def test_an_entry_without_candidates_reaches_no_gradient(name: str) -> None:
    """Such an entry, say padding, may hold anything: a model that copies never reads it."""
    rows, unused = WITHOUT_CANDIDATES[name]
    parents = [None if row is None else np.array(row, np.int32) for row in rows]
    batches = [3, *(len(parent) for parent in parents[1:])]
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(4, 5)).astype(np.float32) for _ in batches]
    embeddings = [rng.normal(size=(b, 5, 8)).astype(np.float32) for b in batches]
    poisoned = [x.copy() for x in embeddings]
    for x, entries in zip(poisoned, unused, strict=True):
        x[entries, 2] = np.nan
        x[entries, 3] = np.inf

    def gradients(embeddings):
        def loss(weights, embeddings):
            out = ikbo.multilevel_linear_compression(as_terms(weights, embeddings, parents))
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1))(weights, embeddings)

    chex.assert_trees_all_equal(gradients(poisoned), gradients(embeddings))


def plain_compression(*arrays):
    return materialised(*problems.LinearCompressionInputs(*arrays).levels)


def value_and_gradients_of(inputs, cotangent, compress):
    """Value; gradients by weights and by embeddings, coarsest first."""

    def levels(weights, embeddings):
        (w_user, w_cand), (e_user, e_cand) = weights, embeddings
        return compress(w_cand, w_user, e_cand, e_user, inputs.cand_to_user)

    out, pull_back = jax.vjp(levels, *inputs.levels[:2])
    return out, *pull_back(cotangent)


@pytest.mark.parametrize(
    ("name", "dtype"),
    problems.in_turn(
        # Tiles are the kernel's, and users_without_candidates has more users than candidates.
        [
            *("one_user", "odd_counts", "unsorted", "users_without_candidates"),
            *("tails_of_default", "one_candidate", "a_user_each", "tiny", "no_user_rows"),
            "n_not_multiple_of_8",
        ]
    ),
)
def test_value_and_gradients_are_within_the_error_rule(name: str, dtype: str) -> None:
    shape = SHAPES[name]
    inputs = problems.make_inputs(shape, dtype)
    rng = np.random.default_rng(1)
    cotangent = problems.random_array(rng, (shape.candidates, shape.m, shape.n), dtype)

    paths = (ikbo.linear_compression, plain_compression)
    actual, plain = jax.jit(lambda *x: [value_and_gradients_of(*x, path) for path in paths])(
        inputs, cotangent
    )
    gradients = problems.numpy_oracle_gradients(*inputs.levels, cotangent)
    expected = (problems.numpy_oracle(*inputs.levels), *gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, plain)
    jax.tree.map(problems.assert_within_error_rule, actual, expected, plain)


@pytest.mark.parametrize(
    "batches", [(5,), (2, 3, 5), (2, 3, 5, 11), (7, 2, 5)], ids=lambda x: "_".join(map(str, x))
)
def test_multilevel_gradients_by_terms(batches: tuple[int, ...]) -> None:
    """A level may be coarser than needed, as that of seven."""
    levels = problems.make_levels(batches, (4, 6, 3, 9)[: len(batches)], 7, 5, "float32")
    cotangent = problems.random_array(np.random.default_rng(1), (batches[-1], 7, 5), "float32")

    def loss(terms):
        return jnp.vdot(ikbo.multilevel_linear_compression(terms), cotangent)

    actual = jax.jit(jax.grad(loss, allow_int=True))(as_terms(*levels))
    d_weights, d_embeddings = problems.numpy_oracle_gradients(*levels, cotangent)
    chex.assert_trees_all_close([t.weight for t in actual], list(d_weights), atol=1e-4)
    chex.assert_trees_all_close([t.embedding for t in actual], list(d_embeddings), atol=1e-4)
    assert [t.parent is None for t in actual] == [True, *[False] * (len(batches) - 1)]


def elements_of_arrays(text: str) -> set[int]:
    """Numbers of elements of all arrays that a jaxpr or an HLO module names."""
    shapes = re.findall(r"\b[a-z]+\d*\[(\d+(?:,\d+)*)\]", text)
    return {math.prod(map(int, shape.split(","))) for shape in shapes}


@pytest.mark.parametrize("differentiate", [False, True], ids=["value", "gradient"])
def test_broadcast_is_never_materialised(differentiate: bool) -> None:
    # Primes, so that no other array happens to have as many elements.
    shape = problems.LinearCompressionShape(3, 7, 11, 17, 5, 13)
    inputs = problems.make_inputs(shape, "float32")
    forbidden = shape.candidates * shape.k_user * shape.n

    def sizes(compress) -> set[int]:
        def run(*arrays):
            if not differentiate:
                return compress(*arrays)
            loss = lambda *x: jnp.sum(compress(*x, inputs.cand_to_user) ** 2)  # noqa: E731
            return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays[:4])

        traced = jax.jit(run).trace(*inputs)
        text = traced.lower().compile().as_text()
        return elements_of_arrays(str(traced.jaxpr)) | elements_of_arrays(text)

    assert forbidden in sizes(plain_compression)
    found = sizes(ikbo.linear_compression)
    assert shape.users * shape.k_user * shape.n in found
    assert forbidden not in found
    assert shape.candidates * (shape.k_user + shape.k_cand) * shape.n not in found


class TestKernelPath:
    """With a fake kernel: what the op passes on, and that gradients do not need the kernel's."""

    def test_default_takes_the_kernel_and_the_tables_config(self, fake_hopper) -> None:
        shape = SHAPES["tails_of_default"]
        inputs = problems.make_inputs(shape)
        out = ikbo.linear_compression(*inputs)
        (call,) = fake_hopper.calls
        batches, ks = (shape.users, shape.candidates), (shape.k_user, shape.k_cand)
        problem = LinearCompressionProblem(batches, ks, shape.m, shape.n, "bfloat16")
        assert call["config"] == table.lookup(problem).config is not None
        assert call["num_sms"] == 132
        problems.assert_within_error_rule(
            out, problems.numpy_oracle(*inputs.levels), materialised(*inputs.levels)
        )

    def test_gradients_are_the_kernels_and_explained(self, fake_hopper) -> None:
        inputs = problems.make_inputs(SHAPES["odd_counts"])

        def gradients(implementation):
            def loss(*arrays):
                out = ikbo.linear_compression(
                    *arrays, inputs.cand_to_user, implementation=implementation
                )
                return jnp.sum(out.astype(jnp.float32))

            return jax.grad(loss, argnums=(0, 1, 2, 3))

        plan = ikbo.explain(gradients("mosaic_gpu"), *inputs[:4]).plans[0]
        assert plan.backward.startswith("mosaic_gpu, at user and candidate batch size, ")
        kinds = collections.Counter(type(call["config"]) for call in fake_hopper.calls)
        # Two weights' gradients and the sum over candidates; the result may be traced twice.
        assert (kinds[WeightGradientConfig], kinds[SegmentSumConfig]) == (2, 1)
        assert kinds[LinearCompressionConfig] >= 3
        fake_hopper.calls.clear()
        plan = ikbo.explain(gradients("xla"), *inputs[:4]).plans[0]
        assert plan.backward == "XLA, at user and candidate batch size"
        assert not fake_hopper.calls

    @pytest.mark.parametrize("over", ["candidates", "M"])
    def test_gradients_of_a_call_that_devices_divide(self, fake_hopper, over) -> None:
        """Gradients that are sums over devices leave the kernels in f32."""
        inputs = problems.make_inputs(
            problems.LinearCompressionShape(3, 8, 16, 24, 32, 8, "unsorted")
        )
        specs = LAYOUTS["linear"] if over == "candidates" else [P("x"), P("x"), P(), P(), P()]
        sharded = on(mesh_of("4", "explicit"), inputs, specs)

        def gradients(implementation, arrays):
            def loss(*floats):
                out = ikbo.linear_compression(*floats, arrays[4], implementation=implementation)
                return jnp.sum(jnp.sin(out.astype(jnp.float32)))

            return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays[:4])

        both = gradients("mosaic_gpu", sharded), gradients("xla", inputs)
        dtypes = {call["dtype"] for call in fake_hopper.calls if "dtype" in call}
        assert dtypes == {jnp.dtype("float32")}
        problems.assert_near(*both, 0.02)


# Weights whose rows are padded once: the same bits, gradients, transformations, errors.

# U=3, B=7, M=10, K_user=11, K_cand=5, N=8
INPUTS = problems.make_inputs(problems.LinearCompressionShape(3, 7, 10, 11, 5, 8))
ARRAYS = (INPUTS.e_cand, INPUTS.e_user, INPUTS.cand_to_user)
DTYPES = ("bfloat16", "float16", "float32")


def assert_same(found: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_dtypes(found, expected)  # a strict comparison takes bf16 for f32
    chex.assert_trees_all_equal(found, expected, strict=True)


def loss(w_cand: Any, w_user: Any, *arrays: Any) -> jax.Array:
    return jnp.sum(jnp.sin(ikbo.linear_compression(w_cand, w_user, *arrays).astype(jnp.float32)))


#: Of every dtype's unpadded weights, the program is compiled once.
value_and_gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


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
    return jax.jit(jax.vmap(ikbo.linear_compression, (axis, axis, 0, 0, 0)))(*weights, *two[2:])


def scanned(pad: Any) -> jax.Array:
    """Weights of several layers are one `PaddedWeight` with a leading axis."""
    step = lambda sums, layer: (sums + ikbo.linear_compression(*layer, *ARRAYS), None)  # noqa: E731
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
        fn = jax.jit(lambda *operands: ikbo.linear_compression(*operands))
        return fn.trace(*weights, *arrays).lower(lowering_platforms=("cuda",)).as_text()

    moves = re.compile(r"stablehlo\.(pad|concatenate|slice)")
    assert "mosaic_gpu_v2" in lowered(*weights)
    assert moves.search(lowered(*weights))
    padded = jax.eval_shape(lambda *w: tuple(map(ikbo.pad_weight, w)), *weights)
    assert "mosaic_gpu_v2" in lowered(*padded)
    assert not moves.search(lowered(*padded))
    assert offline.mosaic_modules(lambda *x: ikbo.linear_compression(*x), *padded, *arrays)


def test_errors_name_both_values() -> None:
    w_cand, w_user = map(ikbo.pad_weight, INPUTS[:2])
    other_k, other_m = (ikbo.pad_weight(jnp.ones(s, jnp.bfloat16)) for s in ((10, 6), (9, 5)))
    for weight, message in (
        (other_k, "w_cand has K=6 but e_cand has K=5"),
        (other_m, "w_user has M=10 but w_cand has M=9"),
        (ikbo.pad_weight(jnp.ones((10, 5))), "w_user is bfloat16 but w_cand is float32"),
        *(
            (ikbo.PaddedWeight(jnp.ones(s, jnp.bfloat16), 5), message)
            for s, message in (
                ((10, 4), "w_cand has K=5 but rows of shape (10, 4)"),
                ((10,), "w_cand must have shape [M, K_cand], but has shape (10,)"),
            )
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ikbo.linear_compression(weight, w_user, *ARRAYS)
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

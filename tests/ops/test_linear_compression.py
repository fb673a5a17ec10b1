"""The public ops on the XLA path, and the way to the kernel: values, gradients, memory, NaN."""

import collections
import math
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig
from ikbo_jax.problems.look_up import SegmentSumConfig
from ikbo_jax.reference import linear_compression as reference
from ikbo_jax.tuning import table

SHAPES = problems.LINEAR_COMPRESSION_SHAPES
SMALL = problems.LinearCompressionShape(3, 7, 10, 11, 5, 8, "unsorted")


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
        axis, kind = jax.sharding.PartitionSpec, jax.sharding.AxisType.Explicit
        split, whole = axis("x"), axis()
        specs = (whole, whole, split, whole, split)
        if over == "M":
            specs = (split, split, whole, whole, whole)
        mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices("cpu")[:4])
        sharded = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
            for x, spec in zip(inputs, specs, strict=True)
        ]

        def gradients(implementation, arrays):
            def loss(*floats):
                out = ikbo.linear_compression(*floats, arrays[4], implementation=implementation)
                return jnp.sum(jnp.sin(out.astype(jnp.float32)))

            return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays[:4])

        both = gradients("mosaic_gpu", sharded), gradients("xla", inputs)
        dtypes = {call["dtype"] for call in fake_hopper.calls if "dtype" in call}
        assert dtypes == {jnp.dtype("float32")}
        problems.assert_near(*both, 0.02)

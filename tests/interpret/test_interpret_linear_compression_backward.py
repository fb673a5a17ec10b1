"""The kernels of linear compression's gradient, interpreted on a CPU under a race detector."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.ops import linear_compression_backward as op
from ikbo_jax.ops.linear_compression_backward import Gradients
from ikbo_jax.problems import LinearCompressionConfig
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig, embedding_problem
from ikbo_jax.reference import linear_compression as reference

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Small tiles, rings that wrap at once.
FORWARD = LinearCompressionConfig(32, 2, 16, single_launch=False, cluster=1)
WEIGHT = WeightGradientConfig(block_m=32, stages=2)


@dataclasses.dataclass(frozen=True)
class Case(problems.CompressionCase):
    """A compression, and dtypes of gradients."""

    num_sms: int = 1
    dtypes: tuple[str | None, str | None, str | None] = (None, None, None)

    @property
    def launches(self) -> int:
        """Of kernels, without the gradients that XLA computes: of other dtypes, of one entry."""
        *coarser, finest = [batch > 1 for batch in self.batches]
        _, coarser_dtype, finest_dtype = self.dtypes
        weights = sum(coarser) + finest
        embeddings = sum(coarser) * (coarser_dtype is None) + finest * (finest_dtype is None)
        return weights + embeddings

    def arrays(self, seed: int = 0) -> tuple[Any, Any, Any, jax.Array]:
        """Weights, embeddings, parents and the cotangent."""
        rng, shape = np.random.default_rng(seed + 1), (self.batches[-1], self.m, self.n)
        return *self.arrays_of_levels(seed), problems.random_array(rng, shape, self.dtype)


CASES = {
    "tails_of_all_sizes": Case((2, 5), (70, 131), 41, 72),
    "sizes_of_one": Case((2, 2), (1, 1), 1, 8),
    "one_candidate": Case((1, 1), (1, 1), 1, 8),
    "one_user": Case((1, 7), (16, 24), 24, 64),
    "one_user_of_three_levels": Case((1, 2, 5), (16, 24, 40), 24, 64, dtype="float16"),
    "one_user_over_devices": Case((1, 3), (24, 32), 24, 64, dtypes=("float32",) * 3),
    # The weights' tiles and their parts, and users' sums, are on several CTAs.
    "several_ctas": Case((3, 6), (40, 200), 40, 136, num_sms=13),
    "candidates_of_a_user_divided": Case((2, 9), (16, 24), 24, 64, num_sms=5, index="sorted"),
    "users_without_candidates": Case((5, 3), (24, 16), 16, 64, num_sms=3, index="gaps"),
    "index_out_of_range": Case((3, 6), (40, 24), 24, 64, index=(-5, 0, 6, 1, -(2**31), 2**31 - 1)),
    "f16_three_levels": Case((2, 3, 5), (40, 33, 72), 24, 64, num_sms=4, dtype="float16"),
    "one_level": Case((3,), (100,), 41, 64),
    "summed_over_devices": Case((2, 3), (24, 32), 24, 64, dtypes=("float32", "float32", None)),
    "m_divided_over_devices": Case((2, 3), (24, 32), 24, 64, dtypes=("float32",) * 3),
}


def gradients(arrays: Sequence[Any], **options: Any) -> Gradients:
    """Runs the kernels with small tiles."""
    fn = functools.partial(op.kernel_vjp, config=WEIGHT, **options)
    with mock.patch.object(op, "embedding_config", return_value=FORWARD):
        # One program instead of one for each operation.
        found: Gradients = jax.block_until_ready(jax.jit(fn)(*arrays))
    return found


def run(case: Case, arrays: Sequence[Any]) -> Gradients:
    d_weights, d_embeddings = gradients(arrays, num_sms=case.num_sms, dtypes=case.dtypes)
    assert {x.shape[0] for x in d_weights} == {1}
    return tuple(x[0] for x in d_weights), d_embeddings


# One program instead of one for each operation; its conversions round.
@functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
def plain_vjp(weights: Any, embeddings: Any, parents: Any, cotangent: jax.Array) -> Gradients:
    """Gradients of the materialised form in the inputs' dtype."""

    def compress(*levels: Any) -> jax.Array:
        return reference.materialised(*levels, parents)

    found: Gradients = jax.vjp(compress, weights, embeddings)[1](cotangent)
    return found


def assert_correct(found: Gradients, arrays: Sequence[Any], case: Case) -> None:
    expected, plain = problems.numpy_oracle_gradients(*arrays), plain_vjp(*arrays)
    levels = len(case.ks)
    coarser, finest = case.dtypes[1:]
    dtypes = (case.dtypes[0],) * levels, (*(coarser,) * (levels - 1), finest)
    assert [x.dtype for x in jax.tree.leaves(found)] == [
        dtype or case.dtype for kind in dtypes for dtype in kind
    ]
    rounded = jax.tree.map(lambda x: x.astype(case.dtype), found)
    jax.tree.map(problems.assert_within_error_rule, rounded, expected, plain)


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated, and holds its gradients to the error rule."""
    assert WEIGHT.illegal_reason(case.problem) is None
    for level in range(len(case.ks)):
        assert FORWARD.illegal_reason(embedding_problem(case.problem, level)) is None
    arrays = case.arrays()
    assert_correct(run(case, arrays), arrays, case)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_gradients_are_right_and_free_of_races(name, launches) -> None:
    check(CASES[name])
    launches.assert_no_races(CASES[name].launches)


# Infinity times the zeros that pad M is NaN, in columns that are not stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_interpreted_non_finite_values_stay_with_their_user(launches: interpreter.Launches) -> None:
    """An embedding's reaches gradients of weights alone; a cotangent's, its candidate and user."""
    case = Case((3, 4), (70, 40), 41, 136, index=(2, 1, 0, 1))
    weights, embeddings, parents, cotangent = arrays = case.arrays()
    of_users, of_cands, spoiled = (np.array(x) for x in (*embeddings, cotangent))
    of_users[1, 69, 70], of_cands[1, 39, 69], spoiled[2, 40, 71] = np.nan, -np.inf, np.nan
    found = run(
        case,
        (weights, tuple(map(jnp.asarray, (of_users, of_cands))), parents, jnp.asarray(spoiled)),
    )
    launches.assert_no_races(case.launches)
    clean = run(case, arrays)
    launches.assert_no_races(2 * case.launches)
    for row, spoilt, expected in zip((0, 2), found[1], clean[1], strict=True):
        hit = np.zeros(expected.shape, bool)
        hit[row, :, 71] = True
        np.testing.assert_array_equal(np.isnan(spoilt), hit)
        np.testing.assert_array_equal(spoilt[~hit], expected[~hit])


@pytest.mark.parametrize("name", ["two_levels", "three_levels"])
def test_interpreted_embeddings_without_candidates_reach_no_gradient(name, launches) -> None:
    """Not even NaN and infinity: padding of users need not be finite."""
    if name == "two_levels":
        case, unused = Case((5, 4), (70, 40), 41, 136, index=(3, 1, 1, 3), num_sms=2), (0, 2, 4)
    else:
        case, unused = Case((3, 4, 4), (24, 40, 70), 24, 64, num_sms=2, dtype="float16"), (1,)
    weights, embeddings, parents, cotangent = case.arrays()
    if name == "three_levels":
        parents = (None, jnp.array([0, 0, 2, 2]), jnp.array([3, 1, 1, 0]))
    spoiled = np.array(embeddings[0])
    spoiled[unused, :, :64], spoiled[unused, :, 64:] = np.nan, np.inf
    clean = run(case, (weights, embeddings, parents, cotangent))
    found = run(case, (weights, (jnp.asarray(spoiled), *embeddings[1:]), parents, cotangent))
    launches.assert_no_races(2 * case.launches)
    jax.tree.map(np.testing.assert_array_equal, found, clean)


def test_interpreted_problems_with_common_weights_have_gradients_of_their_own(launches) -> None:
    """Two problems in one batch: as if each was computed alone."""
    both = Case((4, 6), (24, 70), 24, 64, index=(0, 1, 0, 3, 2, 3), num_sms=3)
    weights, embeddings, parents, cotangent = arrays = both.arrays()
    d_weights, d_embeddings = gradients(arrays, num_sms=3, problems=2)
    launches.assert_no_races(both.launches)
    for problem in range(2):
        users, cands = slice(2 * problem, 2 * problem + 2), slice(3 * problem, 3 * problem + 3)
        index = None if parents[1] is None else parents[1][cands] - 2 * problem
        levels = weights, (embeddings[0][users], embeddings[1][cands]), (None, index)
        one = (*levels, cotangent[cands])
        found = (
            tuple(x[problem] for x in d_weights),
            (d_embeddings[0][users], d_embeddings[1][cands]),
        )
        case = dataclasses.replace(both, batches=(2, 3), index=())
        assert_correct(found, one, case)

"""The kernels of linear compression's gradient on a Hopper GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import pytest
from test_gpu_linear_compression import DEFAULT, KERNEL_SHAPES

import ikbo_jax as ikbo
from ikbo_jax.cases.case import widened
from ikbo_jax.ops import dispatch
from ikbo_jax.ops.linear_compression_backward import Arrays, kernel_vjp, problem_of
from ikbo_jax.problems import linear_compression_backward as configs
from ikbo_jax.reference import linear_compression as reference

pytestmark = pytest.mark.gpu


def make_gradients(levels: Arrays):
    """A compiled function of weights, embeddings, parents and the cotangent."""
    problem = problem_of(levels)
    assert configs.illegal_reason(problem) is None
    config, num_sms = configs.default_config(problem), dispatch.num_sms()
    return jax.jit(functools.partial(kernel_vjp, config=config, num_sms=num_sms))


def cotangent_of(levels: Arrays, seed: int = 1) -> jax.Array:
    weight, (candidates, _, n) = levels.weights[0], levels.embeddings[-1].shape
    shape = candidates, len(weight), n
    return problems.random_array(np.random.default_rng(seed), shape, weight.dtype)


# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
@jax.jit
def expected_and_plain(levels: Arrays, cotangent: jax.Array) -> tuple:
    """Gradients of the materialised form, in f32 and in the inputs' dtype."""

    def pull_back(levels: Arrays, cotangent: jax.Array, precision) -> tuple:
        def compress(weights, embeddings):
            return reference.materialised(weights, embeddings, levels.parents, precision=precision)

        return jax.vjp(compress, *levels[:2])[1](cotangent)

    expected = pull_back(*widened((levels, cotangent)), jax.lax.Precision.HIGHEST)
    return expected, pull_back(levels, cotangent, None)


def check(*draws: Arrays, seed: int = 1) -> None:
    """Holds every gradient to the error rule, against the oracle's own VJP in f32.

    Draws of the same sizes are held to it together, as if they were one array.
    """
    found = []
    for levels in draws:
        cotangent = cotangent_of(levels, seed)
        d_weights, d_embeddings = make_gradients(levels)(*levels, cotangent)
        actual = tuple(x[0] for x in d_weights), d_embeddings
        found.append((actual, *expected_and_plain(levels, cotangent)))
    together = jax.tree.map(lambda *arrays: jnp.stack(arrays), *found)
    jax.tree.map(problems.assert_within_error_rule, *together)


def levels_of(shape: problems.LinearCompressionShape, dtype="bfloat16", seed=0) -> Arrays:
    return Arrays(*problems.make_inputs(shape, dtype, seed).levels)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", KERNEL_SHAPES)
def test_gradients_of_every_shape(name, dtype):
    # A gradient of one value is too few to say how large plain jnp's errors are: it may be exact by
    # chance, where the kernel has rounded the sums over a user's candidates.
    seeds = 16 if name == "tiny" else 1
    check(*(levels_of(KERNEL_SHAPES[name], dtype, seed) for seed in range(seeds)))


@pytest.mark.parametrize(("users", "candidates"), [(1, 300), (1, 900), (128, 300), (300, 300)])
def test_gradients_of_many_candidates(users, candidates):
    """Candidates of a user are divided between CTAs, or CTAs have many users.

    With one user, XLA sums the cotangents of 300 candidates, and the kernel sums those of 900.
    """
    check(levels_of(DEFAULT._replace(users=users, candidates=candidates, m=240)))


@pytest.mark.parametrize("batches", [(40,), (3, 7, 40), (2, 3, 5, 40)])
def test_gradients_of_levels(batches):
    ks = (70, 130, 90, 66)[: len(batches)]
    check(Arrays(*problems.make_levels(batches, ks, 240, 136, "bfloat16")))


@pytest.mark.parametrize("part", range(4))
@on_gpu.drawn
@on_gpu.draws_linear_compressions
def test_gradients_of_drawn_shapes(part, users, candidates, m, k_user, k_cand, n, index, dtype):
    shape = problems.LinearCompressionShape(users, candidates, m, k_user, k_cand, n, index)
    check(levels_of(shape, dtype))


def test_the_op_takes_the_kernels():
    inputs = problems.make_inputs(problems.LINEAR_COMPRESSION_SHAPES["tails_of_default"])

    def loss(implementation, *arrays):
        out = ikbo.linear_compression(*arrays, inputs.cand_to_user, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = [jax.grad(functools.partial(loss, i), (0, 1, 2, 3)) for i in ("mosaic_gpu", "xla")]
    plan = ikbo.explain(gradients[0], *inputs[:4]).plans[0]
    assert plan.backward.startswith("mosaic_gpu, at user and candidate batch size, ")
    found = [g(*inputs[:4]) for g in gradients]
    # The two forward results differ by a rounding, which becomes part of the cotangent.
    problems.assert_near(*found, 0.02)


def test_vmap_of_gradients_and_second_derivatives():
    shape = problems.LINEAR_COMPRESSION_SHAPES["unsorted"]
    cases = [problems.make_inputs(shape, "bfloat16", seed) for seed in range(3)]
    w_cand, w_user = cases[0][:2]
    stacked = [jnp.stack(part) for part in list(zip(*cases, strict=True))[2:]]

    def gradients(*arrays):
        def loss(*floats):
            out = ikbo.linear_compression(*floats, arrays[4], implementation="mosaic_gpu")
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2, 3))(*arrays[:4])

    found = jax.vmap(functools.partial(gradients, w_cand, w_user))(*stacked)
    for i, case in enumerate(cases):
        one = gradients(w_cand, w_user, *case[2:])
        # Parts of the batch may be cut elsewhere.
        problems.assert_near([batched[i] for batched in found], one, 0.01)

    def square(*floats):
        return sum(
            jnp.sum(g.astype(jnp.float32) ** 2) for g in gradients(*floats, cases[0].cand_to_user)
        )

    second = jax.grad(square, (0, 1, 2, 3))(*cases[0][:4])
    assert all(bool(jnp.all(jnp.isfinite(x)) and jnp.any(x != 0)) for x in second)


@pytest.mark.parametrize("users", [1, 15, 300])
def test_gradients_repeat_bitwise(users):
    levels = levels_of(DEFAULT._replace(users=users))
    cotangent = cotangent_of(levels)
    on_gpu.assert_repeats(make_gradients(levels), (*levels, cotangent), 50)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_with_their_user(bad):
    """Of a cotangent: in its candidate's gradient and its user's; of an embedding, in weights'."""
    shape = problems.LinearCompressionShape(5, 64, 240, 130, 66, 136, "unsorted")
    levels = levels_of(shape)
    cotangent = cotangent_of(levels)
    run = make_gradients(levels)
    _, clean = run(*levels, cotangent)
    spoiled = levels._replace(embeddings=tuple(e.at[2].set(bad) for e in levels.embeddings))
    _, found = run(*spoiled, cotangent)
    chex.assert_trees_all_equal(found, clean)
    (d_weights, found) = run(*levels, cotangent.at[7].set(bad))
    user = int(levels.parents[1][7])
    for array, want, row in zip(found, clean, (user, 7), strict=True):
        others = jnp.delete(array, row, axis=0), jnp.delete(want, row, axis=0)
        chex.assert_trees_all_equal(*others)
        assert not bool(jnp.any(jnp.isfinite(array[row])))
    assert not any(bool(jnp.any(jnp.isfinite(x))) for x in d_weights)


@pytest.mark.parametrize("users", [5, 300])
def test_embeddings_without_candidates_reach_no_gradient(users):
    """Not even NaN and infinity: padding of users need not be finite."""
    levels = levels_of(problems.LinearCompressionShape(users, 64, 240, 130, 66, 136, "unsorted"))
    used = levels.parents[1] // 3 * 3
    levels, cotangent = levels._replace(parents=(None, used)), cotangent_of(levels)
    run = make_gradients(levels)
    clean = run(*levels, cotangent)
    is_used = jnp.zeros(users, bool).at[used].set(True)[:, None, None]
    of_users, of_cands = levels.embeddings
    columns = jnp.where(jnp.arange(of_users.shape[2]) < 64, jnp.nan, jnp.inf)
    spoiled = jnp.where(is_used, of_users, columns.astype(of_users.dtype))
    found = run(*levels._replace(embeddings=(spoiled, of_cands)), cotangent)
    chex.assert_trees_all_equal(found, clean)


def test_index_out_of_range_reads_nothing_outside():
    """Clamped, with NaNs in whatever memory a wild read could meet."""
    levels = levels_of(problems.LinearCompressionShape(4, 33, 100, 70, 90, 128))
    cotangent = cotangent_of(levels)
    index = levels.parents[1].at[::3].set(4).at[1::3].set(-1).at[2::9].set(2**31 - 1)
    poison = jax.block_until_ready(jnp.full((1 << 28,), jnp.nan, jnp.float32))
    del poison
    run = make_gradients(levels)
    actual = run(*levels._replace(parents=(None, index)), cotangent)
    expected = run(*levels._replace(parents=(None, jnp.clip(index, 0, 3))), cotangent)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(actual))
    chex.assert_trees_all_equal(actual, expected)


SANITIZED = """
import jax, jax.numpy as jnp, numpy as np, problems
from ikbo_jax.ops.linear_compression_backward import Arrays, kernel_vjp, problem_of
from ikbo_jax.problems.linear_compression_backward import default_config
for users, candidates in ((3, 9), (2, 40)):
    shape = problems.LinearCompressionShape(users, candidates, 120, 70, 134, 136, "unsorted")
    inputs = problems.make_inputs(shape, "bfloat16")
    index = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
    levels = Arrays(*inputs._replace(cand_to_user=index).levels)
    cotangent = problems.random_array(np.random.default_rng(0), (candidates, 120, 136), "bfloat16")
    config = default_config(problem_of(levels))
    jax.block_until_ready(kernel_vjp(*levels, cotangent, config=config, num_sms=132))
print("FINISHED")
"""
test_sanitizer = on_gpu.sanitizer_test(SANITIZED)

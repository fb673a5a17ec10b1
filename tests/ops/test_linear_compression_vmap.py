"""vmap of the op: every combination of batched arguments, on the XLA path and around the kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from test_attention_vmap import SIZE, axes_of, check_gradients, problem_at, stack

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

SHAPE = problems.LinearCompressionShape(3, 5, 6, 7, 4, 8, "unsorted")
FIELDS = problems.LinearCompressionInputs._fields
COMBINATIONS = [c for c in itertools.product([True, False], repeat=5) if any(c)]


def name_of(combination: tuple[bool, ...]) -> str:
    return "+".join(name for name, b in zip(FIELDS, combination, strict=True) if b)


def stacked(combination: tuple[bool, ...], dtype: str) -> problems.LinearCompressionInputs:
    each = [problems.make_inputs(SHAPE, dtype, seed) for seed in range(SIZE)]
    return stack(each, combination)


def tolerance_of(dtype: str) -> float:
    return 1e-5 if dtype == "float32" else 0.04


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
@pytest.mark.parametrize(
    "weights", [(False, False), (False, True), (True, False), (True, True)], ids=str
)
def test_equals_a_loop(request, weights: tuple[bool, bool], kernel: bool) -> None:
    """With these weights batched, every combination of the other arguments, in one program."""
    calls = request.getfixturevalue("fake_hopper").calls if kernel else None
    dtype = "bfloat16" if kernel else "float32"
    combinations = [c for c in COMBINATIONS if c[:2] == weights]
    each = {name_of(c): (c, stacked(c, dtype)) for c in combinations}

    def run(inputs):
        outs = {}
        for name, (combination, _) in each.items():
            before = kernel and len(calls)
            outs[name] = jax.vmap(ikbo.linear_compression, axes_of(combination))(*inputs[name])
            assert not kernel or len(calls) > before, f"{name}: the kernel was not reached"
        return outs

    outs = jax.jit(run)({name: inputs for name, (_, inputs) in each.items()})
    for name, (combination, inputs) in each.items():
        for i in range(SIZE):
            np.testing.assert_allclose(
                np.asarray(outs[name], np.float64)[i],
                problems.numpy_oracle(*problem_at(inputs, combination, i).levels),
                rtol=0,
                atol=tolerance_of(dtype),
                err_msg=name,
            )


def gradient_of_sines(inputs: problems.LinearCompressionInputs) -> tuple[np.ndarray, ...]:
    """By the four arrays, of the sum of the result's sines, in NumPy and f64; then in f32."""
    cotangent = np.cos(problems.numpy_oracle(*inputs.levels))
    weights, embeddings = problems.numpy_oracle_gradients(*inputs.levels, cotangent)
    return tuple(x.astype(np.float32) for x in (*weights[::-1], *embeddings[::-1]))


# Folded, batched by XLA (or a loop) because embeddings are shared, and because weights differ.
KINDS = [
    (False, False, True, True, True),
    (False, False, False, False, True),
    (True, False, True, False, False),
]


@pytest.mark.parametrize("combination", KINDS, ids=name_of)
@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_gradient_of_vmap_and_vmap_of_gradient(request, combination, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("fake_hopper")
    inputs = stacked(combination, "bfloat16" if kernel else "float32")

    def loss(arrays, index):
        return jnp.sum(jnp.sin(ikbo.linear_compression(*arrays, index).astype(jnp.float32)))

    each = [gradient_of_sines(problem_at(inputs, combination, i)) for i in range(SIZE)]
    *axes, index_axis = axes_of(combination)
    both = (inputs[:4], inputs.cand_to_user), (tuple(axes), index_axis)
    check_gradients(loss, *both, each, 0.1 if kernel else 1e-4)


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_multilevel(request, kernel: bool) -> None:
    """The coarsest levels are shared by the problems of a vmap; the others are each one's own."""
    if kernel:
        request.getfixturevalue("fake_hopper")
    dtype = "bfloat16" if kernel else "float32"
    each = [problems.make_levels((2, 3, 5), (4, 6, 3), 7, 8, dtype, seed) for seed in range(SIZE)]
    weights = each[0][0]

    def run(embeddings, parents):
        return ikbo.multilevel_linear_compression(
            [ikbo.Term(*level) for level in zip(weights, embeddings, (None, *parents), strict=True)]
        )

    owns = [tuple(level >= shared for level in range(3)) for shared in range(3)]

    def arrays_of(own):
        embeddings, parents = (
            [
                np.stack([x[part][level] for x in each]) if own[level] else each[0][part][level]
                for level in levels
            ]
            for part, levels in ((1, range(3)), (2, (1, 2)))
        )
        return tuple(embeddings), tuple(parents)

    def run_all(every):
        return [
            jax.vmap(run, in_axes=(axes_of(own), axes_of(own)[1:]))(*arrays)
            for own, arrays in zip(owns, every, strict=True)
        ]

    every = [arrays_of(own) for own in owns]
    for own, (embeddings, parents), out in zip(owns, every, jax.jit(run_all)(every), strict=True):
        for i in range(SIZE):
            one = [x[i] if b else x for x, b in zip(embeddings, own, strict=True)]
            up = [x[i] if b else x for x, b in zip(parents, own[1:], strict=True)]
            expected = problems.numpy_oracle(weights, one, (None, *up))
            np.testing.assert_allclose(
                np.asarray(out, np.float64)[i], expected, rtol=0, atol=tolerance_of(dtype)
            )

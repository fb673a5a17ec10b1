"""vmap of `gdpa`: problems that become one, and problems that run one after another."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest
from problems_gdpa import Shape
from test_attention_vmap import check_gradients

import ikbo_jax as ikbo
from ikbo_jax.reference.gdpa import Arrays

pytestmark = pytest.mark.slow

SIZE = 3
ACTIVATIONS = ("silu", "softmax")
JAGGED = Shape((3, 0, 6), (4, 2, 5), 2, 1, 4, (2, 0, 1))
POOLED = JAGGED._replace(q_lens=2)
#: What of query, key, value, cu_seqlens_q, cu_seqlens_kv and q_to_kv is batched.
ALL = (True,) * 6
KINDS = {
    "own": (JAGGED, ALL),
    "own_without_index": (JAGGED._replace(q_to_kv=None), (True, True, True, True, False, False)),
    "shared_kv": (JAGGED, (True, False, False, True, False, True)),
    "shared_kv_and_q": (JAGGED, (False, False, False, False, False, True)),
    "own_kv_alone": (JAGGED, (False, True, True, False, False, False)),
    "values_alone": (JAGGED, (False, False, True, False, False, False)),
    "offsets_alone": (JAGGED, (False, False, False, False, True, False)),
    "pooled_by_the_same": (POOLED, (False, True, True, False, True, True)),
    "pooled_by_own": (POOLED, ALL),
    "pooled_without_index": (
        POOLED._replace(q_to_kv=None),
        (False, True, True, False, True, False),
    ),
}
LOOPS = {"values_alone", "offsets_alone", "pooled_by_own"}


def stacked(shape: Shape, kind: tuple[bool, ...]) -> tuple[Arrays, Arrays]:
    """Inputs of which some hold `SIZE` problems on a leading axis, and vmap's axes for them."""
    each = [problems_gdpa.make_arrays(shape, "float32", seed) for seed in range(SIZE)]
    if each[0].cu_seqlens_q is not None:
        # One problem's clamped offsets must not reach into the next one's rows.
        wild = np.asarray([2, 5, 3, 99], np.int32), np.asarray([-1, 4, 7, 2**31 - 1], np.int32)
        each[1] = each[1]._replace(cu_seqlens_q=wild[0], cu_seqlens_kv=wild[1])
    if shape.q_to_kv is not None:
        each[2] = each[2]._replace(q_to_kv=np.asarray([-5, 1, 99], np.int32))
    both = jax.tree.map(lambda *x: np.stack(x), *each)
    pairs = list(zip(each[0], both, (*kind, False, False, False), strict=True))
    axes = Arrays(*(0 if b and x is not None else None for x, _, b in pairs))
    return Arrays(*(y if b or x is None else np.asarray(x) for x, y, b in pairs)), axes


def problem_at(arrays: Arrays, axes: Arrays, i: int) -> Arrays:
    return Arrays(*(x if a is None else x[i] for x, a in zip(arrays, axes, strict=True)))


def tamed(arrays: Arrays) -> Arrays:
    """The same with offsets in order and an index within bounds, as NumPy's oracle needs them."""
    cu_q, cu_kv, index = arrays[3:6]
    if cu_q is not None:
        cu_q = np.maximum.accumulate(np.clip(cu_q, 0, arrays.query.shape[0]))
    cu_kv = np.maximum.accumulate(np.clip(cu_kv, 0, arrays.key.shape[0]))
    index = None if index is None else np.clip(index, 0, len(cu_kv) - 2)
    return Arrays(*arrays[:3], cu_q, cu_kv, index)


settings_of = functools.partial(problems_gdpa.settings_of, activations=ACTIVATIONS)
attend = functools.partial(problems_gdpa.attend, activation=ACTIVATIONS)


def loss(floats: tuple, integers: tuple) -> jax.Array:
    return jnp.sum(jnp.sin(attend(Arrays(*floats, *integers))))


@pytest.mark.parametrize("name", KINDS)
def test_equals_a_loop(name: str) -> None:
    arrays, axes = stacked(*KINDS[name])
    out = np.asarray(jax.jit(jax.vmap(attend, (axes,)))(arrays))
    for i in range(SIZE):
        one = tamed(problem_at(arrays, axes, i))
        exact = problems_gdpa.numpy_oracle(one, settings_of(one))
        np.testing.assert_allclose(out[i], exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["shared_kv", "values_alone"])
def test_gradient_of_vmap_and_vmap_of_gradient(name: str) -> None:
    arrays, axes = stacked(*KINDS[name])
    each = []
    for i in range(SIZE):
        one = tamed(problem_at(arrays, axes, i))
        d_out = np.cos(problems_gdpa.numpy_oracle(one, settings_of(one)))
        each.append(problems_gdpa.numpy_gradients(one, settings_of(one), d_out))
    both = [(tuple(x[:3]), tuple(x[3:])) for x in (arrays, axes)]
    check_gradients(loss, *both, each, 1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_problems_become_one_or_loop(name: str) -> None:
    shape, kind = KINDS[name]
    arrays, axes = stacked(shape, kind)
    (plan,) = ikbo.explain(jax.vmap(attend, (axes,)), arrays).plans
    if name in LOOPS:
        assert plan.problem.batch == 3
        assert plan.reason.endswith("vmap runs 3 problems one after another")
    else:
        assert plan.problem.batch >= SIZE * 3
        shared = kind[1:3] == (False, False)
        assert plan.problem.kv_rows == arrays.key.shape[0] if shared else SIZE * 11


def test_no_problems() -> None:
    arrays, axes = stacked(*KINDS["own"])
    none = jax.tree.map(lambda x: x[:0], arrays)
    out, gradient = jax.jit(
        lambda x: (jax.vmap(attend)(x), jax.vmap(jax.grad(loss))(tuple(x[:3]), tuple(x[3:])))
    )(none)
    chex.assert_shape(out, (0, 9, 2, 4))
    chex.assert_trees_all_equal_shapes(gradient, tuple(none[:3]))

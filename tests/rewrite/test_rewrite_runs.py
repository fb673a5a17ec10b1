"""Programs that run still run when they are rewritten, and keep the precision of their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookalikes import INDEX, KEY, QUERY, VALUE, B, D, S, T, U
from rewrite_basics import check_values_and_gradients, every_equation, same

import ikbo_jax as ikbo

USER = jnp.asarray(np.arange(U * D, dtype=np.float32).reshape(U, D) / 7 - 0.8)
CAND = jnp.asarray(np.arange(B * D, dtype=np.float32).reshape(B, D) / 9 - 1.1)
INDICES = jnp.asarray(INDEX)


def test_typed_keys_are_looked_up() -> None:
    keys = jax.random.split(jax.random.key(3), U)
    same(lambda keys, i: (keys[i], jnp.tile(keys, 2)), keys, INDICES)
    same(lambda keys, i: jax.vmap(lambda k: jax.random.normal(k, (D,)))(keys[i]), keys, INDICES)
    same(
        lambda keys, user, i: user[i] + jax.vmap(lambda k: jax.random.normal(k, (D,)))(keys[i]),
        *(keys, USER, INDICES),
    )
    same(lambda keys, i: jnp.take(keys, i, axis=0, mode="clip"), keys, INDICES)
    same(lambda key, c: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(6)), keys[0], CAND)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_float64_product_by_parts(index: str) -> None:
    with jax.enable_x64(True):
        user, cand = (np.asarray(x, np.float64) for x in (USER, CAND))
        w = np.concatenate([user, cand])[: 2 * D]

        def dense(user, cand, index):
            return jnp.tanh(jnp.concatenate([user[index], cand], axis=1)) @ w

        same(dense, user, cand, np.asarray(INDEX, index), rtol=1e-12)


@pytest.mark.parametrize("act", ["softmax", "gelu", "silu", "relu"])
def test_float64_attention(act: str) -> None:
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x[:, :, 0], jnp.float64) for x in (QUERY, KEY, VALUE))

        def fn(q, k, v):
            p = getattr(jax.nn, act)(jnp.einsum("btd,bsd->bts", q, k[INDICES]))
            return jnp.einsum("bts,bsd->btd", p, v[INDICES])

        check_values_and_gradients(fn, q, k, v, bound=1e-12)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "float8_e4m3fn", "float8_e5m2", "bool"])
def test_narrow_dtypes(dtype: str) -> None:
    user = USER.astype(dtype)

    def looked_up(user, cand, i):
        rows, taken = user[i], jnp.take(user, i, axis=0, mode="clip")
        numbers = rows.astype(jnp.float32)
        joined = jnp.concatenate([numbers, cand], 1).sum(1)
        return rows, taken, numbers @ cand.T, numbers * 2, joined, rows == rows[::-1]

    same(looked_up, user, CAND, INDICES)


def test_attention_of_narrow_dtypes() -> None:
    q, k, v = (jnp.asarray(x[:, :, 0]).astype(jnp.float8_e4m3fn) for x in (QUERY, KEY, VALUE))

    def fn(q, k, v):
        scores = jnp.einsum("btd,bsd->bts", q, k[INDICES], preferred_element_type=jnp.float32)
        p = jax.nn.softmax(scores).astype(v.dtype)
        return jnp.einsum("bts,bsd->btd", p, v[INDICES], preferred_element_type=jnp.float32)

    same(fn, q, k, v)


def test_complex_numbers_and_integers() -> None:
    z = USER.astype(jnp.complex64) * (1 + 2j)
    same(lambda z, i: (jnp.sin(z[i]) * 2j).real, z, INDICES)
    whole = jnp.arange(U * S * D).reshape(U, S, D)

    def counts(q, k):
        return jnp.einsum(
            "bts,bsd->btd", jax.nn.relu(jnp.einsum("btd,bsd->bts", q, k[INDICES])), k[INDICES]
        )

    same(counts, jnp.arange(B * T * D).reshape(B, T, D) - 20, whole)

    def dense(user, cand, i):
        return jnp.concatenate([user[i], cand], axis=1) @ jnp.ones((2 * D, D), jnp.complex64)

    same(dense, z, CAND.astype(jnp.complex64) * 1j, INDICES)


# The precision of products.


def check_precision(expected: jax.lax.Precision, fn, *args) -> None:
    """Asserts that all products of the rewritten program have a precision."""
    found = every_equation(jax.make_jaxpr(ikbo.rewrite(fn))(*args))
    found = [eqn.params["precision"] for eqn in found if eqn.primitive.name == "dot_general"]
    assert found
    assert all(p in (expected, (expected, expected)) for p in found), found


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("act", ["softmax", "gelu", "relu"])
def test_precision_of_attention_is_kept(act: str, precision: str) -> None:
    def fn(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k[INDICES], precision=precision)
        p = getattr(jax.nn, act)(scores)
        return jnp.einsum("bnts,bsnh->btnh", p, v[INDICES], precision=precision)

    check_precision(jax.lax.Precision[precision.upper()], fn, QUERY, KEY, VALUE)


def test_precision_of_other_products_is_kept() -> None:
    high = jax.lax.Precision.HIGHEST

    def fn(user, c, w, w2, r, e, f, i):
        tower = jnp.matmul(user[i], w, precision=high)
        both = jnp.matmul(jnp.concatenate([tower, c], 1), w2, precision=high)
        rows = jnp.concatenate([e[i], f], 1)
        return both, jnp.einsum("mk,bkn->bmn", r, rows, precision=high)

    args = [jnp.ones(s) for s in ((U, D), (B, D), (D, D), (2 * D, D), (4, 5), (U, 3, D), (B, 2, D))]
    check_precision(high, fn, *args, INDICES)

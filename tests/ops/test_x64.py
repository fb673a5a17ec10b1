"""The ops where `jax_enable_x64` is set: no 64-bit value gets into the XLA path or a kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import offline
import pytest

import ikbo_jax as ikbo

INDEX = np.asarray([0, 2, 1, 1, 0, 2, 2], np.int32)
OFFSETS = np.asarray([0, 100, 100, 300], np.int32)


def ones(*shape: int) -> Any:
    return np.ones(shape, jnp.bfloat16)


ATTENTION = (ones(7, 64, 4, 64), ones(3, 100, 2, 64), ones(3, 100, 2, 64))
JAGGED = (ones(300, 4, 64), ones(300, 2, 64), ones(300, 2, 64))


def attention(query, key, value, **options):
    return ikbo.attention(query, key, value, INDEX, **options)


def short_queries(query, key, value, **options):
    return ikbo.attention(query[:, :1], key, value, INDEX, return_residuals=True, **options)


def gdpa(query, key, value, **options):
    return ikbo.gdpa(query, key, value, OFFSETS, OFFSETS, **options)


def linear_compression(w_cand, w_user, e_cand, e_user, **options):
    return ikbo.linear_compression(w_cand, w_user, e_cand, e_user, INDEX, **options)


OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (attention, ATTENTION),
    "attention_t1": (short_queries, ATTENTION),
    "gdpa": (gdpa, JAGGED),
    "gdpa_softmax": (functools.partial(gdpa, activation="softmax"), JAGGED),
    "linear_compression": (
        linear_compression,
        (ones(64, 32), ones(64, 40), ones(7, 32, 64), ones(3, 40, 64)),
    ),
}


def with_gradients(op: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[..., Any]:
    def loss(*arrays):
        results = jax.tree.leaves(op(*arrays))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in results), results

    return jax.grad(loss, tuple(range(len(arrays))), has_aux=True)


@pytest.mark.parametrize("name", OPS)
def test_xla_path_and_gradient(name: str) -> None:
    op, arrays = OPS[name]
    run = with_gradients(functools.partial(op, implementation="xla"), arrays)
    expected = jax.eval_shape(run, *arrays)
    with jax.enable_x64(True):
        assert jax.eval_shape(run, *arrays) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_kernels_lower(name: str, seems_hopper: None) -> None:
    op, arrays = OPS[name]
    run = functools.partial(op, implementation="mosaic_gpu")
    if name == "gdpa":  # whose gradient has kernels of its own
        run = with_gradients(run, arrays)
    expected = [offline.describe_module(x) for x in offline.mosaic_modules(run, *arrays)]
    assert expected
    with jax.enable_x64(True):
        modules = offline.mosaic_modules(run, *arrays)
    assert [offline.describe_module(module) for module in modules] == expected

"""JAX's settings at the time of a call, for what JAX traces later.

A caller may change settings for the time of a call, with `jax.default_matmul_precision("highest")`
for example. JAX traces derivatives, rules of `vmap` and one device's part later, when the caller
has left the context, or in another thread, which has settings of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def as_now[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[..., Result]:
    """Runs `function` later under the settings of products and of 64 bits that are set now."""
    precision, x64 = matmul_precision(), jax.config.jax_enable_x64

    @functools.wraps(function)
    def settled(*args: Any, **kwargs: Any) -> Result:
        with jax.default_matmul_precision(precision), jax.enable_x64(x64):
            return function(*args, **kwargs)

    return settled


def matmul_precision() -> str | None:
    """Returns the precision of f32 products that is set now; None: JAX's default."""
    return jax.config.jax_default_matmul_precision

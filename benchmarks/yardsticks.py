"""Softmax attention by other libraries; NotImplementedError says why one cannot run here."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import jax


def cudnn() -> Callable[..., jax.Array]:
    """`jax.nn.dot_product_attention` by cuDNN."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def tokamax() -> Callable[..., jax.Array]:
    """tokamax's attention for Hopper GPUs."""
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"its kernel needs a GPU, not a {jax.default_backend()}")
    tokamax = importlib.import_module("tokamax")

    return functools.partial(tokamax.dot_product_attention, implementation="mosaic")

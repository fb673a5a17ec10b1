"""Ops for ranking models that look a candidate's user up while they run, instead of copying it."""

from ikbo_jax import debug
from ikbo_jax._version import __version__
from ikbo_jax.ops.explain import Explanation, explain
from ikbo_jax.ops.linear_compression import (
    Term,
    linear_compression,
    multilevel_linear_compression,
)

__all__ = [
    "Explanation",
    "Term",
    "__version__",
    "debug",
    "explain",
    "linear_compression",
    "multilevel_linear_compression",
]

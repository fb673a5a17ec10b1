"""`rewrite`: takes the materialised broadcast out of a model that is written with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ikbo_jax.rewrite import (  # noqa: F401  For rules.
    calls,
    contraction,
    jaxprs,
    jit,
    jitted,
    reshape,
    rules,
    sources,
)
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.lineage import Concat, Lazy, Lineage
from ikbo_jax.rewrite.program import run
from ikbo_jax.rewrite.registry import NotCovered, Rule, register_rule
from ikbo_jax.rewrite.report import FoundBroadcast, Materialisation, RewriteReport

__all__ = [
    "Concat",
    "Context",
    "FoundBroadcast",
    "Lazy",
    "Lineage",
    "Materialisation",
    "NotCovered",
    "RewriteReport",
    "Rule",
    "register_rule",
    "rewrite",
]


def rewrite(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` without its materialised broadcasts of users to candidates.

    The returned function traces `fn` at each call (so put it under `jax.jit`) and follows every
    lookup of a smaller batch's rows by the larger one's index. Work on such values runs at the
    smaller batch; where they meet values of the larger batch, an op of this library or a
    decomposition takes over; what no rule covers is materialised there, as `fn` would have done.

    Args:
      fn: any function that JAX can trace. Arrays among its arguments are traced; everything else
        in them is passed as is.

    Returns:
      A function with `fn`'s signature and results, up to the order in which floating-point numbers
      are added; of a function under `jax.jit` again one under `jax.jit`, with the same parameters.
      It composes with jit, grad, vmap and checkpoint; `ikbo_jax.explain` of it tells
      what was found. If nothing is found, or nothing is gained, the original program runs.

    Raises:
      Whatever `fn` raises while it is traced.
    """
    if getattr(fn, "_ikbo_rewritten", False):
        return fn
    if (found := jitted.parameters(fn)) is not None:
        inner, parameters = found
        return jax.jit(rewrite(inner), **parameters)

    @functools.wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [_is_array(leaf) for leaf in leaves]
        # Results that are no arrays do not pass through the traced program.
        rest_of_results: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            values = _merge(traced, list(arrays), leaves)
            call_args, call_kwargs = jax.tree.unflatten(treedef, values)
            out, out_treedef = jax.tree.flatten(fn(*call_args, **call_kwargs))
            arrays_out = [_is_array(x) for x in out]
            others = [None if a else x for x, a in zip(out, arrays_out, strict=True)]
            rest_of_results[:] = [out_treedef, arrays_out, others]
            return [x for x, a in zip(out, arrays_out, strict=True) if a]

        arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
        program = jaxprs.trace(flat, arrays)
        results = run(program, arrays)
        out_treedef, arrays_out, others = rest_of_results
        return jax.tree.unflatten(out_treedef, _merge(arrays_out, results, others))

    rewritten._ikbo_rewritten = True  # type: ignore[attr-defined]
    return jitted.WithMethods(rewritten) if hasattr(fn, "lower") else rewritten


def _is_array(x: Any) -> bool:
    # Types such as np.float32, which people pass as dtypes, have both as well.
    if isinstance(x, jax.core.Tracer):
        # The most frequent ones, which need not be asked for a shape.
        return True
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def _merge(is_array: list[bool], arrays: list[Any], others: list[Any]) -> list[Any]:
    rest = iter(arrays)
    return [next(rest) if a else x for x, a in zip(others, is_array, strict=True)]

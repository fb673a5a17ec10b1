"""`rewrite`: removes the materialised broadcast of users to candidates from a model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite import primitives
from ikbo_jax.rewrite.calls import jitted_function
from ikbo_jax.rewrite.calls.program import run
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.report.report import FoundBroadcast, Materialisation, RewriteReport
from ikbo_jax.rewrite.values import jaxprs
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered, Rule, register_rule

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


primitives.register_all()


def rewrite[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn` without its materialised broadcasts of users to candidates.

    The returned function traces `fn` at each call (so put it under `jax.jit`) and follows every
    lookup of rows from a smaller batch to a larger batch. Work on the looked-up values runs at the
    smaller batch. An equation that combines them with values of the larger batch becomes an op of
    this library or a decomposition. If no rule covers an equation, its operands are materialised,
    as in `fn`.

    Args:
      fn: any pure function that JAX can trace. Arrays among its arguments are traced, also NumPy's
        arrays of rank 0. All other leaves are passed as they are: numbers of Python, and NumPy's
        scalars, such as `np.int64(2)`. Under `jax.jit`, numbers and scalars are arrays. As under
        `jax.jit`, the function gets copies of the arguments' trees, and what it changes in them is
        lost.

    Returns:
      A function with `fn`'s signature and results, up to the order in which floating-point numbers
      are added. If `fn` is under `jax.jit`, so is the returned function, with the same parameters.
      It composes with jit, grad, vmap and checkpoint. `ikbo_jax.explain` prints what was found in
      it. If nothing is found, or nothing is gained, the original program runs.

    Raises:
      TypeError: `fn` is no function. The returned function raises whatever `fn` raises while it is
        traced.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, but is {fn!r:.80}")
    if getattr(fn, "_ikbo_rewritten", False):
        return fn
    if (jit_info := jitted_function.parameters(fn)) is not None:
        inner, parameters = jit_info
        return jax.jit(rewrite(inner), **parameters)

    @functools.wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [_is_array(leaf) for leaf in leaves]
        # The tree of the results, which of its leaves are arrays, and the leaves that are not:
        # these do not pass through the traced program.
        result_structure: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            values = _merge(traced, list(arrays), leaves)
            call_args, call_kwargs = jax.tree.unflatten(treedef, values)
            out, out_treedef = jax.tree.flatten(fn(*call_args, **call_kwargs))
            arrays_out = [_is_array(x) for x in out]
            statics = [None if a else x for x, a in zip(out, arrays_out, strict=True)]
            result_structure[:] = [out_treedef, arrays_out, statics]
            return [x for x, a in zip(out, arrays_out, strict=True) if a]

        arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
        program = jaxprs.trace(flat, arrays)
        results = run(program, arrays)
        out_treedef, arrays_out, statics = result_structure
        return jax.tree.unflatten(out_treedef, _merge(arrays_out, results, statics))

    # Wrappers copy the attribute. The function itself would be a cycle, which keeps arrays alive.
    rewritten._ikbo_rewritten = id(rewritten)  # type: ignore[attr-defined]
    return jitted_function.WithMethods(rewritten) if hasattr(fn, "lower") else rewritten


def _is_array(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        # Most leaves are tracers; the attributes of a tracer are slow to read.
        return True
    # Types such as np.float32, which callers pass as dtypes, have a shape and a dtype, too. So have
    # NumPy's scalars, which the function may use as Python's numbers: as sizes, or in an `if`.
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, (type, np.generic))


def _merge(is_array: list[bool], arrays: list[Any], statics: list[Any]) -> list[Any]:
    rest = iter(arrays)
    return [next(rest) if a else x for x, a in zip(statics, is_array, strict=True)]

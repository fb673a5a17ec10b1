"""Functions under `jax.jit` that are rewritten: their parameters and their methods."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax


def parameters(fn: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function that `fn` holds and the arguments of `jax.jit` that `fn` was made with.

    Args:
      fn: any function, or a method of an object.

    Returns:
      The function and keyword arguments of `jax.jit`; None if `fn` is not made by it, or has
      parameters that cannot be read.
    """
    info, inner = getattr(fn, "_jit_info", None), getattr(fn, "__wrapped__", None)
    if not callable(inner):
        return None
    try:
        layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
        if any(x is not None for x in layouts) or info.device or info.backend:
            return None
        static, donated = list(info.static_argnums), list(info.donate_argnums)
        if inspect.ismethod(fn):
            if info.user_specified_in_shardings:
                return None
            # The object itself is the first argument of the function that it holds.
            inner = types.MethodType(inner, fn.__self__)
            static, donated = ([n - 1 for n in numbers if n] for numbers in (static, donated))
        return inner, {
            "in_shardings": info.in_shardings_treedef.unflatten(info.in_shardings_leaves),
            "out_shardings": info.out_shardings_treedef.unflatten(info.out_shardings_leaves),
            "static_argnums": tuple(static),
            "static_argnames": _without_self(fn, info.static_argnames),
            "donate_argnums": tuple(donated),
            "donate_argnames": _without_self(fn, info.donate_argnames),
            "keep_unused": info.keep_unused,
            "inline": info.inline,
            "compiler_options": dict(info.compiler_options_kvs) or None,
        }
    except AttributeError:
        return None


def _without_self(fn: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of arguments, without that of the object whose method `fn` is."""
    if not inspect.ismethod(fn):
        return names
    first = next(iter(inspect.signature(fn.__func__).parameters))
    return tuple(name for name in names if name != first)


class WithMethods:
    """A rewritten function with the methods that those under `jax.jit` have.

    `jax.jit` copies the attributes of a function, but not those of its class.
    """

    def __init__(self, rewritten: Callable[..., Any]) -> None:
        functools.update_wrapper(self, rewritten)
        self._rewritten = rewritten

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rewritten(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function under `jax.jit`."""
        return jax.jit(self._rewritten).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function under `jax.jit`."""
        return jax.jit(self._rewritten).trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function under `jax.jit`."""
        return jax.jit(self._rewritten).eval_shape(*args, **kwargs)

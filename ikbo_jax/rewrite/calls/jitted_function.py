"""Rewritten functions under `jax.jit`: they keep the parameters and the methods."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

#: The type of what `jax.jit` returns.
_UNDER_JIT: Any = type(jax.jit(lambda: None))


def parameters(fn: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Returns the function or method that `jax.jit` wrapped, and the arguments of `jax.jit`.

    None if `fn` is not the result of `jax.jit`, or has parameters that cannot be read.
    """
    if not isinstance(getattr(fn, "__func__", fn), _UNDER_JIT):
        # `functools.wraps` copies the attributes that are read below to any other function.
        return None
    try:
        info, inner = fn._jit_info, fn.__wrapped__
        layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
        if any(x is not None for x in layouts) or info.device or info.backend:
            return None
        static, donated = list(info.static_argnums), list(info.donate_argnums)
        if inspect.ismethod(fn):
            if info.user_specified_in_shardings:
                return None
            # The object is the first argument of the wrapped function.
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
    if not inspect.ismethod(fn):
        return names
    first = next(iter(inspect.signature(fn.__func__).parameters))
    return tuple(name for name in names if name != first)


class WithMethods:
    """Wraps a rewritten function with the methods of a function under `jax.jit`.

    If `jax.jit` wraps it again, it copies the attributes of this object, but not of its class.
    """

    def __init__(self, rewritten: Callable[..., Any]) -> None:
        functools.update_wrapper(self, rewritten)
        self._rewritten = rewritten

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rewritten(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in ("lower", "trace", "eval_shape"):
            raise AttributeError(name)
        return getattr(jax.jit(self._rewritten), name)

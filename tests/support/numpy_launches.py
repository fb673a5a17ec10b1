"""Runs the launches of Pallas' GPU interpreter in NumPy: no program of theirs is compiled.

The interpreter makes a program for XLA of a launch, and a second one of the body that its threads
run, in which every access to memory is a callback to Python. To trace, to lower and to compile
them is two thirds of a small launch's time. Here the launch is one callback. The interpreter's own
code runs in it, equation by equation, on NumPy arrays: what it takes from `jax.numpy`, `jax.lax`
and for callbacks and threads is replaced by what computes at once.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import float64_primitives
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map, utils
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    interpret_pallas_call,
    jaxpr_interpret,
    shared_memory,
)
from jax.extend import core

#: Primitives that only call a program, and the parameters that hold it.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_DOT = float64_primitives.PRIMITIVES["dot_general"]
_PRIMITIVES = float64_primitives.PRIMITIVES | {
    "convert_element_type": lambda eqn, x: x.astype(eqn.params["new_dtype"]),
    "div": lambda _, x, y: x / y if jnp.issubdtype(x.dtype, jnp.floating) else _whole_div(x, y),
    "dot_general": lambda eqn, *xs: _DOT(eqn, *(x.astype(eqn.outvars[0].aval.dtype) for x in xs)),
    "xor": lambda _, x, y: np.bitwise_xor(x, y),
    "select_n": lambda _, which, *cases: (
        np.where(which, cases[1], cases[0]) if len(cases) == 2 else np.choose(which, cases)
    ),
}
# There, a result has all of its float64's bits.
del _PRIMITIVES["reduce_precision"]


def _whole_div(x: Any, y: Any) -> Any:
    """Division that rounds to zero, as XLA's does."""
    quotient = np.floor_divide(np.abs(x), np.abs(y))
    return np.where((x < 0) == (y < 0), quotient, -quotient)


def _arrays(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Variables with their values, none of which is a literal's or an array of a device."""
    for v, x in zip(variables, values, strict=True):
        yield v, x if isinstance(x, np.ndarray | np.generic) else np.asarray(x, v.aval.dtype)


def _interpreted(self: Any, jaxpr: Any, token: Any, *args: Any) -> tuple[Any, list[Any]]:
    """`JaxprInterpreter.interpret`, to which equations with access to memory are left."""
    values = dict(_arrays([*jaxpr.constvars, *jaxpr.invars], args))

    def read(v: Any) -> Any:
        aval: Any = v.aval
        return np.asarray(v.val, aval.dtype) if isinstance(v, core.Literal) else values[v]

    for eqn in jaxpr.eqns:
        name, outputs = eqn.primitive.name, eqn.outvars
        called = next((eqn.params[key] for key in _CALLED if key in eqn.params), None)
        if name in _PRIMITIVES:
            found = _PRIMITIVES[name](eqn, *map(read, eqn.invars))
            found = found if eqn.primitive.multiple_results else [found]
        elif name in _CALLS and called is not None:
            consts, program = getattr(called, "consts", ()), getattr(called, "jaxpr", called)
            token, found = self.interpret(program, token, *consts, *map(read, eqn.invars))
        else:
            inputs = list({v for v in eqn.invars if not isinstance(v, core.Literal)})
            alone = types.SimpleNamespace(constvars=[], invars=inputs, eqns=[eqn], outvars=outputs)
            token, found = _interpret(self, alone, token, *map(read, inputs))
            # JAX computes what has no access to memory and is not among `_PRIMITIVES`.
            values.update(_arrays(outputs, found))
            continue
        for v, x in zip(outputs, found, strict=True):
            values[v] = x.astype(v.aval.dtype, copy=False).reshape(v.aval.shape)
    return token, list(map(read, jaxpr.outvars))


class _NumPy:
    """`jax.numpy`, as far as NumPy has not the same function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp if name in ("issubdtype", "iinfo", "finfo") else np, name)


class _Lax:
    """`jax.lax` whose control flow runs at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    @staticmethod
    def cond(
        predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
    ) -> Any:
        return (yes if predicate else no)(*operands)

    @staticmethod
    def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)

    @staticmethod
    def fori_loop(first: int, end: int, body: Callable[..., Any], value: Any) -> Any:
        for i in range(first, end):
            value = body(i, value)
        return value

    @staticmethod
    def while_loop(condition: Callable[..., Any], body: Callable[..., Any], value: Any) -> Any:
        while condition(value):
            value = body(value)
        return value

    @staticmethod
    def scan(body: Callable[..., Any], carry: Any, xs: Sequence[Any], length: int) -> Any:
        each = []
        for i in range(length):
            carry, found = body(carry, [x[i] for x in xs])
            each.append(found)
        return carry, [np.stack(x) for x in zip(*each, strict=True)]


def _call(function: Callable[..., Any], _: Any, *args: Any, **options: Any) -> Any:
    """`io_callback` at once."""
    options.pop("ordered", None)
    return function(*args, **options)


def _run_threads(
    run: Callable[..., Any],
    count: int,
    token: Any,
    *args: Any,
    use_ordered_callback: bool = False,
    device_id: int | None = None,
    on_exception: Callable[..., None] = lambda *args, **options: None,
) -> Any:
    """`thread_map.thread_map`, whose threads run what they are given."""
    del use_ordered_callback
    if count == 1:
        return run(np.int32(0), token, *args)

    nested = np.int32(thread_map.NESTED_TOKEN_VALUE)

    def run_one(number: int) -> None:
        try:
            with np.errstate(all="ignore"):
                run(np.int32(number), nested, *args)
        except Exception as error:
            # Now, while others may wait for this thread.
            on_exception(error, device_id=device_id, token=nested)
            raise

    with futures.ThreadPoolExecutor(count) as pool:
        threads = [pool.submit(run_one, number) for number in range(count)]
    errors = [error for thread in threads if (error := thread.exception())]
    if errors:
        on_exception(errors[0], device_id=device_id, token=token)
        raise errors[0]
    return token


_io_callback = callback.io_callback
_interpret = jaxpr_interpret.JaxprInterpreter.interpret
_interpret_pallas_call = interpret_pallas_call.interpret_pallas_call


def _launch(*args: Any, **params: Any) -> Any:
    """`interpret_pallas_call` as one callback."""

    def run(*arrays: Any) -> list[Any]:
        with np.errstate(all="ignore"):
            return list(_interpret_pallas_call(*map(np.asarray, arrays), **params))

    outputs = [mapping.array_aval for mapping in params["grid_mapping"].block_mappings_output]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    return _io_callback(run, shapes, *args, ordered=True)


@contextlib.contextmanager
def in_numpy() -> Iterator[None]:
    """Launches that run within, in programs that were lowered within, run in NumPy."""
    at_once = types.SimpleNamespace(io_callback=_call)
    quiet = types.SimpleNamespace(user_context=lambda *_, **__: contextlib.nullcontext())
    with contextlib.ExitStack() as patches:
        for module, names in (
            (gpu_callbacks, {"callback": at_once, "jnp": _NumPy()}),
            (
                jaxpr_interpret,
                {"callback": at_once, "jnp": _NumPy(), "lax": _Lax(), "source_info_util": quiet},
            ),
            (
                interpret_pallas_call,
                {
                    "callback": at_once,
                    "jnp": _NumPy(),
                    "jax": types.SimpleNamespace(lax=_Lax()),
                    "interpret_pallas_call": _launch,
                },
            ),
            (utils, {"jnp": _NumPy()}),
            (shared_memory, {"_to_int": int}),
            (thread_map, {"thread_map": _run_threads}),
            (jaxpr_interpret.JaxprInterpreter, {"interpret": _interpreted}),
        ):
            patches.enter_context(mock.patch.multiple(module, **names))
        yield

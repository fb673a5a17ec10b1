"""Traces and evaluates programs."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core, linear_util, source_info_util
from jax.interpreters import partial_eval

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.values import staged

#: The jitted functions of the ops. They hold kernels, so they are not interpreted.
OPS = ("_linear_compression", "_attention", "_gdpa", "_user_rows")

#: Returns the programs that an equation holds, as `explain` finds them.
inner_programs = explain.inner_programs


@functools.cache
def _empty() -> core.Jaxpr:
    return jax.make_jaxpr(lambda: [])()


def wrapped(fn: Callable[..., list[Any]], like: core.Jaxpr | None = None) -> Any:
    """Wraps a function of arrays that returns a list as JAX's primitives expect it.

    Errors name the function of the program `like`, or `fn`.
    """
    debug_info = (like or _empty()).debug_info._replace(arg_names=None, result_paths=None)
    if like is None:
        debug_info = debug_info._replace(func_src_info=getattr(fn, "__name__", "rewritten"))
    return linear_util.wrap_init(fn, debug_info=debug_info)


def ending_its_trace(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to be traced that may raise.

    JAX ends a trace only if the traced function returns. Otherwise a finalizer of its constants
    holds the trace, and so these constants, as long as the process lives.
    """

    def traced(*args: Any) -> Any:
        try:
            return fn(*args)
        except BaseException:
            core.find_top_trace(()).invalidate()
            raise

    # Not `functools.wraps`, which takes as many calls as a few equations.
    traced.__name__ = getattr(fn, "__name__", "rewritten")
    return traced


def trace(
    fn: Callable[..., list[Any]], inputs: Sequence[Any], like: core.Jaxpr | None = None
) -> core.Jaxpr:
    """Traces a function of arrays, or of their types, that returns a list of arrays.

    Like `jax.make_jaxpr`, but without the work that `make_jaxpr` does for each argument to cache
    the call: for a model's weights, this work takes as long as tracing a few layers. Errors name
    the function of the program `like`, or `fn`.
    """
    avals = [x if type(x) is jax.core.ShapedArray else jax.typeof(x) for x in inputs]
    fn = ending_its_trace(fn)
    program, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped(fn, like), avals)
    return core.ClosedJaxpr(program, consts) if consts else program


def with_constants_last(program: core.Jaxpr) -> core.Jaxpr:
    """Turns the constants of a program into its last arguments."""
    return program.replace(constvars=[], invars=[*program.invars, *program.constvars])


def with_traced_constants_last(program: core.Jaxpr) -> core.Jaxpr:
    """Turns those constants of a program into its last arguments that are no arrays."""
    tracer, array = jax.core.Tracer, (jax.Array, np.ndarray)
    known = [isinstance(x, array) and not isinstance(x, tracer) for x in program.consts]
    if all(known):
        return program
    constants = list(zip(program.constvars, program.consts, known, strict=True))
    return program.replace(
        constvars=[v for v, _, is_known in constants if is_known],
        consts=[x for _, x, is_known in constants if is_known],
        invars=[*program.invars, *[v for v, _, is_known in constants if not is_known]],
    )


def evaluate(
    program: core.Jaxpr, arrays: Sequence[Any], consts: Sequence[Any] | None = None
) -> list[Any]:
    """Runs a traced program on arrays; `consts` replaces the program's constants."""
    consts = program.consts if consts is None else consts
    if not any(isinstance(x, partial_eval.DynamicJaxprTracer) for x in (*consts, *arrays)):
        # This function frees arrays after their last use.
        run: Any = functools.partial(jax.core.eval_jaxpr, program)
        tracers = (x for x in arrays if isinstance(x, jax.core.Tracer))
        if any(staged.is_explicit(jax.typeof(x)) for x in tracers):
            # The derivatives of some primitives, such as `max` with a number, fail on divided
            # arrays outside of a trace. `jax.numpy` puts each of them under `jit`.
            run = jax.jit(run)
        results: list[Any] = run(consts, *arrays)
        return results
    # Under a trace, which holds all values anyway, this loop takes two thirds of the time.
    return interpret(program, consts, arrays, _bind)


def _bind(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    primitive = eqn.primitive
    results = staged.bind(primitive, operands, eqn.params, eqn.invars)
    return results if primitive.multiple_results else (results,)


def interpret(
    program: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    run: Callable[[core.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Runs a program whose equations `run` computes, each with its operands."""
    env: dict[Any, Any] = dict(zip(program.constvars, consts, strict=True))
    env.update(zip(program.invars, args, strict=True))
    name_stack, literal = source_info_util.current_name_stack(), core.Literal
    is_named, user_context = bool(str(name_stack)), source_info_util.user_context
    eqns, start = program.eqns, 0
    while start < len(eqns):
        eqn_ctx = eqns[start].ctx
        with eqn_ctx.manager:
            for eqn in itertools.islice(eqns, start, None):
                if eqn.ctx is not eqn_ctx:
                    break
                start += 1
                info = eqn.source_info
                stack = name_stack + info.name_stack if is_named else info.name_stack
                operands = [v.val if type(v) is literal else env[v] for v in eqn.invars]
                with user_context(info.traceback, name_stack=stack):
                    results = run(eqn, operands)
                env.update(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, literal) else env[v] for v in program.outvars]


@functools.cache
def _jit_equation(mesh: Any) -> core.JaxprEqn:
    """Returns an equation of `jit` under a mesh, whose parameters hold the mesh."""
    (like,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns
    return like


def call(program: core.Jaxpr, arrays: Sequence[Any], name: str) -> list[Any]:
    """Runs a traced program on arrays; under a trace, by one `jit` equation.

    Binding the equations of 50 layers again would take as long as tracing the layers.
    """
    if not any(isinstance(x, partial_eval.DynamicJaxprTracer) for x in arrays):
        return evaluate(program, arrays)
    like = _jit_equation(jax.sharding.get_abstract_mesh())
    counts = {"in": len(program.invars), "out": len(program.outvars)}
    params = call_params(like.params, program, counts) | {"name": name}
    results: list[Any] = like.primitive.bind(*arrays, **params)
    return results


def call_params(params: dict[str, Any], program: Any, counts: dict[str, int]) -> dict[str, Any]:
    """Returns parameters of an equation of `jit` or of a checkpoint that calls another program.

    All operands of the equation have one sharding and layout, and so have its results. `counts` are
    the numbers of operands ("in") and results ("out"); a missing number stays the same.
    """
    params = {**params, "jaxpr": program}
    for side, count in counts.items():
        for name in (f"{side}_shardings", f"{side}_layouts"):
            if params.get(name):
                params[name] = params[name][:1] * count
    if "donated_invars" in params:
        params["donated_invars"] = (False,) * counts["in"]
    if isinstance(params.get("prevent_cse"), tuple):
        params["prevent_cse"] = any(params["prevent_cse"])
    return params


class CheckedPrimitive(core.Primitive):
    """Defines a primitive of several results whose parameter `call_jaxpr` is a `Checked`.

    `checkify` goes through the equations of a traced function. It takes an equation with a
    parameter of this name for a call, and adds checks to the program.
    """

    multiple_results = True

    def bind(self, *inputs: Any, **params: Any) -> Any:
        if "subfuns" in params:
            return params["subfuns"][0].call_wrapped(*inputs)
        return super().bind(*inputs, **params)


class Checked:
    """Stands for a program whose attributes `checkify` reads, and which is traced at its first use.

    It is no jaxpr: whatever searches equations for programs passes it over.
    """

    def __init__(self, make: Callable[[], core.Jaxpr]) -> None:
        """Takes the function that traces the program, without constants."""
        self._make = make

    @functools.cached_property
    def _program(self) -> core.Jaxpr:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __repr__(self) -> str:
        return "..."

"""What is done with traced programs: evaluation, and removal of equations that nothing needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, linear_util, source_info_util
from jax.interpreters import partial_eval


def inner_programs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs that an equation holds."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, core.Jaxpr):
                yield inner


def trace(fn: Callable[..., list[Any]], inputs: Sequence[Any], like: core.Jaxpr) -> core.Jaxpr:
    """Traces a function of arrays that returns a list of arrays.

    As `jax.make_jaxpr`, but without what that does for every argument of a call to be cached,
    which for a model's weights takes as long as tracing a few layers.

    Args:
      fn: the function.
      inputs: arrays like its arguments.
      like: the program whose function's name the new one bears in errors.
    """
    debug_info = like.debug_info._replace(arg_names=None, result_paths=None)
    avals = [jax.typeof(x) for x in inputs]
    wrapped = linear_util.wrap_init(fn, debug_info=debug_info)
    program, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return core.ClosedJaxpr(program, consts) if consts else program


def evaluate(
    program: core.Jaxpr, arrays: Sequence[Any], consts: Sequence[Any] | None = None
) -> list[Any]:
    """The results of a traced program on arrays, with other constants if they are given."""
    consts = program.consts if consts is None else consts
    if not any(isinstance(x, partial_eval.DynamicJaxprTracer) for x in (*consts, *arrays)):
        # Arrays that are not needed any more are freed on the way.
        results: list[Any] = jax.core.eval_jaxpr(program, consts, *arrays)
        return results
    # The same under a trace, which holds all values anyway, in two thirds of the time.
    env: dict[Any, Any] = dict(zip(program.constvars, consts, strict=True))
    env.update(zip(program.invars, arrays, strict=True))
    name_stack, literal = source_info_util.current_name_stack(), core.Literal
    is_named, user_context = bool(str(name_stack)), source_info_util.user_context
    for eqn_ctx, eqns in itertools.groupby(program.eqns, lambda eqn: eqn.ctx):
        with eqn_ctx.manager:
            for eqn in eqns:
                info, primitive = eqn.source_info, eqn.primitive
                stack = name_stack + info.name_stack if is_named else info.name_stack
                operands = [v.val if isinstance(v, literal) else env[v] for v in eqn.invars]
                with user_context(info.traceback, name_stack=stack):
                    made = primitive.bind(*operands, **primitive.get_bind_params(eqn.params))
                if primitive.multiple_results:
                    env.update(zip(eqn.outvars, made, strict=True))
                else:
                    env[eqn.outvars[0]] = made
    return [v.val if isinstance(v, literal) else env[v] for v in program.outvars]


def call(program: core.Jaxpr, arrays: Sequence[Any], name: str) -> list[Any]:
    """The results of a traced program on arrays; under a trace, as one call of it under `jit`.

    To bind the equations of 50 layers once more takes as long as to trace the layers.
    """
    if not any(isinstance(x, partial_eval.DynamicJaxprTracer) for x in arrays):
        return evaluate(program, arrays)
    (like,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns
    counts = {"in": len(program.invars), "out": len(program.outvars)}
    params = call_params(like.params, program, counts) | {"name": name}
    results: list[Any] = like.primitive.bind(*arrays, **params)
    return results


def call_params(params: dict[str, Any], program: Any, counts: dict[str, int]) -> dict[str, Any]:
    """Parameters of a jit call of another program, from those of one.

    Args:
      params: of a call that places all of its operands, and all of its results, alike.
      program: what is called instead.
      counts: its numbers of operands ("in") and results ("out"); one that is left out stays.
    """
    params = {**params, "jaxpr": program}
    for side, count in counts.items():
        for name in (f"{side}_shardings", f"{side}_layouts"):
            if params.get(name):
                params[name] = params[name][:1] * count
    if "donated_invars" in params:
        params["donated_invars"] = (False,) * counts["in"]
    return params


def without_dead_code(program: core.Jaxpr) -> core.Jaxpr:
    """The program, and those that it calls, without equations that nothing needs.

    A program without such equations is returned as it is, and so are those that it calls: called
    several times, they stay one object.
    """
    if not _has_dead_code(program, {}):
        return program
    cleared, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    return cleared


def _has_dead_code(program: core.Jaxpr, known: dict[int, bool]) -> bool:
    """Whether a program, all of whose results are needed, has results in it that nothing needs."""
    if id(program) not in known:
        needed: set[Any] = {v for v in program.outvars if isinstance(v, core.Var)}
        answer = False
        for eqn in reversed(program.eqns):
            # Of a scan or a jit, single results may be dead.
            if not (needed.issuperset(eqn.outvars) or eqn.effects and not eqn.outvars):
                answer = True
                break
            if any(_has_dead_code(inner, known) for inner in inner_programs(eqn)):
                answer = True
                break
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
        known[id(program)] = answer
    return known[id(program)]

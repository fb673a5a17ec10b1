"""Rules of primitives that call jaxprs: jit, checkpoint, scan, while, cond.

Models call one jitted function in every layer, and JAX traces it once. A function that is called
several times on values of the same form is rewritten once, too (`sharing`).
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.attention import blocks
from ikbo_jax.rewrite.calls import loops, sharing
from ikbo_jax.rewrite.interpret import Context, at_shapes
from ikbo_jax.rewrite.report.recorder import Log
from ikbo_jax.rewrite.rules.concatenation import MOST_LOOPS, concatenated
from ikbo_jax.rewrite.rules.elementwise import sliced_along
from ikbo_jax.rewrite.values import constraints, hoisting, jaxprs
from ikbo_jax.rewrite.values.equations import on_integers
from ikbo_jax.rewrite.values.forms import form, inside_of, skeleton, unpack_all
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, is_plain, lazy
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import is_split, reshaped


def _inside(
    ctx: Context, program: Any, values: Sequence[Any], eqn: Any = None, log: Log | None = None
) -> tuple[Context, list[Any]]:
    """Interprets a program in a scope of its own, whose lineages its results do not have."""
    inner = ctx.inner(log)
    found = inner.run_closed(program, values, eqn)
    lineages, reason = ctx.scope.lineages(), "result of an inner function"
    return inner, [
        x if _can_leave(x, lineages) else inner.materialise(None, x, reason) for x in found
    ]


def _can_leave(value: Any, lineages: set[int]) -> bool:
    """Whether the value is an array, or is looked up by these lineages only."""
    if inside := inside_of(value):
        return all(_can_leave(part, lineages) for part in inside)
    if not isinstance(value, Lazy):
        return is_plain(value)
    return value.lineage is None or id(value.lineage) in lineages


#: A jitted function with at most this many equations is interpreted inline even on arrays:
#: `jnp.where` and similar functions are jitted, and facts about indices and masks depend on their
#: equations.
_SMALL = 4


def jit(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Rewrites a jitted function, at this call or once for all calls."""
    params = eqn.params
    jaxpr, shardings = params["jaxpr"], (params["in_shardings"], params["out_shardings"])

    def kind() -> tuple[bool, bool]:
        small = len(jaxpr.eqns) <= _SMALL or on_integers(eqn)
        names = {type(x).__name__ for xs in shardings for x in xs}
        return small, bool(names - {"UnspecifiedValue"})

    # Neither depends on the operands.
    key = (id(jaxpr), *map(id, shardings))
    is_small, is_sharded = ctx.programs.once(key, kind, (jaxpr, shardings))
    stays = is_sharded or not is_small
    if stays and all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)
    if is_sharded:
        return _sharded(ctx, eqn, operands)
    inline = functools.partial(ctx.run_closed, jaxpr, operands, eqn)
    if is_small:
        return inline()
    return sharing.call(ctx, eqn, operands, inline)


def _sharded(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Interprets a call that specifies shardings, which are constraints."""
    jaxpr, params = eqn.params["jaxpr"], eqn.params
    specified = (*params["in_shardings"], *params["out_shardings"])
    others = {type(x).__name__ for x in specified} - {"UnspecifiedValue", "NamedSharding"}
    if others or any(x is not None for x in (*params["in_layouts"], *params["out_layouts"])):
        raise NotCovered("a jit that specifies layouts, or shardings without a mesh")

    def placed(x: Any, sharding: Any) -> Any:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return x
        place = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
        return place(x) if is_plain(x) else constraints.constrained(ctx, x, sharding, place)

    values = list(map(placed, operands, params["in_shardings"]))
    return list(map(placed, ctx.run_closed(jaxpr, values, eqn), params["out_shardings"]))


def checkpoint(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Rewrites a checkpointed function, at this call or once for all calls."""
    jaxpr = eqn.params["jaxpr"]
    if all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)
    # Before the body, which could not return such lookups of its own, as of tokens.
    values = [blocks.of_one_user(ctx, x, 0) for x in operands]
    inline = functools.partial(_checkpointed, ctx, eqn, values)
    if isinstance(eqn.params["prevent_cse"], tuple) and len(set(eqn.params["prevent_cse"])) > 1:
        return inline()
    return sharing.call(ctx, eqn, values, inline)


def _checkpointed(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Interprets a checkpointed function at this call alone."""
    jaxpr, packs = eqn.params["jaxpr"], []

    def body() -> Any:
        # Facts about operands, such as masks, depend on the objects: the body closes over them, and
        # their arrays become operands again.
        out, out_pack = unpack_all(_inside(ctx, jaxpr, operands, eqn)[1])
        packs.append(out_pack)
        return out

    program = jaxprs.trace(body, [], jaxpr)
    # `jax.checkpoint` would bind the primitive, too, but also look up the arguments' names.
    params = jaxprs.call_params(eqn.params, jaxprs.with_constants_last(program), {})
    return packs[-1](eqn.primitive.bind(*program.consts, **params))


def scan(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Rewrites a scan, whose carries keep one form in all iterations."""
    if (found := hoisting.counted(eqn)) is not None:
        return _counted(ctx, eqn, *found, operands)
    jaxpr, (n_consts, n_carry) = eqn.params["jaxpr"], hoisting.scan_counts(eqn.params)
    hoisted = hoisting.split(jaxpr, n_consts, eqn.params["length"])
    plain = hoisted is None and all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr)
    end = n_consts + n_carry
    consts, init, xs = [*operands[:n_consts]], [*operands[n_consts:end]], [*operands[end:]]
    wholes = [x for x in xs if isinstance(x, Concat) and x.axis == 0]
    if wholes and len(wholes[0].parts) <= MOST_LOOPS:
        return _by_pieces(ctx, eqn, wholes[0], consts, init, xs)
    if hoisted is not None:
        first, jaxpr = hoisted
        origins = frozenset({ctx.recorder.found(eqn, "values of every iteration", False)})
        ctx.recorder.saved(eqn, origins, "computed once, before the loop", True)
        consts += ctx.run_closed(first, consts, eqn)
    of_rows = loops.rows_before(ctx, eqn, jaxpr, consts, xs, n_carry)
    if plain and of_rows is None:
        return ctx.bind(eqn, *operands)
    if of_rows is not None:
        jaxpr, rows = of_rows
        xs = [*xs, *rows]
    xs = [
        ctx.materialise(eqn, x, "scan over the looked-up axis") if not _scannable(x) else x
        for x in xs
    ]
    init = [blocks.of_one_user(ctx, x, 0) for x in init]
    carry = list(map(loops.uniform, init))

    while True:
        try:
            return _scanned(ctx, eqn, jaxpr, consts, carry, xs)
        except loops.Retry as trial:
            if loops.reformed(ctx, eqn, carry, trial.returned, init, "scan"):
                continue
            for value in consts[:n_consts]:
                if id(value) in trial.built:
                    ctx.materialise(eqn, value, "needed in every iteration of a scan")


def _counted(ctx: Context, eqn: Any, whole: Any, n: int, operands: Any) -> list[Any]:
    """Scans the numbers that a loop counts, as `lax.fori_loop` does, which take work out of it."""
    start, aval = eqn.invars[n].val, whole.invars[-1].aval
    numbers = jnp.asarray(np.arange(start, start + eqn.params["length"]), aval.dtype)
    results = ctx.run_equation(whole, [*operands[:n], *operands[n + 1 :], numbers])
    at = n - hoisting.scan_counts(eqn.params)[0]
    return [*results[:at], numbers[-1] + 1, *results[at:]]


def _by_pieces(
    ctx: Context, eqn: Any, whole: Concat, consts: list[Any], carry: list[Any], xs: list[Any]
) -> list[Any]:
    """Scans [history, candidate] piece by piece: the history's steps run at user batch."""
    count, step, stacks = len(carry), -1 if eqn.params["reverse"] else 1, []
    shapes = [v.aval.shape for v in eqn.outvars]
    for _, begin, end in [*whole.pieces()][::step]:
        operands = [*consts, *carry, *(sliced_along(ctx, x, begin, end, 0) for x in xs)]
        cut = [*shapes[:count], *((end - begin, *shape[1:]) for shape in shapes[count:])]
        of_piece = at_shapes(eqn, operands, cut, length=end - begin)
        results = ctx.run_equation(of_piece, operands)
        carry = results[:count]
        stacks.append(results[count:])
    stacked = zip(shapes[count:], *stacks[::step], strict=True)
    return [*carry, *(concatenated(ctx, eqn, ys, 0, shape) for shape, *ys in stacked)]


def _scanned(
    ctx: Context, eqn: Any, jaxpr: core.Jaxpr, consts: list[Any], carry: list[Any], xs: list[Any]
) -> list[Any]:
    """Runs a scan whose body is interpreted once; may raise `loops.Retry`."""
    length, (n_consts, count) = eqn.params["length"], hoisting.scan_counts(eqn.params)
    arrays, pack = unpack_all(carry)
    # What the last trace of the body recorded: JAX may trace it twice, with other weak types. The
    # results that are stacked are skeletons, since the trace of the body has ended then.
    last: list[tuple[Log, list[Any]]] = []

    def body(arrays: Any, slices: Any) -> Any:
        log, rest = Log(), iter(slices)
        values = [*consts, *pack(arrays), *(_packed_slice(x, rest) for x in xs)]
        inner, results = _inside(ctx, jaxpr, values, log=log)
        built = inner.scope.built()
        if loops.unstable(carry, results) or any(id(x) in built for x in consts[:n_consts]):
            raise loops.Retry(list(map(skeleton, results[:count])), built)
        new = [
            inner.build(r) if is_plain(c) else r
            for c, r in zip(carry, results[:count], strict=True)
        ]
        stacked = [
            y if is_plain(y) or isinstance(y, Lazy) else inner.build(y) for y in results[count:]
        ]
        last[:] = [(log, [None if is_plain(y) else skeleton(y) for y in stacked])]
        return unpack_all(new)[0], unpack_all(stacked)[0]

    out, ys = loops.scan(eqn, body, arrays, unpack_all(xs)[0])
    ((log, stacked),) = last
    with ctx.recorder.inside(eqn):
        call = log.replay(ctx.recorder, eqn, {}, None)

    def packed(x: Any, stack: Any) -> Any:
        if x is None:
            return stack
        return lazy(stack, (length, *x.shape), x.lineage, x.axis + 1, call.origins(x.origins))

    return [*pack(out), *map(packed, stacked, ys)]


def _scannable(x: Any) -> bool:
    if isinstance(x, Concat):
        return x.axis != 0 and all(map(_scannable, x.parts))
    if is_split(x):
        return x.groups[0].is_plain and _scannable(x.inner)
    return is_plain(x) or isinstance(x, Lazy) and (x.axis != 0 and x.base.shape[0] == x.shape[0])


def _packed_slice(x: Any, slices: Iterator[Any]) -> Any:
    if isinstance(x, Concat):
        return Concat(tuple([_packed_slice(part, slices) for part in x.parts]), x.axis - 1)
    if is_split(x):
        order = tuple([d - 1 for d in x.order[1:]])
        return reshaped(_packed_slice(x.inner, slices), x.groups[1:], order)
    array = next(slices)
    if is_plain(x):
        return array
    return lazy(array, x.shape[1:], x.lineage, x.axis - 1, x.origins)


def while_(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Rewrites a loop of lookups whose carries keep their form, and whose end is no lookup."""
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body = operands[:first], operands[first:second]
    carry = list(map(loops.uniform, operands[second:]))
    if condition.effects or body.effects:
        raise NotCovered("a while loop with effects")
    if condition.outvars[0].aval.shape:
        # It runs until every row is done. A user without candidates might never be.
        raise NotCovered("a while loop under vmap, whose rows end by themselves")

    def step(carry: list[Any]) -> tuple[Context, list[Any]]:
        return _inside(ctx, body, [*of_body, *carry], eqn)

    while True:
        arrays, pack = unpack_all(carry)

        def once(*arrays: Any, pack: Any = pack) -> tuple[list[Any], set[int]]:
            inner, results = step(pack(arrays))
            return list(map(skeleton, results)), inner.scope.built()

        returned, built = loops.trial(ctx, once, arrays)
        if not loops.reformed(ctx, eqn, carry, returned, operands[second:], "while loop"):
            break
    constants = [x for x in of_body if not is_plain(x)]
    if all(map(is_plain, carry)) and (not constants or any(id(x) in built for x in constants)):
        raise NotCovered("a while loop whose carries are no lookups")

    def proceeds(arrays: Any) -> Any:
        inner = ctx.inner()
        (result,) = inner.run_closed(condition, [*of_condition, *pack(arrays)], eqn)
        return inner.build(result)

    def run(arrays: Any) -> Any:
        inner, results = step(pack(arrays))
        new = [inner.build(y) if is_plain(x) else y for x, y in zip(carry, results, strict=True)]
        return unpack_all(new)[0]

    functions = jaxprs.ending_its_trace(proceeds), jaxprs.ending_its_trace(run)
    return pack(lax.while_loop(*functions, arrays))


def cond(ctx: Context, eqn: Any, index: Any, *operands: Any) -> Any:
    """Rewrites all branches, whose results get one form."""
    branches = eqn.params["branches"]
    if all(map(is_plain, operands)) and all(map(ctx.programs.is_plain, branches)):
        return ctx.bind(eqn, index, *operands)
    index = ctx.materialise(eqn, index, "decides which branch runs")

    def forms_of(branch: Any) -> list[Any]:
        return list(map(form, _inside(ctx, branch, operands, eqn)[1]))

    forms = [loops.trial(ctx, functools.partial(forms_of, branch)) for branch in branches]
    agree = [all(form == column[0] for form in column) for column in zip(*forms, strict=True)]
    packs: list[Any] = []

    def run(branch: Any) -> Any:
        inner, values = _inside(ctx, branch, operands, eqn)
        reason = "the branches of a cond return it in different forms"
        values = [
            v if same else inner.materialise(eqn, v, reason)
            for v, same in zip(values, agree, strict=True)
        ]
        arrays, pack = unpack_all(values)
        packs.append(pack)
        return arrays

    runs = [functools.partial(run, branch) for branch in branches]
    if eqn.params.get("branches_platforms") is None:
        out = lax.switch(index, list(map(jaxprs.ending_its_trace, runs)))
    else:
        out = _of_platforms(eqn, index, [jaxprs.trace(run, []) for run in runs])
    return packs[-1](out)


def _of_platforms(eqn: Any, index: Any, programs: Sequence[core.Jaxpr]) -> list[Any]:
    """Runs a `lax.platform_dependent` whose branches are these programs.

    A platform may be able to lower its own branch alone, and `lax.switch` would lower all of them.
    """
    if any(x.out_avals != programs[0].out_avals for x in programs):
        raise NotCovered("platform_dependent whose branches return other types")
    consts = [x for program in programs for x in program.consts]
    starts = itertools.accumulate([len(x.consts) for x in programs], initial=0)
    branches = []
    for program, start in zip(programs, starts, strict=False):
        invars = [core.Var(jax.typeof(x)) for x in consts]
        invars[start : start + len(program.consts)] = program.constvars
        branches.append(program.replace(constvars=[], invars=invars))
    params = {**eqn.params, "branches": tuple(branches)}
    results: list[Any] = eqn.primitive.bind(index, *consts, **params)
    return results

"""Removes dead equations from traced programs, also from the programs that these call."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from jax.extend import core
from jax.interpreters import partial_eval

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.values.hoisting import scan_counts
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: Whether JAX's rules also take which references are read after the equation, as from 0.12 on.
_TAKES_LIVE = "live_inputs" in inspect.signature(partial_eval.dce_jaxpr).parameters


def without_dead_code(program: core.Jaxpr) -> core.Jaxpr:
    """Removes dead equations from the program, also from the programs that it calls.

    If there are none, the same object is returned. So a program that is called several times stays
    one object.

    Only calls with results or operands that nothing reads are given to JAX, whose rules process
    every called program: for a transformer in a scan, this takes a fifth of the time of tracing it.
    """
    return _live(program, {}).program


class _Live(NamedTuple):
    """Holds a program without dead code.

    Attributes:
      program: the program, with all of its arguments.
      reads_all: whether it reads all of its arguments.
    """

    program: core.Jaxpr
    reads_all: bool


def _live(program: core.Jaxpr, known: dict[int, _Live]) -> _Live:
    """Removes dead code; `known` holds what was found, by the identity of the program."""
    if id(program) in known:
        return known[id(program)]
    kept: list[core.JaxprEqn] = []
    literal, changed = core.Literal, False
    needed: set[Any] = {v for v in program.outvars if type(v) is not literal}
    for eqn in reversed(program.eqns):
        # Most equations are needed, and hold no programs.
        if needed.isdisjoint(eqn.outvars) and not eqn.effects:
            changed = True
            continue
        found: core.JaxprEqn | None = eqn
        if eqn.primitive.name not in explain.WITHOUT_PROGRAMS:
            found = _with_live_programs(eqn, needed, known)
            changed = changed or found is not eqn
        if found is not None:
            kept.append(found)
            # Literals are not variables and cannot be hashed.
            needed |= {v for v in found.invars if type(v) is not literal}
    live = program.replace(eqns=kept[::-1]) if changed else program
    known[id(program)] = _Live(live, needed.issuperset(program.invars))
    return known[id(program)]


def _with_live_programs(
    eqn: core.JaxprEqn, needed: set[Any], known: dict[int, _Live]
) -> core.JaxprEqn | None:
    """Removes dead code from an equation's programs; the same object if there is none."""
    programs = inner_programs(eqn)
    if not programs:
        return eqn
    first = programs[0].eqns[:1] if eqn.params.get("name") in OPS else ()
    if first and first[0].primitive.name == "custom_vjp_call":
        # An op's dead code is no lookup of the model, and XLA removes it. A model's function may
        # have an op's name, but seldom begins like the op, with a gradient of its own. `op_plan`
        # would tell them apart for sure, at 3 % of the work of tracing two layers.
        return eqn
    used = [v in needed for v in eqn.outvars]
    if all(used) or eqn.primitive.name == "scan" and _are_carried(eqn, used):
        found = [_live(x, known) for x in programs]
        if all(x.program is y and x.reads_all for x, y in zip(found, programs, strict=True)):
            return eqn
        if "jaxpr" in eqn.params and found[0].reads_all:
            return eqn.replace(params={**eqn.params, "jaxpr": found[0].program})
    rule: Any = partial_eval.dce_rules.get(eqn.primitive)
    live = ([True] * len(eqn.invars),) if _TAKES_LIVE else ()
    return eqn if rule is None else rule(used, *live, eqn)[1]


def _are_carried(scan: core.JaxprEqn, used: list[bool]) -> bool:
    """Whether the next iteration of a scan reads all results that are not used."""
    body: core.Jaxpr = scan.params["jaxpr"]
    consts, carries = scan_counts(scan.params)
    literal = core.Literal
    while not all(used):
        results = zip(body.outvars, used, strict=True)
        needed = {v for v, u in results if u and type(v) is not literal}
        for eqn in reversed(body.eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                needed |= {v for v in eqn.invars if type(v) is not literal}
        read = [v in needed for v in body.invars[consts : consts + carries]]
        more = [a or b for a, b in zip(used, read, strict=False)] + used[carries:]
        if more == used:
            return False
        used = more
    return True

"""Products of a loop's body that are the same in every iteration run once, before the loop.

`jax.lax.map` over candidates computes the tower of a user that it closes over for every candidate.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core

from ikbo_jax.rewrite.jaxprs import inner_programs

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def holds_products(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a product, or calls a program that holds one."""
    if eqn.primitive.name in _PRODUCTS:
        return True
    return any(any(map(holds_products, program.eqns)) for program in inner_programs(eqn))


def split(body: core.Jaxpr, consts: int, length: Any) -> tuple[core.Jaxpr, core.Jaxpr] | None:
    """Splits the body of a loop into a program that runs once, and the rest.

    Args:
      body: the program of one iteration.
      consts: how many of its arguments are the same in every iteration; they come first.
      length: the number of iterations.

    Returns:
      A program from these arguments to values, and a program that takes these values after the
      same arguments. None if no product is the same in every iteration.
    """
    if not isinstance(length, int) or length < 2 or not consts:
        return None
    same: set[Any] = {*body.constvars, *body.invars[:consts]}
    invariant: list[core.JaxprEqn] = []
    for eqn in body.eqns:
        variables = [v for v in eqn.invars if isinstance(v, core.Var)]
        if variables and same.issuperset(variables) and not eqn.effects:
            invariant.append(eqn)
            same.update(eqn.outvars)
    hoisted = _worthwhile(invariant)
    if not hoisted:
        return None
    rest = [eqn for eqn in body.eqns if id(eqn) not in hoisted]
    made = {v: None for eqn in invariant if id(eqn) in hoisted for v in eqn.outvars}
    read = {v for eqn in rest for v in eqn.invars if isinstance(v, core.Var)}
    read.update(v for v in body.outvars if isinstance(v, core.Var))
    values = [v for v in made if v in read]
    info = body.debug_info._replace(arg_names=None, result_paths=None)
    first = body.replace(
        eqns=[eqn for eqn in invariant if id(eqn) in hoisted],
        invars=body.invars[:consts],
        outvars=values,
        debug_info=info,
    )
    invars = [*body.invars[:consts], *values, *body.invars[consts:]]
    return first, body.replace(eqns=rest, invars=invars, debug_info=info)


def _worthwhile(invariant: list[core.JaxprEqn]) -> set[int]:
    """Identities of the equations that run before the loop.

    These are products, what they are computed from, and what is computed from them without growing.
    """
    hoisted: set[int] = set()
    needed: set[Any] = set()
    for eqn in reversed(invariant):
        if holds_products(eqn) or not needed.isdisjoint(eqn.outvars):
            hoisted.add(id(eqn))
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    made = {v for eqn in invariant if id(eqn) in hoisted for v in eqn.outvars}
    for eqn in invariant:
        variables = [v for v in eqn.invars if isinstance(v, core.Var)]
        if id(eqn) in hoisted or made.isdisjoint(variables):
            continue
        largest = max(getattr(v.aval, "size", 0) for v in variables)
        if all(getattr(v.aval, "size", 0) <= largest for v in eqn.outvars):
            hoisted.add(id(eqn))
            made.update(eqn.outvars)
    return hoisted

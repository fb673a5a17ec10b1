"""Products of a loop's body that are the same in every iteration run once, before the loop.

`jax.lax.map` over candidates computes the tower of a user that it closes over for every candidate.
If every iteration looks up its user by an index, the towers of all users run before the loop.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.values.jaxprs import inner_programs, trace
from ikbo_jax.rewrite.values.lineage import is_at_least

PRODUCTS = frozenset(["dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"])


def holds_products(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a product, or calls a program that holds one."""
    if eqn.primitive.name in PRODUCTS:
        return True
    return any(any(map(holds_products, program.eqns)) for program in inner_programs(eqn))


def scan_counts(params: Any) -> tuple[int, int]:
    """Counts the operands of a scan that are constants, and its operands that are carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


@functools.cache
def scan_params(consts: int, carries: int, xs: int, ys: int) -> dict[str, Any]:
    """Returns the parameters of a scan that depend on its numbers of operands and results."""

    def fn(consts: list[Any], carries: list[Any], xs: list[Any]) -> Any:
        def body(carries: list[Any], xs: list[Any]) -> Any:
            new = lax.add(one, one)
            for x in (*consts, *carries, *xs):
                new = lax.add(new, x)
            return [lax.add(new, x) for x in carries], [lax.neg(new) for _ in range(ys)]

        return lax.scan(body, carries, xs, length=1)

    # One dtype, also where 64-bit types are enabled.
    one = np.float32(1)
    program = jax.make_jaxpr(fn)([one] * consts, [one] * carries, [np.ones(1, np.float32)] * xs)
    (params,) = [eqn.params for eqn in program.eqns if eqn.primitive.name == "scan"]
    return {k: v for k, v in params.items() if k not in ("jaxpr", "length", "reverse", "unroll")}


def counted(eqn: core.JaxprEqn) -> tuple[core.JaxprEqn, int] | None:
    """Returns a scan that scans the numbers which it counts, and the number of the counter.

    None if no carry counts iterations, or if work that the counter chooses holds no product.
    """
    body, (consts, carries) = eqn.params["jaxpr"], scan_counts(eqn.params)
    sums = {id(x.outvars[0]): x.invars for x in body.eqns if x.primitive is lax.add_p}
    for n, out in enumerate(body.outvars[:carries], consts):
        v, (x, step) = body.invars[n], sums.get(id(out), (None, None))
        is_fixed = type(step) is type(eqn.invars[n]) is core.Literal
        if x is v and is_fixed and step.val == 1 and is_index(v.aval):
            break
    else:
        return None
    length, at = eqn.params["length"], n - consts
    is_other = eqn.params["reverse"] or not isinstance(length, int) or length < 2
    if is_other or split_by_rows(body, consts, (v,)) is None:
        return None
    invars = [*body.invars[:n], *body.invars[n + 1 :], v]
    outvars = [*body.outvars[:at], *body.outvars[at + 1 :]]
    counts = consts, carries - 1, len(invars) - consts - carries + 1, len(body.outvars) - carries
    params = {**eqn.params, **scan_params(*counts)}
    params["jaxpr"] = body.replace(invars=invars, outvars=outvars)
    invars = [*eqn.invars[:n], *eqn.invars[n + 1 :], core.Var(v.aval.update(shape=(length,)))]
    outvars = [*eqn.outvars[:at], *eqn.outvars[at + 1 :]]
    return eqn.replace(invars=invars, outvars=outvars, params=params), n


def may_run_before(eqn: core.JaxprEqn) -> bool:
    """Whether some products of a scan on arrays may run before the loop."""
    body, (consts, carries) = eqn.params["jaxpr"], scan_counts(eqn.params)
    if counted(eqn) is not None or split(body, consts, eqn.params["length"]) is not None:
        return True
    scanned = tuple(body.invars[consts + carries :])
    indices = tuple([v for v in scanned if is_index(v.aval)])
    chosen = scanned if [v for v in indices if v.aval.ndim] else indices
    return bool(indices) and split_by_rows(body, consts, chosen) is not None


def is_index(x: Any) -> bool:
    """Whether an array holds integers."""
    return getattr(getattr(x, "dtype", None), "kind", None) in ("i", "u")


def split(body: core.Jaxpr, consts: int, length: Any) -> tuple[core.Jaxpr, core.Jaxpr] | None:
    """Does what `split_by_rows` does for work that is the same in all iterations of a loop.

    The rest takes the values of the first program after its first `consts` arguments.
    """
    if not isinstance(length, int) or length < 2 or not consts:
        return None
    return split_by_rows(body, consts, None)


@functools.lru_cache(maxsize=16)
def split_by_rows(
    body: core.Jaxpr, consts: int, rows: tuple[Any, ...] | None
) -> tuple[core.Jaxpr, core.Jaxpr] | None:
    """Splits the body of a loop into work on what some scanned values choose, and the rest.

    The first program takes the first `consts` arguments, which are the same in every iteration, and
    `rows`, each an index or a looked-up row. The rest takes its values after its other arguments.
    None if no product is taken out. With rows, equations on constants alone may be taken out; the
    rest, too, runs those whose results it reads.
    """
    place = consts if rows is None else len(body.invars)
    inputs = [*body.invars[:consts], *(rows or ())]
    known: set[Any] = {*body.constvars, *inputs}
    candidates: list[core.JaxprEqn] = []
    concats: dict[Any, core.JaxprEqn] = {}
    eqns: list[core.JaxprEqn] = []
    for whole in body.eqns:
        parts = _by_part(whole, concats, known) if concats else (whole,)
        eqns += parts
        for eqn in parts:
            variables = [v for v in eqn.invars if type(v) is not core.Literal]
            if (variables or rows is not None) and known.issuperset(variables) and not eqn.effects:
                candidates.append(eqn)
                known.update(eqn.outvars)
            elif eqn.primitive is lax.concatenate_p and not known.isdisjoint(variables):
                concats[eqn.outvars[0]] = eqn
    hoisted = _worthwhile(candidates)
    if not hoisted:
        return None
    before = [eqn for eqn in candidates if id(eqn) in hoisted]
    of_rows = {v for eqn in before for v in eqn.outvars} if rows is None else set(rows)
    for eqn in before if rows is not None else ():
        if not of_rows.isdisjoint([v for v in eqn.invars if type(v) is not core.Literal]):
            of_rows.update(eqn.outvars)
    rest = [eqn for eqn in eqns if id(eqn) not in hoisted or of_rows.isdisjoint(eqn.outvars)]
    read = {v for eqn in rest for v in eqn.invars if type(v) is not core.Literal}
    read |= {v for v in body.outvars if type(v) is not core.Literal}
    values = [v for eqn in before for v in eqn.outvars if v in read and v in of_rows]
    info = body.debug_info._replace(arg_names=None, result_paths=None)
    first = body.replace(eqns=before, invars=list(inputs), outvars=values, debug_info=info)
    invars = [*body.invars[:place], *values, *body.invars[place:]]
    return first, body.replace(eqns=rest, invars=invars, debug_info=info)


def _by_part(
    eqn: core.JaxprEqn, concats: dict[Any, core.JaxprEqn], known: set[Any]
) -> Sequence[core.JaxprEqn]:
    """Splits a product of weights and a concatenation, of which a part is known, into products.

    Then the part's product runs before the loop, as the user's for one candidate in each iteration.
    All other equations are returned as they are.
    """
    if eqn.primitive is not lax.dot_general_p:
        return (eqn,)
    side = next((n for n, v in enumerate(eqn.invars) if v in concats), None)
    if side is None or eqn.invars[1 - side] not in known:
        return (eqn,)
    concat, weights = concats[eqn.invars[side]], eqn.invars[1 - side]
    contract, along = eqn.params["dimension_numbers"][0], concat.params["dimension"]
    aval: Any = eqn.outvars[0].aval
    dtype = aval.dtype
    if along not in contract[side] or dtype not in (np.float32, jnp.bfloat16, np.float16):
        return (eqn,)
    axis = contract[1 - side][list(contract[side]).index(along)]
    # The sum is rounded once.
    params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}

    def product(weights: Any, *parts: Any) -> list[Any]:
        products, start = [], 0
        for part in parts:
            stop = start + part.shape[along]
            rows = lax.slice_in_dim(weights, start, stop, axis=axis)
            operands = (part, rows) if side == 0 else (rows, part)
            products.append(lax.dot_general(*operands, **params))
            start = stop
        return [lax.convert_element_type(functools.reduce(lax.add, products), dtype)]

    inputs = [weights, *concat.invars]
    program = trace(product, [v.aval for v in inputs])
    names: dict[Any, Any] = dict(zip(program.invars, inputs, strict=True))
    names[program.outvars[0]] = eqn.outvars[0]
    return [
        x.replace(
            invars=[v if type(v) is core.Literal else names.get(v, v) for v in x.invars],
            outvars=[names.get(v, v) for v in x.outvars],
            source_info=eqn.source_info,
        )
        for x in program.eqns
    ]


def _worthwhile(invariant: list[core.JaxprEqn]) -> set[int]:
    """Returns identities of the equations that run before the loop.

    These are products, what they are computed from, and what is computed from them without growing.
    """
    hoisted: set[int] = set()
    needed: set[Any] = set()
    for eqn in reversed(invariant):
        if holds_products(eqn) or not needed.isdisjoint(eqn.outvars):
            hoisted.add(id(eqn))
            needed |= {v for v in eqn.invars if type(v) is not core.Literal}
    made = {v for eqn in invariant if id(eqn) in hoisted for v in eqn.outvars}
    left = {v for eqn in invariant for v in eqn.outvars} - made
    for eqn in invariant:
        variables = [v for v in eqn.invars if type(v) is not core.Literal]
        if id(eqn) in hoisted or made.isdisjoint(variables) or not left.isdisjoint(variables):
            continue
        sizes, results = (
            [getattr(v.aval, "size", 0) for v in group] for group in (variables, eqn.outvars)
        )
        if all(any(is_at_least(size, result) for size in sizes) for result in results):
            hoisted.add(id(eqn))
            made.update(eqn.outvars)
            left.difference_update(eqn.outvars)
    return hoisted

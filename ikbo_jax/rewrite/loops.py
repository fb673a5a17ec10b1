"""What the rules of loops share: carries that take another form, and work before the loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite import hoisting
from ikbo_jax.rewrite.forms import form, widened
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.jaxprs import evaluate, trace
from ikbo_jax.rewrite.lineage import Lazy, has_lineage, is_plain
from ikbo_jax.rewrite.rules import narrowed


def uniform(x: Any) -> Any:
    """A constant array of equal numbers as a broadcast number; any other value unchanged."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return x
    narrow = narrowed(x)
    return x if narrow is x else Lazy(jnp.asarray(narrow), tuple(np.shape(x)))


class Retry(Exception):
    """Raised while the body of a scan is traced if the scan must take other values.

    Attributes:
      returned: skeletons of the carries that the body returns.
      built: the identities of all values that were materialised.
    """

    def __init__(self, returned: list[Any], built: set[int]) -> None:
        super().__init__()
        self.returned = returned
        self.built = built


def unstable(carry: list[Any], returned: list[Any]) -> list[int]:
    """Positions of the carries that a loop's body returns in another form.

    `returned` may hold further results of the body.
    """
    return [
        n
        for n, (before, after) in enumerate(zip(carry, returned, strict=False))
        if form(before) not in ("plain", form(after))
    ]


def reformed(
    ctx: Context, eqn: Any, carry: list[Any], returned: list[Any], init: Any, loop: str
) -> bool:
    """Gives carries that a loop's body returns in another form another form; whether there are any.

    A carry that is equal for all candidates takes the form that the body returns. All others become
    arrays, at least one in each trial, so that trials end.
    """
    changed = unstable(carry, returned)
    for n in changed:
        wide = widened(carry[n], returned[n])
        if wide is not None and form(wide) != form(carry[n]):
            carry[n] = wide
            continue
        reason = f"carried through a {loop} whose body returns it in another form"
        # A widened carry is no longer the caller's value, whose array may exist already.
        carry[n] = ctx.materialise(eqn, init[n], reason)
    return bool(changed)


def rows_before(
    ctx: Context, eqn: Any, body: core.Jaxpr, consts: list[Any], xs: list[Any], n_carry: int
) -> tuple[core.Jaxpr, list[Any]] | None:
    """A scan's body without its work on one user's rows, and the results of this work to scan.

    The work runs at user batch, for all iterations at once, if it is found to be on looked-up rows.
    """
    start = len(consts) + n_carry
    chosen = [n for n, x in enumerate(xs) if _is_of_rows(x) or is_plain(x) and hoisting.is_index(x)]
    variables = [body.invars[start + n] for n in chosen]
    split = hoisting.split_by_rows(body, len(consts), variables) if chosen else None
    if split is None or not isinstance(eqn.params["length"], int):
        return None
    first, rest = split

    def every(*values: Any) -> list[Any]:
        def one(*rows: Any) -> list[Any]:
            return evaluate(first, [*values[: len(consts)], *rows], first.consts)

        results: list[Any] = jax.vmap(one)(*values[len(consts) :])
        return results

    operands = [*consts, *(xs[n] for n in chosen)]
    avals = [_like(v, ()) for v in body.invars[: len(consts)]]
    avals += [_like(v, (eqn.params["length"],)) for v in variables]
    program = trace(every, avals)

    forms: list[bool] = []

    def trial() -> None:
        forms.extend(map(_is_of_rows, ctx.inner().run_closed(program, operands, eqn)))

    with ctx.muted():
        jax.eval_shape(trial)
    if not all(forms):
        return None
    reason = "scanned, after its work at the smaller batch"
    return rest, [ctx.materialise(eqn, x, reason) for x in ctx.run_closed(program, operands, eqn)]


def _like(v: Any, leading: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    aval = v.aval
    shape = (*leading, *aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _is_of_rows(x: Any) -> bool:
    return has_lineage(x) and x.axis == 0

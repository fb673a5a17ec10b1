"""What the rules of loops share: carries that take another form, and work before the loop."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.report.recorder import Recorder
from ikbo_jax.rewrite.rules.elementwise import narrowed
from ikbo_jax.rewrite.values import hoisting
from ikbo_jax.rewrite.values.forms import form, widened
from ikbo_jax.rewrite.values.jaxprs import ending_its_trace, evaluate, trace
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, is_plain
from ikbo_jax.rewrite.values.reshaped import is_split
from ikbo_jax.rewrite.values.staged import is_local


class _Copies(Recorder):
    """Records only whether looked-up rows are copied."""

    copied = False

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool) -> None:
        self.copied |= copied


def trial(ctx: Context, fn: Callable[..., Any], arrays: Sequence[Any] = ()) -> Any:
    """Returns what `fn` returns, no arrays, while it is traced; nothing is recorded."""
    found = []

    def traced(*arrays: Any) -> list[Any]:
        found.append(fn(*arrays))
        return []

    with ctx.muted():
        trace(traced, arrays)
    return found[0]


def uniform(x: Any) -> Any:
    """Turns a constant array of equal numbers into a broadcast number; keeps any other value."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return x
    narrow = narrowed(x)
    return x if narrow is x else Lazy(jnp.asarray(narrow), tuple(np.shape(x)))


def scan(
    eqn: Any, body: Callable[[Any, Any], Any], init: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs `lax.scan` on lists of arrays, with the length, direction and unrolling of an equation.

    `lax.scan` takes 1,700 calls of functions besides tracing the body, mostly to name arguments and
    to describe errors. This takes 300 if the body returns the types that it is given.
    """
    length, count, program = eqn.params["length"], len(init), None
    avals = list(map(jax.typeof, (*init, *xs)))
    if isinstance(length, int) and not jax.config.jax_disable_jit and all(map(is_local, avals)):
        slices = [core.mapped_aval(length, 0, aval) for aval in avals[count:]]

        def flat(*arrays: Any) -> list[Any]:
            carry, ys = body(list(arrays[:count]), list(arrays[count:]))
            return [*carry, *ys]

        program = trace(flat, [*avals[:count], *slices])
    if program is None or not _keeps_types(program, count):
        fixed = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        out, ys = lax.scan(ending_its_trace(body), init, xs, **fixed)
        return out, ys
    consts = program.consts
    closed = program.replace(constvars=[], invars=[*program.constvars, *program.invars])
    like = hoisting.scan_params(len(consts), count, len(xs), len(program.outvars) - count)
    results = eqn.primitive.bind(*consts, *init, *xs, **{**eqn.params, **like, "jaxpr": closed})
    return results[:count], results[count:]


def _keeps_types(program: core.Jaxpr, count: int) -> bool:
    """Whether a body returns its carries as other arrays of the same types, without effects.

    `lax.scan` changes weak types, and does not copy what a body returns as it was given.
    """
    given = set(program.invars)
    carries = zip(program.invars[:count], program.outvars[:count], strict=True)
    return (
        not program.effects
        and all(v.aval == w.aval for v, w in carries)
        and not any(isinstance(v, core.Literal) or v in given for v in program.outvars)
    )


@dataclasses.dataclass(eq=False)
class Retry(Exception):
    """Is raised while the body of a scan is traced if the scan must take other values.

    Attributes:
      returned: skeletons of the carries that the body returns.
      built: the identities of all values that were materialised.
    """

    returned: list[Any]
    built: set[int]


def unstable(carry: list[Any], returned: list[Any]) -> list[int]:
    """Finds the positions of the carries that a loop's body returns in another form.

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
    ctx: Context,
    eqn: Any,
    body: core.Jaxpr,
    consts: list[Any],
    xs: list[Any],
    n_carry: int,
    chosen: Sequence[int] | None = None,
) -> tuple[core.Jaxpr, list[Any]] | None:
    """Takes work on looked-up rows out of a scan's body; also returns its results to scan.

    Work on the `chosen` scanned values runs for all iterations at once: by default on indices and
    looked-up rows, at user batch. Where an iteration looks several users up, also on all scanned
    values, as attention does, if no looked-up row is copied.
    """
    if chosen is None:
        is_index = [is_plain(x) and hoisting.is_index(x) for x in xs]
        if any(np.ndim(x) > 1 for x, of in zip(xs, is_index, strict=True) if of):
            found = rows_before(ctx, eqn, body, consts, xs, n_carry, range(len(xs)))
            if found is not None:
                return found
        chosen = [n for n, x in enumerate(xs) if is_index[n] or _is_of_rows(x)]
    start = len(consts) + n_carry
    variables = [body.invars[start + n] for n in chosen]
    split = hoisting.split_by_rows(body, len(consts), tuple(variables)) if chosen else None
    if split is None or not isinstance(eqn.params["length"], int):
        return None
    first, rest = split

    def every(*values: Any) -> list[Any]:
        shared, of_rows = values[: len(consts)], values[len(consts) :]
        results: list[Any] = jax.vmap(lambda *rows: evaluate(first, [*shared, *rows]))(*of_rows)
        return results

    operands = [*consts, *(xs[n] for n in chosen)]
    avals = [v.aval for v in body.invars[: len(consts)]]
    avals += [core.unmapped_aval(eqn.params["length"], 0, v.aval) for v in variables]
    program = trace(every, avals)

    def gains() -> bool:
        inner = ctx.inner(copies := _Copies(muted=True))
        results = inner.run_closed(program, operands, eqn)
        copies_none = inner.scope.has_lineages() and not copies.copied
        return all(map(_is_of_rows, results)) or len(chosen) == len(xs) and copies_none

    if not trial(ctx, gains):
        return None
    reason = "scanned, after its work at the smaller batch"
    return rest, [ctx.materialise(eqn, x, reason) for x in ctx.run_closed(program, operands, eqn)]


def _is_of_rows(x: Any) -> bool:
    if is_split(x) and len(x.groups[0].sizes) > 1:
        # The rows of an index of several dimensions.
        x = x.inner
    return has_lineage(x) and x.axis == 0

"""`explain`: which path every op of a function takes here, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ikbo_jax.ops import dispatch


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The ops that a function calls, in program order; `str` makes plain text of it.

    Attributes:
      plans: one for each call that the traced function holds. A call in a loop's body stands once;
        the branches of a conditional all stand.
      notes: what functions had to say of themselves by `note`: the reports of `rewrite`.
    """

    plans: tuple[dispatch.Plan, ...]
    notes: tuple[Any, ...] = ()

    def __str__(self) -> str:
        numbers: dict[dispatch.Plan, list[str]] = {}
        for number, plan in enumerate(self.plans, start=1):
            numbers.setdefault(plan, []).append(str(number))
        # Calls that are the same, as those of a model's layers, as one.
        plans = [f"{', '.join(found)}. {plan}" for plan, found in numbers.items()]
        nothing = "no ikbo_jax op is called directly" if self.notes else "no ikbo_jax op found"
        return "\n".join([*map(str, self.notes), *(plans or [nothing])])


# The identity on an array, with a note as a parameter; like `dispatch.plan_p`, but outside of any
# custom derivative, and so with one of its own.
note_p = core.Primitive("ikbo_note")
note_p.def_impl(lambda x, *, note: x)
note_p.def_abstract_eval(lambda x, *, note: x)
mlir.register_lowering(note_p, lambda ctx, x, *, note: [x])
ad.primitive_jvps[note_p] = lambda primals, tangents, *, note: (
    note_p.bind(*primals, note=note),
    *tangents,
)
batching.primitive_batchers[note_p] = lambda args, dims, *, note: (
    note_p.bind(*args, note=note),
    dims[0],
)


def note(result: jax.Array, note: Any) -> jax.Array:
    """Returns `result`, marked in the traced program with a hashable note for `explain`."""
    marked: jax.Array = note_p.bind(result, note=note)
    return marked


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says which implementation every ikbo_jax op in a call of `fn` takes here, and why.

    Traces `fn` without running it, and reads the choices from the traced program; so it sees
    through jit (cached or not), grad, vmap, scan and cond. What makes an op's gradient, kernels or
    XLA, stands in the plan of the op ("gradient"), whether or not `fn` takes it; a backward pass
    has no plan of its own.

    Args:
      fn: any function that JAX can trace.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees; anything else is passed
        as is.
      **kwargs: the same by keyword.

    Returns:
      An `Explanation`: print it.

    Raises:
      Whatever `fn` raises while it is traced.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if is_array else x for x, is_array in zip(leaves, traced, strict=True)]
        call_args, call_kwargs = jax.tree.unflatten(treedef, merged)
        out = fn(*call_args, **call_kwargs)
        return [x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]

    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    found = list(marks(jax.make_jaxpr(call)(arrays).jaxpr))
    plans = tuple(mark for mark in found if isinstance(mark, dispatch.Plan))
    return Explanation(plans, tuple(mark for mark in found if not isinstance(mark, dispatch.Plan)))


def marks(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """The plans and notes of a traced program, in its order."""
    for eqn in jaxpr.eqns:
        mark = _mark(eqn)
        if mark is not None:
            yield mark
        for inner in _programs(eqn):
            yield from marks(inner)


@dataclasses.dataclass(frozen=True)
class Survey:
    """What there is in a traced program and in those that it holds.

    Attributes:
      marked: whether there are plans or notes.
      repeated: identities of the programs that stand in several equations.
    """

    marked: bool
    repeated: frozenset[int]


def survey(jaxpr: core.Jaxpr) -> Survey:
    """Looks through a traced program; through one that it calls often once."""
    found = [getattr(jaxpr, "jaxpr", jaxpr)]
    seen = {id(found[0])}
    repeated = set()
    marked = False
    # Grows while it is searched.
    for program in found:
        for eqn in program.eqns:
            marked = marked or _mark(eqn) is not None
            for inner in _programs(eqn):
                if id(inner) in seen:
                    repeated.add(id(inner))
                else:
                    seen.add(id(inner))
                    found.append(inner)
    return Survey(marked, frozenset(repeated))


def _mark(eqn: Any) -> Any:
    if eqn.primitive is dispatch.plan_p:
        return eqn.params["plan"]
    return eqn.params["note"] if eqn.primitive is note_p else None


def _programs(eqn: Any) -> Iterator[core.Jaxpr]:
    # Of the many parameters of the most frequent call only one is a program.
    params = eqn.params
    values = (params["jaxpr"],) if eqn.primitive.name in ("jit", "pjit") else params.values()
    for value in values:
        # Calls hold one program, conditionals a tuple of them.
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, core.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, core.Jaxpr):
                yield inner

"""Rows of calls: calls of one rewritten program, one after the other, traced as one equation.

A deep model calls the same jitted layer on what the one before returned. What JAX takes to trace
such a call is most of what a rewrite costs here. So the equations of the calls are written down,
as those of a program that holds them all, and only the call of that one is traced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend import core, source_info_util

from ikbo_jax.rewrite.calls import form
from ikbo_jax.rewrite.interpret import Context, identity, register_row
from ikbo_jax.rewrite.jit import Result, Rewritten, call_of, is_fixed, kind_of, program_of
from ikbo_jax.rewrite.lineage import Deferred, Lazy, base_of

#: A row of fewer calls is not worth a program of its own.
_FEW = 4


@dataclasses.dataclass(eq=False, slots=True)
class _Pending:
    """A result of a call in a row that is not traced yet.

    Attributes:
      var: what stands for its array in the row's program.
      result: what it is.
      origins: the broadcasts that it stems from.
    """

    var: core.Var
    result: Result
    origins: frozenset

    def value(self, array: Any) -> Any:
        """The value, once its array is known."""
        return self.result.of(array, self.origins)


class _Row:
    """A row in the making.

    Attributes:
      eqns: its program's equations.
      arrays: the arrays that it is called on, each with its variable, by identity.
      results: what its calls return, by the variables of the original program.
    """

    def __init__(self, ctx: Context, env: dict[Any, Any], indices: list[bool]) -> None:
        self.ctx = ctx
        self.env = env
        self.indices = indices
        self.eqns: list[core.JaxprEqn] = []
        self.arrays: dict[int, tuple[Any, core.Var]] = {}
        self.results: dict[core.Var, Any] = {}

    def start(self, eqn: core.JaxprEqn) -> bool:
        """Takes the first call, which the others must be like; False if it cannot."""
        operands = [self._read(v) for v in eqn.invars]
        forms = self._forms(operands)
        made = forms and program_of(self.ctx, (id(eqn.params["jaxpr"]), *forms))
        if not made or made.given:
            return False
        self.forms, self.made = forms, made
        self.there = [operands[n].origins for n, _ in made.stand_ins]
        self.origins = self.ctx.recorder.again((made.log, *self.there), 0)
        if self.origins is None:
            return False
        program = made.params["jaxpr"]
        self.out_avals = [v.aval for v in program.outvars]
        self.in_avals = [v.aval for v in program.invars]
        self._write(eqn, operands)
        return True

    def add(self, eqn: core.JaxprEqn) -> bool:
        """Takes a further call; False if it is not like the first."""
        results, env, literal = self.results, self.env, core.Literal
        operands = [
            v.val if isinstance(v, literal) else results[v] if v in results else env[v]
            for v in eqn.invars
        ]
        if self._forms(operands) != self.forms:
            return False
        if [operands[n].origins for n, _ in self.made.stand_ins] != self.there:
            return False
        self._write(eqn, operands)
        return True

    def trace(self, used: set[Any]) -> None:
        """Traces the row; `used` are the variables that are read after it."""
        made, eqns = self.made, self.eqns
        self.ctx.recorder.again((made.log, *self.there), len(eqns))
        kept = {v: x for v, x in self.results.items() if v in used}
        pending = {id(x): x for x in kept.values() if isinstance(x, _Pending)}
        program = made.params["jaxpr"].replace(
            constvars=[],
            invars=[var for _, var in self.arrays.values()],
            outvars=[x.var for x in pending.values()],
            eqns=eqns,
        )
        arrays = [array for array, _ in self.arrays.values()]
        # The names that the calls stand under are those of the equations inside.
        with source_info_util.user_context(eqns[0].source_info.traceback):
            bases = eqns[0].primitive.bind(*arrays, **_params(made, program))
        values = {n: x.value(base) for (n, x), base in zip(pending.items(), bases, strict=True)}
        for value in values.values():
            self.ctx.made_by(eqns[-1], value)
        self.env.update((v, values.get(id(x), x)) for v, x in kept.items())

    def _read(self, v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else self.env[v]

    def _forms(self, operands: list[Any]) -> list[Any] | None:
        """What tells the program of a call; None if that depends on more than is known here."""
        forms: list[Any] = []
        for x, index in zip(operands, self.indices, strict=True):
            if isinstance(x, _Pending):
                forms.append(x.result.form)
            elif isinstance(x, Deferred) and not isinstance(x, Lazy):
                return None
            else:
                forms.append(identity(x) if is_fixed(x, index) else form(x))
        return forms

    def _write(self, eqn: core.JaxprEqn, operands: list[Any]) -> None:
        """Writes a call's equation down."""
        made, var = self.made, core.Var
        arrays = [operands[n] for n in made.inputs] + made.consts
        invars: list[Any] = [
            x.var if isinstance(x, _Pending) else self._array(x, aval)
            for x, aval in zip(arrays, self.in_avals, strict=True)
        ]
        outvars = [var(aval) for aval in self.out_avals]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=made.params))
        values = made.returned(
            operands, lambda n: _Pending(outvars[n], made.results[n], self.origins[n])
        )
        self.results.update(zip(eqn.outvars, values, strict=True))

    def _array(self, operand: Any, aval: Any) -> core.Var:
        """The variable of an array from outside of the row."""
        array = base_of(operand)
        known = self.arrays.get(id(array))
        if known is None:
            known = self.arrays[id(array)] = (array, core.Var(aval))
        return known[1]


def _params(made: Rewritten, program: Any) -> dict[str, Any]:
    """Parameters of a row's call, made of those of one in it."""
    counts = {"in": len(program.invars), "out": len(program.outvars)}
    return call_of(made.params, program, counts) | {"name": f"{made.params['name']}_row"}


def _row(ctx: Context, jaxpr: core.Jaxpr, start: int, env: dict[Any, Any]) -> int:
    """Runs a row of calls that begins at an equation; returns how many, 0 if there is none."""
    eqns, first = jaxpr.eqns, jaxpr.eqns[start]
    if start + _FEW > len(eqns) or not _alike(first, eqns[start + _FEW - 1]):
        return 0
    row, end = _Row(ctx, env, kind_of(ctx, first).indices), start + 1
    if not row.start(first):
        return 0
    while end < len(eqns) and _alike(first, eqns[end]) and row.add(eqns[end]):
        end += 1
    used = {v for eqn in eqns[end:] for v in eqn.invars if isinstance(v, core.Var)}
    used.update(v for v in jaxpr.outvars if isinstance(v, core.Var))
    row.trace(used)
    return end - start


def _alike(first: core.JaxprEqn, other: core.JaxprEqn) -> bool:
    """Whether an equation may stand in a row that begins with another."""
    if other.primitive is not first.primitive or other.ctx is not first.ctx:
        return False
    a, b = first.params, other.params
    return a["jaxpr"] is b["jaxpr"] and all(
        a.get(name) == b.get(name) for name in ("in_shardings", "out_shardings")
    )


for _name in ("jit", "pjit"):
    register_row(_name, _row)

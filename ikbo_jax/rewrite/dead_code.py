"""Removes dead equations from traced programs, also from the programs that these call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.interpreters import partial_eval

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.hoisting import scan_counts
from ikbo_jax.rewrite.jaxprs import OPS, inner_programs

#: Calls of one program, with operands and results of their own.
_CALLS = ("checkpoint", "jit", "remat2", "scan")


def without_dead_code(program: core.Jaxpr) -> core.Jaxpr:
    """The program without dead equations, also in the programs that it calls.

    If there are none, the same object is returned. So a program that is called several times stays
    one object.

    JAX's `dce_jaxpr` processes every called program: for 50 calls of one jitted layer, this takes a
    tenth of the time of tracing them. So only equations that need it are given to `dce_jaxpr`.
    """
    return _Search().without_dead_code(program)


class _Search:
    """The removal of dead code from one program.

    Attributes:
      answers: by identity of a called program, whether it has dead code.
      cleared: by identity of a called program, the program and the same without dead code.
    """

    def __init__(self) -> None:
        self.answers: dict[int, bool] = {}
        self.cleared: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}

    def without_dead_code(self, program: core.Jaxpr) -> core.Jaxpr:
        kept: list[core.JaxprEqn] = []
        literal = core.Literal
        needed: set[Any] = {v for v in program.outvars if type(v) is not literal}
        changed = False
        for eqn in reversed(program.eqns):
            # Most equations are needed, and hold no programs.
            all_used = needed.issuperset(eqn.outvars) and eqn.outvars
            is_used = True if all_used else _is_used(eqn, needed)
            if is_used is False and not eqn.effects:
                changed = True
                continue
            found: Sequence[core.JaxprEqn] = (eqn,)
            holds_programs = eqn.primitive.name not in explain.WITHOUT_PROGRAMS
            if holds_programs and _calls_dead_code(eqn, is_used, self.answers):
                live = self.with_live_program(eqn, needed)
                found = _without_dead_results(program, eqn, needed) if live is None else (live,)
                changed = changed or live is not eqn
            for live in found:
                kept.append(live)
                # Literals are not variables and cannot be hashed.
                needed |= {v for v in live.invars if type(v) is not literal}
        return program.replace(eqns=kept[::-1]) if changed else program

    def with_live_program(self, eqn: core.JaxprEqn, needed: set[Any]) -> core.JaxprEqn | None:
        """The equation without dead code in its program; the same object if there is none.

        None if it would lose operands or results as well, as `_without_dead_results` finds out. A
        scan of layers keeps all of them: a carry that is not returned is read by the next layer.
        """
        if eqn.primitive.name not in _CALLS:
            return None
        program: core.Jaxpr = eqn.params["jaxpr"]
        used = [v in needed for v in eqn.outvars]
        if eqn.primitive.name == "scan":
            used = _with_carries(program, used, *scan_counts(eqn.params))
        if not all(used):
            return None
        if id(program) not in self.cleared:
            self.cleared[id(program)] = program, self.without_dead_code(program)
        live = self.cleared[id(program)][1]
        if not all(_reads(live, used)):
            return None
        return eqn if live is program else eqn.replace(params={**eqn.params, "jaxpr": live})


def _with_carries(body: core.Jaxpr, used: list[bool], n_consts: int, n_carry: int) -> list[bool]:
    """Which results of a scan's body are used, some of them by the next iteration."""
    while True:
        read = _reads(body, used)[n_consts : n_consts + n_carry]
        more = [a or b for a, b in zip(used, read, strict=False)] + used[n_carry:]
        if more == used:
            return used
        used = more


def _reads(program: core.Jaxpr, used: list[bool]) -> list[bool]:
    """Which arguments a program reads if some of its results are used.

    A called program counts as reading all of its operands.
    """
    literal = core.Literal
    needed = {v for v, u in zip(program.outvars, used, strict=True) if u and type(v) is not literal}
    for eqn in reversed(program.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update([v for v in eqn.invars if type(v) is not literal])
    return [v in needed for v in program.invars]


def _without_dead_results(
    program: core.Jaxpr, eqn: core.JaxprEqn, needed: set[Any]
) -> Sequence[core.JaxprEqn]:
    """An equation without its results that are not needed, and without dead code in its program."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
    outvars = [v for v in eqn.outvars if v in needed]
    info = program.debug_info._replace(arg_names=None, result_paths=None)
    alone = program.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=[eqn], debug_info=info
    )
    cleared, _ = partial_eval.dce_jaxpr(alone, [True] * len(outvars), instantiate=True)
    return cleared.eqns


def _is_used(eqn: core.JaxprEqn, needed: set[Any]) -> bool | None:
    """Whether an equation's results are needed; None if some are and some are not."""
    if needed.issuperset(eqn.outvars):
        return bool(eqn.outvars)
    return False if needed.isdisjoint(eqn.outvars) else None


def _used(program: core.Jaxpr) -> Iterator[tuple[core.JaxprEqn, bool | None]]:
    """The equations from last to first, each with the answer to whether its results are used.

    The answer is None if some are used and some are not.
    """
    literal = core.Literal
    needed: set[Any] = {v for v in program.outvars if type(v) is not literal}
    for eqn in reversed(program.eqns):
        is_used = _is_used(eqn, needed)
        if is_used is not False or eqn.effects:
            # Literals are not variables and cannot be hashed.
            needed.update([v for v in eqn.invars if type(v) is not literal])
        yield eqn, is_used


def _calls_dead_code(eqn: core.JaxprEqn, is_used: bool | None, answers: dict[int, bool]) -> bool:
    """Whether a program that an equation holds has dead code, or a result that is not used."""
    if eqn.params.get("name") in OPS:
        # An op's dead code is no lookup of the model, and XLA removes it.
        return False
    programs = inner_programs(eqn)
    if not programs or is_used is None:
        return bool(programs)
    # Without a generator: a model may call one program in every layer.
    for program in programs:  # noqa: SIM110
        if _has_dead_code(program, answers):
            return True
    return False


def _has_dead_code(program: core.Jaxpr, answers: dict[int, bool]) -> bool:
    answer = answers.get(id(program))
    if answer is None:
        answer = answers[id(program)] = any(
            (is_used is False and not (eqn.effects and not eqn.outvars))
            or _calls_dead_code(eqn, is_used, answers)
            for eqn, is_used in _used(program)
        )
    return answer

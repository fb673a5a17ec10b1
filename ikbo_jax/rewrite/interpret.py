"""The interpreter: runs a jaxpr on values that may be lazy, by one rule per primitive.

An equation whose operands are all arrays runs as it is, unless its primitive can make a broadcast.
Otherwise the primitive's rule computes with the lazy values. Where there is no rule, or the rule
raises `NotCovered`, the operands are materialised and the equation runs as it is; so a rule can
never be missing for the result to be right.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from ikbo_jax.rewrite import report
from ikbo_jax.rewrite.equations import (
    described,
    identity,
    is_number,
    is_op,
    on_integers,
    why_kept,
)
from ikbo_jax.rewrite.lineage import Deferred, is_plain
from ikbo_jax.rewrite.program_cache import ProgramCache
from ikbo_jax.rewrite.provenance import Provenance
from ikbo_jax.rewrite.registry import NotCovered, is_source, rule_of
from ikbo_jax.rewrite.scope import Scope


class Context:
    """What a rule is called with: it runs equations, and knows what the rewrite has made so far.

    Attributes:
      recorder: collects the report.
      parent: the context of the scope around this one; None for the function's.
      scope: the arrays and lineages made so far.
      provenance: the equations that values came from.
      programs: what is known of called programs.
      differentiated: whether the program's derivative must be that of the original. If not, its
        values alone must be right, and a rule may take a form whose derivative is another one
        after it has called `gradient_differs`.
    """

    def __init__(
        self,
        recorder: report.Recorder,
        parent: Context | None = None,
        *,
        differentiated: bool = False,
        repeated: frozenset[int] = frozenset(),
        outlives: bool = False,
    ) -> None:
        self.recorder = recorder
        self.parent = parent
        self.scope: Scope = Scope(parent.scope if parent else None, outlives=outlives)
        self.provenance: Provenance = Provenance(parent.provenance if parent else None)
        self.programs: ProgramCache = parent.programs if parent else ProgramCache(repeated)
        self.differentiated: bool = differentiated or parent is not None and parent.differentiated

    def inner(self, recorder: report.Recorder | None = None) -> Context:
        """The context of a scope inside this one, by default with the same recorder."""
        return Context(recorder or self.recorder, self)

    def afterwards(self) -> Context:
        """The context of a scope inside this one that computes when this one's trace has ended.

        The program's form is decided by then, so that derivatives must be the original's.
        """
        return Context(self.recorder, self, differentiated=True, outlives=True)

    def gradient_differs(self) -> None:
        """Records that a rule takes a form with the original's values but not its derivative.

        The whole program then gets another variant, traced with `differentiated`, whose derivative
        is used. A rule must not call this where `differentiated` is set.
        """
        assert not self.differentiated
        self._outermost().recorder.gradient_differs = True

    def _outermost(self) -> Context:
        return self if self.parent is None else self.parent._outermost()

    # Values.

    def build(self, value: Any) -> jax.Array:
        """The array that a value stands for, computed once a scope. Records nothing."""
        return value if is_plain(value) else self.scope.array(value, lambda: value.build(self))

    def materialise(
        self, eqn: core.JaxprEqn | None, value: Any, reason: str, *, copied: bool = True
    ) -> jax.Array:
        """The array that a value stands for, and a line of the report that says why it is needed.

        Args:
          eqn: the equation that needs it; None for the function's result.
          value: any value.
          reason: for people.
          copied: False if XLA looks the rows up inside the operation that needs them.
        """
        if is_plain(value):
            return value
        if not self.scope.is_built(value):
            if value.step is not None:
                # What it is made of is copied, not the value itself.
                if reason == RETURNED:
                    reason = "needed for a value that the function returns"
                with self.recorder.because(reason):
                    return self.build(value)
            self.recorder.wrote(eqn, value, reason, copied)
        return self.build(value)

    def producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """The equation that a value came from, and its operands; None if unknown."""
        return self.provenance.producer(value)

    # Running.

    def bind(self, eqn: core.JaxprEqn, *arrays: Any, **params: Any) -> Any:
        """Runs the equation's primitive on arrays, with some parameters replaced."""
        primitive = eqn.primitive
        merged = {**eqn.params, **params} if params else eqn.params
        return primitive.bind(*arrays, **primitive.get_bind_params(merged))

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a program on values."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        name_stack = source_info_util.current_name_stack()
        is_named = bool(str(name_stack))
        user_context, literal = source_info_util.user_context, core.Literal
        for eqn_ctx, eqns in itertools.groupby(jaxpr.eqns, lambda eqn: eqn.ctx):
            with eqn_ctx.manager:
                for eqn in eqns:
                    info = eqn.source_info
                    stack = name_stack + info.name_stack if is_named else info.name_stack
                    with user_context(info.traceback, name_stack=stack):
                        operands = [v.val if isinstance(v, literal) else env[v] for v in eqn.invars]
                        results = self._run_eqn(eqn, operands)
                    env.update(zip(eqn.outvars, results, strict=True))
        return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    def run_closed(self, jaxpr: Any, args: Sequence[Any], eqn: Any = None) -> list[Any]:
        """`run`, of a program that holds its constants, inside the equation that calls it."""
        with self.recorder.inside(eqn):
            return self.run(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), args)

    def _run_eqn(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Runs an equation; one on integers only once for equal operands.

        `x[index]` and `y[index]` both work out the same rows from the same index; without this
        they would look like different ones.
        """
        key = _cse_key(eqn, operands)
        if key is not None and (known := self.scope.results(key)) is not None:
            return known
        results = self._apply(eqn, operands)
        if key is not None:
            self.scope.keep_results(key, operands, results)
        for result in results:
            self.provenance.record(eqn, result, operands)
        return results

    def _apply(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        deferred = [x for x in operands if isinstance(x, Deferred)]
        if not deferred and not is_source(name):
            return _as_list(eqn, self.bind(eqn, *operands))
        try:
            return self._by_rule(eqn, deferred, operands)
        except NotCovered as error:
            reason = str(error)
        except Exception as error:
            if eqn.effects:
                # Some may be traced already, and must not be a second time: the original runs.
                raise
            reason = f"the rule of {name} raised {described(error)}"
        if name in LOOKUPS:
            self.looked_up(eqn, "refused", reason)
        operands = [self.materialise(eqn, operand, reason) for operand in operands]
        return _as_list(eqn, self.bind(eqn, *operands))

    def _by_rule(
        self, eqn: core.JaxprEqn, deferred: list[Deferred], operands: list[Any]
    ) -> list[Any]:
        """The results by the rule of a value or of the primitive; raises NotCovered without one."""
        name = eqn.primitive.name
        step = next((x.step for x in deferred if x.step is not None), None)
        if step is not None:
            return _checked(eqn, step(self, eqn, operands))
        rule = rule_of(name)
        if rule is None:
            raise NotCovered(f"no rule for {name}")
        if is_op(eqn):
            raise NotCovered("already an op of ikbo_jax")
        results = _checked(eqn, rule(self, eqn, *operands))
        if name in LOOKUPS:
            removed = isinstance(results[0], Deferred)
            self.looked_up(eqn, "removed" if removed else "kept", "" if removed else why_kept(eqn))
        return results

    def looked_up(self, eqn: core.JaxprEqn, outcome: str, reason: str) -> None:
        """Records what became of a lookup of the original program."""
        self._outermost().recorder.looked_up(eqn, outcome, reason)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing is recorded inside: for trial runs."""
        self.recorder.muted += 1
        try:
            yield
        finally:
            self.recorder.muted -= 1


#: Why a result of the function is materialised.
RETURNED = "returned by the function"

#: Primitives that look rows up or repeat them, each of which the report lists.
LOOKUPS = ("gather", "tile")


def _checked(eqn: core.JaxprEqn, results: Any) -> list[Any]:
    """A rule's results as a list; raises ValueError if they are not what the equation makes."""
    results = _as_list(eqn, results)
    for x, v in zip(results, eqn.outvars, strict=True):
        # A tracer's own `shape` and `dtype` take several times as long.
        found: Any = x.aval if isinstance(x, jax.core.Tracer) else x
        aval: Any = v.aval
        if not hasattr(found, "shape"):
            continue
        if (tuple(found.shape), found.dtype) != (aval.shape, aval.dtype):
            made = f"{x.dtype}{list(x.shape)}"
            raise ValueError(f"it returned {made} instead of {aval.str_short()}")
    return results


def _as_list(eqn: core.JaxprEqn, results: Any) -> list[Any]:
    return list(results) if eqn.primitive.multiple_results else [results]


def _cse_key(eqn: core.JaxprEqn, operands: list[Any]) -> Any:
    """Key under which the results of an integer equation, or of a number, are used again.

    None if they cannot be.
    """
    if not on_integers(eqn) and not is_number(eqn, operands):
        return None
    try:
        key = (eqn.primitive, tuple(eqn.params.items()), tuple(map(identity, operands)))
        hash(key)
    except TypeError:
        return None
    return key


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape that the program sees; of a literal, ()."""
    return tuple(getattr(value, "shape", ()))

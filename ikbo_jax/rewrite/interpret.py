"""The interpreter: runs a jaxpr on values that may be lazy, by one rule per primitive.

An equation whose operands are all arrays runs as it is, unless its primitive can make a broadcast.
Otherwise the primitive's rule computes with the lazy values. Where there is no rule, or the rule
raises `NotCovered`, the operands are materialised and the equation runs as it is; so a rule can
never be missing for the result to be right.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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
from ikbo_jax.rewrite.jaxprs import inner_programs
from ikbo_jax.rewrite.lineage import (
    Deferred,
    Lineage,
    is_plain,
    take_rows,
)

#: Takes the context, the equation and its operands; returns its result, or a list of results.
Rule = Callable[..., Any]

_RULES: dict[str, Rule] = {}
#: Primitives whose rules also run on arrays alone, since they can make a broadcast.
_SOURCES: set[str] = set()


class NotCovered(Exception):
    """Raised by a rule that cannot work on these values; the message says why."""


def register_rule(
    primitive: core.Primitive | str, rule: Rule | None = None, *, source: bool = False
) -> Any:
    """Registers how a rewrite works on lazy operands of a primitive; replaces the rule it had.

    The rule is called as `rule(ctx, eqn, *operands)`. An operand is a `jax.Array`, a `Lazy` or a
    `Concat`. It returns a value of the kinds above for each of the equation's results: one, or a
    list if the primitive has several; `ctx.bind(eqn, *arrays, **params)` runs the primitive. It
    raises `NotCovered("why")` if it cannot: then the operands are materialised.

    Args:
      primitive: a `jax.extend.core.Primitive`, or its name.
      rule: the rule; without it, the function returns a decorator.
      source: whether the rule is also called when all operands are arrays.

    Returns:
      The rule, or a decorator.
    """

    def register(rule: Rule) -> Rule:
        name = str(primitive)
        _RULES[name] = rule
        (_SOURCES.add if source else _SOURCES.discard)(name)
        return rule

    return register if rule is None else register(rule)


class Context:
    """One scope of a rewrite: the function itself, or the body of a loop or branch in it.

    Attributes:
      recorder: collects the report.
      parent: the scope around it, whose arrays may be used here but not the other way round.
      given: arrays that values stand for, by the values' identity, where they come from outside.
      opaque: values of which more is known outside than here, by identity.
      missed: whether it was asked where such a value comes from.
      programs: programs of calls rewritten by themselves that hold arrays of this scope.
      repeated: identities of programs that are called several times.
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
    ) -> None:
        self.recorder = recorder
        self.parent = parent
        self.differentiated: bool = parent.differentiated if parent else differentiated
        # Keyed by identity; the entries hold the objects, so that no identity is used again.
        self._built: dict[int, tuple[Any, jax.Array]] = {}
        self._numbered: dict[Any, tuple[Any, list[Any]]] = {}
        self._producers: dict[int, tuple[core.JaxprEqn, Sequence[Any], Any]] = {}
        self._lineages: dict[Any, tuple[Any, Lineage]] = {}
        self.given: dict[int, jax.Array] = {}
        self.opaque: dict[int, Any] = {}
        self.missed = False
        self.programs: dict[Any, Any] = {}
        # Answers about whole programs, shared by all scopes.
        self._plain_jaxprs: dict[int, tuple[Any, bool]] = parent._plain_jaxprs if parent else {}
        self.rewritten: dict[Any, Any] = parent.rewritten if parent else {}
        self.repeated: set[int] = parent.repeated if parent else set()
        self.kinds: dict[Any, Any] = parent.kinds if parent else {}
        self.elementwise_programs: dict[int, tuple[Any, bool]] = (
            parent.elementwise_programs if parent else {}
        )

    def inner(self) -> Context:
        """A scope inside this one."""
        return Context(self.recorder, self)

    def scopes(self) -> Iterator[Context]:
        """This scope and those around it, from the inside."""
        scope: Context | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def gradient_differs(self) -> None:
        """Records that a rule takes a form with the original's values but not its derivative.

        The whole program then gets another variant, traced with `differentiated`, whose derivative
        is used. A rule must not call this where `differentiated` is set.
        """
        assert not self.differentiated
        *_, outermost = self.scopes()
        outermost.recorder.gradient_differs = True

    # Values.

    def build(self, value: Any) -> jax.Array:
        """The array that a value stands for, computed once a scope. Records nothing."""
        if is_plain(value):
            return value
        for scope in self.scopes():
            if id(value) in scope._built:
                return scope._built[id(value)][1]
        array = self.given.get(id(value))
        array = value.build(self) if array is None else array
        self._built[id(value)] = (value, array)
        return array

    def built(self) -> set[int]:
        """Identities of the values that were materialised in this scope."""
        return set(self._built)

    def is_built(self, value: Any) -> bool:
        """Whether a value was materialised in this scope or one around it."""
        return any(id(value) in scope._built for scope in self.scopes())

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
        if not self.is_built(value):
            if value.step is not None:
                # What it is made of is copied, not the value itself.
                if reason == RETURNED:
                    reason = "needed for a value that the function returns"
                with self.recorder.because(reason):
                    return self.build(value)
            self.recorder.wrote(eqn, value, reason, copied)
        return self.build(value)

    def lineage(
        self,
        key: Any,
        users: int,
        batch: int,
        make_index: Callable[[], Any],
        nearest: Lineage | None = None,
    ) -> Lineage:
        """The lineage with this key, made by `make_index` at the first call.

        Args:
          key: what makes an index the same as another: hashable, with objects by identity.
          users: rows of the smaller batch.
          batch: rows of the larger one.
          make_index: returns the [batch] int32 index, values in [0, users).
          nearest: see `Lineage`.
        """
        full_key = (*(k if isinstance(k, (str, int)) else id(k) for k in key), users)
        if (known := self._known(full_key)) is not None:
            return known
        made = Lineage(make_index(), users, batch, nearest=nearest)
        self._lineages[full_key] = (key, made)
        return made

    def compose(self, coarse: Lineage, fine: Lineage) -> Lineage:
        """The lineage of rows looked up by `fine` in what was looked up by `coarse`."""
        steps = (*coarse.steps, *fine.steps)
        made = self._known(("composed", *map(id, steps)))
        if made is None:
            index = take_rows(coarse.index, fine.index, 0)
            made = Lineage(index, coarse.users, fine.batch, steps)
            self._lineages["composed", *map(id, steps)] = (steps, made)
        return made

    def has_lineages(self) -> bool:
        """Whether a lineage was made in this scope."""
        return bool(self._lineages)

    def _known(self, key: Any) -> Lineage | None:
        for scope in self.scopes():
            if key in scope._lineages:
                return scope._lineages[key][1]
        return None

    def producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """The equation that a value came from, and its operands; None if unknown."""
        for scope in self.scopes():
            if id(value) in scope._producers:
                eqn, operands, _ = scope._producers[id(value)]
                return eqn, operands
            scope.missed |= id(value) in scope.opaque
        return None

    def is_known(self, value: Any) -> bool:
        """Whether it is known in this scope, or outside of it, where a value comes from."""
        return any(id(value) in s._producers or id(value) in s.opaque for s in self.scopes())

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
        key = self._number(eqn, operands)
        if key is not None:
            for scope in self.scopes():
                if key in scope._numbered:
                    return scope._numbered[key][1]
        results = self._apply(eqn, operands)
        if key is not None:
            self._numbered[key] = (operands, results)
        for result in results:
            self.made_by(eqn, result, operands)
        return results

    def made_by(self, eqn: core.JaxprEqn, result: Any, operands: Sequence[Any] = ()) -> None:
        """Remembers which equation a value came from."""
        # What a call returns was made inside of it.
        if id(result) not in self._producers:
            self._producers[id(result)] = (eqn, operands, result)

    def _number(self, eqn: core.JaxprEqn, operands: list[Any]) -> Any:
        """What tells an equation on integers, or on single numbers, from others; None of others."""
        if not on_integers(eqn) and not is_number(eqn, operands):
            return None
        try:
            key = (eqn.primitive, tuple(eqn.params.items()), tuple(map(identity, operands)))
            hash(key)
        except TypeError:
            return None
        return key

    def _apply(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        deferred = [x for x in operands if isinstance(x, Deferred)]
        if not deferred and name not in _SOURCES:
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
        rule = _RULES.get(name)
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
        *_, outermost = self.scopes()
        outermost.recorder.looked_up(eqn, outcome, reason)

    def is_plain_program(self, jaxpr: Any) -> bool:
        """Whether a program, run on arrays, has no primitive that can make a broadcast."""
        if id(jaxpr) not in self._plain_jaxprs:
            plain = not any(
                _may_broadcast(eqn) or not all(map(self.is_plain_program, inner_programs(eqn)))
                for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
            )
            self._plain_jaxprs[id(jaxpr)] = (jaxpr, plain)
        return self._plain_jaxprs[id(jaxpr)][1]

    def is_repeated(self, jaxpr: Any) -> bool:
        """Whether a program is known to be called several times."""
        return id(getattr(jaxpr, "jaxpr", jaxpr)) in self.repeated

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


def _may_broadcast(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        # Of a scalar: a constant. Constants are no broadcasts that cost anything.
        operand: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        return operand.ndim > 0 and result.size > operand.size
    if eqn.primitive.name in ("jit", "pjit"):
        return False
    return eqn.primitive.name in _SOURCES and not any(True for _ in inner_programs(eqn))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape that the program sees; of a literal, ()."""
    return tuple(getattr(value, "shape", ()))

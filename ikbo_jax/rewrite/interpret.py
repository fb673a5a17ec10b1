"""The interpreter: runs a jaxpr on values that may be lazy, by one rule per primitive.

An equation whose operands are all arrays runs as it is, unless its primitive can make a broadcast.
Otherwise the primitive's rule computes with the lazy values. If the primitive has no rule, or its
rule raises `NotCovered`, the operands are materialised and the equation runs as it is. So the
result is right without any rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.report.recorder import Recorder, temporarily
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.constraints import divided, placed
from ikbo_jax.rewrite.values.equations import (
    LOOKUPS,
    described,
    identity,
    is_lookup,
    may_overflow,
    on_integers,
    op_plan,
    why_kept,
)
from ikbo_jax.rewrite.values.jaxprs import interpret
from ikbo_jax.rewrite.values.lineage import Deferred, is_plain, origins_of
from ikbo_jax.rewrite.values.registry import NotCovered, applies_to_arrays, rule_of
from ikbo_jax.rewrite.values.rows import gathered
from ikbo_jax.rewrite.values.scope import ProgramCache, Scope
from ikbo_jax.rewrite.values.staged import TRACER


class Context:
    """Runs equations and holds the state of one scope; the first argument of every rule.

    Attributes:
      recorder: collects the report.
      parent: the context of the enclosing scope; None for the scope of the whole function.
      scope: the arrays and lineages computed so far, and the producing equations of values.
      programs: properties of called programs.
      derivatives: how many JVP rules this scope is inside of.
      differentiated: whether the program must have the original's derivative. If not, only its
        values must be right: a rule may call `gradient_differs` and then take a form with another
        derivative.
      same: None, or if this scope is a program that calls share, by the identity of a value that
        is the same in every call, a key that equal values have in all such programs.
    """

    def __init__(
        self,
        recorder: Recorder,
        parent: Context | None = None,
        *,
        differentiated: bool = False,
        repeated: frozenset[int] = frozenset(),
        outlives: bool = False,
    ) -> None:
        self.recorder = recorder
        self.parent = parent
        self.scope: Scope = Scope(parent.scope if parent else None, outlives=outlives)
        self.programs: ProgramCache = parent.programs if parent else ProgramCache(repeated)
        self._outermost: Recorder = parent._outermost if parent else recorder
        self.differentiated: bool = differentiated or parent is not None and parent.differentiated
        self.derivatives: int = parent.derivatives if parent else 0
        self.same: dict[int, Any] | None = None

    def inner(self, recorder: Recorder | None = None) -> Context:
        """Returns the context of a scope inside this scope, by default with the same recorder."""
        return Context(recorder or self.recorder, self)

    def afterwards(self) -> Context:
        """Returns the context of an inner scope that computes when this scope's trace has ended.

        The program's form is decided by then, so that derivatives must be the original's.
        """
        context = Context(self.recorder, self, differentiated=True, outlives=True)
        context.derivatives += 1
        return context

    def gradient_differs(self) -> None:
        """Records that a rule takes a form with the original's values but another derivative.

        The whole program then gets a second variant, traced with `differentiated`, which provides
        the derivative. A rule must not call this method where `differentiated` is set.
        """
        assert not self.differentiated
        self._outermost.gradient_differs = True

    def run_original_if(self, condition: jax.Array) -> None:
        """Makes the program compute its results as the original where a condition is True.

        Raises NotCovered where the original cannot run beside the rewritten program: the condition
        belongs to a program that this one calls, or differs by device.
        """
        if self.parent is not None or jax.sharding.get_abstract_mesh().manual_axes:
            raise NotCovered("attention is not recognised: a query may keep no key")
        self.programs.exceptions.append(condition)

    def build(self, value: Any) -> jax.Array:
        """Returns the array that a value represents, computed once per scope. Records nothing."""
        return value if is_plain(value) else self.scope.array(value, lambda: self._built(value))

    def _built(self, value: Any) -> jax.Array:
        """Builds a deferred value; a cast mask as the cast of the looked-up mask.

        XLA turns a product with the cast of a mask into a select, by which 0 hides NaN. It sees no
        such cast in a lookup of numbers.
        """
        mask = self.scope.cast_mask(value)
        if mask is None or is_plain(mask):
            array = value.build(self)
        else:
            array = lax.convert_element_type(self.build(mask), value.dtype)
        return placed(self, value, array) if self.programs.has_constraints else array

    def materialise(
        self, eqn: core.JaxprEqn | None, value: Any, reason: str, *, copied: bool = True
    ) -> jax.Array:
        """Returns the array of a value; adds a line to the report that says why it is needed.

        Args:
          eqn: the equation that needs the array; None for the function's result.
          value: any value.
          reason: why the array is needed, for the report.
          copied: False if XLA looks the rows up inside the operation that needs them.
        """
        if is_plain(value):
            return value
        if not self.scope.is_built(value):
            if value.is_computed:
                # The lazy values that it is computed from are copied, not the value itself.
                if reason == RETURNED:
                    reason = "needed for a value that the function returns"
                with self.recorder.because(reason):
                    return self.build(value)
            self.recorder.wrote(eqn, value, reason, copied)
        return self.build(value)

    def producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """Returns the producing equation of a value, and its operands; None if unknown."""
        return self.scope.producer(value)

    def made_by(self, value: Any) -> tuple[str, Any, Sequence[Any]]:
        """Returns `producer` with the primitive's name; "", None and () if it is unknown."""
        eqn, operands = self.producer(value) or (None, ())
        return "" if eqn is None else eqn.primitive.name, eqn, operands

    def bind(self, eqn: core.JaxprEqn, *arrays: Any, **params: Any) -> Any:
        """Runs the equation's primitive on arrays, with some parameters replaced."""
        merged = {**eqn.params, **params} if params else eqn.params
        if eqn.primitive is lax.gather_p and (found := gathered(arrays, merged)) is not None:
            return found
        return staged.bind(eqn.primitive, arrays, merged, eqn.invars)

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Interprets a jaxpr on values; returns its results."""
        return interpret(jaxpr, consts, args, self.run_equation)

    def run_closed(self, jaxpr: Any, args: Sequence[Any], eqn: Any = None) -> list[Any]:
        """Interprets a jaxpr that holds its constants; `eqn` is the equation that calls it."""
        with self.recorder.inside(eqn):
            return self.run(jaxpr, jaxpr.consts, args)

    def run_equation(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Runs an equation. An integer equation runs only once for equal operands.

        `x[index]` and `y[index]` both compute row numbers from the same index. Only if the results
        are one object do both lookups get one lineage.
        """
        if eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is not None:
            return self._transposed_and_reshaped(eqn, operands)
        key = _cse_key(eqn, operands)
        if key is not None and (earlier := self.scope.results(key)) is not None:
            return earlier
        if key is not None and self.same is not None:
            results = self._apply_same(self.same, eqn, operands)
        else:
            results = self._apply(eqn, operands)
        if self.programs.divisions and (origins := origins_of(*operands, *results)):
            results = list(divided(self, origins, results))
        if key is not None:
            self.scope.keep_results(key, operands, results)
        self.scope.record(eqn, results, operands)
        return results

    def _transposed_and_reshaped(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Runs a reshape with a permutation as two equations: rules and proofs expect none."""
        permutation, aval = eqn.params["dimensions"], eqn.invars[0].aval
        shape = [aval.shape[d] for d in permutation]  # type: ignore[attr-defined]
        moved = core.Var(jax.core.ShapedArray(tuple(shape), operands[0].dtype))
        params = {"permutation": permutation}
        first = eqn.replace(primitive=lax.transpose_p, outvars=[moved], params=params)
        then = eqn.replace(invars=[moved], params={**eqn.params, "dimensions": None})
        return self.run_equation(then, self.run_equation(first, operands))

    def _apply_same(
        self, same: dict[int, Any], eqn: core.JaxprEqn, operands: list[Any]
    ) -> list[Any]:
        """Runs an equation whose results are reused if all calls have the same operands.

        Interpreted in place, only the first call would run it. So the calls together record once
        what it records.
        """
        keys = [same.get(id(x), identity(x)) for x in operands]
        varies = (
            isinstance(x, (jax.core.Tracer, Deferred)) and id(x) not in same for x in operands
        )
        if any(varies):
            return self._apply(eqn, operands)
        key = (eqn.primitive, tuple(eqn.params.items()), *keys)
        with self.recorder.only_once(key):
            results = self._apply(eqn, operands)
        same.update((id(x), (key, n)) for n, x in enumerate(results))
        return results

    def _apply(self, eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        deferred = [x for x in operands if type(x) is not TRACER and isinstance(x, Deferred)]
        if not deferred and not applies_to_arrays(self, eqn, operands):
            return _as_list(eqn, self.bind(eqn, *operands))
        try:
            return self._by_rule(eqn, deferred, operands)
        except NotCovered as error:
            reason = str(error)
        except ImportError:
            # An installation that lacks a module says nothing about the program.
            raise
        except Exception as error:
            if eqn.effects:
                # The effects may be traced already and must not be traced twice: the original runs.
                raise
            reason = f"the rule of {name} raised {described(error)}"
        operands = [
            staged.placed_as(self.materialise(eqn, operand, reason), v.aval)
            for operand, v in zip(operands, eqn.invars, strict=True)
        ]
        if is_lookup(eqn):
            if deferred:
                # The array may be a table with fewer rows than are looked up.
                return self._apply(eqn, operands)
            self._outermost.looked_up(eqn, "refused", reason)
        return _as_list(eqn, self.bind(eqn, *operands))

    def _by_rule(
        self, eqn: core.JaxprEqn, deferred: list[Deferred], operands: list[Any]
    ) -> list[Any]:
        """Applies the rule of an operand or of the primitive; NotCovered without a rule."""
        name = eqn.primitive.name
        if deferred and may_overflow(eqn):
            if self.differentiated:
                raise NotCovered("a gradient that may overflow if it is summed over candidates")
            self.gradient_differs()
        operand_rule = None
        for x in deferred:
            operand_rule = operand_rule or x.rule
        if operand_rule is not None:
            results = _checked(eqn, operand_rule(self, eqn, operands))
        else:
            plan = op_plan(eqn) if name == "jit" else None
            if (rule := rule_of(name if plan is None else plan.op)) is None:
                raise NotCovered(
                    "already an op of ikbo_jax" if plan is not None else f"no rule for {name}"
                )
            results = _checked(eqn, rule(self, eqn, *operands))
        if name in LOOKUPS and is_lookup(eqn):
            if isinstance(results[0], Deferred):
                self._outermost.looked_up(eqn, "removed", "")
            else:
                self._outermost.looked_up(eqn, "kept", why_kept(eqn))
        if self.programs.looks_up_alone:
            # Not of ids, by which each user's rows of a table are looked up once.
            is_id = [not is_plain(x) and x.dtype.kind in "iub" for x in results]
            results = [x if kept else self.build(x) for x, kept in zip(results, is_id, strict=True)]
        return results

    def muted(self) -> contextlib.AbstractContextManager[None]:
        """Opens a context in which nothing is recorded, for trial runs."""
        return temporarily(self.recorder, "muted", True)


#: The reason of a materialised result of the function.
RETURNED = "returned by the function"


def _checked(eqn: core.JaxprEqn, results: Any) -> list[Any]:
    """Lists a rule's results; ValueError if their shapes or dtypes are not the equation's."""
    results = _as_list(eqn, results)
    for x, v in zip(results, eqn.outvars, strict=True):
        # `shape` and `dtype` of a tracer take several times as long as the aval's.
        returned: Any = x.aval if type(x) is TRACER else x
        aval: Any = v.aval
        if type(returned) is not jax.core.ShapedArray and not hasattr(returned, "shape"):
            continue
        shape, dtype = returned.shape, returned.dtype
        if dtype != aval.dtype or shape != aval.shape and tuple(shape) != aval.shape:
            text = f"{x.dtype}{list(x.shape)}"
            raise ValueError(f"it returned {text} instead of {aval.str_short()}")
    return results


def _as_list(eqn: core.JaxprEqn, results: Any) -> list[Any]:
    return list(results) if eqn.primitive.multiple_results else [results]


def _cse_key(eqn: core.JaxprEqn, operands: list[Any]) -> Any:
    """Returns the key under which results on integers are reused; None for other equations."""
    if not on_integers(eqn):
        return None
    # Random bits depend on this setting, too.
    setting = eqn.ctx.threefry_partitionable
    try:
        key = (eqn.primitive, setting, tuple(eqn.params.items()), tuple(map(identity, operands)))
        hash(key)
    except TypeError:
        return None
    return key


#: The shape that the program sees; () for a literal.
shape_of = staged.shape_of


def at_shapes(eqn: Any, operands: Sequence[Any], shapes: Sequence[Any], **params: Any) -> Any:
    """Returns an equation on these operands whose results have these shapes."""

    def at(v: Any, shape: tuple[Any, ...]) -> Any:
        return v if v.aval.shape == shape else core.Var(v.aval.update(shape=shape))

    return eqn.replace(
        invars=list(map(at, eqn.invars, map(shape_of, operands))),
        outvars=list(map(at, eqn.outvars, shapes)),
        params={**eqn.params, **params},
    )

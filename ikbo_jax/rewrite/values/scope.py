"""What a rewritten program has computed, scope by scope, and facts of the programs it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import core

from ikbo_jax.rewrite.values import equations, hoisting
from ikbo_jax.rewrite.values.jaxprs import inner_programs
from ikbo_jax.rewrite.values.lineage import Lineage, base_of, has_lineage, is_at_least
from ikbo_jax.rewrite.values.registry import NotCovered, is_source
from ikbo_jax.rewrite.values.rows import take_rows


class Scope:
    """Holds the arrays of one jaxpr: of the whole function, or of the body of a loop or branch.

    A scope may use arrays of the scopes that enclose it, but not of the scopes inside it: an array
    of a loop's body does not exist outside of the body. If it `outlives` the enclosing scopes, it
    computes after their trace has ended: their arrays are no values then, and it uses none of them.

    Entries are keyed by the identity of values, and hold the values, so that identities stay
    unique.

    Attributes:
      outer_arrays: by the identity of a deferred value, the array that the caller has already
        materialised for it.
      programs: by the key of a call, the rewritten program; it may hold arrays of this scope.
      calls: by the key of a call, the history of all calls with this key; it may hold arrays, too.
      seen: keys of earlier calls, each with the arrays whose identities it holds.
      known: by the identity of a value of this scope, the value and its array; None in place of the
        array if it depends on inputs.
      asked_hidden: the identities of the values for whose producing equation a rule asked although
        it is hidden from this scope (`hide`).
    """

    def __init__(self, parent: Scope | None = None, *, outlives: bool = False) -> None:
        self.outer_arrays: dict[int, jax.Array] = {}
        self.programs: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}
        self.seen: dict[Any, Any] = {}
        self.known: dict[int, tuple[Any, Any]] = {}
        self.asked_hidden: set[int] = set()
        # The scopes around this one, from the inside, and those whose arrays it may use.
        self._outer: tuple[Scope, ...] = (parent, *parent._outer) if parent else ()
        around = None if outlives else parent
        self._usable: tuple[Scope, ...] = (around, *around._usable) if around else ()
        self._trace: Any = core.find_top_trace(())
        self._built: dict[int, tuple[Any, jax.Array]] = {}
        self._results: dict[Any, tuple[Any, list[Any]]] = {}
        self._lineages: dict[Any, tuple[Any, Lineage]] = {}
        # By identity of the result; entries hold the result.
        self._producers: dict[int, tuple[core.JaxprEqn, Sequence[Any], Any]] = {}
        self._producer_hidden: dict[int, tuple[Any, str]] = {}

    def find(self, table: str, key: Any) -> Any:
        """Returns what this or an enclosing scope keeps for a key in its `table`, or None."""
        for scope in (self, *self._usable):
            if key in (entries := scope.__dict__[table]):
                return entries[key]
        return None

    def owner(self, values: Iterable[Any]) -> Scope:
        """Finds the outermost scope in whose trace all of the values, arrays and lookups, exist.

        What is kept for the values is kept there, and so not after their trace has ended.
        """
        arrays: list[Any] = []
        for x in values:
            arrays.append(base_of(x))
            if has_lineage(x):
                arrays.append(x.lineage.index)
        traces = {id(x._trace) for x in arrays if isinstance(x, jax.core.Tracer)}
        owner = None
        for scope in (self, *self._usable):
            if owner is not None and scope._trace is not owner._trace:
                break
            if owner is not None or id(scope._trace) in traces:
                owner = scope
        return scope if owner is None else owner

    def array(self, value: Any, build: Callable[[], jax.Array]) -> jax.Array:
        """Returns the array of a deferred value; `build` computes it at the first call."""
        if (found := self.find("_built", id(value))) is not None:
            built: jax.Array = found[1]
            return built
        array = self.outer_arrays.get(id(value))
        array = build() if array is None else array
        self._built[id(value)] = (value, array)
        return array

    def built(self) -> set[int]:
        """Returns identities of the values that were materialised in this scope."""
        return set(self._built)

    def is_built(self, value: Any) -> bool:
        """Whether a value was materialised in this scope or in one that encloses it."""
        return self.find("_built", id(value)) is not None

    def results(self, key: Any) -> list[Any] | None:
        """Returns the results of an earlier equation with this key; None if no equation had it."""
        found = self.find("_results", key)
        return None if found is None else found[1]

    def keep_results(self, key: Any, operands: Sequence[Any], results: list[Any]) -> None:
        """Keeps the results of an equation, whose key holds the identities of its operands."""
        self._results[key] = (operands, results)

    def once(self, key: Any, operands: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Returns what `compute` returned at the first call with this key and the same operands.

        So the layers of a model share what only depends on their mask.
        """
        full_key = (key, *map(id, operands))
        found = self.results(full_key)
        if found is None:
            found = [compute()]
            self.keep_results(full_key, operands, found)
        return found[0]

    def lineage(
        self,
        key: Any,
        users: int,
        batch: int,
        make_index: Callable[[], Any],
        nearest: Lineage | None = None,
        *,
        composed_of: tuple[Lineage, ...] = (),
        is_sorted: bool = False,
        numbers: Any = None,
    ) -> Lineage:
        """Returns the lineage with this key; the first call creates it from `make_index`.

        Keys are equal for equal indices: strings and sizes compare by value, other objects by
        identity. The other arguments are the lineage's attributes.
        """
        full_key = (
            *(k if isinstance(k, (str, int)) or export.is_symbolic_dim(k) else id(k) for k in key),
            users,
        )
        _, found = self.find("_lineages", full_key) or (key, None)
        if found is None:
            index = make_index()
            found = Lineage(index, users, batch, composed_of, nearest, is_sorted, numbers)
            self._lineages[full_key] = (key, found)
        return found

    def of_one_user(self, batch: int) -> Lineage:
        """Returns the lineage of a batch whose rows all come from one user."""
        zeros = functools.partial(jnp.zeros, batch, jnp.int32)
        return self.lineage(("one", batch), 1, batch, zeros, is_sorted=True)

    def of_tiles(self, rows: int, batch: int) -> Lineage:
        """Returns the lineage of a batch that repeats all rows, one after another."""
        return self.lineage(
            ("tile", batch), rows, batch, lambda: lax.iota(jnp.int32, batch) % jnp.int32(rows)
        )

    def of_repeats(self, rows: int, batch: int) -> Lineage:
        """Returns the lineage of a batch that repeats each row, one after another."""
        times = jnp.int32(batch // rows)
        key, number = ("repeat", batch), lambda: lax.iota(jnp.int32, batch) // times
        return self.lineage(key, rows, batch, number, is_sorted=True)

    def is_of(self, name: str, lineage: Lineage) -> bool:
        """Whether a lineage is one of `of_tiles`, by the name "tile", or "repeat"."""
        _, found = self.find("_lineages", (name, lineage.batch, lineage.users)) or ((), None)
        return found is lineage

    def compose(self, coarse: Lineage, fine: Lineage) -> Lineage:
        """Composes two successive lookups: by `coarse`, then by `fine`."""
        steps = (*coarse.steps, *fine.steps)
        index = functools.partial(take_rows, coarse.index, fine.index, 0)
        sizes, is_sorted = (coarse.users, fine.batch), coarse.is_sorted and fine.is_sorted
        key = ("composed", *steps)
        return self.lineage(key, *sizes, index, composed_of=steps, is_sorted=is_sorted)

    def has_lineages(self) -> bool:
        """Whether a lineage was created in this scope."""
        return bool(self._lineages)

    def lineages(self) -> set[int]:
        """Returns identities of the lineages of this scope and of the scopes that enclose it."""
        scopes = (self, *self._outer)
        return {id(lineage) for scope in scopes for _, lineage in scope._lineages.values()}

    def producer(
        self, value: Any, names: Sequence[str] | None = None
    ) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """Returns the producing equation of a value, and its operands; None if unknown.

        With `names`, only an equation of one of these primitives. A rule names the primitives if it
        does without a hidden producing equation, unless `hide` says that the equation is one of a
        primitive in `names`.
        """
        key = id(value)
        for scope in (self, *self._outer):
            if key in scope._producers:
                eqn, operands, _ = scope._producers[key]
                return (eqn, operands) if names is None or eqn.primitive.name in names else None
            hidden = scope._producer_hidden.get(key)
            if hidden is not None and (names is None or hidden[1] in names):
                scope.asked_hidden.add(key)
        return None

    def cast_mask(self, value: Any) -> Any:
        """Returns the booleans that a value of floating-point numbers is the cast of, or None."""
        produced = self.producer(value, ("convert_element_type",))
        if produced is None or getattr(produced[1][0], "dtype", None) != np.bool_:
            return None
        return produced[1][0] if jnp.issubdtype(value.dtype, jnp.floating) else None

    def primitive(self, value: Any) -> str | None:
        """Names the primitive that computes a value, also if its producing equation is hidden.

        "" if `hide` does not name it; None if the value has no producing equation.
        """
        for scope in (self, *self._outer):
            if id(value) in scope._producers:
                return scope._producers[id(value)][0].primitive.name
            if id(value) in scope._producer_hidden:
                return scope._producer_hidden[id(value)][1]
        return None

    def record(
        self, eqn: core.JaxprEqn, results: Sequence[Any], operands: Sequence[Any] = ()
    ) -> None:
        """Records the producing equation of values that have none yet.

        So the producing equation of a call's result is the equation inside the call.
        """
        for result in results:
            key = id(result)
            if key not in self._producers:
                self._producers[key] = (eqn, operands, result)

    def hide(self, value: Any, name: str = "") -> None:
        """Records that a value has a producing equation outside, which this scope does not see.

        `name` is the primitive of this equation, if `producer` with it must count as asking for it.
        """
        self._producer_hidden[id(value)] = value, name


class ProgramCache:
    """Holds properties of called programs, shared by all scopes of one rewrite.

    Attributes:
      repeated: identities of the programs that are called several times.
      table_rows: numbers of rows of the tables in which lookups were found.
      most_rows: lookups in tables with more rows stay as they are; None without a bound.
      has_constraints: whether the sharding of a deferred value is constrained.
      looks_up_alone: whether numbers that are looked up become arrays at once.
      leaves_unread: whether rows may differ from the original's that no result seems to depend on.
      unread: whether there are such rows.
      exceptions: conditions on which the original must run.
      divisions: by broadcast, how a sharding constraint divides its candidates (`constraints`).
    """

    def __init__(self, repeated: frozenset[int] = frozenset()) -> None:
        self.repeated = repeated
        self.table_rows: set[int] = set()
        self.most_rows: int | None = None
        self.has_constraints = False
        self.looks_up_alone = False
        self.leaves_unread = False
        self.unread = False
        self.exceptions: list[Any] = []
        self.divisions: dict[Any, Any] = {}
        self._found: dict[Any, tuple[Any, Any]] = {}

    def once(self, key: Any, find_out: Callable[[], Any], alive: Any = None) -> Any:
        """Returns what `find_out` returned at the first call with this key.

        `alive` holds the objects whose identities are in the key, so that these stay unique.
        """
        if key not in self._found:
            self._found[key] = alive, find_out()
        return self._found[key][1]

    def is_plain(self, program: core.Jaxpr) -> bool:
        """Whether a program, run on arrays, has no primitive that can make a broadcast."""

        def find_out() -> bool:
            return not any(
                _may_broadcast(eqn) or not all(map(self.is_plain, inner_programs(eqn)))
                for eqn in program.eqns
            )

        plain: bool = self.once(("plain", id(program)), find_out, program)
        return plain

    def looks_up(self, rows: Any) -> None:
        """Records a lookup in a table; NotCovered if the table has more than `most_rows` rows."""
        if not isinstance(rows, int):
            return
        if self.most_rows is not None and rows > self.most_rows:
            raise NotCovered(f"work on the table's {rows} rows would cost more than on copies")
        self.table_rows.add(rows)


def _may_broadcast(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        # Broadcasting a scalar costs nothing: XLA treats it as a constant.
        operand: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        return operand.ndim > 0 and not is_at_least(operand.size, result.size)
    if eqn.primitive.name == "jit":
        return equations.is_lookup(eqn)
    if eqn.primitive.name in ("concatenate", "stack"):
        # Copies of a slice broadcast it.
        copies = len(eqn.invars) > 1 and all(v is eqn.invars[0] for v in eqn.invars)
        axis, first = eqn.params.get("dimension"), eqn.invars[0].aval
        return copies and (axis is None or first.shape[axis] == 1)  # type: ignore[attr-defined]
    if eqn.primitive.name == "scan":
        return hoisting.may_run_before(eqn)
    if is_source(eqn.primitive.name):
        return not any(True for _ in inner_programs(eqn))
    return equations.grows(eqn)

"""Rows of users' sequences that nothing reads, such as padding, whose values may differ.

A softmax over keys that are all hidden by a finite number weighs all of them alike, a candidate's
key, too. So a query of the history that keeps no key, as the first token of a padded sequence,
depends on the candidate in the original. The rewritten program leaves such a row at user batch,
and `check` proves that no result of the program depends on it: wherever the rows are keys, the same
mask hides them.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.rules import any_shape
from ikbo_jax.rewrite.rules.elementwise import ELEMENTWISE
from ikbo_jax.rewrite.values.equations import KEPT_DIMS, kept_dims, op_plan
from ikbo_jax.rewrite.values.jaxprs import inner_programs

_CALLS, _JVP = ("checkpoint", "jit", "remat2"), "custom_jvp_call"


class RowsAreRead(Exception):
    """Says that rows which differ from the original's may be read."""


# A `where` of equal values, which XLA removes: an identity that names its mask.


@jax.jit
def unread_rows(x: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns `x` [users, rows, ...]; rows that are not `kept` [users, rows] may differ."""
    return _marked(x, kept)


@jax.jit
def read_rows(x: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns `x` [users, rows, ...], of which only the rows that are `kept` are read."""
    return _marked(x, kept)


def _marked(x: jax.Array, kept: jax.Array) -> jax.Array:
    kept = kept.reshape(*kept.shape, *[1] * (x.ndim - 2))
    return jnp.where(kept, x, lax.stop_gradient(x))


class _Rows(NamedTuple):
    """Describes which rows of a value differ: where the mask `kept` [users, rows] is False.

    Attributes:
      kept: the number of the mask's value.
      users: the dimension of the users.
      rows: the dimension of their rows.
    """

    kept: Hashable
    users: int
    rows: int


def check(program: core.Jaxpr) -> None:
    """Raises RowsAreRead if a result may depend on a row that `unread_rows` does not keep."""
    walk = _Walk()
    numbers = [walk.number(("argument", n)) for n in range(len(program.invars))]
    try:
        _, found = walk.program(program, numbers, [None] * len(numbers))
    except Exception as error:
        # For example, sizes that are symbols are not comparable.
        raise RowsAreRead from error
    if any(x is not None for x in found):
        raise RowsAreRead


class _Walk:
    """Follows the rows through a program and through the programs that it calls.

    Equal values of equations have equal numbers, so that a mask is found again wherever the program
    computes it again.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any) -> int:
        """Returns the number of a value that is computed as `key` says."""
        return self._numbers.setdefault(key, len(self._numbers))

    def program(
        self, program: Any, numbers: Sequence[int], rows: Sequence[_Rows | None]
    ) -> tuple[list[int], list[_Rows | None]]:
        """Returns the numbers of a program's results, and which of their rows differ."""
        known: dict[Any, tuple[int, _Rows | None]] = {}
        known.update(zip(program.invars, zip(numbers, rows, strict=True), strict=True))
        known.update((v, (self.number(id(v)), None)) for v in program.constvars)

        def read(v: Any) -> tuple[int, _Rows | None]:
            if isinstance(v, core.Literal):
                return self.number((str(v.aval), str(v.val))), None
            return known[v]

        for eqn in program.eqns:
            of_operands = list(map(read, eqn.invars))
            found = self._equation(eqn, [x for x, _ in of_operands], [x for _, x in of_operands])
            known.update(zip(eqn.outvars, found, strict=True))
        results = list(map(read, program.outvars))
        return [x for x, _ in results], [x for _, x in results]

    def _equation(
        self, eqn: core.JaxprEqn, numbers: Sequence[int], rows: Sequence[_Rows | None]
    ) -> list[tuple[int, _Rows | None]]:
        name, found = eqn.primitive.name, [x for x in rows if x is not None]
        after: Sequence[_Rows | None]
        if (marker := eqn.params.get("name")) in ("read_rows", "unread_rows"):
            if any(x != _Rows(numbers[1], 0, 1) for x in found):
                raise RowsAreRead
            after = [_Rows(numbers[1], 0, 1) if marker == "unread_rows" else None]
        elif (
            name in _CALLS
            and op_plan(eqn) is None
            or name == _JVP
            and (
                # The function's derivative may mix rows.
                not found or any_shape.is_elementwise_jvp(eqn)
            )
        ):
            inner = eqn.params["call_jaxpr" if name == _JVP else "jaxpr"]
            return list(zip(*self.program(inner, numbers, rows), strict=True))
        elif found and (name in ELEMENTWISE or name in KEPT_DIMS):
            after = [_after(eqn, v, rows) for v in eqn.outvars]
        elif found or any(map(_marks, inner_programs(eqn))):
            raise RowsAreRead
        else:
            after = [None] * len(eqn.outvars)
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), *numbers)
        try:
            hash(key)
        except TypeError:
            key = (id(eqn), *numbers)
        return [(self.number((key, n)), x) for n, x in enumerate(after)]


def _marks(program: core.Jaxpr) -> bool:
    """Whether a program or one that it calls has rows that differ."""
    return any(
        eqn.params.get("name") == "unread_rows" or any(map(_marks, inner_programs(eqn)))
        for eqn in program.eqns
    )


def _after(eqn: core.JaxprEqn, result: Any, rows: Sequence[_Rows | None]) -> _Rows:
    """Finds which rows of a result differ; RowsAreRead if the equation mixes rows."""
    results = set()
    for n, x in enumerate(rows):
        if x is None:
            continue
        dims = kept_dims(eqn, n, result)
        if x.users not in dims or x.rows not in dims:
            raise RowsAreRead
        results.add(x._replace(users=dims[x.users], rows=dims[x.rows]))
    if len(results) != 1:
        raise RowsAreRead
    return results.pop()

"""Properties of the programs that a function calls, found once per rewrite."""

from collections.abc import Callable
from typing import Any

from jax.extend import core

from ikbo_jax.rewrite.values import equations, hoisting
from ikbo_jax.rewrite.values.jaxprs import inner_programs
from ikbo_jax.rewrite.values.lineage import is_at_least
from ikbo_jax.rewrite.values.registry import NotCovered, is_source


class ProgramCache:
    """Holds properties of called programs, shared by all scopes of one rewrite.

    Attributes:
      repeated: identities of the programs that are called several times.
      table_rows: numbers of rows of the tables in which lookups were found.
      most_rows: lookups in tables with more rows stay as they are; None without a bound.
      has_constraints: whether the sharding of a deferred value is constrained.
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

"""What XLA counts of traced programs, which it compiles for this device."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from ikbo_jax.ops import explain
from ikbo_jax.ops.explain import Counts
from ikbo_jax.rewrite.report.products import steps_of
from ikbo_jax.rewrite.values.jaxprs import inner_programs


class Compiled:
    """Counts programs; XLA counts one step of a loop, which this class multiplies.

    Ops in XLA have loops, too, over the groups of candidates of a user.
    """

    def __init__(self) -> None:
        # By the identity of a program, what all of it costs, and with one step of each loop.
        self._known: dict[int, tuple[Counts, Counts]] = {}
        # Programs of loops' steps, whose identities others must not take.
        self._steps: dict[Any, Any] = {}

    def counts(self, program: core.Jaxpr) -> Counts:
        """Counts a program; raises an exception if XLA does not compile it for one device."""
        return self._counts(program)[0]

    def _counts(self, program: core.Jaxpr) -> tuple[Counts, Counts]:
        if id(program) not in self._known:
            others = [self._other_steps(x) for x in _scans(program)]
            once = explain.counted_by_xla(core.jaxpr_as_fun(program), *program.in_avals)
            self._known[id(program)] = Counts(*map(sum, zip(once, *others, strict=True))), once
        return self._known[id(program)]

    def _other_steps(self, scan: core.JaxprEqn) -> list[int]:
        """Counts all steps of a loop but those that XLA counts: one, or what is unrolled."""
        length, unroll = scan.params["length"], scan.params["unroll"]
        counted = min(length, unroll + length % unroll)
        found = [(n, *self._counts(x)) for n, x in steps_of(scan, self._steps)]
        return [
            sum([n * every[k] - min(n, counted) * once[k] for n, every, once in found])
            for k in range(len(Counts._fields))
        ]


def _scans(program: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the loops of a program, but those inside of others; XLA inlines loops of one step."""
    for eqn in program.eqns:
        if eqn.primitive.name in ("sharding_constraint", "shard_map"):
            raise ValueError("XLA counts the part of one device")
        if eqn.primitive.name == "scan" and eqn.params["length"] != 1:
            yield eqn
            continue
        for inner in inner_programs(eqn):
            yield from _scans(inner)

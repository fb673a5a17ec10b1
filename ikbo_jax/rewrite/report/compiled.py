"""What XLA counts of traced programs, which it compiles for this device."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from ikbo_jax.ops.explain import Counts, counted_by_xla
from ikbo_jax.rewrite.report.products import steps_of
from ikbo_jax.rewrite.values.jaxprs import inner_programs


def counts(program: core.Jaxpr, known: dict[Any, Any]) -> tuple[Counts, Counts]:
    """Counts a program with every step of its loops, and with one step of each, as XLA does.

    Ops in XLA have loops, too, over the groups of candidates of a user. Raises an exception if XLA
    does not compile the program for one device. `known` holds what was counted before.
    """
    key = "counts", id(program)
    if key not in known:
        others = [_other_steps(x, known) for x in _scans(program)]
        once = counted_by_xla(core.jaxpr_as_fun(program), *program.in_avals)
        known[key] = Counts(*map(sum, zip(once, *others, strict=True))), once
    found: tuple[Counts, Counts] = known[key]
    return found


def _other_steps(scan: core.JaxprEqn, known: dict[Any, Any]) -> list[int]:
    """Counts all steps of a loop but those that XLA counts: one, or what is unrolled."""
    length, unroll = scan.params["length"], scan.params["unroll"]
    counted = min(length, unroll + length % unroll)
    found = [(n, *counts(x, known)) for n, x in steps_of(scan, known)]
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

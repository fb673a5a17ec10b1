"""A cost model of traced programs: a rewritten program runs only if it does not cost more.

The costs are the floating-point operations of products, the bytes that kernels read and write, and
the number of kernels. On a CPU, `cpu_cost` counts the bytes of the report. The model of XLA's
fusion that decides which program runs, and that the report uses on a GPU:

- products, sorts, cumulative operations, scatters, cuDNN's attention, and calls of this library's
  ops are kernels that read their operands and write their results;
- elementwise operations, broadcasts, reshapes, slices, lookups, concatenations and transposes are
  computed where their results are read. Where a kernel of the first kind reads them, or the program
  returns them, they are a kernel that reads what they are made of, and writes the result;
- on a GPU, a product computes elementwise operations on its result, or on one operand; on other
  devices it does not;
- a reduction is a kernel that reads what its operand is made of; on other devices than GPUs, it
  reads lookups, concatenations and transposes that are written before;
- a lookup reads its indices, and the smaller one of its operand and its result: a small table stays
  in a cache;
- a `scan` costs its body times its length, a `while` loop its body once, a conditional its most
  expensive branch;
- work that the rewritten program does only for rare values of its inputs costs nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.report.cpu_cost import CpuCost
from ikbo_jax.rewrite.report.products import (
    ALONE,
    FUSED_PARTS,
    INLINED,
    LOOKUPS,
    MOVES,
    PARTS,
    RARE,
    REDUCTIONS,
    SAME,
    flops_of_op,
    flops_of_product,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: By how much a rewritten program may exceed its original: percent of the original's cost, plus the
#: cost that a GPU covers in the time of one launch.
_FLOPS_SLACK = (1, 1_000_000)
_BYTES_SLACK = (10, 1 << 18)
#: Operations that a CPU executes while it moves a byte: two cores of a server execute 60 GFLOP/s in
#: float32 and move 5 GB/s. MaskNet moves 24 % more bytes there, and takes 72 ms instead of 108.
_FLOPS_PER_BYTE = 12

_COUNTED = REDUCTIONS | PARTS
_NONE: frozenset[Any] = frozenset()


class Cost(NamedTuple):
    """Holds the cost of a program; expressions if its dimensions are symbolic.

    Attributes:
      flops: floating-point operations of products; a multiply-add counts as two.
      nbytes: bytes read and written.
      launches: kernels.
    """

    flops: int = 0
    nbytes: int = 0
    launches: int = 0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(x - y for x, y in zip(self, other, strict=True)))


_NOTHING = Cost()


def on_gpu() -> bool:
    """Whether programs are traced for a GPU."""
    return jax.default_backend() == "gpu"


def femtoseconds(cost: Cost) -> Any:
    """Estimates a program's time on an H200.

    The rates fit the times of 34 ranking models, bfloat16, within a third for most: 500 TFLOP/s,
    3.1 TB/s, and 2.5 us for each kernel, which small models mostly consist of.
    """
    # A symbolic dimension may be large: kernels count for nothing beside it.
    known = isinstance(cost.flops, int) and isinstance(cost.nbytes, int)
    return 2 * cost.flops + 323 * cost.nbytes + 2_500_000_000 * cost.launches * known


def refusal(new: Cost, old: Cost) -> str:
    """Says why a rewritten program costs too much to run; "" if it does not."""
    if _exceeds(new.flops, old.flops, _FLOPS_SLACK):
        return f"its products would take {_text(new.flops)} FLOP instead of {_text(old.flops)}"
    if not on_gpu():
        spared = _FLOPS_PER_BYTE * new.nbytes + new.flops, _FLOPS_PER_BYTE * old.nbytes + old.flops
        if _exceeds(new.nbytes, old.nbytes, _BYTES_SLACK) and _exceeds(*spared, (0, 0)):
            return f"it would move {_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
        return ""
    if lineage.is_at_least(95 * femtoseconds(old), 100 * femtoseconds(new)):
        return ""
    return (
        f"{LONGER} with {_text(new.launches)} kernels instead of {_text(old.launches)}, and "
        f"{_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
    )


#: Begins the reason of a program that takes as long, although its products take no longer.
LONGER = "it would take as long on a GPU:"


def _exceeds(new: Any, old: Any, slack: tuple[int, int]) -> bool:
    percent, amount = slack
    # Integers, since symbolic dimensions are compared with integers alone.
    return not lineage.is_at_least((100 + percent) * old + 100 * amount, 100 * new)


def _text(amount: Any) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)


def program_cost(program: Any) -> Cost:
    """Computes the cost of a traced program for the report."""
    return total(cost_by_source(program, ()))


def decisive_cost(program: Any) -> Cost:
    """Computes the cost that decides whether a program runs, at each trace, in half the time."""
    return total(_counted(program, (), {}, inlined=False).costs)


def cost_by_source(program: Any, sources: Container[int | None]) -> dict[int | None, Cost]:
    """Computes the cost of a traced program, by the tracebacks of its equations.

    Args:
      program: the program, or an object with its `eqns` and `outvars`.
      sources: identities of tracebacks.

    Returns:
      By identity of a traceback among `sources`, the cost of the equations with this traceback,
      and of the programs that they call, except equations there that have a traceback among
      `sources`. By None, the cost of all other equations.
    """
    if not on_gpu():
        return {key: Cost(*sum_) for key, sum_ in CpuCost(program, sources, {}).sums.items()}
    return _counted(program, sources, {}, inlined=False).costs


def total(costs: Mapping[Any, Cost]) -> Cost:
    """Adds the costs."""
    return Cost(*map(sum, zip(*costs.values(), strict=True)))


class _Fused(NamedTuple):
    """Describes a result of a program that is computed where it is read.

    Attributes:
      is_moved: whether elements are looked up, concatenated or transposed.
      nbytes: bytes that are then read of values inside the program.
      arguments: positions of the arguments that are then read.
    """

    is_moved: bool
    nbytes: int
    arguments: tuple[int, ...]


class _Counted(NamedTuple):
    """Holds the costs of a program by source, and how it fuses with its surroundings.

    Attributes:
      costs: the costs, by source.
      alone: of each argument, whether an operation that fuses with nothing reads it.
      fused: of each result, how it is computed; None if it is in memory.
    """

    costs: dict[int | None, Cost]
    alone: tuple[bool, ...] = ()
    fused: tuple[_Fused | None, ...] = ()


def _counted(
    program: Any, sources: Container[int | None], known: dict[Any, Any], *, inlined: bool
) -> _Counted:
    """Counts a program; `inlined` if XLA fuses its equations with what stands around the call."""
    key = id(program), inlined
    if key in known:
        found: _Counted = known[key]
        return found
    without, rare = explain.WITHOUT_PROGRAMS, RARE
    walk = _Walk(sources, known)
    alone, calls = walk.alone, walk.calls
    if not inlined:
        alone.update([v for v in program.outvars if type(v) is not core.Literal])
    for eqn in program.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in without:
            if name in ALONE:
                alone.update([v for v in eqn.invars if type(v) is not core.Literal])
            elif name in REDUCTIONS and walk.is_cpu:
                walk.reduced |= {v for v in eqn.invars if type(v) is not core.Literal}
            elif name == "concatenate" and walk.is_cpu and len(eqn.invars) > FUSED_PARTS:
                alone.update(eqn.outvars)
            continue
        inner = inner_programs(eqn)
        of_op = name == "jit" and params["name"] in OPS
        if inner and not of_op and ("name" not in params or params["name"] not in rare):
            is_inlined = name in INLINED
            calls[id(eqn)] = [_counted(x, sources, known, inlined=is_inlined) for x in inner]
            if is_inlined:
                read = zip(eqn.invars, calls[id(eqn)][0].alone, strict=True)
                alone.update([v for v, x in read if x and type(v) is not core.Literal])
                continue
        if inner or name in ALONE:
            alone.update([v for v in eqn.invars if type(v) is not core.Literal])
    walk.run(program.eqns)
    counted = _Counted({source: Cost(*sum_) for source, sum_ in walk.sums.items()})
    if inlined:
        arguments = {v: n for n, v in enumerate(program.invars)}
        counted = counted._replace(
            alone=tuple([v in alone for v in program.invars]),
            fused=tuple([walk.fused(v, arguments) for v in program.outvars]),
        )
    known[key] = counted
    return counted


class _Walk:
    """Adds up the costs of a program's equations.

    Attributes:
      sums: FLOPs, bytes and launches by source.
      alone: variables that an operation reads which fuses with nothing.
      reduced: variables that reductions read, on a CPU, which computes no moved ones there.
      calls: counted programs of equations, by the equations' identity.
      reads: for every variable that is computed where it is read, what is then read: variables in
        memory, and pairs of a variable and the bytes that a program reads to compute it.
      moved: those of `reads` whose elements are looked up, concatenated or transposed.
      same: those of `reads` that have the elements of one value in memory.
    """

    def __init__(self, sources: Any, known: dict[Any, Any]) -> None:
        self.sources, self.known = sources, known
        self.sums: dict[int | None, list[int]] = {}
        self.is_cpu = not on_gpu()
        self.alone: set[Any] = set()
        self.reduced: set[Any] = set()
        self.calls: dict[int, list[_Counted]] = {}
        self.reads: dict[Any, frozenset[Any]] = {}
        self.moved: set[Any] = set()
        self.same: set[Any] = set()

    def run(self, eqns: Any) -> None:
        """Counts equations. Elementwise ones, which most are, take no call of a function."""
        reads, moved, same, reduced = self.reads, self.moved, self.same, self.reduced
        alone, alone_names = self.alone, ALONE
        counted, elementwise = _COUNTED, explain.WITHOUT_PROGRAMS | SAME
        for eqn in eqns:
            name = eqn.primitive.name
            if name in alone_names:
                nbytes = self.bytes_of((*eqn.invars, *eqn.outvars))
                self.add(eqn, flops_of_product(eqn), nbytes, 1)
                continue
            if name in counted or name not in elementwise:
                self.count(eqn, name)
                continue
            read, is_moved = _NONE, name in MOVES
            for v in eqn.invars:
                if type(v) is core.Literal:
                    continue
                if v in reads:
                    read = read | reads[v]
                    is_moved = is_moved or v in moved
                else:
                    read = read | {v}
            is_same = name in SAME and (v not in reads or v in same)
            for v in eqn.outvars:
                if v in alone and not is_same or v in reduced:
                    self.place(eqn, v, read, is_moved)
                    continue
                reads[v] = read
                if is_moved:
                    moved |= {v}
                if is_same:
                    same |= {v}

    def add(
        self, eqn: core.JaxprEqn, flops: int, nbytes: int, launches: int = 0, key: int | None = None
    ) -> None:
        """Adds the cost of an equation, or of a traceback of a program that it holds."""
        source: int | None = id(eqn.source_info.traceback) if key is None else key
        if source not in self.sources:
            source = None
        if source in self.sums:
            sum_ = self.sums[source]
            sum_[0] += flops
            sum_[1] += nbytes
            sum_[2] += launches
        else:
            self.sums[source] = [flops, nbytes, launches]

    def count(self, eqn: core.JaxprEqn, name: str) -> None:
        """Counts an equation that is not elementwise."""
        known, params = self.known, eqn.params
        if name in REDUCTIONS:
            self.add(eqn, 0, self.bytes_of((*self._read_of(eqn.invars), *eqn.outvars)), 1)
        elif id(eqn) in self.calls:
            self._call(eqn, name, self.calls[id(eqn)])
        elif (flops := flops_of_op(eqn, known)) is not None:
            self.add(eqn, flops, self.bytes_of((*eqn.invars, *eqn.outvars)), 1)
        elif name in PARTS:
            # A part of a value is read alone; a table with fewer rows than are looked up is cached.
            table = self._read_of(eqn.invars[:1])
            if name in LOOKUPS:
                self.add(eqn, 0, self.bytes_of(eqn.invars[1:2]))
            for v in eqn.outvars:
                is_table = name in LOOKUPS and lineage.is_at_least(
                    self.bytes_of((v,)), self.bytes_of(eqn.invars[:1])
                )
                self.place(eqn, v, table if is_table else frozenset([v]), name in MOVES)
        elif params.get("name") not in RARE:
            for v in eqn.outvars:
                self.place(eqn, v, self._read_of(eqn.invars), is_moved=False)

    def _call(self, eqn: core.JaxprEqn, name: str, calls: list[_Counted]) -> None:
        """Counts an equation that holds programs."""
        times = eqn.params["length"] if name == "scan" else 1
        costs = [x.costs for x in calls]
        for found in [_dearest(costs)] if name == "cond" else costs:
            for key, x in found.items():
                self.add(eqn, times * x.flops, times * x.nbytes, times * x.launches, key)
        for v, fused in zip(eqn.outvars, calls[0].fused, strict=False):
            if fused is not None:
                operands = [eqn.invars[n] for n in fused.arguments]
                read = self._read_of(operands) | ({(v, fused.nbytes)} if fused.nbytes else _NONE)
                is_moved = fused.is_moved or any(
                    x in self.moved for x in operands if type(x) is not core.Literal
                )
                self.place(eqn, v, read, is_moved)

    def fused(self, v: Any, arguments: Mapping[Any, int]) -> _Fused | None:
        """Says how a result of the program is computed."""
        if type(v) is core.Literal or v not in self.reads or v in self.same:
            return None
        read = self.reads[v]
        inside = [x for x in read if x not in arguments]
        at = tuple([arguments[x] for x in read if x in arguments])
        return _Fused(v in self.moved, self.bytes_of(inside), at)

    def _read_of(self, operands: Any) -> frozenset[Any]:
        read = _NONE
        for v in operands:
            if type(v) is not core.Literal:
                read = read | self.reads.get(v, {v})
        return read

    def bytes_of(self, read: Any) -> int:
        """Adds up the bytes of variables, and of pairs of a variable and bytes."""
        total, known = 0, self.known
        for x in read:
            if type(x) is tuple:
                total += x[1]
            elif type(x) is not core.Literal:
                aval = x.aval
                try:
                    key = aval.shape, aval.dtype
                except AttributeError:
                    continue
                if key not in known:
                    known[key] = lineage.bytes_of(*key)
                total += known[key]
        return total

    def place(self, eqn: core.JaxprEqn, v: Any, read: frozenset[Any], is_moved: bool) -> None:
        """Records what is read to compute a result of an equation, or that it is written."""
        if (
            v in self.reduced
            and is_moved
            or (v in self.alone and (is_moved or not self._is_free(v, read)))
        ):
            self.add(eqn, 0, self.bytes_of((*read, v)), 1)
            return
        self.reads[v] = read
        if is_moved:
            self.moved.add(v)

    def _is_free(self, v: Any, read: frozenset[Any]) -> bool:
        """Whether a product on a GPU computes a result, of one large value."""
        if self.is_cpu:
            return False
        size = self.bytes_of((v,))
        large = [x for x in read if lineage.is_at_least(8 * self.bytes_of([x]), size)]
        return len(large) == 1


def _dearest(branches: list[dict[int | None, Cost]]) -> dict[int | None, Cost]:
    """Returns the FLOPs of the branch with most FLOPs, and the bytes of the one with most bytes."""
    flops = lineage.largest(branches, lambda x: total(x).flops)
    nbytes = lineage.largest(branches, lambda x: total(x).nbytes)
    return {
        key: flops.get(key, _NOTHING)._replace(nbytes=nbytes.get(key, _NOTHING).nbytes)
        for key in flops | nbytes
    }

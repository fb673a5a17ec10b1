"""A cost model of traced programs: a rewritten program runs only if it does not cost more.

The costs are the floating-point operations of products, the bytes that kernels read and write, and
the number of kernels, by the model in docs/rewrite.md, which counts the kernels that a GPU runs. On
a CPU, where to compile a program takes little time, XLA counts the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ikbo_jax.ops import explain, target
from ikbo_jax.rewrite.report import compiled
from ikbo_jax.rewrite.report.products import (
    ALONE,
    INLINED,
    LOOKUPS,
    MANY_PARTS,
    MOVES,
    PARTS,
    REDUCTIONS,
    SAME,
    SELECTED_BYTES,
    Sums,
    bytes_of,
    bytes_of_repeats,
    bytes_of_selection,
    cost_of_op,
    flops_of_product,
    is_of_vectors,
    sums_of_calls,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: By how much the products of a rewritten program may exceed the original's: percent, and the
#: operations that a GPU covers in the time of one launch.
_FLOPS_SLACK = (1, 1_000_000)
#: On a CPU, a program runs that saves this part of the time by the quicker count. Of 885 programs,
#: XLA then counts 315; of the others, 9 take over 1.05 of the original's time by XLA's bytes.
_CLEAR_PERCENT = 20

_ELEMENTWISE = (explain.WITHOUT_PROGRAMS | SAME) - REDUCTIONS - PARTS
_NONE: frozenset[Any] = frozenset()


class Cost(NamedTuple):
    """Holds the cost of a program; expressions if its dimensions are symbolic.

    Attributes:
      flops: floating-point operations of products (all, where XLA counts); a multiply-add is two.
      nbytes: bytes read and written.
      launches: kernels; 0 where XLA counts.
    """

    flops: int = 0
    nbytes: int = 0
    launches: int = 0


def on_gpu() -> bool:
    """Whether programs are traced for a GPU, or for one that `export_target` names."""
    return target.current() is not None or jax.default_backend() == "gpu"


class _Device(NamedTuple):
    """Holds the rates of a device, and what a rewritten program must save of the original's time.

    Attributes:
      flop, byte, kernel: femtoseconds of each.
      percent: the most that a rewritten program may take, in percent of the original's time.
      slack: femtoseconds that it may take besides.
    """

    name: str
    flop: int
    byte: int
    kernel: int
    percent: int
    slack: int


#: The rates fit the times of 34 ranking models on an H200, bfloat16, within a third for most: 500
#: TFLOP/s, 3.1 TB/s, and 2.5 us for each kernel, which small models mostly consist of.
_GPU = _Device("GPU", 2, 323, 2_500_000_000, 92, 0)
#: Programs of up to 160 us find much of what they read in the L2 cache, at 7.7 TB/s. The times of
#: 278 are 0.83 of the estimates by `_GPU`, and 1.20 of those by these rates, on average (H200).
_SHORT, _GPU_SHORT = 160_000_000_000, _GPU._replace(byte=130, kernel=2_000_000_000, percent=93)
#: Two cores of a server execute 60 GFLOP/s in float32 and move 5 GB/s. MaskNet moves 24 % more
#: bytes there, and takes 72 ms instead of 108. Wukong in float32, whose time should be 98 %, took
#: 1.1 to 1.3 times as long.
_CPU = _Device("CPU", 16_667, 200_000, 0, 97, 50_000_000_000)


def femtoseconds(cost: Cost, device: _Device | None = None) -> Any:
    """Estimates a program's time, on an H200 or on two cores of a CPU."""
    device = device or (_GPU if on_gpu() else _CPU)
    # A symbolic dimension may be large: kernels count for nothing beside it.
    known = isinstance(cost.flops, int) and isinstance(cost.nbytes, int)
    kernels = cost.launches * known
    return device.flop * cost.flops + device.byte * cost.nbytes + device.kernel * kernels


def refusal(new: Cost, old: Cost) -> str:
    """Says why a rewritten program costs too much to run; "" if it does not."""
    percent, flops = _FLOPS_SLACK
    # Integers, since symbolic dimensions are compared with integers alone.
    if not lineage.is_at_least((100 + percent) * old.flops + 100 * flops, 100 * new.flops):
        return f"{PRODUCTS} {_text(new.flops)} FLOP instead of {_text(old.flops)}"
    device = _GPU if on_gpu() else _CPU
    is_short = device is _GPU and lineage.is_at_least(_SHORT, femtoseconds(old, _GPU))
    if _saves(new, old, device) and (not is_short or _saves(new, old, _GPU_SHORT)):
        return ""
    kinds = (new.launches, old.launches, "kernels"), (new.flops, old.flops, "FLOP")
    ours, theirs, unit = kinds[not device.kernel]
    return (
        f"{LONGER} {device.name}: with {_text(ours)} {unit} instead of {_text(theirs)}, and "
        f"{_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
    )


def _saves(new: Cost, old: Cost, device: _Device) -> bool:
    allowed = device.percent * femtoseconds(old, device) + 100 * device.slack
    return lineage.is_at_least(allowed, 100 * femtoseconds(new, device))


def takes_longer(new: Cost, old: Cost) -> bool:
    """Whether a GPU computes more products, or takes half as long again."""
    if not on_gpu():
        return False
    # Of 17 programs that take up to 1.4 of the time, no derivative was slower (H200, bfloat16).
    is_longer = lineage.is_at_least(2 * femtoseconds(new), 3 * femtoseconds(old))
    return is_longer or refusal(new, old).startswith(PRODUCTS)


def saves_lookups_alone(new: Cost, old: Cost, has_gathers: bool) -> bool:
    """Whether a GPU computes nearly the same products, and saves less than three kernels besides.

    What is saved are lookups, whose gradient in float32 is a scatter that XLA fuses with what it
    adds, or products with one-hot vectors, whose gradient is a product. Sums by user take more
    kernels: three small networks took 61 -> 64, 70 -> 82 and 81 -> 85 us on an H200 with their
    gradient, although their values took 16, 5 and 20 % less time. Without gathers, so that no
    gradient is a scatter, one that saves three quarters of the products took 85 -> 94 us.
    """
    if not on_gpu() or has_gathers and not lineage.is_at_least(10 * new.flops, 9 * old.flops):
        return False
    saved = _GPU.flop * (old.flops - new.flops) + _GPU.byte * (old.nbytes - new.nbytes)
    return lineage.is_at_least((3 if has_gathers else 6) * _GPU.kernel, saved)


#: These begin the reasons of programs that do not run.
LONGER, PRODUCTS = "it would take as long on a", "its products would take"


def _text(amount: Any) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)


def program_cost(program: Any) -> Cost:
    """Counts the kernels that a GPU runs of a traced program."""
    return Cost(*_counted(program, {}).sums)


def reported_costs(original: Any, rewritten: Any, *, known: dict[Any, Any]) -> list[Cost]:
    """Computes the costs of two programs for the report: on a CPU, as XLA counts them."""
    programs = original, rewritten
    return _costs_by_xla(programs, known) or [program_cost(x) for x in programs]


def decisive_costs(original: Any, rewritten: Any, *, known: dict[Any, Any]) -> list[Cost]:
    """Computes the costs that decide which of two programs runs, at each trace.

    On a CPU, most rewritten programs save so much, or are so small, that the kernels of a GPU
    decide, which take a hundredth of the time of a compilation to count.
    """
    costs = [program_cost(x) for x in (original, rewritten)]
    if not _is_clear(*costs) and (by_xla := _costs_by_xla((original, rewritten), known)):
        # XLA's path of an op computes groups of candidates that are padded; useful FLOPs decide.
        return [x._replace(nbytes=y.nbytes) for x, y in zip(costs, by_xla, strict=True)]
    return costs


def _is_clear(old: Cost, new: Cost) -> bool:
    """Whether a CPU need not compile programs to decide.

    An op with as many FLOPs may move more bytes in XLA than its operands and its result have.
    """
    before, after = femtoseconds(old, _CPU), femtoseconds(new, _CPU)
    allowed = (100 - _CLEAR_PERCENT) * before + 50 * _CPU.slack
    return lineage.is_at_least(allowed, 100 * after) and (
        lineage.is_at_least(_CPU.slack, 2 * after)
        or lineage.is_at_least(9 * old.flops, 10 * new.flops)
    )


def _costs_by_xla(programs: Sequence[Any], known: dict[Any, Any]) -> list[Cost]:
    """Returns what XLA counts of programs for a CPU; [] on a GPU, or if it cannot compile them."""
    try:
        return [] if on_gpu() else [Cost(*compiled.counts(x, known)[0]) for x in programs]
    except Exception:
        # They have kernels of a GPU, symbolic dimensions, or are divided over devices.
        return []


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
    """Holds the costs of a program, and how it fuses with its surroundings.

    Attributes:
      sums: FLOPs, bytes and launches.
      alone: of each argument, whether an operation that fuses with nothing reads it.
      fused: of each result, how it is computed; None if it is in memory.
    """

    sums: Sums
    alone: tuple[bool, ...] = ()
    fused: tuple[_Fused | None, ...] = ()


def _counted(program: Any, known: dict[Any, Any], *, inlined: bool = False) -> _Counted:
    """Counts a program; `inlined` if XLA fuses its equations with what stands around the call."""
    key = id(program), inlined
    if key in known:
        found: _Counted = known[key]
        return found
    without = explain.WITHOUT_PROGRAMS
    walk = _Walk(known)
    alone, calls = walk.alone, walk.calls
    if not inlined:
        alone.update([v for v in program.outvars if type(v) is not core.Literal])
    for eqn in program.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in without:
            if name in ALONE and not is_of_vectors(eqn):
                alone.update([v for v in eqn.invars if type(v) is not core.Literal])
            continue
        inner = inner_programs(eqn)
        of_op = name == "jit" and params["name"] in OPS
        if inner and not of_op:
            calls[id(eqn)] = ()
            if name in INLINED:
                counted = _counted(inner[0], known, inlined=True)
                calls[id(eqn)] = counted.fused
                read = zip(eqn.invars, counted.alone, strict=True)
                alone.update([v for v, x in read if x and type(v) is not core.Literal])
                continue
        if inner or name in ALONE:
            alone.update([v for v in eqn.invars if type(v) is not core.Literal])
    walk.run(program.eqns)
    counted = _Counted(walk.sums)
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
      sums: FLOPs, bytes and launches.
      alone: variables that an operation reads which fuses with nothing.
      calls: by the identity of an equation that holds programs, how its results are computed.
      reads: for every variable that is computed where it is read, what is then read: variables in
        memory, and pairs of a variable and the bytes that a program reads to compute it.
      moved: those of `reads` whose elements are looked up, concatenated or transposed.
      same: those of `reads` that have the elements of one value in memory.
      broadcasts: by identity of the result, equations that broadcast.
    """

    def __init__(self, known: dict[Any, Any]) -> None:
        self.known = known
        self.sums: Sums = [0, 0, 0]
        self.alone: set[Any] = set()
        self.calls: dict[int, Sequence[_Fused | None]] = {}
        self.reads: dict[Any, frozenset[Any]] = {}
        self.moved: set[Any] = set()
        self.same: set[Any] = set()
        self.broadcasts: dict[int, core.JaxprEqn] = {}

    def run(self, eqns: Any) -> None:
        """Counts equations. Elementwise ones, which most are, take no call of a function."""
        reads, moved, same = self.reads, self.moved, self.same
        alone, alone_names, elementwise = self.alone, ALONE, _ELEMENTWISE
        for eqn in eqns:
            name = eqn.primitive.name
            if name in alone_names:
                operands = self._read_of(eqn.invars) if is_of_vectors(eqn) else eqn.invars
                nbytes = self.bytes_of((*operands, *eqn.outvars))
                self.add(flops_of_product(eqn), nbytes, 1)
                continue
            if name not in elementwise:
                self.count(eqn, name)
                continue
            if name == "concatenate" and eqn.invars[MANY_PARTS - 1 :]:
                self.sums[1] += SELECTED_BYTES * math.prod(eqn.outvars[0].aval.shape)
            elif name == "broadcast_in_dim":
                self.broadcasts[id(eqn.outvars[0])] = eqn
            elif name == "reshape" and (found := self.broadcasts.get(id(eqn.invars[0]))):
                self.sums[1] += bytes_of_repeats(found, eqn)
            read, is_moved = _NONE, name in MOVES
            for v in eqn.invars:
                if type(v) is core.Literal:
                    continue
                if v in reads:
                    read = read | reads[v]
                    is_moved = is_moved or v in moved
                else:
                    read = read | {v}
            is_same = name in SAME and (type(v) is core.Literal or v not in reads or v in same)
            for v in eqn.outvars:
                if v in alone and not is_same:
                    self.place(v, read, is_moved)
                    continue
                reads[v] = read
                if is_moved:
                    moved |= {v}
                if is_same:
                    same |= {v}

    def add(self, flops: int, nbytes: int, launches: int = 0) -> None:
        """Adds the cost of an equation."""
        sums = self.sums
        sums[0] += flops
        sums[1] += nbytes
        sums[2] += launches

    def count(self, eqn: core.JaxprEqn, name: str) -> None:
        """Counts an equation that is not elementwise."""
        known, params = self.known, eqn.params
        if name in REDUCTIONS:
            self.add(0, self.bytes_of((*self._read_of(eqn.invars), *eqn.outvars)), 1)
        elif id(eqn) in self.calls:
            self._call(eqn, name, self.calls[id(eqn)])
        elif name == "jit" and (cost := cost_of_op(eqn, known)) is not None:
            self.add(cost[0], self.bytes_of((*eqn.invars, *eqn.outvars)), cost[1])
        elif name in PARTS:
            # A part of a value is read alone; a table with fewer rows than are looked up is cached.
            table = self._read_of(eqn.invars[:1])
            if name in LOOKUPS:
                self.sums[1] += self.bytes_of(eqn.invars[1:2])
                if name == "gather" or params["how"].axis:
                    self.sums[1] += bytes_of_selection(eqn)
            for v in eqn.outvars:
                is_table = name in LOOKUPS and lineage.is_at_least(
                    self.bytes_of((v,)), self.bytes_of(table)
                )
                self.place(v, table if is_table else frozenset([v]), name in MOVES)
        else:
            for v in eqn.outvars:
                self.place(v, self._read_of(eqn.invars), is_moved=False)

    def _call(self, eqn: core.JaxprEqn, name: str, results: Sequence[_Fused | None]) -> None:
        """Counts an equation that holds programs; `results`: what fuses with its readers."""

        def count(program: Any) -> Sums:
            return _counted(program, self.known, inlined=name in INLINED).sums

        self.add(*sums_of_calls(eqn, self.known, count))
        for v, fused in zip(eqn.outvars, results, strict=False):
            if fused is not None:
                operands = [eqn.invars[n] for n in fused.arguments]
                read = self._read_of(operands) | ({(v, fused.nbytes)} if fused.nbytes else _NONE)
                is_moved = fused.is_moved or any(
                    x in self.moved for x in operands if type(x) is not core.Literal
                )
                self.place(v, read, is_moved)

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
        total = 0
        for x in read:
            if type(x) is tuple:
                total += x[1]
            elif type(x) is not core.Literal:
                aval = x.aval
                try:
                    total += bytes_of(aval.shape, aval.dtype)
                except AttributeError:
                    continue
        return total

    def place(self, v: Any, read: frozenset[Any], is_moved: bool) -> None:
        """Records what is read to compute a result, or that it is written."""
        if v in self.alone and (is_moved or not self._is_free(v, read)):
            self.add(0, self.bytes_of((*read, v)), 1)
            return
        self.reads[v] = read
        if is_moved:
            self.moved.add(v)

    def _is_free(self, v: Any, read: frozenset[Any]) -> bool:
        """Whether a product computes a result, of one large value."""
        size, sizes = self.bytes_of((v,)), [8 * self.bytes_of((x,)) for x in read]
        if isinstance(sum(sizes, size), int):
            return sum([x >= size for x in sizes]) == 1
        return sum([lineage.is_at_least(x, size) for x in sizes]) == 1

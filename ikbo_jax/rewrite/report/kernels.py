"""Counts what a GPU runs of a traced program: FLOPs, bytes, kernels, and the time of its products.

XLA fuses elementwise operations with what reads them, and computes equal equations once. The model
is described in docs/rewrite.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ikbo_jax.ops import explain, target
from ikbo_jax.rewrite.report.products import (
    ALONE,
    INLINED,
    LOOKUPS,
    MOVES,
    PARTS,
    REDUCTIONS,
    SAME,
    Sums,
    bytes_of,
    bytes_of_concatenation,
    bytes_of_repeats,
    bytes_of_selection,
    cost_of_op,
    flops_of_product,
    is_of_vectors,
    sums_of_calls,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.equations import identity
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: Femtoseconds of a byte, at 3.1 TB/s.
BYTE = 323
#: Femtoseconds of two FLOPs of a product, of operands of 16 bits (667 TFLOP/s) and of others.
_TWO_FLOPS = 3, 8
_ELEMENTWISE = (explain.WITHOUT_PROGRAMS | SAME) - REDUCTIONS - PARTS
_NONE: frozenset[Any] = frozenset()


def on_gpu() -> bool:
    """Whether programs are traced for a GPU, or for one that `export_target` names."""
    return target.current() is not None or jax.default_backend() == "gpu"


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
      sums: as `Sums` says.
      alone: of each argument, whether an operation that fuses with nothing reads it.
      fused: of each result, how it is computed; None if it is in memory.
    """

    sums: Sums
    alone: tuple[bool, ...] = ()
    fused: tuple[_Fused | None, ...] = ()


def sums_of(program: Any) -> Sums:
    """Counts FLOPs, bytes, kernels, and femtoseconds of `Cost.computing`."""
    return _counted(program, {}).sums


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
      sums: as `Sums` says.
      alone: variables that an operation reads which fuses with nothing.
      calls: by the identity of an equation that holds programs, how its results are computed.
      reads: for every variable that is computed where it is read, what is then read: variables in
        memory, and pairs of a variable and the bytes that a program reads to compute it.
      moved: those of `reads` whose elements are looked up, concatenated or transposed.
      same: those of `reads` that have the elements of one value in memory.
      broadcasts: by identity of the result, equations that broadcast.
      first: the variable that holds a result's value already, where XLA computes both at once.
      computed: the first equation of each computation.
    """

    def __init__(self, known: dict[Any, Any]) -> None:
        self.known = known
        self.is_gpu = on_gpu()
        self.sums: Sums = [0, 0, 0, 0]
        self.alone: set[Any] = set()
        self.calls: dict[int, Sequence[_Fused | None]] = {}
        self.reads: dict[Any, frozenset[Any]] = {}
        self.moved: set[Any] = set()
        self.same: set[Any] = set()
        self.broadcasts: dict[int, core.JaxprEqn] = {}
        self.first: dict[Any, Any] = {}
        self.computed: dict[Any, core.JaxprEqn] = {}

    def run(self, eqns: Any) -> None:
        """Counts equations. On a CPU, elementwise ones, which most are, take no function call."""
        reads, moved, same = self.reads, self.moved, self.same
        alone, alone_names, elementwise = self.alone, ALONE, _ELEMENTWISE
        for eqn in eqns:
            name = eqn.primitive.name
            if self.is_gpu and self._is_repeated(eqn):
                continue
            if name in alone_names:
                operands = self._read_of(eqn.invars) if is_of_vectors(eqn) else eqn.invars
                self._product(eqn, flops_of_product(eqn), operands, 1)
                continue
            if name not in elementwise:
                self.count(eqn, name)
                continue
            if name == "broadcast_in_dim":
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
            if name == "concatenate" and self.is_gpu:
                read = read | {(eqn.outvars[0], bytes_of_concatenation(eqn))}
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

    def _is_repeated(self, eqn: core.JaxprEqn) -> bool:
        """Whether XLA computes an equation's results at once with an earlier one's.

        A model that normalises its input for each of three products does so once.
        """
        operands = tuple(
            [
                (identity(v.val), v.aval) if type(v) is core.Literal else self.first.get(v, v)
                for v in eqn.invars
            ]
        )
        try:
            key = (eqn.primitive, operands, tuple(eqn.params.items()))
            earlier = self.computed.setdefault(key, eqn)
        except TypeError:
            return False
        if earlier is eqn or eqn.effects:
            return False
        for v, first in zip(eqn.outvars, earlier.outvars, strict=True):
            self.first[v] = first
            if first not in self.reads:
                self.reads[v] = frozenset([first])
                self.same.add(v)
            else:
                self.place(v, self.reads[first], first in self.moved)
        return True

    def add(self, flops: int, nbytes: int, launches: int = 0, computing: int = 0) -> None:
        """Adds the cost of an equation."""
        for n, x in enumerate((flops, nbytes, launches, computing)):
            self.sums[n] += x

    def _product(self, eqn: core.JaxprEqn, flops: int, arrays: Any, launches: int) -> None:
        """Adds the cost of a product that reads these arrays."""
        nbytes, computing = self.bytes_of((*arrays, *eqn.outvars)), 0
        if flops and self.is_gpu:
            dtype: Any = eqn.invars[0].aval.dtype  # type: ignore[attr-defined]
            time, moving = _TWO_FLOPS[dtype.itemsize != 2] * flops // 2, BYTE * nbytes
            computing = time - moving if lineage.is_at_least(time, moving) else 0
        self.add(flops, nbytes, launches, computing)

    def count(self, eqn: core.JaxprEqn, name: str) -> None:
        """Counts an equation that is not elementwise."""
        known, params = self.known, eqn.params
        if name in REDUCTIONS:
            self.add(0, self.bytes_of((*self._read_of(eqn.invars), *eqn.outvars)), 1)
        elif id(eqn) in self.calls:
            self._call(eqn, name, self.calls[id(eqn)])
        elif name == "jit" and (cost := cost_of_op(eqn, known)) is not None:
            self._product(eqn, cost[0], eqn.invars, cost[1])
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

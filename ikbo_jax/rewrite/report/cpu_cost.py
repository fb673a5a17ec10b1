"""The cost of a traced program on a CPU, where a library fuses reductions with what surrounds them.

XLA builds kernels of a program in two steps. The library YNNPACK takes every product alone. But a
reduction of at least 4,096 elements grows: elementwise operations, products and other reductions
join it as long as one kernel reads them, such as a norm with the product before and after it, or
a softmax with both products of an attention. XLA's own loops compute everything else where it is
read: by a loop directly, by a kernel of the library from memory.
"""

import collections
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ikbo_jax.rewrite.report.products import (
    ALONE,
    FUSED_PARTS,
    INLINED,
    LOOKUPS,
    MOVES,
    RARE,
    REDUCTIONS,
    SAME,
    flops_of_op,
    flops_of_product,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

_VIEWS = SAME - {"convert_element_type"}
#: Operations that the library computes, in these dtypes, and the elements from which on it does.
_POINTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp exp2 expm1 floor integer_pow log
    log1p logistic max min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()  # noqa: SIM905  A table of words reads better.
)
_FLOATS = ("float32", "bfloat16", "float64")
_ELEMENTS = 4096
#: A loop does not repeat these where several loops read the result.
_EXPENSIVE = LOOKUPS | frozenset(
    """
    argmax argmin cbrt concatenate div erf erf_inv exp exp2 expm1 log log1p logistic pow rem rsqrt
    sqrt tanh
    """.split()  # noqa: SIM905
)
_PARTS = frozenset(["dynamic_slice", "slice", "split"])
#: Concatenations along the last axis are written from this width on.
_FUSED_WIDTH = 128


class _Kernel(NamedTuple):
    """Describes what reads a value: a kernel that computes its operands ("loop"), a kernel of the
    library, one that fuses with nothing ("alone"), or what needs the value in memory ("memory").
    """

    kind: str
    source: int | None = None


#: The readers of the program's results, and of slices, whose bytes are counted by slice.
_MEMORY, _SLICE = 0, 1


class _Op(NamedTuple):
    """Holds an equation, its operands and results by number, and how XLA computes it."""

    eqn: core.JaxprEqn
    kind: str
    operands: list[int]
    results: list[int]
    source: int | None


class CpuCost:
    """Adds up the costs of a program.

    Attributes:
      sums: FLOPs, bytes and kernels by source.
    """

    def __init__(self, program: Any, sources: Container[int | None], known: dict[Any, Any]) -> None:
        self.sources, self.known = sources, known
        self.sums: dict[int | None, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
        self._kernels = [_Kernel("memory"), _Kernel("loop")]
        self._values: list[Any] = []
        self._ops: list[_Op] = []
        # The kernels that read each value.
        self._readers: dict[int, frozenset[int]] = collections.defaultdict(frozenset)
        for n in self._flatten(program, {}, None):
            self._readers[n] = frozenset([_MEMORY])
        self._count()

    def _number(self, v: Any) -> int:
        self._values.append(v)
        return len(self._values) - 1

    def _flatten(self, program: Any, numbers: dict[Any, int], caller: int | None) -> list[int]:
        """Lists the operations of a program and of the calls that XLA inlines."""
        literal = core.Literal
        for eqn in program.eqns:
            name, params = eqn.primitive.name, eqn.params
            source: int | None = id(eqn.source_info.traceback)
            if source not in self.sources:
                source = caller
            operands = [self._operand(v, numbers) for v in eqn.invars if type(v) is not literal]
            if name in INLINED and params.get("name") not in (*OPS, *RARE):
                inner = inner_programs(eqn)[0]
                given = [self._operand(v, numbers) for v in eqn.invars]
                numbers_in = dict(zip(inner.invars, given, strict=True))
                numbers.update(
                    zip(eqn.outvars, self._flatten(inner, numbers_in, source), strict=True)
                )
                continue
            if params.get("name") in RARE:
                operands = []
            results = [self._number(v) for v in eqn.outvars]
            numbers.update(zip(eqn.outvars, results, strict=True))
            kind = self._kind(eqn, name)
            if name == "split":
                for v, n in zip(eqn.outvars, results, strict=True):
                    self._ops.append(_Op(eqn.replace(outvars=[v]), kind, operands, [n], source))
                continue
            self._ops.append(_Op(eqn, kind, operands, results, source))
        return [self._operand(v, numbers) for v in program.outvars]

    def _operand(self, v: Any, numbers: dict[Any, int]) -> int:
        if type(v) is core.Literal or v not in numbers:
            number = self._number(v)
            if type(v) is not core.Literal:
                numbers[v] = number
            return number
        return numbers[v]

    def _kind(self, eqn: core.JaxprEqn, name: str) -> str:
        if name in _VIEWS or name == "broadcast_in_dim":
            return "view" if name in _VIEWS else "broadcast"
        if name == "dot_general":
            return _kind_of_product(eqn)
        if name in REDUCTIONS:
            return "reduction" if _library_reduces(eqn, name) else "loop"
        if name in ALONE or name == "concatenate" and _is_written(eqn):
            return "alone"
        if inner_programs(eqn):
            return "call"
        return "pointwise" if name in _POINTWISE and _is_in_library(eqn) else "loop"

    def _grown(self) -> set[int]:
        """Returns the results of operations that join a reduction of the library."""
        groups: dict[int, int] = {}
        users: dict[int, set[int]] = collections.defaultdict(set)
        for n in self._readers:
            users[n].add(-1)
        reducing = set()
        for number, op in enumerate(reversed(self._ops)):
            seen = set().union(*[users[n] for n in op.results])
            if op.kind in ("view", "broadcast"):
                group = seen
            elif op.kind in ("product", "reduction", "pointwise"):
                joins = len(seen) == 1 and -1 not in seen
                group = seen if joins else {number}
                groups[op.results[0]] = next(iter(group))
                if op.kind == "reduction":
                    reducing |= group
            else:
                group = {-1}
            for n in op.operands:
                users[n] |= group
        return {n for n, group in groups.items() if group in reducing}

    def _count(self) -> None:
        """Finds the kernels, from the results on, and adds up what they read and write."""
        grown, kernels = self._grown(), self._kernels
        makers = {n: op for op in self._ops for n in op.results}
        for op in reversed(self._ops):
            if flops := flops_of_product(op.eqn):
                self.sums[op.source][0] += flops
            readers = frozenset().union(*[self._readers[n] for n in op.results])
            if not readers:
                continue
            kinds = {kernels[n].kind for n in readers}
            is_grown = op.results[0] in grown
            inside = (is_grown or op.kind == "broadcast") and kinds == {"library"}
            inside = inside and len(readers) == 1
            if op.kind == "view":
                # A loop of its own moves elements into the shape that a kernel reads.
                outside = frozenset([n for n in readers if kernels[n].kind != "loop"])
                maker = makers.get(op.operands[0])
                if outside and maker and maker.eqn.primitive.name in MOVES:
                    self._readers[op.results[0]] = outside
                    loop = self._write(op._replace(source=maker.source), "loop")
                    self._read_operands(maker, loop)
                    readers -= outside
            elif op.kind == "call" and self._called(op):
                continue
            elif op.kind in ("alone", "call", "product", "reduction"):
                if not inside:
                    readers = self._write(op, "library" if is_grown else "alone")
                if op.eqn.primitive.name == "dot_general":
                    self._read_product(op, readers)
                    continue
            elif not inside:
                repeated = len(readers) > 1 and op.eqn.primitive.name in _EXPENSIVE
                if repeated or kinds != {"loop"}:
                    readers = self._write(op, "library" if is_grown else "loop")
            self._read_operands(op, readers)
        for n in self._readers.keys() - makers.keys():
            self._read(n)

    def _read_operands(self, op: _Op, readers: frozenset[int]) -> None:
        """Records that kernels read operands; of a part of a large value, as much as results."""
        operands, name = op.operands, op.eqn.primitive.name
        if (name in LOOKUPS or name in _PARTS) and operands:
            table, result = (_bytes(self._values[n]) for n in (operands[0], op.results[0]))
            if name in _PARTS or not lineage.is_at_least(result, table):
                for reader in readers - {_MEMORY, _SLICE}:
                    self.sums[self._kernels[reader].source][1] += result
                self._readers[operands[0]] |= {_SLICE}
                operands = operands[1:]
        for n in operands:
            self._readers[n] |= readers

    def _read_product(self, op: _Op, readers: frozenset[int]) -> None:
        """Records that a product reads operands, which are copied if batch axes are not first."""
        dims = op.eqn.params["dimension_numbers"]
        numbers = iter(op.operands)
        for v, contracted, batch in zip(op.eqn.invars, *dims, strict=True):
            if type(v) is core.Literal:
                continue
            n, shape = next(numbers), v.aval.shape
            free = [d for d in range(len(shape)) if d not in (*contracted, *batch)]
            orders = [*batch, *free, *contracted], [*batch, *contracted, *free]
            wide = [[d for d in order if shape[d] != 1] for order in orders]
            if not any(order == sorted(order) for order in wide):
                self.sums[op.source][1] += 2 * _bytes(v)
                self._kernels.append(_Kernel("loop", op.source))
                self._readers[n] |= {len(self._kernels) - 1}
            else:
                self._readers[n] |= readers

    def _called(self, op: _Op) -> bool:
        """Counts an equation that holds programs; returns whether it is one."""
        eqn, name = op.eqn, op.eqn.primitive.name
        if eqn.params.get("name") in RARE:
            return True
        if (flops := flops_of_op(eqn, self.known)) is not None:
            self.sums[op.source][0] += flops
            return False
        inner = inner_programs(eqn)
        times = eqn.params["length"] if name == "scan" else 1
        costs = [self._inner(x) for x in inner]
        if name == "cond":
            costs = [_dearest(costs)]
        for source, found in (item for sums in costs for item in sums.items()):
            total = self.sums[op.source if source is None else source]
            for n, x in enumerate(found):
                total[n] += times * x
        for n in op.operands if inner else ():
            self._readers[n] |= {_MEMORY}
        return bool(inner)

    def _inner(self, program: Any) -> dict[int | None, list[int]]:
        if id(program) not in self.known:
            self.known[id(program)] = CpuCost(program, self.sources, self.known).sums
        found: dict[int | None, list[int]] = self.known[id(program)]
        return found

    def _write(self, op: _Op, kind: str) -> frozenset[int]:
        """Adds the kernel that computes an operation and writes its results."""
        total = self.sums[op.source]
        total[1] += sum(_bytes(self._values[n]) for n in op.results)
        total[2] += 1
        for n in op.results:
            self._read(n)
        self._kernels.append(_Kernel(kind, op.source))
        return frozenset([len(self._kernels) - 1])

    def _read(self, n: int) -> None:
        """Adds the bytes of a value in memory once for every kernel that reads it."""
        for reader in self._readers[n] - {_MEMORY, _SLICE}:
            self.sums[self._kernels[reader].source][1] += _bytes(self._values[n])


def _bytes(v: Any) -> Any:
    aval = v.aval
    if type(v) is core.Literal or not hasattr(aval, "shape"):
        return 0
    return lineage.bytes_of(aval.shape, aval.dtype)


def _kind_of_product(eqn: core.JaxprEqn) -> str:
    (contracted, others), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    if not contracted:
        return "pointwise" if _is_in_library(eqn) else "loop"
    within = math.prod([lhs.shape[d] for d in (*contracted, *batch)])  # type: ignore[attr-defined]
    fixed = (*contracted, *batch), (*others, *eqn.params["dimension_numbers"][1][1])
    rows, columns = (
        math.prod([x for d, x in enumerate(aval.shape) if d not in dims])  # type: ignore[attr-defined]
        for aval, dims in zip((lhs, rhs), fixed, strict=True)
    )
    # Products of vectors, and tiny ones, are loops of XLA.
    is_vector = rows == 1 or columns == 1
    is_large = any(lineage.is_at_least(x, 8) for x in (rows, columns, within))
    dtypes = {str(x.dtype) for x in (lhs, rhs)}  # type: ignore[attr-defined]
    fits = len(dtypes) == 1 and dtypes <= set(_FLOATS)
    return "product" if fits and is_large and not is_vector else "alone"


def _library_reduces(eqn: core.JaxprEqn, name: str) -> bool:
    aval: Any = eqn.invars[0].aval
    dtypes = ("float32", "float64") if name == "reduce_sum" else _FLOATS
    is_known = name in ("reduce_sum", "reduce_max", "reduce_min") and str(aval.dtype) in dtypes
    return is_known and lineage.is_at_least(math.prod(aval.shape), _ELEMENTS)


def _is_in_library(eqn: core.JaxprEqn) -> bool:
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return all(str(x.dtype) in _FLOATS for x in avals) and any(
        lineage.is_at_least(math.prod(x.shape), _ELEMENTS) for x in avals
    )


def _is_written(concatenate: core.JaxprEqn) -> bool:
    """Whether a concatenation is a kernel of its own."""
    aval: Any = concatenate.outvars[0].aval
    is_last = concatenate.params["dimension"] == len(aval.shape) - 1 > 0
    is_wide = is_last and lineage.is_at_least(aval.shape[-1], _FUSED_WIDTH)
    return is_wide or len(concatenate.invars) > FUSED_PARTS


def _dearest(branches: Sequence[dict[int | None, list[int]]]) -> dict[int | None, list[int]]:
    """Returns the FLOPs of the branch with most FLOPs, and the bytes of the one with most bytes."""

    def largest(n: int) -> dict[int | None, list[int]]:
        return lineage.largest(branches, lambda sums: sum(x[n] for x in sums.values()))

    flops, nbytes = largest(0), largest(1)
    return {
        source: [flops.get(source, [0])[0], *nbytes.get(source, [0, 0, 0])[1:]]
        for source in flops | nbytes
    }

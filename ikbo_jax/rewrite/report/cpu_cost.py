"""The cost of a traced program on a CPU, where a library fuses reductions with what surrounds them.

XLA builds kernels of a program in two steps. The library YNNPACK takes every product alone. But a
reduction of at least 4,096 elements grows: elementwise operations, products and other reductions
join it as long as one kernel reads them, such as a norm with the product before and after it, or
a softmax with both products of an attention. XLA's own loops compute everything else where it is
read: by a loop directly, by a kernel of the library from memory.
"""

import collections
import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax.extend import core

from ikbo_jax.rewrite.report.products import (
    ALONE,
    INLINED,
    LOOKUPS,
    MOVES,
    PARTS,
    RARE,
    REDUCTIONS,
    SAME,
    Sums,
    flops_of_op,
    flops_of_product,
    sums_of_calls,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import inner_programs

_VIEWS = SAME - {"convert_element_type"}
#: Operations that the library computes, in these dtypes, and the elements from which on it does.
_POINTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp exp2 expm1 floor integer_pow log
    log1p logistic max min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()  # noqa: SIM905  A table of words reads better.
)
_WIDE = frozenset(map(jnp.dtype, ("float32", "float64")))
_FLOATS = _WIDE | {jnp.dtype("bfloat16")}
_HALF = frozenset(map(jnp.dtype, ("bfloat16", "float16")))
_ELEMENTS = 4096
#: A loop does not repeat these where several loops read the result.
_EXPENSIVE = LOOKUPS | frozenset(
    """
    argmax argmin cbrt concatenate div erf erf_inv exp exp2 expm1 log log1p logistic pow rem rsqrt
    sqrt tanh
    """.split()  # noqa: SIM905
)
#: Nor does it repeat these where they round a float32 to 16 bits.
_ROUNDED = frozenset(["add", "add_any", "convert_element_type", "integer_pow", "mul", "sub"])
#: Concatenations are written from this width along the last axis on, and of more parts than this.
_FUSED_WIDTH, _FUSED_PARTS = 128, 8


#: What reads a value: a kernel that computes its operands ("loop"), a kernel of the library, one
#: that fuses with nothing ("alone"), or what needs the value in memory ("memory").
_Kernel = str
#: The readers of the program's results, and of slices, whose bytes are counted by slice.
_MEMORY, _SLICE = 0, 1


class _Op(NamedTuple):
    """Holds an equation, its operands and results by number, and how XLA computes it.

    Attributes:
      counts: whether its FLOPs count, and not the useful ones of the library's op it is part of.
    """

    eqn: core.JaxprEqn
    kind: str
    operands: list[int]
    results: list[int]
    counts: bool


class CpuCost:
    """Adds up the costs of a program.

    Attributes:
      sums: FLOPs, bytes and kernels.
    """

    def __init__(self, program: Any, known: dict[Any, Any]) -> None:
        self.known = known
        self.sums: Sums = [0, 0, 0]
        self._kernels: list[_Kernel] = ["memory", "loop"]
        # Bytes of every value.
        self._sizes: list[Any] = []
        self._ops: list[_Op] = []
        # The kernels that read each value.
        self._readers: dict[int, frozenset[int]] = collections.defaultdict(frozenset)
        for n in self._flatten(program, {}, counts=True):
            self._readers[n] = frozenset([_MEMORY])
        self._count()

    def _number(self, v: Any) -> int:
        size, known, aval = 0, self.known, v.aval
        if type(v) is not core.Literal and hasattr(aval, "shape"):
            key = aval.shape, aval.dtype
            if key not in known:
                known[key] = lineage.bytes_of(*key)
            size = known[key]
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _flatten(self, program: Any, numbers: dict[Any, int], *, counts: bool) -> list[int]:
        """Lists the operations of a program, of the calls that XLA inlines, and of ops in XLA."""
        literal = core.Literal
        for eqn in program.eqns:
            name, params = eqn.primitive.name, eqn.params
            operands = [self._operand(v, numbers) for v in eqn.invars if type(v) is not literal]
            if name in INLINED and params.get("name") not in RARE:
                useful = flops_of_op(eqn, self.known)
                self.sums[0] += useful or 0
                inner = inner_programs(eqn)[0]
                given = [self._operand(v, numbers) for v in eqn.invars]
                found = self._flatten(
                    inner,
                    dict(zip(inner.invars, given, strict=True)),
                    counts=counts and useful is None,
                )
                numbers.update(zip(eqn.outvars, found, strict=True))
                continue
            if params.get("name") in RARE:
                operands = []
            results = [self._number(v) for v in eqn.outvars]
            numbers.update(zip(eqn.outvars, results, strict=True))
            kind = self._kind(eqn, name)
            if name == "split":
                for v, n in zip(eqn.outvars, results, strict=True):
                    part = eqn.replace(outvars=[v])
                    self._ops.append(_Op(part, kind, operands, [n], counts))
                continue
            self._ops.append(_Op(eqn, kind, operands, results, counts))
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
            if op.counts and (flops := flops_of_product(op.eqn)):
                self.sums[0] += flops
            readers: frozenset[int] = frozenset()
            for n in op.results:
                readers |= self._readers[n]
            if not readers:
                continue
            kinds = {kernels[n] for n in readers}
            is_grown = op.results[0] in grown
            inside = (is_grown or op.kind == "broadcast") and kinds == {"library"}
            inside = inside and len(readers) == 1
            if op.kind == "view":
                # A loop of its own moves elements into the shape that a kernel reads.
                outside = frozenset([n for n in readers if kernels[n] != "loop"])
                maker = makers.get(op.operands[0]) if op.operands else None
                if outside and maker and maker.eqn.primitive.name in MOVES:
                    self._readers[op.results[0]] = outside
                    loop = self._write(op, "loop")
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
                repeated = len(readers) > 1 and _is_expensive(op.eqn)
                if repeated or is_grown:
                    readers = self._write(op, "library" if is_grown else "loop")
                elif kinds != {"loop"}:
                    # What other kernels read from memory, loops compute again, of one large value.
                    again = self._is_of_one(op, makers)
                    loops = frozenset([n for n in readers if again and kernels[n] == "loop"])
                    self._readers[op.results[0]] = readers - loops
                    readers = self._write(op, "loop") | loops
            self._read_operands(op, readers)
        for n in self._readers.keys() - makers.keys():
            self._read(n)

    def _is_of_one(self, op: _Op, makers: dict[int, _Op]) -> bool:
        """Whether at most one operand has as many elements as the result, broadcasts aside."""
        made = [n for n in op.operands if n not in makers or makers[n].kind != "broadcast"]
        size = self._sizes[op.results[0]]
        return sum([lineage.is_at_least(self._sizes[n], size) for n in made]) <= 1

    def _read_operands(self, op: _Op, readers: frozenset[int]) -> None:
        """Records that kernels read operands; of a part of a large value, as much as results."""
        operands, name = op.operands, op.eqn.primitive.name
        if name in PARTS and operands:
            table, result = self._sizes[operands[0]], self._sizes[op.results[0]]
            if name not in LOOKUPS or not lineage.is_at_least(result, table):
                self.sums[1] += result * len(readers - {_MEMORY, _SLICE})
                self._readers[operands[0]] |= {_SLICE}
                operands = operands[1:]
        for n in operands:
            self._readers[n] |= readers

    def _read_product(self, op: _Op, readers: frozenset[int]) -> None:
        """Records that a product reads operands, which are copied if batch axes are not first."""
        dims, result = op.eqn.params["dimension_numbers"], cast("Any", op.eqn.outvars[0].aval)
        if op.kind == "alone" and result.dtype.itemsize == 2:
            # Operands and result are in float32; a loop of its own casts the result.
            sizes = [self._sizes[n] for n in (*op.operands, *2 * op.results)]
            self.sums[1] += 2 * sum(sizes)
        numbers = iter(op.operands)
        for v, contracted, batch in zip(op.eqn.invars, *dims, strict=True):
            if type(v) is core.Literal:
                continue
            n, shape = next(numbers), v.aval.shape
            free = [d for d in range(len(shape)) if d not in (*contracted, *batch)]
            orders = [*batch, *free, *contracted], [*batch, *contracted, *free]
            wide = [[d for d in order if shape[d] != 1] for order in orders]
            if not any(order == sorted(order) for order in wide):
                self.sums[1] += 2 * self._sizes[n]
                self._kernels.append("loop")
                self._readers[n] |= {len(self._kernels) - 1}
            else:
                self._readers[n] |= readers

    def _called(self, op: _Op) -> bool:
        """Counts an equation that holds programs; returns whether it is one."""
        eqn = op.eqn
        if eqn.params.get("name") in RARE:
            return True
        flops, *rest = sums_of_calls(eqn, self.known, self._inner)
        for n, amount in enumerate((flops * op.counts, *rest)):
            self.sums[n] += amount
        inner = inner_programs(eqn)
        for n in op.operands if inner else ():
            self._readers[n] |= {_MEMORY}
        return bool(inner)

    def _inner(self, program: Any) -> Sums:
        if id(program) not in self.known:
            self.known[id(program)] = CpuCost(program, self.known).sums
        return cast("Sums", self.known[id(program)])

    def _write(self, op: _Op, kind: str) -> frozenset[int]:
        """Adds the kernel that computes an operation and writes its results."""
        self.sums[1] += sum([self._sizes[n] for n in op.results])
        self.sums[2] += 1
        for n in op.results:
            self._read(n)
        self._kernels.append(kind)
        return frozenset([len(self._kernels) - 1])

    def _read(self, n: int) -> None:
        """Adds the bytes of a value in memory once for every kernel that reads it."""
        self.sums[1] += self._sizes[n] * len(self._readers[n] - {_MEMORY, _SLICE})


def _is_expensive(eqn: core.JaxprEqn) -> bool:
    name, aval = eqn.primitive.name, cast("Any", eqn.outvars[0].aval)
    return name in _EXPENSIVE or name in _ROUNDED and aval.dtype in _HALF


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
    dtypes = {x.dtype for x in (lhs, rhs)}  # type: ignore[attr-defined]
    fits = len(dtypes) == 1 and dtypes <= _FLOATS
    return "product" if fits and is_large and not is_vector else "alone"


def _library_reduces(eqn: core.JaxprEqn, name: str) -> bool:
    aval: Any = eqn.invars[0].aval
    dtypes = _WIDE if name == "reduce_sum" else _FLOATS
    is_known = name in ("reduce_sum", "reduce_max", "reduce_min") and aval.dtype in dtypes
    return is_known and lineage.is_at_least(math.prod(aval.shape), _ELEMENTS)


def _is_in_library(eqn: core.JaxprEqn) -> bool:
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    is_large = lineage.is_at_least(math.prod(avals[-1].shape), _ELEMENTS)
    return is_large and _FLOATS.issuperset([x.dtype for x in avals])


def _is_written(concatenate: core.JaxprEqn) -> bool:
    """Whether a concatenation is a kernel of its own."""
    aval: Any = concatenate.outvars[0].aval
    is_last = concatenate.params["dimension"] == len(aval.shape) - 1 > 0
    is_wide = is_last and lineage.is_at_least(aval.shape[-1], _FUSED_WIDTH)
    return is_wide or len(concatenate.invars) > _FUSED_PARTS

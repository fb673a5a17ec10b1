"""The cost of a traced program on a CPU, where a library fuses reductions with what surrounds them.

XLA builds kernels of a program in two steps. The library YNNPACK takes every product alone. But a
reduction of at least 4,096 elements grows: elementwise operations, products and other reductions
join it as long as one kernel reads them, such as a norm with the product before and after it, or
a softmax with both products of an attention. XLA's own loops compute everything else where it is
read: by a loop directly, by a kernel of the library from memory. A loop that reads a padded, joined
or looked-up value at several places reads it from memory, too.
"""

import collections
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from ikbo_jax.rewrite.report.cpu_operations import Operation, Operations
from ikbo_jax.rewrite.report.products import (
    LOOKUPS,
    MOVES,
    PARTS,
    RARE,
    Sums,
    flops_of_product,
    sums_of_calls,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import inner_programs

#: A loop does not repeat these where several loops read the result, or one at several places.
_EXPENSIVE = LOOKUPS | frozenset(
    """
    argmax argmin cbrt concatenate div erf erf_inv exp exp2 expm1 log log1p logistic pad pow rem
    rsqrt sqrt tanh
    """.split()  # noqa: SIM905
)
_HALF = frozenset(map(jnp.dtype, ("bfloat16", "float16")))
#: Nor does it repeat these where they round a float32 to 16 bits.
_ROUNDED = frozenset(["add", "add_any", "convert_element_type", "integer_pow", "mul", "sub"])
#: What reads a value: a kernel that computes its operands ("loop"), a kernel of the library, one
#: that fuses with nothing ("alone"), or what needs the value in memory ("memory").
_Kernel = str
#: How a kernel reads the elements of a value: each for the result at the same place, or at another
#: one, or for several results.
_SAME_PLACE, _MOVED, _SEVERAL = 1, 2, 3
#: The reader of the program's results.
_MEMORY = 0


class CpuCost(Operations):
    """Adds up the costs of a program.

    Attributes:
      sums: FLOPs, bytes and kernels.
    """

    def __init__(self, program: Any, known: dict[Any, Any]) -> None:
        super().__init__(program, known)
        self.sums: Sums = [self.useful_flops, 0, 0]
        self._kernels: list[_Kernel] = ["memory"]
        self._written: set[int] = set()
        # The kernels that read each value.
        self._readers: dict[int, frozenset[int]] = collections.defaultdict(frozenset)
        # How they read its elements; 0 if no kernel does.
        self._places: dict[int, int] = collections.defaultdict(int)
        # The kernels that read parts of a value, and their bytes.
        self._parts: dict[int, list[tuple[frozenset[int], Any]]] = collections.defaultdict(list)
        for n in self.results:
            self._readers[n] = frozenset([_MEMORY])
        self._count()

    def _grown(self) -> set[int]:
        """Returns the results of operations that join a reduction of the library."""
        groups: dict[int, int] = {}
        users: dict[int, set[int]] = collections.defaultdict(set)
        for n in self._readers:
            users[n].add(-1)
        reducing = set()
        for number, op in enumerate(reversed(self.listed)):
            seen = set().union(*[users[n] for n in op.results])
            if not seen:
                continue
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
                users[n] |= {-1} if n in op.copied else group
        return {n for n, group in groups.items() if group in reducing}

    def _count(self) -> None:
        """Finds the kernels, from the results on, and adds up what they read and write."""
        grown, kernels, makers = self._grown(), self._kernels, self.makers
        for op in reversed(self.listed):
            if op.counts and (flops := flops_of_product(op.eqn)):
                self.sums[0] += flops
            readers: frozenset[int] = frozenset()
            for n in op.results:
                readers |= self._readers[n]
                if n in self._parts:
                    readers |= frozenset().union(*[x for x, _ in self._parts[n]])
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
                many = len(readers) > 1 or self._places[op.results[0]] == _SEVERAL
                repeated = many and _is_expensive(op.eqn)
                if repeated or is_grown:
                    readers = self._write(op, "library" if is_grown else "loop")
                elif kinds != {"loop"}:
                    # What other kernels read from memory, loops compute again, of one large value.
                    again = self._is_of_one(op)
                    loops = frozenset([n for n in readers if again and kernels[n] == "loop"])
                    self._readers[op.results[0]] = readers - loops
                    readers = self._write(op, "loop") | loops
            self._read_operands(op, readers)
        for n in (self._readers.keys() | self._parts.keys()) - makers.keys():
            self._read(n)

    def _is_of_one(self, op: Operation) -> bool:
        """Whether at most one operand has as many elements as the result, broadcasts aside."""
        makers = self.makers
        made = [n for n in op.operands if n not in makers or makers[n].kind != "broadcast"]
        size = self.sizes[op.results[0]]
        return sum([lineage.is_at_least(self.sizes[n], size) for n in made]) <= 1

    def _read_operands(self, op: Operation, readers: frozenset[int]) -> None:
        """Records that kernels read operands; of a part of a large value, as much as results."""
        operands, name = op.operands, op.eqn.primitive.name
        if name in PARTS and operands:
            table, result = self._table(operands[0]), self.sizes[op.results[0]]
            if name not in LOOKUPS:
                is_whole = self._is_reshaped(operands[0])
            else:
                is_whole = lineage.is_at_least(result, table)
            if not is_whole:
                self._parts[operands[0]].append((readers - {_MEMORY}, result))
                operands = operands[1:]
        self._place(op, name)
        if name == "gather" and _is_checked(op.eqn):
            self._readers[op.operands[1]] |= self._new_kernel("loop")
        for n in operands:
            self._readers[n] |= readers

    def _place(self, op: Operation, name: str) -> None:
        """Records at which places an operation reads its operands."""
        places, result = self._places, op.results[0]
        place = _SAME_PLACE if result in self._written else places[result] or _SAME_PLACE
        if op.kind == "broadcast":
            place = _SEVERAL
        elif op.kind != "view" and (name in MOVES or name in PARTS) and place == _SAME_PLACE:
            place = _MOVED
        for n in op.operands:
            is_first = not places[n] or places[n] == place == _SAME_PLACE
            places[n] = place if is_first else _SEVERAL

    def _is_reshaped(self, n: int) -> bool:
        """Whether a value is one of another shape in memory; XLA counts a slice of it as all."""
        op = self.makers.get(n)
        if op and op.kind == "product":
            _, (batch, _) = op.eqn.params["dimension_numbers"]
            return not batch and len(cast("Any", op.eqn.outvars[0].aval).shape) > 2
        return False

    def _table(self, n: int) -> Any:
        """Returns the bytes of a table; of looked-up rows that a lookup reads, their table's."""
        size, op = self.sizes[n], self.makers.get(n)
        while op and op.operands and (op.kind == "view" or op.eqn.primitive.name in LOOKUPS):
            n = op.operands[0]
            size = self.sizes[n] if lineage.is_at_least(size, self.sizes[n]) else size
            op = self.makers.get(n)
        return size

    def _read_product(self, op: Operation, readers: frozenset[int]) -> None:
        """Records that a product reads operands, which are copied if batch axes are not first."""
        result = cast("Any", op.eqn.outvars[0].aval)
        if op.kind == "alone" and result.dtype.itemsize == 2:
            # Operands and result are in float32; a loop of its own casts the result.
            sizes = [self.sizes[n] for n in (*op.operands, *2 * op.results)]
            self.sums[1] += 2 * sum(sizes)
        for n in op.operands:
            if n in op.copied:
                self.sums[1] += 2 * self.sizes[n]
                self._readers[n] |= self._new_kernel("loop")
            else:
                self._readers[n] |= readers

    def _called(self, op: Operation) -> bool:
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

    def _write(self, op: Operation, kind: str) -> frozenset[int]:
        """Adds the kernel that computes an operation and writes its results."""
        self.sums[1] += sum([self.sizes[n] for n in op.results])
        self.sums[2] += 1
        for n in op.results:
            self._read(n)
        self._written |= {*op.results}
        return self._new_kernel(kind)

    def _new_kernel(self, kind: str) -> frozenset[int]:
        self._kernels.append(kind)
        return frozenset([len(self._kernels) - 1])

    def _read(self, n: int) -> None:
        """Adds the bytes of a value in memory once for every kernel that reads it."""
        self.sums[1] += self.sizes[n] * len(self._readers[n] - {_MEMORY})
        if n in self._parts:
            for readers, size in self._parts[n]:
                self.sums[1] += size * len(readers - self._readers[n])


def _is_checked(gather: core.JaxprEqn) -> bool:
    """Whether a kernel of its own compares positions with the bounds of several axes."""
    fills = gather.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    positions: Any = gather.invars[1].aval
    return fills and positions.shape[-1] > 1


def _is_expensive(eqn: core.JaxprEqn) -> bool:
    name, aval = eqn.primitive.name, cast("Any", eqn.outvars[0].aval)
    return name in _EXPENSIVE or name in _ROUNDED and aval.dtype in _HALF

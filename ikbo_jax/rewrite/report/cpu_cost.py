"""The cost of a traced program on a CPU, where a library fuses reductions with what surrounds them.

XLA builds kernels of a program in two steps. The library YNNPACK takes every product alone. But a
reduction of at least 4,096 elements grows, by elementwise operations, products and reductions: the
one operation that reads its result joins it, and the one that reads that, and all that is read by
the kernel alone. Examples are a norm with the product after it, which ends where a GELU reads the
product several times, and a softmax with both products of an attention. XLA's own loops compute
everything else where it is read: by a loop directly, by a kernel of the library from memory. What
is padded is in memory, too, and what is concatenated or looked up if several read it.
"""

import collections
from typing import Any, cast

import jax
from jax.extend import core

from ikbo_jax.rewrite.report.cpu_operations import WIDENED, Operation, Operations, is_half
from ikbo_jax.rewrite.report.products import (
    LOOKUPS,
    MOVES,
    PARTS,
    RARE,
    REDUCTIONS,
    Sums,
    sums_of_calls,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.jaxprs import inner_programs

#: A loop does not repeat these where several kernels read the result.
_EXPENSIVE = LOOKUPS.union(
    REDUCTIONS,
    """
    cbrt concatenate div erf erf_inv exp exp2 expm1 log log1p logistic pad pow rem rsqrt sqrt tanh
    """.split(),  # noqa: SIM905
)
#: Nor does it repeat these where they round a float32 to 16 bits.
_ROUNDED = frozenset(["add", "add_any", "convert_element_type", "integer_pow", "mul", "sub"])
#: What reads a value: a kernel that computes its operands ("loop"), a kernel of the library, one
#: that fuses with nothing ("alone"), or what needs the value in memory ("memory").
_Kernel = str
#: The kinds of operations that the library can join.
_IN_LIBRARY = ("product", "reduction", "pointwise")
#: The most operations of a kernel of the library: XLA's limit of 100 also counts what it reads, and
#: casts, so that arithmetic in 16 bits counts as three.
_LARGEST = 85
#: The reader of the program's results.
_MEMORY = 0


class CpuCost(Operations):
    """Adds up the costs of a program.

    Attributes:
      sums: FLOPs, bytes and kernels.
    """

    def __init__(self, program: Any, known: dict[Any, Any]) -> None:
        super().__init__(program, known)
        self.sums: Sums = [self.flops, 0, 0]
        self._kernels: list[_Kernel] = ["memory"]
        # The operations that read each value.
        self._users: dict[int, list[Operation]] = collections.defaultdict(list)
        for op in self.listed:
            for n in {*op.operands}:
                self._users[n].append(op)
        # The kernels that read each value.
        self._readers: dict[int, frozenset[int]] = collections.defaultdict(frozenset)
        # The kernels that read parts of a value, and their bytes.
        self._parts: dict[int, list[tuple[frozenset[int], Any]]] = collections.defaultdict(list)
        for n in self.results:
            self._readers[n] = frozenset([_MEMORY])
        self._grown = self._find_grown()
        self._count()

    def _find_grown(self) -> set[int]:
        """Returns the results of operations that join a reduction of the library."""
        # The last operation of each result's kernel, and how many operations this kernel has.
        groups: dict[int, int] = {}
        sizes: collections.Counter[int] = collections.Counter()
        users: dict[int, set[int]] = collections.defaultdict(set)
        for n in self._readers:
            users[n].add(-1)
        # The last operations of kernels with a reduction.
        follows, reached = self._following(), set[int]()
        for number, op in enumerate(reversed(self.listed)):
            seen = set().union(*[users[n] for n in op.results])
            if not seen:
                continue
            weight = 3 if op.kind == "pointwise" and is_half(op.eqn.outvars[0]) else 1
            if op.kind in ("view", "broadcast"):
                group = seen
                sizes.update(seen if len(seen) == 1 else ())
            elif op.kind in _IN_LIBRARY:
                joins = len(seen) == 1 and seen <= reached
                joins = joins and sizes[next(iter(seen))] + weight <= _LARGEST
                if joins and _is_cast(op):
                    # Arithmetic in 16 bits widens its operands, too, and XLA casts once for all.
                    others = [x for x in self._users[op.operands[0]] if x.kind == "pointwise"]
                    joins = {groups.get(x.results[0], -1) for x in others if x is not op} <= seen
                group = seen if joins else {number}
                if op.results[0] in follows:
                    reached.add(number)
                groups[op.results[0]] = next(iter(group))
                sizes[next(iter(group))] += weight
            else:
                group = {-1}
            for n in op.operands:
                users[n] |= group
        self._groups = users
        return {n for n, group in groups.items() if group in reached}

    def _following(self) -> set[int]:
        """Returns the results of reductions, and of what alone reads such a result."""
        found: set[int] = set()
        for op in self.listed:
            is_read = any(n in found and len(self._users[n]) == 1 for n in op.operands)
            if op.kind == "reduction" or is_read and op.kind in (*_IN_LIBRARY, "view", "broadcast"):
                found.update(op.results)
        return found

    def _count(self) -> None:
        """Finds the kernels, from the results on, and adds up what they read and write."""
        grown, kernels, makers = self._grown, self._kernels, self.makers
        for op in reversed(self.listed):
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
                if outside and maker and self._is_repeated(maker):
                    self._readers[op.results[0]] = outside
                    loop = self._write(op, "loop")
                    self._read_operands(maker, loop)
                    readers -= outside
            elif op.kind == "update":
                self._update(op, readers)
                continue
            elif op.kind == "call" and self._called(op):
                continue
            elif op.kind in ("alone", "call", "product", "reduction"):
                if not inside:
                    readers = self._write(op, "library" if is_grown else "alone")
            elif not inside:
                many = len(readers) > 1 and _is_expensive(op.eqn) and op.kind != "broadcast"
                if many or is_grown or op.eqn.primitive.name == "pad":
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

    def _is_repeated(self, op: Operation) -> bool:
        """Whether kernels that read a view of a result have it computed for themselves."""
        groups, name = self._groups[op.results[0]], op.eqn.primitive.name
        if op.kind not in ("loop", "pointwise") or op.results[0] in self._grown:
            return False
        is_read_once = len(groups) == 1 and -1 not in groups
        return not is_read_once and (name in MOVES or not _is_expensive(op.eqn))

    def _update(self, op: Operation, readers: frozenset[int]) -> None:
        """Counts an update in place; an argument, and what is tiled, is copied first."""
        array, update = op.operands[0], op.operands[-1 if op.eqn.primitive.name == "scatter" else 1]
        maker = self.makers.get(array)
        times = (3 if maker.eqn.primitive.name == "tile" else 0) if maker else 2
        self.sums[1] += self.sizes[update] + times * self.sizes[array]
        self._readers[update] |= self._new_kernel("loop")
        self._readers[array] |= readers | {_MEMORY}

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
        if name == "gather" and len(op.operands) > 1 and _is_checked(op.eqn):
            self._readers[op.operands[1]] |= self._new_kernel("loop")
        for n in operands:
            self._readers[n] |= readers

    def _is_reshaped(self, n: int) -> bool:
        """Whether a value is one of another shape in memory; XLA counts a slice of it as all."""
        op = self.makers.get(n)
        if op and op.kind == "product" and n not in self._grown:
            _, (batch, _) = op.eqn.params["dimension_numbers"]
            return not batch and len(cast("Any", op.eqn.outvars[0].aval).shape) > 2
        return op is not None and (op.kind == "view" or op.eqn.primitive.name in LOOKUPS)

    def _table(self, n: int) -> Any:
        """Returns the bytes of a table; of looked-up rows that a lookup reads, their table's."""
        size, op = self.sizes[n], self.makers.get(n)
        while op and op.operands and (op.kind == "view" or op.eqn.primitive.name in LOOKUPS):
            n = op.operands[0]
            size = self.sizes[n] if lineage.is_at_least(size, self.sizes[n]) else size
            op = self.makers.get(n)
        return size

    def _called(self, op: Operation) -> bool:
        """Counts an equation that holds programs; returns whether it is one."""
        eqn = op.eqn
        if eqn.params.get("name") in RARE:
            return True
        for n, amount in enumerate(sums_of_calls(eqn, self.known, self._inner)):
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
        for n in op.results if kind == "library" and is_half(op.eqn.outvars[0]) else ():
            self.sizes[n] *= 1 + self._is_widened(n)
        self.sums[1] += sum([self.sizes[n] for n in op.results])
        self.sums[2] += 1
        for n in op.results:
            self._read(n)
        return self._new_kernel(kind)

    def _is_widened(self, n: int) -> bool:
        """Whether all that reads a value computes in float32, to which the library casts it."""
        for op in self._users[n]:
            name = op.eqn.primitive.name
            is_moved = op.kind == "view" or name == "transpose"
            if not (self._is_widened(op.results[0]) if is_moved else name in WIDENED):
                return False
        return n not in self.results

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
    return fills and cast("Any", gather.invars[1].aval).shape[-1] > 1


def _is_cast(op: Operation) -> bool:
    """Whether an operation casts 16 bits to float32."""
    return op.eqn.primitive.name == "convert_element_type" and is_half(op.eqn.invars[0])


def _is_expensive(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name in _EXPENSIVE or name in _ROUNDED and is_half(eqn.outvars[0])

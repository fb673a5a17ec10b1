"""The operations of a traced program as XLA's simplifications for a CPU leave them.

Calls are inlined, transposes that cancel are removed, equal lookups are merged, a reduction of a
concatenation reduces its parts, and equal numbers are broadcast once.
"""

import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax.extend import core

from ikbo_jax.rewrite.report.products import (
    ALONE,
    INLINED,
    LOOKUPS,
    RARE,
    REDUCTIONS,
    SAME,
    bytes_of,
    flops_of_product,
)
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.hoisting import PRODUCTS
from ikbo_jax.rewrite.values.jaxprs import inner_programs

#: Calls that XLA inlines, also those that it may divide over devices.
_INLINED = INLINED | {"custom_partitioning", "ikbo_divided"}
_VIEWS = SAME - {"convert_element_type"}
#: Lookups and what makes their positions; equal ones of equal operands are one operation.
_MERGED = frozenset(["add", "broadcast_in_dim", "clamp", "gather", "lt", "select_n"])
#: Operations that the library computes, in these dtypes, and the elements from which on it does.
_POINTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp exp2 expm1 floor integer_pow log
    log1p logistic max min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()  # noqa: SIM905  A table of words reads better.
)
_WIDE = frozenset(map(jnp.dtype, ("float32", "float64")))
HALF = frozenset(map(jnp.dtype, ("bfloat16", "float16")))
_FLOATS = _WIDE | {jnp.dtype("bfloat16")}
_ELEMENTS = 4096
#: Concatenations are written from this width along the last axis on, and of more parts than this.
_FUSED_WIDTH, _FUSED_PARTS = 128, 8


class Operation(NamedTuple):
    """Holds an equation, its operands and results by number, and how XLA computes it."""

    eqn: core.JaxprEqn
    kind: str
    operands: list[int]
    results: list[int]


class Operations:
    """Lists the operations of a program, whose values have numbers.

    Attributes:
      flops: of products.
      listed: the operations, in program order.
      sizes: bytes of every value.
      makers: the operation that computes each value.
      results: the program's results.
    """

    def __init__(self, program: Any, known: dict[Any, Any]) -> None:
        self.known = known
        self.flops: Any = 0
        self.listed: list[Operation] = []
        self.sizes: list[Any] = []
        self.makers: dict[int, Operation] = {}
        # Broadcasts of numbers, by number and shape.
        self._scalars: dict[Any, int] = {}
        # The equations of `_MERGED` by operands, with their results.
        self._equal: dict[Any, tuple[core.JaxprEqn, list[int]]] = {}
        # Values in the shape of a matrix, by their numbers.
        self._matrices: dict[int, int] = {}
        # Products' operands in float32, by their numbers in 16 bits.
        self._casts: dict[int, int] = {}
        self.results = self._flatten(program, {})

    def _number(self, v: Any) -> int:
        is_array = type(v) is not core.Literal and hasattr(v.aval, "shape")
        self.sizes.append(bytes_of(v.aval.shape, v.aval.dtype) if is_array else 0)
        return len(self.sizes) - 1

    def _flatten(self, program: Any, numbers: dict[Any, int]) -> list[int]:
        """Lists the operations of a program, of the calls that XLA inlines, and of ops in XLA."""
        literal, makers = core.Literal, self.makers
        for eqn in program.eqns:
            name, params = eqn.primitive.name, eqn.params
            operands = [self._operand(v, numbers) for v in eqn.invars if type(v) is not literal]
            # XLA inlines a loop of one step, too: sizes of its operands are those of the step's.
            is_inlined = name in _INLINED or name == "scan" and params["length"] == 1
            if is_inlined and params.get("name") not in RARE:
                inner = inner_programs(eqn)[0]
                given = [self._operand(v, numbers) for v in eqn.invars]
                found = self._flatten(inner, dict(zip(inner.invars, given, strict=True)))
                numbers.update(zip(eqn.outvars, found, strict=True))
                continue
            if params.get("name") in RARE:
                operands = []
            if name == "ikbo_plan":
                numbers.update(zip(eqn.outvars, operands, strict=False))
                continue
            if operands and (name in ("slice", "transpose") or name in REDUCTIONS):
                maker = makers.get(operands[0])
                if maker and name == "transpose" and _is_undone(maker.eqn, eqn):
                    numbers[eqn.outvars[0]] = maker.operands[0]
                    continue
                if maker and name == "slice":
                    operands = _sliced(maker, eqn) or operands
                elif maker and maker.eqn.primitive.name == "concatenate":
                    # XLA reduces the parts, of a reduction along the concatenated axis.
                    is_along = maker.eqn.params["dimension"] in params.get("axes", ())
                    operands = maker.operands if is_along else operands
            if name in _MERGED:
                fixed = [
                    (d, complex(v.val)) for d, v in enumerate(eqn.invars) if type(v) is literal
                ]
                key = (name, *operands, *fixed)
                if key in self._equal and self._equal[key][0].params == params:
                    numbers[eqn.outvars[0]] = self._equal[key][1][0]
                    continue
            results = [self._number(v) for v in eqn.outvars]
            numbers.update(zip(eqn.outvars, results, strict=True))
            if name in _MERGED:
                self._equal[key] = eqn, results
            kind = self._kind(eqn, name)
            self.flops += flops_of_product(eqn)
            if name in PRODUCTS:
                self._add_product(eqn, kind, operands, results)
                continue
            if kind == "pointwise" and len(operands) < len(eqn.invars):
                operands += self._broadcast_numbers(eqn)
            if name == "split":
                for v, n in zip(eqn.outvars, results, strict=True):
                    self._add(Operation(eqn.replace(outvars=[v]), kind, operands, [n]))
                continue
            self._add(Operation(eqn, kind, operands, results))
        return [self._operand(v, numbers) for v in program.outvars]

    def _operand(self, v: Any, numbers: dict[Any, int]) -> int:
        if type(v) is core.Literal or v not in numbers:
            number = self._number(v)
            if type(v) is not core.Literal:
                numbers[v] = number
            return number
        return numbers[v]

    def _add_product(
        self, eqn: core.JaxprEqn, kind: str, operands: list[int], results: list[int]
    ) -> None:
        """Adds a product, and the loops that bring its operands and result into another form.

        A library's products read batch axes first, and rows that are not repeated. The others are
        in float32.
        """
        avals: list[Any] = [v.aval for v in eqn.invars]
        axes: Any = [((), range(x.ndim)) for x in avals]
        if eqn.primitive.name == "dot_general":
            axes = list(zip(*eqn.params["dimension_numbers"], strict=True))
        numbers, read = iter(operands), []
        for v, aval, (contracted, batch) in zip(eqn.invars, avals, axes, strict=True):
            if type(v) is core.Literal:
                continue
            n = next(numbers)
            maker = self.makers.get(n)
            wide = [d for d, size in enumerate(aval.shape) if size != 1]
            free = [d for d in wide if d not in contracted and d not in batch]
            fixed = [d for d in batch if d in wide]
            summed = [d for d in contracted if d in wide]
            is_row = maker and maker.kind == "broadcast" and maker.eqn.primitive.name in LOOKUPS
            if kind == "alone" and aval.dtype in HALF:
                if n not in self._casts:
                    self._casts[n] = self._copied(eqn, n, 2)
                n = self._casts[n]
            elif is_row or wide not in ([*fixed, *free, *summed], [*fixed, *summed, *free]):
                n = self._copied(eqn, n)
            elif len(free) > 1 and not batch and maker:
                n = self._matrix(n, v, maker)
            read.append(n)
        if kind == "alone" and cast("Any", eqn.outvars[0].aval).dtype in HALF:
            self.sizes.append(2 * self.sizes[results[0]])
            written = [len(self.sizes) - 1]
            self._add(Operation(eqn, kind, read, written))
            self._add(Operation(eqn, "loop", written, results))
        else:
            self._add(Operation(eqn, kind, read, results))

    def _copied(self, eqn: core.JaxprEqn, n: int, times: int = 1) -> int:
        """Adds a loop that copies an operand of a product, into so many times its bytes."""
        self.sizes.append(times * self.sizes[n])
        copy = len(self.sizes) - 1
        self._add(Operation(eqn, "loop", [n], [copy]))
        return copy

    def _matrix(self, n: int, v: Any, maker: Operation) -> int:
        """Returns a value that a product reads, as a matrix if a loop may compute it."""
        if maker.kind not in ("loop", "pointwise"):
            return n
        if n not in self._matrices:
            self._matrices[n] = self._number(v)
            self._add(maker._replace(kind="view", operands=[n], results=[self._matrices[n]]))
        return self._matrices[n]

    def _add(self, op: Operation) -> None:
        self.listed.append(op)
        self.makers.update(dict.fromkeys(op.results, op))

    def _broadcast_numbers(self, eqn: core.JaxprEqn) -> list[int]:
        """Returns the broadcasts of an operation's numbers; equal ones are one value."""
        found = []
        for v in eqn.invars:
            if type(v) is core.Literal:
                result = eqn.outvars[0]
                key = float(v.val), result.aval
                if key not in self._scalars:
                    self._scalars[key] = self._number(result)
                    self._add(Operation(eqn, "broadcast", [], [self._scalars[key]]))
                found.append(self._scalars[key])
        return found

    def _kind(self, eqn: core.JaxprEqn, name: str) -> str:
        if name in _VIEWS or name == "broadcast_in_dim" or _is_of_one_row(eqn, name):
            return "view" if name in _VIEWS else "broadcast"
        if name == "dot_general":
            return _kind_of_product(eqn)
        if name in REDUCTIONS:
            return "reduction" if _library_reduces(eqn, name) else "loop"
        # A scatter of one slice is an update in place, too.
        is_slice = name == "scatter" and math.prod(cast("Any", eqn.invars[1].aval).shape[:-1]) == 1
        if name == "dynamic_update_slice" or is_slice:
            return "update"
        if name in ALONE or name == "concatenate" and _is_written(eqn):
            return "alone"
        if inner_programs(eqn):
            return "call"
        return "pointwise" if name in _POINTWISE and _is_in_library(eqn) else "loop"


def _is_of_one_row(eqn: core.JaxprEqn, name: str) -> bool:
    """Whether a lookup repeats the only row of a table; XLA makes a broadcast of it."""
    if name not in LOOKUPS:
        return False
    table, result = (cast("Any", v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    if name == "gather":
        return math.prod(table.shape) == math.prod(eqn.params["slice_sizes"])
    return table.shape[eqn.params["how"].axis] == 1


def _is_undone(transpose: core.JaxprEqn, eqn: core.JaxprEqn) -> bool:
    """Whether an equation transposes a transposed value back; XLA removes both."""
    if transpose.primitive.name != "transpose":
        return False
    order = [transpose.params["permutation"][d] for d in eqn.params["permutation"]]
    return order == sorted(order)


def _sliced(maker: Operation, eqn: core.JaxprEqn) -> list[int]:
    """Returns the part of a concatenation that holds a slice, or [].

    XLA slices the part then, as in each loop of a scan over [history, candidate].
    """
    is_joined = maker.eqn.primitive.name == "concatenate"
    if not is_joined or len(maker.operands) < len(maker.eqn.invars):
        return []
    along, stop = maker.eqn.params["dimension"], 0
    first, last = (eqn.params[f"{end}_indices"][along] for end in ("start", "limit"))
    for v, n in zip(maker.eqn.invars, maker.operands, strict=True):
        start, stop = stop, stop + cast("Any", v.aval).shape[along]
        if start <= first and last <= stop:
            return [n]
    return []


def _kind_of_product(eqn: core.JaxprEqn) -> str:
    (contracted, others), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    if math.prod([lhs.shape[d] for d in contracted]) == 1:  # type: ignore[attr-defined]
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

"""The operations of a traced program as XLA's simplifications for a CPU leave them.

Calls are inlined, transposes that cancel are removed, equal lookups are merged, a reduction of a
concatenation reduces its parts, and equal numbers are broadcast once.
"""

import math
from collections.abc import Sequence
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
POINTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp exp2 expm1 floor integer_pow log
    log1p logistic max min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()  # noqa: SIM905  A table of words reads better.
)
#: These compute in float32 in any dtype.
WIDENED = POINTWISE - {"abs", "max", "min", "neg", "sign"}
#: XLA computes these before a broadcast.
_OF_BROADCASTS = frozenset(["convert_element_type", "slice", "split"])
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
        # Products of matrices, which XLA may compute transposed.
        self._products: set[int] = set()
        # Copies of products' operands, by their numbers, how often they are as large, and axes.
        self._copies: dict[Any, int] = {}
        self.results = self._flatten(program, {})

    def _number(self, v: Any) -> int:
        is_array = type(v) is not core.Literal and hasattr(v.aval, "shape")
        return self._sized(bytes_of(v.aval.shape, v.aval.dtype) if is_array else 0)

    def _sized(self, nbytes: Any) -> int:
        self.sizes.append(nbytes)
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
            if operands and _swaps_matrices(eqn) and operands[0] != self._untransposed(operands[0]):
                numbers[eqn.outvars[0]] = self._untransposed(operands[0])
                continue
            if operands and (name == "slice" or name in REDUCTIONS):
                maker = makers.get(operands[0])
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
            if len(operands) == 1 and operands[0] in makers:
                maker = makers[operands[0]]
                if name in _OF_BROADCASTS and maker.kind == "broadcast" and maker.operands:
                    before, after = self.sizes[maker.operands[0]], self.sizes[operands[0]]
                    kind = kind if lineage.is_at_least(before, after) else "broadcast"
                elif operands[0] in self._products and _swaps_matrices(eqn):
                    kind = "view"
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

        A library's products read batch axes first, rows that are not repeated, and no transposed
        matrix on the left, such as in the gradient of weights. The others are in float32, and so
        are products of matrices that an equation of their own transposes.
        """
        forms = [_form(eqn, p) for p in range(len(operands))]
        numbers = [
            self._untransposed(n) if form.is_matrix else n
            for n, form in zip(operands, forms, strict=True)
        ]
        are_matrices = all(form.is_matrix for form in forms)
        is_cast = kind == "alone" or numbers != operands
        if forms[0].is_matrix and forms[0].is_turned == (numbers[0] == operands[0]):
            kind, is_cast = "alone", is_cast or are_matrices
        for p, (n, form) in enumerate(zip(numbers, forms, strict=True)):
            maker, times = self.makers.get(n), 1 + (is_cast and is_half(eqn.invars[p]))
            is_row = maker and maker.kind == "broadcast" and maker.eqn.primitive.name in LOOKUPS
            order = () if form.is_matrix or _is_sorted(form.order) else form.order
            if is_row or order or times > 1:
                numbers[p] = self._copied(eqn, n, times, *order)
            elif form.is_reshaped and maker and maker.kind in ("loop", "pointwise"):
                numbers[p] = self._matrix(n, eqn.invars[p], maker)
        if is_cast and is_half(eqn.outvars[0]):
            written = [self._sized(2 * self.sizes[results[0]])]
            self._add(Operation(eqn, "alone", numbers, written))
            self._add(Operation(eqn, "loop", written, results))
        else:
            self._add(Operation(eqn, kind, numbers, results))
            self._products.update(results if are_matrices else ())

    def _untransposed(self, n: int) -> int:
        maker = self.makers.get(n)
        return maker.operands[0] if maker and _swaps_matrices(maker.eqn) else n

    def _copied(self, eqn: core.JaxprEqn, n: int, times: int, *order: Any) -> int:
        """Copies an operand of a product by a loop, into so many times its bytes.

        Products that read the same values in the same order of axes share a copy.
        """
        key = n, times, *order
        if key not in self._copies:
            self._copies[key] = self._sized(times * self.sizes[n])
            self._add(Operation(eqn, "loop", [n], [self._copies[key]]))
        return self._copies[key]

    def _matrix(self, n: int, v: Any, maker: Operation) -> int:
        """Returns a value that a loop may compute as a matrix, which a product reads."""
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
            if _library_reduces(eqn, name):
                return "reduction"
            sizes = cast("Any", eqn.invars[0].aval).shape
            is_long = any(lineage.is_at_least(sizes[d], 33) for d in eqn.params.get("axes", ()))
            return "alone" if is_long and not name.startswith("arg") else "loop"
        # A scatter of one slice is an update in place, too.
        is_slice = name == "scatter" and math.prod(cast("Any", eqn.invars[1].aval).shape[:-1]) == 1
        if name == "dynamic_update_slice" or is_slice:
            return "update"
        if name in ALONE or name == "concatenate" and _is_written(eqn):
            return "alone"
        if inner_programs(eqn):
            return "call"
        return "pointwise" if name in POINTWISE and _is_in_library(eqn) else "loop"


def _is_of_one_row(eqn: core.JaxprEqn, name: str) -> bool:
    """Whether an equation repeats the only row of a table; XLA makes a broadcast of it."""
    if name == "concatenate":
        size = cast("Any", eqn.invars[0].aval).shape[eqn.params["dimension"]]
        return len(set(eqn.invars)) == 1 < len(eqn.invars) and size == 1
    if name not in LOOKUPS:
        return False
    table, result = (cast("Any", v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    if name == "gather":
        return math.prod(table.shape) == math.prod(eqn.params["slice_sizes"])
    return table.shape[eqn.params["how"].axis] == 1


def is_half(v: Any) -> bool:
    """Whether a variable has 16 bits."""
    return v.aval.dtype in HALF


def _swaps_matrices(eqn: core.JaxprEqn) -> bool:
    """Whether an equation transposes the matrices of a batch; products read or write them so."""
    if eqn.primitive.name != "transpose":
        return False
    sizes = cast("Any", eqn.invars[0].aval).shape
    order = [d for d in eqn.params["permutation"] if sizes[d] != 1]
    return len(order) > 1 and _is_sorted([*order[:-2], order[-1], order[-2]])


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


class _Form(NamedTuple):
    """Describes an operand of a product.

    Attributes:
      order: its axes but for those of size 1, in the order in which XLA multiplies matrices.
      free, summed: the sizes of the axes that the result has, and of those that it has not.
      is_matrix: whether it is a matrix, or one for each element of a batch, so that XLA reads it as
        it is, also if it is turned, which is transposed.
      is_reshaped: whether several of its axes are one axis of a matrix.
    """

    order: tuple[int, ...] = ()
    free: Any = 1
    summed: Any = 1
    is_matrix: bool = False
    is_turned: bool = False
    is_reshaped: bool = False


def _form(eqn: core.JaxprEqn, position: int) -> _Form:
    if eqn.primitive.name != "dot_general":
        return _Form()
    shape: Any = cast("Any", eqn.invars[position].aval).shape
    summed, batch = (x[position] for x in eqn.params["dimension_numbers"])
    free = [d for d in range(len(shape)) if d not in summed and d not in batch]
    parts = (batch, summed, free) if position else (batch, free, summed)
    order = tuple([d for part in parts for d in part if shape[d] != 1])
    is_matrix = len(free) == len(summed) == 1 and tuple(batch) == tuple(range(len(batch)))
    of_batch, *others = ([d for d in part if shape[d] != 1] for part in (batch, free, summed))
    is_reshaped = not of_batch and max(map(len, others)) > 1
    rows, terms = (math.prod([shape[d] for d in part]) for part in (free, summed))
    return _Form(order, rows, terms, is_matrix, not _is_sorted(order), is_reshaped)


def _is_sorted(axes: Sequence[int]) -> bool:
    return list(axes) == sorted(axes)


def _kind_of_product(eqn: core.JaxprEqn) -> str:
    lhs, rhs = _form(eqn, 0), _form(eqn, 1)
    avals: list[Any] = [v.aval for v in eqn.invars]
    dtypes = {x.dtype for x in avals}
    if lhs.summed == 1:
        return "pointwise" if _is_in_library(eqn) else "loop"
    is_vector = lhs.free == 1 or rhs.free == 1
    if lhs.free == rhs.free == 1 and dtypes <= _WIDE:
        return "reduction" if lineage.is_at_least(avals[0].size, _ELEMENTS) else "loop"
    # Products of vectors, and tiny ones, are loops of XLA; in 16 bits, also of three rows.
    is_large = any(lineage.is_at_least(x, 8) for x in (lhs.free, rhs.free, lhs.summed))
    if dtypes <= HALF:
        is_large = is_large and any(lineage.is_at_least(x, 4) for x in (lhs.free, rhs.free))
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

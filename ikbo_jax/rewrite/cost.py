"""A cost model of traced programs: a rewritten program runs only if it does not cost more.

The costs are the floating-point operations of products, and the bytes read and written by
operations that XLA does not fuse with others. The model of fusion:

- elementwise operations, broadcasts, reshapes and slices cost nothing: XLA fuses them with the
  operation that reads their results;
- products, reductions, sorts, cumulative operations, scatters, and calls of this library's ops read
  all of their operands and write their results;
- lookups, concatenations and transposes read as many bytes as they return (lookups also read their
  indices), and write them unless only elementwise operations read the result;
- a `scan` costs its body times its length, a `while` loop its body once, a conditional its most
  expensive branch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend import core

from ikbo_jax.ops import dispatch, explain
from ikbo_jax.rewrite import lineage
from ikbo_jax.rewrite.equations import OPS, is_op
from ikbo_jax.rewrite.jaxprs import inner_programs

#: By how much a rewritten program may exceed its original: percent of the original's cost, plus the
#: cost that a GPU covers in the time of one launch.
_FLOPS_SLACK = (1, 1_000_000)
_BYTES_SLACK = (10, 1 << 18)

_MOVES = frozenset(["concatenate", "dynamic_slice", "gather", "stack", "transpose"])
_WHOLE = frozenset(
    """
    argmax argmin conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
    dynamic_update_slice ragged_dot ragged_dot_general reduce reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum reduce_window reduce_xor scatter scatter-add scatter_add
    scatter_max scatter_min scatter_mul sort top_k
    """.split()  # noqa: SIM905  A table of words reads better.
)
_READS = _MOVES | _WHOLE | {"jit"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a program; expressions if its dimensions are symbolic.

    Attributes:
      flops: floating-point operations of products; a multiply-add counts as two.
      nbytes: bytes read and written.
    """

    flops: int = 0
    nbytes: int = 0


def refusal(rewritten: core.Jaxpr, original: core.Jaxpr) -> str:
    """Why a rewritten program costs too much to run; "" if it does not."""
    new, old = program_cost(rewritten), program_cost(original)
    if _exceeds(new.flops, old.flops, _FLOPS_SLACK):
        return f"its products would take {_text(new.flops)} FLOP instead of {_text(old.flops)}"
    if _exceeds(new.nbytes, old.nbytes, _BYTES_SLACK):
        return f"it would move {_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
    return ""


def _exceeds(new: Any, old: Any, slack: tuple[int, int]) -> bool:
    """Whether a cost may exceed the original's, for some value of symbolic dimensions."""
    percent, amount = slack
    # Integers, since symbolic dimensions are compared with integers alone.
    return not lineage.is_at_least((100 + percent) * old + 100 * amount, 100 * new)


def _text(amount: Any) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)


def program_cost(program: core.Jaxpr) -> Cost:
    """The cost of a traced program."""
    return _cost(program, {})


def _cost(program: core.Jaxpr, costs: dict[int, Cost]) -> Cost:
    if id(program) in costs:
        return costs[id(program)]
    written = _read_unfused(program)
    flops = nbytes = 0
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name in _MOVES:
            (out,) = eqn.outvars
            index = 0 if name != "gather" else _size(eqn.invars[1])
            nbytes += _size(out) * (2 if out in written else 1) + index
        elif name in _WHOLE:
            flops += _product_flops(eqn)
            nbytes += _operands_and_results(eqn)
        elif name == "jit" and eqn.params.get("name") in OPS and is_op(eqn):
            # Layers share the program of an op.
            key = -id(eqn.params["jaxpr"])
            costs[key] = costs.get(key) or Cost(_op_flops(eqn))
            flops += costs[key].flops
            nbytes += _operands_and_results(eqn)
        elif inner := [_cost(x, costs) for x in inner_programs(eqn)]:
            if name == "cond":
                inner = [Cost(max(x.flops for x in inner), max(x.nbytes for x in inner))]
            times = eqn.params["length"] if name == "scan" else 1
            flops += times * sum(x.flops for x in inner)
            nbytes += times * sum(x.nbytes for x in inner)
    costs[id(program)] = Cost(flops, nbytes)
    return costs[id(program)]


def _read_unfused(program: core.Jaxpr) -> set[Any]:
    """The variables that are written: not all operations that read them are fused."""
    read = {v for v in program.outvars if isinstance(v, core.Var)}
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name in _READS or any(True for _ in inner_programs(eqn)):
            read.update(v for v in eqn.invars if type(v) is not core.Literal)
    return read


def _size(v: Any) -> int:
    aval = v.aval
    return lineage.bytes_of(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


def _operands_and_results(eqn: core.JaxprEqn) -> int:
    return sum(map(_size, (*eqn.invars, *eqn.outvars)))


def _product_flops(eqn: core.JaxprEqn) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        return 2 * math.prod(result.shape) * math.prod(lhs.shape[d] for d in contract)
    if name == "conv_general_dilated":
        kernel: Any = eqn.invars[1].aval
        result = eqn.outvars[0].aval
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(result.shape) * math.prod(kernel.shape) // max(1, features)
    return 0


def _op_flops(eqn: core.JaxprEqn) -> int:
    """The useful FLOPs of a call of an op of this library."""
    plans = [x for x in explain.marks(eqn.params["jaxpr"]) if isinstance(x, dispatch.Plan)]
    if not plans:
        return 0
    problem = plans[0].problem
    useful = getattr(problem, "useful_flops", 0)
    if callable(useful):
        # Each query attends to the keys of one user. Their number is the bound or, if there is
        # none, the mean.
        keys = problem.max_seqlen_kv or problem.kv_rows // max(1, problem.batch_kv)
        return useful(problem.q_rows * keys)
    return useful

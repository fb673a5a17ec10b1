"""What a traced program costs by a simple model: a rewritten one must not cost more than it saves.

Counted are the floating-point operations of products, and the bytes that operations read and write
which XLA does not fuse with others. The model of fusion:

- elementwise operations, broadcasts, reshapes and slices cost nothing: they are fused into what
  reads their results;
- products, reductions, sorts, cumulative operations, scatters, and calls of this library's ops read
  all of their operands and write their results;
- lookups, concatenations and transposes read as many bytes as they return (a lookup its indices
  besides), and write them unless only elementwise operations read them, which fuse them;
- a loop costs its body as often as it runs, a `while` loop once, a conditional its dearest branch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend import core

from ikbo_jax.ops import dispatch, explain
from ikbo_jax.rewrite import lineage
from ikbo_jax.rewrite.equations import is_op
from ikbo_jax.rewrite.jaxprs import inner_programs

#: By how much a rewritten program may exceed its original: a share of that, and what a GPU does
#: in the time of one launch besides.
_FLOPS_SLACK = (0.01, 1_000_000)
_BYTES_SLACK = (0.10, 1 << 18)

_MOVES = frozenset(["concatenate", "dynamic_slice", "gather", "transpose"])
_WHOLE = frozenset(
    """
    argmax argmin conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
    dynamic_update_slice ragged_dot ragged_dot_general reduce reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum reduce_window reduce_xor scatter scatter-add scatter_add
    scatter_max scatter_min scatter_mul sort top_k
    """.split()  # noqa: SIM905  A table of words reads better.
)
_CALLS = frozenset(["jit", "pjit"])
_READS = _MOVES | _WHOLE | _CALLS


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs.

    Attributes:
      flops: floating-point operations of products; multiply and add are two.
      nbytes: bytes read and written.
    """

    flops: int = 0
    nbytes: int = 0


def refusal(rewritten: core.Jaxpr, original: core.Jaxpr) -> str:
    """Why a rewritten program must not run: it costs more; "" if it does not."""
    ours, theirs = program_cost(rewritten), program_cost(original)
    if _exceeds(ours.flops, theirs.flops, _FLOPS_SLACK):
        return f"its products would take {ours.flops:,} FLOP instead of {theirs.flops:,}"
    if _exceeds(ours.nbytes, theirs.nbytes, _BYTES_SLACK):
        return f"it would move {ours.nbytes:,} bytes instead of {theirs.nbytes:,}"
    return ""


def _exceeds(ours: int, theirs: int, slack: tuple[float, int]) -> bool:
    share, amount = slack
    return ours > theirs * (1 + share) + amount


def program_cost(program: core.Jaxpr) -> Cost:
    """What a traced program costs."""
    return _cost(program, {})


def _cost(program: core.Jaxpr, known: dict[int, Cost]) -> Cost:
    if id(program) in known:
        return known[id(program)]
    written = _read_by_others(program)
    flops = nbytes = 0
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name in _MOVES:
            (out,) = eqn.outvars
            index = 0 if name != "gather" else _size(eqn.invars[1])
            nbytes += _size(out) * (2 if out in written else 1) + index
        elif name in _WHOLE or name in _CALLS and is_op(eqn):
            flops += _product_flops(eqn) if name in _WHOLE else _op_flops(eqn)
            nbytes += _operands_and_results(eqn)
        elif inner := [_cost(x, known) for x in inner_programs(eqn)]:
            if name == "cond":
                inner = [Cost(max(x.flops for x in inner), max(x.nbytes for x in inner))]
            times = eqn.params["length"] if name == "scan" else 1
            flops += times * sum(x.flops for x in inner)
            nbytes += times * sum(x.nbytes for x in inner)
    known[id(program)] = Cost(flops, nbytes)
    return known[id(program)]


def _read_by_others(program: core.Jaxpr) -> set[Any]:
    """The variables that something other than an elementwise operation reads."""
    found = {v for v in program.outvars if isinstance(v, core.Var)}
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name in _READS or any(True for _ in inner_programs(eqn)):
            found.update(v for v in eqn.invars if type(v) is not core.Literal)
    return found


def _size(v: Any) -> int:
    aval = v.aval
    return lineage.nbytes(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


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
    """Useful floating-point operations of a call of an op of this library."""
    plans = [x for x in explain.marks(eqn.params["jaxpr"]) if isinstance(x, dispatch.Plan)]
    if not plans:
        return 0
    problem = plans[0].problem
    useful = getattr(problem, "useful_flops", 0)
    if callable(useful):
        # A query meets the keys of its own user alone: of lengths that are not known, the mean.
        keys = problem.max_seqlen_kv or problem.kv_rows // max(1, problem.batch_kv)
        return int(useful(problem.q_rows * keys))
    return int(useful)

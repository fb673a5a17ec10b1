"""A cost model of traced programs: a rewritten program runs only if it does not cost more.

The costs are the floating-point operations of products, and the bytes read and written by
operations that XLA does not fuse with others. The model of fusion:

- elementwise operations, broadcasts, reshapes and slices cost nothing: XLA fuses them with the
  operation that reads their results;
- products, reductions, sorts, cumulative operations, scatters, cuDNN's attention, and calls of this
  library's ops read all of their operands and write their results;
- lookups, concatenations and transposes read as many bytes as they return (lookups also read their
  indices), and write them unless only elementwise operations read the result;
- a `scan` costs its body times its length, a `while` loop its body once, a conditional its most
  expensive branch;
- work that the rewritten program does only for rare values of its inputs costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.equations import op_plan
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: By how much a rewritten program may exceed its original: percent of the original's cost, plus the
#: cost that a GPU covers in the time of one launch.
_FLOPS_SLACK = (1, 1_000_000)
_BYTES_SLACK = (10, 1 << 18)

_LOOKUPS = frozenset(["gather", "ikbo_rows"])
_MOVES = _LOOKUPS | {"concatenate", "dynamic_slice", "stack", "transpose"}
_WHOLE = frozenset(
    """
    argmax argmin conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
    dynamic_update_slice ragged_dot ragged_dot_general reduce reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum reduce_window reduce_xor scatter scatter-add scatter_add
    scatter_max scatter_min scatter_mul sort top_k
    """.split()  # noqa: SIM905  A table of words reads better.
)
#: Attention by cuDNN, and the number of its products.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
_CUDNN = {CUDNN_FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}
_READS = _MOVES | _WHOLE | _CUDNN.keys() | {"jit"}
#: Functions that `masks` calls in a branch that only rare values of the inputs take: users without
#: any kept key, beside logits above 30 for a mask of -1e9 in float32.
_RARE = ("rows_without_kept_keys",)


class Cost(NamedTuple):
    """Holds the cost of a program; expressions if its dimensions are symbolic.

    Attributes:
      flops: floating-point operations of products; a multiply-add counts as two.
      nbytes: bytes read and written.
    """

    flops: int = 0
    nbytes: int = 0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, self.nbytes - other.nbytes)


_NOTHING = Cost()


def refusal(new: Cost, old: Cost) -> str:
    """Says why a rewritten program costs too much to run; "" if it does not."""
    if _exceeds(new.flops, old.flops, _FLOPS_SLACK):
        return f"its products would take {_text(new.flops)} FLOP instead of {_text(old.flops)}"
    if _exceeds(new.nbytes, old.nbytes, _BYTES_SLACK):
        return f"it would move {_text(new.nbytes)} bytes instead of {_text(old.nbytes)}"
    return ""


def _exceeds(new: Any, old: Any, slack: tuple[int, int]) -> bool:
    percent, amount = slack
    # Integers, since symbolic dimensions are compared with integers alone.
    return not lineage.is_at_least((100 + percent) * old + 100 * amount, 100 * new)


def _text(amount: Any) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)


def program_cost(program: core.Jaxpr) -> Cost:
    """Computes the cost of a traced program."""
    return total(cost_by_source(program, ()))


def cost_by_source(
    program: Any, sources: Container[int | None] | None = None
) -> dict[int | None, Cost]:
    """Computes the cost of a traced program, by the tracebacks of its equations.

    Args:
      program: the program, or an object with its `eqns` and `outvars`.
      sources: identities of tracebacks; None for all tracebacks.

    Returns:
      By identity of a traceback among `sources`, the cost of the equations with this traceback,
      and of the programs that they call, except equations there that have a traceback among
      `sources`. By None, the cost of all other equations.
    """
    return _cost(program, sources, {})


def total(costs: Mapping[Any, Cost]) -> Cost:
    """Adds the costs."""
    return Cost(sum(x.flops for x in costs.values()), sum(x.nbytes for x in costs.values()))


def _cost(
    program: Any, sources: Container[int | None] | None, known: dict[int, Any]
) -> dict[int | None, Cost]:
    if id(program) in known:
        return known[id(program)]
    without = explain.WITHOUT_PROGRAMS
    inner_of: list[Sequence[core.Jaxpr]] = [
        () if eqn.primitive.name in without else inner_programs(eqn) for eqn in program.eqns
    ]
    written = _read_unfused(program, inner_of)
    sums: dict[int | None, list[int]] = {}

    def add(source: int | None, flops: int, nbytes: int) -> None:
        if source in sums:
            sums[source][0] += flops
            sums[source][1] += nbytes
        else:
            sums[source] = [flops, nbytes]

    for eqn, inner in zip(program.eqns, inner_of, strict=True):
        name = eqn.primitive.name
        if not inner and name not in _READS or eqn.params.get("name") in _RARE:
            continue
        source: int | None = id(eqn.source_info.traceback)
        source = source if sources is None or source in sources else None
        if name in _MOVES:
            (out,) = eqn.outvars
            index = 0 if name not in _LOOKUPS else _size(eqn.invars[1], known)
            add(source, 0, _size(out, known) * (2 if out in written else 1) + index)
        elif name in _WHOLE or name in _CUDNN:
            add(source, _product_flops(eqn), _operands_and_results(eqn, known))
        elif (flops := _flops_of_op(eqn, known)) is not None:
            add(source, flops, _operands_and_results(eqn, known))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            # A model may call one program in every layer.
            of_programs = [known.get(id(x)) or _cost(x, sources, known) for x in inner]
            if name == "cond":
                of_programs = [_dearest(of_programs)]
            for found in of_programs:
                for key, x in found.items():
                    add(source if key is None else key, times * x.flops, times * x.nbytes)
    costs = known[id(program)] = {source: Cost(*sum_) for source, sum_ in sums.items()}
    return costs


def _dearest(branches: list[dict[int | None, Cost]]) -> dict[int | None, Cost]:
    """Returns the FLOPs of the branch with most FLOPs, and the bytes of the one with most bytes."""
    flops = max(branches, key=lambda x: total(x).flops)
    nbytes = max(branches, key=lambda x: total(x).nbytes)
    return {
        key: Cost(flops.get(key, _NOTHING).flops, nbytes.get(key, _NOTHING).nbytes)
        for key in flops | nbytes
    }


def _read_unfused(program: Any, inner_of: Sequence[Sequence[core.Jaxpr]]) -> set[Any]:
    """Returns the written variables; `inner_of` holds the programs inside each equation."""
    read = {v for v in program.outvars if isinstance(v, core.Var)}
    for eqn, inner in zip(program.eqns, inner_of, strict=True):
        if inner or eqn.primitive.name in _READS:
            read.update([v for v in eqn.invars if type(v) is not core.Literal])
    return read


def _size(v: Any, known: dict[int, Any]) -> int:
    """Returns the bytes of a variable or literal; `known` holds the sizes of types, by identity."""
    aval = v.aval
    size = known.get(id(aval))
    if size is None:
        size = lineage.bytes_of(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0
        known[id(aval)] = size
    return size


def _operands_and_results(eqn: core.JaxprEqn, known: dict[int, Any]) -> int:
    total = 0
    for v in (*eqn.invars, *eqn.outvars):
        total += _size(v, known)
    return total


def _product_flops(eqn: core.JaxprEqn) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs: Any = eqn.invars[0].aval
        result: Any = eqn.outvars[0].aval
        return 2 * math.prod(result.shape) * math.prod([lhs.shape[d] for d in contract])
    if name == "conv_general_dilated":
        kernel: Any = eqn.invars[1].aval
        result = eqn.outvars[0].aval
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(result.shape) * math.prod(kernel.shape) // max(1, features)
    if name in _CUDNN:
        query, key, *_ = (v.aval.shape for v in eqn.invars)  # type: ignore[attr-defined]
        # Both are [batch, sequence, heads, width], or both [batch, heads, sequence, width].
        keys = key[1 if eqn.params["layout"] == 0 else 2]
        return 2 * _CUDNN[name] * math.prod(query) * keys
    return 0


def _flops_of_op(eqn: core.JaxprEqn, known: dict[int, Any]) -> int | None:
    """Returns the useful FLOPs of a call of an op of this library; None for other equations."""
    if eqn.primitive.name != "jit" or eqn.params.get("name") not in OPS:
        return None
    # Layers share the program of an op.
    key = -id(eqn.params["jaxpr"])
    if key not in known:
        plan = op_plan(eqn)
        known[key] = None if plan is None else _useful_flops(plan.problem)
    return known[key]


def _useful_flops(problem: Any) -> int:
    useful = getattr(problem, "useful_flops", 0)
    if callable(useful):
        # Each query attends to the keys of one user. Their number is the bound or, if there is
        # none, the mean.
        keys = problem.max_seqlen_kv or problem.kv_rows // max(1, problem.batch_kv)
        return useful(problem.q_rows * keys)
    return useful

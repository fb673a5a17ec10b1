"""Kinds of operations, and the floating-point operations of products."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from ikbo_jax.rewrite.values import lineage
from ikbo_jax.rewrite.values.equations import op_plan
from ikbo_jax.rewrite.values.hoisting import PRODUCTS, scan_counts, split
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: Attention by cuDNN, and the number of its products.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
CUDNN = {CUDNN_FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}

LOOKUPS = frozenset(["gather", "ikbo_rows"])
MOVES = LOOKUPS | {"concatenate", "dynamic_slice", "pad", "stack", "transpose"}
#: Bytes, read at the rate of device memory, in whose time a GPU selects an element: 0.65 ps.
#: FiBiNET takes 0.63 ps for each in bfloat16, 0.80 in float32, besides what it reads (H200).
SELECTED_BYTES = 2
#: The same of features that are repeated, for pairs with others: 0.97 ps. A network of products of
#: pairs (PNN) took 1.08 of the original's time, estimated at 1.02 with this price (H200, bfloat16).
_REPEATED_BYTES = 3
#: The same of a lookup along the last axis, where each element is a row of its own: 5 ps, in sums
#: over fields' matrices, of 2,976 candidates in bfloat16 and 800 in float32 (H200).
_SINGLE_BYTES = 16
#: Kernels of attention or `gdpa` in XLA, and of the groups of candidates by user, which all such
#: calls of a program share: as many as fit the times of 20 programs in float32. In small ones, of
#: 800 candidates, attention with one query may take twice the time of the original, where XLA fuses
#: the lookup of keys with the product.
_XLA_KERNELS, _GROUP_KERNELS = 4, 9
#: Key of whether a call was counted that groups candidates.
_GROUPED = 0
#: The same of a concatenation, along the last axis and along others: 0.97 and 1.9 ps. In one of
#: [3200, 33, 64], XLA takes up to 6 ps; along the last axis, 0.3 to 1 ps (H200, bfloat16).
_CONCATENATED_BYTES = 3, 6
#: These do not compute.
SAME = frozenset(
    """
    convert_element_type copy expand_dims ikbo_note ikbo_reverse_only optimization_barrier reshape
    sharding_constraint squeeze stop_gradient
    """.split()  # noqa: SIM905  A table of words reads better.
)
#: What is read of these operands is as large as the result.
PARTS = LOOKUPS | {"dynamic_slice", "slice", "split"}
REDUCTIONS = frozenset(
    """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor
    """.split()  # noqa: SIM905
)
_WHOLE = frozenset(
    """
    conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
    dynamic_update_slice ragged_dot ragged_dot_general reduce_window reduce_window_max
    reduce_window_min reduce_window_sum scatter scatter-add scatter_add scatter_max scatter_min
    scatter_mul sort top_k
    """.split()  # noqa: SIM905
)
ALONE = _WHOLE | CUDNN.keys()
#: Calls that XLA inlines: what they hold is fused with what stands around them.
INLINED = frozenset(
    """
    checkpoint closed_call custom_jvp_call custom_vjp_call custom_vmap_call ikbo_by_platform
    ikbo_rewritten jit
    """.split()  # noqa: SIM905
)
#: Computes the bytes of an array, once for each shape and dtype.
bytes_of = functools.lru_cache(maxsize=4096)(lineage.bytes_of)


def flops_of_product(eqn: core.JaxprEqn) -> int:
    """Returns the FLOPs of a product; 0 for other equations."""
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
    if name in CUDNN:
        query, key, *_ = (v.aval.shape for v in eqn.invars)  # type: ignore[attr-defined]
        # Both are [batch, sequence, heads, width], or both [batch, heads, sequence, width].
        keys = key[1 if eqn.params["layout"] == 0 else 2]
        return 2 * CUDNN[name] * math.prod(query) * keys
    return 0


def bytes_of_selection(eqn: core.JaxprEqn) -> Any:
    """Counts the bytes in whose time a kernel computes the places of a lookup's elements, or 0.

    It does for a lookup of features of every row, as of FiBiNET's pairs of fields.
    """
    operand: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    rows, sizes, each = 1, operand.shape, SELECTED_BYTES
    if eqn.primitive.name == "ikbo_rows":
        axis = eqn.params["how"].axis
        taken: Any = (*sizes[:axis], -1)
        each = _SINGLE_BYTES if axis == len(sizes) - 1 else each
    else:
        taken = eqn.params["slice_sizes"]
    for size, part in zip(sizes, taken, strict=False):
        if part != size:
            return each * math.prod(result.shape) if rows != 1 else 0
        rows *= size
    return 0


def bytes_of_repeats(broadcast: core.JaxprEqn, reshape: core.JaxprEqn) -> Any:
    """Counts the bytes in whose time a kernel computes from where it takes repeated features."""
    operand: Any = broadcast.invars[0].aval
    shape, result = broadcast.params["shape"], reshape.params["new_sizes"]
    is_repeated = operand.size != math.prod(shape) and operand.shape[-1:] == shape[-1:]
    of_rows = operand.shape[:1] == shape[:1] == result[:1]
    return _REPEATED_BYTES * math.prod(result) if is_repeated and of_rows else 0


def bytes_of_concatenation(eqn: core.JaxprEqn) -> Any:
    """Counts the bytes in whose time a kernel computes from which part it takes each element."""
    shape = eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
    return _CONCATENATED_BYTES[eqn.params["dimension"] != len(shape) - 1] * math.prod(shape)


def is_of_vectors(eqn: core.JaxprEqn) -> bool:
    """Whether an equation multiplies with a vector for each element of a batch."""
    if eqn.primitive.name != "dot_general":
        return False
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    if not batch:
        return False
    ranks: list[int] = [v.aval.ndim for v in eqn.invars]  # type: ignore[attr-defined]
    return len(batch) + len(contract) in ranks


def cost_of_op(eqn: core.JaxprEqn, known: dict[int, Any]) -> tuple[int, int] | None:
    """Returns useful FLOPs and kernels of a call of an op of this library; None for others."""
    if eqn.primitive.name != "jit" or eqn.params.get("name") not in OPS:
        return None
    # Layers share the program of an op.
    key = -id(eqn.params["jaxpr"])
    if key not in known:
        known[key] = plan = op_plan(eqn)
        if plan is not None:
            groups = plan.op in ("attention", "gdpa") and plan.implementation == "xla"
            known[key] = _useful_flops(plan.problem), _XLA_KERNELS if groups else 1
    if known[key] is not None and known[key][1] == _XLA_KERNELS and _GROUPED not in known:
        known[_GROUPED] = True
        return known[key][0], _XLA_KERNELS + _GROUP_KERNELS
    return known[key]


def _useful_flops(problem: Any) -> int:
    useful = getattr(problem, "useful_flops", 0)
    if callable(useful):
        # Each query attends to the keys of one user. Their number is the bound or, if there is
        # none, the mean.
        keys = problem.max_seqlen_kv or problem.kv_rows // max(1, problem.batch_kv)
        return useful(problem.q_rows * keys)
    return useful


#: FLOPs, bytes, kernels, and femtoseconds of computing.
Sums = list[int]


def steps_of(eqn: core.JaxprEqn, known: dict[Any, Any]) -> list[tuple[int, Any]]:
    """Returns the programs that an equation calls, each with the number of its calls."""
    length, programs = eqn.params.get("length", 1), inner_programs(eqn)
    if length != 1 and not PRODUCTS.isdisjoint([x.primitive.name for x in programs[0].eqns]):
        # XLA computes products before a loop that are the same in every step.
        parts = split(programs[0], scan_counts(eqn.params)[0], length)
        if parts := known.setdefault(("parts", id(programs[0])), parts):
            return list(zip((1, length), parts, strict=True))
    return [(length, x) for x in programs]


def sums_of_calls(
    eqn: core.JaxprEqn, known: dict[Any, Any], count: Callable[[Any], Sequence[int]]
) -> Sums:
    """Adds up what the programs that an equation calls cost."""
    costs = [(times, count(x)) for times, x in steps_of(eqn, known)]
    if eqn.primitive.name == "cond":
        # The branch with most FLOPs; of two, the one with more bytes.
        for n in (1, 0):

            def amount(cost: tuple[int, Sequence[int]], n: int = n) -> int:
                return cost[1][n]

            costs.insert(0, lineage.largest(costs, amount))
        costs = costs[:1]
    flops = eqn.params.get("length", 1) * sum([sums[0] for _, sums in costs])
    return [flops, *[sum([times * sums[n] for times, sums in costs]) for n in (1, 2, 3)]]

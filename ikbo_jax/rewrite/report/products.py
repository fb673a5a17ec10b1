"""The floating-point operations of products, of XLA, of cuDNN and of this library's ops."""

import math
from typing import Any

from jax.extend import core

from ikbo_jax.rewrite.values.equations import op_plan
from ikbo_jax.rewrite.values.jaxprs import OPS

#: Attention by cuDNN, and the number of its products.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
CUDNN = {CUDNN_FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}


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


def flops_of_op(eqn: core.JaxprEqn, known: dict[int, Any]) -> int | None:
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

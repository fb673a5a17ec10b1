"""Own tokens of attention: whether a kernel merges them, and how XLA does."""

from collections.abc import Sequence
from typing import Any

import jax

from ikbo_jax.ops import dispatch
from ikbo_jax.ops.attention_vmap import LSE, QUERY, SPLIT
from ikbo_jax.ops.partition import Rule, dimensions
from ikbo_jax.ops.sharded import run_by_types
from ikbo_jax.reference import attention as reference

_SELF_TOKENS = Rule(
    ("out", "lse", "query", "self_key", "self_value"),
    tuple(map(dimensions, (QUERY, LSE, QUERY, "b s k h", "b s k h"))),
    tuple(map(dimensions, (QUERY, LSE))),
    tuple(SPLIT.items()),
)


def are_merged_by(plan: dispatch.Plan, self_key: jax.Array | None = None) -> bool:
    """Whether the plan's kernel merges own tokens, of which a candidate may have one."""
    if plan.implementation != "mosaic_gpu" or (self_key is not None and self_key.shape[1] > 1):
        return False
    return plan.config.takes_own_tokens(plan.problem)


def merged(
    of_scores: dict[str, Any],
    out: jax.Array,
    lse: jax.Array,
    query: jax.Array,
    self_key: jax.Array,
    self_value: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Merges `out` and `lse` with the attention of every candidate over its own tokens."""

    def local(parts: Sequence[Any], _: Any) -> tuple[jax.Array, jax.Array]:
        out, lse, *own = parts
        return reference.merge_attention(out, lse, *reference.self_attention(*own, **of_scores))

    operands = out, lse, query, self_key, self_value
    out, lse = run_by_types(local, _SELF_TOKENS, operands)
    return out, lse

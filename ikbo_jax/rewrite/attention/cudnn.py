"""Attention by cuDNN, `jax.nn.dot_product_attention(..., implementation="cudnn")`.

JAX traces it to one primitive inside of a `custom_vjp` function. With looked-up keys and values it
becomes `ikbo.attention`; if the queries are looked up by the same index, cuDNN runs at the smaller
batch. Masks, biases, windows and dropout stay as they are written, on copies.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.ops.attention import attention
from ikbo_jax.rewrite.facts.known import known
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.report.products import CUDNN_FORWARD
from ikbo_jax.rewrite.rules.elementwise import at_user_batch, of_one_user
from ikbo_jax.rewrite.values.jaxprs import interpret
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, origins_of, spread_axes
from ikbo_jax.rewrite.values.registry import NotCovered

#: The primitive's `layout` for [batch, sequence, heads, width].
_BTNH = 0


def is_attention(eqn: Any) -> bool:
    """Whether a call of a `custom_vjp` function is attention by cuDNN."""
    names = [inner.primitive.name for inner in eqn.params["call_jaxpr"].eqns]
    return names.count(CUDNN_FORWARD) == 1


def call(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Interprets a call of cuDNN's attention; NotCovered if the attention is not covered.

    Under `jax.vmap`, the program reshapes operands and result.
    """
    inner, jaxpr = ctx.inner(), eqn.params["call_jaxpr"]

    def run(one: Any, values: list[Any]) -> Sequence[Any]:
        if one.primitive.name == CUDNN_FORWARD:
            return [_attend(inner, one, values)]
        return inner.run_equation(one, values)

    with ctx.recorder.inside(eqn):
        return interpret(jaxpr.jaxpr, jaxpr.consts, operands, run)


def _attend(ctx: Context, eqn: Any, operands: Sequence[Any]) -> Any:
    """Attends to looked-up keys and values, without copies."""
    params = eqn.params
    query, key, value, bias, q_lengths, kv_lengths, *others = operands
    mask = params["mask_type"].name
    unusual = [
        name
        for name, is_there in (
            ("bias or mask", 0 not in bias.shape or any(params["variadic_args"])),
            ("packed or paged sequences", any(0 not in x.shape for x in others)),
            ("heads before positions", params["layout"] != _BTNH),
            ("dropout", params["dropout_rate"] != 0),
            ("a window", params["sliding_window_length"] is not None),
            ("residuals", len(eqn.outvars) != 1),
        )
        if is_there
    ]
    if unusual:
        raise NotCovered(f"attention by cuDNN with {unusual[0]}")
    key, value = (of_one_user(ctx, x, 0) for x in (key, value))
    if not (has_lineage(key) and has_lineage(value) and key.lineage is value.lineage):
        raise NotCovered("attention by cuDNN whose keys and values are not looked up alike")
    if key.axis != 0 or value.axis != 0 or key.shape != value.shape:
        raise NotCovered("attention by cuDNN with other keys than [batch, keys, heads, width]")
    key_base, value_base = (spread_axes(x, range(4)).base for x in (key, value))
    has_lengths = mask.startswith("PADDING")
    lengths = _by_user(ctx, kv_lengths, key, key.shape[1]) if has_lengths else None
    origins = origins_of(query, key, value)
    if has_lineage(query) and query.lineage is key.lineage and query.axis == 0:
        q_by_user = _by_user(ctx, q_lengths, query, query.shape[1]) if has_lengths else None
        # JAX's own function mixes dtypes, which a caller's strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            out = jax.nn.dot_product_attention(
                spread_axes(query, range(4)).base,
                key_base,
                value_base,
                scale=params["scale"],
                is_causal=mask.endswith("CAUSAL"),
                query_seq_lengths=q_by_user,
                key_value_seq_lengths=lengths,
                implementation="cudnn",
            )
        return at_user_batch(ctx, eqn, out, key.lineage, 0, origins)
    if mask.endswith("CAUSAL"):
        raise NotCovered("attention by cuDNN with a causal mask")
    if has_lengths and not _is_always(ctx, q_lengths, query.shape[1]):
        raise NotCovered("attention by cuDNN with lengths of queries")
    if has_lineage(query):
        query = ctx.materialise(eqn, query, "queries that are looked up by another index")
    found = attention(
        ctx.build(query),
        key_base,
        value_base,
        key.lineage.index,
        scale=params["scale"],
        key_value_seq_lengths=lengths,
    )
    ctx.recorder.saved(eqn, origins, "attention", True)
    return found


def _by_user(ctx: Context, lengths: Any, like: Lazy, most: int) -> jax.Array | None:
    """Returns lengths as they are looked up, [users] int32; None if all are `most`."""
    if _is_always(ctx, lengths, most):
        return None
    if has_lineage(lengths) and lengths.lineage is like.lineage:
        return lengths.base.astype(jnp.int32)
    raise NotCovered("attention by cuDNN with lengths that are not looked up like the keys")


def _is_always(ctx: Context, lengths: Any, number: int) -> bool:
    value = known(ctx, lengths)
    return value is not None and bool(np.all(value == number))

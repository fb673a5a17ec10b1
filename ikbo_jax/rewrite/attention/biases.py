"""A bias of attention's logits that does not depend on the candidate.

Such a bias is looked up like the keys, as a penalty of recency or of padding, or belongs to
positions alone, as ALiBi's. The op adds it to its scores.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention.blocks import Blocks, arranged_array, of_bases
from ikbo_jax.rewrite.attention.scores import BATCH, DTYPES, HEAD, KEY, QUERY, Fill, Scores
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Lazy, base_of, has_lineage, is_plain, origins_of, spread
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Reshaped


def added(
    ctx: Context,
    eqn: Any,
    operands: Sequence[Any],
    scores: Scores,
    bias: Any,
    *,
    subtracts: bool = False,
) -> Scores:
    """Adds a bias to logits, which may have biases or added masks by user already."""
    root = scores.root
    if isinstance(bias, (Lazy, Reshaped)) and bias.shape[scores.labels.index((BATCH, 0))] == 1:
        # Rows of a table, looked up by positions.
        bias = ctx.build(bias)
    if scores.stage != "logits":
        raise NotCovered(f"attention is not recognised: something is added to its {scores.stage}")
    dtype = eqn.outvars[0].aval.dtype
    if isinstance(root, Blocks):
        if dtype not in DTYPES or bias.dtype != dtype:
            raise NotCovered(f"attention is not recognised: biases of {bias.dtype} and {dtype}")
        root = root.biased(scores, bias, subtracts=subtracts)
        return scores.then(eqn, operands, root=root)
    if reason := _not_of_users(scores, bias):
        raise NotCovered(f"attention is not recognised: a bias is added that {reason}")
    root, total = of_masks(root), _arranged(-base_of(bias) if subtracts else base_of(bias), scores)
    total = total if root.bias is None else _sum(total, root.bias)
    if dtype not in DTYPES or total.dtype != dtype:
        raise NotCovered(f"attention is not recognised: biases of {total.dtype} and {dtype}")
    origins = root.mask_origins | origins_of(bias)
    root = dataclasses.replace(root, bias=total, mask_origins=origins)
    return scores.then(eqn, operands, root=root)


def of_masks(root: Any) -> Any:
    """Makes biases of all masks, which were added to the logits."""
    if any(fill.added is None or fill.seen is not None for fill in root.fills):
        raise NotCovered("attention is not recognised: a bias is added to masked logits")

    def bias(fill: Fill) -> Any:
        def number(kept: Any) -> jax.Array:
            return jnp.where(kept, 0, fill.value).astype(fill.added)

        return of_bases(number, fill.kept)

    biases = list(map(bias, root.fills))
    if isinstance(root, Blocks):
        return dataclasses.replace(root, bias=(*(root.bias or ()), *biases), fills=())
    total = root.bias
    for x in biases:
        total = x[:, None, None] if total is None else _sum(total, x[:, None, None])
    return dataclasses.replace(root, bias=total, fills=())


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype not in DTYPES or x.dtype != y.dtype:
        raise NotCovered(f"attention is not recognised: biases of {x.dtype} and {y.dtype}")
    return x + y


def _not_of_users(scores: Scores, bias: Any) -> str:
    """Says why a bias is not the same for all candidates of a user; "" if it is."""
    batch = scores.labels.index((BATCH, 0))
    if has_lineage(bias):
        is_same = bias.lineage is scores.root.lineage and bias.axis == batch
        return "" if is_same else "is not looked up like its keys"
    base = base_of(bias)
    if not np.ndim(base):
        return "is one number"
    if not is_plain(base) or np.ndim(base) != len(scores.labels) or base.shape[batch] != 1:
        return "differs by candidate"
    return ""


def _arranged(base: jax.Array, scores: Scores) -> jax.Array:
    """Arranges a bias as [users or 1, heads or 1, queries or 1, keys]."""
    root = scores.root
    heads = [(HEAD, n) for n in range(len(root.heads))]
    queries = [(QUERY, n) for n in range(len(root.queries))]
    x: Any = arranged_array(base, scores.labels, [(BATCH, 0), *heads, *queries, (KEY, 0)])
    users, *between, _ = x.shape
    own = [between[: len(heads)], between[len(heads) :]]
    sizes = [
        whole if math.prod(found) != 1 else (1,) * len(found)
        for found, whole in zip(own, (root.heads, root.queries), strict=True)
    ]
    keys = root.key.shape[1]
    x = spread(x, (users, *sizes[0], *sizes[1], keys))
    flat: jax.Array = staged.reshape(x, (users, *map(math.prod, sizes), keys))
    return flat


def nan_rows(bias: jax.Array, fills: Sequence[Fill]) -> jax.Array:
    """Marks the rows [users, heads or 1, queries or 1, 1] with kept keys whose bias makes them NaN.

    A kept key has the bias NaN or infinity, or all kept keys have the bias -inf.
    """
    some = jnp.ones(bias.shape[:1], bool)
    for fill in fills:
        bias = jnp.where(fill.kept[:, None, None], bias, jnp.asarray(fill.value, bias.dtype))
        some = some & jnp.any(fill.kept, axis=1)
    largest = jnp.max(bias, axis=3, keepdims=True)
    return ~jnp.isfinite(largest) & some[:, None, None, None]


def with_nan(bias: jax.Array, fills: Sequence[Fill]) -> jax.Array:
    """Adds NaN to the rows of a bias whose softmax is NaN, since the op gives 0 to rows of -inf."""
    return bias + jnp.where(nan_rows(bias, fills), jnp.nan, 0.0).astype(bias.dtype)

"""Factors of attention's logits: numbers, learned temperatures, and soft caps."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention.scores import BATCH, KEY, QUERY, Logits, Scores, only, with_fills
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import (
    base_of,
    is_only_broadcast,
    is_plain,
    of_bases,
    transposed,
)
from ikbo_jax.rewrite.values.registry import NotCovered


def scaled(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Multiplies logits by a number or divides them by one; or by a factor, which queries take."""
    divides = eqn.primitive.name == "div"
    scores = only((x, y))
    other = y if scores is x else x
    factor = constant(ctx, other)
    if factor is None and takes_factor(scores, other) and not (divides and scores is y):
        root, by = scores.root, _of_queries(scores, other)
        query = of_bases(lambda x: x / by if divides else x * by, root.query)
        root = dataclasses.replace(root, query=query, unscaled=root.unscaled or root)
        return scores.then(eqn, [x, y], root=root)
    if factor is None or scores.stage != "logits" or (divides and scores is y):
        raise NotCovered(f"attention is not recognised: {scores.stage} scaled by another value")
    with np.errstate(all="ignore"):
        factor = float(np.divide(1.0, factor)) if divides else factor
    if not math.isfinite(factor) or factor == 0:
        raise NotCovered(f"attention is not recognised: {scores.stage} scaled by {factor:g}")
    root = with_fills(scores.root, eqn.outvars[0].aval.dtype, factor)
    name = "scale" if root.cap is None else "cap"
    biases = [of_bases(lambda b: b * jnp.asarray(factor, b.dtype), x) for x in root.biases]
    changes = {name: getattr(root, name) * factor, "biases": tuple(biases)}
    root = dataclasses.replace(root, **changes)
    return scores.then(eqn, [x, y], root=root)


def takes_factor(scores: Scores, factor: Any) -> bool:
    """Whether the queries of logits can be multiplied by a factor in place of the logits.

    It is an array that is the same for all keys, such as a learned temperature; of concatenated
    tokens, it is a number or differs by head. In 16 bits, queries times a factor are rounded, which
    no logits of the program are: a large factor then gives weights that no rounding of the program
    gives.
    """
    root = scores.root
    if scores.stage != "logits" or not root.is_only_scaled:
        return False
    base = factor.base if is_only_broadcast(factor) else factor
    if not is_plain(base) or {base.dtype, root.query.dtype, scores.dtype} != {jnp.dtype("float32")}:
        return False
    alike = (KEY,) if isinstance(root, Logits) else (KEY, QUERY, BATCH)
    sizes = zip(shape_of(base), scores.labels, strict=False)
    return all(n == 1 or label[0] not in alike for n, label in sizes)


def _of_queries(scores: Scores, factor: Any) -> jax.Array:
    """Arranges a factor of logits as [batch, *queries, *heads, 1]; sizes may be 1."""
    base = base_of(factor)
    if not shape_of(base):
        return staged.reshape(base, (1,) * len(scores.labels))
    found: jax.Array = transposed(base, [scores.labels.index(x) for x in scores.root.labels])
    return found


def capped(ctx: Context, eqn: Any, x: Any) -> Any:
    """Bounds logits by a hyperbolic tangent: a soft cap."""
    if x.stage != "logits" or not x.root.is_only_scaled:
        raise NotCovered(f"attention is not recognised: tanh of its {x.stage}")
    return x.then(eqn, [x], root=dataclasses.replace(x.root, cap=1.0))

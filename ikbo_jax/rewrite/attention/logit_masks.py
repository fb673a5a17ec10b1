"""Masks of attention's logits: put in by a select, or added as a bias."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.attention.blocks import arranged_array
from ikbo_jax.rewrite.attention.scores import BATCH, KEY, Fill, Logits, Scores, only
from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.facts.known import known
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, spread
from ikbo_jax.rewrite.values.registry import NotCovered


def selected(ctx: Context, eqn: Any, which: Any, *cases: Any) -> Any:
    """Masks logits by `where(mask, logits, number)` or `where(mask, number, logits)`."""
    if len(cases) != 2:
        raise NotCovered("attention is not recognised: its scores are the condition of a select")
    scores = only(cases)
    keeps = scores is cases[1]
    fill = constant(ctx, cases[0] if keeps else cases[1])
    if scores.stage != "logits" or fill is None or math.isnan(fill) or fill == math.inf:
        raise NotCovered(f"attention is not recognised: its {scores.stage} are masked by a value")
    if any(x.added is not None for x in scores.root.fills):
        raise NotCovered("attention is not recognised: one mask is added, another put in by where")
    root = masked(ctx, scores, which, keeps, Fill(None, None, fill))  # type: ignore[arg-type]
    return scores.then(eqn, [which, *cases], root=root)


def added(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Adds 0 to logits, or a bias that is 0 for kept keys and one number for masked keys."""
    scores = only((x, y))
    bias = y if scores is x else x
    values = proofs.possible_values(ctx, bias)
    if scores.stage != "logits" or not values or any(map(math.isnan, values)):
        raise NotCovered(f"attention is not recognised: something is added to its {scores.stage}")
    if values == {0.0}:
        return scores.then(eqn, [x, y])
    fills = [value for value in values if value != 0]
    if not isinstance(scores.root, Logits) and len(fills) == 1 and not scores.root.fills:
        kept = _is_zero(ctx, bias)
        fill = Fill(None, None, fills[0], eqn.outvars[0].aval.dtype)
        if kept is not None:
            return scores.then(eqn, [x, y], root=masked(ctx, scores, kept, True, fill))
    if not isinstance(bias, Lazy) or len(fills) != 1 or scores.root.fills or fills[0] > 0:
        raise NotCovered("attention is not recognised: a bias is added to its logits")
    kept = dataclasses.replace(bias, base=bias.base == 0)
    fill = Fill(None, None, fills[0], eqn.outvars[0].aval.dtype)  # type: ignore[arg-type]
    return scores.then(eqn, [x, y], root=masked(ctx, scores, kept, True, fill))


def _is_zero(ctx: Context, bias: Any) -> Any:
    """Returns where a bias is 0, as a mask; None if the program does not show it.

    The bias is constant, or it is written as `where(condition, 0, number)`, perhaps with further
    dimensions and in another dtype.
    """
    number = known(ctx, bias)
    if number is not None:
        # An array of NumPy, whose elements later proofs see.
        zeros: np.ndarray = ctx.scope.once(("zeros of a bias",), (bias,), lambda: number == 0)
        return zeros
    name, eqn, operands = ctx.made_by(bias)
    if name == "convert_element_type":
        return _is_zero(ctx, operands[0])
    if name in ("broadcast_in_dim", "reshape", "squeeze") and len(operands) == 1:
        mask = _is_zero(ctx, operands[0])
        return None if mask is None else _moved(ctx, eqn, mask)
    if name != "select_n" or len(operands) != 3:
        return None
    which, hidden, kept = operands
    same = getattr(which, "dtype", None) == np.bool_ and len(which.shape) == len(bias.shape)
    # The other case may be a bias again, which is 0 at some places.
    is_number = constant(ctx, hidden) is not None
    return which if same and is_number and constant(ctx, kept) == 0 else None


def _moved(ctx: Context, eqn: Any, mask: Any) -> Any:
    """Runs an equation that adds dimensions to a bias on the bias's mask."""

    def moved() -> Any:
        out = core.Var(eqn.outvars[0].aval.update(dtype=np.dtype(bool), weak_type=False))
        (result,) = ctx.run_equation(eqn.replace(outvars=[out]), [mask])
        return result

    # The layers of a model share the mask, and what is computed from it.
    return ctx.scope.once(("mask of a bias", id(eqn)), (mask, eqn), moved)


def masked(ctx: Context, scores: Scores, mask: Any, keeps: bool, fill: Fill) -> Any:
    """Adds a mask to the logits: `fill`, whose `kept` and `lengths` this function sets."""
    root = scores.root
    if not isinstance(root, Logits):
        return root.masked(ctx, scores, mask, keeps, fill)
    if not isinstance(mask, Lazy) or (
        has_lineage(mask)
        and (mask.lineage is not root.lineage or scores.labels[mask.axis][0] != BATCH)
    ):
        raise NotCovered("attention is not recognised: its mask is not looked up like its keys")
    for d, n in enumerate(mask.base.shape):
        if n != 1 and scores.labels[d][0] not in (BATCH, KEY):
            raise NotCovered("attention is not recognised: its mask differs by query or head")
        if n != 1 and scores.labels[d][0] == BATCH and d != mask.axis:
            raise NotCovered("attention is not recognised: its mask differs by candidate")
    kinds = [label[0] for label in scores.labels]
    users, keys = root.key.base.shape[:2]
    dims = kinds.index(BATCH), kinds.index(KEY)
    base = arranged_array(mask.base, scores.labels, [(BATCH, 0), (KEY, 0)])
    base = spread(base, (users, keys))
    lengths = proofs.lengths(ctx, mask, dims, users, keys) if keeps else None
    if lengths is not None:
        last = min(keys, int(jnp.iinfo(lengths.dtype).max))
        bounds = np.array([0, last], lengths.dtype)
        lengths = jnp.clip(lengths, *bounds).astype(jnp.int32)
    source = proofs.source_of_mask(ctx, mask, scores.labels) if keeps else None
    fill = dataclasses.replace(
        fill, kept=base if keeps else ~base, lengths=lengths, source=fill.source or source
    )
    origins = root.mask_origins | mask.origins
    return dataclasses.replace(root, fills=(*root.fills, fill), mask_origins=origins)

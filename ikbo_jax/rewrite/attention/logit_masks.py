"""Masks of attention's logits: put in by a select, or added as a bias."""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention import biases
from ikbo_jax.rewrite.attention.blocks import arranged_array, kept_by, unspread
from ikbo_jax.rewrite.attention.masked_keys import LARGE
from ikbo_jax.rewrite.attention.scores import BATCH, HEAD, KEY, QUERY, Fill, Logits, Scores, only
from ikbo_jax.rewrite.facts import masks, proofs
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, origins_of, spread
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
    added = [x.value for x in scores.root.fills if x.added is not None]
    if added:
        # Keys that this mask hides then weigh nothing beside keys that the added masks hide.
        if not fill <= 2 * min(added) > -math.inf:
            reason = "one mask is added, another put in by where"
            raise NotCovered(f"attention is not recognised: {reason} with a number not far below")
        scores = dataclasses.replace(scores, root=biases.of_masks(scores.root))
    root = masked(ctx, scores, which, keeps, Fill(fill))
    return scores.then(eqn, [which, *cases], root=root)


class _Term(NamedTuple):
    """Describes what is added to logits.

    Attributes:
      value: a bias, or a mask.
      number: of a mask, the number below 0 that is added where it hides keys; 0 for a bias.
      keeps: whether a mask keeps the keys at which it is True or other than 0, or hides them.
    """

    value: Any
    number: float = 0.0
    keeps: bool = False


def added(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Adds 0 to logits, a bias of 0 for kept and one number for masked keys, or another bias."""
    operands = (x, y)
    scores = only(operands)
    bias = y if scores is x else x
    if masks.few_numbers(ctx, bias) == {0.0} and scores.stage == "logits":
        return scores.then(eqn, operands)
    whole = _Term(bias, _number_of_mask(ctx, bias))
    terms = [whole] if isinstance(scores.root, Logits) else _terms(ctx, bias)
    if len(terms) > 1 and any(term.number <= LARGE for term in terms):
        with contextlib.suppress(NotCovered):
            return functools.reduce(lambda x, y: _added(ctx, eqn, operands, x, y), terms, scores)
    return _added(ctx, eqn, operands, scores, whole)


def _number_of_mask(ctx: Context, bias: Any) -> float:
    """Returns the number below 0 that a bias is where it is not 0; 0 if it is another bias."""
    fills = [value for value in masks.few_numbers(ctx, bias) or () if value != 0]
    return fills[0] if len(fills) == 1 and fills[0] < 0 else 0.0


def _terms(ctx: Context, bias: Any) -> list[_Term]:
    """Returns the terms of a sum; `where(mask, bias, -1e9)` is a sum of a bias and a mask."""
    if number := _number_of_mask(ctx, bias):
        return [_Term(bias, number)]
    name, eqn, operands = ctx.made_by(bias)
    if name == "add":
        return [term for x in operands for term in _terms(ctx, x)]
    if name == "broadcast_in_dim" and len(inner := _terms(ctx, operands[0])) > 1:
        return [x._replace(value=masks.moved(ctx, eqn, x.value)) for x in inner]
    if name == "select_n" and len(operands) == 3:
        mask, *cases = operands
        for rest, keeps in zip(cases[::-1], (True, False), strict=True):
            filled = constant(ctx, cases[0] if keeps else cases[1])
            if filled is not None and filled <= LARGE:
                return [*_terms(ctx, rest), _Term(mask, filled, keeps)]
    return [_Term(bias)]


def _added(ctx: Context, eqn: Any, operands: Any, scores: Scores, term: _Term) -> Scores:
    takes_masks = scores.root.bias is None or not isinstance(scores.root, Logits)
    is_mask = term.number and takes_masks and not scores.root.fills
    if not is_mask or scores.stage != "logits":
        return biases.added(ctx, eqn, operands, scores, term.value)
    fill = Fill(term.number, eqn.outvars[0].aval.dtype)
    try:
        root = masked(ctx, scores, term.value, term.keeps, fill)
    except NotCovered as error:
        # A mask by head, or by query without intervals, may be a bias of positions.
        with contextlib.suppress(NotCovered):
            return biases.added(ctx, eqn, operands, scores, term.value)
        raise error from None
    return scores.then(eqn, operands, root=root)


def masked(ctx: Context, scores: Scores, mask: Any, keeps: bool, fill: Fill) -> Any:
    """Adds a mask to the logits: `fill`, whose arrays this function sets.

    A mask by user and key is one array. Of any other mask, the factors by user and key are one
    array, and the others are proven to keep an interval of keys in each row.
    """
    root = scores.root
    if not isinstance(root, Logits):
        return root.masked(ctx, scores, mask, keeps, fill)
    factors = [(mask, keeps)]
    if _not_by_user(scores, mask):
        factors = masks.factors(ctx, mask, keeps)
    by_user = [(x, keep) for x, keep in factors if not _not_by_user(scores, x)]
    by_row = [(x, keep) for x, keep in factors if _not_by_user(scores, x)]
    kept, lengths, seen, state = None, None, None, None
    users, keys = root.key.base.shape[:2]
    kinds = [label[0] for label in scores.labels]
    dim = kinds.index(KEY)
    for x, keep in by_user:
        base = arranged_array(kept_by(x.base, keep), scores.labels, [(BATCH, 0), (KEY, 0)])
        base = spread(base, (users, keys))
        kept = base if kept is None else kept & base
    if kept is not None and all(masks.keeps_first(ctx, x, keep, dim) for x, keep in by_user):
        of = (scores.labels, *(keep for _, keep in by_user))
        lengths = ctx.scope.once(
            ("lengths", *of),
            [x for x, _ in by_user],
            functools.partial(jnp.sum, kept, axis=1, dtype=jnp.int32),
        )
    for x, keep in by_row:
        if not masks.is_interval(ctx, x, keep, dim):
            reason = f"{_not_by_user(scores, x)}, not by intervals of keys"
            raise NotCovered(f"attention is not recognised: {reason}")
        row = rows_of(unspread(ctx, x, keep), scores.labels, root.queries)
        seen = row if seen is None else seen & row
    if by_row:
        state = masks.known_mask(ctx, mask)
        state = rows_of(state if keeps else masks.negated(state), scores.labels, root.queries)
    source = proofs.source_of_mask(ctx, mask, scores.labels) if keeps else None
    source = fill.source or source
    fill = dataclasses.replace(
        fill, kept=kept, lengths=lengths, source=source, seen=seen, state=state
    )
    origins = root.mask_origins | origins_of(mask)
    return dataclasses.replace(root, fills=(*root.fills, fill), mask_origins=origins)


def _not_by_user(scores: Scores, mask: Any) -> str:
    """Says why a mask is not one by user and key; "" if it is."""
    if not isinstance(mask, Lazy):
        return "its mask differs by candidate"
    if has_lineage(mask) and (
        mask.lineage is not scores.root.lineage or scores.labels[mask.axis][0] != BATCH
    ):
        return "its mask is not looked up like its keys"
    for d, n in enumerate(mask.base.shape):
        if n != 1 and scores.labels[d][0] not in (BATCH, KEY):
            return "its mask differs by query or head"
        if n != 1 and scores.labels[d][0] == BATCH and d != mask.axis:
            return "its mask differs by candidate"
    return ""


def rows_of(x: Any, labels: Any, sizes: tuple[int, ...]) -> Any:
    """Arranges a mask of logits as [batch, queries, keys]; all three may be 1.

    `sizes` are the sizes of the queries' dimensions.
    """
    if any(n != 1 and label[0] == HEAD for n, label in zip(x.shape, labels, strict=True)):
        raise NotCovered("attention is not recognised: its mask differs by head")
    queries = [(QUERY, n) for n in range(len(sizes))]
    x = arranged_array(x, labels, [(BATCH, 0), *queries, (KEY, 0)])
    batch, *own, keys = x.shape
    if math.prod(own) != 1:
        moves = np if isinstance(x, np.ndarray) else jnp
        x = moves.broadcast_to(x, (batch, *sizes, keys))
        own = list(sizes)
    return x.reshape(batch, math.prod(own), keys)

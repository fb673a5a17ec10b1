"""Masks of attention's logits, put in by a select or added, and biases by user or position."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.attention.blocks import Blocks, arranged_array, grouped, kept_by, unspread
from ikbo_jax.rewrite.attention.masked_keys import LARGE
from ikbo_jax.rewrite.attention.scores import (
    BATCH,
    DTYPES,
    HEAD,
    KEY,
    QUERY,
    Fill,
    Logits,
    Scores,
    only,
)
from ikbo_jax.rewrite.facts import masks, proofs
from ikbo_jax.rewrite.facts.proofs import constant
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.lineage import (
    Lazy,
    base_of,
    has_lineage,
    is_plain,
    of_bases,
    origins_of,
    spread,
)
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Reshaped


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
        scores = dataclasses.replace(scores, root=of_masks(scores.root))
    root = masked(ctx, scores, which, keeps, Fill(fill))
    return scores.then(eqn, [which, *cases], root=root)


#: What is added to logits: a bias and 0; or a mask and the number below 0 that is added where it
#: hides keys. And whether a mask keeps the keys at which it is True or other than 0, or hides them.
_Term = tuple[Any, float, bool]


def added(ctx: Context, eqn: Any, x: Any, y: Any) -> Any:
    """Adds 0 to logits, a bias of 0 for kept and one number for masked keys, or another bias."""
    operands = (x, y)
    scores = only(operands)
    bias = y if scores is x else x
    if masks.few_numbers(ctx, bias) == {0.0} and scores.stage == "logits":
        return scores.then(eqn, operands)
    whole = bias, _number_of_mask(ctx, bias), False
    terms = [whole] if isinstance(scores.root, Logits) else _terms(ctx, bias)
    if len(terms) > 1 and any(number <= LARGE for _, number, _ in terms):
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
        return [(bias, number, False)]
    name, eqn, operands = ctx.made_by(bias)
    if name == "add":
        return [term for x in operands for term in _terms(ctx, x)]
    if name == "broadcast_in_dim" and len(inner := _terms(ctx, operands[0])) > 1:
        return [(masks.moved(ctx, eqn, x), number, keeps) for x, number, keeps in inner]
    if name == "select_n" and len(operands) == 3:
        mask, *cases = operands
        for rest, keeps in zip(cases[::-1], (True, False), strict=True):
            filled = constant(ctx, cases[0] if keeps else cases[1])
            if filled is not None and filled <= LARGE:
                return [*_terms(ctx, rest), (mask, filled, keeps)]
    return [(bias, 0.0, False)]


def _added(ctx: Context, eqn: Any, operands: Any, scores: Scores, term: _Term) -> Scores:
    value, number, keeps = term
    takes_masks = not scores.root.biases or not isinstance(scores.root, Logits)
    is_mask = number and takes_masks and not scores.root.fills
    if not is_mask or scores.stage != "logits":
        return biased(ctx, eqn, operands, scores, value)
    fill = Fill(number, eqn.outvars[0].aval.dtype)
    try:
        root = masked(ctx, scores, value, keeps, fill)
    except NotCovered as error:
        # A mask by head, or by query without intervals, may be a bias of positions.
        with contextlib.suppress(NotCovered):
            return biased(ctx, eqn, operands, scores, value)
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

    def differs(x: Any) -> str:
        reason = "differs by candidate"
        return not_by_user(ctx, scores, x, (KEY,)) if isinstance(x, Lazy) else reason

    factors = masks.factors(ctx, mask, keeps) if differs(mask) else [(mask, keeps)]
    by_user = [(x, keep) for x, keep in factors if not differs(x)]
    by_row = [(x, keep, reason) for x, keep in factors if (reason := differs(x))]
    kept, lengths, seen, state = None, None, None, None
    scores, of_users = scores.aligned(ctx, *(x for x, _ in by_user))
    root = scores.root
    users, keys = root.key.base.shape[:2]
    kinds = [label[0] for label in scores.labels]
    if KEY not in kinds:
        raise NotCovered("attention is not recognised: logits of one key are masked")
    dim = kinds.index(KEY)
    for x, (_, keep) in zip(of_users, by_user, strict=True):
        base = arranged_array(kept_by(x.base, keep), scores.labels, [(BATCH, 0), (KEY, 0)])
        base = spread(base, (users, keys))
        kept = base if kept is None else kept & base
    if kept is not None and all(masks.keeps_first(ctx, x, keep, dim) for x, keep in by_user):
        of = (scores.labels, users, *(keep for _, keep in by_user))
        lengths = ctx.scope.once(
            ("lengths", *of),
            [x for x, _ in by_user],
            functools.partial(jnp.sum, kept, axis=1, dtype=jnp.int32),
        )
    for x, keep, reason in by_row:
        if not masks.is_interval(ctx, x, keep, dim):
            reason = f"its mask {reason}, not by intervals of keys"
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


def not_by_user(ctx: Context, scores: Scores, value: Any, kinds: Sequence[str]) -> str:
    """Says why a value is not one by user and dimensions of these kinds alone; "" if it is."""
    scores, (value,) = scores.aligned(ctx, value)
    base, axis = base_of(value), value.axis if has_lineage(value) else -1
    if axis >= 0 and (value.lineage is not scores.root.lineage or scores.labels[axis][0] != BATCH):
        return "is not looked up like its keys"
    if not np.ndim(base):
        return "is one number"
    if not is_plain(base) or np.ndim(base) != len(scores.labels):
        return "differs by candidate"
    for d, n in enumerate(np.shape(base)):
        kind = scores.labels[d][0]
        if n != 1 and kind not in (BATCH, *kinds):
            return "differs by query or head"
        if n != 1 and kind == BATCH and d != axis:
            return "differs by candidate"
    return ""


def rows_of(x: Any, labels: Any, sizes: tuple[int, ...]) -> Any:
    """Arranges a mask of logits as [batch, queries, keys]; all three may be 1.

    `sizes` are the sizes of the queries' dimensions.
    """
    if any(n != 1 and label[0] == HEAD for n, label in zip(x.shape, labels, strict=True)):
        raise NotCovered("attention is not recognised: its mask differs by head")
    return grouped(x, labels, [(QUERY, sizes)])


def biased(
    ctx: Context,
    eqn: Any,
    operands: Sequence[Any],
    scores: Scores,
    bias: Any,
    *,
    subtracts: bool = False,
) -> Scores:
    """Adds a bias to logits, which may have biases or added masks by user already.

    The bias does not depend on the candidate. It is looked up like the keys, as a penalty of
    recency or of padding, or belongs to positions alone, as ALiBi's. The op adds it to its scores.
    """
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
    if reason := not_by_user(ctx, scores, bias, (KEY, HEAD, QUERY)):
        raise NotCovered(f"attention is not recognised: a bias is added that {reason}")
    scores, (bias,) = scores.aligned(ctx, bias)
    root = scores.root
    base = -base_of(bias) if subtracts else base_of(bias)
    base = grouped(base, scores.labels, [(HEAD, root.heads), (QUERY, root.queries)])
    base, root = spread(base, (*base.shape[:3], root.key.shape[1])), of_masks(root)
    total = functools.reduce(_sum, root.biases, base)
    if dtype not in DTYPES or total.dtype != dtype:
        raise NotCovered(f"attention is not recognised: biases of {total.dtype} and {dtype}")
    origins = root.mask_origins | origins_of(bias)
    root = dataclasses.replace(root, biases=(total,), mask_origins=origins)
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
    if isinstance(root, Logits):
        biases = [*root.biases, *(x[:, None, None] for x in biases)]
        biases = [functools.reduce(_sum, biases)] if biases else []
    else:
        biases = [*root.biases, *biases]
    return dataclasses.replace(root, biases=tuple(biases), fills=())


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype not in DTYPES or x.dtype != y.dtype:
        raise NotCovered(f"attention is not recognised: biases of {x.dtype} and {y.dtype}")
    return x + y

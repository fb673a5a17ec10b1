"""Attention with masked logits: the attention weights that a softmax gives to masked keys.

`ikbo_jax.attention` skips masked keys. The attention weight that the original gives them depends on
the mask's number F, as the softmax sees it, and on whether `where` or an addition applies it:

- `where`, finite: all masked keys of a user have the logit F. They are one more part of the
  softmax: the mean of their values, with lse F + log(number of masked keys), equal for all
  candidates; `merge_attention` adds it. From `_UNREACHABLE` down this part has no attention weight
  beside any kept key, so only users without kept keys differ: their attention weights are uniform.
- `where`, -inf: masked keys have no attention weight. A row without kept keys is NaN, and its
  logits have no gradient.
- addition, -inf: masked keys have no attention weight. A row without kept keys is NaN, and so are
  its gradients.
- addition, |F| so small that the sum hardly rounds the logits: a second attention, to the masked
  keys, is merged with lse + F.
- addition, F is far larger than the logits: the sum's rounding removes the logits, but not their
  gradient. A row without kept keys has uniform attention weights, and the derivative of a softmax.
  A test in the rewritten program finds logits too large to be removed, and computes such rows as
  the original does.

If a mask differs by candidate or query, and keeps an interval of keys in each row, the op takes the
intervals (`_by_row`). The mask's number must then be at most `LARGE`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.ops.attention import merge_attention
from ikbo_jax.rewrite.attention.operands import Operands, attend_by_row
from ikbo_jax.rewrite.attention.scores import Fill, Logits, Scores
from ikbo_jax.rewrite.facts.activations import Match
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.rows import take_rows

#: Above this number, masked keys have attention weights that no model intends.
_MASKS = -100.0
#: From this number down, a number that `where` puts in is below any logit not near overflow.
_UNREACHABLE = -1e30
#: An added number whose rounding is at most this changes no attention weight by more than this.
_KEPT = 2.0**-7
#: An added number whose rounding is at least this removes logits up to this size.
_LOST = 32.0
#: From this number down, masked keys have no attention weight beside kept keys.
LARGE = -1e8
#: Rows that are computed in one turn, at most.
_AT_ONCE = 64
#: The largest number of devices over which every batch that they divide stays divided.
_DEVICES = 8


def attend(
    ctx: Context,
    scores: Scores,
    value: jax.Array,
    shown: jax.Array | None = None,
    nan_is_zero: bool = False,
) -> jax.Array:
    """Attends by `scores` to values [users, keys, *heads, width].

    Its shape is [batch, *queries, *heads, width]. Keys that are not `shown` [users, keys], whose
    values must be 0, have the weight 0 also in rows whose softmax is NaN. With `nan_is_zero`, such
    rows are 0.
    """
    root = scores.root
    operands = Operands.of(root, value)._replace(nan_is_zero=nan_is_zero)
    if any(fill.value > _MASKS for fill in root.fills):
        raise NotCovered(f"attention is not recognised: masked logits are {root.fills[0].value:g}")
    fills = [_as_exponentiated(fill, scores) for fill in root.fills]
    if operands.bias is not None:
        if any(fill.seen is not None for fill in fills):
            raise NotCovered("attention is not recognised: a bias, and a mask that is not by user")
        if not nan_is_zero:
            operands = operands._replace(bias=with_nan(operands.bias, fills))
        elif ctx.differentiated:
            raise NotCovered("attention is not recognised: a bias, and weights of NaN become 0")
        else:
            # The original's gradient by the logits of such a row is NaN.
            ctx.gradient_differs()
    if not fills:
        out = operands.attend()
    elif any(fill.seen is not None for fill in fills):
        if shown is not None:
            raise NotCovered("attention is not recognised: its weights are masked again")
        out = _by_row(ctx, operands, fills)
    elif fills[0].added is not None:
        if nan_is_zero or shown is not None and fills[0].value == -math.inf:
            raise NotCovered("attention is not recognised: weights that are NaN become 0")
        out = _added(ctx, operands, fills[0])
    else:
        out = _replaced(operands, fills, shown)
    return _with_dims(root, out)


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


def renormalised(
    root: Logits, value: jax.Array, kept: jax.Array, divided: tuple[str, float], probabilities: bool
) -> jax.Array:
    """Attends to the `kept` [users, keys] keys, with weights over their sum and a number.

    Args:
      root: logits without other masks than one that `where` puts in; this keeps `kept`.
      value: [users, keys, *heads, width].
      kept: which keys have a weight.
      divided: see `products.Weights`; its number is above 0.
      probabilities: whether the weights are probabilities of all keys, or exponentials.
    """
    operands = Operands.of(root, value)
    lengths = jnp.sum(kept, axis=1, dtype=jnp.int32)
    out, lse = operands.ordered(kept).attend_with_lse(lengths)
    total = lse
    if probabilities:
        hidden = kept.shape[1] - lengths
        if root.fills:
            logit = jnp.float32(root.fills[0].value)  # of every hidden key
            rest = operands.of_user(jnp.log(hidden.astype(jnp.float32)) + logit)[..., None]
        else:
            _, rest = operands.ordered(~kept).attend_with_lse(hidden)
        total = -jax.nn.softplus(rest - lse)
    how, number = divided
    total = total - jnp.float32(math.log(number))
    share = jax.nn.sigmoid(total) if how == "add" else jnp.exp(jnp.minimum(total, 0))
    weighted = out.astype(jnp.float32) * share[..., None]
    return _with_dims(root, weighted.astype(out.dtype))


def attend_activated(root: Logits, value: jax.Array, found: Match) -> jax.Array:
    """Attends with an activation instead of the softmax; the logits have no masks."""
    return _with_dims(root, Operands.of(root, value).activated(*found[:3]))


def _with_dims(root: Logits, out: jax.Array) -> jax.Array:
    shape = staged.shape_of(out)
    return staged.reshape(out, (shape[0], *root.queries, *root.heads, shape[-1]))


def _as_exponentiated(fill: Fill, scores: Scores) -> Fill:
    """Returns the fill, with -inf if no maximum is subtracted and its exponential is 0."""
    if scores.shifted or fill.value == -math.inf:
        return fill
    with np.errstate(all="ignore"):
        weight = float(np.exp(np.float64(fill.value)).astype(scores.dtype).astype(np.float64))
    if weight == 0 and fill.added is None:
        return dataclasses.replace(fill, value=-math.inf)
    if not math.isfinite(weight) or weight == 0:
        raise NotCovered(f"attention is not recognised: exp of masked logits, {fill.value:g}")
    return fill


def _replaced(operands: Operands, fills: list[Fill], shown: jax.Array | None) -> jax.Array:
    kept, lengths = _all_kept(fills)
    by_length = len(fills) == 1 and fills[0].lengths is not None
    ordered = operands if by_length else operands.ordered(kept)
    values = {fill.value for fill in fills}
    empty = lengths == 0
    if values == {-math.inf}:
        out = ordered.attend(lengths)
        if operands.nan_is_zero:
            return out
        return _with_nan_rows(operands, empty, shown, out)
    if len(values) == 1 and -math.inf < min(values) <= _UNREACHABLE and operands.bias is None:
        return _uniform_where(ordered, empty, lengths)
    if operands.nan_is_zero:
        raise NotCovered("attention is not recognised: weights that are NaN become 0")
    out, lse = ordered.attend_with_lse(lengths)
    rest, rest_lse = _masked_part(operands, fills)
    merged, _ = merge_attention(out, lse, operands.of_user(rest), operands.of_user(rest_lse))
    if -math.inf not in values:
        return merged
    infinite = jnp.zeros_like(kept)
    for fill in fills:
        infinite = jnp.where(fill.kept, infinite, fill.value == -math.inf)
    return _with_nan_rows(operands, jnp.all(infinite, axis=1), shown, merged)


def _all_kept(fills: list[Fill]) -> tuple[jax.Array, jax.Array]:
    """Returns the keys [users, keys] that every mask keeps, and their number by user."""
    kept = functools.reduce(operator.and_, (fill.kept for fill in fills))
    if len(fills) == 1 and fills[0].lengths is not None:
        return kept, fills[0].lengths
    return kept, jnp.sum(kept, axis=1, dtype=jnp.int32)


def _uniform_where(operands: Operands, empty: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attends; `empty` users have uniform weights over all keys, and their keys become 0."""
    key = jnp.where(empty[:, None, None, None], jnp.zeros((), operands.key.dtype), operands.key)
    return operands._replace(key=key).attend(jnp.where(empty, operands.key.shape[1], lengths))


def _with_nan_rows(
    operands: Operands, users: jax.Array, shown: jax.Array | None, out: jax.Array
) -> jax.Array:
    """Replaces rows of users by sums with the weight NaN of each shown key, and 0 of the others.

    So NaN reaches the gradients of shown keys' values alone.
    """
    nan = users[:, None] if shown is None else users[:, None] & shown
    weight = jnp.where(nan, jnp.nan, 0.0)[..., None, None].astype(operands.value.dtype)
    rows = operands.of_user(jnp.sum(operands.value * weight, axis=1))
    return jnp.where(operands.of_user(users)[..., None, None], rows, out)


def _masked_part(operands: Operands, fills: list[Fill]) -> tuple[jax.Array, jax.Array]:
    """Attends to masked keys: the result [users, heads, width], and its lse [users, heads]."""
    number = jnp.full(fills[0].kept.shape, -jnp.inf, jnp.float32)
    for fill in fills:
        number = jnp.where(fill.kept, number, jnp.float32(fill.value))
    share, lse = softmax(number, 1)
    mean = jnp.einsum(
        "us,usnh->unh", share, operands.value.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    heads = operands.value.shape[2]
    lse = jnp.broadcast_to(lse[:, None], (lse.shape[0], heads))
    return mean.astype(operands.value.dtype), lse


def softmax(logits: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax of logits, and their lse; 0 and -inf for a row of -inf."""
    largest = lax.stop_gradient(jnp.max(logits, axis, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, jnp.log(safe) + largest, -jnp.inf)
    return weights / safe, jnp.squeeze(lse, axis)


def _added(ctx: Context, operands: Operands, fill: Fill) -> jax.Array:
    kept, lengths = _all_kept([fill])
    ordered = operands if fill.lengths is not None else operands.ordered(kept)
    empty = lengths == 0
    if fill.value == -math.inf:
        nan = jnp.where(empty, jnp.nan, 0.0).astype(operands.key.dtype)
        key = ordered.key + nan[:, None, None, None]
        return ordered._replace(key=key).attend(jnp.where(empty, kept.shape[1], lengths))
    if _rounding(fill) <= _KEPT:
        out, lse = ordered.attend_with_lse(lengths)
        rest, rest_lse = operands.ordered(~kept).attend_with_lse(kept.shape[1] - lengths)
        return merge_attention(out, lse, rest, rest_lse + jnp.float32(fill.value))[0]
    _check_that_logits_are_lost(fill)
    out = _uniform_where(ordered, empty, lengths)
    if ctx.differentiated:
        slope = _slope_where(operands, empty)
        out = out + (slope - lax.stop_gradient(slope))
    else:
        ctx.gradient_differs()
    empty_rows = take_rows(empty, operands.users, 0)
    return _exact_where_logits_remain(operands, fill, empty_rows, empty, out)


def _rounding(fill: Fill) -> float:
    """Returns the largest rounding of a logit to which the mask's number is added."""
    return 0.5 * float(jnp.finfo(fill.added).eps) * abs(fill.value)


def _check_that_logits_are_lost(fill: Fill) -> None:
    if _rounding(fill) < _LOST or fill.value > LARGE or fill.after <= 0:
        raise NotCovered(f"attention is not recognised: {fill.value:g} is added to its logits")


def _exact_where_logits_remain(
    operands: Operands, fill: Fill, empty_rows: jax.Array, empty: jax.Array, out: jax.Array
) -> jax.Array:
    """Replaces rows of `out` without kept keys by exact rows where logits survive rounding.

    That is, if some logit of such a row may exceed the rounding of the mask's number. `cost` counts
    no work of `rows_without_kept_keys`, which only such requests run.

    Args:
      empty_rows: [batch], rows without kept keys.
      empty: [users], users that may have such rows.
    """

    def largest(x: jax.Array, rows: jax.Array) -> jax.Array:
        squares = jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), axis=(1, 2))
        return jnp.max(jnp.where(rows, squares, 0.0))

    def exact_row(key: jax.Array, value: jax.Array, row: tuple[jax.Array, ...]) -> jax.Array:
        query, user, is_empty, uniform = row
        key, value = (x.at[user].get(mode="promise_in_bounds") for x in (key, value))
        products = jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=jnp.float32)
        number = np.asarray(fill.value / fill.after, fill.added)
        products = products * operands.scale
        if operands.cap is not None:
            products = operands.cap * jnp.tanh(products / operands.cap)
        logits = (products / fill.after).astype(fill.added) + number
        weights = jax.nn.softmax(logits.astype(jnp.float32) * fill.after, axis=-1)
        exact = jnp.einsum("nts,snh->tnh", weights, value.astype(jnp.float32))
        return jnp.where(is_empty, exact.astype(uniform.dtype), uniform)

    def exact_rows(key: jax.Array, value: jax.Array, *rows: jax.Array) -> jax.Array:
        return in_turns(functools.partial(exact_row, key, value), rows)

    @jax.jit
    def rows_without_kept_keys(out: jax.Array) -> jax.Array:
        rows = operands.query, operands.users, empty_rows, out
        divided = staged.over_auto_axes(exact_rows, jax.typeof(out).sharding)
        replaced: jax.Array = divided(*operands[1:3], *rows)
        return replaced

    def checked(out: jax.Array) -> jax.Array:
        bound = largest(operands.query, empty_rows) * largest(operands.key, empty)
        lost = 0.25 * float(jnp.finfo(fill.added).eps) * abs(fill.value)
        removed = jnp.sqrt(bound) * abs(operands.scale) < lost
        result: jax.Array = lax.cond(removed, lambda out: out, rows_without_kept_keys, out)
        return result

    result: jax.Array = lax.cond(jnp.any(empty_rows), checked, lambda out: out, out)
    return result


def _slope_where(operands: Operands, empty: jax.Array) -> jax.Array:
    """Returns a term with the gradient of a softmax whose attention weights are uniform.

    With attention weights 1 / S, the softmax and sum_s logit_s (v_s - mean v) / S have the same
    derivative by query and key.
    """
    value = operands.value
    wide = value.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=1, keepdims=True)
    centred = jnp.where(empty[:, None, None, None], centred, 0.0).astype(value.dtype)
    centred_operands = operands._replace(value=lax.stop_gradient(centred))
    return centred_operands.activated("identity", operands.scale, 1 / value.shape[1], operands.cap)


def _by_row(ctx: Context, operands: Operands, fills: list[Fill]) -> jax.Array:
    """Attends if the keys that a row keeps are an interval of them."""
    if any(fill.value > LARGE for fill in fills):
        raise NotCovered(f"attention is not recognised: masked logits are {fills[0].value:g}")
    by_user = [fill for fill in fills if fill.kept is not None]
    kept, lengths = _all_kept(by_user) if by_user else (None, None)
    if len(by_user) != 1 or by_user[0].lengths is None:
        lengths = None
    seen = functools.reduce(operator.and_, [x.seen for x in fills if x.seen is not None])
    rows, out, _, empty = attend_by_row(operands, seen, kept, lengths)
    if not _keep_keys(fills):
        out = _with_empty_rows(ctx, rows, out, empty, operands, fills)
    return staged.reshape(out, staged.shape_of(operands.query))


def _keep_keys(fills: list[Fill]) -> bool:
    """Whether the masks provably keep a key of every row."""
    states = [fill.state for fill in fills]
    if any(state is None for state in states):
        return False
    kept = functools.reduce(operator.and_, (state == 1 for state in states))
    return bool(np.any(kept, axis=-1).all())


def _with_empty_rows(
    ctx: Context,
    rows: Operands,
    out: jax.Array,
    empty: jax.Array,
    operands: Operands,
    fills: list[Fill],
) -> jax.Array:
    """Sets the `empty` rows, which see no key, to what the softmax of masked logits gives them."""
    fill = fills[0]
    if any((x.value, x.added) != (fill.value, fill.added) for x in fills):
        raise NotCovered("attention is not recognised: masks with several numbers")
    if operands.nan_is_zero:
        if fill.value > -math.inf or fill.added is not None:
            raise NotCovered("attention is not recognised: weights that are NaN become 0")
        return out
    where = empty[:, None, None, None]
    if fill.added is not None and fill.value == -math.inf:
        raise NotCovered("attention is not recognised: a row may be NaN by an added mask")
    wide = operands.value.astype(jnp.float32)
    if fill.value == -math.inf:
        total = rows.of_user(jnp.sum(wide, axis=1))
        uniform = total * jnp.where(where, jnp.nan, 0.0)
    else:
        uniform = rows.of_user(jnp.mean(wide, axis=1))
    out = jnp.where(where, uniform.astype(out.dtype), out)
    if fill.added is None:
        return out
    _check_that_logits_are_lost(fill)
    every = jnp.ones(operands.key.shape[0], bool)
    if ctx.differentiated:
        term = jnp.where(where, _slope_where(rows, every), jnp.zeros((), out.dtype))
        out = out + (term - lax.stop_gradient(term))
    else:
        ctx.gradient_differs()
    return _exact_where_logits_remain(rows, fill, empty, every, out)


def in_turns(fn: Callable[..., jax.Array], rows: tuple[jax.Array, ...]) -> jax.Array:
    """Computes `jax.vmap(fn)(rows)`, some rows in a turn, in the memory that these need.

    The rows of a turn are spread over the batch, so that each device has its share of them where
    the batch is divided. Of rows that follow each other, as `lax.map` takes them, XLA's partitioner
    gathers the whole batch.
    """
    batch = len(rows[0])
    count = _rows_in_a_turn(batch) if isinstance(batch, int) else 0
    if not count:
        found: jax.Array = lax.map(fn, rows, batch_size=min(_AT_ONCE, batch))
        return found
    turns = [jnp.moveaxis(x.reshape(count, batch // count, *x.shape[1:]), 1, 0) for x in rows]
    found = jnp.moveaxis(lax.map(jax.vmap(fn), tuple(turns)), 0, 1)
    return found.reshape(batch, *found.shape[2:])


def _rows_in_a_turn(batch: int) -> int:
    """Finds a divisor of the batch that as many devices divide as the batch; 0 if too few rows.

    Numbers of devices are powers of two.
    """
    power = min(batch & -batch, _AT_ONCE)
    if power < _DEVICES:
        return 0
    return max(n for n in range(power, _AT_ONCE + 1, power) if batch % n == 0)

"""What `gdpa` computes of every row: the keys that it sees, and its sequence's output scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.masks import Hstu, Mask, Rows
from ikbo_jax.ops import arguments
from ikbo_jax.ops.look_up import look_up
from ikbo_jax.ops.partition import Division, Rule
from ikbo_jax.ops.sharded import run_by_types, vary_over_same_axes
from ikbo_jax.reference import jagged
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences, out_shape


def check(mask: Any, arrays: Arrays, settings: Settings) -> str:
    """Describes a mask; raises ValueError, quoting both conflicting values, if it does not fit."""
    if not isinstance(mask, Mask):
        raise ValueError(
            "mask must be made by ikbo_jax.masks.causal, hstu or intervals, "
            f"but is {arguments.describe(mask)}"
        )
    mask.check(out_shape(arrays, settings)[0], num_sequences(arrays))
    return mask.describe()


def with_intervals(mask: Mask, arrays: Arrays, settings: Settings) -> Arrays:
    """Adds the keys that every row sees, in the whole call, also where devices divide its rows."""
    sizes = arrays.query.shape[0], arrays.key.shape[0]
    found = _of_whole_call(_intervals, sizes, settings, arrays[3:6], mask)
    return arrays._replace(intervals=found)


def with_rule(mask: Mask, arrays: Arrays, settings: Settings) -> tuple[Arrays, Settings]:
    """Adds the rule of the mask, if it has one, and the rule's arrays.

    A kernel that takes the rule reads no intervals, and XLA does not compute what has no use.
    """
    if not isinstance(mask, Hstu):
        return arrays, settings
    arrays = arrays._replace(num_targets=mask.num_targets, contextual=mask.contextual)
    return arrays, settings._replace(rule=mask.rule)


def _intervals(rows: Rows, mask: Mask) -> jax.Array:
    """Computes the intervals of every row: [rows, words] int32."""
    return mask.intervals(rows)


def _sequences_and_lengths(rows: Rows, _: None) -> jax.Array:
    """Finds the sequence of every row, and its number of keys: [rows, 2] int32."""
    return jnp.stack((rows.sequence, rows.length), axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_whole_call(
    of_rows: Callable[[Rows, Any], jax.Array],
    sizes: tuple[int, int],
    settings: Settings,
    sequences: tuple[Any, Any, Any],
    mask: Mask | None,
) -> jax.Array:
    """Computes words of the rows of the whole call, also where devices divide it.

    `of_rows` takes the rows and the mask, and returns [rows, words]; `sizes` are the rows of the
    queries and of the keys, `sequences` offsets and index.
    """
    operands, treedef = jax.tree.flatten((sequences, mask))
    # Nothing divides, except that intervals which are divided by rows become divided again.
    rule = Rule(
        tuple(f"mask{number}" for number in range(len(operands))),
        tuple(
            (("rows",), ("ends",)) if x.ndim == 2 else ((f"sequences{number}",),)
            for number, x in enumerate(operands)
        ),
        ((("rows",), ("words",)),),
        (),
    )

    def local(parts: Sequence[Any], division: Division | None) -> Sequence[Any]:
        del division
        sequences, mask = jax.tree.unflatten(treedef, vary_over_same_axes(parts))
        return (of_rows(_rows(sizes, settings, *sequences), mask),)

    (found,) = run_by_types(local, rule, operands)
    return found


def _rows(sizes: tuple[int, int], settings: Settings, cu_q: Any, cu_kv: Any, q_to_kv: Any) -> Rows:
    """Finds the sequence and the position of every row of the result."""
    q_rows, kv_rows = sizes
    _, kv_length = jagged.bounds(cu_kv, kv_rows, settings.max_seqlen_kv)
    if q_to_kv is not None:
        kv_length = kv_length[jnp.clip(q_to_kv, 0, kv_length.shape[0] - 1)]
    batch = kv_length.shape[0]
    if cu_q is None:
        row = jnp.arange(batch * q_rows, dtype=jnp.int32)
        sequence, inside = row // q_rows, row % q_rows
        q_length: Any = q_rows
    else:
        start, lengths = jagged.bounds(cu_q, q_rows, settings.max_seqlen_q)
        sequence, inside = jagged.places(start, lengths, q_rows)
        q_length = lengths[sequence]
    length, is_row = kv_length[sequence], inside >= 0
    return Rows(
        jnp.where(is_row, length - q_length + inside, -1), jnp.where(is_row, length, 0), sequence
    )


def scaled(out: jax.Array, scales: jax.Array, arrays: Arrays, settings: Settings) -> jax.Array:
    """Multiplies every row of the result by its sequence's scale [batch] in f32; rounds once."""
    sizes = arrays.query.shape[0], arrays.key.shape[0]
    found = _of_whole_call(_sequences_and_lengths, sizes, settings, arrays[3:6], None)
    sequence, length = jnp.moveaxis(found, 1, 0)
    # The gradient of this lookup is summed in one order, unlike the gradient of `scales[sequence]`.
    # XLA fuses its gather with the product.
    factor = look_up(scales, sequence, indices_are_sorted=True, implementation="xla")
    factor = factor[:, None, None]
    # Rows outside all sequences are 0, also if the cotangents of these rows are NaN.
    has_keys = (length > 0)[:, None, None]
    return jnp.where(has_keys, out.astype(jnp.float32) * factor, 0.0).astype(out.dtype)

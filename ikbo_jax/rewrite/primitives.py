"""Which function runs for which primitive: one table for every kind of operand.

The rule of an equation depends on its operands. `LAZY` has the rules of lazy values: `Lazy`,
`Concat` and arrays beside them. If an operand is `Reshaped` or `Scores`, the rules of that
kind run, from `MERGED`, `SPLIT` or `SCORES`. Rules that users register replace rules of `LAZY`.
"""

from collections.abc import Callable

from ikbo_jax.rewrite.attention import changed_weights, contraction, pairs, score_factors, scores
from ikbo_jax.rewrite.calls import control_flow, custom_derivatives, devices
from ikbo_jax.rewrite.rules import (
    concatenation,
    elementwise,
    one_hot,
    reductions,
    reshape,
    reshaped_lookups,
    reshaped_rules,
    row_rules,
    sources,
    taken,
    variants,
)
from ikbo_jax.rewrite.values.equations import grows
from ikbo_jax.rewrite.values.registry import Rule, register_rule, register_rules_of

SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")

LAZY: dict[str, Rule] = {
    # Rows by themselves.
    **dict.fromkeys(elementwise.ELEMENTWISE, elementwise.elementwise),
    **dict.fromkeys(reductions.REDUCTIONS, reductions.reduction),
    "call_hi_primitive": row_rules.hi_primitive,
    "conv_general_dilated": row_rules.convolution,
    "dot_general": contraction.dot_general,
    **dict.fromkeys(row_rules.IN_ROWS, row_rules.in_rows),
    "sort": row_rules.sort,
    # Movement of data.
    "broadcast_in_dim": sources.broadcast_in_dim,
    "concatenate": concatenation.concatenate,
    "dynamic_slice": row_rules.dynamic_slice,
    "dynamic_update_slice": row_rules.dynamic_update_slice,
    "gather": sources.gather,
    "iota": row_rules.iota,
    "look_up": sources.look_up,
    "optimization_barrier": elementwise.optimization_barrier,
    "pad": row_rules.pad,
    "reshape": taken.reshape_parts,
    "rev": row_rules.rev,
    **dict.fromkeys(SCATTERS, row_rules.scatter),
    "slice": elementwise.slice_,
    "split": elementwise.split,
    "squeeze": reshape.reshape,
    "stack": concatenation.stack,
    "tile": sources.tile,
    "transpose": elementwise.transpose,
    "unstack": concatenation.unstack,
    # Division over devices.
    # That a value differs between devices from now on is a fact of types, for every row.
    "pvary": elementwise.elementwise,
    "reshard": devices.reshard,
    "shard_map": devices.shard_map,
    "sharding_constraint": row_rules.sharding_constraint,
    # Calls of programs.
    "checkpoint": control_flow.checkpoint,
    "cond": control_flow.cond,
    "custom_jvp_call": custom_derivatives.custom_jvp,
    "custom_vjp_call": custom_derivatives.custom_vjp,
    "ikbo_rewritten": variants.rewritten,
    "ikbo_rows": variants.rows,
    "jit": control_flow.jit,
    "remat2": control_flow.checkpoint,
    "scan": control_flow.scan,
    "while": control_flow.while_,
}

#: Primitives whose rules in `LAZY` also run where all operands are arrays.
ON_ARRAYS = (
    *("broadcast_in_dim", "checkpoint", "concatenate", "cond", "gather", "jit", "remat2"),
    *("ikbo_rows", "scan", "shard_map", "stack", "tile"),
)


#: Primitives whose rules in `LAZY` run on arrays where a function of the context, the equation and
#: the operands says so.
ON_SOME_ARRAYS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(elementwise.ELEMENTWISE, lambda _, eqn, __: grows(eqn)),
    "dot_general": one_hot.is_lookup,
    # Along several dimensions, numbers may be equal.
    "iota": lambda _, eqn, __: sum(n != 1 for n in eqn.params["shape"]) > 1,
}

#: The rules of values whose looked-up or concatenated axis a reshape merges or splits.
RESHAPED: dict[str, Rule] = {
    **dict.fromkeys((*elementwise.ELEMENTWISE, "concatenate"), reshaped_rules.in_place),
    **dict.fromkeys(reductions.REDUCTIONS, reshaped_rules.reduction),
    "broadcast_in_dim": reshaped_rules.broadcast,
    "dot_general": reshaped_rules.dot_general,
    "gather": reshaped_lookups.gather,
    "reshape": reshaped_rules.reshape_again,
    "squeeze": reshaped_rules.reshape_again,
    "transpose": reshaped_rules.transpose,
}
#: The rules of those among them whose axes a reshape only merges.
MERGED: dict[str, Rule] = RESHAPED | {"sharding_constraint": row_rules.sharding_constraint}
#: The rules of those among them whose looked-up axis a reshape splits.
SPLIT: dict[str, Rule] = RESHAPED | {
    **dict.fromkeys(row_rules.IN_ROWS, reshaped_rules.in_rows),
    **dict.fromkeys(("optimization_barrier", "rev", "sort", "split"), reshaped_rules.in_place),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), reshaped_rules.dynamic_slice),
    "pad": reshaped_rules.dimension_wise,
    **dict.fromkeys(SCATTERS, reshaped_lookups.scatter),
    "slice": reshaped_rules.slice_,
    "cond": control_flow.cond,
    "scan": control_flow.scan,
    "while": control_flow.while_,
    "stack": reshaped_rules.stack,
    "unstack": reshaped_rules.unstack,
}
#: The rules of concatenations in another order.
TAKEN: dict[str, Rule] = {
    **dict.fromkeys(elementwise.ELEMENTWISE, taken.across),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_sum"), taken.in_place),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose"), taken.in_place),
    **{name: LAZY[name] for name in ("cond", "scan", "while")},
    "concatenate": taken.concatenate,
    "dot_general": taken.dot_general,
    "gather": taken.gather,
}

#: The rules of logits, exponentials, their sums, and weights.
SCORES: dict[str, Rule] = {
    "abs": scores.kept,
    "add": changed_weights.sum_of_two,
    "broadcast_in_dim": changed_weights.broadcast,
    "convert_element_type": scores.cast,
    "copy": scores.kept,
    "div": changed_weights.quotient,
    "dot_general": pairs.dot_general,
    "eq": changed_weights.comparison,
    "exp": changed_weights.exponential,
    "gather": pairs.gather,
    "is_finite": changed_weights.is_finite,
    "log": changed_weights.logarithm,
    "max": changed_weights.maximum,
    "mul": changed_weights.product,
    "name": scores.kept,
    "ne": changed_weights.comparison,
    "pvary": scores.kept,
    "reduce_max": changed_weights.reduced,
    "reduce_sum": pairs.reduce_sum,
    "reshape": pairs.reshape,
    "select_n": changed_weights.select,
    "slice": pairs.slice_,
    "squeeze": changed_weights.reshape,
    "stop_gradient": scores.kept,
    "sub": changed_weights.difference,
    "tanh": score_factors.capped,
    "transpose": changed_weights.transpose,
}


def register_all() -> None:
    """Registers the rules of all tables."""
    for name, rule in LAZY.items():
        arrays = ON_SOME_ARRAYS.get(name)
        register_rule(name, rule, source=name in ON_ARRAYS, arrays=arrays)
    register_rules_of("merged", MERGED)
    register_rules_of("split", SPLIT)
    register_rules_of("taken", TAKEN)
    register_rules_of("scores", SCORES)

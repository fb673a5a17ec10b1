"""Mutants of `ikbo_jax/rewrite/`, each one changed line, and the tests that fail with them."""

from __future__ import annotations

from typing import NamedTuple

FACTS = "tests/rewrite/test_rewrite_facts.py"
DECISIONS = "tests/rewrite/test_rewrite_decisions.py"
SHARED = "tests/rewrite/test_rewrite_shared.py"
CUDNN = "tests/rewrite/test_rewrite_cudnn.py"
MIXED = "tests/rewrite/test_rewrite_mixed.py"
FAULTS = "tests/rewrite/test_rewrite_faults.py"
CUSTOM_VJP = "tests/rewrite/test_rewrite_custom_vjp.py"


def facts(*tests: str) -> tuple[str, ...]:
    """The ids of tests of facts."""
    return tuple(f"{FACTS}::test_{test}" for test in tests)


def decisions(*names: str) -> tuple[str, ...]:
    """The ids of tests of attention programs, by name."""
    return tuple(f"{DECISIONS}::test_attention[{name}]" for name in names)


def lookups(*names: str) -> tuple[str, ...]:
    """The ids of tests of programs with lookups, by name."""
    return tuple(f"{DECISIONS}::test_lookups[{name}]" for name in names)


def left(*names: str) -> tuple[str, ...]:
    """The ids of tests of programs that stay as written, with a reason in the report, by name."""
    return tuple(f"{DECISIONS}::test_left_for_a_reason[{name}]" for name in names)


class Mutant(NamedTuple):
    """One changed line.

    Attributes:
      name: the change in words.
      file: the file in `ikbo_jax/rewrite/`.
      old: a text that occurs once in the file.
      new: the text that replaces it.
      tests: the ids of the tests that should fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Activations: values, slopes, points.
    Mutant(
        "tolerance of values × 100",
        "facts/activations.py",
        "eps = max(float(jnp.finfo(d).eps) for d in curve.dtypes)",
        "eps = 100 * max(float(jnp.finfo(d).eps) for d in curve.dtypes)",
        facts("no_activation[a slope that is off by 3e-6]"),
    ),
    Mutant(
        "slopes never compared",
        "facts/activations.py",
        "return True, bool(np.all(slope | ~finite | (np.isnan(computed.slope) & overflows)))",
        "return True, True",
        facts("activations_of_another_slope"),
    ),
    Mutant(
        "sign of the output scale dropped",
        "facts/activations.py",
        "output_scale = far / float(activation(np.array([_FAR])).value[0])",
        "output_scale = abs(far / float(activation(np.array([_FAR])).value[0]))",
        facts("activations_with_their_scales"),
    ),
    Mutant(
        "curves compared at few points only",
        "facts/activations.py",
        "same, same_slope = compare(_points(curve))",
        "same, same_slope = compare(_FEW / scale)",
        facts("no_activation[a cap]", "no_activation[a threshold]"),
    ),
    Mutant(
        "negative points left out",
        "facts/activations.py",
        "return np.concatenate([points, -points])",
        "return points",
        facts("no_activation[far below 0]"),
    ),
    Mutant(
        "sides of constants left out",
        "facts/activations.py",
        "points = np.concatenate([grid.astype(dtype), *sides, constants, special])",
        "points = np.concatenate([grid.astype(dtype), special])",
        facts("no_activation[one point]", "no_activation[between two numbers]"),
    ),
    Mutant(
        "activation with another slope accepted",
        "attention/products.py",
        "if activation is not None and not activation.same_slope:",
        "if False and activation is not None and not activation.same_slope:",
        decisions("another slope"),
    ),
    Mutant(
        "negative linear factor dropped",
        "facts/curves.py",
        "        return -slope\n",
        "        return slope\n",
        facts("activations_with_their_scales"),
    ),
    Mutant(
        "stop_gradient keeps the slope in curves",
        "facts/curves.py",
        '"stop_gradient": lambda x: Dual(x.value),',
        '"stop_gradient": lambda x: x,',
        facts(
            "activations_of_another_slope", "values_and_slopes_of_a_curve_are_those_of_jax[stop]"
        ),
    ),
    Mutant(
        "custom derivative ignored",
        "facts/curves.py",
        'if name == "custom_jvp_call" and slopes:\n            return _custom_jvp',
        'if name == "custom_jvp_call" and slopes and False:\n            return _custom_jvp',
        facts("values_and_slopes_of_a_curve_are_those_of_jax[own]"),
    ),
    Mutant(
        "clamp keeps the slope outside",
        "facts/curves.py",
        "return Dual(value, np.where(inside, x.slope, 0.0))",
        "return Dual(value, x.slope)",
        facts("values_and_slopes_of_a_curve_are_those_of_jax[clamp]"),
    ),
    # Scores: softmax.
    Mutant(
        "stop_gradient accepted anywhere",
        "attention/scores.py",
        "if x.stage != _KEEP_ONE_STAGE.get(eqn.primitive.name, x.stage):",
        "if x.stage is None:",
        decisions("stopped probabilities"),
    ),
    Mutant(
        "sum over another axis accepted",
        "attention/changed_weights.py",
        "if stage is None or kinds.count(KEY) != 1 or any(",
        "if stage is None or False and any(",
        decisions("softmax over a dimension of one"),
    ),
    Mutant(
        "sum of other exponentials accepted",
        "attention/scores.py",
        "return _same_root(x.root, y.root) and all(",
        "return all(",
        decisions("sum of other exponentials"),
    ),
    Mutant(
        "maximum with any number accepted",
        "attention/changed_weights.py",
        'if at.stage != "max" or constant(ctx, y if at is x else x) != -math.inf:',
        'if at.stage != "max":',
        decisions("maximum with a number"),
    ),
    Mutant(
        "scaled at any stage",
        "attention/score_factors.py",
        'if factor is None or scores.stage != "logits" or (divides and scores is y):',
        "if factor is None or (divides and scores is y):",
        ("tests/rewrite/test_rewrite_weights.py::test_changed_weights[over(jnp.exp(x) / 2, 0)]",),
    ),
    Mutant(
        "number over logits treated as logits over number",
        "attention/score_factors.py",
        'if factor is None or scores.stage != "logits" or (divides and scores is y):',
        'if factor is None or scores.stage != "logits":',
        decisions("number over logits"),
    ),
    Mutant(
        "division multiplies",
        "attention/score_factors.py",
        "factor = float(np.divide(1.0, factor)) if divides else factor",
        "factor = float(factor)",
        decisions("logits over a number"),
    ),
    # Masks.
    Mutant(
        "fill not scaled with the logits",
        "attention/scores.py",
        "value = float(np.asarray(fill.value * factor).astype(dtype).astype(np.float64))",
        "value = float(np.asarray(fill.value).astype(dtype).astype(np.float64))",
        decisions("fill scaled later"),
    ),
    Mutant(
        "inverted mask not inverted",
        "attention/logit_masks.py",
        "base = arranged_array(kept_by(x.base, keep), scores.labels, [(BATCH, 0), (KEY, 0)])",
        "base = arranged_array(kept_by(x.base, True), scores.labels, [(BATCH, 0), (KEY, 0)])",
        decisions("mask that leaves out what others keep"),
    ),
    Mutant(
        "mask by candidate accepted",
        "attention/logit_masks.py",
        "if n != 1 and kind == BATCH and d != axis:",
        "if False and kind == BATCH and d != axis:",
        left("mask by candidate"),
    ),
    Mutant(
        "mask by query accepted",
        "attention/logit_masks.py",
        "if n != 1 and kind not in (BATCH, *kinds):",
        "if False and kind not in (BATCH, *kinds):",
        left("mask by head"),
    ),
    Mutant(
        "any number masks",
        "attention/masked_keys.py",
        "if any(fill.value > _MASKS for fill in root.fills):",
        "if any(fill.value > 1e6 for fill in root.fills):",
        left("fill that hides little"),
    ),
    Mutant(
        "masked keys never have attention weights",
        "attention/masked_keys.py",
        "_UNREACHABLE = -1e30",
        "_UNREACHABLE = -1e3",
        decisions("logits below the fill"),
    ),
    Mutant(
        "two masks joined by or",
        "attention/masked_keys.py",
        "kept = functools.reduce(operator.and_, (fill.kept for fill in fills))",
        "kept = functools.reduce(operator.or_, (fill.kept for fill in fills))",
        decisions("two masks"),
    ),
    Mutant(
        "NaN of a row without keys removed",
        "attention/masked_keys.py",
        "return _with_nan_rows(operands, empty, shown, out)",
        "return out",
        decisions("no keys"),
    ),
    Mutant(
        "first mask's number wins",
        "attention/masked_keys.py",
        "infinite = jnp.where(fill.kept, infinite, fill.value == -math.inf)",
        "infinite = infinite | (~fill.kept & (fill.value == -math.inf))",
        decisions("two fills"),
    ),
    Mutant(
        "number not added to the lse of masked keys",
        "attention/masked_keys.py",
        "return merge_attention(out, lse, rest, rest_lse + jnp.float32(fill.value))[0]",
        "return merge_attention(out, lse, rest, rest_lse)[0]",
        decisions("a fill that is added"),
    ),
    Mutant(
        "order of masked keys reversed",
        "attention/operands.py",
        "key, value = keys_first(first, self.key, self.value)",
        "key, value = keys_first(~first, self.key, self.value)",
        decisions("order of keys"),
    ),
    Mutant(
        "slope of an undetermined row left out",
        "attention/masked_keys.py",
        "out = out + (slope - lax.stop_gradient(slope))",
        "out = out + 0 * slope",
        decisions("slope of a user without keys"),
    ),
    Mutant(
        "an interval counts as the first keys",
        "facts/masks.py",
        "return _found(ctx, mask, keeps, dim) in (_FIRST, _EQUAL)",
        "return _found(ctx, mask, keeps, dim) in (_INTERVAL, _FIRST, _EQUAL)",
        (*facts("lengths"), *decisions("lengths, above")),
    ),
    Mutant(
        "any positions count as arange",
        "facts/proofs.py",
        "return bool(np.all(found == positions(shape, dim)))",
        "return True",
        facts("positions_count_up_only_if_they_are_0_1_2"),
    ),
    # Lookups.
    Mutant(
        "bounds off by one",
        "rules/table_rows.py",
        "proven = proofs.within(ctx, root, 0, rows - 1)",
        "proven = proofs.within(ctx, root, 0, rows)",
        lookups("bound reached"),
    ),
    Mutant(
        "fill treated as clip",
        "rules/table_rows.py",
        "fills = mode == lax.GatherScatterMode.FILL_OR_DROP and not proven",
        "fills = mode == lax.GatherScatterMode.CLIP and not proven",
        lookups("filled"),
    ),
    Mutant(
        "gradient of rows out of bounds kept",
        "rules/table_rows.py",
        "_without_gradient if drops else None",
        "None",
        lookups("dropped"),
    ),
    Mutant(
        "fixed positions below 0",
        "rules/sources.py",
        "0 <= start <= size - sizes[axis]",
        "start <= size - sizes[axis]",
        (f"{DECISIONS}::test_a_fixed_position_below_0_is_no_row_from_the_end",),
    ),
    Mutant(
        "casts to narrow integers keep bounds",
        "facts/proofs.py",
        "return first if kept else None",
        "return first",
        facts("bounds[narrow cast]"),
    ),
    # Products and parts.
    Mutant(
        "parts summed in 16 bits",
        "attention/contraction.py",
        "wide = jnp.float32 if dtype in _HALF else None",
        "wide = None",
        ("tests/rewrite/test_rewrite_seen.py::test_products_by_parts_are_added_in_f32",),
    ),
    Mutant(
        "precision of attention dropped",
        "attention/products.py",
        "    if not has_default_precision(eqn):\n        return None",
        "    if False:\n        return None",
        (f"{DECISIONS}::test_a_product_with_a_precision_of_its_own_starts_no_attention",),
    ),
    Mutant(
        "concatenations of different parts zipped",
        "rules/elementwise.py",
        "if all(x.sizes == whole[0].sizes for x in whole):",
        "if whole:",
        lookups("different parts"),
    ),
    Mutant(
        "two lookups in one elementwise equation treated as one",
        "rules/elementwise.py",
        "elif x.lineage is not first.lineage or x.axis != first.axis:",
        "elif x.axis != first.axis:",
        (
            *lookups("two lookups"),
            f"{SHARED}::test_one_function_on_two_lookups_and_other_shapes[relu]",
        ),
    ),
    Mutant(
        "a derivative shared by other functions",
        "calls/custom_derivatives.py",
        "ctx.programs.once((rule, *key), prove)",
        "ctx.programs.once(key, prove)",
        (f"{SHARED}::test_functions_with_other_derivatives[rows]",),
    ),
    Mutant(
        "a rule taken for elementwise because another function's is",
        "calls/custom_derivatives.py",
        "ctx.programs.once((rule, *key), prove)",
        "ctx.programs.once(key if len(key) == 1 else (rule, *key), prove)",
        (
            "tests/rewrite/test_rewrite_seen.py"
            "::test_derivatives_hold_no_values_of_the_program_around_them",
        ),
    ),
    Mutant(
        "a derivative shared by calls on values of other forms",
        "calls/custom_derivatives.py",
        "key = (*forms, ctx.derivatives, *avals,",
        "key = (ctx.derivatives,",
        (f"{SHARED}::test_one_function_on_two_lookups_and_other_shapes[rows]",),
    ),
    Mutant(
        "a mask shared by layers with other masks",
        "values/scope.py",
        "full_key = (key, *map(id, operands))",
        "full_key = (key,)",
        (f"{SHARED}::test_layers_with_different_masks",),
    ),
    Mutant(
        "values looked up by another index",
        "attention/products.py",
        "if not lineage.has_lineage(value) or value.lineage is not root.lineage:",
        "if not lineage.has_lineage(value):",
        decisions("values of others"),
    ),
    Mutant(
        "two lookups treated as one",
        "rules/concatenation.py",
        "one_lineage = value_lineage is not None and not differ",
        "one_lineage = value_lineage is not None",
        lookups("two lookups"),
    ),
    Mutant(
        "lengths of queries ignored by cuDNN's attention",
        "attention/cudnn.py",
        "if has_lengths and not _is_always(ctx, q_lengths, query.shape[1]):",
        "if False:",
        (f"{CUDNN}::test_others_stay_as_they_are_written[with_lengths_of_queries]",),
    ),
    Mutant(
        "a causal mask ignored by cuDNN's attention",
        "attention/cudnn.py",
        """    if mask.endswith("CAUSAL"):
        raise""",
        """    if False:
        raise""",
        (f"{CUDNN}::test_others_stay_as_they_are_written[with_causal_mask]",),
    ),
    Mutant(
        "zeros of one side left out of a product",
        "rules/concatenation.py",
        "if not (within and proofs.constant(ctx, part) == 0):",
        "if proofs.constant(ctx, part) != 0:",
        ("tests/rewrite/test_rewrite_aligned.py::test_padding_of_one_side_stays",),
    ),
)

"""Mutants of the rewrite's rules of layouts and of sequences, and the tests that fail with them."""

from __future__ import annotations

from rewrite_mutants import Mutant, lookups


def blocks(test: str, *names: str) -> tuple[str, ...]:
    """The ids of tests of attention over [history, candidate], by the name of their parameter."""
    return tuple(f"tests/rewrite/test_rewrite_blocks.py::test_{test}[{name}]" for name in names)


def layouts(*names: str) -> tuple[str, ...]:
    """The ids of tests of values and gradients of layouts, by name."""
    file = "tests/rewrite/test_rewrite_layouts.py"
    return tuple(f"{file}::test_values_and_gradients[{name}]" for name in names)


_STEPS = ("tests/rewrite/test_rewrite_lookalikes.py::test_every_step_from_every_source[repeat]",)
_SPLIT = "tests/rewrite/test_rewrite_split.py::"
LAYOUT_MUTANTS = (
    # Layouts.
    Mutant(
        "tiles and repeated rows taken for each other",
        "rules/reshape.py",
        "sizes = (times, rows) if is_tile else (rows, times)",
        "sizes = (rows, times)",
        ("tests/rewrite/test_rewrite_layouts.py::test_share_removed[din_tiled]",),
    ),
    Mutant(
        "rows broadcast along dimensions that they have",
        "rules/reshaped_axes.py",
        "x.base.shape[dim] == 1 != x.shape[dim]",
        "x.shape[dim] != 1",
        layouts("embedded_ids_repeated"),
    ),
    Mutant(
        "dimensions of an index change places without their rows",
        "rules/reshaped_rules.py",
        "lambda rows: rows.transpose(within)",
        "lambda rows: rows.reshape([rows.shape[d] for d in within])",
        (f"{_SPLIT}test_every_spelling_of_an_index_of_two_dimensions_is_found[vmap_of_slots]",),
    ),
    Mutant(
        "reshapes of other dimensions taken for the same",
        "rules/reshaped_axes.py",
        "if axes_of(x.groups, x.order).places == axes.places:",
        "if True:",
        (f"{_SPLIT}test_rows_of_an_index_beside_its_transposed_rows",),
    ),
    Mutant(
        "numbers out of bounds count alike",
        "rules/reselect.py",
        "if any(x[2:] != first[2:] for x in others):",
        "if False:",
        (f"{_SPLIT}test_heads_between_requests_and_slots_of_numbers_out_of_bounds[softmax-take]",),
    ),
    Mutant(
        "a counter by twos counts by ones",
        "values/hoisting.py",
        "is_fixed and step.val == 1 and",
        "is_fixed and",
        (f"{_SPLIT}test_counters_of_loops[2-False]",),
    ),
    Mutant(
        "a counter counts down in a reversed loop",
        "values/hoisting.py",
        'is_other = eqn.params["reverse"] or not',
        "is_other = not",
        (f"{_SPLIT}test_counters_of_loops[1-True]",),
    ),
    Mutant(
        "a difference multiplied as a sum",
        "rules/sums.py",
        'second = -sign if produced[0].primitive.name == "sub" else sign',
        "second = sign",
        layouts("din"),
    ),
    Mutant(
        "parts broadcast along users and along items treated as one",
        "rules/taken.py",
        "key = part.lineage or tuple(n == 1 for n in part.base.shape)",
        "key = part.lineage or ()",
        ("tests/rewrite/test_rewrite_layouts.py::test_share_removed[grid_by_nested_vmap]",),
    ),
    Mutant(
        "one-hot vectors of other positions",
        "rules/one_hot.py",
        "if not proofs.counts_along(ctx, positions, dim):",
        "if False:",
        ("tests/rewrite/test_rewrite_layouts.py::test_comparisons_that_are_no_lookups",),
    ),
    # Attention over [history, candidate].
    Mutant(
        "a block kept where only some of it is",
        "attention/block_masks.py",
        "return all((self._cut(x.state, query, key) == 1).all() for x in self.root.fills)",
        "return all((self._cut(x.state, query, key) == 1).any() for x in self.root.fills)",
        blocks("every_mask", "tril"),
    ),
    Mutant(
        "rows without a key not looked for",
        "attention/block_masks.py",
        "return bool(np.all(total))",
        "return True",
        blocks("every_mask", "strict", "valid_and_causal"),
    ),
    Mutant(
        "a mask's number that leaves weight",
        "attention/masked_keys.py",
        "LARGE = -1e8",
        "LARGE = 0.0",
        blocks("every_mask", "tril"),
    ),
    Mutant(
        "an unknown mask taken for true",
        "facts/masks.py",
        "np.where((x == 0) | (y == 0), 0, np.maximum(x, y))",
        "np.where((x == 0) | (y == 0), 0, np.minimum(x, y))",
        blocks("every_mask", "valid_and_causal"),
    ),
    Mutant(
        "a query's mask taken for a user's",
        "attention/block_masks.py",
        "if any(x is None or any(n != 1 for n in x.shape[1:-1]) for x in parts):",
        "if any(x is None for x in parts):",
        blocks("every_mask", "banded", "valid_or_self"),
    ),
    Mutant(
        "a pointwise block dropped that is not 0",
        "attention/pointwise.py",
        "is_zero = found is not None and activations.vanishes(found)",
        "is_zero = found is not None",
        blocks("other_functions_than_the_softmax", "where_silu"),
    ),
    Mutant(
        "a loop's product taken for the same in every iteration",
        "values/hoisting.py",
        "known.issuperset(variables) and not eqn.effects",
        "not known.isdisjoint(variables) and not eqn.effects",
        layouts("mapped_over_candidates"),
    ),
    Mutant(
        "pairs of fields in the order of their groups",
        "rules/taken.py",
        "= sum(y.shape[axis] for y in same) + np.arange(stop - start)",
        "= np.arange(stop - start)",
        layouts("dlrm_of_alternating_fields"),
    ),
    # Positions, updates, loops and windows.
    Mutant(
        "positions of other rows taken for the same rows'",
        "rules/positions.py",
        "and width == 1 and proofs.counts_along(ctx, part, dim):",
        "and width == 1:",
        lookups("positions of other rows"),
    ),
    Mutant(
        "positions by another lookup",
        "rules/positions.py",
        "if lineage.has_lineage(x) and (x.lineage, x.axis) != (users, axis):",
        "if False:",
        lookups("positions by another lookup"),
    ),
    Mutant(
        "constant positions in another order",
        "rules/taken.py",
        "if len(at) == shape[axis] and (at == np.arange(len(at))).all():",
        "if len(at) == shape[axis]:",
        layouts("fields_chosen_by_constants"),
    ),
    Mutant(
        "a reversed concatenation in its order",
        "rules/row_rules.py",
        "concat(parts[::-1] if x.axis in along else parts, x.axis)",
        "concat(parts, x.axis)",
        _STEPS,
    ),
    Mutant(
        "padding on the other side",
        "rules/row_rules.py",
        "for at, size in ((0, low), (len(parts) + 1, high)):",
        "for at, size in ((0, high), (len(parts) + 1, low)):",
        layouts("fields_padded"),
    ),
    Mutant(
        "sort along the looked-up axis",
        "rules/row_rules.py",
        "if axis == along:",
        "if False:",
        lookups("sort along the batch"),
    ),
    Mutant(
        "windows along the looked-up axis",
        "rules/row_rules.py",
        "if (axis := x.axis) in axes:",
        "if (axis := x.axis) in axes and False:",
        lookups("windows of candidates"),
    ),
    Mutant(
        "a first state that is not looked up",
        "calls/loops.py",
        "if wide is not None and form(wide) != form(carry[n]):",
        "if False:",
        ("tests/rewrite/test_rewrite_layouts.py::test_share_removed[gru]",),
    ),
    Mutant(
        "rows that do not vary among devices",
        "calls/devices.py",
        "        if names:\n",
        "        if False:\n",
        ("tests/rewrite/test_rewrite_sharded.py::test_shard_map[of_rows-shifted-True]",),
    ),
)

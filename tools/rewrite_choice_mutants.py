"""Mutants of changed attention weights and of chosen rows, for `tools/mutate_rewrite.py`."""

from __future__ import annotations

from rewrite_mutants import Mutant

_WEIGHTS = "tests/rewrite/test_rewrite_weights.py"
_RESELECT = "tests/rewrite/test_rewrite_reselect.py"


def _weights(*texts: str) -> tuple[str, ...]:
    return tuple(f"{_WEIGHTS}::test_changed_weights[{text}]" for text in texts)


def _chosen(*names: str) -> tuple[str, ...]:
    return tuple(f"{_RESELECT}::test_chosen_rows_are_a_lookup_again[{name}]" for name in names)


CHOICE_MUTANTS = (
    # Attention weights that are changed after the softmax.
    Mutant(
        "a product with a broadcast mask hides NaN",
        "attention/changed_weights.py",
        "whole = shape_of(other) == at.shape and ctx.scope.cast_mask(other) is not None",
        "whole = ctx.scope.cast_mask(other) is not None",
        (f"{_WEIGHTS}::test_changed_weights_of_heads[softmax(infinite) * M * per_head]",),
    ),
    Mutant(
        "factor of attention weights dropped",
        "attention/products.py",
        "return out if weights.scale == 1 else",
        "return out if True else",
        _weights("softmax(finite) * 2 / 3", "3 * nn.silu(x) * age * M / (1 + N)"),
    ),
    Mutant(
        "a log is added to any masked logits",
        "attention/changed_weights.py",
        "_LOST = 2.0**-7",
        "_LOST = 1e38",
        ("tests/rewrite/test_rewrite_seen_weights.py::test_a_log_of_a_sum_beside_a_large_number",),
    ),
    Mutant(
        "masked rows stay NaN",
        "attention/masked_keys.py",
        "nan = users[:, None] if shown is None else users[:, None] & shown",
        "nan = users[:, None]",
        _weights("jnp.where(M, softmax(infinite), 0)"),
    ),
    Mutant(
        "a hiding mask keeps",
        "attention/changed_weights.py",
        "mask = mask if keeps else Fill(0.0, kept=~mask.kept)",
        "mask = mask",
        _weights("jnp.where(~M, 0, softmax(finite))"),
    ),
    Mutant(
        "NaN replaced by any number is 0",
        "attention/changed_weights.py",
        'if which.stage == "is nan" and number == 0 and',
        'if which.stage == "is nan" and',
        _weights("jnp.nan_to_num(softmax(infinite), nan=5.0)"),
    ),
    Mutant(
        "weights over the sum of other weights",
        "attention/changed_weights.py",
        "if x.weights is not y.weights or not scores.belong(x, y):",
        "if not scores.belong(x, y):",
        _weights("softmax(x) * M / ((softmax(x) * other).sum(-1, keepdims=True) + 1e-9)"),
    ),
    Mutant(
        "any number is lost in a sum",
        "attention/changed_weights.py",
        'lost = at.sum_of_one and (how == "max" or number <= _NEGLIGIBLE)',
        "lost = at.sum_of_one",
        _weights("over(shifted(finite), 0.5)"),
    ),
    Mutant(
        "a sum of masked exponentials is at least 1",
        "attention/changed_weights.py",
        "least = x.sum_of_one and largest <= masked_keys.LARGE and not rest",
        "least = x.sum_of_one",
        _weights("over(shifted(x) * M, 1e-9)"),
    ),
    Mutant(
        "rows of exponentials without keys are NaN",
        "attention/changed_weights.py",
        'return x.then(eqn, operands, emptied="select")\n    if getattr',
        "return x.then(eqn, operands)\n    if getattr",
        _weights("over(jnp.where(M, shifted(infinite), 0), 1e-9)"),
    ),
    Mutant(
        "numbers looked up instead of a mask",
        "interpret.py",
        "if mask is None or is_plain(mask):",
        "if True:",
        (f"{_WEIGHTS}::test_a_product_with_a_cast_mask_hides_nan_as_xla_does",),
    ),
    # Rows that are chosen again.
    Mutant(
        "users that are not chosen stay in the gradient",
        "rules/reselect.py",
        "return without_unused(chosen, users, x.axis)",
        "return chosen",
        (f"{_RESELECT}::test_users_that_are_not_chosen_have_no_effect[sliced]",),
    ),
    Mutant(
        "ids of unused users stay in the gradient",
        "rules/table_rows.py",
        "if differs and not ctx.differentiated:",
        "if drops and not ctx.differentiated and jnp.issubdtype(operand.dtype, jnp.inexact):",
        (f"{_RESELECT}::test_users_that_are_not_chosen_have_no_effect",),
    ),
    Mutant(
        "gradient of shuffled rows out of bounds kept",
        "rules/reselect.py",
        "index = jnp.where(row >= count, size + row - count, index)",
        "index = index + 0",
        _chosen("out of bounds"),
    ),
    Mutant(
        "slices of one length are one lookup",
        "rules/reselect.py",
        '("slice", start, stop, stride)',
        '("slice", stop - start, stride)',
        _chosen("halves"),
    ),
    Mutant(
        "joined lookups in one table",
        "rules/reselect.py",
        "pieces.append(source.index + np.int32(starts[slot]))",
        "pieces.append(source.index)",
        _chosen("two tables"),
    ),
    Mutant(
        "positions in the first user's rows",
        "rules/positions.py",
        "column = lax.convert_element_type(operand.lineage.index, indices.dtype)",
        "column = lax.convert_element_type(operand.lineage.index * 0, indices.dtype)",
        (f"{_RESELECT}::test_items_retrieved_by_candidates_are_looked_up_in_users_rows",),
    ),
)

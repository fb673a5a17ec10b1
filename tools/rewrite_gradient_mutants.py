"""Mutants of gradients in other dtypes, of checks, arguments and constraints."""

from __future__ import annotations

from rewrite_mutants import CUSTOM_VJP, FAULTS, MIXED, Mutant

GRADIENT_MUTANTS = (
    # Gradients in other dtypes, checks, arguments and constraints.
    Mutant(
        "gradients of lookups summed in 16 bits",
        "values/rows.py",
        "if staged.is_narrow(x) and (explicit or dtype not in _SUMMED):",
        "if False:",
        (f"{MIXED}::test_gradients_of_looked_up_float8_rows_are_summed_in_float32",),
    ),
    Mutant(
        "gradients overflow in float16",
        "interpret.py",
        "if deferred and may_overflow(eqn):",
        "if False:",
        (f"{MIXED}::test_a_sum_beyond_the_dtype_is_finite",),
    ),
    Mutant(
        "casts to float8 counted as safe",
        "values/equations.py",
        'return _has_small_range(eqn.params["new_dtype"])',
        "return False",
        (f"{MIXED}::test_a_sum_beyond_the_dtype_is_finite",),
    ),
    Mutant(
        "float16 taken for a wide dtype",
        "values/equations.py",
        "float(jnp.finfo(dtype).max) < float(jnp.finfo(jnp.bfloat16).max)",
        "float(jnp.finfo(dtype).max) < float(jnp.finfo(jnp.float16).max)",
        (f"{MIXED}::test_a_sum_beyond_the_dtype_is_finite",),
    ),
    Mutant(
        "algorithms of products may cast",
        "values/linear.py",
        "if not all(isinstance(x, lax.Precision) for x in precision):",
        "if False:",
        (f"{CUSTOM_VJP}::test_products_whose_algorithm_may_cast",),
    ),
    Mutant(
        "no tangent of rows out of bounds",
        "rules/table_rows.py",
        "found: jax.Array = _without_gradient_p.bind(x) if inexact else x",
        "found: jax.Array = lax.stop_gradient(x) if inexact else x",
        (f"{FAULTS}::test_derivatives_of_indices_out_of_bounds_are_jaxs",),
    ),
    Mutant(
        "checkify checks the rewritten program",
        "rules/variants.py",
        "of = exact.original",
        "of = exact.jaxpr",
        (f"{FAULTS}::test_checkify_reports_what_the_original_has",),
    ),
    Mutant(
        "scalars of NumPy traced",
        "__init__.py",
        "not isinstance(x, (type, np.generic))",
        "not isinstance(x, type)",
        (f"{FAULTS}::test_numpy_scalars_are_passed_as_they_are",),
    ),
    Mutant(
        "candidates not divided as constrained",
        "interpret.py",
        "results = list(divided(self, origins, results))",
        "pass",
        (f"{FAULTS}::test_work_stays_divided_as_constrained",),
    ),
    Mutant(
        "a fill above the logits dropped",
        "attention/changed_weights.py",
        "if x.shifted and same and largest > -1e3:",
        "if False:",
        (f"{FAULTS}::test_a_fill_far_above_the_logits_leaves_no_sum",),
    ),
)

"""Changes one line of `ikbo_jax/rewrite/` at a time, on purpose, and tells whether a test fails.

    python tools/mutate_rewrite.py              # every mutant, one after the other
    python tools/mutate_rewrite.py sign bounds  # those whose names contain a word
    python tools/mutate_rewrite.py --list       # checks that every mutant's text is there

A mutant is caught if a test of its files fails, and survives if all pass. Each is applied in a
temporary copy of the tree, whose tests must pass as it is. Ends with 1 if a mutant survived or its
text was not found.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent

SEEN = "tests/test_rewrite_seen.py"
RUNS = "tests/test_rewrite_runs.py"
RECOGNISED = "tests/test_rewrite_recognised.py"
DRAWN = "tests/test_rewrite_lookalikes.py"
ACTIVATIONS = "tests/test_rewrite_activations.py"
ATTENTION = "tests/test_rewrite_attention.py"
RULES = "tests/test_rewrite_rules.py"
MODELS = "tests/test_rewrite_models.py"
REWRITE = "tests/test_rewrite.py"
OF_CURVES = (f"{SEEN}::test_activations_are_not_mistaken", RECOGNISED, ACTIVATIONS, DRAWN)
OF_STOPS = (f"{SEEN}::test_derivatives_are_the_original_ones", ACTIVATIONS, DRAWN)
OF_MASKS = (
    f"{SEEN}::test_other_masks",
    f"{SEEN}::test_masks_are_judged_where_the_softmax_sees_them",
    RECOGNISED,
    ATTENTION,
    DRAWN,
)
OF_SOFTMAX = (f"{SEEN}::test_relatives_of_softmax", ATTENTION, DRAWN)
OF_LOOKUPS = (
    f"{SEEN}::test_gradients_of_rows_out_of_bounds_are_dropped_as_jax_drops_them",
    f"{SEEN}::test_indices_out_of_bounds",
    REWRITE,
    RULES,
    DRAWN,
)
OF_PARTS = (f"{SEEN}::test_concatenations_of_different_parts", RULES, MODELS)


class Mutant(NamedTuple):
    """A change of one line.

    Attributes:
      name: what it does.
      file: in `ikbo_jax/rewrite/`.
      old: text that the file holds once.
      new: what stands in its place.
      tests: pytest's arguments, the likeliest first.
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
        "activations.py",
        "eps = max(float(jnp.finfo(d).eps) for d in curve.dtypes)",
        "eps = 100 * max(float(jnp.finfo(d).eps) for d in curve.dtypes)",
        OF_CURVES,
    ),
    Mutant(
        "slopes never compared",
        "activations.py",
        "return True, bool(np.all(slope | ~finite | (np.isnan(found.slope) & overflows)))",
        "return True, True",
        OF_STOPS,
    ),
    Mutant(
        "sign of the output scale dropped",
        "activations.py",
        "output_scale = far / float(activation(np.array([_FAR])).value[0])",
        "output_scale = abs(far / float(activation(np.array([_FAR])).value[0]))",
        OF_CURVES,
    ),
    Mutant(
        "few points decide",
        "activations.py",
        "same, same_slope = compare(_points(curve))",
        "same, same_slope = compare(_FEW / scale)",
        OF_CURVES,
    ),
    Mutant(
        "negative points left out",
        "activations.py",
        "return np.concatenate([points, -points])",
        "return points",
        OF_CURVES,
    ),
    Mutant(
        "sides of constants left out",
        "activations.py",
        "points = np.concatenate([grid.astype(dtype), *sides, constants, special])",
        "points = np.concatenate([grid.astype(dtype), special])",
        OF_CURVES,
    ),
    Mutant(
        "another slope is no reason",
        "attention.py",
        "if activation is not None and not activation.same_slope:",
        "if False and activation is not None and not activation.same_slope:",
        OF_STOPS,
    ),
    Mutant(
        "negative linear factor dropped",
        "curves.py",
        "        return -1.0\n",
        "        return 1.0\n",
        (f"{RECOGNISED}::test_scales_of_an_activation_are_kept", *OF_CURVES),
    ),
    Mutant(
        "stop_gradient keeps the slope in curves",
        "curves.py",
        '"stop_gradient": lambda x: Dual(x.value),',
        '"stop_gradient": _same,',
        OF_STOPS,
    ),
    Mutant(
        "own derivative ignored",
        "curves.py",
        'if name == "custom_jvp_call" and slopes:\n            return _own',
        'if name == "custom_jvp_call" and slopes and False:\n            return _own',
        OF_STOPS,
    ),
    Mutant(
        "clamp keeps the slope outside",
        "curves.py",
        "return Dual(value, np.where(inside, x.slope, 0.0))",
        "return Dual(value, x.slope)",
        OF_STOPS,
    ),
    # Scores: softmax.
    Mutant(
        "stop_gradient accepted anywhere",
        "scores.py",
        'if x.stage != "max":\n        raise NotCovered(f"attention is not recognised: stop',
        'if x.stage is None:\n        raise NotCovered(f"attention is not recognised: stop',
        OF_STOPS,
    ),
    Mutant(
        "sum over another axis accepted",
        "scores.py",
        "if stage is None or kinds.count(KEY) != 1 or any(",
        "if stage is None or False and any(",
        OF_SOFTMAX,
    ),
    Mutant(
        "sum of other exponentials accepted",
        "scores.py",
        "return x.root is y.root and all(",
        "return all(",
        OF_SOFTMAX,
    ),
    Mutant(
        "maximum with any number accepted",
        "scores.py",
        'if scores.stage != "max" or other != -math.inf:',
        'if scores.stage != "max":',
        OF_SOFTMAX,
    ),
    Mutant(
        "scaled at any stage",
        "scores.py",
        'if factor is None or scores.stage != "logits" or (divides and scores is y):',
        "if factor is None or (divides and scores is y):",
        OF_SOFTMAX,
    ),
    Mutant(
        "number over logits taken for logits over number",
        "scores.py",
        'if factor is None or scores.stage != "logits" or (divides and scores is y):',
        'if factor is None or scores.stage != "logits":',
        (f"{SEEN}::test_relatives_of_softmax", *OF_CURVES),
    ),
    Mutant(
        "division multiplies",
        "scores.py",
        "factor = float(np.divide(1.0, factor)) if divides else factor",
        "factor = float(factor)",
        (ATTENTION, *OF_MASKS),
    ),
    # Masks.
    Mutant(
        "fill not scaled with the logits",
        "scores.py",
        "value = float(np.asarray(fill.value * factor).astype(dtype).astype(np.float64))",
        "value = float(np.asarray(fill.value).astype(dtype).astype(np.float64))",
        OF_MASKS,
    ),
    Mutant(
        "sense of the mask lost",
        "scores.py",
        "fill = dataclasses.replace(fill, kept=base if keeps else ~base, lengths=lengths)",
        "fill = dataclasses.replace(fill, kept=base, lengths=lengths)",
        OF_MASKS,
    ),
    Mutant(
        "mask by candidate accepted",
        "scores.py",
        "if n != 1 and scores.labels[d][0] == BATCH and d != mask.axis:",
        "if False and scores.labels[d][0] == BATCH and d != mask.axis:",
        (ATTENTION, *OF_MASKS),
    ),
    Mutant(
        "mask by query accepted",
        "scores.py",
        "if n != 1 and scores.labels[d][0] not in (BATCH, KEY):",
        "if False and scores.labels[d][0] not in (BATCH, KEY):",
        (ATTENTION, *OF_MASKS),
    ),
    Mutant(
        "any number masks",
        "masks.py",
        "if any(fill.value > _MASKS for fill in root.fills):",
        "if any(fill.value > 1e6 for fill in root.fills):",
        OF_MASKS,
    ),
    Mutant(
        "masked keys always weigh nothing",
        "masks.py",
        "_UNREACHABLE = -1e30",
        "_UNREACHABLE = -1e3",
        OF_MASKS,
    ),
    Mutant(
        "two masks joined by or",
        "masks.py",
        "kept = kept & fill.kept",
        "kept = kept | fill.kept",
        (ATTENTION, *OF_MASKS),
    ),
    Mutant(
        "NaN of a row without keys removed",
        "masks.py",
        "return jnp.where(operands.of_user(empty)[..., None, None], _nan_of(operands, empty), out)",
        "return out",
        OF_MASKS,
    ),
    Mutant(
        "first mask's number wins",
        "masks.py",
        "infinite = jnp.where(fill.kept, infinite, fill.value == -math.inf)",
        "infinite = infinite | (~fill.kept & (fill.value == -math.inf))",
        OF_MASKS,
    ),
    Mutant(
        "rest of the keys without its number",
        "masks.py",
        "return merge_attention(out, lse, rest, rest_lse + jnp.float32(fill.value))[0]",
        "return merge_attention(out, lse, rest, rest_lse)[0]",
        OF_MASKS,
    ),
    Mutant(
        "order of a length mask reversed",
        "masks.py",
        "order = jnp.argsort(~first, axis=1, stable=True)[:, :, None, None]",
        "order = jnp.argsort(first, axis=1, stable=True)[:, :, None, None]",
        OF_MASKS,
    ),
    Mutant(
        "slope of an undetermined row left out",
        "masks.py",
        "out = out + (slope - lax.stop_gradient(slope))",
        "out = out + 0 * slope",
        OF_MASKS,
    ),
    Mutant(
        "lengths by <=",
        "facts.py",
        'if name in ("lt", "gt"):\n            position',
        'if name in ("lt", "gt", "le", "ge"):\n            position',
        (f"{SEEN}::test_other_masks", ATTENTION),
    ),
    Mutant(
        "lengths and arange exchanged",
        "facts.py",
        'position, length = operands if name == "lt" else reversed(operands)',
        'position, length = operands if name == "gt" else reversed(operands)',
        (ATTENTION, f"{SEEN}::test_other_masks"),
    ),
    Mutant(
        "any positions count as arange",
        "facts.py",
        "return np.array_equal(np.ravel(value), np.arange(size))",
        "return True",
        (f"{SEEN}::test_other_masks", ATTENTION, RULES, DRAWN),
    ),
    # Lookups.
    Mutant(
        "bounds off by one",
        "sources.py",
        "proven = facts.within(ctx, root, 0, rows - 1)",
        "proven = facts.within(ctx, root, 0, rows)",
        OF_LOOKUPS,
    ),
    Mutant(
        "fill taken for clip",
        "sources.py",
        "fills = mode == lax.GatherScatterMode.FILL_OR_DROP and not proven",
        "fills = mode == lax.GatherScatterMode.CLIP and not proven",
        OF_LOOKUPS,
    ),
    Mutant(
        "gradient of rows out of bounds kept",
        "sources.py",
        "lax.stop_gradient if drops else None",
        "None",
        OF_LOOKUPS,
    ),
    Mutant(
        "known positions below 0",
        "sources.py",
        "0 <= known[0] <= size - sizes[axis]",
        "known[0] <= size - sizes[axis]",
        (RULES, REWRITE),
    ),
    Mutant(
        "casts to narrow integers keep bounds",
        "facts.py",
        "return first if kept else None",
        "return first",
        (RULES, REWRITE, *OF_LOOKUPS),
    ),
    # Products and parts.
    Mutant(
        "parts summed in 16 bits",
        "contraction.py",
        "wide = jnp.float32 if dtype in _HALF else None",
        "wide = None",
        (f"{SEEN}::test_gradients_of_a_user_with_many_candidates_are_summed_in_f32", MODELS),
    ),
    Mutant(
        "precision of attention dropped",
        "attention.py",
        "    if not has_default_precision(eqn):\n        return None",
        "    if False:\n        return None",
        (f"{RUNS}::test_precision_of_attention_is_kept", ATTENTION),
    ),
    Mutant(
        "concatenations of different parts zipped",
        "rules.py",
        "if any((c.axis, c.sizes) != (first.axis, first.sizes) for c in concats):",
        "if any(c.axis != first.axis for c in concats):",
        OF_PARTS,
    ),
    Mutant(
        "values looked up by another index",
        "attention.py",
        "if not has_lineage(value) or value.lineage is not root.lineage:",
        "if not has_lineage(value):",
        (ATTENTION, DRAWN),
    ),
    Mutant(
        "two lookups taken for one",
        "rules.py",
        "together = value_lineage is not None and not differ",
        "together = value_lineage is not None",
        OF_PARTS,
    ),
)


def check(mutant: Mutant, root: pathlib.Path) -> str:
    """Why a mutant cannot be applied; "" if it can."""
    text = (root / "ikbo_jax" / "rewrite" / mutant.file).read_text()
    count = text.count(mutant.old)
    return "" if count == 1 else f"its text stands in {mutant.file} {count} times"


def survives(mutant: Mutant, python: str) -> tuple[bool, str]:
    """Whether all tests pass, and the name of the first one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("ikbo_jax", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "ikbo_jax" / "rewrite" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": folder}
        options = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        for tests in mutant.tests:
            command = [python, "-m", "pytest", *options, tests]
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
                return False, (failed or [f"pytest ended with {done.returncode}"])[0][:110]
    return True, ""


def main() -> int:
    """Runs the chosen mutants; 1 if one survived or could not be applied."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="mutants whose names contain one of them")
    parser.add_argument("--list", action="store_true", help="runs no test")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.name for w in options.words)]
    failures = 0
    for mutant in chosen:
        start = time.monotonic()
        problem = check(mutant, ROOT)
        if problem:
            result, failures = f"NOT APPLIED: {problem}", failures + 1
        elif options.list:
            result = "applies"
        else:
            alive, by = survives(mutant, sys.executable)
            result, failures = (
                ("SURVIVED", failures + 1) if alive else (f"caught by {by}", failures)
            )
        print(f"{mutant.file:16} {mutant.name:48} {result}", end="", flush=True)
        print("" if options.list else f" ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

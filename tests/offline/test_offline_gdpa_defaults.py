"""What GDPA runs without a table row of its own compiles: no spills, no serialised WGMMAs.

That is the default configuration, or the configuration of the nearest row, which may have been
measured with another activation.
"""

import dataclasses
import itertools
import os
from typing import Any

import offline
import pytest
import test_offline_gdpa as forward
import test_offline_gdpa_backward as backward

from benchmarks import production_draws
from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig
from ikbo_jax.problems.gdpa import MAX_BLOCK_KV
from ikbo_jax.problems.gdpa_backward import HEAD_DIMS
from ikbo_jax.tuning import table

pytestmark = pytest.mark.slow

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "softmax")
BATCH = forward.DEFAULT.batch


def jagged(batch: int, heads: int, *lengths: tuple[int, int]) -> dict[str, Any]:
    """Sequences of a mean length and a bound, of queries and of keys."""
    (q_mean, max_seqlen_q), (kv_mean, max_seqlen_kv) = lengths
    return {
        **{"batch": batch, "batch_kv": batch, "q_heads": heads, "kv_heads": heads},
        **{"q_rows": batch * q_mean, "kv_rows": batch * kv_mean},
        **{"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv},
    }


#: Sizes of each list of modes that defaults come from, and what other sizes find in the table.
CLASSES: dict[str, dict[str, Any]] = {
    "full": jagged(BATCH, 4, (1024, 1024), (1024, 1024)),
    "jagged": jagged(BATCH, 4, (512, 1024), (512, 1024)),
    "short": jagged(BATCH, 4, (1024, 1024), (256, 256)),
    "tiny": jagged(BATCH, 4, (32, 64), (32, 64)),
    # The kernel for short sequences beyond those: one block or two of each sequence's keys, queries
    # that all share, and few tiles.
    "uniform_91": jagged(133, 4, (47, 91), (47, 91)),
    "pffn_31": jagged(1173, 4, (167, 2048), (31, 31)),
    "pffn_94": jagged(82, 2, (167, 2048), (94, 94)),
    "seeds": jagged(140, 8, (23, 23), (173, 2048)) | {"broadcast_q": True},
    "few_149": jagged(184, 1, (78, 149), (78, 149)),
    "few_272": jagged(178, 1, (143, 272), (143, 272)),
    "few_2048": jagged(88, 1, (165, 2048), (165, 2048)),
    # Work items by a counter.
    "tickets": jagged(244, 1, (167, 2048), (167, 2048)),
}
#: What the suite compiles: what serialised before other defaults were chosen, and one kernel of the
#: gradient.
CHOSEN = (
    "h64_gelu_bfloat16_default",
    "h64_relu_bfloat16_default",
    "h256_gelu_bfloat16_default",
    "h64_relu_keys",
    "h128_softmax_bfloat16_default_pffn_94",
    "h64_gelu_bfloat16_default_seeds",
    "h64_softmax_bfloat16_default_uniform_91",
)


def problem_of(head_dim: int, activation: str, sizes: str, dtype: str = "bfloat16") -> GdpaProblem:
    return dataclasses.replace(
        forward.DEFAULT, head_dim=head_dim, activations=(activation,), dtype=dtype, **CLASSES[sizes]
    )


def choices(problem: GdpaProblem) -> dict[str, GdpaConfig | ShortGdpaConfig]:
    """The configurations that a problem may run with on a machine without a tuning cache."""
    nearest = table.lookup(problem, with_user_rows=False).config
    return {"default": problem.default_config(), "table": nearest or problem.default_config()}


def forward_cases() -> dict[str, forward.Case]:
    """One case of each kernel, under the name of the first class that runs it."""
    names: dict[tuple[Any, ...], str] = {}
    cases: dict[str, forward.Case] = {}
    jagged_first = sorted(CLASSES, key=lambda name: name != "jagged")
    for head_dim, activation, sizes in itertools.product(MAX_BLOCK_KV, ACTIVATIONS, jagged_first):
        for dtype in ("bfloat16", "float16"):
            if dtype == "float16" and sizes != "jagged":
                continue
            problem = problem_of(head_dim, activation, sizes, dtype)
            for source, config in choices(problem).items():
                name = f"h{head_dim}_{activation}_{dtype}_{source}"
                name = name if sizes == "jagged" else f"{name}_{sizes}"
                if names.setdefault((head_dim, activation, dtype, config), name) == name:
                    cases[name] = forward.Case(problem, config)
    return cases


def backward_cases() -> dict[str, backward.Case]:
    return {
        f"h{head_dim}_{activation}_{'keys' if is_for_keys else 'queries'}": backward.Case(
            is_for_keys, head_dim, (activation,) * 4
        )
        for head_dim, activation, is_for_keys in itertools.product(
            HEAD_DIMS, ACTIVATIONS, (True, False)
        )
    }


def drawn_cases() -> dict[str, forward.Case]:
    """What the benchmark of drawn sizes runs."""
    cases = {}
    for shape in production_draws.shapes("gdpa", 40):
        queries, keys = shape.numbers
        problem = GdpaProblem(
            *(shape.batch, shape.batch, int(queries.sum()), int(keys.sum())),
            *(shape.heads, shape.heads, shape.head_dim, shape.dtype, (shape.activation,)),
            "tanh" if shape.activation in ("gelu_tanh", "silu") else None,
            *(shape.is_broadcast, int(queries.max()), int(keys.max())),
        )
        cases[shape.label] = forward.Case(problem, choices(problem)["table"], forward.SCALES)
    return cases


FORWARD, BACKWARD = forward_cases() | drawn_cases(), backward_cases()
#: With a 1, all kernels: several minutes.
RUNS = (*FORWARD, *BACKWARD) if os.environ.get("IKBO_OFFLINE_DEFAULTS") == "1" else CHOSEN


@pytest.mark.parametrize("name", RUNS)
def test_offline_default_is_fit(name: str, compiler: offline.Compiler) -> None:
    if name in FORWARD:
        forward.assert_fit(FORWARD[name], compiler)
    else:
        compiler.compile_fit(*BACKWARD[name].launch())


# The check itself must be able to fail.


def test_offline_half_blocks_that_serialise_are_found(compiler: offline.Compiler) -> None:
    """The configuration from which gelu's at H = 64 is adapted."""
    case = FORWARD["h64_gelu_bfloat16_default"]
    assert isinstance(case.config, GdpaConfig)
    case = dataclasses.replace(case, config=dataclasses.replace(case.config, half_blocks=True))
    with pytest.raises(AssertionError, match="C7513"):
        forward.assert_fit(case, compiler)

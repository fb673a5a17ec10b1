"""Problem descriptions, kernel configurations, and the rules that decide what a kernel can run.

The ground floor: dispatch table, autotuner, ops and kernels import it, and it imports none of them.
"""

from ikbo_jax.problems.attention import AttentionConfig, AttentionProblem
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig
from ikbo_jax.problems.attention_backward_problem import AttentionBackwardProblem
from ikbo_jax.problems.few_queries import FewQueriesConfig
from ikbo_jax.problems.gdpa import GdpaConfig, GdpaProblem
from ikbo_jax.problems.gdpa_backward import (
    GdpaBackwardConfig,
    GdpaBackwardProblem,
)
from ikbo_jax.problems.linear_compression import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.problems.linear_compression_backward import (
    LinearCompressionBackwardProblem,
    WeightGradientConfig,
)
from ikbo_jax.problems.packed_compression import PackedCompressionConfig
from ikbo_jax.problems.problem import Config, Problem
from ikbo_jax.problems.resident_compression import ResidentCompressionConfig
from ikbo_jax.problems.short_gdpa import ShortGdpaConfig

#: The class of every op's problems, by the op's name in table rows.
PROBLEMS: dict[str, type[Problem]] = {
    problem.op: problem
    for problem in (
        LinearCompressionProblem,
        LinearCompressionBackwardProblem,
        AttentionProblem,
        AttentionBackwardProblem,
        GdpaProblem,
        GdpaBackwardProblem,
    )
}

"""The part of the demo on attention: candidates attend to their users' histories."""

import functools

import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo
from ikbo_jax._timing.programs import Log, Part
from ikbo_jax.cases.attention import Case, Inputs, oracle
from ikbo_jax.demo import Report, Stage
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.ops.dispatch import hopper_unavailable_reason
from ikbo_jax.problems import AttentionProblem

#: Number of candidates whose results are compared with the oracle.
NUM_CHECKED = 32


def case_of(sizes: Sizes) -> Case:
    """Makes the case of the network's target attention."""
    rows = (sizes.candidates, sizes.users, sizes.queries, sizes.history)
    return Case(AttentionProblem(*rows, *2 * (sizes.heads,), sizes.head_dim, sizes.dtype))


def stages(sizes: Sizes) -> list[Stage]:
    """Makes every stage, the materialised one first."""
    size = jnp.dtype(sizes.dtype).itemsize * sizes.heads * sizes.head_dim
    moved = size * 2 * (sizes.candidates * sizes.queries + sizes.users * sizes.history)
    moved += 4 * sizes.candidates
    moved_with_copies = moved + size * 2 * 2 * sizes.candidates * sizes.history
    contender = case_of(sizes).contender
    found = [
        Stage("1  materialised", contender("materialised"), moved_with_copies, "xla"),
        Stage("2  decomposed", contender("decomposed"), moved, "xla"),
    ]
    if (reason := hopper_unavailable_reason()) is not None:
        return [*found, Stage("3  fused", None, moved, reason)]
    cudnn = contender("materialised-cudnn")
    found.insert(1, Stage("1b materialised, cuDNN", cudnn, moved_with_copies, "cudnn"))
    return [*found, Stage("3  fused", contender("fused"), moved, "mosaic_gpu")]


def run(sizes: Sizes, seed: int, *, on_progress: Log = lambda _: None) -> Part[Report]:
    """Runs the part on attention; see `demo.run_stages`."""
    rows = np.linspace(0, sizes.candidates - 1, min(NUM_CHECKED, sizes.candidates))
    rows = rows.astype(np.int32)
    return demo.run_stages(
        *("attention", sizes, case_of(sizes), seed),
        make=lambda drawn, index: Inputs._make([*drawn, index, None]),
        oracle=functools.partial(oracle, rows=rows),
        stages=stages(sizes),
        on_progress=on_progress,
        rows=rows,
    )

"""The part of the demo on attention: candidates attend to their users' histories."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo
from ikbo_jax._timing.programs import Log, Part
from ikbo_jax.cases.attention import Case, Inputs, oracle
from ikbo_jax.demo import Report, Stage
from ikbo_jax.ops.dispatch import hopper_unavailable_reason
from ikbo_jax.problems import AttentionProblem

#: Number of candidates whose results are compared with the oracle.
NUM_CHECKED = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """Sizes of the attention.

    Attributes:
      ranking: the demo's request, which holds candidates, users, dtype and seed.
      q_len: T, queries of a candidate.
      kv_len: S, keys of a user.
      heads: N = K, number of query heads and of key heads.
      head_dim: H, head width.
    """

    ranking: demo.Request
    q_len: int
    kv_len: int
    heads: int
    head_dim: int

    @property
    def case(self) -> Case:
        ranking, heads = self.ranking, self.heads
        sizes = (ranking.candidates, ranking.users, self.q_len, self.kv_len, heads, heads)
        return Case(AttentionProblem(*sizes, self.head_dim, ranking.dtype))


def default_request(ranking: demo.Request) -> Request:
    """Returns histories of 1,024 keys of width 128 on an accelerator, 64 of width 16 on a CPU."""
    if jax.default_backend() == "cpu":
        return Request(ranking, q_len=4, kv_len=64, heads=2, head_dim=16)
    return Request(ranking, q_len=64, kv_len=1024, heads=2, head_dim=128)


def stages(request: Request) -> list[Stage]:
    """Makes every stage, the materialised one first."""
    ranking = request.ranking
    size = jnp.dtype(ranking.dtype).itemsize * request.heads * request.head_dim
    moved = size * 2 * (ranking.candidates * request.q_len + ranking.users * request.kv_len)
    moved += 4 * ranking.candidates
    moved_with_copies = moved + size * 2 * 2 * ranking.candidates * request.kv_len
    contender = request.case.contender
    found = [
        Stage("1  materialised", contender("materialised"), moved_with_copies, "xla"),
        Stage("2  decomposed", contender("decomposed"), moved, "xla"),
    ]
    if (reason := hopper_unavailable_reason()) is not None:
        return [*found, Stage("3  fused", None, moved, reason)]
    cudnn = contender("materialised-cudnn")
    found.insert(1, Stage("1b materialised, cuDNN", cudnn, moved_with_copies, "cudnn"))
    return [*found, Stage("3  fused", contender("fused"), moved, "mosaic_gpu")]


def run(request: Request, *, on_progress: Log = lambda _: None) -> Part[Report]:
    """Runs the part on attention; see `demo.run_stages`."""
    ranking = request.ranking
    rows = np.linspace(0, ranking.candidates - 1, min(NUM_CHECKED, ranking.candidates))
    rows = rows.astype(np.int32)
    return demo.run_stages(
        *("attention", request, request.case, ranking.seed, demo.user_index(ranking)),
        make=lambda drawn, index: Inputs._make([*drawn, index, None]),
        oracle=functools.partial(oracle, rows=rows),
        stages=stages(request),
        on_progress=on_progress,
        rows=rows,
    )

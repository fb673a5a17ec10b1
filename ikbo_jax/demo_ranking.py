"""The demo's ranking network: a request is scored by three versions of one network.

`run` compiles `materialised`, `co_designed` and the rewritten `materialised`, checks each against
the materialised network in float32 and times them; `sweep` does so over candidates per user.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.ops.explain import explain
from ikbo_jax.rewrite import rewrite

#: How many candidates are shown.
SHOWN = 5
#: Candidates that the oracle scores at once: copies in float32 are large.
ORACLE_BATCH = 512
#: Candidates per user in the sweep; few on a CPU, where every point takes some 20 s.
RATIOS = (10, 70, 300, 1000)
RATIOS_ON_CPU = (4, 16, 64, 256)


class Version(NamedTuple):
    """One version of the network: a name, and a function of parameters and request."""

    name: str
    fn: Callable[..., jax.Array]


class Measured(NamedTuple):
    """A version that ran.

    Attributes:
      name: the version's.
      time_ms: median over the rounds, milliseconds.
      memory_bytes: output and temporary buffers, as the compiler laid them out.
      error: largest absolute difference of a logit to the oracle in float32.
      agrees: whether that is within the tolerance.
    """

    name: str
    time_ms: float
    memory_bytes: int
    error: float
    agrees: bool


class Scored(NamedTuple):
    """A candidate, its user and its logits."""

    candidate: int
    user: int
    logits: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `run` found. `measured[0]` is the materialised network, the baseline of the speed-ups.

    Attributes:
      sizes: of the network.
      measured: every version.
      tolerance: of the errors.
      top: the candidates with the largest logit of the first task, by the rewritten network.
      explanation: the report of the rewrite, and the paths that its ops take.
    """

    sizes: Sizes
    measured: tuple[Measured, ...]
    tolerance: float
    top: tuple[Scored, ...]
    explanation: str

    @property
    def agree(self) -> bool:
        """Whether every version agrees with the oracle."""
        return all(m.agrees for m in self.measured)


def sizes_of(request: demo.Request, layers: int | None = None) -> Sizes:
    """The network's sizes: the demo request's where it has them, those of the device elsewhere."""
    base = ranking.SMALL if jax.default_backend() == "cpu" else Sizes()
    pooled, dense = base.pooled, base.dense_tokens
    if request.k_user != base.user_rows:
        pooled = max(1, min(pooled, request.k_user // 4))
        dense = min(dense, request.k_user // 4)
    return dataclasses.replace(
        base,
        layers=base.layers if layers is None else layers,
        candidates=request.candidates,
        users=request.users,
        width=request.n,
        pooled=pooled,
        dense_tokens=dense,
        user_tokens=request.k_user - pooled - dense,
        cand_tokens=request.k_cand,
        compressed=request.m,
        dtype=request.dtype,
    )


def versions() -> tuple[Version, ...]:
    """The three versions, the materialised one first."""
    return (
        Version("materialised", ranking.materialised),
        Version("co-designed", ranking.co_designed),
        Version("rewritten", rewrite(ranking.materialised)),
    )


def oracle(params: Any, request: ranking.Request) -> jax.Array:
    """The materialised network in float32, [B, tasks] float32; some candidates at a time."""
    params, request = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        (params, request),
    )
    batch = request.cand_to_user.shape[0]
    size = min(batch, ORACLE_BATCH)
    score = jax.jit(ranking.materialised)
    outs = []
    for start in range(0, batch, size):
        rows = np.arange(start, start + size) % batch
        part = request._replace(
            cand_tokens=request.cand_tokens[rows], cand_to_user=request.cand_to_user[rows]
        )
        with jax.default_matmul_precision("highest"):
            outs.append(score(params, part))
    return jnp.concatenate(outs)[:batch]


def tolerance(sizes: Sizes, baseline_error: float, largest: float) -> float:
    """Twice the materialised network's own error in this dtype, and one rounding.

    In float32 the materialised network nearly is the oracle, while another order of summation is as
    good: allow what K roundings add up to at random in each layer.
    """
    k = sizes.user_rows + sizes.cand_tokens
    rounding = float(jnp.finfo(sizes.dtype).eps) / 2
    summation = sizes.layers * math.sqrt(k) * float(jnp.finfo(jnp.float32).eps)
    return 2 * baseline_error + (rounding + summation) * largest


def run(sizes: Sizes, seed: int, *, on_progress: Callable[[str], None] = lambda _: None) -> Report:
    """Scores a seeded request with every version, checks the logits and times them in turn.

    Args:
      sizes: of network and request.
      seed: of parameters and request.
      on_progress: is told what is being done.
    """
    on_progress("network: building")
    inputs = (ranking.init(sizes, seed), ranking.make_request(sizes, seed))
    on_progress("network: oracle in float32")
    expected = np.asarray(oracle(*inputs))
    largest = float(np.max(np.abs(expected)))
    compiled, outs = {}, {}
    for version in versions():
        on_progress(f"network: compiling {version.name}")
        compiled[version.name] = jax.jit(version.fn).lower(*inputs).compile()
        outs[version.name] = np.asarray(compiled[version.name](*inputs))
    samples = demo.time_by_turns(compiled, inputs, lambda text: on_progress(f"network: {text}"))
    errors = {name: float(np.max(np.abs(out - expected))) for name, out in outs.items()}
    limit = tolerance(sizes, next(iter(errors.values())), largest)
    measured = tuple(
        Measured(
            name,
            statistics.median(samples[name]),
            demo.device_memory(compiled[name]),
            error,
            # A NaN disagrees; and a baseline whose error hides the result has no right to vouch.
            error <= limit < largest,
        )
        for name, error in errors.items()
    )
    logits, users = outs["rewritten"], np.asarray(inputs[1].cand_to_user)
    top = tuple(
        Scored(int(b), int(users[b]), tuple(map(float, logits[b])))
        for b in np.argsort(-logits[:, 0], kind="stable")[:SHOWN]
    )
    on_progress("network: report of the rewrite")
    explanation = str(explain(versions()[-1].fn, *inputs))
    return Report(sizes, measured, limit, top, explanation)


class Point(NamedTuple):
    """A point of the sweep: milliseconds and bytes of the versions by name."""

    ratio: int
    time_ms: dict[str, float]
    memory_bytes: dict[str, int]


def sweep(
    sizes: Sizes, seed: int, *, on_progress: Callable[[str], None] = lambda _: None
) -> tuple[Point, ...]:
    """Times the materialised and the co-designed network over candidates per user."""
    ratios = RATIOS_ON_CPU if jax.default_backend() == "cpu" else RATIOS
    points = []
    for ratio in ratios:
        users = -(-sizes.candidates // ratio)
        at = dataclasses.replace(sizes, users=users)
        inputs = (ranking.init(at, seed), ranking.make_request(at, seed))
        compiled = {}
        for version in versions()[:2]:
            on_progress(f"network: compiling {version.name} for {ratio} candidates a user")
            compiled[version.name] = jax.jit(version.fn).lower(*inputs).compile()
        samples = demo.time_by_turns(compiled, inputs, lambda text: on_progress(f"network: {text}"))
        medians = {name: statistics.median(ms) for name, ms in samples.items()}
        memory = {name: demo.device_memory(c) for name, c in compiled.items()}
        points.append(Point(ratio, medians, memory))
    return tuple(points)


def draw(points: Sequence[Point], device: str, path: pathlib.Path) -> None:
    """Draws time and memory over candidates per user; the file's suffix says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for panel, field, unit, scale in (
        (panels[0], "time_ms", "ms", 1.0),
        (panels[1], "memory_bytes", "memory, MB", 1e-6),
    ):
        for name in getattr(points[0], field):
            values = [getattr(point, field)[name] * scale for point in points]
            panel.plot(range(len(points)), values, marker="o", label=name)
        panel.set_xticks(range(len(points)), [point.ratio for point in points])
        panel.set_xlabel("candidates a user")
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
    panels[0].legend()
    figure.suptitle(f"ranking network on {device}")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)

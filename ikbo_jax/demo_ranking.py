"""The part of the demo on the ranking network: three versions of it score one request.

`run` compiles the versions `materialised`, `co_designed` and the rewritten `materialised`, checks
each against the materialised network in float32 and times them. `sweep` times the first two over
the number of candidates per user.
"""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo
from ikbo_jax._timing.programs import NETWORK_ON_GPU, Log, Part, Programs
from ikbo_jax.cases.ranking import oracle, tolerance
from ikbo_jax.demo import Stage
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.ops.explain import explain
from ikbo_jax.rewrite import rewrite

#: Number of candidates in the printed table.
NUM_SHOWN = 5
#: Candidates per user in the sweep; a point takes a CPU about 20 s.
RATIOS = (10, 70, 300, 1000)
RATIOS_ON_CPU = (4, 16, 64, 256)


class Scored(NamedTuple):
    """Holds a candidate, its user and its logits."""

    candidate: int
    user: int
    logits: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Report(demo.Report):
    """Adds to a part's report what the network says; the baseline is the materialised network.

    Attributes:
      top: the candidates with the largest first logit, computed by the rewritten network.
    """

    top: tuple[Scored, ...]


def sizes_of(*, user_rows: int | None = None, **sizes: Any) -> Sizes:
    """Replaces sizes of the network that suits the device; `user_rows` is a user's K_user."""
    base = ranking.SMALL if jax.default_backend() == "cpu" else Sizes()
    pooled, dense = base.pooled, base.dense_tokens
    rows = base.user_rows if user_rows is None else user_rows
    if rows != base.user_rows:
        pooled, dense = max(1, min(pooled, rows // 4)), min(dense, rows // 4)
    kinds = {"pooled": pooled, "dense_tokens": dense, "user_tokens": rows - pooled - dense}
    return dataclasses.replace(base, **kinds | sizes)


def versions() -> dict[str, Callable[..., jax.Array]]:
    """Returns the versions by name, functions of parameters and request; materialised first."""
    return {
        "materialised": ranking.materialised,
        "co-designed": ranking.co_designed,
        "rewritten": rewrite(ranking.materialised),
    }


def run(sizes: Sizes, seed: int, *, on_progress: Log = lambda _: None) -> Part[Report]:
    """Scores a seeded request with every version, checks the logits and times the versions."""
    log = demo.prefixed_log("network", on_progress)
    programs = Programs(log, NETWORK_ON_GPU, identity=f"network {sizes}")
    seed_bits, index = demo.seed_bits(seed), ranking.user_index(sizes, seed)
    params = programs.add(
        "parameters", functools.partial(ranking.init, sizes), seed_bits, timed=False
    )
    draw = functools.partial(ranking.draw_request, sizes)
    drawn = programs.add("request", draw, seed_bits, timed=False)
    shapes = (
        params,
        ranking.Request._make([*drawn, jax.ShapeDtypeStruct(index.shape, index.dtype)]),
    )
    # The oracle lowers quickly and compiles slowly: it compiles while the versions are lowered.
    programs.add("oracle in float32", oracle, *shapes, timed=False)
    for name, fn in versions().items():
        programs.add(name, fn, *shapes)
    compiled = yield programs

    inputs = (
        compiled["parameters"](seed_bits),
        ranking.Request._make([*compiled["request"](seed_bits), index]),
    )
    log("checking the results")
    expected = np.asarray(compiled["oracle in float32"](*inputs))
    largest = float(np.max(np.abs(expected)))
    outs = {name: np.asarray(compiled[name](*inputs)) for name in versions()}
    errors = {name: float(np.max(np.abs(out - expected))) for name, out in outs.items()}
    limit = tolerance(sizes, errors["materialised"], largest)
    stages = [Stage(name, fn) for name, fn in versions().items()]
    measured = demo.timed(compiled, stages, inputs, errors, limit, largest, log)
    logits, users = outs["rewritten"], np.asarray(index)
    top = tuple(
        Scored(int(b), int(users[b]), tuple(map(float, logits[b])))
        for b in np.argsort(-logits[:, 0], kind="stable")[:NUM_SHOWN]
    )
    return Report(sizes, measured, (), limit, top)


def explanation(sizes: Sizes) -> str:
    """Formats the report of `rewrite`, and the implementations of the rewritten network's ops."""
    shapes = jax.eval_shape(lambda: (ranking.init(sizes), ranking.make_request(sizes)))
    return str(explain(versions()["rewritten"], *shapes))


class Point(NamedTuple):
    """Holds a point of the sweep: milliseconds and bytes of every version, by name."""

    ratio: int
    time_ms: dict[str, float]
    memory_bytes: dict[str, int]


def sweep(sizes: Sizes, seed: int, *, on_progress: Log = lambda _: None) -> Part[tuple[Point, ...]]:
    """Times the materialised and the co-designed network over the number of candidates per user."""
    log = demo.prefixed_log("plot", on_progress)
    programs = Programs(log, NETWORK_ON_GPU, identity=f"sweep {sizes}")
    ratios = RATIOS_ON_CPU if jax.default_backend() == "cpu" else RATIOS
    seed_bits, names = demo.seed_bits(seed), ("materialised", "co-designed")
    params = programs.add(
        "parameters", functools.partial(ranking.init, sizes), seed_bits, timed=False
    )
    sizes_at = {r: dataclasses.replace(sizes, users=-(-sizes.candidates // r)) for r in ratios}
    for ratio, point_sizes in sizes_at.items():
        draw = functools.partial(ranking.draw_request, point_sizes)
        drawn = programs.add(f"request, {ratio} candidates per user", draw, seed_bits, timed=False)
        index = jax.ShapeDtypeStruct((point_sizes.candidates,), jnp.int32)
        for name in names:
            shapes = (params, ranking.Request._make([*drawn, index]))
            programs.add(f"{name}, {ratio} candidates per user", versions()[name], *shapes)
    compiled = yield programs

    values, points = compiled["parameters"](seed_bits), []
    for ratio, point_sizes in sizes_at.items():
        drawn = compiled[f"request, {ratio} candidates per user"](seed_bits)
        inputs = (values, ranking.Request._make([*drawn, ranking.user_index(point_sizes, seed)]))
        log(f"{ratio} candidates per user")
        found = {name: compiled[f"{name}, {ratio} candidates per user"] for name in names}
        samples = demo.time_interleaved(found, inputs, log)
        medians = {name: statistics.median(ms) for name, ms in samples.items()}
        memory = {name: demo.device_memory(program) for name, program in found.items()}
        points.append(Point(ratio, medians, memory))
    return tuple(points)


def draw(points: Sequence[Point], device: str, path: pathlib.Path) -> None:
    """Plots time and memory over candidates per user; the file's suffix determines the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for panel, field, unit, scale in (
        (panels[0], "time_ms", "time, ms", 1.0),
        (panels[1], "memory_bytes", "memory, MB", 1e-6),
    ):
        for name in getattr(points[0], field):
            values = [getattr(point, field)[name] * scale for point in points]
            panel.plot(range(len(points)), values, marker="o", label=name)
        panel.set_xticks(range(len(points)), [point.ratio for point in points])
        panel.set_xlabel("candidates per user")
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"ranking network on {device}")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)

"""The command `ikbo-jax demo`: runs the parts of the demo and prints their reports."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ikbo_jax import terminal
from ikbo_jax._version import __version__

if TYPE_CHECKING:
    from ikbo_jax.demo import Measured, Report, Request, Stage
    from ikbo_jax.demo_attention import Report as AttentionReport
    from ikbo_jax.demo_ranking import Report as RankingReport


def device_name() -> str:
    """The default device as text."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu ({platform.machine()})"
    return f"{device.device_kind} ({device.platform})"


def run(
    overrides: Mapping[str, Any], layers: int | None, plot: pathlib.Path | None, log: terminal.Log
) -> bool:
    """Runs the demo's parts, prints their reports, and draws the plot.

    Args:
      overrides: fields of the default request to replace.
      layers: number of layers of the ranking network; None takes the default.
      plot: file for a plot of the network's time and memory over candidates per user, or None.
      log: called with a description of each step.

    Returns:
      Whether all results agree with their oracles.
    """
    from ikbo_jax import demo, demo_attention, demo_ranking

    request = dataclasses.replace(demo.default_request(), **overrides)
    sizes = demo_ranking.sizes_of(request, layers)
    attention_request = demo_attention.default_request(request)
    calls: list[Callable[[], Any]] = [
        functools.partial(demo_ranking.run, sizes, request.seed, on_progress=log),
        functools.partial(demo.run, request, on_progress=log),
        functools.partial(demo_attention.run, attention_request, on_progress=log),
    ]
    if plot is not None:
        calls.append(functools.partial(demo_ranking.sweep, sizes, request.seed, on_progress=log))
    network, report, attention, *points = demo.run_parts(calls, log)
    if plot is not None:
        demo_ranking.draw(points[0], device_name(), plot)
    print_request(request, report.counts)
    print()
    print_network(network)
    print()
    print_demo(report, demo.automatic_path(request))
    print()
    print_attention(attention)
    if plot is not None:
        print(f"wrote {plot}")
    agree: bool = network.agree and report.agree and attention.agree
    return agree


def print_request(request: Request, counts: Sequence[int]) -> None:
    """Prints two lines: versions and device, and the request."""
    import jax

    print(f"ikbo-jax {__version__} on {device_name()}, jax {jax.__version__}")
    print(_describe_request(request, counts))


def print_network(report: RankingReport) -> None:
    """Prints the part on the ranking network: its versions, top candidates, rewrite's report."""
    sizes, baseline = report.sizes, report.measured[0]
    print(
        f"ranking network: {sizes.layers} layers, history S={sizes.history}, queries "
        f"T={sizes.queries}, {sizes.heads} heads of {sizes.head_dim}, {sizes.pooled} pooled rows"
    )
    print()
    rows = [
        (
            m.name,
            f"{m.time_ms:.3f} ms",
            f"{baseline.time_ms / m.time_ms:.2f}x",
            terminal.bytes_text(m.memory_bytes),
            f"{m.error:.2g}" + ("" if m.agrees else " WRONG"),
        )
        for m in report.measured
    ]
    header = ("network", "time", "speed-up", "memory", "max error")
    terminal.print_table(header, rows, numbers=frozenset(range(1, 5)))
    print()
    print("memory: output and temporary buffers, without the request and the parameters.")
    print(f"max error: of a logit, against float32; allowed: {report.tolerance:.2g}.")
    if device_name().endswith("(gpu)"):
        print("all versions: cuBLAS' fastest algorithms compute all GEMMs outside the kernels.")
    wrong = [m.name for m in report.measured if not m.agrees]
    if wrong:
        print(f"network: DISAGREEMENT: {', '.join(wrong)} outside the allowed error")
    else:
        best = min(report.measured[1:], key=lambda m: m.time_ms)
        faster = baseline.time_ms / best.time_ms
        print(f"network: all versions agree; {best.name} is {faster:.1f} times as fast as copies")
    print()
    tasks = range(len(report.top[0].logits))
    terminal.print_table(
        ("top candidate", "user", *(f"logit {task}" for task in tasks)),
        [
            (str(t.candidate), str(t.user), *(f"{logit:.4f}" for logit in t.logits))
            for t in report.top
        ],
        numbers=frozenset(range(2 + len(tasks))),
    )
    print()
    print(report.explanation)


def print_demo(report: Report, automatic: str) -> None:
    """Prints the part on linear compression: its stages, and the choice of implementation=None."""
    _print_stages(report.measured, report.not_run)
    print()
    print("moved: bytes that the stage must at least read and write.")
    print("memory: output and temporary buffers.")
    print(f"max error: against the materialised model in float32; allowed: {report.tolerance:.2g}.")
    print(f"implementation=None takes: {automatic}")
    print(_conclusion(report))


def print_attention(report: AttentionReport) -> None:
    """Prints the part on attention: its stages."""
    request, ranking = report.request, report.request.ranking
    print(
        f"attention: {ranking.candidates:,} candidates of {ranking.users:,} users, "
        f"T={request.q_len} S={request.kv_len} N=K={request.heads} H={request.head_dim}, "
        f"{ranking.dtype}, seed {ranking.seed}"
    )
    print()
    _print_stages(report.measured, report.not_run)
    print()
    print(f"max error: of some candidates, against float32; allowed: {report.tolerance:.2g}.")
    wrong = [m.stage.name.split(maxsplit=1)[1] for m in report.measured if not m.agrees]
    if wrong:
        print(f"attention: DISAGREEMENT: {', '.join(wrong)} outside the allowed error")
        return
    materialised = [m for m in report.measured if m.stage.name.startswith("1")]
    without_copies = [m for m in report.measured if not m.stage.name.startswith("1")]
    best = min(without_copies, key=lambda m: m.time_ms)
    faster = min(m.time_ms for m in materialised) / best.time_ms
    fewer = materialised[0].stage.bytes_moved / best.stage.bytes_moved
    print(
        f"attention: all stages agree; {best.stage.name.split(maxsplit=1)[1]} is {faster:.1f} times"
        f" as fast as the best materialised version, which must move {fewer:.1f} times the bytes"
    )


def _print_stages(measured: Sequence[Measured], not_run: Sequence[Stage]) -> None:
    """Prints a table of the stages that ran (the first is the baseline), and why others did not."""
    terminal.print_table(
        ("stage", "time", "speed-up", "moved", "memory", "max error", "path"),
        [_row(one, measured[0]) for one in measured],
        numbers=frozenset(range(1, 6)),
    )
    reasons: dict[str, list[str]] = {}
    for stage in not_run:
        reasons.setdefault(stage.path, []).append(" ".join(stage.name.split()))
    for reason, names in reasons.items():
        print(f"not run: {', '.join(names)}: {reason}")


def _row(measured: Measured, baseline: Measured) -> tuple[str, ...]:
    stage = measured.stage
    return (
        stage.name,
        f"{measured.time_ms:.3f} ms",
        f"{baseline.time_ms / measured.time_ms:.2f}x",
        terminal.bytes_text(stage.bytes_moved),
        terminal.bytes_text(measured.memory_bytes),
        f"{measured.error:.2g}" + ("" if measured.agrees else " WRONG"),
        stage.path,
    )


def _describe_request(request: Request, counts: Sequence[int]) -> str:
    each = f"{min(counts)} to {max(counts)} per user" if len(counts) > 1 else "all of one user"
    return (
        f"request: {request.candidates:,} candidates of {request.users:,} users ({each}), "
        f"M={request.m} N={request.n} K_cand={request.k_cand} K_user={request.k_user}, "
        f"{request.dtype}, seed {request.seed}"
    )


def _conclusion(report: Report) -> str:
    request = report.request
    ratio = f"{request.candidates / request.users:.1f} candidates per user"
    wrong = [m.stage.name.split(maxsplit=1)[1] for m in report.measured if not m.agrees]
    if wrong:
        return f"{ratio}: DISAGREEMENT: {', '.join(wrong)} outside the allowed error"
    # Compares the best stage with the faster one of the two materialised versions.
    materialised = min(report.measured[:2], key=lambda m: m.time_ms)
    best = min(report.measured[2:], key=lambda m: m.time_ms)
    name = best.stage.name.split(maxsplit=1)[1]
    faster = materialised.time_ms / best.time_ms
    fewer = materialised.stage.bytes_moved / best.stage.bytes_moved
    return (
        f"{ratio}: all stages agree; {name} is {faster:.1f} times as fast as the best "
        f"materialised version, which must move {fewer:.1f} times the bytes"
    )

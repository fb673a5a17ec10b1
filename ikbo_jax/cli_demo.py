"""The command `ikbo-jax demo`: runs the parts of the demo and prints their reports."""

from __future__ import annotations

import operator
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ikbo_jax import terminal
from ikbo_jax._version import __version__

if TYPE_CHECKING:
    from ikbo_jax.demo import Measured, Report, Stage
    from ikbo_jax.demo_ranking import Report as RankingReport
    from ikbo_jax.models.ranking import Sizes


def device_name() -> str:
    """Describes the default device."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu ({platform.machine()})"
    return f"{device.device_kind} ({device.platform})"


def run(
    overrides: Mapping[str, Any],
    seed: int,
    plot: pathlib.Path | None,
    log: terminal.Log,
    *,
    explain: bool,
) -> bool:
    """Runs the demo's parts, prints their reports, and draws the plot to the file `plot`.

    `overrides` replace sizes of the default network. With `explain`, the reports hold all stages,
    configurations and reasons. Returns whether all results agree with their oracles.
    """
    from ikbo_jax import demo, demo_attention, demo_ranking
    from ikbo_jax.models import ranking

    sizes = demo_ranking.sizes_of(**overrides)
    parts: list[Any] = [
        part.run(sizes, seed, on_progress=log) for part in (demo_ranking, demo, demo_attention)
    ]
    if plot is not None:
        parts.append(demo_ranking.sweep(sizes, seed, on_progress=log))
    network, report, attention, *points = demo.run_parts(parts, log)
    if plot is not None:
        demo_ranking.draw(points[0], device_name(), plot)
    print_request(sizes, seed, ranking.candidate_counts(sizes, seed).tolist())
    print()
    print_network(network, demo_ranking.explanation(sizes) if explain else None)
    print()
    print_demo(report, demo.automatic_path(sizes) if explain else None)
    print()
    print_attention(attention, explain)
    if not explain:
        print()
        print("configurations, memory and reasons: ikbo-jax demo --explain")
    if plot is not None:
        print(f"wrote {plot}")
    agree: bool = network.agree and report.agree and attention.agree
    return agree


def print_request(sizes: Sizes, seed: int, counts: Sequence[int]) -> None:
    """Prints two lines: versions and device, and the request."""
    import jax

    print(f"ikbo-jax {__version__} on {device_name()}, jax {jax.__version__}")
    each = f"{min(counts)} to {max(counts)} per user" if len(counts) > 1 else "all of one user"
    print(
        f"request: {sizes.candidates:,} candidates of {sizes.users:,} users ({each}), "
        f"M={sizes.compressed} N={sizes.width} K_cand={sizes.cand_tokens} "
        f"K_user={sizes.user_rows}, {sizes.dtype}, seed {seed}"
    )


def print_network(report: RankingReport, explanation: str | None) -> None:
    """Prints the part on the ranking network.

    `explanation` is what `explain` says of it, for a report with reasons and top candidates.
    """
    sizes, baseline = report.sizes, report.measured[0]
    print(
        f"ranking network: {sizes.layers} layers, history S={sizes.history}, queries "
        f"T={sizes.queries}, {sizes.heads} heads of {sizes.head_dim}, {sizes.pooled} pooled rows"
    )
    print()
    _print_measured("network", report.measured, _COLUMNS)
    print()
    if explanation is not None:
        print("memory: output and temporary buffers, without the request and the parameters.")
        print(f"max error: of a logit, against float32; allowed: {report.tolerance:.2g}.")
        if device_name().endswith("(gpu)"):
            print("all versions: cuBLAS' fastest algorithms compute all GEMMs outside the kernels.")
    best = min(report.measured[1:], key=_time)
    faster = f"{best.stage.name} is {baseline.time_ms / best.time_ms:.1f} times as fast as copies"
    print(f"network: {_disagreement(report.measured) or f'all versions agree; {faster}'}")
    if explanation is None:
        return
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
    print(explanation)


def print_demo(report: Report, automatic: str | None) -> None:
    """Prints the part on linear compression.

    `automatic` is the choice of implementation=None, for a report with configurations and reasons.
    """
    if automatic is None:
        print("linear compression of this request")
        print()
    _print_stages(report, automatic is not None)
    print()
    if automatic is not None:
        print("moved: bytes that the stage must at least read and write.")
        print("memory: output and temporary buffers.")
        print(
            "max error: against the materialised model in float32; allowed: "
            f"{report.tolerance:.2g}."
        )
        print(f"implementation=None takes: {automatic}")
    ratio = report.sizes.candidates / report.sizes.users
    print(f"{ratio:.1f} candidates per user: {_conclusion(report.measured)}")


def print_attention(report: Report, explain: bool) -> None:
    """Prints the part on attention: its stages."""
    sizes = report.sizes
    print(
        f"attention: {sizes.candidates:,} candidates of {sizes.users:,} users, "
        f"T={sizes.queries} S={sizes.history} N=K={sizes.heads} H={sizes.head_dim}, {sizes.dtype}"
    )
    print()
    _print_stages(report, explain)
    print()
    if explain:
        print(f"max error: of some candidates, against float32; allowed: {report.tolerance:.2g}.")
    print(f"attention: {_conclusion(report.measured)}")


#: Columns of a table without configurations.
_COLUMNS = ("time", "speed-up", "memory", "max error")


def _print_stages(report: Report, explain: bool) -> None:
    """Prints a table of the stages that ran, and why others did not.

    Without `explain` the table has the fastest stage with copies, the fastest one without copies
    and kernels, the fastest kernel, and every stage that is wrong.
    """
    measured = report.measured
    if explain:
        columns = ("time", "speed-up", "moved", "memory", "max error", "path")
        _print_measured("stage", measured, columns)
    else:
        kinds = ("1", "2", "34")
        stages = [[m for m in measured if m.stage.name[0] in kind] for kind in kinds]
        best = [min(found, key=_time) for found in stages if found]
        _print_measured("stage", [m for m in measured if m in best or not m.agrees], _COLUMNS)
    reasons: dict[str, list[str]] = {}
    for stage in report.not_run:
        reasons.setdefault(stage.path, []).append(" ".join(stage.name.split()))
    for reason, names in reasons.items():
        print(f"not run: {', '.join(names)}: {reason}")


def _print_measured(name: str, measured: Sequence[Measured], columns: Sequence[str]) -> None:
    """Prints a table of stages with some columns; the header of the first column is `name`."""

    def row(one: Measured) -> tuple[str, ...]:
        cells = {
            "time": f"{one.time_ms:.3f} ms",
            "speed-up": f"{measured[0].time_ms / one.time_ms:.2f}x",
            "moved": terminal.bytes_text(one.stage.bytes_moved),
            "memory": terminal.bytes_text(one.memory_bytes),
            "max error": f"{one.error:.2g}" + ("" if one.agrees else " WRONG"),
            "path": one.stage.path,
        }
        return one.stage.name, *(cells[column] for column in columns)

    numbers = frozenset(n for n, column in enumerate(columns, start=1) if column != "path")
    terminal.print_table((name, *columns), list(map(row, measured)), numbers=numbers)


def _disagreement(measured: Sequence[Measured]) -> str:
    """Names the stages that disagree with the oracle; "" if none does."""
    wrong = [_without_number(m.stage) for m in measured if not m.agrees]
    return f"DISAGREEMENT: {', '.join(wrong)} outside the allowed error" if wrong else ""


def _without_number(stage: Stage) -> str:
    return stage.name.split(maxsplit=1)[-1]


_time = operator.attrgetter("time_ms")


def _conclusion(measured: Sequence[Measured]) -> str:
    """Compares the best stage with the fastest materialised one, whose number is 1."""
    if text := _disagreement(measured):
        return text
    materialised, best = (
        min((m for m in measured if m.stage.name.startswith("1") == copies), key=_time)
        for copies in (True, False)
    )
    faster = materialised.time_ms / best.time_ms
    fewer = materialised.stage.bytes_moved / best.stage.bytes_moved
    return (
        f"all stages agree; {_without_number(best.stage)} is {faster:.1f} times as fast as the "
        f"best materialised version, which must move {fewer:.1f} times the bytes"
    )

"""A results file of `measure` as a plot and as a table of docs/serving.md."""

import json
import pathlib
from typing import Any

#: Where the page holds what `text` writes.
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
LABELS = {
    "single": "one request at a time",
    "unmerged": "side by side, not merged",
    "batched": "batches",
}


def draw(source: pathlib.Path, target: pathlib.Path) -> None:
    """Draws the results file `source` to `target`, whose suffix determines the format."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text and ids are deterministic, so that diffs show only what changed.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ikbo-jax"})
    from matplotlib import pyplot

    runs = _read(source)["batching"]
    figure, (latency, merged) = pyplot.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for name, label in LABELS.items():
        if name not in runs:
            continue
        kept = [run for run in runs[name] if run["kept_up"]]
        rates = [run["throughput"] for run in kept]
        (line,) = latency.plot(rates, [run["p99_ms"] for run in kept], "o-", label=f"{label}, p99")
        medians = [run["p50_ms"] for run in kept]
        latency.plot(rates, medians, "o:", color=line.get_color(), label=f"{label}, p50")
        merged.plot(rates, [run["requests_per_call"] for run in kept], "o-", label=label)
    for axis, text in ((latency, "latency, ms"), (merged, "requests in a call")):
        axis.set_xlabel("answered requests a second")
        axis.set_ylabel(text)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        # Beside the lines, which cross the whole plot.
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def text(results: dict[str, Any]) -> str:
    """The figures of a results file, in Markdown."""
    plan, start, batching = results["plan"], results["start_up"], results["batching"]
    runs = [run for name in LABELS for run in batching.get(name, [])]
    warm = sorted(run["scorer_s"] for run in start["warm"])
    lines = [
        f"Measured on {results['cpus']} CPU cores ({results['date'][:10]}, commit "
        f"{results['commit']}, jax {results['jax']}, ray {results['ray']}); the load average was "
        f"{results['load']:.1f} before and {results['load_after']:.1f} after; load generator "
        f"and Ray share the cores. {plan['fewest']} to {plan['most']:,} candidates a request, "
        f"users by Zipf's law with exponent {plan['zipf']}. Calls side by side: 1 for one request "
        f"at a time, otherwise {results['settings']['concurrent']}.",
        "",
        "| | answered requests a second | p50, ms | p99, ms | requests in a call | hit rate |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in LABELS.items():
        kept = [run for run in batching.get(name, []) if run["kept_up"]]
        if name == "batched" and "ratio" in batching:
            limit = 2 * [run for run in batching["single"] if run["kept_up"]][-1]["p99_ms"]
            kept = [run for run in kept if run["p99_ms"] <= limit]
        for run in kept[-1:]:
            lines.append(
                f"| {label} | {run['throughput']:.1f} | {run['p50_ms']:.0f} | {run['p99_ms']:.0f} "
                f"| {run['requests_per_call']:.1f} | {run['hit_rate']:.2f} |"
            )
    if "ratio" in batching:
        lines += [
            "",
            f"Batches answer {batching['ratio']:.2f} times as many requests, at "
            f"{batching['p99_ratio']:.2f} times the p99. The target is 1.5 times as many, at a p99 "
            "not above twice.",
        ]
    lines += [
        "",
        f"The scorer alone, {results['scorer']['requests']} requests by turns:",
        "",
        "| requests in a call | hit rate | requests a second | CPU time of a request, ms "
        "| p99 of a call, ms |",
        "|---|---|---|---|---|",
    ]
    for case in results["scorer"]["cases"]:
        merged, p99 = (case["merged"], f"{case['call_p99_ms']:.0f}")
        if not merged:
            merged, p99 = "`rank_offline`", ""
        lines.append(
            f"| {merged} | {case['hits']:.0%} | {case['requests_per_second']:.0f} "
            f"| {case['cpu_ms_per_request']:.1f} | {p99} |"
        )
    lines += [
        "",
        f"From a warm cache a replica's scorer is ready {warm[len(warm) // 2]:.1f} s after JAX "
        f"(median of {len(warm)}; the target is 5 s), with an empty cache folder "
        f"{start['first']['scorer_s']:.0f} s. While serving: "
        f"{sum(run['compilations'] for run in runs)} compilations.",
        "",
    ]
    return "\n".join(lines)


def offline_text(results: dict[str, Any]) -> str:
    """The figures of a results file of `alone --figures offline`, in Markdown."""
    found = results["offline"]
    shares = ", ".join(f"{share:.2f}" for share in found["shares"])
    return (
        f"Ranking offline: {found['candidates']:,} candidates of {found['users']:,} users in "
        f"{found['seconds']:.0f} s, {found['candidates_per_second']:,.0f} a second, at "
        f"{found['share_of_bound']:.2f} of the speed of the model's program alone, called as often "
        f"on arrays that are ready (by turns: {shares}; by CPU time: "
        f"{found['cpu_share_of_bound']:.2f}; the target is 0.9); "
        f"{results['date'][:10]}, commit {results['commit']}, load average "
        f"{results['load']:.1f} before and {results['load_after']:.1f} after.\n"
    )


def page(old: str, file: pathlib.Path) -> str:
    """The page with the figures of a results file, and of those beside it.

    Args:
      old: the page.
      file: a results file of `measure`; `NAME-offline.json` beside it, if it exists, is one of
        `alone --figures offline`.
    """
    parts = [text(_read(file))]
    if (other := file.with_name(f"{file.stem}-offline.json")).exists():
        parts.append(offline_text(_read(other)))
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(parts) + END + after


def _read(file: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found

"""The command `ikbo-jax`: `demo`, `info` and `tune`.

Text is plain when it goes into a pipe; on a terminal, rich draws the tables and the progress.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ikbo_jax._version import __version__

# jax is imported by the commands, so that `--help` answers at once.
if TYPE_CHECKING:
    from ikbo_jax.demo import Measured, Report, Request, Stage
    from ikbo_jax.demo_attention import Report as AttentionReport

#: Exit statuses.
OK, DISAGREES, UNUSABLE = 0, 1, 2
_KERNEL_DTYPES = ("bfloat16", "float16")
_DTYPES = (*_KERNEL_DTYPES, "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
      argv: arguments after the program's name; `sys.argv[1:]` if None.

    Returns:
      0; 1 if the demo's stages disagree; 2 if the arguments or the device will not do.
    """
    args = _parser().parse_args(argv)
    status: int = args.command(args)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ikbo-jax", description="Ranking kernels that never copy a user once per candidate."
    )
    parser.add_argument("--version", action="version", version=f"ikbo-jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser(
        "demo",
        help="run a ranking request through every stage and compare them",
        description="Builds a seeded ranking request, runs the materialised model and this library "
        "side by side, checks that they agree and prints what each stage costs. Sizes default to "
        "the representative request on an accelerator and to a small one on a CPU.",
    )
    demo.add_argument("--seed", type=int, default=0, help="of inputs and candidate counts")
    _add_sizes(demo, required=False)
    demo.set_defaults(command=_demo)

    info = commands.add_parser("info", help="show the device, versions and usable kernels")
    info.set_defaults(command=_info)

    tune = commands.add_parser(
        "tune",
        help="find the fastest configuration of a kernel on this device",
        description="Times every legal configuration, checks each for correctness, and writes the "
        "best into the user's cache, which the dispatch table prefers.",
    )
    ops = tune.add_subparsers(required=True, metavar="op")
    linear_compression = ops.add_parser("linear-compression", help="tune linear_compression")
    _add_sizes(linear_compression, required=True)
    _add_limit(linear_compression)
    linear_compression.set_defaults(command=_tune_linear_compression)
    attention = ops.add_parser("attention", help="tune attention")
    _add_attention_sizes(attention)
    _add_limit(attention)
    attention.set_defaults(command=_tune_attention)
    return parser


def _add_sizes(parser: argparse.ArgumentParser, *, required: bool) -> None:
    sizes = (
        (("--candidates", "--batch", "--b"), "candidates", "B, candidates to score"),
        (("--users", "--u"), "users", "U, users they share"),
        (("--m",), "m", "M, compressed rows"),
        (("--n",), "n", "N, embedding width"),
        (("--k-cand",), "k_cand", "embedding rows of a candidate"),
        (("--k-user",), "k_user", "embedding rows of a user"),
    )
    for flags, name, text in sizes:
        parser.add_argument(
            *flags, dest=name, type=_positive, required=required, metavar="SIZE", help=text
        )
    parser.add_argument(
        "--dtype",
        choices=_KERNEL_DTYPES if required else _DTYPES,
        default="bfloat16" if required else None,
        help="of every array",
    )


def _add_attention_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = (
        (("--candidates", "--batch", "--b"), "batch", "B, candidates to score"),
        (("--users", "--u"), "users", "U, users they share"),
        (("--q-len", "--t"), "q_len", "T, queries of a candidate"),
        (("--kv-len", "--s"), "kv_len", "S, keys of a user"),
        (("--q-heads", "--n"), "q_heads", "N, query heads"),
        (("--kv-heads", "--k"), "kv_heads", "K, key heads; divides N"),
        (("--head-dim", "--h"), "head_dim", "H, head width"),
    )
    for flags, name, text in sizes:
        parser.add_argument(
            *flags, dest=name, type=_positive, required=True, metavar="SIZE", help=text
        )
    parser.add_argument(
        "--dtype", choices=_KERNEL_DTYPES, default="bfloat16", help="of every array"
    )


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="COUNT",
        help="time only so many configurations, the likeliest first (each takes some 10 s)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _demo(args: argparse.Namespace) -> int:
    from ikbo_jax import demo, demo_attention

    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(demo.Request)
        if getattr(args, field.name) is not None
    }
    request = dataclasses.replace(demo.default_request(), **given)
    with _spinner() as say:
        report = demo.run(request, on_progress=say)
        attention = demo_attention.run(demo_attention.default_request(request), on_progress=say)
    _print_demo(report, demo.automatic_path(request))
    print()
    _print_attention(attention)
    return OK if report.agree and attention.agree else DISAGREES


def _print_demo(report: Report, automatic: str) -> None:
    import jax

    request = report.request
    print(f"ikbo-jax {__version__} on {_device_name()}, jax {jax.__version__}")
    print(_describe_request(request, report.counts))
    print()
    _print_stages(report.measured, report.not_run)
    print()
    print("moved: the least the stage must read and write. memory: output and temporary buffers.")
    print(f"max error: against the materialised model in float32; allowed: {report.tolerance:.2g}.")
    print(f"implementation=None takes: {automatic}")
    print(_conclusion(report))


def _print_attention(report: AttentionReport) -> None:
    request, ranking = report.request, report.request.ranking
    print(
        f"attention: {ranking.candidates:,} candidates of {ranking.users:,} users, "
        f"T={request.q_len} S={request.kv_len} N=K={request.heads} H={request.head_dim}, "
        f"{ranking.dtype}, seed {ranking.seed}"
    )
    print()
    _print_stages(report.measured, report.not_run)
    print()
    print(f"max error: against float32, some candidates; allowed: {report.tolerance:.2g}.")
    wrong = [m.stage.name.split(maxsplit=1)[1] for m in report.measured if not m.agrees]
    if wrong:
        print(f"attention: DISAGREEMENT: {', '.join(wrong)} outside the allowed error")
        return
    copied = [m for m in report.measured if m.stage.name.startswith("1")]
    ours = [m for m in report.measured if not m.stage.name.startswith("1")]
    best = min(ours, key=lambda m: m.time_ms)
    faster = min(m.time_ms for m in copied) / best.time_ms
    fewer = copied[0].stage.bytes_moved / best.stage.bytes_moved
    print(
        f"attention: all stages agree; {best.stage.name.split(maxsplit=1)[1]} is {faster:.1f} "
        f"times as fast as the best with copies, which has to move {fewer:.1f} times the bytes"
    )


def _print_stages(measured: Sequence[Measured], not_run: Sequence[Stage]) -> None:
    """A table of the stages that ran, the first being the baseline; then why others did not."""
    _print_table(
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
        _bytes(stage.bytes_moved),
        _bytes(measured.memory_bytes),
        f"{measured.error:.2g}" + ("" if measured.agrees else " WRONG"),
        stage.path,
    )


def _describe_request(request: Request, counts: Sequence[int]) -> str:
    each = f"{min(counts)} to {max(counts)} each" if len(counts) > 1 else "all of one"
    return (
        f"request: {request.candidates:,} candidates of {request.users:,} users ({each}), "
        f"M={request.m} N={request.n} K_cand={request.k_cand} K_user={request.k_user}, "
        f"{request.dtype}, seed {request.seed}"
    )


def _conclusion(report: Report) -> str:
    request = report.request
    ratio = f"{request.candidates / request.users:.1f} candidates a user"
    wrong = [m.stage.name.split(maxsplit=1)[1] for m in report.measured if not m.agrees]
    if wrong:
        return f"{ratio}: DISAGREEMENT: {', '.join(wrong)} outside the allowed error"
    # The honest comparison: the faster of the two materialised versions against the best stage.
    materialised = min(report.measured[:2], key=lambda m: m.time_ms)
    best = min(report.measured[2:], key=lambda m: m.time_ms)
    name = best.stage.name.split(maxsplit=1)[1]
    faster = materialised.time_ms / best.time_ms
    fewer = materialised.stage.bytes_moved / best.stage.bytes_moved
    return (
        f"{ratio}: all stages agree; {name} is {faster:.1f} times as fast as the best "
        f"materialised version, which has to move {fewer:.1f} times the bytes"
    )


def _info(args: argparse.Namespace) -> int:
    del args
    import jax
    import jaxlib

    from ikbo_jax.ops.dispatch import hopper_unavailable_reason
    from ikbo_jax.tuning.table import user_cache_path

    reason = hopper_unavailable_reason()
    mosaic = "usable (bfloat16, float16)" if reason is None else f"not usable: {reason}"
    cache = user_cache_path()
    rows = [
        ("ikbo-jax", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("jax", f"{jax.__version__}, jaxlib {jaxlib.__version__}{_plugins()}"),
        ("platform", platform.platform()),
        ("device", f"{_device_name()}; {jax.device_count()} in all"),
        ("driver", _driver() or "no NVIDIA driver found"),
        ("linear_compression, mosaic_gpu", mosaic),
        ("linear_compression, xla", "usable (bfloat16, float16, float32)"),
        ("attention, mosaic_gpu", mosaic),
        ("attention, xla", "usable (bfloat16, float16, float32)"),
        ("user's tuning cache", f"{cache}{'' if cache.exists() else ' (none yet)'}"),
    ]
    _print_table(("", ""), rows)
    return OK


def _device_name() -> str:
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu ({platform.machine()})"
    return f"{device.device_kind} ({device.platform})"


def _plugins() -> str:
    found = []
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            found.append(f", {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return "".join(found)


def _driver() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.splitlines()
    return lines[0].strip() if lines else None


def _tune_linear_compression(args: argparse.Namespace) -> int:
    def tune() -> dict[str, Any]:
        from ikbo_jax.tuning.autotune import console_progress, tune_linear_compression
        from ikbo_jax.tuning.configs import LinearCompressionProblem

        problem = LinearCompressionProblem(
            batches=(args.users, args.candidates),
            ks=(args.k_user, args.k_cand),
            m=args.m,
            n=args.n,
            dtype=args.dtype,
        )
        with console_progress() as progress:
            return tune_linear_compression(problem, progress=progress, limit=args.limit)

    return _tune(tune)


def _tune_attention(args: argparse.Namespace) -> int:
    if args.q_heads % args.kv_heads:
        text = f"--q-heads {args.q_heads} is not a multiple of --kv-heads {args.kv_heads}"
        print(f"ikbo-jax tune: {text}", file=sys.stderr)
        return UNUSABLE

    def tune() -> dict[str, Any]:
        from ikbo_jax.tuning.autotune import console_progress, tune_attention
        from ikbo_jax.tuning.configs import AttentionProblem

        names = [field.name for field in dataclasses.fields(AttentionProblem)]
        problem = AttentionProblem(**{name: getattr(args, name) for name in names})
        with console_progress() as progress:
            return tune_attention(problem, progress=progress, limit=args.limit)

    return _tune(tune)


def _tune(tune: Callable[[], dict[str, Any]]) -> int:
    """Runs a tuner and prints what it found, or why it could not."""
    # The kernels are timed in processes of their own: leave them the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from ikbo_jax.ops.dispatch import hopper_unavailable_reason

    if (reason := hopper_unavailable_reason()) is not None:
        print(f"ikbo-jax tune: {reason}", file=sys.stderr)
        return UNUSABLE
    try:
        row = tune()
    except (OSError, RuntimeError) as error:
        print(f"ikbo-jax tune: {error}", file=sys.stderr)
        return UNUSABLE
    print(f"{row['ms']:.4g} ms, {row['fraction']:.3f} of the 8192x8192x8192 bfloat16 matmul")
    return OK


def _print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: frozenset[int] = frozenset()
) -> None:
    """Prints rows in columns; those in `numbers` are aligned to the right."""
    if _is_terminal():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=any(headers), header_style="bold", box=box.SIMPLE, pad_edge=False)
        last = len(headers) - 1  # the only column that may wrap on a narrow terminal
        for column, header in enumerate(headers):
            justify: Literal["left", "right"] = "right" if column in numbers else "left"
            table.add_column(header, justify=justify, no_wrap=column < last, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    lines = [*([headers] if any(headers) else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        cells = (
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


class _Say(Protocol):
    def __call__(self, text: str, /) -> None: ...


@contextmanager
def _spinner() -> Iterator[_Say]:
    """Yields a function that shows what is being done, on a terminal only."""
    if not _is_terminal():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _bytes(count: int) -> str:
    """A number of bytes in decimal units."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.2f} GB"

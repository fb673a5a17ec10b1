"""The command `ikbo-jax`: `demo`, `info` and `tune`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ikbo_jax import cli_demo, terminal
from ikbo_jax._version import __version__

# A command imports its modules itself: `--help` and `info` need neither demo nor tuner.
if TYPE_CHECKING:
    from ikbo_jax.problems import Problem

#: Exit statuses.
OK, DISAGREES, UNUSABLE = 0, 1, 2
#: Exit statuses after SIGINT and SIGPIPE, by the convention of shells.
INTERRUPTED, UNREAD = 130, 141
_KERNEL_DTYPES = ("bfloat16", "float16")
_DTYPES = (*_KERNEL_DTYPES, "float32")
#: Flags and meanings of the sizes of linear compression, which are those of a ranking request.
_REQUEST_SIZES = (
    (("--candidates", "--batch", "--b"), "B, number of candidates"),
    (("--users", "--u"), "U, number of users"),
    (("--m",), "M, compressed rows"),
    (("--n",), "N, embedding width"),
    (("--k-cand",), "K_cand, embedding rows of a candidate"),
    (("--k-user",), "K_user, embedding rows of a user"),
)
#: The sizes of the demo's network, `ranking.Sizes`, by flag.
_NETWORK_SIZES = {
    **{name: name for name in ("candidates", "users", "layers", "dtype")},
    **{"m": "compressed", "n": "width", "k_cand": "cand_tokens", "k_user": "user_rows"},
}
_ATTENTION_SIZES = (
    *_REQUEST_SIZES[:2],
    (("--q-len", "--t"), "T, queries of a candidate"),
    (("--kv-len", "--s"), "S, keys of a user"),
    (("--q-heads", "--n"), "N, query heads"),
    (("--kv-heads", "--k"), "K, key heads; divides N"),
    (("--head-dim", "--h"), "H, head width"),
)

_GDPA_DESCRIPTION = (
    "Tunes the forward pass of gdpa. Lengths of sequences are spread evenly around their mean: "
    "with a mean of half the longest they range from 1 to the longest. The new row also serves "
    "calls with similar sizes, with this or another activation."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
      argv: arguments after the program's name; `sys.argv[1:]` if None.

    Returns:
      0 on success; 1 if the demo's stages disagree; 2 if the arguments are wrong or the device is
      unsuitable; 130 after Ctrl-C; 141 if the reader of a pipe has gone. If `argv` is None, Ctrl-C
      ends the process here: Python would wait for compilations, which XLA cannot cancel.
    """
    args = _parser().parse_args(argv)
    terminal.escape_what_stdout_lacks()
    try:
        status: int = args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.discard_stdout()
        status = UNREAD
    except KeyboardInterrupt as stop:
        print(f"ikbo-jax: {str(stop) or 'interrupted'}", file=sys.stderr)
        status = INTERRUPTED
    if status == INTERRUPTED and argv is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ikbo-jax", description="Ranking kernels that never copy a user once per candidate."
    )
    parser.add_argument("--version", action="version", version=f"ikbo-jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser(
        "demo",
        help="score a ranking request with and without copies of the users, and compare",
        description="Builds a seeded ranking request and scores it with a ranking network, with "
        "copies of the users and without; then runs the network's main ops alone. Checks that all "
        "results agree and prints time and memory of each version. Sizes default to a "
        "representative request on an accelerator and to a small one on a CPU.",
    )
    demo.add_argument(
        "--seed",
        type=terminal.natural,
        default=0,
        help="seed of the inputs and of the candidates per user",
    )
    demo.add_argument(
        "--layers",
        type=terminal.positive,
        metavar="COUNT",
        help="number of layers of the ranking network",
    )
    demo.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="also time the network over candidates per user, and plot the times (.png, .svg, "
        ".pdf)",
    )
    demo.add_argument(
        "--explain",
        action="store_true",
        help="also print all stages with their configurations, the top candidates, and what the "
        "rewrite found",
    )
    _add_sizes(demo, _REQUEST_SIZES, required=False)
    _add_dtype(demo, _DTYPES, None)
    demo.set_defaults(command=_demo)

    info = commands.add_parser("info", help="show the device, versions and usable kernels")
    info.set_defaults(command=_info)

    tune = commands.add_parser(
        "tune",
        help="find the fastest configuration of a kernel on this device",
        description="Compiles every configuration worth timing, checks the results, and times the "
        "configurations, XLA and the current choice of the dispatch table. If one is faster than "
        "the current choice by more than the noise, it is written to the user's cache, which the "
        "dispatch table prefers.",
    )
    ops = tune.add_subparsers(required=True, metavar="op")
    backward_sizes = "Tunes the kernels of gdpa's gradient; sizes are those of `tune gdpa`."
    for name, sizes, descriptions in (
        ("linear_compression", _REQUEST_SIZES, (None, None)),
        ("attention", _ATTENTION_SIZES, (None, None)),
        ("gdpa", None, (_GDPA_DESCRIPTION, backward_sizes)),
    ):
        for suffix, what, description in zip(
            ("", "_backward"), (name, f"the gradient of {name}"), descriptions, strict=True
        ):
            command = f"{name}{suffix}".replace("_", "-")
            op = ops.add_parser(command, help=f"tune {what}", description=description)
            if sizes is None:
                _add_gdpa_sizes(op)
            else:
                _add_sizes(op, sizes, required=True)
            _add_dtype(op, _KERNEL_DTYPES, "bfloat16")
            op.add_argument(
                "--limit",
                type=terminal.positive,
                metavar="COUNT",
                help="time at most this many configurations, the most promising first, besides XLA "
                "and the current choice of the dispatch table",
            )
            op.set_defaults(command=_tune, op=f"{name}{suffix}")
    return parser


def _add_sizes(
    parser: argparse._ActionsContainer, sizes: Sequence[tuple[Sequence[str], str]], required: bool
) -> None:
    for flags, text in sizes:
        parser.add_argument(
            *flags, type=terminal.positive, required=required, metavar="SIZE", help=text
        )


def _add_dtype(
    parser: argparse.ArgumentParser, choices: Sequence[str], default: str | None
) -> None:
    parser.add_argument("--dtype", choices=choices, default=default, help="dtype of every array")


def _add_gdpa_sizes(parser: argparse.ArgumentParser) -> None:
    queries = parser.add_mutually_exclusive_group(required=True)
    sizes: tuple[tuple[argparse._ActionsContainer, tuple[str, ...], bool, str], ...] = (
        (parser, ("--batch", "--b"), True, "number of query sequences"),
        (parser, ("--batch-kv",), False, "number of key sequences; default: --batch, no sharing"),
        (queries, ("--q-len", "--t"), False, "number of queries of the longest sequence"),
        (queries, ("--seeds",), False, "number of queries that all sequences share (broadcast_q)"),
        (parser, ("--q-mean",), False, "mean number of queries of a sequence; default: --q-len"),
        (parser, ("--kv-len", "--s"), True, "number of keys of the longest sequence"),
        (parser, ("--kv-mean",), False, "mean number of keys of a sequence; default: --kv-len"),
        (parser, ("--q-heads", "--n"), True, "N, query heads"),
        (parser, ("--kv-heads", "--k"), True, "K, key heads; divides N"),
        (parser, ("--head-dim", "--h"), True, "H, head width"),
    )
    for target, flags, is_required, text in sizes:
        _add_sizes(target, [(flags, text)], is_required)
    parser.add_argument(
        "--activation", default="gelu", metavar="NAME", help="activation of all heads"
    )
    parser.add_argument(
        "--approx", metavar="NAME", help="approximation of the activation; default: exact"
    )


def _demo(args: argparse.Namespace) -> int:
    if args.plot is not None and (reason := _plot_impossible_reason(args.plot)) is not None:
        print(f"ikbo-jax demo: {reason}", file=sys.stderr)
        return UNUSABLE
    sizes = {name: getattr(args, flag) for flag, name in _NETWORK_SIZES.items()}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    try:
        with terminal.progress() as log:
            agree = cli_demo.run(sizes, args.seed, args.plot, log, explain=args.explain)
    except KeyboardInterrupt:
        print(
            "ikbo-jax demo: interrupted before the end; programs compiled so far are kept for the "
            "next time",
            file=sys.stderr,
        )
        return INTERRUPTED
    return OK if agree else DISAGREES


def _plot_impossible_reason(path: pathlib.Path) -> str | None:
    """Says why no plot can be written to `path`; None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which the extra 'bench' installs"
    if path.suffix not in (".png", ".svg", ".pdf"):
        return f"--plot writes .png, .svg or .pdf, but the file is {str(path)!r}"
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}"
    if path.exists() and not path.is_file():
        return f"--plot writes a file, but {str(path)!r} is something else"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"no permission to write {str(path)!r}"
    return None


def _info(args: argparse.Namespace) -> int:
    del args
    import jax
    import jaxlib

    from ikbo_jax.ops.dispatch import hopper_unavailable_reason
    from ikbo_jax.tuning.user_cache import user_cache_path

    reason = hopper_unavailable_reason()
    halves, all_dtypes = "usable (bfloat16, float16)", "usable (bfloat16, float16, float32)"
    kernels = dict.fromkeys(("look_up", "segment_sum"), all_dtypes) | dict.fromkeys(
        ("linear_compression", "attention", "gdpa", "norm_linear", "gated_linear"), halves
    )
    cache = user_cache_path()
    rows = [
        ("ikbo-jax", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("jax", f"{jax.__version__}, jaxlib {jaxlib.__version__}{_plugins()}"),
        ("platform", platform.platform()),
        ("device", f"{cli_demo.device_name()}; {jax.device_count()} in all"),
        ("driver", _driver() or "no NVIDIA driver found"),
        *(
            (f"{op}, {implementation}", status)
            for op, usable in kernels.items()
            for implementation, status in (
                ("mosaic_gpu", usable if reason is None else f"not usable: {reason}"),
                ("xla", all_dtypes),
            )
        ),
        ("user's tuning cache", f"{cache}{'' if cache.exists() else ' (none yet)'}"),
    ]
    terminal.print_table(("", ""), rows)
    return OK


def _plugins() -> str:
    found = ""
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found += f", {name} {metadata.version(name)}"
    return found


def _driver() -> str | None:
    """Returns the version of the NVIDIA driver; None if there is no driver."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.partition("\n")[0].strip() or None


def _problem(args: argparse.Namespace) -> Problem:
    """Makes the problem with the sizes in `args`; ValueError if the sizes are inconsistent."""
    from ikbo_jax import problems

    op = args.op.removesuffix("_backward")
    if op != "linear_compression" and args.q_heads % args.kv_heads:
        raise ValueError(
            f"--q-heads {args.q_heads} is not a multiple of --kv-heads {args.kv_heads}"
        )
    problem: Any
    if op == "linear_compression":
        batches, ks = (args.users, args.candidates), (args.k_user, args.k_cand)
        problem = problems.LinearCompressionProblem(batches, ks, args.m, args.n, args.dtype)
    elif op == "attention":
        sizes = (args.q_len, args.kv_len, args.q_heads, args.kv_heads, args.head_dim)
        problem = problems.AttentionProblem(args.candidates, args.users, *sizes, args.dtype)
    else:
        problem = _gdpa_problem(args)
    backward: Any = problems.PROBLEMS[args.op]
    return problem if op == args.op else backward.of(problem)


def _gdpa_problem(args: argparse.Namespace) -> Problem:
    from ikbo_jax.ops import gdpa_arguments
    from ikbo_jax.problems import GdpaProblem

    if args.seeds is not None and args.q_mean is not None:
        raise ValueError(f"--seeds {args.seeds} excludes --q-mean, but it is {args.q_mean}")
    both = ("q", args.q_mean, args.q_len), ("kv", args.kv_mean, args.kv_len)
    for name, mean, longest in both:
        if mean is not None and mean > longest:
            raise ValueError(f"--{name}-mean {mean} is more than --{name}-len {longest}")
    gdpa_arguments.activations_of(args.activation, args.q_heads)
    gdpa_arguments.check_approx(args.approx, (args.activation,))
    batch_kv = args.batch_kv or args.batch
    return GdpaProblem(
        batch=args.batch,
        batch_kv=batch_kv,
        q_rows=args.batch * (args.seeds or args.q_mean or args.q_len),
        kv_rows=batch_kv * (args.kv_mean or args.kv_len),
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        activations=(args.activation,),
        approx=args.approx,
        broadcast_q=args.seeds is not None,
        max_seqlen_q=args.q_len,
        max_seqlen_kv=args.kv_len,
    )


def _tune(args: argparse.Namespace) -> int:
    """Runs the tuner of a problem and prints the result, or an error."""
    # Worker processes time the kernels, so this process must not preallocate the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from ikbo_jax.autotuner import autotune
    from ikbo_jax.ops.dispatch import hopper_unavailable_reason

    try:
        problem = _problem(args)
        if (reason := hopper_unavailable_reason()) is not None:
            raise RuntimeError(reason)
        with autotune.console_progress() as progress:
            row = autotune.tune(problem, progress=progress, limit=args.limit)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"ikbo-jax tune: {error}", file=sys.stderr)
        return UNUSABLE
    print(f"{row['ms']:.4g} ms, {row['fraction']:.3f} of the 8192x8192x8192 bfloat16 matmul")
    return OK

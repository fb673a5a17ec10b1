"""Serves the ranker, sends it requests, measures it; `--help` lists the commands."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import platformdirs
import rich.console

from examples.serving import alone, growth, local, models, plans, records
from examples.serving.settings import Settings

ERRORS = rich.console.Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Prints a line about progress."""
    ERRORS.print(text, soft_wrap=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def served(add: argparse.ArgumentParser) -> None:
        add.add_argument(
            "--source", choices=models.SOURCES, default="random", help="what is served"
        )
        add.add_argument("--checkpoint", default="", help="or the newest one in a run's folder")
        add.add_argument("--data", default="", help="folder of MovieLens-100k, for a checkpoint")

    def requests(add: argparse.ArgumentParser) -> None:
        add.add_argument(
            "--seconds", type=float, default=10, help="seconds in which requests leave"
        )
        add.add_argument("--zipf", type=float, default=1.1, help="exponent of users' popularity")
        add.add_argument("--most", type=int, default=2048, help="largest number of candidates")

    def service(add: argparse.ArgumentParser) -> None:
        cache = pathlib.Path(platformdirs.user_cache_dir("ikbo-jax")) / "serving"
        served(add)
        add.add_argument("--cache", default=str(cache), help="folder of compiled programs")
        add.add_argument("--weights", default="", help="version of the weights; empty: the newest")
        add.add_argument("--replicas", type=int, nargs="+", default=[1], help="or least and most")
        add.add_argument("--gpus", type=float, default=0, help="GPUs of a replica")
        add.add_argument("--wait-ms", type=float, default=Settings.wait_ms, help="for a batch")
        add.add_argument("--sticky", action="store_true", help="a user's requests to one replica")

    serve = command("serve", "serves until Ctrl-C")
    service(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at")
    serve.add_argument("--port", type=int, default=8000, help="port to listen at; 0: a free one")

    service(command("configuration", "prints a configuration for a cluster of Ray"))

    sent = command("load", "sends requests to a running service")
    sent.add_argument("--url", default="http://127.0.0.1:8000", help="the service")
    served(sent)
    requests(sent)
    sent.add_argument("--rate", type=float, default=20, help="requests a second")
    sent.add_argument("--json", action="store_true", help="asks in JSON")
    sent.add_argument("--retries", type=int, default=0, help="how often a client asks again")
    sent.add_argument("--replicas", type=int, default=1, help="number of replicas, for the counts")

    for name, text in (
        ("measure", "measures batching and start-up"),
        ("overload", "offers more load than can be answered"),
    ):
        measured = command(name, text)
        service(measured)
        requests(measured)
        measured.add_argument("--least", type=float, default=10, help="the smallest rate")
        measured.add_argument("--json", action="store_true", help="asks in JSON")

    scorer = command("alone", "measures the scorer without the service; ranks offline")
    served(scorer)
    alone.add_options(scorer)
    growth.add_options(command("growth", "measures histories that grow, in pages"))
    for name in RUNS:
        commands.choices[name].add_argument("--out", type=pathlib.Path, help="results file")

    plot = command("plot", "plots a results file of `measure`")
    plot.add_argument("file", type=pathlib.Path)
    plot.add_argument("--out", type=pathlib.Path, default=pathlib.Path("serving.svg"))
    plot.add_argument("--page", type=pathlib.Path, help="page to write the figures to")
    return parser.parse_args(arguments)


def absolute(folder: str) -> str:
    """The absolute path of a folder; empty for none."""
    return str(pathlib.Path(folder).expanduser().resolve()) if folder else ""


def plan_of(options: argparse.Namespace, source: models.Source, **fields: Any) -> plans.Plan:
    """The plan that the options ask for."""
    sizes = {name: getattr(options, name) for name in ("seconds", "zipf", "most")}
    return plans.plan_for(source, binary=not options.json, **sizes, **fields)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    return Settings(
        source=options.source,
        # Replicas have other working folders.
        checkpoint=absolute(options.checkpoint),
        data=absolute(options.data),
        cache=options.cache,
        weights=options.weights,
        replicas=tuple(options.replicas),
        gpus=options.gpus,
        wait_ms=options.wait_ms,
        sticky=options.sticky,
    )


def serve(options: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM; what was accepted is answered."""
    say("starting; without a warm cache, all programs are compiled first")
    made = local.Service(settings_of(options), options.port, options.host)

    def end(*_: object) -> None:
        if not made.ended:
            # The exception is lost in a callback, such as one of the garbage collector.
            made.ended = True
            raise KeyboardInterrupt

    signals = signal.SIGINT, signal.SIGTERM
    for number in signals:
        signal.signal(number, end)
    # While Ray starts, its own handler of SIGTERM raises SystemExit.
    with contextlib.suppress(KeyboardInterrupt, SystemExit), made as service:
        print(f"serving at {service.url}", flush=True)
        say("a version and Enter: replicas take other weights; Ctrl-C: the end")
        for line in sys.stdin:
            if version := line.strip():
                try:
                    service.deploy(version)
                except ValueError as error:
                    say(f"{error}; replicas keep the weights {service.weights}")
                else:
                    say(f"replicas have the weights {version}")
        while True:
            time.sleep(3600)
    for number in signals:
        # The interpreter, which takes up to a second to end, would restore the default.
        signal.signal(number, signal.SIG_IGN)


def configure(settings: Settings) -> int:
    """Prints a configuration, unless its weights cannot be used; the exit status."""
    from examples.serving.app import configuration

    # Nothing is scored here, and a GPU's memory may be that of a replica.
    jax.config.update("jax_platforms", "cpu")
    weights = settings.weights or settings.load().newest
    if reason := settings.why_refused(weights):
        say(reason)
        return 1
    http = {"host": "0.0.0.0", "port": 8000, "request_timeout_s": settings.limit_s}
    cluster = {"proxy_location": "EveryNode", "http_options": http}
    print(json.dumps({**cluster, **configuration(settings, weights)}, indent=1))
    return 0


def send(options: argparse.Namespace) -> dict[str, Any]:
    """Sends requests; the figures."""
    import aiohttp

    from examples.serving import load

    source = models.source_of(options.source, options.checkpoint, options.data)
    plan = plan_of(options, source, rate=options.rate, retries=options.retries)
    try:
        figures, told = asyncio.run(load.run(options.url, plan, replicas=options.replicas))
    except aiohttp.ClientConnectionError as error:
        raise SystemExit(f"no service at {options.url}: {error}") from None
    latencies = [round(one.latency * 1e3, 3) for one in told]
    return {"plan": dataclasses.asdict(plan), "figures": figures, "latencies_ms": latencies}


def measure_service(options: argparse.Namespace) -> dict[str, Any]:
    """Measures batching and start-up, or offers more load than a service can answer."""
    from examples.serving import measure

    settings = settings_of(options)
    plan = plan_of(options, settings.load())
    found: dict[str, Any] = {"settings": records.recorded(settings)}
    if options.command == "overload":
        return {**found, **measure.overload(settings, plan, options.least, say)}
    return {
        **found,
        "plan": dataclasses.asdict(plan),
        "start_up": measure.start_up(settings, say),
        "batching": measure.batching(settings, plan, options.least, say),
        # Last: Ray forks, which JAX's threads would not survive.
        "scorer": measure.in_process(settings, plan, say),
    }


#: What the commands that measure do; they return what a results file holds.
RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "load": send,
    "measure": measure_service,
    "overload": measure_service,
    "alone": lambda options: alone.run(options, say),
    "growth": lambda options: growth.run(options, say),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status, 1 if a bar is missed."""
    options = parsed(arguments)
    if options.command == "serve":
        try:
            serve(options)
        except (OSError, RuntimeError, ValueError) as error:
            say(str(error))
            return 1
    elif options.command == "configuration":
        return configure(settings_of(options))
    elif options.command == "plot":
        from examples.serving import plot

        plot.draw(options.file, options.out)
        if options.page:
            text = options.page.read_text("utf-8")
            options.page.write_text(plot.page(text, options.file), "utf-8")
    else:
        found = {**records.surroundings(), **RUNS[options.command](options)}
        found["load_after"] = os.getloadavg()[0]
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            say(f"written: {options.out}")
        if "figures" in found:
            print(json.dumps(found["figures"], indent=1))
        if missed := found.get("missed"):
            say(f"bars that are missed: {', '.join(missed)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

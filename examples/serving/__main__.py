"""Serves the ranker, sends it requests, measures it.

python -m examples.serving serve             until Ctrl-C
python -m examples.serving load              requests to a running service
python -m examples.serving configuration     what `serve deploy` reads, for a cluster of Ray
python -m examples.serving offline           ranks many candidates, without the service
python -m examples.serving measure           batching and start-up, to a results file
python -m examples.serving overload          answers in time at 1, 1.5 and 3 x the capacity
python -m examples.serving plot FILE         a plot of a results file
"""

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import jax
import platformdirs
import rich.console

from examples.serving import local

local.prepare()

from examples.serving import load, models, plans, records  # noqa: E402
from examples.serving.app import configuration  # noqa: E402
from examples.serving.settings import Settings  # noqa: E402
from ikbo_jax import terminal  # noqa: E402

ERRORS = rich.console.Console(stderr=True)


def say(text: str) -> None:
    """Prints a line about progress."""
    ERRORS.print(text, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """One changing line on a terminal; in a pipe, a line every ten seconds."""
    said = time.monotonic()
    with terminal.progress() as log:

        def show(done: int, total: int) -> None:
            nonlocal said
            if terminal.is_terminal() or time.monotonic() - said > 10:
                said = time.monotonic()
                log(f"{what}: {done:,} of {total:,}")

        yield show


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def served(add: argparse.ArgumentParser) -> None:
        add.add_argument(
            "--source", choices=models.SOURCES, default="random", help="what is served"
        )
        add.add_argument("--checkpoint", help="or the newest checkpoint in a run's folder")
        add.add_argument("--data", help="folder of MovieLens-100k, for a checkpoint")

    def requests(add: argparse.ArgumentParser) -> None:
        add.add_argument(
            "--seconds", type=float, default=10, help="seconds in which requests leave"
        )
        add.add_argument("--zipf", type=float, default=1.1, help="exponent of users' popularity")
        add.add_argument("--most", type=int, default=2048, help="largest number of candidates")
        add.add_argument("--out", type=pathlib.Path, help="results file")

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

    offline = command("offline", "ranks many candidates without the service")
    service(offline)
    offline.add_argument("--candidates", type=int, default=1_000_000, help="in total")
    offline.add_argument("--users", type=int, default=10_000, help="number of users")
    offline.add_argument("--bucket", type=int, default=4096, help="candidates of a call")
    offline.add_argument("--bucket-users", type=int, default=64, help="users of a call")
    offline.add_argument("--turns", type=int, default=0, help="compares with the program alone")
    offline.add_argument("--out", type=pathlib.Path, help="results file")

    measure = command("measure", "measures batching and start-up")
    service(measure)
    requests(measure)
    measure.add_argument("--least", type=float, default=10, help="the smallest rate")

    overload = command("overload", "offers more load than can be answered")
    service(overload)
    requests(overload)
    overload.add_argument("--least", type=float, default=10, help="the smallest rate")
    overload.add_argument("--json", action="store_true", help="asks in JSON")

    plot = command("plot", "plots a results file of `measure`")
    plot.add_argument("file", type=pathlib.Path)
    plot.add_argument("--out", type=pathlib.Path, default=pathlib.Path("serving.svg"))
    plot.add_argument("--page", type=pathlib.Path, help="page to write the figures to")
    return parser.parse_args(arguments)


def absolute(folder: str | None) -> str:
    """The absolute path of a folder; empty for none."""
    return str(pathlib.Path(folder).expanduser().resolve()) if folder else ""


def plan_of(options: argparse.Namespace, source: models.Source, **fields: Any) -> plans.Plan:
    """The plan that the options ask for."""
    return plans.plan_for(
        source, seconds=options.seconds, zipf=options.zipf, most=options.most, **fields
    )


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


def interrupt(*signal_and_frame: object) -> None:
    """Ends the service as Ctrl-C does."""
    raise KeyboardInterrupt


def serve(options: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM; what was accepted is answered."""
    say("starting; without a warm cache, all programs are compiled first")
    signal.signal(signal.SIGTERM, interrupt)
    with (
        contextlib.suppress(KeyboardInterrupt),
        local.Service(settings_of(options), options.port, options.host) as service,
    ):
        # Ray has installed a handler of its own, which aborts.
        signal.signal(signal.SIGTERM, interrupt)
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


def configure(settings: Settings) -> int:
    """Prints a configuration, unless its weights cannot be used; the exit status."""
    # Nothing is scored here, and a GPU's memory may be that of a replica.
    jax.config.update("jax_platforms", "cpu")
    source = settings.load()
    weights = settings.weights or source.newest
    if reason := models.why_refused(source, weights):
        say(reason)
        return 1
    http = {"host": "0.0.0.0", "port": 8000, "request_timeout_s": settings.limit_s}
    cluster = {"proxy_location": "EveryNode", "http_options": http}
    print(json.dumps({**cluster, **configuration(settings, weights)}, indent=1))
    return 0


def send(options: argparse.Namespace) -> dict[str, Any]:
    """Sends requests; the figures."""
    source = models.source_of(options.source, options.checkpoint, options.data)
    plan = plan_of(
        *(options, source), rate=options.rate, binary=not options.json, retries=options.retries
    )
    with progress("answers") as show:
        figures, told = asyncio.run(
            load.run(
                options.url,
                plan,
                replicas=options.replicas,
                progress=lambda sent, done: show(done, max(sent, int(plan.rate * plan.seconds))),
            )
        )
    latencies = [round(one.latency * 1e3, 3) for one in told]
    return {"plan": dataclasses.asdict(plan), "figures": figures, "latencies_ms": latencies}


def offline(options: argparse.Namespace) -> dict[str, Any]:
    """Ranks without the service; the figures."""
    from examples.serving import offline as offline_

    users = options.bucket_users
    settings = dataclasses.replace(
        settings_of(options),
        candidates=(options.bucket,),
        users=users,
        new_users=(users,),
        joint=True,
    )
    source = settings.load()
    say("loading or compiling the programs")
    scorer = settings.scorer(source)
    with progress("candidates") as show:
        sizes = options.candidates, options.users
        if options.turns:
            figures = offline_.compare(scorer, source, *sizes, options.turns, progress=show)
        else:
            figures = offline_.rank(scorer, source, *sizes, progress=show)
    return {"figures": figures}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures batching and start-up."""
    from examples.serving import measure as measure_

    settings = settings_of(options)
    plan = plan_of(options, settings.load())
    return {
        "settings": records.recorded(settings),
        "plan": dataclasses.asdict(plan),
        "start_up": measure_.start_up(settings, say),
        "batching": measure_.batching(settings, plan, options.least, say),
        # Last: Ray forks, which JAX's threads would not survive.
        "scorer": measure_.in_process(settings, plan, say),
    }


def overload(options: argparse.Namespace) -> dict[str, Any]:
    """Offers more load than a service can answer."""
    from examples.serving import measure as measure_

    settings = settings_of(options)
    plan = plan_of(options, settings.load(), binary=not options.json)
    figures = measure_.overload(settings, plan, options.least, say)
    return {"settings": records.recorded(settings), "figures": figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    options = parsed(arguments)
    if options.command == "serve":
        try:
            serve(options)
        except OSError as error:
            say(f"{error}; --port chooses another one, 0 a free one")
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
        run = {"load": send, "offline": offline, "measure": measure, "overload": overload}
        try:
            packages = ("jax", "ray")
            found = {**records.surroundings(*packages), **run[options.command](options)}
        except aiohttp.ClientConnectionError as error:
            say(f"no service at {options.url}: {error}")
            return 1
        found["load_after"] = os.getloadavg()[0]
        if options.out:
            records.write(options.out, found)
            say(f"written: {options.out}")
        print(json.dumps(found.get("figures", found.get("start_up")), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

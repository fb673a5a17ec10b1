"""Measures what histories in pages save if they grow by a few events from request to request.

    python -m examples.serving growth --events 1024 4096 --out FILE.json

Full calls of the same requests, by turns: a share of `KNOWN` of the users was asked for before, and
has 1 to 8 new events; the others are new. "pages" computes only new events; "forgotten" is the same
scorer without the cache: it forgets all users before every call. That is faster than a `Scorer` of
whole histories. The bar of the ratio is `BAR`.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from examples.serving import models, records
from examples.serving.histories import HistorySource
from examples.serving.settings import Settings
from ikbo_jax import serving
from ikbo_jax.serving.batches import fitting_parts

BAR, KNOWN = 2.0, 0.8
#: Positions of a history beyond its first events.
ROOM = 128


def requests(
    source: HistorySource, numbers: dict[int, int], new: Iterator[int], options: argparse.Namespace
) -> Iterator[serving.Request]:
    """Requests without an end; `numbers` has the events of the known users, who get more."""
    rng, known = np.random.default_rng(options.seed), list(numbers)
    while True:
        size = int(np.exp(rng.uniform(np.log(options.fewest), np.log(options.most + 1))))
        items = rng.integers(0, source.num_items, size, np.int32)
        if rng.random() < KNOWN:
            user = known[rng.integers(len(known))]
            grown = numbers[user] + int(rng.integers(1, 9))
            numbers[user] = min(grown, source.sizes.history)
        else:
            user = next(new)
        number = numbers.get(user, source.sizes.history - ROOM)
        yield serving.Request(user, number, None, items)


def measured(
    source: HistorySource, options: argparse.Namespace, say: records.Say
) -> dict[str, Any]:
    """Seconds of the calls of every turn, and the ratio of requests a second."""
    numbers = dict.fromkeys(range(options.known), source.sizes.history - ROOM)
    asked = requests(source, numbers, itertools.count(options.known), options)
    settings = Settings(
        candidates=tuple(options.buckets), users=(options.users,), user_bytes=options.user_bytes
    )
    scorers = {name: settings.replica(source) for name in ("pages", "forgotten")}
    first = [serving.Request(u, n, None, np.zeros(1, np.int32)) for u, n in numbers.items()]
    scorers["pages"].rank(first)
    times = {name: records.Times() for name in scorers}
    apart = 0.0
    for turn in range(options.turns):
        part = list(itertools.islice(asked, options.requests))
        calls = list(fitting_parts(enumerate(part), scorers["pages"].buckets))
        found: dict[str, list[Any]] = {name: [] for name in scorers}
        for name, scorer in scorers.items():
            with times[name].measured():
                for call in calls:
                    if name == "forgotten":
                        scorer.forget_users()
                    found[name] += scorer.rank([one for _, one in call])
        pairs = zip(*found.values(), strict=True)
        apart = max(apart, *(float(np.abs(a.scores - b.scores).max()) for a, b in pairs))
        rates = ", ".join(
            f"{name} {len(part) / x.seconds[-1]:.1f} ({len(part) / x.cpu_seconds[-1]:.1f})"
            for name, x in times.items()
        )
        say(f"turn {turn}, requests a second (of CPU time): {rates}")
    seconds = {name: x.seconds for name, x in times.items()}
    busy = {name: x.cpu_seconds for name, x in times.items()}
    ratio, cpu_ratio = (min(x["forgotten"]) / min(x["pages"]) for x in (seconds, busy))
    events = source.sizes.history - ROOM
    say(
        f"{events} events: {ratio:.2f} times as many requests, by CPU time {cpu_ratio:.2f}; "
        f"scores apart {apart:.1e}"
    )
    ratios = {"ratio": ratio, "cpu_ratio": cpu_ratio, "bar": BAR, "apart": apart}
    return {"events": events, **ratios, "seconds": seconds, "cpu_seconds": busy}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    names = [name for name in models.SOURCES if name.startswith("histories")]
    parser.add_argument("--source", choices=names, default="histories", help="what is ranked")
    parser.add_argument("--events", type=int, nargs="+", default=[1024, 4096], help="at first")
    parser.add_argument("--fewest", type=int, default=64, help="candidates of a request")
    parser.add_argument("--most", type=int, default=512, help="candidates of a request")
    parser.add_argument(
        "--buckets", type=int, nargs="+", default=[1024, 2048, 4096], help="of candidates"
    )
    parser.add_argument("--users", type=int, default=16, help="of a call")
    parser.add_argument("--known", type=int, default=64, help="users that were asked for before")
    parser.add_argument("--requests", type=int, default=48, help="of a turn")
    parser.add_argument("--turns", type=int, default=5, help="number of turns")
    # 64 histories of 4,096 events of `histories-hopper` take 1.1 GB.
    parser.add_argument("--user-bytes", type=int, default=1 << 31, help="of all pages")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")


def run(options: argparse.Namespace, say: records.Say) -> dict[str, Any]:
    """The figures of every number of events."""
    found: list[dict[str, Any]] = []
    for events in options.events:
        source = models.SOURCES[options.source]()
        assert isinstance(source, HistorySource)
        pages = -(-(events + ROOM) // source.sizes.page)
        sizes = dataclasses.replace(source.sizes, most=pages)
        source = HistorySource(10**6, sizes, source.dtype, median=events, sigma=0)
        found.append(measured(source, options, say))
    missed = [f"{one['events']} events" for one in found if one["ratio"] < BAR]
    return {"device": jax.devices()[0].device_kind, "figures": found, "missed": missed}

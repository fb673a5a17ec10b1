"""A load generator: requests leave at random times, whatever the answers do (open loop)."""

import asyncio
import collections
import math
import time
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import numpy.typing as npt

from examples.serving import wire
from examples.serving.plans import Asked, Plan, requests

#: Statuses after which a client asks again: a worker that died, a full queue.
TRANSIENT = (408, 500, 502, 503)
#: What the replicas count, see `GET /metrics`.
COUNTS = (
    *("calls", "requests", "candidates", "padding", "hits", "misses", "evictions"),
    *("scored", "wasted"),
)


class Told(NamedTuple):
    """What became of a request.

    Attributes:
      asked: the request.
      status: status of the last answer; 0: no connection.
      latency: seconds from the planned time to the last answer.
      tries: number of times that it was sent.
      scores: the scores, or None.
      weights: version of the weights.
      replica: the replica that answered.
      after: seconds after which a refused client may ask again; 0: the answer names none.
    """

    asked: Asked
    status: int
    latency: float
    tries: int
    scores: npt.NDArray[np.float32] | None
    weights: str
    replica: str
    after: float = 0


async def _ask(session: aiohttp.ClientSession, url: str, plan: Plan, asked: Asked) -> Told:
    body, headers = wire.ask(asked.user, asked.items, binary=plan.binary)
    loop = asyncio.get_running_loop()
    start = loop.time()
    status, scores, weights, replica, after = 0, None, "", "", 0.0
    for tried in range(plan.retries + 1):
        try:
            async with session.post(f"{url}/rank", data=body, headers=headers) as answer:
                status, content = answer.status, await answer.read()
                after = float(answer.headers.get("Retry-After", 0))
            if status == 200:
                scores, weights, replica = wire.answer(headers["Content-Type"], content)
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        if status and status not in TRANSIENT:
            break
        if tried < plan.retries:
            await asyncio.sleep(0.05 * 2 ** min(tried, 5))
    return Told(asked, status, loop.time() - start, tried + 1, scores, weights, replica, after)


async def send(url: str, plan: Plan) -> list[Told]:
    """Sends the requests of a plan at their times and waits for all answers.

    A request that leaves late, because this process was busy, has this delay in its latency.
    """
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = loop.time()

        async def one(asked: Asked) -> Told:
            late = loop.time() - start - asked.at
            told = await _ask(session, url, plan, asked)
            return told._replace(latency=told.latency + late)

        tasks = []
        for asked in requests(plan):
            await asyncio.sleep(max(0, start + asked.at - loop.time()))
            tasks.append(asyncio.create_task(one(asked)))
        return [await task for task in tasks]


async def metrics(url: str, replicas: int = 1, *, limit_s: float = 10) -> dict[str, dict[str, Any]]:
    """The scorers' counts by replica; asks until so many replicas have answered."""
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + limit_s
    async with aiohttp.ClientSession() as session:
        while len(found) < replicas and time.monotonic() < end:
            try:
                async with session.get(f"{url}/metrics") as answer:
                    if answer.status == 200:
                        fields = await answer.json()
                        found[fields["replica"]] = fields
            except aiohttp.ClientError:
                # A replica, or the service, that is not there yet.
                if not found and time.monotonic() > end - 1:
                    raise
            await asyncio.sleep(0.02)
    return found


def since(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> collections.Counter[str]:
    """The sum of all replicas' counts between two looks at them."""
    total: collections.Counter[str] = collections.Counter()
    for replica, fields in after.items():
        for name in COUNTS:
            total[name] += fields[name] - before.get(replica, {}).get(name, 0)
        total["compilations"] += fields["compilations"]
    return total


def summary(
    plan: Plan, told: list[Told], counts: collections.Counter[str], deadline_s: float = math.inf
) -> dict[str, Any]:
    """The figures of a run: seconds, requests a second, shares.

    What overload leaves is `goodput`, the answers within the deadline a second, and how soon other
    requests were refused.
    """
    good = [one for one in told if one.status == 200]
    refused = [one for one in told if one.status == 503]
    latencies = np.asarray([one.latency for one in good] or [np.nan])
    last = max((one.asked.at + one.latency for one in told), default=0.0)
    seconds = max(last, plan.seconds)
    return {
        "offered_rate": len(told) / plan.seconds,
        "throughput": len(good) / seconds,
        "goodput": sum(one.latency <= deadline_s for one in good) / plan.seconds,
        "candidates_per_second": sum(len(one.asked.items) for one in good) / seconds,
        "p50_ms": float(np.percentile(latencies, 50) * 1e3),
        "p99_ms": float(np.percentile(latencies, 99) * 1e3),
        "refused_p50_ms": float(np.median([one.latency for one in refused] or [0.0]) * 1e3),
        "refused_without_retry_after": sum(not one.after for one in refused),
        "statuses": dict(collections.Counter(str(one.status) for one in told)),
        "retried": sum(one.tries > 1 for one in told),
        "answers_of_replicas": sorted(collections.Counter(one.replica for one in good).values()),
        "requests_per_call": counts["requests"] / max(1, counts["calls"]),
        "candidates_per_call": counts["candidates"] / max(1, counts["calls"]),
        "padding_share": counts["padding"] / max(1, counts["padding"] + counts["candidates"]),
        "hit_rate": counts["hits"] / max(1, counts["hits"] + counts["misses"]),
        "wasted_share": counts["wasted"] / max(1, counts["scored"]),
        "compilations": counts["compilations"],
    }


async def run(
    url: str, plan: Plan, *, replicas: int = 1, deadline_s: float = math.inf
) -> tuple[dict[str, Any], list[Told]]:
    """Sends a plan's requests; the figures, and what became of every request."""
    before = await metrics(url, replicas)
    told = await send(url, plan)
    after = await metrics(url, replicas)
    return summary(plan, told, since(before, after), deadline_s), told

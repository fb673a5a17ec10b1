"""The scorer as a deployment of Ray Serve.

HTTP, replicas, queues, autoscaling, health checks and updates are Ray Serve's; this file connects
them to `ikbo_jax.serving.Scorer`. It merges requests to calls itself: `serve.batch` closes a batch
though no call is free for it, and moves a request that does not fit behind all others.
"""

import asyncio
import dataclasses
import gc
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from examples.serving import early, models, wire
from examples.serving.settings import Settings
from ikbo_jax import serving

#: Sends requests of one session to one replica, and to another one if that is busy.
STICKY = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"

NAME = "ranking"
LOGGER = logging.getLogger("ray.serve")


@dataclasses.dataclass
class Item:
    """A request that waits for its call.

    Attributes:
      request: the request.
      until: the time until which its answer is of use; 0 if nobody waits for it.
      due: the time at which its call starts though it is not full.
      answer: the answer, or an error, when the call has ended.
    """

    request: serving.Request
    until: float
    due: float
    answer: asyncio.Future[Any]


class Ranking:
    """A replica: a scorer behind `/rank`."""

    def __init__(self, settings: Settings) -> None:
        start = time.perf_counter()
        self.settings = settings
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.source = settings.load()
        self.scorer = settings.replica(self.source)
        self.admission = serving.Admission(
            self.scorer.buckets, self.scorer.call_seconds, settings.concurrent
        )
        self.counts = dict.fromkeys(("answered", "refused", "late", "scored", "wasted"), 0)
        # The event loop goes on reading requests while threads score.
        self.threads = ThreadPoolExecutor(settings.concurrent)
        self.waiting: list[Item] = []
        self.calls: set[asyncio.Task[None]] = set()
        self.gauges = {
            name: metrics.Gauge(f"ikbo_{name}", description=f"{name} of the scorer")
            for name in (
                *("hit_rate", "compilations", "padding", "calls", "evictions", "pages_in_use"),
                *("wait_s", "slowdown", "answered", "refused", "late", "scored", "wasted"),
            )
        }
        self.refused, self.started = "", False
        # To collect garbage among all objects of JAX and Ray would stop the replica for 0.1 s.
        gc.collect()
        gc.freeze()
        self.seconds_to_start = time.perf_counter() - start
        early.replica = self

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Ray Serve calls this with the deployment's `user_config`, whenever it changes.

        The first call comes before the first request: a replica that cannot use the current weights
        must not answer with others, so it does not start. Later, weights that cannot be used are
        refused, and the replica goes on with those it has: an error here would end it, and all
        others.
        """
        version = str(config["weights"]) or self.source.newest
        self.refused = ""
        if version != self.scorer.metrics.weights:
            try:
                weights = await asyncio.to_thread(self.source.weights, version)
                await asyncio.to_thread(self.scorer.set_weights, weights, version)
            except Exception as error:
                if not self.started:
                    raise
                self.refused = f"weights {version}: {error}"
                LOGGER.exception("refused weights %s", version)
        self.started = True

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises, or does not return in time."""
        loop = asyncio.get_running_loop()
        probe = models.request(self.source, 0, [0])
        (answer,) = await loop.run_in_executor(self.threads, self.scorer.rank, [probe])
        # Here and not in every batch, where it took 4 % of the event loop's time.
        self.publish()
        if isinstance(answer, Exception):
            raise answer

    def start_calls(self) -> None:
        """Starts calls, as full as the requests that wait can make them.

        A call that is not full starts when its first request is due. What nobody waits for is
        dropped.
        """
        now = time.monotonic()
        self.waiting = [item for item in self.waiting if item.until > now]
        while self.waiting and len(self.calls) < self.settings.concurrent:
            most = self.settings.batch * self.settings.candidates[-1]
            items: list[Item] = []
            left: list[Item] = []
            for item in self.waiting:
                fits = not items or item.request.size <= most
                (items if fits else left).append(item)
                most -= item.request.size if fits else 0
            if not left and most > 0 and now < items[0].due:
                return
            self.waiting = left
            self.calls.add(call := asyncio.create_task(self.score(items)))
            call.add_done_callback(self.ended)

    def ended(self, call: asyncio.Task[None]) -> None:
        """Starts the next call after one that has ended."""
        self.calls.remove(call)
        self.start_calls()

    async def score(self, items: list[Item]) -> None:
        """Scores requests in one call."""
        start = time.monotonic()
        requests = [item.request for item in items]
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self.threads, self.scorer.rank, requests)
        except Exception as error:
            answers = [error] * len(items)
        self.admission.measured([one.size for one in requests], time.monotonic() - start)
        self.counts["scored"] += len(items)
        self.counts["wasted"] += sum(not item.until for item in items)
        for item, answer in zip(items, answers, strict=True):
            if not item.answer.done():
                item.answer.set_result(answer)

    async def __call__(self, request: Request) -> Response:
        """Ray Serve calls this for every request of HTTP."""
        path = request.scope["path"]
        allowed = {"/rank": "POST", "/metrics": "GET"}.get(path)
        if allowed is None:
            return refusal(404, f"no {path}; there are POST /rank and GET /metrics")
        if request.method != allowed:
            reason = f"{request.method} {path}, expected {allowed}"
            return refusal(405, reason, Allow=allowed)
        return JSONResponse(self.numbers()) if allowed == "GET" else await self.rank(request)

    async def rank(self, request: Request) -> Response:
        """Scores of a user's candidates."""
        start = time.monotonic()
        settings, kind = self.settings, request.headers.get("content-type", "")
        try:
            content = await wire.received(request, settings.body_bytes, settings.body_s)
            body = wire.read(kind, content)
            wanted = models.request(self.source, body.user, body.candidates, body.version)
            self.scorer.check(wanted)
        except wire.BodyError as error:
            # The rest of a body that is too long, or late, is not read.
            return refusal(error.status, error, **error.headers)
        except models.UnknownUserError as error:
            return refusal(404, error)
        except serving.BadRequestError as error:
            return refusal(422, error)
        limit = min(body.timeout_ms or settings.timeout_ms, settings.timeout_ms) / 1000
        now, loop = time.monotonic(), asyncio.get_running_loop()
        left, wait = start + limit - now, settings.wait_ms / 1000
        if seconds := self.admission.admit(wanted.size, left):
            self.counts["refused"] += 1
            return early.busy(seconds)
        item = Item(wanted, start + limit, now + wait, loop.create_future())
        self.waiting.append(item)
        self.start_calls()
        # A timer may be 1 ms early.
        loop.call_later(wait + 0.001, self.start_calls)
        try:
            async with asyncio.timeout(left):
                answer = await item.answer
        except TimeoutError:
            self.counts["late"] += 1
            return refusal(504, f"no scores after {1000 * limit:g} ms")
        finally:
            # The client may also have closed the connection: then Ray cancels this call.
            item.until = 0
            self.admission.done(wanted.size)
        if isinstance(answer, serving.BadRequestError):
            return refusal(422, answer)
        if isinstance(answer, Exception):
            raise answer
        self.counts["answered"] += 1
        content, kind = wire.write(kind, answer.scores, answer.weights, self.replica)
        return Response(content, media_type=kind)

    def refused_for(self, size: int) -> float:
        """Seconds by which about `size` candidates would wait too long; counts a refusal if any."""
        size = min(size, self.settings.candidates[-1])
        seconds = self.admission.excess(size, self.settings.timeout_ms / 1000)
        self.counts["refused"] += seconds > 0
        return seconds

    def publish(self) -> dict[str, Any]:
        """Gives the scorer's counts to Ray's metrics; returns them."""
        found = self.scorer.metrics
        fields = {
            **found._asdict(),
            **self.counts,
            "hit_rate": found.hit_rate,
            "wait_s": self.admission.wait,
            "slowdown": self.admission.slowdown,
        }
        for name, gauge in self.gauges.items():
            gauge.set(float(fields[name]))
        return fields

    def numbers(self) -> dict[str, Any]:
        """The scorer's counts, of the replica that answers."""
        return {
            **self.publish(),
            "refused_weights": self.refused,
            "seconds_to_start": self.seconds_to_start,
            "pid": os.getpid(),
            "replica": self.replica,
        }


def refusal(status: int, reason: object, **headers: str) -> Response:
    """An answer without scores."""
    # Half of a surrogate pair, which a client may send, has no UTF-8.
    text = str(reason).encode(errors="backslashreplace").decode()
    return JSONResponse({"error": text}, status, headers)


def build(fields: dict[str, Any]) -> serve.Application:
    """The service of a configuration file: `fields` are those of `Settings`."""
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    settings = Settings(**values)
    least, most = settings.replicas[0], settings.replicas[-1]
    options: dict[str, Any] = {"num_replicas": least}
    if most > least:
        options = {
            "num_replicas": "auto",
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                target_ongoing_requests=settings.target,
                upscale_delay_s=settings.upscale_s,
            ),
        }
    # HAProxy chooses replicas itself, see `local`.
    if settings.sticky and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        options["request_router_config"] = RequestRouterConfig(request_router_class=STICKY)
    deployment = serve.deployment(
        Ranking,
        name="Ranking",
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": settings.cpus},
        max_ongoing_requests=settings.ongoing,
        max_queued_requests=settings.queued,
        # 0.1 ms of CPU time for each request.
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
        backpressure_config=BackpressureConfig(retry_after_s=1),
        health_check_period_s=settings.health_s,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=5,
        **options,
    )
    return deployment.bind(settings)


def configuration(settings: Settings, weights: str) -> dict[str, Any]:
    """What `serve deploy` reads.

    `user_config` is the one place that holds the current version of the weights: replicas that
    start later begin with it. Deployed again with another version alone, replicas take it as they
    run: `user_config` is the part of a configuration that needs no new replicas.
    """
    return {
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": "examples.serving.app:build",
                "args": dataclasses.asdict(settings),
                "deployments": [{"name": "Ranking", "user_config": {"weights": weights}}],
            }
        ]
    }

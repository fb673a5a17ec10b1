"""The scorer as a deployment of Ray Serve.

HTTP, replicas, batching, queues, autoscaling, health checks and updates are Ray Serve's; this file
connects them to `ikbo_jax.serving.Scorer`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from examples.serving import models, wire
from examples.serving.settings import Settings
from ikbo_jax import serving

#: Sends requests of one session to one replica, and to another one if that is busy.
STICKY = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"

NAME = "ranking"
LOGGER = logging.getLogger("ray.serve")


class Item(NamedTuple):
    """A request that waits for its batch, and the time until which it is of use."""

    request: serving.Request
    until: float


class Late(TimeoutError):
    """The answer would come after the deadline."""


def number_of_candidates(items: Sequence[Item]) -> int:
    """The size of a batch: a batch is full when its candidates fill the largest bucket."""
    return sum(item.request.size for item in items)


class Ranking:
    """A replica: a scorer behind `/rank`."""

    def __init__(self, settings: Settings) -> None:
        start = time.perf_counter()
        self.settings = settings
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.source = settings.load()
        self.scorer = settings.scorer(self.source)
        # The event loop goes on reading requests while threads score.
        self.threads = ThreadPoolExecutor(settings.concurrent)
        # Ray Serve has no call that changes the number of concurrent batches later.
        batch = serve.batch(
            max_batch_size=settings.candidates[-1],
            batch_wait_timeout_s=settings.wait_ms / 1000,
            max_concurrent_batches=settings.concurrent,
            batch_size_fn=number_of_candidates,
        )
        self.merge: Callable[[Item], Awaitable[Any]] = batch(self.score)
        self.gauges = {
            name: metrics.Gauge(f"ikbo_{name}", description=f"{name} of the scorer")
            for name in ("hit_rate", "compilations", "padding", "calls", "evictions")
        }
        self.refused = ""
        # To collect garbage among all objects of JAX and Ray would stop the replica for 0.1 s.
        gc.collect()
        gc.freeze()
        self.seconds_to_start = time.perf_counter() - start

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Ray Serve calls this with the deployment's `user_config`, whenever it changes.

        Weights that cannot be used are refused, and the replica goes on with those it has: an error
        here would end it, and all others.
        """
        version = str(config["weights"]) or self.source.newest
        self.refused = ""
        if version == self.scorer.metrics.weights:
            return
        try:
            weights = await asyncio.to_thread(self.source.weights, version)
            await asyncio.to_thread(self.scorer.set_weights, weights, version)
        except Exception as error:
            self.refused = f"weights {version}: {error}"
            LOGGER.exception("refused weights %s", version)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises, or does not return in time."""
        loop = asyncio.get_running_loop()
        probe = models.request(self.source, 0, [0])
        (answer,) = await loop.run_in_executor(self.threads, self.scorer.rank, [probe])
        # Here and not in every batch, where it took 4 % of the event loop's time.
        self.publish()
        if isinstance(answer, Exception):
            raise answer

    async def score(self, items: list[Item]) -> list[Any]:
        """Answers, or errors, of requests; those that are late already are not scored."""
        now = time.monotonic()
        intime = [item.request for item in items if item.until > now]
        loop = asyncio.get_running_loop()
        answers = iter(await loop.run_in_executor(self.threads, self.scorer.rank, intime))
        return [next(answers) if item.until > now else Late() for item in items]

    async def __call__(self, request: Request) -> Response:
        """Ray Serve calls this for every request of HTTP."""
        route = request.method, request.url.path
        if route == ("POST", "/rank"):
            return await self.rank(request)
        if route == ("GET", "/metrics"):
            return JSONResponse(self.numbers())
        return refusal(404, f"no {route[0]} {route[1]}; there are POST /rank and GET /metrics")

    async def rank(self, request: Request) -> Response:
        """Scores of a user's candidates."""
        kind = request.headers.get("content-type", "")
        try:
            body = wire.read(kind, await request.body())
            wanted = models.request(self.source, body.user, body.candidates, body.version)
            self.scorer.check(wanted)
        except wire.BodyError as error:
            return refusal(error.status, error)
        except models.UnknownUserError as error:
            return refusal(404, error)
        except serving.BadRequestError as error:
            return refusal(422, error)
        limit = min(body.timeout_ms or self.settings.timeout_ms, self.settings.timeout_ms) / 1000
        item = Item(wanted, time.monotonic() + limit)
        try:
            async with asyncio.timeout(limit):
                if self.settings.batch:
                    answer = await self.merge(item)
                else:
                    (answer,) = await self.score([item])
        except TimeoutError:
            answer = Late()
        if isinstance(answer, Late):
            return refusal(504, f"no scores after {1000 * limit:g} ms")
        if isinstance(answer, serving.BadRequestError):
            return refusal(422, answer)
        if isinstance(answer, Exception):
            raise answer
        content, kind = wire.write(kind, answer.scores, answer.weights, self.replica)
        return Response(content, media_type=kind)

    def publish(self) -> dict[str, Any]:
        """Gives the scorer's counts to Ray's metrics; returns them."""
        found = self.scorer.metrics
        fields = {**found._asdict(), "hit_rate": found.hit_rate}
        for name, gauge in self.gauges.items():
            gauge.set(float(fields[name]))
        return fields

    def numbers(self) -> dict[str, Any]:
        """The scorer's counts, of the replica that answers."""
        return {
            **self.publish(),
            "refused": self.refused,
            "seconds_to_start": self.seconds_to_start,
            "pid": os.getpid(),
            "replica": self.replica,
        }


def refusal(status: int, reason: object) -> Response:
    """An answer without scores."""
    return JSONResponse({"error": str(reason)}, status)


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
        health_check_period_s=settings.health_s,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=5,
        **options,
    )
    return deployment.bind(settings)


def configuration(settings: Settings, weights: str = "") -> dict[str, Any]:
    """What `serve deploy` reads.

    Deployed again with another version of the weights alone, replicas take these as they run:
    `user_config` is the part of a configuration that needs no new replicas.
    """
    return {
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": "examples.serving.app:build",
                "args": dataclasses.asdict(settings),
                "deployments": [
                    {"name": "Ranking", "user_config": {"weights": weights or settings.weights}}
                ],
            }
        ]
    }

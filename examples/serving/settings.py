"""Settings of the service, and the scorer that they describe; needs no engine."""

import dataclasses
from typing import Any

from examples.serving import models
from examples.serving.histories import HistorySource
from ikbo_jax import serving
from ikbo_jax.serving.programs import check_finite, specs_of


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the service.

    Attributes:
      source: a name in `models.SOURCES`.
      checkpoint: folder of a run's checkpoints, which is served instead of `source`; or empty.
      data: folder of MovieLens-100k for a checkpoint; empty: the cache folder.
      weights: the version of the weights to start with; empty: the newest one.
      cache: folder of compiled programs.
      candidates: buckets of candidates; the last one is also the largest request.
      users: buckets of users of a batch. A call gathers a state for each user of its bucket. Every
        number needs a program for each number of candidates.
      new_users: buckets of users whose state is not there yet.
      user_bytes: bytes of the users' states of one replica.
      joint: whether programs that encode users and score candidates in one are compiled; ranking
        offline uses them.
      batch: whether requests are merged to batches.
      wait_ms: milliseconds that the first request of a batch waits for others.
      concurrent: number of batches that a replica works on. While a GPU computes one, the host can
        prepare another; on a CPU, a call of these sizes computes on one core.
      replicas: number of replicas; with two numbers, the smallest and the largest.
      target: requests under way in each replica that autoscaling aims at.
      upscale_s: seconds for which more replicas must be wanted before they start.
      gpus: GPUs of a replica.
      cpus: CPUs that Ray reserves for a replica.
      ongoing: number of requests that a replica takes at a time.
      queued: number of requests that may wait in a proxy; a further one gets 503.
      timeout_ms: milliseconds after which a request gets 504.
      body_bytes: the largest body; a larger one gets 413, and is not read.
      body_s: seconds in which a body must have come; a later one gets 408.
      sticky: sends a user's requests to one replica, which keeps the user's state.
      health_s: seconds between checks of a replica's health.
    """

    source: str = "random"
    checkpoint: str = ""
    data: str = ""
    weights: str = ""
    cache: str = ""
    candidates: tuple[int, ...] = (128, 384, 768, 1152, 1536, 2048)
    users: tuple[int, ...] = (16,)
    new_users: tuple[int, ...] = (1, 4, 16)
    user_bytes: int = 1 << 28
    joint: bool = False
    batch: bool = True
    wait_ms: float = 20
    concurrent: int = 2
    replicas: tuple[int, ...] = (1,)
    target: float = 2
    upscale_s: float = 10
    gpus: float = 0
    cpus: float = 1
    ongoing: int = 256
    queued: int = 256
    timeout_ms: float = 2000
    body_bytes: int = 1 << 20
    body_s: float = 2
    sticky: bool = False
    health_s: float = 2

    def __post_init__(self) -> None:
        if not 0 < self.replicas[0] <= self.replicas[-1] or len(self.replicas) > 2:
            raise ValueError(f"replicas are {self.replicas}, expected one, or least and most")

    @property
    def limit_s(self) -> float:
        """Seconds after which Ray gives a request up; a replica does so before."""
        return max(self.timeout_ms / 1000, self.body_s) + 0.25

    def load(self) -> models.Source:
        """What is served."""
        return models.source_of(self.source, self.checkpoint, self.data)

    def why_refused(self, version: str) -> str:
        """Why no service may have a version of the weights; empty if one may."""
        try:
            source = self.load()
            weights = source.weights(version)
            check_finite(weights)
            # The model runs on shapes alone.
            specs_of(source.model, weights, source.user, source.candidate)
        except Exception as error:
            return f"weights {version} are refused: {error}"
        return ""

    def _shared(self, source: models.Source) -> dict[str, Any]:
        """Arguments of both scorers."""
        if self.cache:
            serving.use_cache_folder(self.cache)
        version = self.weights or source.newest
        return {
            "weights": source.weights(version),
            "candidate": source.candidate,
            "buckets": serving.Buckets(self.candidates, self.users, self.new_users),
            "user_bytes": self.user_bytes,
            "version": version,
        }

    def scorer(self, source: models.Source) -> serving.Scorer:
        """A scorer whose programs are compiled."""
        return serving.Scorer(
            source.model,
            user=source.user,
            features_of=lambda keys: source.features_of([user for user, _ in keys]),
            joint=self.joint,
            **self._shared(source),
        )

    def replica(self, source: models.Source) -> serving.Scorer | serving.HistoryScorer:
        """The scorer of one replica: a source whose histories grow has them in pages."""
        if not isinstance(source, HistorySource):
            return self.scorer(source)
        return serving.HistoryScorer(
            source.growing,
            event=source.event,
            row=source.row,
            events_of=source.events_of,
            appends=source.appends,
            page=source.sizes.page,
            most=source.sizes.most,
            **self._shared(source),
        )

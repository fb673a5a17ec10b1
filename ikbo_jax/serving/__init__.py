"""Scores requests of several users in one call of a compiled program; needs no serving engine.

An engine such as Ray Serve receives requests and collects them to batches; a `Scorer` answers a
batch. Needs nothing beside JAX; the example behind HTTP needs the extra `serve`.
"""

from ikbo_jax.serving.admission import Admission
from ikbo_jax.serving.base import Metrics
from ikbo_jax.serving.batches import BadRequestError, Buckets, Request
from ikbo_jax.serving.histories import History, HistoryModel, HistoryScorer
from ikbo_jax.serving.offline import rank_arrays, rank_offline
from ikbo_jax.serving.pages import PageMetrics, PagePool
from ikbo_jax.serving.programs import Model, use_cache_folder
from ikbo_jax.serving.scorer import Scorer

__all__ = [
    "Admission",
    "BadRequestError",
    "Buckets",
    "History",
    "HistoryModel",
    "HistoryScorer",
    "Metrics",
    "Model",
    "PageMetrics",
    "PagePool",
    "Request",
    "Scorer",
    "rank_arrays",
    "rank_offline",
    "use_cache_folder",
]

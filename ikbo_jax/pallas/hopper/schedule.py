"""The work items that each persistent worker (a CTA or a cluster) takes."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Schedules two phases: user tiles start at worker 0, candidate tiles at the last worker.

    Candidate tiles after `full_waves` waves go only to the workers from `rest_from` on, which
    computed one user tile fewer. Methods take Python or traced integers.
    """

    num_workers: int
    user_tiles: int
    cand_tiles: int
    full_waves: int
    rest_from: int

    def user_count(self, worker: Any) -> Any:
        return jnp.maximum(0, (self.user_tiles - worker + self.num_workers - 1) // self.num_workers)

    def user_tile(self, worker: Any, i: Any) -> Any:
        return i * self.num_workers + worker

    def cand_count(self, worker: Any) -> Any:
        rank = self.num_workers - 1 - worker
        full = (self.cand_tiles - rank + self.num_workers - 1) // self.num_workers
        full = jnp.clip(full, 0, self.full_waves)
        width = self.num_workers - self.rest_from
        left = self.cand_tiles - self.full_waves * self.num_workers - rank
        rest = jnp.maximum(0, (left + width - 1) // width)
        return full + jnp.where(worker >= self.rest_from, rest, 0)

    def cand_tile(self, worker: Any, i: Any) -> Any:
        rank = self.num_workers - 1 - worker
        width = self.num_workers - self.rest_from
        rest = self.full_waves * self.num_workers + (i - self.full_waves) * width
        return jnp.where(i < self.full_waves, i * self.num_workers, rest) + rank


def make_schedule(
    user_tiles: int, cand_tiles: int, user_cost: float, num_workers: int
) -> TileSchedule:
    """Minimises the time of the last worker; `user_cost` is in units of a candidate tile."""
    num_workers = max(1, min(num_workers, user_tiles + cand_tiles))
    each, extra = divmod(user_tiles, num_workers)
    all_waves = -(-cand_tiles // num_workers)
    best = (math.inf, all_waves)
    # Workers with one more user tile may skip only as many waves as that tile takes.
    for waves in range(max(0, all_waves - math.ceil(user_cost) - 1), all_waves + 1):
        left = max(0, cand_tiles - waves * num_workers)
        last_of_rest = waves - (-left // (num_workers - extra))
        last_of_users = waves if extra else 0
        end = max(each * user_cost + last_of_rest, (each + 1) * user_cost + last_of_users)
        best = min(best, (end, waves))
    return TileSchedule(num_workers, user_tiles, cand_tiles, best[1], extra)


def back_and_forth(worker: Any, workers: int, i: Any) -> Any:
    """Numbers a worker's `i`-th work item; odd rounds go through the workers in reverse.

    Otherwise the first worker would have the most expensive work item of every round.
    """
    place = jnp.where(lax.rem(i, 2) == 0, worker, workers - 1 - worker)
    return i * workers + place


def back_and_forth_share(worker: Any, workers: int, count: Any) -> Any:
    """Counts the work items of `count` that a worker takes."""
    full = lax.div(count, workers)
    return full + (back_and_forth(worker, workers, full) < count).astype(jnp.int32)

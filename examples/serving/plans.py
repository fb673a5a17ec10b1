"""What is asked of a service or a scorer: requests at random times, some users more often."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from examples.serving import models
from ikbo_jax import serving


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
      rate: requests a second, on average.
      seconds: seconds in which requests leave.
      users: number of users; user u is asked for in proportion to 1 / (u + 1) ** zipf.
      items: number of items.
      zipf: exponent of the users' popularity.
      fewest: the smallest number of candidates of a request.
      most: the largest; numbers between are drawn with equal probability by their logarithm.
      binary: asks in the binary form instead of JSON.
      retries: how often a client asks again.
      seed: seed of everything that is drawn.
    """

    rate: float
    seconds: float
    users: int
    items: int
    zipf: float = 1.1
    fewest: int = 64
    most: int = 2048
    binary: bool = True
    retries: int = 0
    seed: int = 0


class Asked(NamedTuple):
    """A request: when it leaves (seconds from the start), its user, its items."""

    at: float
    user: int
    items: npt.NDArray[np.int32]


def requests(plan: Plan) -> list[Asked]:
    """The requests of a plan; the times between them are exponential."""
    rng = np.random.default_rng(plan.seed)
    times = np.cumsum(rng.exponential(1 / plan.rate, int(plan.rate * plan.seconds * 2) + 20))
    times = times[times < plan.seconds]
    popularity = np.arange(1, plan.users + 1.0) ** -plan.zipf
    users = rng.choice(plan.users, len(times), p=popularity / popularity.sum())
    sizes = np.exp(rng.uniform(np.log(plan.fewest), np.log(plan.most + 1), len(times))).astype(int)
    return [
        Asked(float(at), int(user), rng.integers(0, plan.items, size, np.int32))
        for at, user, size in zip(times, users, sizes, strict=True)
    ]


def plan_for(source: models.Source, **fields: Any) -> Plan:
    """A plan for the users and items of a source; `fields` sets other fields of `Plan`."""
    return Plan(**{"rate": 1.0, "users": source.num_users, "items": source.num_items, **fields})


def with_new_users(
    requests: Sequence[serving.Request],
    hits: float,
    rng: np.random.Generator,
    versions: Iterator[int],
) -> list[serving.Request]:
    """Requests of which a share of about `hits` finds its user's state.

    The others have a version of their own, so that their user's state has to be computed.
    """
    new = rng.random(len(requests)) >= hits
    return [
        dataclasses.replace(request, version=next(versions)) if is_new else request
        for request, is_new in zip(requests, new, strict=True)
    ]

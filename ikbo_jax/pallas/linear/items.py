"""Items of work that the CTAs of a persistent kernel take in turn."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from ikbo_jax.pallas.hopper.launch import WarpgroupContext


@dataclasses.dataclass(frozen=True)
class ItemContext(WarpgroupContext):
    """The context of a warpgroup whose `shape` has `items` for its `workers`."""

    def item(self, i: Any) -> Any:
        """Describes item `i` of the CTA."""
        raise NotImplementedError

    @property
    def count(self) -> Any:
        """Counts the items of the CTA."""
        workers = self.shape.workers
        return lax.div(self.shape.items - self.worker + (workers - 1), workers)

    def for_items(self, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Calls `body(i, item, carry)`, which returns the next carry, for all items of the CTA."""
        return lax.fori_loop(0, self.count, lambda i, carry: body(i, self.item(i), carry), carry)

"""The Hopper card that a program is planned for where it is lowered on a machine without a GPU."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from ikbo_jax.integers import integer


@dataclasses.dataclass(frozen=True)
class Target:
    """A Hopper card, and its number of streaming multiprocessors, which a kernel has as CTAs."""

    card: str
    num_sms: int

    def __str__(self) -> str:
        return f"{self.card} ({self.num_sms} SMs)"


#: The number of streaming multiprocessors of a card, by the name of its model.
CARDS = {
    "H100": 132,
    "H100 PCIe": 114,
    "H100 NVL": 132,
    "H200": 132,
    "GH200": 132,
    "H800": 132,
    "H20": 78,
}
#: The target on a machine without a GPU where `export_target` names none.
DEFAULT = Target("H100", CARDS["H100"])

# A part of the keys of JAX's caches, so that a function is traced again for another target.
_current = jax.make_user_context(None)


@contextlib.contextmanager
def export_target(card: str = DEFAULT.card, *, num_sms: int | None = None) -> Iterator[None]:
    """Plans ops for a Hopper card wherever a program is lowered for CUDA; a context manager.

        with ikbo_jax.export_target("H200"):
            exported = jax.export.export(jax.jit(model), platforms=["cpu", "cuda"])(*arguments)

    Functions that are traced inside take, in programs that are lowered for CUDA, the implementation
    and the configuration that a machine with this card would choose; in programs that are lowered
    for another platform, they take XLA. Without this context, a machine without a GPU plans for an
    H100, and a machine with a GPU plans for its own default device and for CUDA alone.

    The card decides the number of CTAs of a kernel. Every Hopper card runs every artefact with the
    same results; on a card with fewer or more SMs than planned for, kernels are slower than they
    could be. A program that was planned for Hopper does not run on other GPUs.

    Args:
      card: the model: "H100", "H100 PCIe", "H100 NVL", "H200", "GH200", "H800" or "H20"; any other
        name with `num_sms`.
      num_sms: number of streaming multiprocessors, at least 1; None takes the model's. A part of a
        card (MIG) has fewer.

    Raises:
      ValueError: the card is unknown and `num_sms` is None; `num_sms` is not an integer of at least
        1.
    """
    with _current(_target(card, num_sms)):
        yield


def _target(card: str, num_sms: int | None) -> Target:
    if not isinstance(card, str) or (num_sms is None and card not in CARDS):
        known = ", ".join(map(repr, CARDS))
        raise ValueError(f"unknown card {card!r:.80}; known: {known}; for others, set num_sms")
    return Target(card, CARDS[card] if num_sms is None else integer("num_sms", num_sms, 1))


def current() -> Target | None:
    """Returns the target that `export_target` names; None outside of it."""
    return _current.value

"""What every op needs to choose an implementation: the device at hand, and a record of the choice.

An op leaves its `Plan` in the traced program with `record`. `ikbo_jax.explain` reads it back from
there, so that it tells what a function runs even when tracing happened long before.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

logger = logging.getLogger("ikbo_jax")

#: What `implementation` may name; None takes the fastest that works.
IMPLEMENTATIONS = ("mosaic_gpu", "xla")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call of an op runs.

    Attributes:
      op: the op's name.
      problem: the op's problem description, e.g. a `LinearCompressionProblem`.
      sizes: the same for people.
      implementation: one of `IMPLEMENTATIONS`.
      config: the kernel's configuration; None if XLA runs the op.
      reason: why this implementation, and where the configuration comes from.
    """

    op: str
    problem: Any
    sizes: str
    implementation: str
    config: Any
    reason: str

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.sizes}", f"  implementation: {self.implementation}"]
        if self.config is not None:
            lines.append(f"  config: {self.config}")
        return "\n".join([*lines, f"  reason: {self.reason}"])


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or known."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = ", ".join(["None", *map(repr, IMPLEMENTATIONS)])
        raise ValueError(f"unknown implementation {implementation!r}; known: {known}")


def default_device() -> jax.Device:
    """The device that new computations run on: `jax.default_device` if set, else the first one.

    Choices are made while tracing, when arrays have no device yet. So a program on a machine with a
    GPU that is to run on its CPU says so with `jax.default_device`, or with `implementation="xla"`.
    """
    device = jax.config.jax_default_device
    if device is None:
        return jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def hopper_unavailable_reason() -> str | None:
    """Why the Mosaic GPU kernels cannot run on the default device; None if they can."""
    device = default_device()
    if device.platform != "gpu":
        return (
            "the Mosaic GPU kernels need a Hopper GPU, "
            f"but the default device is a {device.platform}"
        )
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return (
            "the Mosaic GPU kernels need compute capability 9.0 (Hopper), "
            f"but {device.device_kind} has {capability}"
        )
    try:
        # Here and not above: importing it costs 0.3 s, which a machine without a GPU never needs.
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"jax {jax.__version__} has no Pallas Mosaic GPU: {error}"
    return None


def num_sms() -> int:
    """Streaming multiprocessors of the default device; it must be a GPU."""
    return int(default_device().core_count)


# The identity on an array, with the plan as a parameter: it lowers to nothing, and unlike a name or
# a table beside the program it survives jit's caches, differentiation, vmap and control flow.
plan_p = Primitive("ikbo_plan")
plan_p.def_impl(lambda x, *, plan: x)
plan_p.def_abstract_eval(lambda x, *, plan: x)
mlir.register_lowering(plan_p, lambda ctx, x, *, plan: [x])
batching.primitive_batchers[plan_p] = lambda args, dims, *, plan: (
    plan_p.bind(*args, plan=plan),
    dims[0],
)


def record(result: jax.Array, plan: Plan) -> jax.Array:
    """Returns `result`, marked in the traced program as what `plan` computed."""
    marked: jax.Array = plan_p.bind(result, plan=plan)
    return marked

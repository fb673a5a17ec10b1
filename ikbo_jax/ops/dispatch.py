"""The choice of an implementation, and a record of the choice.

An op stores its `Plan` in the jaxpr with `record`, and `ikbo_jax.explain` reads it from there. So
`explain` also reports the plans of functions that were traced earlier and come from a cache.

A choice is made while an op is traced. Where the machine has a GPU, it is made for the default
device. Where it has none, or where `export_target` names a Hopper card, the platform is unknown
until the program is lowered; then an op has two plans: for CUDA, on that card, and for all others.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.export

from ikbo_jax.ops import target as targets
from ikbo_jax.ops.reverse_only import identity_primitive
from ikbo_jax.ops.target import Target
from ikbo_jax.tuning import table

logger = logging.getLogger("ikbo_jax")

#: Values of `implementation` besides None, which takes the fastest that can run.
IMPLEMENTATIONS = ("mosaic_gpu", "xla")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call of an op runs.

    Attributes:
      config: the kernel's configuration; None if XLA runs the op.
      reason: why this implementation was chosen, and where the configuration comes from.
      backward: which implementation computes the gradient, and why; `backward_config`: of its
        kernel.
      division: how the call divides over the devices of a mesh; empty if it does not.
      target: the card that the plan is for; None: the default device, or any platform but CUDA.
      cuda: how the call runs in a program that is lowered for CUDA; None: as this plan says.
      refusal: why lowering for another platform than CUDA raises; empty if it does not.
      origin: the call that this plan is a part of, or a `vmap` of: its plan, and the numbers of
        problems; empty if it is the call's own plan.
    """

    op: str
    problem: Any
    sizes: str
    implementation: str
    config: Any
    reason: str
    backward: str = "XLA, at user and candidate batch size"
    backward_config: Any = None
    division: str = ""
    target: Target | None = dataclasses.field(default=None, repr=False)
    cuda: Plan | None = dataclasses.field(default=None, repr=False)
    refusal: str = dataclasses.field(default="", repr=False)
    origin: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def noted(self, note: str, *, of_kernels: bool = False) -> Plan:
        """Adds a note to the reason, also for CUDA; `of_kernels`: only where a kernel runs."""
        cuda = None if self.cuda is None else self.cuda.noted(note, of_kernels=of_kernels)
        is_noted = self.implementation == "mosaic_gpu" or not of_kernels
        reason = f"{self.reason}; {note}" if is_noted else self.reason
        return dataclasses.replace(self, reason=reason, cuda=cuda)

    def __str__(self) -> str:
        return "\n".join([f"{self.op}: {self.sizes}", *self._lines()])

    def _lines(self) -> list[str]:
        if self.refusal:
            lines = [f"  refused: {self.refusal}"]
        else:
            lines = [f"  implementation: {self.implementation}"]
            if self.config is not None:
                lines.append(f"  config: {self.config}")
            lines += [f"  reason: {self.reason}", f"  gradient: {self.backward}"]
            if self.division:
                lines.append(f"  devices: {self.division}")
        if self.cuda is not None:
            lines.append(f"  lowered for CUDA, {self.cuda.target}:")
            lines += [f"  {line}" for line in self.cuda._lines()]
        return lines

    @property
    def may_have_kernels(self) -> bool:
        """Whether a kernel computes the result or its gradient, or might if `vmap` folds it."""
        if self.implementation == "mosaic_gpu" or self.backward_config is not None:
            return True
        return not _symbolic_sizes(self.problem) and self.problem.default_config() is not None


@dataclasses.dataclass(frozen=True)
class Request:
    """What a choice depends on besides the problem: the caller's arguments, and where the op runs.

    Attributes:
      target: the card, if the program is lowered for CUDA; None: the choice is for the default
        device.
      platform: "cuda" or "other": the platform that the program is lowered for; "": with a target,
        it is not known yet.
      precision: of f32 products where the op is called, for derivatives, which JAX traces later.
    """

    op: str
    implementation: str | None
    config: Any
    target: Target | None = None
    platform: str = ""
    precision: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the platform is not known yet."""
        return self.target is not None and not self.platform

    @property
    def card(self) -> Target | None:
        """The card that runs the call; None: the default device, or no GPU."""
        return self.target if self.platform == "cuda" else None

    @property
    def num_sms(self) -> int:
        """Number of streaming multiprocessors of the device."""
        return num_sms() if self.card is None else self.card.num_sms

    def unavailable_reason(self) -> str | None:
        """Says why the Mosaic GPU kernels cannot run; None if they can."""
        if self.platform == "cuda":
            return _other_gpu_reason()
        if reason := hopper_unavailable_reason():
            return reason
        if self.platform == "other":
            return "the Mosaic GPU kernels run only in a program that is lowered for CUDA"
        return None


def target_of_trace(arrays: Any) -> Target | None:
    """Returns the card to plan for in programs for CUDA; None: plan for the default device.

    Arrays that are not traced run on their device at once.
    """
    target = targets.current()
    if target is None:
        if hopper_unavailable_reason() is None or _has_gpu():
            return None
        target = targets.DEFAULT
    return target if _is_traced(arrays) else None


def _is_traced(arrays: Any) -> bool:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        return True
    # Arrays that a traced function closes over are no tracers, but operations on them are traced.
    return isinstance(jax.lax.full((), 0), jax.core.Tracer)


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def choose(request: Request, problem: Any) -> Plan:
    """Decides how `problem` runs here; raises NotImplementedError if it cannot run as requested."""
    plan = functools.partial(Plan, request.op, problem, problem.describe(), target=request.card)
    if request.implementation == "xla":
        return plan("xla", None, "requested by the caller")
    config, reason = kernel_config(request, problem)
    if config is not None:
        return plan("mosaic_gpu", config, reason)
    if request.implementation == "mosaic_gpu":
        raise NotImplementedError(f"{request.op} with implementation='mosaic_gpu': {reason}")
    if request.card is None:
        logger.debug("%s runs in XLA: %s", request.op, reason)
    return plan("xla", None, reason)


def kernel_config(request: Request, problem: Any) -> tuple[Any, str]:
    """Returns the kernel's configuration and its origin; or None and the reason to run in XLA.

    Takes no notice of a request for "xla".
    """
    if reason := request.unavailable_reason():
        return None, reason
    if symbolic := _symbolic_sizes(problem):
        axis, size = symbolic[0]
        return None, (
            f"{axis} is symbolic ({str(size)!r}), but the kernel needs concrete sizes; "
            f"export with a concrete {axis}, or use implementation='xla'"
        )
    if request.config is not None:
        config, reason = request.config, "configuration passed by the caller"
    else:
        choice = table.lookup(problem, device=_card(request))
        config, reason = choice.config, choice.reason
        if config is None and request.implementation == "mosaic_gpu":
            # The table prefers XLA, but the caller requested the kernel.
            config = problem.default_config()
            reason = (
                "default configuration, since the caller requested the kernel; the table says: "
                f"{choice.reason}"
            )
        if config is None:
            return None, reason
    if illegal := config.illegal_reason(problem):
        return None, illegal
    return config, reason


def gradient_config(request: Request, problem: Any, reason: str | None = None) -> tuple[Any, str]:
    """Returns the configuration of a gradient's kernels, or None for XLA because of `reason`."""
    if request.implementation == "xla":
        return None, "requested by the caller"
    if reason:
        return None, reason
    return kernel_config(dataclasses.replace(request, op=problem.op, config=None), problem)


#: Names of a problem's sizes in the documentation, by field; fields not listed keep their name.
_AXES = {
    "users": "U",
    "q_len": "T",
    "kv_len": "S",
    "q_heads": "N",
    "kv_heads": "K",
    "head_dim": "H",
    "q_rows": "total_q",
    "kv_rows": "total_kv",
    "m": "M",
    "n": "N",
    "ks": "K",
    "features": "F",
}


def _symbolic_sizes(problem: Any) -> list[tuple[str, Any]]:
    """Lists a problem's sizes that are symbolic dimensions of `jax.export`, with names."""
    found = []
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        axis = _AXES.get(field.name, field.name)
        if field.name == "batch" and hasattr(problem, "users"):
            axis = "B"
        sizes = value if isinstance(value, tuple) else (value,)
        for number, size in enumerate(sizes, start=1 - len(sizes)):
            if is_symbolic(size):
                coarser = {0: "B", -1: "U" if len(sizes) == 2 else "the coarser B"}
                level = coarser.get(number, "a coarser B")
                found.append((level if field.name == "batches" else axis, size))
    return found


def is_symbolic(size: Any) -> bool:
    """Whether a size is a symbolic dimension of `jax.export` rather than an integer."""
    return type(size) is not int and jax.export.is_symbolic_dim(size)


def _card(request: Request) -> str:
    """Returns the name of the card that the kernels are planned for."""
    if request.card is not None:
        return request.card.card
    return str(getattr(default_device(), "device_kind", ""))


def default_device() -> jax.Device:
    """Returns the device of new computations: `jax.default_device` if set, else the first one.

    The choice is made while tracing, when arrays have no device. To run on the CPU of a machine
    that has a GPU, set `jax.default_device` or pass `implementation="xla"`.
    """
    device = jax.config.jax_default_device
    if device is None:
        return jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def hopper_unavailable_reason() -> str | None:
    """Says why the Mosaic GPU kernels cannot run on the default device; None if they can."""
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
        # Imported here because it takes 0.3 s, and a machine without a GPU never needs it.
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"jax {jax.__version__} has no Pallas Mosaic GPU: {error}"
    return None


def _other_gpu_reason() -> str | None:
    """Says why programs for Hopper cannot be lowered here; None if they can."""
    device = default_device()
    capability = str(getattr(device, "compute_capability", "9.0"))
    if device.platform != "gpu" or capability == "9.0":
        return None
    return (
        "Mosaic GPU lowers for the compute capability of the default device, and "
        f"{device.device_kind} has {capability} instead of 9.0; export with JAX_PLATFORMS=cpu"
    )


def num_sms() -> int:
    """Number of streaming multiprocessors of the default device; 1 if it has none."""
    return int(getattr(default_device(), "core_count", 1))


#: Has the plan of an op as the parameter `plan`.
plan_p = identity_primitive("ikbo_plan")


def record(result: jax.Array, plan: Plan) -> jax.Array:
    """Returns `result`; stores in the jaxpr that `plan` computed it."""
    return plan_p.bind(result, plan=plan)


def record_nothing(result: jax.Array, plan: Plan) -> jax.Array:
    """Records a call whose result the sizes alone decide: it is empty, or there are no keys."""
    reason = "nothing runs: the result is empty, or zeros for want of keys"
    nothing = Plan(
        *(plan.op, plan.problem, plan.sizes, "xla", None, reason, "nothing runs"),
        division=plan.division,
        origin=plan.origin,
    )
    return record(result, nothing)

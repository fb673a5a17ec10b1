"""Shared by all ops: argument checks, the choice of an implementation, and a record of the choice.

An op stores its `Plan` in the jaxpr with `record`, and `ikbo_jax.explain` reads it from there. So
`explain` also reports the plans of functions that were traced earlier and come from a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ikbo_jax.tuning import table

logger = logging.getLogger("ikbo_jax")

#: Values of `implementation` besides None, which takes the fastest that can run.
IMPLEMENTATIONS = ("mosaic_gpu", "xla")
#: Dtypes that the ops accept; the kernels accept fewer.
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call of an op runs.

    Attributes:
      op: the op's name.
      problem: the op's problem description, e.g. a `LinearCompressionProblem`.
      sizes: the problem as text.
      implementation: one of `IMPLEMENTATIONS`.
      config: the kernel's configuration; None if XLA runs the op.
      reason: why this implementation was chosen, and where the configuration comes from.
      backward: which implementation computes the gradient, and why.
    """

    op: str
    problem: Any
    sizes: str
    implementation: str
    config: Any
    reason: str
    backward: str = "XLA, at user and candidate batch size"

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.sizes}", f"  implementation: {self.implementation}"]
        if self.config is not None:
            lines.append(f"  config: {self.config}")
        return "\n".join([*lines, f"  reason: {self.reason}", f"  gradient: {self.backward}"])


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is None or known."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = ", ".join(["None", *map(repr, IMPLEMENTATIONS)])
        raise ValueError(f"unknown implementation {implementation!r}; known: {known}")


def check_array(name: str, array: object, axes: str) -> None:
    """Raises ValueError unless `array` has the rank of `axes`, e.g. "[M, K]", and a known dtype."""
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(f"{name} must be an array of shape {axes}, but is {describe(array)}")
    if len(shape) != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}, but has shape {shape}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"{name} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, but is {dtype}")


def check_index(name: str, array: object, rows_name: str, axis: str, rows: int) -> None:
    """Raises ValueError unless `array` is [rows] int32; `rows` is `axis` of array `rows_name`."""
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if dtype != "int32":
        raise ValueError(f"{name} must be an int32 array, but is {describe(array)}")
    if shape != (rows,):
        raise ValueError(f"{name} has shape {shape} but {rows_name} has {axis}={rows}")


def describe(value: object) -> str:
    """Text for an error message: dtype and shape of an array, the type of any other value."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def finite_number(name: str, value: Any) -> float:
    """Returns `value` as a float; it must be a number that is finite in float32.

    Raises ValueError, quoting the value, for a bool, text, an array of rank above 0, a traced
    value, NaN, an infinity, and a number beyond float32's range.
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_number = hasattr(value, "__float__") and shape == () and str(dtype) != "bool"
    try:
        if isinstance(value, bool) or not is_number:
            raise TypeError(f"{type(value).__name__} is not a number")
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    except (TypeError, ValueError) as error:
        # `float` of a traced value raises one of these as well.
        is_plain = isinstance(value, (bool, str, bytes, np.bool_))
        what = f"{describe(value)}, {value!r:.80}" if is_plain else describe(value)
        raise ValueError(f"{name} must be a number known while tracing, but is {what}") from error
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.float32(number)))
    if not is_finite:
        beyond = ", beyond float32" if math.isfinite(number) else ""
        raise ValueError(f"{name} must be a finite number, but is {number}{beyond}")
    return number


@dataclasses.dataclass(frozen=True)
class Request:
    """The op's name, and the caller's arguments `implementation` and `config`."""

    op: str
    implementation: str | None
    config: Any


def choose(request: Request, problem: Any) -> Plan:
    """Decides how `problem` runs here; raises NotImplementedError if it cannot run as requested."""
    plan = functools.partial(Plan, request.op, problem, problem.describe())
    if request.implementation == "xla":
        return plan("xla", None, "requested by the caller")
    config, reason = _kernel_config(request, problem)
    if config is not None:
        return plan("mosaic_gpu", config, reason)
    if request.implementation == "mosaic_gpu":
        raise NotImplementedError(f"{request.op} with implementation='mosaic_gpu': {reason}")
    logger.debug("%s runs in XLA: %s", request.op, reason)
    return plan("xla", None, reason)


def _kernel_config(request: Request, problem: Any) -> tuple[Any, str]:
    """The kernel's configuration and its origin; or None and the reason to run in XLA."""
    if reason := hopper_unavailable_reason():
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
        choice = table.lookup(problem)
        config, reason = choice.config, choice.reason + _other_device(choice.reason)
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
}


def _symbolic_sizes(problem: Any) -> list[tuple[str, Any]]:
    """Names and values of a problem's sizes that are symbolic dimensions of `jax.export`."""
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
    return jax.export.is_symbolic_dim(size)


def check_concrete(op: str, sizes: dict[str, Any]) -> None:
    """Raises NotImplementedError if one of `sizes`, keyed by axis, is a symbolic dimension."""
    for axis, size in sizes.items():
        if is_symbolic(size):
            raise NotImplementedError(
                f"{op}: {axis} is symbolic ({str(size)!r}), but every implementation needs it "
                f"concrete; export with a concrete {axis}"
            )


def _other_device(reason: str) -> str:
    """A suffix for a reason that quotes a row measured on another GPU model; else empty."""
    device_kind = str(getattr(default_device(), "device_kind", ""))
    measured = re.search(r"\((?P<device>[^(),]*(?:GPU|NVIDIA)[^(),]*), \d{4}-", reason)
    if measured is None or not device_kind or measured["device"] == device_kind:
        return ""
    return f"; measured on an {_model(measured['device'])}; this is an {_model(device_kind)}"


def _model(device_kind: str) -> str:
    """`H100` for `NVIDIA H100 80GB HBM3`; a name that does not fit this pattern as it is."""
    found = re.search(r"\b[A-Z]+\d+\w*\b", device_kind.removeprefix("NVIDIA "))
    return found[0] if found else device_kind


def map_sequentially(fn: Callable[..., Any], batched: Any, arguments: Any) -> Any:
    """vmap as a loop, which needs the memory of one problem.

    Args:
      fn: takes a tree like `arguments` without batch axes.
      batched: a tree of bools with the structure of `arguments`: which arrays have a leading batch
        axis.
      arguments: a tree of arrays.

    Returns:
      The results of `fn`, stacked along a leading axis.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)

    def call_slice(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        pairs = zip(leaves, flags, strict=True)
        return fn(jax.tree.unflatten(treedef, [next(rest) if b else x for x, b in pairs]))

    return jax.lax.map(call_slice, [x for x, b in zip(leaves, flags, strict=True) if b])


def vary_over_same_axes(arrays: Any) -> Any:
    """Inside `shard_map`, marks every array as varying over all mesh axes that one varies over.

    `shard_map` requires a gradient to vary over the same axes as its input, but the gradient of a
    replicated array differs between shards. The transpose of this cast sums it over the shards.
    """

    def varying(x: jax.Array) -> frozenset[str]:
        axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
        return axes

    all_axes = frozenset().union(*map(varying, jax.tree.leaves(arrays)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(all_axes - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def default_device() -> jax.Device:
    """The device that new computations run on: `jax.default_device` if set, else the first one.

    The choice is made while tracing, when arrays have no device. To run on the CPU of a machine
    that has a GPU, set `jax.default_device` or pass `implementation="xla"`.
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
        # Imported here because it takes 0.3 s, and a machine without a GPU never needs it.
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"jax {jax.__version__} has no Pallas Mosaic GPU: {error}"
    return None


def num_sms() -> int:
    """Number of streaming multiprocessors of the default device; 1 if it has none."""
    return int(getattr(default_device(), "core_count", 1))


# The identity on an array, with the plan as a parameter. It lowers to no instruction. Unlike a
# name, or a registry outside the jaxpr, it survives jit's caches, differentiation, vmap and control
# flow.
plan_p = Primitive("ikbo_plan")
plan_p.def_impl(lambda x, *, plan: x)
plan_p.def_abstract_eval(lambda x, *, plan: x)
mlir.register_lowering(plan_p, lambda ctx, x, *, plan: [x])
batching.primitive_batchers[plan_p] = lambda args, dims, *, plan: (
    plan_p.bind(*args, plan=plan),
    dims[0],
)


def record(result: jax.Array, plan: Plan) -> jax.Array:
    """Returns `result`; stores in the jaxpr that `plan` computed it."""
    marked: jax.Array = plan_p.bind(result, plan=plan)
    return marked

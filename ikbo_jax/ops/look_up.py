"""Lookups of users' rows and segment sums, each the other's gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments, dispatch
from ikbo_jax.ops.op import Call, Gradient, Named, Op, Part, Pulled
from ikbo_jax.ops.partition import Division, dimensions
from ikbo_jax.ops.sharded import run_kernel, zeros
from ikbo_jax.ops.stacking import own_index, unstack
from ikbo_jax.problems.look_up import LookUpProblem, RowsProblem, SegmentSumProblem
from ikbo_jax.reference import look_up as reference


class RowArrays(NamedTuple):
    """Holds users' or candidates' rows and the index, their gradients or their names."""

    rows: Any
    cand_to_user: Any


def look_up(
    user: jax.Array,
    cand_to_user: jax.Array,
    *,
    indices_are_sorted: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Looks up the row of each candidate's user, with an exact and fast gradient.

        out[b] = user[cand_to_user[b]]

    Args:
      user: [U, ...], bfloat16, float16 or float32; U users, at least 1 if B > 0.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order. Values
        outside the range are clamped to it; `ikbo_jax.debug.check_index` finds them.
      indices_are_sorted: whether `cand_to_user` never decreases, so that the gradient need not
        sort. If that is wrong, the gradient is unspecified.
      implementation: None takes the fastest that can run these sizes on the default device, or,
        without a GPU, where the program is lowered for (`ikbo_jax.export_target`); "mosaic_gpu"
        (Hopper) or "xla" take that one, for the gradient, too, or raise.

    Returns:
      [B, ...] in the dtype of `user`. Differentiable in reverse mode, any number of times: the
      gradient is `segment_sum` of the cotangents.

    Raises:
      ValueError: `user` is a scalar or of another dtype; the index has another shape or dtype;
        U = 0 with B > 0; `indices_are_sorted` is not a bool; `implementation` is unknown.
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run on this device or
        with these sizes; forward-mode differentiation. The message says why.
    """
    arrays = RowArrays(user, cand_to_user)
    request = arguments.request("look_up", implementation, None, arrays)
    _check_rows("user", user, "U")
    arguments.check_int32("cand_to_user", cand_to_user)
    if cand_to_user.ndim != 1:
        raise ValueError(f"cand_to_user must have shape [B], but has shape {cand_to_user.shape}")
    batch = cand_to_user.shape[0]
    if batch and not user.shape[0]:
        raise ValueError(f"user has no rows, shape {user.shape}, but cand_to_user has B={batch}")
    is_sorted = arguments.flag("indices_are_sorted", indices_are_sorted)
    call = _Call(request, user.shape[0], is_sorted)
    return _LOOK_UP.planned(call, arrays, (batch, *user.shape[1:]), user.dtype)


def segment_sum(
    values: jax.Array,
    cand_to_user: jax.Array,
    num_users: int,
    *,
    indices_are_sorted: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Sums the rows of each user's candidates: the transpose of `look_up`.

        out[u] = Σ values[b] over the candidates b with cand_to_user[b] = u

    Args:
      values: [B, ...], bfloat16, float16 or float32; B candidates.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order. Values
        outside the range are clamped to it; `ikbo_jax.debug.check_index` finds them.
      num_users: U, at least 1 if B > 0; known while tracing.
      indices_are_sorted: whether `cand_to_user` never decreases, so that nothing is sorted. If that
        is wrong, the sums are unspecified.
      implementation: as in `look_up`.

    Returns:
      [U, ...] in the dtype of `values`. Sums are f32, in an order that is the same in every run,
      and rounded once; a user without candidates has zeros. Differentiable in reverse mode, any
      number of times: the gradient is `look_up` of the cotangents.

    Raises:
      ValueError: `values` is a scalar or of another dtype; the index has another shape or dtype;
        `num_users` is no integer, below 0, or 0 with B > 0; `indices_are_sorted` is not a bool;
        `implementation` is unknown.
      NotImplementedError: as for `look_up`.
    """
    arrays = RowArrays(values, cand_to_user)
    request = arguments.request("segment_sum", implementation, None, arrays)
    _check_rows("values", values, "B")
    arguments.check_index("cand_to_user", cand_to_user, "values", "B", values.shape[0])
    users = _number_of_users(num_users)
    if not users and values.shape[0]:
        raise ValueError(f"num_users is 0, but values has B={values.shape[0]}")
    is_sorted = arguments.flag("indices_are_sorted", indices_are_sorted)
    call = _Call(request, users, is_sorted)
    if 0 in values.shape:
        nothing = zeros((users, *values.shape[1:]), values.dtype, arrays)
        return dispatch.record_nothing(nothing, _SEGMENT_SUM.plan(call, arrays))
    return _SEGMENT_SUM.planned(call, arrays, (users, *values.shape[1:]), values.dtype)


def sum_rows(
    request: dispatch.Request, values: jax.Array, cand_to_user: jax.Array, num_users: int
) -> jax.Array:
    """Computes `segment_sum` for the gradient of a call with this request, in f32."""
    arrays = RowArrays(values, cand_to_user)
    call = _Call(request, num_users, False, dtype="float32").on_kernel(SegmentSumProblem, arrays)
    return SEGMENT_SUM.differentiable(call, arrays)


def _check_rows(name: str, array: Any, axis: str) -> None:
    rank = len(getattr(array, "shape", ())) or 2
    arguments.check_array(name, array, f"[{', '.join([axis, *('...',) * (rank - 1)])}]")


def _number_of_users(value: Any) -> Any:
    """Returns `value`; raises ValueError unless it is an int32 of at least 0, or symbolic."""
    if dispatch.is_symbolic(value):
        return value
    if (number := integer("num_users", value)) >= 2**31:
        raise ValueError(f"num_users must be below 2**31, but is {number}")
    return number


@dataclasses.dataclass(frozen=True)
class _Call(Call):
    """Holds the arguments that are not arrays."""

    users: Any
    is_sorted: bool

    def on_kernel(self, kind: type[RowsProblem], arrays: Any) -> _Call:
        """Returns the call with the kernel's configuration for these arrays."""
        config, _ = dispatch.gradient_config(self.request, self.problem(kind, arrays))
        return dataclasses.replace(self, backward_config=config)

    def problem(self, kind: type[RowsProblem], arrays: Any) -> RowsProblem:
        rows, index = arrays
        sizes = index.shape[0], self.users, math.prod(rows.shape[1:])
        return kind(*sizes, str(rows.dtype), self.is_sorted)


def _look_up(call: _Call, config: Any, arrays: RowArrays) -> jax.Array:
    if config is None:
        return reference.look_up(*arrays)
    from ikbo_jax.pallas.look_up.gather import look_up_kernel

    user, index = arrays
    kernel = functools.partial(look_up_kernel, config=config)
    found: jax.Array = run_kernel(kernel, user.reshape(call.users, -1), index)
    return found.reshape(*index.shape, *user.shape[1:])


def _segment_sum(call: _Call, config: Any, arrays: RowArrays) -> jax.Array:
    values, index = arrays
    dtype = jnp.dtype(call.dtype or values.dtype)
    if config is None:
        sums = reference.segment_sum(values, index, call.users, is_sorted=call.is_sorted)
        return sums.astype(dtype)
    # Imported here because Mosaic GPU takes 0.3 s to import.
    from ikbo_jax.pallas.look_up.sums import segment_sum_kernel

    kernel = functools.partial(
        segment_sum_kernel, users=call.users, config=config, is_sorted=call.is_sorted, dtype=dtype
    )
    found: jax.Array = run_kernel(kernel, values.reshape(index.shape[0], -1), index)
    return found.reshape(call.users, *values.shape[1:])


def _fold(
    kind: type[RowsProblem], call: _Call, size: int, batched: RowArrays, arrays: RowArrays
) -> tuple[_Call, RowArrays] | None:
    """Folds problems into one; None if that would copy values that they share."""
    rows, index = arrays
    if batched.rows:
        index = own_index(size, index, bool(batched.cand_to_user), call.users)
        call = dataclasses.replace(call, users=size * call.users)
        rows = rows.reshape(-1, *rows.shape[2:])
    elif kind is LookUpProblem:  # shared users stay shared
        call, index = dataclasses.replace(call, is_sorted=False), index.reshape(-1)
    else:
        return None
    return call, RowArrays(rows, index)


class _Transposed(Gradient[_Call, RowArrays, jax.Array]):
    """Runs lookups or segment sums as `Op.of_gradient`; each is the other's gradient."""

    def __init__(self, kind: type[RowsProblem], compute: Callable[..., jax.Array]) -> None:
        super().__init__(
            lambda call, arrays: compute(call, call.backward_config, arrays),
            self._batched,
            self._pull_back,
        )
        self.kind, self.compute = kind, compute

    def _batched(self, call: _Call, size: int, batched: Any, arrays: RowArrays) -> jax.Array:
        folded = _fold(self.kind, call, size, batched, arrays) if size else None
        if folded is None:
            return self.one_by_one(call, batched, arrays)
        call, arrays = folded
        return unstack(size, self.vmappable(call.on_kernel(self.kind, arrays), arrays))

    def _pull_back(self, call: _Call, arrays: RowArrays, cotangents: jax.Array) -> tuple[RowArrays]:
        operands = RowArrays(cotangents, arrays.cand_to_user)
        call = dataclasses.replace(call, dtype=str(arrays.rows.dtype))
        found = self.other.differentiable(call.on_kernel(self.other.kind, operands), operands)
        return (RowArrays(found.astype(arrays.rows.dtype), None),)

    @property
    def other(self) -> _Transposed:
        return SEGMENT_SUM if self is LOOK_UP else LOOK_UP


LOOK_UP = _Transposed(LookUpProblem, _look_up)
SEGMENT_SUM = _Transposed(SegmentSumProblem, _segment_sum)


class _Rows(Op[_Call, RowArrays, jax.Array]):
    """Implements what both ops share."""

    way: _Transposed
    name, is_gradient_apart = "_user_rows", True

    def choose_gradient(self, request: dispatch.Request, problem: RowsProblem) -> tuple[Any, str]:
        return dispatch.gradient_config(request, self.way.other.kind.of(problem))

    def run(self, call: _Call, plan: dispatch.Plan, arrays: RowArrays) -> jax.Array:
        return dispatch.record(self.way.compute(call, plan.config, arrays), plan)

    def fold(self, call: _Call, size: int, batched: Any, arrays: RowArrays) -> Any:
        return _fold(self.way.kind, call, size, batched, arrays)

    def problem(self, call: _Call, arrays: RowArrays) -> RowsProblem:
        return call.problem(self.way.kind, arrays)

    def named(self, call: _Call, arrays: RowArrays) -> Named:
        axes = [f"x{i}" for i in range(1, arrays.rows.ndim)]
        user, candidate = (" ".join([first, *axes]) for first in "ub")
        split = {"b": "candidates", **{axis: f"axis {axis[1:]}" for axis in axes}}
        if self.way is SEGMENT_SUM:
            user, candidate = candidate, user
        return Named(RowArrays(user, "b"), candidate, split)

    def vjp(self, call: _Call, plan: dispatch.Plan, of: Pulled[RowArrays, jax.Array]) -> RowArrays:
        operands = RowArrays(of.cotangents, of.arrays.cand_to_user)
        found = self.way.other.differentiable(self.of_gradient(call, plan, of), operands)
        return RowArrays(found, None)


class _LookUp(_Rows):
    way = LOOK_UP
    by_kernels, by_xla = "segment_sum by mosaic_gpu", "segment_sum by XLA"


class _SegmentSum(_Rows):
    way = SEGMENT_SUM
    by_kernels, by_xla = "look_up by mosaic_gpu", "look_up by XLA"

    def part(
        self, call: _Call, arrays: RowArrays, division: Division
    ) -> Part[_Call, RowArrays, jax.Array]:
        # Partial sums stay in f32, so that each sum is rounded once.
        dtype = "float32" if division.axes_of("b") else call.dtype
        return Part(dataclasses.replace(call, dtype=dtype), arrays)

    def joined(
        self, results: jax.Array, named: Named, arrays: RowArrays, division: Division
    ) -> jax.Array:
        return division.sum(results, dimensions(named.results)).astype(arrays.rows.dtype)


_LOOK_UP, _SEGMENT_SUM = _LookUp(), _SegmentSum()

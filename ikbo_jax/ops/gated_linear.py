"""The linear layer after attention: norm, gate, product, residual."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from ikbo_jax.ops import arguments, dispatch
from ikbo_jax.ops.norm_linear import LinearCall, LinearOp, check_norm, check_vector, rounded
from ikbo_jax.ops.op import Named, Part, Pulled
from ikbo_jax.ops.partition import Division
from ikbo_jax.ops.sharded import run_kernel
from ikbo_jax.problems.norm_linear import NO_NORM, GatedLinearProblem
from ikbo_jax.reference import norm_linear as reference
from ikbo_jax.reference.norm_linear import Gate, GatedLinear


def gated_linear(
    u: jax.Array | None,
    a: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    shared_residual: jax.Array | None = None,
    *,
    concat: bool = False,
    norm: str | None = "layer",
    by_head: bool = False,
    norm_scale: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    eps: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Normalises rows `a`, multiplies them by a gate `u` and by a weight, and adds a residual.

        out = [u, a, u · norm(a)] · weight + residual, or (u · norm(a)) · weight + residual

    Args:
      u: [rows, N, H] or [rows, C], bfloat16, float16 or float32; C = N · H. None: 1, for layers
        without a gate, such as an attention's output.
      a: the same shape and dtype, such as the result of `gdpa`.
      weight: [3 · C, F] with `concat`, else [C, F], same dtype.
      residual: [rows, F], same dtype; None: 0.
      shared_residual: [groups, F], same dtype: each of its rows is added to rows / groups rows, one
        after another, such as all rows of a candidate; None: 0.
      concat: whether the rows that are multiplied hold `u` and `a`, too.
      norm: "layer" or "rms", as in `norm_linear`; None: norm(a) is a.
      by_head: whether the H columns of a head are normalised on their own (a group norm), not all
        columns of a row.
      norm_scale: [C], or with `by_head` [N]; bfloat16, float16 or float32; None: 1.
      norm_bias: likewise; None: 0.
      eps: normal float32 number above 0, added to the variance or to the mean of the squares.
      dropout_rate: share in [0, 1) of the numbers of [u, a, u · norm(a)] that become 0 before they
        are multiplied; the others are divided by 1 − dropout_rate.
      dropout_key: key of `jax.random`; None: nothing is dropped. One key drops the same numbers in
        every call, however rows are divided over devices.
      implementation: None takes the fastest that can run here; "mosaic_gpu" takes the kernel, on a
        Hopper GPU in bfloat16 or float16, without dropout; "xla" takes XLA.

    Returns:
      [rows, F] in the inputs' dtype. Norm, gate and sums are f32; the rows that are multiplied are
      rounded to the inputs' dtype before, and the result is rounded once. Without `u`, the kernel
      multiplies rows as they are, and their products by what the norm multiplies rows by.
      Differentiable in reverse mode, any number of times; gradients are summed in f32, in one
      order, and rounded once. Their rows are computed again: no memory holds [u, a, u · norm(a)].
      The cotangent of these rows is rounded to the inputs' dtype, as in plain jnp, unless devices
      divide F.

    Raises:
      ValueError: a rank, size or dtype is wrong; a flag is not a bool; rows have no heads, but
        `by_head` is set; `norm` is unknown; `eps` is not a normal float32 number above 0;
        `dropout_rate` is not in [0, 1); `dropout_key` is no key; `implementation` is unknown.
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run here or does not
        take the sizes or dropout; forward-mode differentiation.

    Source: the output of HSTU (Zhai et al., 2024), as Meta's generative-recommenders publish it.
    """
    rate = arguments.finite_number("dropout_rate", dropout_rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), but is {rate}")
    arrays = GatedLinear(u, a, norm_scale, norm_bias, weight, residual, None, shared_residual)
    request = arguments.request("gated_linear", implementation, None, arrays)
    is_concat = arguments.flag("concat", concat)
    groups = _check(arrays, is_concat, arguments.flag("by_head", by_head))
    if a.shape[0] == 0:
        arrays = arrays._replace(shared=None)
    if dropout_key is not None and rate:
        try:
            words = jax.random.bits(dropout_key, (2,), jnp.uint32)
        except (TypeError, ValueError):
            found = arguments.describe(dropout_key)
            raise ValueError(f"dropout_key must be one key of jax.random, but is {found}") from None
        arrays = arrays._replace(seed=jnp.pad(words, (0, 1)))
    kinds = (*reference.NORMS, None)
    call = _Call(request, Gate(check_norm(norm, eps, kinds), groups, is_concat, rate))
    return _OP.planned(call, arrays, (a.shape[0], weight.shape[1]), a.dtype)


def _check(arrays: GatedLinear, concat: bool, by_head: bool) -> int:
    """Returns the number of groups that are normalised on their own.

    Raises ValueError, quoting both conflicting values, unless the arrays agree.
    """
    u, a, scale, bias, weight, residual, _, shared = arrays
    rank = len(getattr(a, "shape", ()))
    axes = "[rows, C]" if rank == 2 else "[rows, N, H]"
    rest = ("residual", residual, "[rows, F]"), ("shared_residual", shared, "[groups, F]")
    optional = [x for x in (("u", u, axes), *rest) if x[1] is not None]
    needed = ("a", a, axes), ("weight", weight, "[3 · C, F]" if concat else "[C, F]")
    for name, array, wanted in (*needed, *optional):
        arguments.check_array(name, array, wanted, ("a", a))
    if u is None and concat:
        raise ValueError("concat needs u, but u is None")
    if u is not None and u.shape != a.shape:
        raise ValueError(f"u has shape {u.shape} but a has shape {a.shape}")
    if by_head and rank != 3:
        raise ValueError(f"by_head needs a of shape [rows, N, H], but a has shape {a.shape}")
    sizes = zip(axes.strip("[]").split(", "), a.shape, strict=True)
    arguments.check_concrete("gated_linear", dict(list(sizes)[1:]))
    columns = math.prod(a.shape[1:])
    if not columns:
        raise ValueError(f"a must have columns, but has shape {a.shape}")
    groups = a.shape[1] if by_head else 1
    found = f"a has N={groups}" if by_head else f"a has C={columns}"
    for name, vector in (("norm_scale", scale), ("norm_bias", bias)):
        check_vector(name, vector, (groups if by_head else columns,), found)
    wanted = 3 * columns if concat else columns
    if weight.shape[0] != wanted:
        raise ValueError(
            f"weight has shape {weight.shape} but a has C={columns}, which needs {wanted} rows "
            f"with concat={concat}"
        )
    shape = a.shape[0], weight.shape[1]
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {residual.shape} but the result has {shape}")
    if shared is not None:  # groups may be symbolic; 0 of them divide 0 rows
        rest = shape[0] if shared.shape[0] == 0 else shape[0] % shared.shape[0]
        if shared.shape[1:] != shape[1:] or rest != 0:
            shapes = f"{shared.shape} but the result has {shape}"
            raise ValueError(f"shared_residual has shape {shapes}: groups must divide rows")
    return int(groups)


@dataclasses.dataclass(frozen=True)
class _Call(LinearCall):
    """The arguments that are not arrays."""

    gate: Gate


class _GatedLinear(LinearOp[_Call, GatedLinear, jax.Array]):
    name, columns = "_gated_linear", "f"

    def problem(self, call: _Call, arrays: GatedLinear) -> GatedLinearProblem:
        gate, a = call.gate, arrays.a
        has_dropout = arrays.seed is not None
        details = "norm(a)" if arrays.u is None else "u · norm(a)"
        details = "[u, a, u · norm(a)]" if gate.concat else details
        details += f", {gate.groups} groups" if gate.groups > 1 else ""
        details += ", dropout" if has_dropout else ""
        columns = (math.prod(a.shape[1:]),)
        sizes = a.shape[0], arrays.weight.shape[1], columns
        has_factors = arrays.norm_scale is not None or arrays.norm_bias is not None
        shared_rows = 0 if arrays.shared is None else a.shape[0] // arrays.shared.shape[0]
        kind, is_plain = gate.norm.kind or NO_NORM, arrays.u is None
        options = gate.groups, gate.concat, has_dropout
        plain = is_plain, has_factors, shared_rows
        return GatedLinearProblem(*sizes, kind, str(a.dtype), details, *options, *plain)

    def run(self, call: _Call, plan: dispatch.Plan, arrays: GatedLinear) -> jax.Array:
        if plan.implementation == "xla":
            return dispatch.record(reference.gated_linear(call.gate, arrays), plan)
        # Imported here because Mosaic GPU takes 0.3 s to import.
        from ikbo_jax.pallas.linear.gated_linear import gated_linear_kernel

        launch = functools.partial(
            gated_linear_kernel, gate=call.gate, config=plan.config, num_sms=call.request.num_sms
        )
        return dispatch.record(run_kernel(launch, arrays), plan)

    def fold(
        self, call: _Call, size: int, batched: GatedLinear, arrays: GatedLinear
    ) -> tuple[_Call, GatedLinear] | None:
        """Folds rows that have their own gate; not with dropout, which is alike in all problems."""
        names = ("u", "a", "residual", "shared")
        rows = {name: x for name in names if (x := getattr(arrays, name)) is not None}
        if arrays.seed is not None or batched._asdict() != {
            name: None if x is None else name in names for name, x in arrays._asdict().items()
        }:
            return None
        folded = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}
        return call, arrays._replace(**folded)

    def named(self, call: _Call, arrays: GatedLinear) -> Named:
        # Rows of a row of the shared residual stay together.
        row = "r" if arrays.shared is None else "(r t)"
        rows, out = f"{row} n h" if arrays.a.ndim == 3 else f"{row} c", f"{row} f"
        names = GatedLinear._make((rows, rows, "s", "s", "k f", out, "words", "r f"))
        return Named(names, out, {"r": "rows", "f": "columns"})

    def part(
        self, call: _Call, arrays: GatedLinear, division: Division
    ) -> Part[_Call, GatedLinear, jax.Array]:
        """Tells a device the number of its first row, from which dropout follows."""
        part, axes = super().part(call, arrays, division), division.axes_of("r")
        if arrays.seed is None or not axes:
            return part
        first = jax.lax.axis_index(axes) * arrays.a.shape[0]
        seed = arrays.seed.at[2].add(first.astype(jnp.uint32))
        return part._replace(arrays=arrays._replace(seed=seed))

    def vjp(
        self, call: _Call, plan: dispatch.Plan, of: Pulled[GatedLinear, jax.Array]
    ) -> GatedLinear:
        gradients = reference.gated_linear_vjp(
            call.gate, of.arrays, of.cotangents, call.cotangent_dtype(of.arrays.a)
        )
        return rounded(gradients, of.arrays._replace(seed=None), of.dtype)


_OP = _GatedLinear()

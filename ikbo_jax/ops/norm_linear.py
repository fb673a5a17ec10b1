"""The linear layer before attention: norm, product, activation by group of columns."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.ops import arguments, dispatch, reverse_only
from ikbo_jax.ops.op import Call, Named, Op, Part, Pulled
from ikbo_jax.ops.partition import Division
from ikbo_jax.ops.sharded import run_kernel, zeros
from ikbo_jax.problems.norm_linear import NormLinearProblem
from ikbo_jax.problems.problem import ranked
from ikbo_jax.reference import norm_linear as reference
from ikbo_jax.reference.activations import ACTIVATIONS, SOFTMAX
from ikbo_jax.reference.norm_linear import Norm, NormLinear, Projected


def norm_linear(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None] | None = None,
    *,
    activations: Sequence[str] | None = None,
    norm: str = "layer",
    norm_scale: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    eps: float = 1e-6,
    recompute: Sequence[str] = (),
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Normalises rows, multiplies them by the weights of groups of columns, and activates these.

        out[g] = activation[g](norm(x) · weights[g] + biases[g])

    with norm(x) = norm_scale · (x − mean) / √(variance + eps) + norm_bias over every row, or for
    "rms" norm_scale · x / √(mean of x² + eps) + norm_bias. Every group has its own layout, such as
    the queries, keys and values that `gdpa` reads.

    Args:
      x: [rows, F], bfloat16, float16 or float32.
      weights: a weight for each group, [F, N, H] or [F, columns], in the dtype of `x`.
      biases: a bias or None for each group, [N, H] or [columns]; None: there are none. These, norm
        scale and norm bias may be bfloat16, float16 or float32.
      activations: a name for each group, one of `gdpa`'s activations except "softmax"; None:
        "identity" for all.
      norm: "layer" or "rms".
      norm_scale: [F]; None: 1.
      norm_bias: [F]; None: 0.
      eps: normal float32 number above 0, added to the variance or to the mean of the squares.
      recompute: what the gradient computes again, so that no memory holds it: "projection", the
        groups before an activation other than "identity", by their product; "norm", the normalised
        rows: they always are, since to keep them would move as many bytes.
      implementation: None takes the fastest that can run here; "mosaic_gpu" takes the kernel, on a
        Hopper GPU in bfloat16 or float16; "xla" takes XLA.

    Returns:
      A tuple with the result of each group, [rows, N, H] or [rows, columns], in the dtype of `x`.
      Norm, sums and activations are f32; normalised rows are rounded to the dtype of `x` before
      they are multiplied, and results are rounded once. Differentiable in reverse mode, any number
      of times; gradients are summed in f32, in one order, and rounded once. The cotangent of the
      normalised rows is rounded to the dtype of `x`, as in plain jnp, unless devices divide
      columns.

    Raises:
      ValueError: a rank, size or dtype is wrong; the numbers of weights, biases and activations
        differ, or there is no weight; an activation, the norm or a name in `recompute` is unknown;
        `eps` is not a normal float32 number above 0; `implementation` is unknown.
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run here or does not
        take the sizes; forward-mode differentiation.

    Source: the projection of HSTU (Zhai et al., 2024) and of pre-norm transformers.
    """
    weights = _of_groups("weights", weights)
    biases = (None,) * len(weights) if biases is None else _of_groups("biases", biases)
    known = ("identity",) * len(weights)
    activations = known if activations is None else _of_groups("activations", activations)
    arrays = NormLinear(x, norm_scale, norm_bias, weights, biases)
    request = arguments.request("norm_linear", implementation, None, arrays)
    _check(arrays, activations)
    call = _Call(request, check_norm(norm, eps), activations, check_recompute(recompute))
    plan = _OP.plan(call, arrays)
    shapes = [(x.shape[0], *weight.shape[1:]) for weight in weights]
    if not x.shape[0]:
        nothing = tuple(zeros(shape, x.dtype, arrays) for shape in shapes)
        return (dispatch.record_nothing(nothing[0], plan), *nothing[1:])
    return _OP.jitted(call, plan, reverse_only.operands("norm_linear", arrays)).out


def kernel_is_first(*sizes: Any) -> bool:
    """Whether the kernel is the first choice for a problem with these fields, where it can run."""
    return any(x.config is not None for x in ranked(NormLinearProblem(*sizes))[:1])


def _of_groups(name: str, values: Any) -> tuple[Any, ...]:
    """Returns the values as a tuple; raises ValueError for one array or name in their place."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(
            f"{name} must be a sequence with an entry a group, but is {arguments.describe(values)}"
        )
    return tuple(values)


def check_norm(kind: Any, eps: Any, kinds: tuple[Any, ...] = reference.NORMS) -> Norm:
    """Returns the options of a norm; raises ValueError, quoting the value, if one is wrong."""
    arguments.check_name("norm", kind, kinds)
    number = arguments.finite_number("eps", eps)
    if number <= 0:
        raise ValueError(f"eps must be above 0 in float32, but is {eps}")
    return Norm(kind, number)


def check_vector(name: str, array: Any, shape: tuple[int, ...], of: str) -> None:
    """Raises ValueError, naming both shapes, unless `array` is None or a float array of `shape`."""
    if array is None:
        return
    arguments.check_array(name, array, f"[{', '.join(map(str, shape))}]")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape} but {of}")


def _check(arrays: NormLinear, activations: tuple[Any, ...]) -> None:
    """Raises ValueError, quoting both conflicting values, unless arrays and activations agree."""
    x, scale, bias, weights, biases = arrays
    arguments.check_array("x", x, "[rows, F]")
    if not weights or not len(weights) == len(biases) == len(activations):
        raise ValueError(
            "every group needs a weight, a bias or None, and an activation, but there are "
            f"{len(weights)} weights, {len(biases)} biases and {len(activations)} activations"
        )
    features = x.shape[1]
    arguments.check_concrete("norm_linear", {"F": features})
    for name, vector in (("norm_scale", scale), ("norm_bias", bias)):
        check_vector(name, vector, (features,), f"x has F={features}")
    for g, (weight, bias, activation) in enumerate(zip(weights, biases, activations, strict=True)):
        name, rank = f"weights[{g}]", len(getattr(weight, "shape", ()))
        arguments.check_array(name, weight, "[F, columns]" if rank == 2 else "[F, N, H]", ("x", x))
        if weight.shape[0] != features:
            raise ValueError(f"x has F={features} but {name} has F={weight.shape[0]}")
        if 0 in weight.shape:
            raise ValueError(f"{name} must have no size of 0, but has shape {weight.shape}")
        of = f"{name} has shape {weight.shape}"
        check_vector(f"biases[{g}]", bias, weight.shape[1:], of)
        known = (name for name in ACTIVATIONS if name != SOFTMAX)
        arguments.check_name("activation", activation, known, f" of group {g}")


def check_recompute(names: Any) -> tuple[str, ...]:
    """Returns the names as a tuple; raises ValueError, quoting the name, if one is unknown."""
    if not isinstance(names, str | Iterable):
        raise ValueError(f"recompute must hold names, but is {arguments.describe(names)}")
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not isinstance(name, str) or name not in reference.RECOMPUTABLE:
            known = ", ".join(map(repr, reference.RECOMPUTABLE))
            raise ValueError(f"recompute has the unknown name {name!r:.80}; known: {known}")
    return names


@dataclasses.dataclass(frozen=True)
class LinearCall(Call):
    """The arguments of both linear layers.

    `is_divided`: whether devices have columns of the weights, so that gradients of rows are summed
    over devices.
    """

    is_divided: bool = dataclasses.field(default=False, kw_only=True)

    def cotangent_dtype(self, like: Any) -> Any:
        """Returns the dtype of the cotangent of multiplied rows: f32 if it is still to be summed.

        Otherwise it is rounded as a product in plain jnp is, which halves its bytes.
        """
        return jnp.float32 if self.is_divided else like.dtype


@dataclasses.dataclass(frozen=True)
class _Call(LinearCall):
    """The arguments that are not arrays."""

    norm: Norm
    activations: tuple[str, ...]
    recompute: tuple[str, ...]


class LinearOp[C: LinearCall, A, R](Op[C, A, R]):
    """A linear layer; `columns` is the dimension of its weights that divides over devices."""

    by_xla = "XLA"
    columns: str

    def choose_gradient(self, request: dispatch.Request, problem: Any) -> tuple[None, str]:
        return None, "the gradient has no kernel"

    def part(self, call: C, arrays: A, division: Division) -> Part[C, A, R]:
        is_divided = bool(division.axes_of(self.columns))
        return Part(dataclasses.replace(call, is_divided=is_divided), arrays)


class _NormLinear(LinearOp[_Call, NormLinear, Projected]):
    name, result_names, columns = "_norm_linear", Projected._fields, "n"

    def problem(self, call: _Call, arrays: NormLinear) -> NormLinearProblem:
        (rows, features), dtype = arrays.x.shape, str(arrays.x.dtype)
        columns = tuple(math.prod(weight.shape[1:]) for weight in arrays.weights)
        details = "+".join(call.activations)
        return NormLinearProblem(rows, features, columns, str(call.norm.kind), dtype, details)

    def run(self, call: _Call, plan: dispatch.Plan, arrays: NormLinear) -> Projected:
        has_projection = call.return_residuals and "projection" not in call.recompute
        if plan.implementation == "xla":
            found = reference.norm_linear(call.norm, call.activations, has_projection, arrays)
        else:
            # Imported here because Mosaic GPU takes 0.3 s to import.
            from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel

            launch = functools.partial(
                norm_linear_kernel,
                norm=call.norm,
                activations=call.activations,
                has_projection=has_projection,
                config=plan.config,
                num_sms=call.request.num_sms,
            )
            found = Projected(*run_kernel(launch, *arrays))
        first, *rest = found.out
        return found._replace(out=(dispatch.record(first, plan), *rest))

    def visible(self, call: _Call, results: Projected) -> Projected:
        return results if call.return_residuals else Projected(results.out)

    def residuals(self, results: Projected) -> Projected:
        return results._replace(out=())

    def fold(
        self, call: _Call, size: int, batched: NormLinear, arrays: NormLinear
    ) -> tuple[_Call, NormLinear] | None:
        if not batched.x or any(jax.tree.leaves(batched[1:])):
            return None
        return call, arrays._replace(x=arrays.x.reshape(-1, arrays.x.shape[2]))

    def named(self, call: _Call, arrays: NormLinear) -> Named:
        """Names dimensions; "n" are heads, or columns, which divide if all groups have as many."""
        tails = [[f"n{g}", f"h{g}"][: w.ndim - 1] for g, w in enumerate(arrays.weights)]
        is_even = len({w.shape[1] for w in arrays.weights}) == 1
        tails = [["n", *tail[1:]] if is_even else tail for tail in tails]
        out = tuple(" ".join(["r", *tail]) for tail in tails)
        weights = tuple(" ".join(["f", *tail]) for tail in tails)
        names = NormLinear("r f", "f", "f", weights, tuple(map(" ".join, tails)))
        results = Projected(out)
        if call.return_residuals:
            activated = zip(call.activations, out, strict=True)
            kept = tuple(None if name == "identity" else dims for name, dims in activated)
            results = Projected(out, None if "projection" in call.recompute else kept)
        return Named(names, results, {"r": "rows"} | ({"n": "columns"} if is_even else {}))

    def vjp(
        self, call: _Call, plan: dispatch.Plan, of: Pulled[NormLinear, Projected]
    ) -> NormLinear:
        gradients = reference.norm_linear_vjp(
            call.norm, call.activations, *of[:3], call.cotangent_dtype(of.arrays.x)
        )
        return rounded(gradients, of.arrays, of.dtype)


def rounded[A](gradients: A, arrays: A, dtype: Any) -> A:
    """Rounds f32 gradients to `dtype`, or if it is None, to the dtypes of the arrays."""
    return jax.tree.map(lambda x, like: x.astype(dtype or like.dtype), gradients, arrays)


_OP = _NormLinear()

"""The rounding rule of `ikbo.rewrite`: how far its results may be from the original program's.

The oracle is the original program, traced at its own dtypes and evaluated in float64. The error of
the original in a row (along the last axis) of a result is the largest of

* the difference of the original from the oracle, each equation rounded as the program says, and
* the differences of three evaluations in float64 in which every equation's result is moved at
  random by up to one rounding of its dtype. An original that happens to be exact has an error, too.
  A softmax's weights are moved besides by up to one float32 rounding of their logit and one of the
  row's largest: attention's gradient recomputes them as exp(logit - lse) from a float32 lse, whose
  rounding does not cancel as in e / sum(e).

The magnitude of a row is the largest sum of |term| of its elements: for values of attention, the
sum of |weight| * |value|. Then

    |rewritten - oracle| <= 2 * error of the original + 4 roundings (16 in f32) * magnitude

in each row of each result and each gradient, and NaN and infinities stand exactly where the
original has them. If the error of the original is over 10 % of the row's magnitude, the program
does not determine the row to its dtype (as a user without keys whose logits are lost beside a fill
of -1e9). The rewritten row must then lie in the interval that the original and the oracle span, or
within 10 % of the magnitude outside of it. If it does not, the interval grows by what the original
computes if only its first n results are rounded, for every n: a rewritten program rounds less
often, and the roundings that it keeps may be those that the others made up for.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from float64_oracle import ROUNDED, Leading, Moved, UnknownPrimitive, evaluate, is_floating
from jax.extend import core

import ikbo_jax as ikbo

ERROR_FACTOR = 2.0
#: Besides the error of the original: f32 functions of XLA on CPUs are off by several roundings.
ROUNDINGS = {"float32": 16, "float64": 16, "bfloat16": 4, "float16": 4}
#: Of the magnitude: a larger error of the original means that it does not determine the row.
UNDETERMINED = 0.1
EVALUATIONS = 3

# XLA may leave out a rounding to 16 bits between two equations, in one of two programs only.
AS_WRITTEN = {"xla_allow_excess_precision": False}


class Case(NamedTuple):
    """A program and its arguments.

    Attributes:
      name: what a failure calls it, in a line or as its text.
      fn: a function of `args` that returns one floating-point array or a tuple of them.
      args: arrays. The derivative is with respect to the floating-point ones.
      spreads_nan: whether the program has products with one-hot vectors, which make all rows NaN
        if one is, also in the gradient. The rewritten program may have numbers there.
      statics: further arguments, which are not traced.
      forward: whether derivatives are in forward mode.
      is_mixed: whether it computes in another dtype than its results'. A gradient that the original
        rounds for each candidate, the rewritten program rounds for each user, so that roundings do
        not average: its own evaluations in float64 count, too.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    spreads_nan: bool = False
    statics: tuple[Any, ...] = ()
    forward: bool = False
    is_mixed: bool = False


def derivative(case: Case, fn: Callable[..., Any]) -> Any:
    """The traced values and derivatives of a function of a case's arguments."""
    make = pushforward if case.forward else pullback
    return jax.make_jaxpr(make(lambda *args: fn(*args, *case.statics), case.args))(*case.args)


def pushforward(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., list[jax.Array]]:
    """A function of `args` that returns values of `fn` and their tangents, flat."""

    def run(*args: Any) -> list[jax.Array]:
        floating = [is_floating(x.dtype) for x in args]
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in args]
        tangents = [
            _cotangent(x) if f else zero for x, f, zero in zip(args, floating, zeros, strict=True)
        ]
        of_leaves = lambda *args: jax.tree.leaves(fn(*args))  # noqa: E731
        values, found = jax.jvp(of_leaves, args, tuple(tangents))
        return [*values, *found]

    return run


def pullback(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., list[jax.Array]]:
    """A function of `args` that returns values of `fn` and its gradients, flat.

    The cotangents are fixed numbers near 1, of both signs.
    """
    floating = [n for n, x in enumerate(args) if is_floating(np.asarray(x).dtype)]

    def run(*args: Any) -> list[jax.Array]:
        def of_floating(*values: Any) -> Any:
            changed = list(args)
            for n, x in zip(floating, values, strict=True):
                changed[n] = x
            return jax.tree.leaves(fn(*changed))

        values, back = jax.vjp(of_floating, *(args[n] for n in floating))
        cotangents = [_cotangent(x) for x in values]
        return [*values, *back(cotangents)]

    return run


def _cotangent(x: jax.Array) -> jax.Array:
    numbers = np.random.default_rng(7).uniform(0.5, 1.5, x.shape)
    numbers *= np.where(np.arange(x.size).reshape(x.shape) % 3 == 1, -1, 1)
    return jnp.asarray(numbers.astype(x.dtype))


@np.errstate(all="ignore")  # A fill of -1e5 overflows float16 while a program is traced.
def faults(cases: Sequence[Case], *, compiled: bool = False) -> dict[str, str]:
    """Which rewritten programs break the rule, by name, and how.

    Args:
      cases: programs, of different names.
      compiled: whether XLA runs them, all as one program, instead of NumPy one by one.
    """
    found: dict[str, str] = {}
    traced: list[tuple[Case, Any, Any]] = []
    for case in cases:
        original = derivative(case, case.fn)
        try:
            rewritten = derivative(case, ikbo.rewrite(case.fn))
        except Exception as error:  # Whatever it is, the original runs.
            found[case.name] = f"raises {type(error).__name__}: {str(error)[:400]}"
        else:
            traced.append((case, original, rewritten))
    results = _compiled(traced) if compiled else [_evaluated(*programs) for programs in traced]
    for (case, original, rewritten), (theirs, ours) in zip(traced, results, strict=True):
        fault = _fault(original, rewritten, case, theirs, ours)
        if fault is not None:
            found[case.name] = fault
    return found


def compared(case: Case, other: Callable[..., Any]) -> str | None:
    """How another function of a case's arguments breaks the rule; None if it does not."""
    original, second = derivative(case, case.fn), derivative(case, other)
    theirs, ours = _evaluated(case, original, second)
    return _fault(original, second, case, theirs, ours)


def _compiled(traced: Sequence[tuple[Case, Any, Any]]) -> Any:
    """Results of originals and of rewritten programs, all compiled as one program."""

    def every(args: Any) -> Any:
        return [
            [core.jaxpr_as_fun(program)(*x) for program in programs]
            for (_, *programs), x in zip(traced, args, strict=True)
        ]

    run = jax.jit(every, compiler_options=AS_WRITTEN)
    results = run([case.args for case, *_ in traced])
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), results)


def _evaluated(case: Case, original: Any, rewritten: Any) -> list[list[np.ndarray]]:
    try:
        return [
            [x for x, _ in evaluate(program, case.args, ROUNDED)]
            for program in (original, rewritten)
        ]
    except UnknownPrimitive:
        (results,) = _compiled([(case, original, rewritten)])
        return results


def _fault(original: Any, rewritten: Any, case: Case, theirs: Any, ours: Any) -> str | None:
    # Of a mesh without Explicit axes, some types of one program name it.
    types = [
        [(x.shape, x.dtype, x.weak_type, x.sharding.spec) for x in program.out_avals]
        for program in (original, rewritten)
    ]
    if types[0] != types[1]:
        return f"results are {types[1]}, not {types[0]}"
    if case.spreads_nan:
        theirs = [np.where(np.isnan(a), b, a) for a, b in zip(theirs, ours, strict=True)]
    args = case.args
    oracle = evaluate(original, args)
    moved = [[x for x, _ in evaluate(original, args, Moved(n))] for n in range(EVALUATIONS)]
    if case.is_mixed:
        exact = [x for x, _ in evaluate(rewritten, args)]
        for n, (x, (want, terms)) in enumerate(zip(exact, oracle, strict=True)):
            if not np.allclose(x, want, rtol=1e-6, atol=1e-6 * np.max(terms)):
                return f"result {n} of {len(theirs)} in float64 is {x}, not {want}"
        for seed in range(4 * EVALUATIONS):
            results = evaluate(rewritten, args, Moved(seed))
            differences = [x - y for (x, _), y in zip(results, exact, strict=True)]
            moved.append([x + d for (x, _), d in zip(oracle, differences, strict=True)])
    for n, aval in enumerate(original.out_avals):
        fault = difference(
            ours[n],
            theirs[n],
            *oracle[n],
            [results[n] for results in moved],
            aval.dtype,
            functools.partial(_partly_rounded, original, args, n),
        )
        if fault is not None:
            return f"result {n} of {len(theirs)} ({aval.str_short()}): {fault}"
    return None


def _partly_rounded(program: Any, args: Any, number: int) -> Iterator[Any]:
    """A result of a program that rounds its first result alone, its first two, and so on."""
    count, used = 0, True
    while used:
        count += 1
        leading = Leading(count)
        yield evaluate(program, args, leading)[number][0]
        used = leading.left < 0


def difference(
    rewritten: np.ndarray,
    original: np.ndarray,
    oracle: np.ndarray,
    magnitude: np.ndarray,
    moved: Sequence[np.ndarray],
    dtype: Any,
    partly_rounded: Callable[[], Iterable[np.ndarray]] = tuple,
) -> str | None:
    """How an array breaks the rule; None if it does not. All but `dtype` in float64."""
    for what, holds in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        if not np.array_equal(holds(rewritten), holds(original)):
            return f"{what} {_at(rewritten, original, holds(rewritten) != holds(original))}"
    finite = np.isfinite(original)
    with np.errstate(all="ignore"):
        # An oracle that is not finite where the original is cannot judge it.
        oracle = np.where(np.isfinite(oracle), oracle, original)
        errors = [np.abs(x - oracle) for x in (original, *moved)]
        error = _largest(np.max(np.where(np.isfinite(errors), errors, 0), axis=0), finite)
        terms = _largest(np.where(np.isfinite(magnitude), magnitude, np.abs(original)), finite)
        info = jnp.finfo(dtype)
        smallest = 4 * float(info.smallest_subnormal if info.bits == 16 else info.tiny)
        rounding = ROUNDINGS[np.dtype(dtype).name] * float(info.eps)
        allowed = ERROR_FACTOR * error + rounding * terms + smallest
        is_off = np.abs(rewritten - oracle) > allowed
        slack = UNDETERMINED * terms + smallest
        low, high = np.minimum(original, oracle) - slack, np.maximum(original, oracle) + slack
        undetermined = error > slack
        is_outside = (rewritten < low) | (rewritten > high)
        for x in partly_rounded() if (finite & undetermined & is_outside).any() else ():
            x = np.where(np.isfinite(x), x, original)
            low, high = np.minimum(low, x - slack), np.maximum(high, x + slack)
            is_outside = (rewritten < low) | (rewritten > high)
            if not (finite & undetermined & is_outside).any():
                break
    wrong = finite & np.where(undetermined, is_outside, is_off)
    if not wrong.any():
        return None
    which = "in an undetermined row " if (wrong & undetermined).any() else ""
    text = _at(rewritten, original, wrong)
    at = tuple(np.argwhere(wrong)[0])
    limit = np.broadcast_to(allowed, wrong.shape)[at]
    return f"{which}{text}, oracle {oracle[at]:.6g}, allowed {limit:.2g}"


def _largest(x: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """The largest finite element of each row, in a shape that broadcasts."""
    x = np.where(finite, x, 0)
    return x.max(axis=-1, keepdims=True) if x.ndim else x


def _at(rewritten: np.ndarray, original: np.ndarray, wrong: np.ndarray) -> str:
    at = tuple(int(n) for n in np.argwhere(wrong)[0])
    count = int(wrong.sum())
    return f"at {at} (of {count}): rewritten {rewritten[at]:.6g}, original {original[at]:.6g}"


def describe(found: dict[str, str]) -> str:
    """Every fault with its program, for an assertion's message."""
    return "\n\n".join(f"{name}\n=> {fault}" for name, fault in found.items())


def assert_same(cases: Sequence[Case], *, compiled: bool = False) -> None:
    """Fails if a rewritten program breaks the rule, with the text of each that does."""
    found = faults(cases, compiled=compiled)
    assert not found, f"{len(found)} of {len(cases)} programs\n\n{describe(found)}"

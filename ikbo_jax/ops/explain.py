"""`explain`: which implementation every op of a function takes on this device, and why."""

import dataclasses
import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad
from jax.sharding import AxisType

from ikbo_jax.ops import arguments, dispatch, sharded
from ikbo_jax.ops.op import RESULT
from ikbo_jax.ops.reverse_only import identity_primitive


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The ops that a function calls, in program order; `str` formats them as short plain text.

    Attributes:
      plans: one plan for each call of an op in the jaxpr. A call in a loop's body is listed once;
        calls in all branches of a conditional are listed.
      differentiated: names of the ops whose gradients the function computes.
      notes: what the functions returned that `note` stored in the jaxpr: the reports of `rewrite`.
      by_xla: what XLA counts of the compiled function; "" without `compile`.
    """

    plans: tuple[dispatch.Plan, ...]
    notes: tuple[Any, ...] = ()
    differentiated: frozenset[str] = frozenset()
    by_xla: str = ""

    def __str__(self) -> str:
        return self._text([str(note) for note in self.notes])

    @property
    def details(self) -> str:
        """The text with the whole report of `rewrite`."""
        return self._text([getattr(note, "details", None) or str(note) for note in self.notes])

    def _text(self, notes: list[str]) -> str:
        numbers: dict[dispatch.Plan, list[str]] = {}
        for number, plan in enumerate(self.plans, start=1):
            numbers.setdefault(plan, []).append(str(number))
        # Equal plans, for example of equal layers, are printed once with all their numbers.
        plans = [f"{', '.join(found)}. {plan}" for plan, found in numbers.items()]
        if not plans:
            plans = ["no op of this library is called"]
            if self.notes:
                plans[0] += " directly; see the report of rewrite above"
        return "\n".join([*notes, *([self.by_xla] if self.by_xla else []), *plans])


# Has a note as a parameter. Unlike `dispatch.plan_p`, it is not inside a function with a custom
# derivative, so it has a derivative rule.
note_p = identity_primitive("ikbo_note")
ad.primitive_jvps[note_p] = lambda primals, tangents, *, note: (
    note_p.bind(*primals, note=note),
    *tangents,
)
# For `jax.linear_transpose`; derivatives hold no note.
ad.primitive_transposes[note_p] = lambda cotangent, _, *, note: [cotangent]


def note(result: jax.Array, make: Callable[[], Any]) -> jax.Array:
    """Returns `result`; stores in the jaxpr a function that makes a note, for `explain` to call."""
    return note_p.bind(result, note=make)


def explain(
    fn: Callable[..., Any], *args: Any, compile: bool = False, **kwargs: Any
) -> Explanation:
    """Reports which implementation every op of this library takes in a call of `fn`, and why.

    Traces `fn` without running it and reads the choices from the jaxpr, so it also finds ops inside
    jit (cached or not), grad, vmap, scan and cond. The plan of an op also names the implementation
    of its gradient ("gradient"), whether or not `fn` computes a gradient; a backward pass has no
    plan. With arrays that are sharded over several devices, "devices" says how the op divides and
    what it moves; where mesh axes are Auto, XLA decides that, so `fn` is compiled to find out,
    unless arguments are traced.

    Args:
      fn: any function that JAX can trace.
      *args: arguments of `fn`: pytrees of arrays or `jax.ShapeDtypeStruct`s; other values are
        passed unchanged, also arrays of rank 0, which may be a `scale`, and NumPy arrays of dtypes
        that JAX converts or lacks.
      compile: whether to compile `fn` for the default device, and to report the FLOPs and bytes
        that XLA's `cost_analysis` counts; of a rewritten function, the original's beside them.
      **kwargs: keyword arguments of `fn`, likewise.

    Returns:
      An `Explanation`; print it, or its `details`.

    Raises:
      TypeError: `fn` is no function, but, say, the result of a call.
      Exception: whatever `fn` raises while it is traced.
    """
    arguments.check_function("explain", fn)
    arrays, merged = split((args, kwargs))

    def call(arrays: list[Any], fn: Callable[..., Any] = fn) -> Any:
        call_args, call_kwargs = merged(arrays)
        out = fn(*call_args, **call_kwargs)
        return [x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]

    found = list(marks(jax.make_jaxpr(call)(arrays).jaxpr))
    plans = tuple(mark for mark in found if isinstance(mark, dispatch.Plan))
    if plans and _xla_divides(arrays):
        plans = _of_parts(plans, call, arrays)
    names = [mark for mark in found if isinstance(mark, str)]
    notes = tuple(mark() for mark in found if not isinstance(mark, (dispatch.Plan, str)))
    by_xla = _by_xla(fn, call, arrays) if arguments.flag("compile", compile) else ""
    return Explanation(plans, notes, frozenset(names), by_xla)


def _by_xla(fn: Callable[..., Any], call: Any, arrays: list[Any]) -> str:
    """Compiles a function, and the original if it is rewritten; says what XLA counts of each."""
    text, original = str(counted_by_xla(call, arrays)), _original(fn)
    if original is not None:
        of_original = counted_by_xla(functools.partial(call, fn=original), arrays)
        text = f"{text}; of the original {of_original}"
    return f"compiled, XLA counts {text}"


def _original(fn: Any) -> Any:
    """Returns the function that `rewrite` was called on, also under `jax.jit`; None for others."""
    while hasattr(fn, "lower"):
        fn = getattr(fn, "__wrapped__", None)
    # Wrappers that compute something else, such as `jax.grad`'s, copy the attribute.
    return fn.__wrapped__ if getattr(fn, "_ikbo_rewritten", None) == id(fn) else None


class Counts(NamedTuple):
    """Holds the FLOPs and the bytes that XLA counts of a compiled function."""

    flops: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.flops:.4g} FLOP, {self.nbytes:.4g} bytes"


def counted_by_xla(fn: Callable[..., Any], *args: Any) -> Counts:
    """Compiles a function for the default device, and returns what XLA counts."""
    counts = jax.jit(fn).lower(*args).compile().cost_analysis() or {}
    return Counts(*[int(counts.get(name, 0)) for name in ("flops", "bytes accessed")])


def split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the arrays of a tree that are to be traced, and a function that puts them back."""
    leaves, treedef = jax.tree.flatten(tree)
    traced = [_is_to_trace(leaf) for leaf in leaves]

    def merged(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        values = [next(rest) if is_array else x for x, is_array in zip(leaves, traced, strict=True)]
        return jax.tree.unflatten(treedef, values)

    return [x for x, is_array in zip(leaves, traced, strict=True) if is_array], merged


def _is_to_trace(leaf: Any) -> bool:
    """Whether an argument is traced: not if the call would then see something else.

    A number that must be known while tracing would be unknown, and an index that is refused for its
    int64 would be an int32.
    """
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array)) and not leaf.shape:
        return isinstance(leaf, jax.core.Tracer)
    if not isinstance(leaf, np.ndarray):
        return True
    if leaf.dtype != bool and not jnp.issubdtype(leaf.dtype, jnp.number):
        return False
    return bool(jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype)


def _xla_divides(arrays: list[Any]) -> bool:
    """Whether XLA decides how the arrays divide: several devices, and axes of a mesh are Auto.

    Of traced arrays, XLA decides when it compiles the function that is traced.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    meshes: list[Any] = [jax.sharding.get_abstract_mesh()]
    meshes += [getattr(getattr(x, "sharding", None), "mesh", None) for x in arrays]
    return any(
        mesh is not None and mesh.size > 1 and AxisType.Auto in mesh.axis_types for mesh in meshes
    )


def _of_parts(
    plans: tuple[dispatch.Plan, ...], call: Any, arrays: list[Any]
) -> tuple[dispatch.Plan, ...]:
    """Compiles `call`, and returns the plans of the parts that XLA asks for."""
    # A program in JAX's compilation cache would ask for nothing, so the program gets a new name.
    call.__name__ = f"explain_{uuid.uuid4().hex}"
    with sharded.reports() as found:
        jax.jit(call).lower(arrays).compile()
    return tuple(found.get(plan.origin or (plan,), plan) for plan in plans)


def marks(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """Yields the marks of a jaxpr and of the jaxprs that it calls, in program order.

    Marks are plans, functions that make notes, and the names of ops that are differentiated.
    """
    for eqn in jaxpr.eqns:
        mark = _mark(eqn)
        if mark is not None:
            yield mark
        for inner in inner_programs(eqn):
            yield from marks(inner)


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about a jaxpr and the jaxprs that it calls.

    Attributes:
      marked: whether one of them holds a plan or a note.
      repeated: `id` of every jaxpr that several equations call.
      draws: whether one of them draws random numbers without a key (`lax.rng_uniform`).
    """

    marked: bool
    repeated: frozenset[int]
    draws: bool


def survey(jaxpr: core.Jaxpr) -> Survey:
    """Searches a jaxpr and the jaxprs that it calls, each of them once."""
    found = [getattr(jaxpr, "jaxpr", jaxpr)]
    seen = {id(found[0])}
    repeated = set()
    marked = draws = False
    # The loop appends to the list that it iterates over.
    for program in found:
        for eqn in program.eqns:
            if eqn.primitive.name in WITHOUT_PROGRAMS:
                continue
            marked = marked or _mark(eqn) is not None
            draws = draws or eqn.primitive.name == "rng_uniform"
            for inner in inner_programs(eqn):
                if id(inner) in seen:
                    repeated.add(id(inner))
                else:
                    seen.add(id(inner))
                    found.append(inner)
    return Survey(marked, frozenset(repeated), draws)


def _mark(eqn: Any) -> Any:
    if eqn.primitive is dispatch.plan_p:
        return eqn.params["plan"]
    if eqn.primitive.name == "name" and eqn.params["name"].startswith(RESULT):
        # `Op._forward` alone names results.
        return eqn.params["name"].removeprefix(RESULT).rpartition("_")[0]
    return eqn.params["note"] if eqn.primitive is note_p else None


#: Frequent primitives that hold no jaxpr. Searching the parameters of all equations would take a
#: tenth of the time of tracing them.
WITHOUT_PROGRAMS = frozenset(
    """
    add and argmax argmin broadcast_in_dim clamp concatenate convert_element_type copy cos cumsum
    div dot_general dynamic_slice eq erf exp exp2 expand_dims gather ge gt integer_pow iota
    is_finite le log logistic lt max min mul ne neg not or pad pow reduce_and reduce_max reduce_min
    reduce_or reduce_sum rem reshape rsqrt select_n sign sin slice split sqrt square squeeze stack
    stop_gradient sub tanh tile transpose xor
    """.split()  # noqa: SIM905  A table of words reads better.
)


def inner_programs(eqn: core.JaxprEqn) -> Sequence[core.Jaxpr]:
    """Returns the programs that an equation holds."""
    if eqn.primitive.name in WITHOUT_PROGRAMS:
        return ()
    if eqn.primitive.name == "jit":
        # The most frequent equation with a jaxpr; its other parameters take long to search.
        return (eqn.params["jaxpr"],)
    found = []
    for value in eqn.params.values():
        # A call has one jaxpr, a conditional a tuple of jaxprs.
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, core.Jaxpr):
                found.append(inner)
    return found

"""The spine of every op: plan, division over devices, run, vmap rule, gradient.

A public function checks its arguments, asks `Op.plan`, and calls its jitted function, which calls
`Op.differentiable`. The parts that differ between ops are methods of a subclass.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ikbo_jax.ops import arguments, dispatch, reverse_only, sharded
from ikbo_jax.ops.partition import Division, Rule, dimensions, map_sequentially
from ikbo_jax.ops.platforms import by_platform
from ikbo_jax.ops.settings import as_now
from ikbo_jax.ops.stacking import unstack
from ikbo_jax.problems import Problem

#: Prefix of the names of results for `jax.checkpoint`: `ikbo_gdpa_out`.
RESULT = "ikbo_"


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call that are not arrays; each op adds its own. Hashable.

    Attributes:
      return_residuals: whether results that only a gradient needs are returned, too.
      backward_config: configuration of the kernels of a gradient, see `Op.of_gradient`; None: XLA.
      dtype: name of the dtype of what is still to be summed over devices; None: the arrays'.
    """

    request: dispatch.Request
    return_residuals: bool = dataclasses.field(default=False, kw_only=True)
    backward_config: Any = dataclasses.field(default=None, kw_only=True)
    dtype: str | None = dataclasses.field(default=None, kw_only=True)


class Part[C: Call, A, R](NamedTuple):
    """One device's part of a call.

    `mask` takes a tree like the results, or their cotangents; it zeros rows that the whole call
    leaves zero but the part cannot know.
    """

    call: C
    arrays: A
    mask: Callable[[R], R] = lambda results: results


class Pulled[A, R](NamedTuple):
    """What a gradient is computed from.

    Attributes:
      arrays: the arrays of the call.
      residuals: what `Op.residuals` made of the results.
      cotangents: a tree like the visible results.
      dtype: of gradients that are still to be summed over devices; None: the arrays'.
    """

    arrays: A
    residuals: Any
    cotangents: R
    dtype: Any = None


class Named(NamedTuple):
    """Dimensions' names (`partition.dimensions`) of arrays, given or not, and of results.

    `split` has the dimensions that can be divided over devices, and what `explain` calls them.
    """

    arrays: Any
    results: Any
    split: dict[str, str]


class Op[C: Call, A, R](abc.ABC):
    """An op on calls C with arrays A, a tree whose integer arrays have no gradient, and results R.

    Attributes:
      name: of the jitted function.
      differentiable: runs a call as planned, with a vmap rule and gradients.
      jitted: `traced` as one function in a program.
      xla_batches_products: whether XLA runs problems that cannot be folded at once; if false, it
        runs them one after another, which needs the memory of one problem.
      by_kernels, by_xla: what `explain` says of a gradient that kernels or XLA compute.
      is_gradient_apart: whether kernels may compute the gradient of a result that XLA computes.
      result_names: names of the results for policies of `jax.checkpoint`.
    """

    name: str
    xla_batches_products = True
    by_kernels, by_xla = "mosaic_gpu", "XLA, at user and candidate batch size"
    is_gradient_apart = False
    result_names: tuple[str, ...] = ("out", "lse")

    def __init__(self) -> None:
        # custom_vjp wraps custom_vmap because custom_vmap has no reverse mode.
        differentiable = jax.custom_vjp(self._divided, nondiff_argnums=(0, 1))
        differentiable.defvjp(self._forward, self._backward)
        self.differentiable: Callable[[C, dispatch.Plan, A], R] = differentiable

        def run(call: C, plan: dispatch.Plan, operands: Any) -> R:
            typed = sharded.vary_over_same_axes(arguments.strongly_typed(operands))
            return self.traced(call, plan, typed)

        run.__name__ = self.name
        # The plan is static: when the choice changes, jit's cache does not return the old one.
        self.jitted = jax.jit(run, static_argnums=(0, 1))

    @abc.abstractmethod
    def problem(self, call: C, arrays: A) -> Problem:
        """Returns the problem that a call poses."""

    @abc.abstractmethod
    def run(self, call: C, plan: dispatch.Plan, arrays: A) -> R:
        """Runs one problem as planned; returns a tree of arrays, the first of which is recorded."""

    @abc.abstractmethod
    def fold(self, call: C, size: int, batched: A, arrays: A) -> tuple[C, A] | None:
        """Folds `size` problems, at least 1, into one; None if that would copy what the problems
        share.

        `batched` is a tree like `arrays` of bools: which arrays have a leading axis of problems.
        """

    @abc.abstractmethod
    def named(self, call: C, arrays: A) -> Named:
        """Names the dimensions of the arrays and of the results of `run`."""

    @abc.abstractmethod
    def vjp(self, call: C, plan: dispatch.Plan, of: Pulled[A, R]) -> A:
        """Computes gradients of the arrays, as a tree like them; None for integer arrays."""

    def plan(self, call: C, arrays: A) -> dispatch.Plan:
        """Decides how a call runs; raises NotImplementedError if it cannot run as requested."""
        request = call.request
        if not request.is_open or request.implementation == "xla":
            return self.plan_on_platform(call, arrays)
        cuda = self.plan_on_platform(_on(call, "cuda"), arrays)
        other = dataclasses.replace(request, platform="other", implementation=None)
        plan = self.plan_on_platform(dataclasses.replace(call, request=other), arrays)
        refusal = ""
        if request.implementation == "mosaic_gpu":
            refusal = f"{request.op} with implementation='mosaic_gpu': {plan.reason}"
        return dataclasses.replace(plan, cuda=cuda, refusal=refusal)

    @abc.abstractmethod
    def choose_gradient(self, request: dispatch.Request, problem: Any) -> tuple[Any, str]:
        """Returns the configuration of the gradient's kernels, or None for XLA; and the reason."""

    def plan_on_platform(self, call: C, arrays: A) -> dispatch.Plan:
        """Decides how a call and its gradient run where the platform is known."""
        plan = dispatch.choose(call.request, self.problem(call, arrays))
        if plan.implementation == "xla" and not self.is_gradient_apart:
            return dataclasses.replace(plan, backward=self.by_xla)
        config, reason = self.choose_gradient(call.request, plan.problem)
        backward = f"{self.by_kernels}, {config}; {reason}"
        if config is None:
            backward = self.by_xla if reason in plan.reason else f"{self.by_xla}: {reason}"
        return dataclasses.replace(plan, backward=backward, backward_config=config)

    def traced(self, call: C, plan: dispatch.Plan, operands: Any) -> R:
        """Computes a planned call from its operands, which are its arrays; jitted."""
        return self.differentiable(call, plan, operands)

    def planned(self, call: C, arrays: A, shape: tuple[int, ...], dtype: Any) -> Any:
        """Plans and runs a call with one result of this shape; zeros if it is empty."""
        plan = self.plan(call, arrays)
        if 0 in shape:
            return dispatch.record_nothing(sharded.zeros(shape, dtype, arrays), plan)
        return self.jitted(call, plan, reverse_only.operands(call.request.op, arrays))

    def _by_platform[X, Y](
        self, run: Callable[[C, dispatch.Plan, X], Y], call: C, plan: dispatch.Plan, operands: X
    ) -> Y:
        """Runs `run(call, plan, operands)`; in a program for CUDA, with the plan for CUDA."""
        elsewhere = functools.partial(run, call, plan)
        if plan.cuda is None or not plan.cuda.may_have_kernels:
            return elsewhere(operands)
        on_cuda = functools.partial(run, _on(call, "cuda"), plan.cuda)
        return by_platform(elsewhere, on_cuda, operands, plan.refusal)

    def for_gradient(self, call: C) -> C:
        """Returns the call whose results the gradient needs."""
        return dataclasses.replace(call, return_residuals=True)

    def of_gradient(self, call: C, plan: dispatch.Plan, of: Pulled[A, R]) -> C:
        """Returns the call whose gradient is computed as planned, in the dtype of `of`."""
        name = of.dtype and jnp.dtype(of.dtype).name
        return dataclasses.replace(call, backward_config=plan.backward_config, dtype=name)

    def visible(self, call: C, results: R) -> R:
        """Returns the results of `call`, from the results of `for_gradient(call)`."""
        if call.return_residuals or not isinstance(results, tuple):
            return results
        visible: Any = (results[0], None)
        return visible

    def residuals(self, results: R) -> Any:
        """Returns what the gradient needs of the results: nothing of a single array."""
        return results if isinstance(results, tuple) else None

    def _divided(self, call: C, plan: dispatch.Plan, arrays: A) -> R:
        """Runs one problem, or a part of it on every device of a mesh."""
        return self._by_platform(self._divided_on_platform, call, plan, arrays)

    def _divided_on_platform(self, call: C, plan: dispatch.Plan, arrays: A) -> R:
        named = self._named(call, arrays)

        def local(parts: A, division: Division | None) -> R:
            if division is None:
                return self._vmappable(call, plan, parts)
            part = self.part(call, parts, division)
            part_plan = self._plan_of_part(plan, part, division)
            results = part.mask(self._vmappable(part.call, part_plan, part.arrays))
            # Not the whole arrays: caches keep `local`, and with it their tracers.
            return self.joined(results, named, parts, division)

        return _run_divided(local, (plan, call), (named.arrays, arrays), named.results, named.split)

    def _named(self, call: C, arrays: A) -> Named:
        """Names the dimensions of the arrays that a call has, and of its results."""
        named = self.named(call, arrays)
        of_given = jax.tree.map(lambda name, x: None if x is None else name, named.arrays, arrays)
        return named._replace(arrays=of_given)

    def part(self, call: C, arrays: A, division: Division) -> Part[C, A, R]:
        """Makes one device's part of a call, from its part of the arrays."""
        del division
        return Part(call, arrays)

    def joined(self, results: R, named: Named, arrays: A, division: Division) -> R:
        """Joins the results of one device's part of the arrays with other devices' results."""
        del named, arrays, division
        return results

    def _plan_of_part(
        self, plan: dispatch.Plan, part: Part[C, A, R], division: Division
    ) -> dispatch.Plan:
        part_plan = self.plan(part.call, part.arrays)
        origin = (plan, *(size for _, size in division.rule.problems))
        part_plan = dataclasses.replace(part_plan, division=str(division), origin=origin)
        sharded.report(origin, part_plan)
        return part_plan

    def _vmappable(self, call: C, plan: dispatch.Plan, arrays: A) -> R:
        """Runs `run` with a vmap rule: the default rule would add a grid axis to the kernel."""

        def run(arrays: A) -> R:
            return self.run(call, plan, arrays)

        def run_batched(size: int, batched: A, arrays: A) -> R:
            return self._run_batched(call, plan, size, batched, arrays)

        return vmappable(run, run_batched)(arrays)

    def _run_batched(self, call: C, plan: dispatch.Plan, size: int, batched: A, arrays: A) -> R:
        if size == 0:
            xla_plan = dataclasses.replace(plan, implementation="xla", config=None)
            one = jax.tree.map(
                lambda x, is_batched: jax.ShapeDtypeStruct(x.shape[is_batched:], x.dtype),
                arrays,
                batched,
            )
            results = jax.eval_shape(lambda arrays: self.run(call, xla_plan, arrays), one)
            return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), results)
        if (folded := self.fold(call, size, batched, arrays)) is not None:
            call, arrays = folded
            plan = _of_problems(plan, size, self.plan(call, arrays))
            return unstack(size, self._vmappable(call, plan, arrays))
        noted = _of_problems(plan, size, self._noted(plan, size))
        if self._runs_at_once(plan):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
            return jax.vmap(lambda arrays: self.run(call, noted, arrays), (axes,))(arrays)
        return map_sequentially(
            lambda arrays: self._vmappable(call, noted, arrays), batched, arrays
        )

    def _runs_at_once(self, plan: dispatch.Plan) -> bool:
        """Whether problems that cannot be folded run at once."""
        return plan.implementation == "xla" and self.xla_batches_products

    def _noted(self, plan: dispatch.Plan, size: int) -> dispatch.Plan:
        """Adds to the plan's reason how problems run that cannot be folded."""
        how = "at once" if self._runs_at_once(plan) else "one after another"
        return dataclasses.replace(
            plan,
            reason=f"{plan.reason}; vmap runs {size} problems {how}",
            cuda=None if plan.cuda is None else self._noted(plan.cuda, size),
        )

    def _forward(self, call: C, plan: dispatch.Plan, arrays: A) -> tuple[R, tuple[A, Any]]:
        # Calls `differentiable` and not `_divided`, so that a second derivative finds this rule and
        # not the kernel.
        with jax.default_matmul_precision(call.request.precision):
            results = self.differentiable(self.for_gradient(call), plan, arrays)
        results = _with_names(f"{RESULT}{call.request.op}_", self.result_names, results)
        return self.visible(call, results), (arrays, self.residuals(results))

    def _backward(
        self, call: C, plan: dispatch.Plan, saved: tuple[A, Any], cotangents: R
    ) -> tuple[A]:
        with jax.default_matmul_precision(call.request.precision):
            return (self._by_platform(self._pulled_back, call, plan, (saved, cotangents)),)

    def _pulled_back(self, call: C, plan: dispatch.Plan, operands: tuple[tuple[A, Any], R]) -> A:
        """Computes the gradients of the arrays, from what `_forward` saved and the cotangents."""
        saved, cotangents = operands
        arrays, _ = saved
        named = self._named(self.for_gradient(call), arrays)
        names = (named.arrays, self.residuals(named.results), self.visible(call, named.results))
        gradient_names = jax.tree.map(
            lambda name, x: name if jnp.issubdtype(x.dtype, jnp.floating) else None,
            named.arrays,
            arrays,
        )

        def local(parts: Any, division: Division | None) -> Any:
            arrays, residuals, cotangents = parts
            if division is None:
                return self.vjp(call, plan, Pulled(*parts))
            part = self.part(call, arrays, division)
            kept = part._replace(call=self.for_gradient(part.call))
            part_plan = self._plan_of_part(plan, kept, division)
            # Partial sums stay in f32, so that each gradient is rounded once.
            of = Pulled(part.arrays, residuals, part.mask(cotangents), jnp.float32)
            gradients = self.vjp(part.call, part_plan, of)
            floats = [x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
            leaves = zip(
                jax.tree.leaves(gradients), jax.tree.leaves(gradient_names), floats, strict=True
            )
            return [
                division.sum(x, dimensions(name)).astype(like.dtype) for x, name, like in leaves
            ]

        identity = ("gradient", plan, call)
        gradients = _run_divided(
            local, identity, (names, (*saved, cotangents)), gradient_names, named.split
        )
        return jax.tree.map(sharded.typed_like, gradients, arrays, is_leaf=lambda x: x is None)


def _with_names[R](prefix: str, names: tuple[str, ...], results: R) -> R:
    """Names results for policies of `jax.checkpoint`: `ikbo_gdpa_out`, `ikbo_gdpa_lse`."""
    parts, treedef = jax.tree.flatten(results, is_leaf=lambda x: x is not results)
    named = [
        jax.tree.map(lambda x, name=name: checkpoint_name(x, prefix + name), part)
        for part, name in zip(parts, names, strict=False)
    ]
    return jax.tree.unflatten(treedef, [*named, *parts[len(named) :]])


def _of_problems(plan: dispatch.Plan, size: int, batched: dispatch.Plan) -> dispatch.Plan:
    """Marks `batched` as the plan of a `vmap` over `plan`, and keeps the division of a part."""
    if not plan.division:
        return dataclasses.replace(batched, origin=(*(plan.origin or (plan,)), size))
    batched = dataclasses.replace(batched, division=plan.division, origin=plan.origin)
    sharded.report(plan.origin, batched)
    return batched


def _on[C: Call](call: C, platform: str) -> C:
    """Returns the call once the platform is known."""
    return dataclasses.replace(call, request=dataclasses.replace(call.request, platform=platform))


def _run_divided(
    local: Callable[[Any, Division | None], Any],
    identity: Any,
    operands: tuple[Any, Any],
    result_names: Any,
    split: dict[str, str],
) -> Any:
    """Runs `sharded.run` for trees: `operands` are names and arrays."""
    names, arrays = operands
    paths, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    result_leaves, result_treedef = jax.tree.flatten(result_names)
    rule = Rule(
        tuple(jax.tree_util.keystr(path[-1:], simple=True) for path, _ in paths),
        tuple(map(dimensions, jax.tree.leaves(names))),
        tuple(map(dimensions, result_leaves)),
        tuple(split.items()),
    )

    def flat(leaves: Any, division: Division | None) -> Any:
        return jax.tree.leaves(local(jax.tree.unflatten(treedef, leaves), division))

    results = sharded.run(flat, rule, identity, [leaf for _, leaf in paths])
    return jax.tree.unflatten(result_treedef, results)


def vmappable[A, R](
    run: Callable[[A], R], run_batched: Callable[[int, A, A], R]
) -> Callable[[A], R]:
    """Makes a function of a tree of arrays with its own vmap rule.

    The rule calls `run_batched(size, batched, arrays)`, see `Op.fold`, whose results all have a
    leading axis of `size`.
    """
    function = jax.custom_batching.custom_vmap(run)
    run_batched = as_now(run_batched)

    @function.def_vmap
    def rule(size: int, batched: list[Any], arrays: Any) -> tuple[Any, Any]:
        results = run_batched(size, batched[0], arrays)
        return results, jax.tree.map(lambda _: True, results)

    return function


class Gradient[C: Call, O, G]:
    """An op's gradient by kernels: a function of a call, see `Op.of_gradient`, and operands.

    It has a vmap rule; `differentiable` has a derivative, too.
    """

    def __init__(
        self,
        run: Callable[[C, O], G],
        run_batched: Callable[[C, int, Any, O], G],
        pull_back: Callable[[C, O, G], tuple[O]],
    ) -> None:
        """Takes the function, its vmap rule (see `vmappable`) and its rule of reverse mode."""
        self._run, self._run_batched = run, run_batched
        # custom_vjp wraps custom_vmap because custom_vmap has no reverse mode.
        function = jax.custom_vjp(self.vmappable, nondiff_argnums=(0,))
        function.defvjp(self._forward, pull_back)
        self.differentiable: Callable[[C, O], G] = function

    def _forward(self, call: C, operands: O) -> tuple[G, O]:
        with jax.default_matmul_precision(call.request.precision):
            return self.differentiable(call, operands), operands

    def vmappable(self, call: C, operands: O) -> G:
        """The function without a derivative."""
        run = functools.partial(self._run, call)
        return vmappable(run, functools.partial(self._run_batched, call))(operands)

    def one_by_one(self, call: C, batched: Any, operands: O) -> G:
        """Runs problems one after another."""
        run = functools.partial(self.vmappable, call)
        return map_sequentially(run, batched, operands)

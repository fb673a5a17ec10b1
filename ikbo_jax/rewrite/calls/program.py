"""Runs a traced program: rewritten if that gains anything, otherwise as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.attention import linear_layers
from ikbo_jax.rewrite.interpret import RETURNED, Context
from ikbo_jax.rewrite.report import cost, kernels
from ikbo_jax.rewrite.report.recorder import Recorder
from ikbo_jax.rewrite.rules import unread, variants
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.equations import described
from ikbo_jax.rewrite.values.jaxprs import call, evaluate, trace, with_traced_constants_last
from ikbo_jax.rewrite.values.lineage import is_plain
from ikbo_jax.rewrite.values.scope import ProgramCache


def run(program: Any, arrays: Sequence[Any]) -> list[Any]:
    """Runs a traced program, rewritten if that gains anything.

    The report is a note on the first result, for `explain`.
    """
    original = _Original.of(program)
    inputs = [*(x for x in program.consts if isinstance(x, jax.core.Tracer)), *arrays]
    if ProgramCache().is_plain(original.jaxpr):
        recorder = original.recorder()
        results = _as_written(original, inputs, recorder)
    elif original.draws:
        # Equal equations give different numbers, so that none may run once instead of twice.
        recorder, results = original.recorder(), original.call(inputs)
        recorder.refusal = "it draws random numbers without a key, by lax.rng_uniform"
    elif (jax.config.jax_debug_nans or jax.config.jax_debug_infs) and _runs_at_once():
        # JAX checks the result of every equation, also rows of users without candidates.
        recorder, results = original.recorder(), original.call(inputs)
        recorder.refusal = "its equations are checked for NaN or infinity"
    else:
        recorder, results = _rewritten(original, inputs)
    if results:
        results = [explain.note(results[0], recorder.report), *results[1:]]
    return results


def _runs_at_once() -> bool:
    """Whether JAX computes equations when they are bound, also of derivatives and of `vmap`."""
    trace = core.find_top_trace(())
    while (outer := getattr(trace, "parent_trace", None)) is not None:
        trace = outer
    return type(trace).__name__ == "EvalTrace"


#: Stands for a constant that is traced.
_TRACED = object()


@dataclasses.dataclass(frozen=True)
class _Original:
    """Holds the original program, whose traced constants become arguments.

    The reason: an equation is differentiated by its operands alone. And a derivative holds this
    object as long as the traced program, but must hold no tracers.

    Attributes:
      jaxpr: the program, without dead equations, with `_TRACED` in place of every traced constant.
      repeated: identities of the programs that several of its equations call.
      draws: whether it draws random numbers without a key.
      most_rows: lookups in tables with more rows stay as they are; None without a bound.
      leaves_unread, looks_up_alone: see `ProgramCache`.
      table_rows: numbers of rows of the tables in which lookups were found.
    """

    jaxpr: Any
    repeated: frozenset[int]
    draws: bool
    most_rows: int | None = None
    leaves_unread: bool = True
    looks_up_alone: bool = False
    table_rows: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, program: Any) -> _Original:
        jaxpr = without_dead_code(program)
        consts = [_TRACED if isinstance(x, jax.core.Tracer) else x for x in jaxpr.consts]
        jaxpr = jaxpr.replace(consts=consts) if any(x is _TRACED for x in consts) else jaxpr
        survey = explain.survey(jaxpr)
        return cls(jaxpr, survey.repeated, survey.draws)

    def recorder(self) -> Recorder:
        """Returns a recorder that lists the program's lookups."""
        recorder = Recorder()
        recorder.list_lookups(self.jaxpr)
        return recorder

    def without_largest_table(self) -> _Original | None:
        """Keeps lookups in the largest table as they are; None if the program has one table."""
        smaller = sorted(self.table_rows)[:-1]
        if not smaller:
            return None
        return dataclasses.replace(self, most_rows=smaller[-1], table_rows=set())

    def split(self, inputs: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """Splits `inputs` (the traced constants come first) into all constants and arguments."""
        rest = iter(inputs)
        consts = [next(rest) if x is _TRACED else x for x in self.jaxpr.consts]
        return consts, list(rest)

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        consts, arrays = self.split(inputs)
        return evaluate(self.jaxpr, arrays, consts)

    def rewritten(self, inputs: Sequence[Any], recorder: Recorder, differentiated: bool) -> Any:
        """Rewrites the program to a jaxpr of `inputs`, without dead equations.

        Raises RowsAreRead if its results may depend on rows that differ from the original's.
        """
        has_unread, exceptions = False, 0

        def interpreted(*inputs: Any) -> list[Any]:
            ctx = Context(recorder, differentiated=differentiated, repeated=self.repeated)
            ctx.programs.most_rows = self.most_rows
            ctx.programs.table_rows = self.table_rows
            ctx.programs.leaves_unread = self.leaves_unread
            ctx.programs.looks_up_alone = self.looks_up_alone
            results = ctx.run(self.jaxpr, *self.split(inputs))
            results = [
                _as_declared(_returned(ctx, x, eqn), v.aval)
                for x, eqn, v in zip(
                    results, _producers(self.jaxpr), self.jaxpr.outvars, strict=True
                )
            ]
            nonlocal has_unread, exceptions
            has_unread, exceptions = ctx.programs.unread, len(ctx.programs.exceptions)
            return [*results, *ctx.programs.exceptions]

        program = without_dead_code(trace(interpreted, inputs, self.jaxpr))
        if has_unread:
            unread.check(program)
        if recorder.changed:
            # Without the original, which runs for rare values of the inputs.
            recorder.programs = tuple(map(with_traced_constants_last, (self.jaxpr, program)))
        return self._with_exceptions(program, inputs, exceptions) if exceptions else program

    def _with_exceptions(self, program: Any, inputs: Sequence[Any], count: int) -> Any:
        """Returns a program that runs the original, too, if a condition is True.

        The last `count` results are the conditions, which the returned program does not return.
        """
        if program.effects:
            raise unread.RowsAreRead

        original = self.closed(inputs)

        def run(*inputs: Any) -> list[Any]:
            found = call(program, inputs, "rewritten")
            results, conditions = found[:-count], found[-count:]
            condition = functools.reduce(jnp.logical_or, conditions)

            # A derivative keeps the inputs alone of a branch that seldom runs.
            @jax.checkpoint
            def by_original(*inputs: Any) -> list[Any]:
                return call(original, inputs, "rows_without_kept_keys")

            chosen: list[Any] = lax.cond(condition, by_original, lambda *_: results, *inputs)
            return chosen

        return trace(run, inputs, self.jaxpr)

    def differentiated(self, inputs: Sequence[Any]) -> Any:
        """Returns the variant for derivatives; the original if the rewriting raises."""
        try:
            return self.rewritten(inputs, Recorder(muted=True), differentiated=True)
        except unread.RowsAreRead:
            return dataclasses.replace(self, leaves_unread=False).differentiated(inputs)
        except ImportError:
            raise
        except Exception:
            return self.closed(inputs)

    def closed(self, inputs: Sequence[Any]) -> core.Jaxpr:
        """Returns the original as a program of `inputs`, the same object if it is one."""
        if not any(x is _TRACED for x in self.jaxpr.consts):
            return self.jaxpr
        return trace(lambda *inputs: self.call(inputs), inputs, self.jaxpr)


def _producers(program: core.Jaxpr) -> list[Any]:
    """Returns the equation that computes each result of a program; None for arguments."""
    producers = dict.fromkeys(v for v in program.outvars if isinstance(v, core.Var))
    for eqn in program.eqns:
        for v in eqn.outvars:
            if v in producers:
                producers[v] = eqn
    return [producers.get(v) if isinstance(v, core.Var) else None for v in program.outvars]


def _returned(ctx: Context, value: Any, eqn: Any) -> Any:
    """Materialises a result, under the source location of the equation that computed it."""
    if is_plain(value) or eqn is None:
        return ctx.materialise(None, value, RETURNED)
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack):
        return ctx.materialise(None, value, RETURNED)


def _as_declared(x: Any, aval: Any) -> Any:
    """Gives a result the weak type of the original; ValueError if shape or dtype differ."""
    actual = jax.typeof(x)
    if not hasattr(aval, "shape"):
        return x
    if (actual.shape, actual.dtype) != (aval.shape, aval.dtype):
        raise ValueError(f"a result is {actual.str_short()} instead of {aval.str_short()}")
    if actual.weak_type == aval.weak_type:
        return x
    params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
    return lax.convert_element_type_p.bind(x, **params)


def _rewritten(original: _Original, inputs: list[Any]) -> tuple[Recorder, list[Any]]:
    """Runs the rewritten program, or the original if nothing is gained.

    If the rewritten program would cost more than the original, lookups in the largest table stay as
    they are. A table of items may have nearly as many rows as there are candidates: products of its
    rows take as long as products of copies, and their results are looked up besides.
    """
    tried, chosen, program = _interpreted(original, inputs)
    recorder = chosen
    for _ in range(_LARGE_TABLES):
        smaller = tried.without_largest_table() if chosen.refusal and program else None
        if smaller is None:
            break
        tried, chosen, program = _interpreted(smaller, inputs)
    values, differs = program, chosen.gradient_differs or chosen.gradient_is_as_written
    if program is None or chosen.refusal or not chosen.changed:
        if program is None or not _is_for_derivatives(program, chosen):
            return recorder, _as_written(original, inputs, recorder)
        reason = chosen.refusal or "nothing gained"
        if not recorder.sums_are_narrow:
            recorder.refusal = f"{reason}; its gradient, too, is as written, which XLA adds as fast"
            return recorder, _as_written(original, inputs, recorder)
        recorder.refusal = f"{reason}; its derivative is rewritten"
        if chosen.takes_longer:
            tried, differs = dataclasses.replace(original, looks_up_alone=True), True
        chosen, values = recorder, tried.closed(program.in_avals)
    layered = linear_layers.with_linear_layers(values, chosen.layer)
    is_final = layered is program and not differs
    if is_final and (program.effects or not explain.survey(program).marked):
        return chosen, call(program, inputs, "rewritten")
    # The traced program holds these functions, so they must not hold the tracers `inputs`.
    written = functools.partial(tried.closed, program.in_avals)
    derivative = functools.partial(tried.differentiated, program.in_avals)
    if chosen.gradient_is_as_written:
        derivative = written
    # A program with an op has its own derivative, but `checkify` must check the original.
    exact = variants.Exact(derivative if differs else lambda: program, written)
    return chosen, variants.bind(layered, exact, inputs)


def _as_written(original: _Original, inputs: list[Any], recorder: Recorder) -> list[Any]:
    """Runs the original; on a GPU, its values with linear layers by ops."""
    is_checked = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    if linear_layers.has_kernels() and not is_checked:
        written = original.closed(inputs)
        layered = linear_layers.with_linear_layers(written, recorder.layer)
        if layered is not written:
            return variants.bind(layered, variants.Exact(lambda: written, lambda: written), inputs)
    return original.call(inputs)


def _is_for_derivatives(program: core.Jaxpr, recorder: Recorder) -> bool:
    """Whether a program that does not run for its values may be differentiated.

    On a GPU, XLA's scatter of a lookup's gradient in 16 bits takes longer than the kernels that a
    small program saves: two towers over 1,024 candidates of 15 users take 0.02 ms on an H200,
    bfloat16, and 0.26 ms with their gradient. In float32 the scatter is as fast as what it reads,
    which it computes itself: the rewritten gradient of FiBiNET, which writes every pair of fields
    to add them by field, takes 0.54 ms instead of 0.25.
    """
    is_found = any(x.certain for x in recorder.broadcasts)
    return kernels.on_gpu() and is_found and not program.effects


#: How many tables are left out, one after another, if the rewritten program would cost more.
_LARGE_TABLES = 2


def _interpreted(original: _Original, inputs: list[Any]) -> tuple[_Original, Recorder, Any]:
    """Returns what was rewritten, the recorder, and the program: None if the rewriting raises."""
    recorder, program = original.recorder(), None
    try:
        program = original.rewritten(inputs, recorder, differentiated=False)
        if recorder.gradient_differs and program.effects:
            # The primitive with two variants refuses effects.
            program = original.rewritten(inputs, Recorder(muted=True), differentiated=True)
            recorder.gradient_differs = False
        if recorder.changed:
            before, after = cost.decisive_costs(*recorder.programs, known=recorder.counted)
            recorder.refusal = cost.refusal(after, before)
            recorder.takes_longer = bool(recorder.refusal) and cost.takes_longer(after, before)
            recorder.gradient_is_as_written = not (
                recorder.sums_are_narrow or program.effects
            ) and cost.saves_lookups_alone(after, before, recorder.has_gathers)
    except unread.RowsAreRead:
        return _interpreted(dataclasses.replace(original, leaves_unread=False), inputs)
    except ImportError:
        raise
    except Exception as error:
        recorder.refusal = f"its rewriting raised {described(error)}"
        program = None
    return original, recorder, program

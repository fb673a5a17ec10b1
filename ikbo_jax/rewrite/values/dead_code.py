"""Removes dead equations from traced programs, also from the programs that these call."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core
from jax.interpreters import partial_eval

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.values.hoisting import scan_counts, scan_params
from ikbo_jax.rewrite.values.jaxprs import OPS, inner_programs

#: Parameters of calls: with an entry for every operand, with one for every result, and all others.
_OF_OPERANDS = ("donated_invars", "in_layouts", "in_shardings")
_OF_RESULTS = ("out_layouts", "out_shardings")
_OTHERS = """
    compiler_options_kvs ctx_mesh differentiated inline jaxpr keep_unused name policy prevent_cse
""".split()  # noqa: SIM905  A table of words reads better.
_KNOWN = frozenset((*_OF_OPERANDS, *_OF_RESULTS, *_OTHERS))


def without_dead_code(program: core.Jaxpr) -> core.Jaxpr:
    """Removes dead equations from the program, also from the programs that it calls.

    If there are none, the same object is returned. So a program that is called several times stays
    one object.

    JAX's `dce_jaxpr` processes every called program: for 50 calls of one jitted layer, this takes a
    tenth of the time of tracing them. So only equations that need it are given to `dce_jaxpr`.
    """
    return _Search().live(program)


class _Search:
    """Removes dead code from one program and from all programs that it calls."""

    def __init__(self) -> None:
        # By identity of a program, the program and the same without dead code.
        self._live: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}
        # By identity of a program and the results that are used, the program with these results.
        self._parts: dict[Any, tuple[core.Jaxpr, core.Jaxpr]] = {}
        # By identity of a program in `_live`, which arguments it reads.
        self._read: dict[int, list[bool]] = {}

    def live(self, program: core.Jaxpr) -> core.Jaxpr:
        """Returns the program without dead code; the same object if there is none."""
        key = id(program)
        if key not in self._live:
            self._live[key] = program, self._without_dead_code(program)
        return self._live[key][1]

    def _without_dead_code(self, program: core.Jaxpr) -> core.Jaxpr:
        kept: list[core.JaxprEqn] = []
        literal = core.Literal
        needed: set[Any] = {v for v in program.outvars if type(v) is not literal}
        changed = False
        for eqn in reversed(program.eqns):
            # Most equations are needed, and hold no programs.
            all_used = needed.issuperset(eqn.outvars)
            if not all_used and not eqn.effects and needed.isdisjoint(eqn.outvars):
                changed = True
                continue
            found: Sequence[core.JaxprEqn] = (eqn,)
            if eqn.primitive.name not in explain.WITHOUT_PROGRAMS:
                if not eqn.outvars and not eqn.effects:
                    changed = True
                    continue
                found = self._with_live_programs(program, eqn, needed, all_used)
                changed = changed or len(found) != 1 or found[0] is not eqn
            for x in found:
                kept.append(x)
                # Literals are not variables and cannot be hashed.
                needed |= {v for v in x.invars if type(v) is not literal}
        return program.replace(eqns=kept[::-1]) if changed else program

    def _with_live_programs(
        self, program: core.Jaxpr, eqn: core.JaxprEqn, needed: set[Any], all_used: bool
    ) -> Sequence[core.JaxprEqn]:
        """Removes dead code from an equation's programs; the same object if there is none."""
        programs = inner_programs(eqn)
        if not programs or eqn.params.get("name") in OPS and _begins_with_own_gradient(programs[0]):
            # An op's dead code is no lookup of the model, and XLA removes it.
            return (eqn,)
        name, found = eqn.primitive.name, None
        if name == "scan":
            found = self._scan(eqn, needed)
        elif name in ("jit", "checkpoint", "remat2"):
            found = self._call(eqn, needed)
        # A model may call one program in every layer.
        elif all_used and all([self.live(x) is x for x in programs]):  # noqa: C419
            return (eqn,)
        return _without_dead_results(program, eqn, needed) if found is None else (found,)

    def _scan(self, eqn: core.JaxprEqn, needed: set[Any]) -> core.JaxprEqn | None:
        """Removes dead code from a scan's body; None if it loses results or carries as well.

        A scan of layers keeps all of them: a carry that is not returned is read by the next layer.
        """
        body: core.Jaxpr = eqn.params["jaxpr"]
        used = [v in needed for v in eqn.outvars]
        n_consts, n_carry = scan_counts(eqn.params)
        if not all(_with_carries(body, used, n_consts, n_carry)):
            return None
        live = self.live(body)
        read = _reads(live, [True] * len(used))
        if all(read):
            return eqn if live is body else eqn.replace(params={**eqn.params, "jaxpr": live})
        if not all(read[n_consts : n_consts + n_carry]) or eqn.effects:
            return None
        xs = sum(read[n_consts + n_carry :])
        counts = scan_params(sum(read[:n_consts]), n_carry, xs, len(used) - n_carry)
        body = live.replace(invars=_chosen(live.invars, read), debug_info=_unnamed(live))
        params = {**eqn.params, **counts, "jaxpr": body}
        return eqn.replace(invars=_chosen(eqn.invars, read), params=params)

    def _call(self, eqn: core.JaxprEqn, needed: set[Any]) -> core.JaxprEqn | None:
        """Removes dead code, operands and results from a call; None if JAX must find them."""
        program: core.Jaxpr = eqn.params["jaxpr"]
        used = [v in needed for v in eqn.outvars]
        live = self.live(program if all(used) else self._part(program, used))
        read = self._read.get(id(live))
        if read is None:
            # A model may call one program in every layer.
            read = self._read[id(live)] = _reads(live, [True] * len(live.outvars))
        if all(used) and all(read):
            return eqn if live is program else eqn.replace(params={**eqn.params, "jaxpr": live})
        params = eqn.params
        if eqn.effects or not _KNOWN.issuperset(params):
            return None
        if isinstance(params.get("prevent_cse"), tuple):
            return None
        key = id(live), "operands"
        if key not in self._parts:
            invars = _chosen(live.invars, read)
            self._parts[key] = live, live.replace(invars=invars, debug_info=_unnamed(live))
        filtered: dict[str, Any] = {}
        for flags, names in ((read, _OF_OPERANDS), (used, _OF_RESULTS)):
            filtered |= {x: tuple(_chosen(params[x], flags)) for x in names if x in params}
        return eqn.replace(
            invars=_chosen(eqn.invars, read),
            outvars=_chosen(eqn.outvars, used),
            params={**params, **filtered, "jaxpr": self._parts[key][1]},
        )

    def _part(self, program: core.Jaxpr, used: list[bool]) -> core.Jaxpr:
        key = id(program), *used
        if key not in self._parts:
            outvars = _chosen(program.outvars, used)
            part = program.replace(outvars=outvars, debug_info=_unnamed(program))
            self._parts[key] = program, part
        return self._parts[key][1]


def _begins_with_own_gradient(program: core.Jaxpr) -> bool:
    """Whether the first equation of a program has a gradient of its own, as in an op's program.

    A model's function may have an op's name, but seldom begins like the op. `op_plan` would tell
    them apart for sure, at 3 % of the work of tracing two layers.
    """
    return bool(program.eqns) and program.eqns[0].primitive.name == "custom_vjp_call"


def _chosen(values: Sequence[Any], flags: list[bool]) -> list[Any]:
    return [x for x, flag in zip(values, flags, strict=True) if flag]


def _unnamed(program: core.Jaxpr) -> Any:
    return program.debug_info._replace(arg_names=None, result_paths=None)


def _with_carries(body: core.Jaxpr, used: list[bool], n_consts: int, n_carry: int) -> list[bool]:
    """Finds which results of a scan's body are used, some of them by the next iteration."""
    while True:
        read = _reads(body, used)[n_consts : n_consts + n_carry]
        more = [a or b for a, b in zip(used, read, strict=False)] + used[n_carry:]
        if more == used:
            return used
        used = more


def _reads(program: core.Jaxpr, used: list[bool]) -> list[bool]:
    """Finds the arguments that a program reads for some results; calls read all operands."""
    literal = core.Literal
    needed = {v for v, u in zip(program.outvars, used, strict=True) if u and type(v) is not literal}
    for eqn in reversed(program.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update([v for v in eqn.invars if type(v) is not literal])
    return [v in needed for v in program.invars]


def _without_dead_results(
    program: core.Jaxpr, eqn: core.JaxprEqn, needed: set[Any]
) -> Sequence[core.JaxprEqn]:
    """Removes an equation's results that are not needed, and dead code in its program."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
    outvars = [v for v in eqn.outvars if v in needed]
    alone = program.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=[eqn], debug_info=_unnamed(program)
    )
    cleared, _ = partial_eval.dce_jaxpr(alone, [True] * len(outvars), instantiate=True)
    return cleared.eqns

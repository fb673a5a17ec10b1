"""Products after a norm become `norm_linear` on a GPU, where it was measured to be faster.

This is done on a finished program, at whatever batch its equations run, and for values alone: the
op's gradient takes 1.4 to 1.6 times as long as XLA's of the program as written. Products of the
same normalised rows become groups of one call.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from ikbo_jax.ops import dispatch, norm_linear
from ikbo_jax.rewrite.facts import activations, curves, norms
from ikbo_jax.rewrite.report.kernels import on_gpu
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.equations import described
from ikbo_jax.rewrite.values.graph import Node, graph_of
from ikbo_jax.rewrite.values.jaxprs import interpret, trace

#: Rows and features from which the kernel was faster, if there are as many columns as features:
#: 1.10 to 1.60 times at 4,096 rows, 1.27 to 1.77 at 65,536 (H200, F = 128, 256, 512). With 512
#: rows, XLA takes 8.9 us and the kernel 12.9; with 4,096 by 512 and 256 columns, 12.7 and 13.1.
_LEAST_ROWS, _LEAST_FEATURES = 4096, 128
#: Equations that change no number, or round it, between a norm and its products.
_VIEWS = ("convert_element_type", "reshape")
#: Equations that make weights, which may run earlier than where the program has them.
_CHEAP = (*_VIEWS, "add", "broadcast_in_dim", "mul", "slice", "squeeze")
#: From a product to the result of the longest activation, and some that follow.
_MOST_EQUATIONS = 32
_CALLS = ("checkpoint", "jit", "remat2", "scan")


class _Group(NamedTuple):
    """Describes a product of normalised rows, with a bias and an activation."""

    weight: Node
    bias: Node | None
    activation: str
    result: Node


class _Layer(NamedTuple):
    """Describes products that one call computes, at the position of the first result."""

    position: int
    norm: norms.FoundNorm
    groups: list[_Group]

    def __str__(self) -> str:
        names = "+".join(g.activation for g in self.groups)
        return f"norm_linear of {self.norm.x.aval.str_short()}, {self.norm.kind} norm, {names}"


def has_kernels() -> bool:
    """Whether programs are traced for a GPU that runs the kernels."""
    return on_gpu() and dispatch.hopper_unavailable_reason() is None


def with_linear_layers(program: core.Jaxpr, found: Callable[[str, Any], None]) -> core.Jaxpr:
    """Replaces products after norms by ops, also in the programs that a program calls.

    Returns the same object if there are none, or if an exception is raised. Calls `found` with what
    became an op, and the equation of its first result.
    """
    if not has_kernels() or program.effects:
        return program
    try:
        result, texts = _rewritten(program)
    except ImportError:
        raise
    except Exception as error:
        result, texts = program, [(f"linear layers stay as they are: {described(error)}", None)]
    for text, eqn in {id(eqn): (text, eqn) for text, eqn in texts}.values():
        found(text, eqn)
    return result


#: What programs became, None if they stay, and the texts, so that JAX, which knows programs that
#: are called by identity, compiles them once even if the calling function is traced again.
_KNOWN: weakref.WeakKeyDictionary[Any, tuple[Any, list[tuple[str, Any]]]] = (
    weakref.WeakKeyDictionary()
)


def _rewritten(program: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Rewrites a program and the programs that it calls, and says what became an op."""
    if program in _KNOWN:
        known, texts = _KNOWN[program]
        return program if known is None else known, texts
    eqns, texts = [], []
    for eqn in program.eqns:
        if eqn.primitive.name in _CALLS:
            inner, more = _rewritten(eqn.params["jaxpr"])
            texts += more
            if inner is not eqn.params["jaxpr"]:
                eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn)
    is_same = all(a is b for a, b in zip(eqns, program.eqns, strict=True))
    result = program if is_same else program.replace(eqns=eqns)
    nodes, products = graph_of(result)
    if layers := list(_layers(products)):
        texts += [(str(x), result.eqns[x.position]) for x in layers]
        result = without_dead_code(_replaced(result, nodes, layers))
    _KNOWN[program] = None if result is program else result, texts
    return result, texts


def _layers(products: Sequence[Node]) -> Iterator[_Layer]:
    """Finds the norms for whose products the kernel is faster."""
    by_rows: dict[Node, list[Node]] = {}
    for product in filter(_is_dense, products):
        rows, weight = product.operands
        while rows.name in _VIEWS and rows.operands[0].shape[-1:] == rows.shape[-1:]:
            if rows.operands[0].dtype not in (weight.dtype, "float32"):
                break
            (rows,) = rows.operands
        by_rows.setdefault(rows, []).append(product)
    for rows, found in by_rows.items():
        try:
            norm, groups = norms.norm_of(rows), list(map(_group, found))
        except (norms.NotANorm, RecursionError):
            continue
        if not _pays(norm, groups) or not _is_read_by(norm, found):
            continue
        position = min(g.result.position for g in groups)  # type: ignore[type-var]
        operands = [norm.x, norm.scale, norm.bias, *(x for g in groups for x in (g.weight, g.bias))]
        if all(x is None or _is_known(x, position) for x in operands):  # type: ignore[arg-type]
            yield _Layer(position, norm, groups)  # type: ignore[arg-type]


def _is_dense(product: Node) -> bool:
    """Whether a product is one of rows by a weight, [..., F] by [F, ...], in 16 bits."""
    params, (rows, weight) = product.eqn.params, product.operands
    (contract, batch), rank = params["dimension_numbers"], len(rows.shape)
    return (
        [*map(list, contract), *map(list, batch)] == [[rank - 1], [0], [], []]
        and all(x in (None, lax.Precision.DEFAULT) for x in jax.tree.leaves(params["precision"]))
        and rank >= 2
        and len(weight.shape) in (2, 3)
        and all(type(n) is int and n for n in (*rows.shape, *weight.shape))
        and weight.name != "transpose"  # It would be copied.
        and rows.dtype == weight.dtype
    )


def _group(product: Node) -> _Group:
    """Follows a product to its bias, a vector that is added to every row, and its activation."""
    rows, weight = product.operands
    z, bias, tail = product, None, weight.shape[1:]
    reader = product.readers[0] if len(product.readers) == 1 else None
    if reader and reader.name == "add":
        vector = (*(1 for _ in product.shape[: -len(tail)]), *tail)
        bias = next((x for x in reader.operands if x.shape == vector and x is not z), None)
        z = reader if bias else z
    activation, result = _activated(z, rows.dtype)
    if result.position is None or result.dtype != rows.dtype:
        raise norms.NotANorm
    return _Group(weight, bias, activation, result)


def _activated(z: Node, dtype: str) -> tuple[str, Node]:
    """Returns the activation that is the only use of a value, and its result."""
    found: dict[Node, curves.Curve] = {z: curves.logits(z.dtype)}
    queue, last = [z], ("identity", z)
    while queue and len(found) < _MOST_EQUATIONS:
        for x in queue.pop().readers:
            if x is None or x in found or x.shape != z.shape:
                continue
            operands: list[Any] = [found.get(y, y.number) for y in x.operands]
            curve = None if None in operands else curves.then(x.eqn, operands)
            if curve is None:
                continue
            found[x] = curve
            queue.append(x)
            # Whatever follows is computed from x alone.
            is_only = all(y in found for n in found if n is not x for y in n.readers)
            match = activations.match(curve) if is_only and x.dtype == dtype else None
            if match and abs(match.scale - 1) < 1e-6 and abs(match.output_scale - 1) < 1e-6:
                last = match.activation, x
    return last


def _pays(norm: norms.FoundNorm, groups: Sequence[_Group]) -> bool:
    """Whether the kernel can compute products of a norm, and was measured to be faster."""
    if not staged.is_local(norm.x.aval):
        return False
    columns = tuple(math.prod(g.weight.shape[1:]) for g in groups)
    rows, features = math.prod(norm.x.shape[:-1]), norm.x.shape[-1]
    names = "+".join(g.activation for g in groups)
    return (
        all(g.weight.dtype == norm.x.dtype for g in groups)
        and isinstance(rows, int)
        and rows >= _LEAST_ROWS
        and sum(columns) >= features >= _LEAST_FEATURES
        and norm_linear.kernel_is_first(rows, features, columns, norm.kind, norm.x.dtype, names)
    )


def _is_read_by(norm: norms.FoundNorm, products: Sequence[Node]) -> bool:
    """Whether nothing else than products reads a norm, which XLA would compute besides."""
    inside = set(norm.inside)
    queue = list(inside)
    while queue:
        for x in queue.pop().readers:
            if x in inside or x in products:
                continue
            if x is None or x.name not in _VIEWS:
                return False
            inside.add(x)
            queue.append(x)
    return True


def _is_known(node: Node, position: int) -> bool:
    """Whether a value can be computed at a position of the program, from what stands before."""
    if node.literal is not None or node.position is not None and node.position < position:
        return True
    return node.name in _CHEAP and all(_is_known(x, position) for x in node.operands)


def _replaced(program: core.Jaxpr, nodes: dict[core.Var, Node], layers: Sequence[_Layer]) -> Any:
    """Traces the program again, with the ops in place of the layers' results."""

    def run(*inputs: Any) -> list[Any]:
        arguments = [*program.constvars, *program.invars], [*program.consts, *inputs]
        known: dict[Node, Any] = {nodes[v]: x for v, x in zip(*arguments, strict=True)}
        made: dict[Node, Any] = {}
        positions = itertools.count()

        def value(node: Node) -> Any:
            if node not in known and node.literal is None:
                operands = list(map(value, node.operands))
                known[node] = staged.bind(node.eqn.primitive, operands, node.eqn.params)
            return known.get(node, node.literal)

        def step(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            for layer in at.get(next(positions), ()):
                made.update(_computed(layer, value))
            bound = staged.bind(eqn.primitive, operands, eqn.params, eqn.invars)
            bound = bound if eqn.primitive.multiple_results else [bound]
            outs = [nodes[v] for v in eqn.outvars]
            results = [made.get(x, y) for x, y in zip(outs, bound, strict=True)]
            known.update(zip(outs, results, strict=True))
            return results

        return interpret(program, program.consts, inputs, step)

    at: dict[int, list[_Layer]] = {}
    for layer in layers:
        at.setdefault(layer.position, []).append(layer)
    return trace(run, [v.aval for v in program.invars], program)


def _computed(layer: _Layer, value: Callable[[Node], Any]) -> Iterator[tuple[Node, Any]]:
    """Computes the results of a layer by the op."""
    norm, groups = layer.norm, layer.groups

    def shaped(node: Node | None, *shape: int) -> Any:
        return None if node is None else value(node).reshape(shape)

    out = norm_linear.norm_linear(
        shaped(norm.x, -1, norm.x.shape[-1]),
        [value(g.weight) for g in groups],
        [shaped(g.bias, *g.weight.shape[1:]) for g in groups],
        activations=[g.activation for g in groups],
        norm=norm.kind,
        norm_scale=shaped(norm.scale, -1),
        norm_bias=shaped(norm.bias, -1),
        eps=norm.eps,
    )
    return ((g.result, y.reshape(g.result.shape)) for g, y in zip(groups, out, strict=True))

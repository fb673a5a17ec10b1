"""The rules by primitive, and the exception that a rule raises if it cannot rewrite."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core

#: Takes the context, the equation and its operands; returns the result, or a list of results.
Rule = Callable[..., Any]

#: The rules by kind of operand ("lazy", "merged" or "scores") and primitive.
_RULES: dict[str, dict[str, Rule]] = {"lazy": {}}
_SOURCES: set[str] = set()
_ARRAYS: dict[str, Callable[[Any, core.JaxprEqn, list[Any]], bool]] = {}


class NotCovered(Exception):
    """Is raised by a rule that cannot rewrite its operands; the message says why."""


def register_rule(
    primitive: core.Primitive | str,
    rule: Rule | None = None,
    *,
    source: bool = False,
    arrays: Callable[[Any, core.JaxprEqn, list[Any]], bool] | None = None,
) -> Any:
    """Registers the rule of a primitive, which replaces any earlier rule of this primitive.

    The rule is called as `rule(ctx, eqn, *operands)`. An operand is a `jax.Array`, a `Lazy` or a
    `Concat`. The rule returns the equation's result as such a value, or a list of values if the
    primitive has several results; `ctx.bind(eqn, *arrays, **params)` runs the primitive. If the
    rule raises `NotCovered("why")`, the operands are materialised and the equation runs as it is.

    Args:
      primitive: a `jax.extend.core.Primitive`, or its name.
      rule: the rule; without it, the function returns a decorator.
      source: whether the rule is also called when all operands are arrays.
      arrays: says for a context, an equation and its operands, all of them arrays, whether the rule
        is called.

    Returns:
      The rule, or a decorator.

    Raises:
      TypeError: `primitive` is no primitive (`jax.lax.sin` is a function, `jax.lax.sin_p` its
        primitive), or the rule is no function.
    """
    if not isinstance(primitive, core.Primitive | str):
        raise TypeError(
            f"primitive must be a jax.extend.core.Primitive or its name, but is {primitive!r:.80}"
        )
    if rule is not None and not callable(rule):
        raise TypeError(f"rule must be a function, but is {rule!r:.80}")

    def register(rule: Rule) -> Rule:
        name = str(primitive)
        _RULES["lazy"][name] = rule
        (_SOURCES.add if source else _SOURCES.discard)(name)
        _ARRAYS.pop(name, None)
        if arrays is not None:
            _ARRAYS[name] = arrays
        return rule

    return register if rule is None else register(rule)


def rule_of(name: str, kind: str = "lazy") -> Rule | None:
    """Returns the rule of a primitive for values of one kind; None if it has none."""
    return _RULES[kind].get(name)


def register_rules_of(kind: str, rules: Mapping[str, Rule]) -> None:
    """Registers the rules of values of one kind, "merged" or "scores", by primitive."""
    _RULES[kind] = dict(rules)


def applies_to_arrays(ctx: Any, eqn: core.JaxprEqn, operands: list[Any]) -> bool:
    """Whether the rule of an equation is called although its operands are arrays."""
    name = eqn.primitive.name
    return name in _SOURCES or name in _ARRAYS and _ARRAYS[name](ctx, eqn, operands)


def is_source(name: str) -> bool:
    """Whether a primitive can broadcast arrays, so that its rule runs on arrays, too."""
    return name in _SOURCES

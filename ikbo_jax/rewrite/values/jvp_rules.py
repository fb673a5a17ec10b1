"""Which equations of `custom_jvp_call` have the same JVP rule.

A model calls one function, such as `jax.nn.relu`, in every layer. JAX wraps its JVP rule anew for
every call, so that the parameters of two calls are never equal.
"""

from typing import Any


def identity(derivative: Any) -> Any:
    """Returns an object that is equal for calls with the same JVP rule, `jvp_jaxpr_fun`.

    It is the rule's Python function and the tree of its arguments. None if JAX wraps rules in
    another way than expected here, or if the call has static arguments (`nondiff_argnums`).
    """
    thunk = _closed_over(getattr(derivative, "f", None)).get("fn")
    rule: Any = _closed_over(thunk).get("jvp")
    transforms: Any = getattr(rule, "transforms", None)
    if not transforms or len(transforms) != 1 or getattr(rule, "params", None) != ():
        return None
    function, parameters = transforms[0]
    if getattr(function, "__name__", "") != "_flatten_jvp" or len(parameters) != 4:
        return None
    return rule.f, parameters[2]


def _closed_over(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    try:
        return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    except ValueError:  # A cell is empty.
        return {}

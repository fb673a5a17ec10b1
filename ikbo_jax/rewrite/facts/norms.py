"""Proves that rows are the layer norm or the RMS norm of other rows, however it is written.

Each value between rows x and their norm is a polynomial, with constant coefficients, of x; its
mean; "square", the mean of x²; "rstd", 1 / √(variance + eps); and vectors of features. The variance
is square - mean² (layer norm) or square (RMS norm). Models compute the variance as the mean of
(x - mean)² or as the difference, scale before or after they subtract the mean, and so on: the
polynomials are the same.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from ikbo_jax.rewrite.values.graph import Node

X, MEAN, SQUARE, RSTD = "x", "mean", "square", "rstd"
#: Coefficients by monomial: factors with exponents, the above and nodes of vectors of features.
Polynomial = dict[frozenset[tuple[Any, int]], float]

NARROW = ("bfloat16", "float16")
_ONE: frozenset[tuple[Any, int]] = frozenset()
#: Rounding of numbers in float32, such as 1 / 384.
_TOLERANCE = 1e-6
#: Products of a norm have 9. Squares of squares of others would have thousands.
_MOST_TERMS = 64


class NotANorm(Exception):
    """Is raised where a value is not proven to belong to a norm."""


class FoundNorm(NamedTuple):
    """Describes rows `scale · (x - mean) / √(variance + eps) + bias`.

    Attributes:
      kind: "layer", or "rms": without the mean.
      eps: the number that is added to the variance.
      x: the rows that are normalised, of 16 bits.
      scale: a vector of features; None is 1.
      bias: a vector of features; None is 0.
      inside: the values between `x` and the norm.
    """

    kind: str
    eps: float
    x: Node
    scale: Node | None
    bias: Node | None
    inside: frozenset[Node]


def norm_of(root: Node) -> FoundNorm:
    """Returns the norm that a value is; raises NotANorm unless it is proven to be one.

    Sums and statistics must be float32. What is normalised may be rounded to 16 bits, also before
    it is scaled.
    """
    proof = _Proof(root.shape)
    parts: dict[Any, Polynomial] = {X: {}, MEAN: {}, None: {}}
    for monomial, factor in proof.of(root).items():
        features = frozenset(p for p in monomial if isinstance(p[0], Node))
        others = dict(monomial - features)
        of = next((k for k in (X, MEAN) if others == {k: 1, RSTD: 1}), None)
        if of is None and others:
            raise NotANorm
        parts[of][features] = factor
    if proof.norm is None or proof.x is None:
        raise NotANorm
    kind, eps = proof.norm
    means = {k: -v for k, v in parts[MEAN].items()}
    if not parts[X] or not _equal(means, parts[X] if kind == "layer" else {}):
        raise NotANorm
    scale, bias = _vector(parts[X], {_ONE: 1.0}), _vector(parts[None], {})
    return FoundNorm(kind, eps, proof.x, scale, bias, frozenset({root, *proof.found}))


def _vector(polynomial: Polynomial, default: Polynomial) -> Node | None:
    """Returns the vector that a polynomial is; None if it is the default."""
    if _equal(polynomial, default):
        return None
    vector: Node = next((k for monomial in polynomial for k, _ in monomial), None)  # type: ignore[assignment]
    if not _equal(polynomial, _one(vector)):
        raise NotANorm
    return vector


def _equal(a: Polynomial, b: Polynomial) -> bool:
    return not _sum(a, b, -1.0)


def _sum(a: Polynomial, b: Polynomial, sign: float = 1.0) -> Polynomial:
    both = {k: (a.get(k, 0.0), sign * b.get(k, 0.0)) for k in a.keys() | b.keys()}
    return {k: x + y for k, (x, y) in both.items() if abs(x + y) > _TOLERANCE * max(x, y, -x, -y)}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    if len(a) * len(b) > _MOST_TERMS:
        raise NotANorm
    for (m, c), (n, d) in itertools.product(a.items(), b.items()):
        powers = dict(m)
        for k, power in n:
            powers[k] = powers.get(k, 0) + power
        found = _sum(found, {frozenset((k, n) for k, n in powers.items() if n): c * d})
    return found


def _one(factor: Any, power: int = 1) -> Polynomial:
    return {frozenset([(factor, power)] if power else []): 1.0}


_VARIANCES = {"layer": _sum(_one(SQUARE), _one(MEAN, 2), -1.0), "rms": _one(SQUARE)}


class _Proof:
    """Computes the polynomials of the values above the rows x.

    A value has the rank of x, and 1 or all features, or it lacks the dimension of the features.
    """

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.shape, self.rows, self.features = shape, shape[:-1], shape[-1]
        self.x: Node | None = None
        self.norm: tuple[str, float] | None = None
        self.found: dict[Node, Polynomial] = {}

    def of(self, node: Node) -> Polynomial:
        """Returns the polynomial of a value; NotANorm if it is none, or computed too coarsely."""
        if node.name == "convert_element_type" and node.operands[0].dtype in NARROW:
            # The first rows that are cast are x.
            self.x = self.x or (node.operands[0] if node.shape == self.shape else None)
            if node.operands[0] is self.x and node.dtype == "float32":
                return _one(X)
        if (number := node.number) is not None:
            return {_ONE: number} if number else {}
        if node.shape == (*(1 for _ in self.rows), self.features):
            while node.name in ("broadcast_in_dim", "reshape"):
                if math.prod(node.operands[0].shape) != self.features:
                    break
                (node,) = node.operands
            return _one(node)
        if node not in self.found:
            if node.shape not in (self.shape, (*self.rows, 1), self.rows):
                raise NotANorm
            found = self.found[node] = self._computed(node, node.name, node.operands)
            is_narrow = node.dtype in NARROW and any((RSTD, 1) in m for m in found)
            if node.dtype != "float32" and not is_narrow:
                raise NotANorm
        return self.found[node]

    def _computed(self, node: Node, name: str, operands: tuple[Node, ...]) -> Polynomial:
        if name in ("add", "sub", "mul", "div"):
            a, b = map(self.of, operands)
            if name in ("add", "sub"):
                return _sum(a, b, 1.0 if name == "add" else -1.0)
            return _product(a, b if name == "mul" else _inverse(b))
        if name in ("convert_element_type", "neg"):
            return _product(self.of(operands[0]), {_ONE: -1.0 if name == "neg" else 1.0})
        if name == "square" or name == "integer_pow" and node.eqn.params["y"] == 2:
            return _product(self.of(operands[0]), self.of(operands[0]))
        power = operands[1].number if name == "pow" else {"rsqrt": -0.5, "sqrt": 0.5}.get(name)
        if power in (-0.5, 0.5):
            of = dict(self.of(operands[0]))
            eps = of.pop(_ONE, 0.0)
            kind = next((k for k, v in _VARIANCES.items() if _equal(of, v)), None)
            if kind is not None and eps > 0 and self.norm in (None, (kind, eps)):
                self.norm = kind, eps
                return _one(RSTD, 1 if power == -0.5 else -1)
        axes = node.eqn.params["axes"] if name == "reduce_sum" else ()
        if axes == (len(self.rows),) and operands[0].shape == self.shape:
            return _product(self._mean_of_row(operands[0]), {_ONE: float(self.features)})
        if name in ("broadcast_in_dim", "reshape") and node.shape == (*self.rows, 1):
            dims = node.eqn.params.get("broadcast_dimensions", range(len(self.rows)))
            if operands[0].shape == self.rows and tuple(dims) == tuple(range(len(self.rows))):
                return self.of(operands[0])
        if name == "max" and operands[0].number == 0:
            # A variance that is kept from being negative where it is rounded.
            found = self.of(operands[1])
            if any(_equal(found, v) for v in _VARIANCES.values()):
                return found
        if name == "select_n" and (which := operands[0].number) in (0, 1):
            return self.of(operands[1 + int(which)])
        raise NotANorm

    def _mean_of_row(self, of: Node) -> Polynomial:
        found: Polynomial = {}
        for monomial, factor in self.of(of).items():
            powers = dict(monomial)
            degree = powers.pop(X, 0)
            if degree not in (0, 1, 2) or any(isinstance(k, Node) for k in powers):
                raise NotANorm
            mean = _one({0: X, 1: MEAN, 2: SQUARE}[degree], 1 if degree else 0)
            found = _sum(found, _product({frozenset(powers.items()): factor}, mean))
        return found


def _inverse(p: Polynomial) -> Polynomial:
    """Inverts a number, or a power of `RSTD`."""
    if len(p) != 1 or any(k != RSTD for monomial in p for k, _ in monomial):
        raise NotANorm
    return {frozenset((k, -n) for k, n in m): 1 / factor for m, factor in p.items()}

"""Rules of the dispatch table for each op: names, shape classes, distances, JSON.

`Rules` holds the functions that differ between ops. `RULES` lists them by op name; `of` returns the
rules for a problem.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ikbo_jax.tuning import configs
from ikbo_jax.tuning.configs import (
    AttentionConfig,
    AttentionProblem,
    LinearCompressionConfig,
    LinearCompressionProblem,
)
from ikbo_jax.tuning.gdpa_configs import (
    SOFTMAX,
    GdpaConfig,
    GdpaProblem,
    gdpa_candidate_configs,
    gdpa_illegal_reason,
    keys_fit_stages,
)

Problem = LinearCompressionProblem | AttentionProblem | GdpaProblem
Config = LinearCompressionConfig | AttentionConfig | GdpaConfig

#: A nearby row's block_m may pad M to at most this multiple of M padded by the default block_m.
MAX_EXTRA_PADDING = 1.125
#: Coefficients of linear compression's distance. M decides how tiles fit and has the largest
#: coefficient; the coarse levels do little work.
DISTANCE_WEIGHTS = {
    "m": 2.0,
    "n": 1.0,
    "k_fine": 1.0,
    "b_fine": 1.0,
    "k_coarse": 0.25,
    "ratio": 0.25,
}
#: Added to the distance for each level that only one of the problems has.
LEVEL_DISTANCE = 2.0
#: Coefficients of attention's distance. S and T decide the pipeline and the tiles; the number of
#: tiles, of candidates per user and of query heads per key head only affect data movement.
ATTENTION_DISTANCE_WEIGHTS = {
    "kv_len": 1.0,
    "q_len": 1.0,
    "tiles": 0.25,
    "ratio": 0.25,
    "heads": 0.25,
}
#: Coefficients of generalised attention's distance. Mean lengths decide the pipeline and the tiles.
GDPA_DISTANCE_WEIGHTS = {
    "kv_len": 1.0,
    "q_len": 1.0,
    "tiles": 0.25,
    "ratio": 0.25,
    "heads": 0.25,
}
#: Added to the distance if activations differ, since the activation decides what limits the kernel;
#: as much as one doubling of a length.
ACTIVATION_DISTANCE = 1.0
#: Added to the distance if one problem has full and the other jagged sequences.
JAGGED_DISTANCE = 1.0


@dataclasses.dataclass(frozen=True)
class Rules:
    """The functions that the dispatch table needs for an op.

    Attributes:
      op: the op's name in table rows.
      problem_type: class of the op's problem description.
      config_type: class of the kernel's configuration.
      illegal_reason: takes (problem, config); returns why the kernel cannot run, or None.
      candidate_configs: takes a problem; yields the legal configurations worth timing, the most
        promising first.
      problem_from_json: reads a problem; raises ValueError if it is malformed.
      describe: takes a problem; returns one line of text.
      shape_class: takes a problem; returns a name. Problems of one class and one dtype share a row.
      distance: takes two problems, ignores their dtypes; infinite if a row for one problem says
        nothing about the other.
      fits: takes (problem, config, default_config); whether the legal `config` of a nearby row
        suits the problem.
      user_rows_generalise: whether a row of the user's cache also serves nearby problems, as rows
        of `sm90.json` do; if false, it serves the same problem only.
    """

    op: str
    problem_type: type
    config_type: type
    illegal_reason: Callable[[Any, Any], str | None]
    candidate_configs: Callable[[Any], Iterator[Any]]
    problem_from_json: Callable[[Mapping[str, Any]], Any]
    describe: Callable[[Any], str]
    shape_class: Callable[[Any], str]
    distance: Callable[[Any, Any], float]
    fits: Callable[[Any, Any, Any], bool]
    user_rows_generalise: bool = False


def of(problem: Problem) -> Rules:
    """The rules of the op that `problem` belongs to."""
    return next(rules for rules in RULES.values() if isinstance(problem, rules.problem_type))


# Linear compression.


def _linear_from_json(fields: Mapping[str, Any]) -> LinearCompressionProblem:
    batches = tuple(size(b, "batches") for b in typed(fields.get("batches"), list, "batches"))
    ks = tuple(size(k, "ks") for k in typed(fields.get("ks"), list, "ks"))
    if not batches or len(batches) != len(ks):
        raise ValueError(f"row has {len(batches)} batches and {len(ks)} ks")
    dtype = typed(fields.get("dtype"), str, "dtype")
    return LinearCompressionProblem(
        batches, ks, size(fields.get("m"), "m"), size(fields.get("n"), "n"), dtype
    )


def _describe_linear(problem: LinearCompressionProblem) -> str:
    batches = ",".join(map(str, problem.batches))
    ks = ",".join(map(str, problem.ks))
    return f"B={batches} K={ks} M={problem.m} N={problem.n} {problem.dtype}"


def _linear_class(problem: LinearCompressionProblem) -> str:
    """Batches, ratios and K by octave; M by 16, the step of block_m; N by 128, a tile's width."""
    batches = problem.batches
    ratios = [_octave(fine / max(coarse, 1)) for coarse, fine in _adjacent(batches)]
    return (
        f"linear_compression b=2^{_octave(batches[-1])} "
        f"ratio={','.join(f'2^{r}' for r in ratios) or '-'} "
        f"k={','.join(f'2^{_octave(k)}' for k in problem.ks)} "
        f"m={-(-problem.m // 16) * 16} n={-(-problem.n // 128) * 128}"
    )


def _linear_distance(a: LinearCompressionProblem, b: LinearCompressionProblem) -> float:
    """Weighted sum of |log2(size of a / size of b)|; levels are paired from the finest.

    See `DISTANCE_WEIGHTS`; "ratio" is the batch of a level over the batch of the next coarser one.
    """
    weights = DISTANCE_WEIGHTS
    total = weights["m"] * _doublings(a.m, b.m) + weights["n"] * _doublings(a.n, b.n)
    total += weights["k_fine"] * _doublings(a.ks[-1], b.ks[-1])
    total += weights["b_fine"] * _doublings(a.batches[-1], b.batches[-1])
    for k_a, k_b in zip(a.ks[-2::-1], b.ks[-2::-1], strict=False):
        total += weights["k_coarse"] * _doublings(k_a, k_b)
    ratios_a = [fine / max(coarse, 1) for coarse, fine in _adjacent(a.batches)]
    ratios_b = [fine / max(coarse, 1) for coarse, fine in _adjacent(b.batches)]
    for r_a, r_b in zip(ratios_a[::-1], ratios_b[::-1], strict=False):
        total += weights["ratio"] * _doublings(r_a, r_b, least=1e-6)
    return total + LEVEL_DISTANCE * abs(len(a.batches) - len(b.batches))


def _linear_fits(
    problem: LinearCompressionProblem,
    config: LinearCompressionConfig,
    default_config: LinearCompressionConfig,
) -> bool:
    padded = -(-problem.m // config.block_m) * config.block_m
    default_padded = -(-problem.m // default_config.block_m) * default_config.block_m
    return padded <= MAX_EXTRA_PADDING * default_padded


def _adjacent(batches: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(batches[:-1], batches[1:], strict=True))


# Attention.


def _attention_from_json(fields: Mapping[str, Any]) -> AttentionProblem:
    sizes = {
        field.name: size(fields.get(field.name), field.name)
        for field in dataclasses.fields(AttentionProblem)
        if field.name != "dtype"
    }
    _positive(fields.get("kv_heads"), "kv_heads")
    return AttentionProblem(**sizes, dtype=typed(fields.get("dtype"), str, "dtype"))


def _describe_attention(problem: AttentionProblem) -> str:
    p = problem
    return (
        f"B={p.batch} U={p.users} T={p.q_len} S={p.kv_len} N={p.q_heads} K={p.kv_heads} "
        f"H={p.head_dim} {p.dtype}"
    )


def _attention_class(problem: AttentionProblem) -> str:
    """H exactly, every other size by octave."""
    p = problem
    return (
        f"attention h={p.head_dim} s=2^{_octave(p.kv_len)} t=2^{_octave(p.q_len)} "
        f"b=2^{_octave(p.batch)} ratio=2^{_octave(p.batch / max(p.users, 1))} "
        f"n=2^{_octave(p.q_heads)} k=2^{_octave(p.kv_heads)}"
    )


def _attention_distance(a: AttentionProblem, b: AttentionProblem) -> float:
    """Weighted sum of |log2(size of a / size of b)|; infinite if H, and so the tiles, differ.

    See `ATTENTION_DISTANCE_WEIGHTS`; "tiles" is the number of query rows times heads, "ratio" the
    candidates per user, "heads" the query heads per key head.
    """
    if a.head_dim != b.head_dim:
        return math.inf
    measures: dict[str, Callable[[AttentionProblem], float]] = {
        "kv_len": lambda p: p.kv_len,
        "q_len": lambda p: p.q_len,
        "tiles": lambda p: p.batch * p.q_len * p.q_heads,
        "ratio": lambda p: p.batch / max(p.users, 1),
        "heads": lambda p: p.q_heads / p.kv_heads,
    }
    return sum(
        ATTENTION_DISTANCE_WEIGHTS[name] * _doublings(measure(a), measure(b), least=1e-6)
        for name, measure in measures.items()
    )


# Generalised dot-product attention.


def _gdpa_from_json(fields: Mapping[str, Any]) -> GdpaProblem:
    def optional(name: str) -> int | None:
        value = fields.get(name)
        return None if value is None else size(value, name)

    names = ("batch", "batch_kv", "q_rows", "kv_rows", "q_heads", "kv_heads", "head_dim")
    sizes = {name: size(fields.get(name), name) for name in names}
    _positive(fields.get("kv_heads"), "kv_heads")
    activations = typed(fields.get("activations"), list, "activations")
    approx = fields.get("approx")
    return GdpaProblem(
        **sizes,
        dtype=typed(fields.get("dtype"), str, "dtype"),
        activations=tuple(typed(name, str, "activations") for name in activations),
        approx=None if approx is None else typed(approx, str, "approx"),
        broadcast_q=typed(fields.get("broadcast_q"), bool, "broadcast_q"),
        max_seqlen_q=optional("max_seqlen_q"),
        max_seqlen_kv=optional("max_seqlen_kv"),
    )


def _gdpa_means(p: GdpaProblem) -> tuple[float, float]:
    """Mean lengths of the sequences of queries and of keys."""
    return p.q_rows / max(p.batch, 1), p.kv_rows / max(p.batch_kv, 1)


def _gdpa_class(problem: GdpaProblem) -> str:
    """H and activations exactly, every other size by octave; lengths by their means."""
    p = problem
    q_len, kv_len = _gdpa_means(p)
    return (
        f"gdpa h={p.head_dim} q=2^{_octave(q_len)} kv=2^{_octave(kv_len)} b=2^{_octave(p.batch)} "
        f"ratio=2^{_octave(p.batch / max(p.batch_kv, 1))} n=2^{_octave(p.q_heads)} "
        f"k=2^{_octave(p.kv_heads)} {'full' if p.is_full else 'jagged'} "
        f"{'+'.join(p.activations)} {p.approx or 'exact'}"
    )


def _gdpa_distance(a: GdpaProblem, b: GdpaProblem) -> float:
    """Weighted sum of |log2(size of a / size of b)|, plus terms for activations and full sequences.

    Infinite if H differs, or if only one problem has softmax, which another kernel computes. See
    `GDPA_DISTANCE_WEIGHTS`.
    """
    if a.head_dim != b.head_dim or (SOFTMAX in a.activations) != (SOFTMAX in b.activations):
        return math.inf
    measures: dict[str, Callable[[GdpaProblem], float]] = {
        "kv_len": lambda p: _gdpa_means(p)[1],
        "q_len": lambda p: _gdpa_means(p)[0],
        "tiles": lambda p: p.q_rows * p.q_heads,
        "ratio": lambda p: p.batch / max(p.batch_kv, 1),
        "heads": lambda p: p.q_heads / p.kv_heads,
    }
    total = sum(
        GDPA_DISTANCE_WEIGHTS[name] * _doublings(measure(a), measure(b), least=1e-6)
        for name, measure in measures.items()
    )
    is_same = (a.activations, a.approx) == (b.activations, b.approx)
    total += 0.0 if is_same else ACTIVATION_DISTANCE
    return total + (0.0 if a.is_full == b.is_full else JAGGED_DISTANCE)


def _gdpa_fits(problem: GdpaProblem, config: GdpaConfig, default_config: GdpaConfig) -> bool:
    """False if run > 1 and keys do not fit the stages: run then saves no loads but unbalances."""
    del default_config
    return config.run == 1 or keys_fit_stages(problem, config)


RULES: Mapping[str, Rules] = {
    rules.op: rules
    for rules in (
        Rules(
            "linear_compression",
            LinearCompressionProblem,
            LinearCompressionConfig,
            configs.illegal_reason,
            configs.candidate_configs,
            _linear_from_json,
            _describe_linear,
            _linear_class,
            _linear_distance,
            _linear_fits,
        ),
        Rules(
            "attention",
            AttentionProblem,
            AttentionConfig,
            configs.attention_illegal_reason,
            configs.attention_candidate_configs,
            _attention_from_json,
            _describe_attention,
            _attention_class,
            _attention_distance,
            lambda problem, config, default_config: True,
        ),
        Rules(
            "gdpa",
            GdpaProblem,
            GdpaConfig,
            gdpa_illegal_reason,
            gdpa_candidate_configs,
            _gdpa_from_json,
            GdpaProblem.describe,
            _gdpa_class,
            _gdpa_distance,
            _gdpa_fits,
            # The number of rows of jagged arrays differs between calls, and without a measured row
            # nearby XLA runs them.
            user_rows_generalise=True,
        ),
    )
}


@functools.lru_cache(maxsize=1024)
def default_config(problem: Problem) -> Any:
    """The most promising configuration without a measurement; None if none is legal."""
    return next(of(problem).candidate_configs(problem), None)


def _octave(value: float) -> int:
    return round(math.log2(max(value, 1e-6)))


def _doublings(a: float, b: float, least: float = 1.0) -> float:
    return abs(math.log2(max(a, least) / max(b, least)))


# Checks of JSON values; `table` uses them, too.


def typed(value: Any, kind: type, name: str) -> Any:
    """Returns `value`; raises ValueError unless it is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}, expected a {kind.__name__}")
    return value


def size(value: Any, name: str) -> int:
    """Returns `value`; raises ValueError unless it is an integer in [0, 2**63)."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not is_size:
        raise ValueError(f"{name} holds {value!r:.80}, expected an integer of at least 0")
    return int(value)


def measured(value: Any, name: str) -> float:
    """Returns `value` as a float; raises ValueError unless it is finite and at least 0.

    Earlier versions wrote 0 for very small fractions.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 2.0**1023:
        raise ValueError(f"{name} is {value!r:.80}, expected a finite number of at least 0")
    return float(value)


def _positive(value: Any, name: str) -> int:
    """Like `size`, but rejects 0, since distances divide by the value."""
    checked = size(value, name)
    if not checked:
        raise ValueError(f"{name} is 0, expected at least 1")
    return checked

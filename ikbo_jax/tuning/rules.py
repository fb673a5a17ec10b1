"""What the ops' problems look like to the dispatch table: names, classes, distances, JSON.

`Rules` holds what differs from op to op; `RULES` lists them by name, `of` finds those of a problem.
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
    keys_stay,
)

Problem = LinearCompressionProblem | AttentionProblem | GdpaProblem
Config = LinearCompressionConfig | AttentionConfig | GdpaConfig

#: A nearby row's tile may pad M to at most this multiple of what the best tile pads it to.
MAX_EXTRA_PADDING = 1.125
#: Weights of linear compression's distance. M decides how tiles fit and counts most; the coarse
#: levels do little work.
DISTANCE_WEIGHTS = {
    "m": 2.0,
    "n": 1.0,
    "k_fine": 1.0,
    "b_fine": 1.0,
    "k_coarse": 0.25,
    "ratio": 0.25,
}
#: Distance for every level that one problem has and the other has not.
LEVEL_DISTANCE = 2.0
#: Weights of attention's distance. S and T decide the pipeline and the tiles; the number of tiles,
#: the candidates of a user and the query heads of a key head move data only.
ATTENTION_DISTANCE_WEIGHTS = {
    "kv_len": 1.0,
    "q_len": 1.0,
    "tiles": 0.25,
    "ratio": 0.25,
    "heads": 0.25,
}
#: Weights of generalised attention's distance. Mean lengths decide the pipeline and the tiles; the
#: activation decides what limits the kernel, and counts as much as one doubling; so does whether
#: sequences are full or jagged.
GDPA_DISTANCE_WEIGHTS = {
    "kv_len": 1.0,
    "q_len": 1.0,
    "tiles": 0.25,
    "ratio": 0.25,
    "heads": 0.25,
}
ACTIVATION_DISTANCE = 1.0
#: What full sequences are away from jagged ones.
JAGGED_DISTANCE = 1.0


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the table asks about an op.

    Attributes:
      op: the op's name, as rows carry it.
      problem_type: its problem description.
      config_type: its kernel's configuration.
      illegal_reason: why a configuration cannot run a problem; None if it can.
      candidate_configs: the legal configurations, the likeliest best first.
      problem_from_json: reads a problem; raises ValueError saying what is wrong with it.
      describe: the problem in one line.
      shape_class: problems of one class share a row, dtype aside.
      distance: between problems, dtype aside; infinite if a row of one cannot speak for the other.
      fits: whether a row's legal configuration suits a problem whose default one is the third.
      user_rows_reach: whether a row of the user's cache speaks for other problems too, as shipped
        rows do, or for its own alone.
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
    user_rows_reach: bool = False


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
    """Batches, their ratios and K by octave; M by 16 rows, a tile's step; N by 128, its width."""
    batches = problem.batches
    ratios = [_octave(fine / max(coarse, 1)) for coarse, fine in _neighbours(batches)]
    return (
        f"linear_compression b=2^{_octave(batches[-1])} "
        f"ratio={','.join(f'2^{r}' for r in ratios) or '-'} "
        f"k={','.join(f'2^{_octave(k)}' for k in problem.ks)} "
        f"m={-(-problem.m // 16) * 16} n={-(-problem.n // 128) * 128}"
    )


def _linear_distance(a: LinearCompressionProblem, b: LinearCompressionProblem) -> float:
    """Weighted sum of |log2| of the sizes' ratios, levels paired from the finest.

    See `DISTANCE_WEIGHTS`; "ratio" is a level's batch over that of the level before it.
    """
    weights = DISTANCE_WEIGHTS
    total = weights["m"] * _doublings(a.m, b.m) + weights["n"] * _doublings(a.n, b.n)
    total += weights["k_fine"] * _doublings(a.ks[-1], b.ks[-1])
    total += weights["b_fine"] * _doublings(a.batches[-1], b.batches[-1])
    for k_a, k_b in zip(a.ks[-2::-1], b.ks[-2::-1], strict=False):
        total += weights["k_coarse"] * _doublings(k_a, k_b)
    ratios_a = [fine / max(coarse, 1) for coarse, fine in _neighbours(a.batches)]
    ratios_b = [fine / max(coarse, 1) for coarse, fine in _neighbours(b.batches)]
    for r_a, r_b in zip(ratios_a[::-1], ratios_b[::-1], strict=False):
        total += weights["ratio"] * _doublings(r_a, r_b, least=1e-6)
    return total + LEVEL_DISTANCE * abs(len(a.batches) - len(b.batches))


def _linear_fits(
    problem: LinearCompressionProblem,
    config: LinearCompressionConfig,
    fallback: LinearCompressionConfig,
) -> bool:
    padded = -(-problem.m // config.block_m) * config.block_m
    least = -(-problem.m // fallback.block_m) * fallback.block_m
    return padded <= MAX_EXTRA_PADDING * least


def _neighbours(batches: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(batches[:-1], batches[1:], strict=True))


# Attention.


def _attention_from_json(fields: Mapping[str, Any]) -> AttentionProblem:
    sizes = {
        field.name: size(fields.get(field.name), field.name)
        for field in dataclasses.fields(AttentionProblem)
        if field.name != "dtype"
    }
    _heads(fields.get("kv_heads"), "kv_heads")
    return AttentionProblem(**sizes, dtype=typed(fields.get("dtype"), str, "dtype"))


def _describe_attention(problem: AttentionProblem) -> str:
    p = problem
    return (
        f"B={p.batch} U={p.users} T={p.q_len} S={p.kv_len} N={p.q_heads} K={p.kv_heads} "
        f"H={p.head_dim} {p.dtype}"
    )


def _attention_class(problem: AttentionProblem) -> str:
    """H as it is, everything else by octave."""
    p = problem
    return (
        f"attention h={p.head_dim} s=2^{_octave(p.kv_len)} t=2^{_octave(p.q_len)} "
        f"b=2^{_octave(p.batch)} ratio=2^{_octave(p.batch / max(p.users, 1))} "
        f"n=2^{_octave(p.q_heads)} k=2^{_octave(p.kv_heads)}"
    )


def _attention_distance(a: AttentionProblem, b: AttentionProblem) -> float:
    """Weighted sum of |log2| of the sizes' ratios; infinite if H differs, which shapes all tiles.

    See `ATTENTION_DISTANCE_WEIGHTS`; "tiles" counts queries times heads, "ratio" candidates of a
    user, "heads" query heads of a key head.
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
    _heads(fields.get("kv_heads"), "kv_heads")
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
    """H and activations as they are, everything else by octave; lengths by their means."""
    p = problem
    q_len, kv_len = _gdpa_means(p)
    return (
        f"gdpa h={p.head_dim} q=2^{_octave(q_len)} kv=2^{_octave(kv_len)} b=2^{_octave(p.batch)} "
        f"ratio=2^{_octave(p.batch / max(p.batch_kv, 1))} n=2^{_octave(p.q_heads)} "
        f"k=2^{_octave(p.kv_heads)} {'full' if p.is_full else 'jagged'} "
        f"{'+'.join(p.activations)} {p.approx or 'exact'}"
    )


def _gdpa_distance(a: GdpaProblem, b: GdpaProblem) -> float:
    """Weighted sum of |log2| of the sizes' ratios, and what the activation counts.

    Infinite if H differs, or the kernel: a softmax has another; see `GDPA_DISTANCE_WEIGHTS`.
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


def _gdpa_fits(problem: GdpaProblem, config: GdpaConfig, fallback: GdpaConfig) -> bool:
    """Runs of tiles save nothing where keys do not stay, and share the work out less evenly."""
    del fallback
    return config.run == 1 or keys_stay(problem, config)


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
            lambda problem, config, fallback: True,
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
            # How many rows jagged arrays have differs from call to call, and without a row near
            # XLA runs them.
            user_rows_reach=True,
        ),
    )
}


@functools.lru_cache(maxsize=1024)
def default_config(problem: Problem) -> Any:
    """The likeliest configuration without a measurement; None if no configuration is legal."""
    return next(of(problem).candidate_configs(problem), None)


def _octave(value: float) -> int:
    return round(math.log2(max(value, 1e-6)))


def _doublings(a: float, b: float, least: float = 1.0) -> float:
    return abs(math.log2(max(a, least) / max(b, least)))


# Checks of JSON values, for the table as well.


def typed(value: Any, kind: type, name: str) -> Any:
    """Returns `value`; raises ValueError unless it is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}, expected a {kind.__name__}")
    return value


def size(value: Any, name: str) -> int:
    """Returns `value`; raises ValueError unless it is an integer of at least 0 and of 64 bits."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not is_size:
        raise ValueError(f"{name} holds {value!r:.80}, expected an integer of at least 0")
    return int(value)


def measured(value: Any, name: str) -> float:
    """Returns `value` as a float; raises ValueError unless it is finite and at least 0.

    0 is what earlier versions wrote for a very small fraction.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 2.0**1023:
        raise ValueError(f"{name} is {value!r:.80}, expected a finite number of at least 0")
    return float(value)


def _heads(value: Any, name: str) -> int:
    """`size` of at least 1: distances divide by it."""
    heads = size(value, name)
    if not heads:
        raise ValueError(f"{name} is 0, expected at least 1")
    return heads

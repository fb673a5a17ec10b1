"""Sizes of the steps of broadcast attention's XLA path: bounded memory, little waste."""

from typing import NamedTuple

#: Largest number of scores of one step of the XLA path: 128 MiB in f32, and as much again for their
#: exponentials.
MAX_SCORES = 2**25
#: Largest number of elements of keys, and of values, that one step reads.
MAX_KEY_ELEMENTS = 2**25
#: Desired rows of a group in a matrix product: candidates of one user times T.
GROUP_ROWS = 512
#: The same on a CPU, whose cache then holds what a step computes: 1 MiB of scores. With these, and
#: without groups that have no candidates, nine float32 shapes on 2 busy cores of an AMD EPYC took
#: 0.33 to 1.0 of the CPU time and 0.11 to 1.0 of the time, by turns, the least of 15 s.
CPU_SCORES, CPU_GROUP_ROWS = 2**18, 192
#: Largest group, candidates, and groups of a step, if sizes are unknown while tracing.
UNKNOWN_GROUP, UNKNOWN_GROUPS = 16, 16
#: Keys of one chunk; more keys mean fewer steps, but no more efficient products.
CHUNK_KEYS = 1024
#: The number of keys of a chunk is a multiple of this, the width of a tensor core's tile.
KEY_ALIGNMENT = 64


class Blocking(NamedTuple):
    """Sizes of the XLA path's steps.

    Attributes:
      group: largest number of candidates of one user that share a matrix product.
      groups: groups of one step.
      keys: keys of one chunk.
    """

    group: int
    groups: int
    keys: int


def blocking(
    batch: int,
    users: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    chunk_scores: int = 0,
    on_cpu: bool = False,
) -> Blocking:
    """Chooses steps in bounded memory, whose groups waste little on users with few candidates.

    A chunk has at least `CHUNK_KEYS` keys, and as many as one group has `chunk_scores` scores of.
    """
    rows, scores = (CPU_GROUP_ROWS, CPU_SCORES) if on_cpu else (GROUP_ROWS, MAX_SCORES)
    is_known = all(isinstance(size, int) for size in (batch, users, q_len))
    most = -(-rows // q_len) if isinstance(q_len, int) else 1
    group = max(1, min(-(-batch // users) if is_known else UNKNOWN_GROUP, most))
    most_keys = chunk_scores // (group * q_len * q_heads) if is_known else 0
    chunks = -(-kv_len // max(CHUNK_KEYS, most_keys))
    keys = min(kv_len, round_up(-(-kv_len // chunks), KEY_ALIGNMENT))
    if not is_known:
        return Blocking(group, UNKNOWN_GROUPS, keys)
    most = min(
        scores // (group * q_len * q_heads * keys), MAX_KEY_ELEMENTS // (keys * kv_heads * head_dim)
    )
    groups = count_groups(batch, users, group)
    steps = -(-groups // max(most, 1))
    return Blocking(group, -(-groups // steps), keys)


def count_groups(batch: int, users: int, group: int) -> int:
    """Bounds the groups of any index: each user's last group may have one candidate."""
    if not (isinstance(batch, int) and isinstance(users, int)):  # symbolic: a bound without min
        return users + batch // group
    served = min(batch, users)
    return served + (batch - served) // group


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple that is not smaller than `value`."""
    return -(-value // multiple) * multiple

"""A problem of attention with a given index, as the tests of its kernels list them."""

import dataclasses

import jax
import numpy as np
import oracle_attention
import problems

from ikbo_jax.problems import AttentionProblem


def in_pages(
    inputs: problems.AttentionInputs, page: int
) -> tuple[problems.AttentionInputs, dict[str, jax.Array]]:
    """Puts keys and values into pages in any order, among pages of NaN; and their table.

    The keys are a multiple of a page. A user's last page may be out of range: it is the last or
    the first of all.
    """
    users, most = inputs.key.shape[0], inputs.key.shape[1] // page
    order = np.random.default_rng(2).permutation(2 * users * most)
    table = order[: users * most].astype(np.int32)

    def paged(rows: jax.Array) -> jax.Array:
        of_users = np.asarray(rows).reshape(table.size, page, *rows.shape[2:])
        pages = np.full((order.size, *of_users.shape[1:]), np.nan, rows.dtype)
        pages[table] = of_users
        return jax.device_put(pages)

    inputs = inputs._replace(key=paged(inputs.key), value=paged(inputs.value))
    clamped = np.where(table == order.size - 1, 2**31 - 1, np.where(table == 0, -3, table))
    return inputs, {"page_table": jax.device_put(clamped.reshape(users, most))}


@dataclasses.dataclass(frozen=True)
class IndexedAttention:
    """Sizes, the user of each candidate, and lengths of the users' keys.

    Attributes:
      index: users by candidate; any numbers.
      keys: keys of each user.
      users: 0: as many as there are lengths, or two.
      q_len: queries of each candidate.
      heads: query heads and key heads.
      lengths: how many of a user's keys count; None: all.
      num_sms: how many CTAs share the work.
      has_ranges: whether every candidate has its own range of keys.
      has_own: whether every candidate has an own token.
      page: positions of a page of keys and values; 0: a user's are in one array.
      logit_cap: of the scores, or None.
    """

    index: tuple[int, ...]
    keys: int
    q_len: int = 64
    users: int = 0
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 64
    lengths: tuple[int, ...] | None = None
    num_sms: int = 1
    dtype: str = "bfloat16"
    has_ranges: bool = False
    has_own: bool = False
    page: int = 0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if not self.users:
            object.__setattr__(self, "users", len(self.lengths) if self.lengths else 2)

    @property
    def own(self) -> dict[str, jax.Array]:
        """Key and value of one own token of each candidate."""
        shape = (len(self.index), 1, self.heads[1], self.head_dim)
        rng = np.random.default_rng(1)
        names = ("self_key", "self_value") if self.has_own else ()
        return {name: problems.random_array(rng, shape, self.dtype) for name in names}

    @property
    def ranges(self) -> np.ndarray | None:
        """Ranges of keys of the candidates."""
        return (
            oracle_attention.ranges_of_keys(len(self.index), self.keys) if self.has_ranges else None
        )

    @property
    def problem(self) -> AttentionProblem:
        sizes = (len(self.index), self.users, self.q_len, self.keys, *self.heads, self.head_dim)
        return AttentionProblem(*sizes, self.dtype, has_ranges=self.has_ranges, page=self.page)

    def in_pages(
        self, inputs: problems.AttentionInputs
    ) -> tuple[problems.AttentionInputs, dict[str, jax.Array]]:
        return in_pages(inputs, self.page) if self.page else (inputs, {})

    def inputs(self, seed: int = 0) -> problems.AttentionInputs:
        sizes = (self.users, len(self.index), self.q_len, self.keys, *self.heads, self.head_dim)
        inputs = problems.make_attention_inputs(problems.AttentionShape(*sizes), self.dtype, seed)
        index = jax.device_put(np.asarray(self.index, np.int32))
        lengths = self.lengths
        if lengths is not None:
            lengths = jax.device_put(np.asarray(lengths, np.int32))
        return inputs._replace(cand_to_user=index, key_value_seq_lengths=lengths)

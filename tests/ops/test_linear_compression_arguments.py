"""Bad arguments of the public ops: what is raised, before any compute, and what it says."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import problems
import pytest
import refusals
from refusals import of_list, of_rank, ones

import ikbo_jax as ikbo

# B=7, U=3, M=10, K_cand=5, K_user=11, N=8
INPUTS = problems.make_inputs(problems.LinearCompressionShape(3, 7, 10, 11, 5, 8))


ARRAYS = INPUTS._asdict()
BAD_ARRAYS = {
    "w_cand_rank": of_rank("w_cand", "[M, K_cand]", ones(5)),
    "w_user_rank": of_rank("w_user", "[M, K_user]", ones(1, 10, 11)),
    "e_cand_rank": of_rank("e_cand", "[B, K_cand, N]", ones(5, 8)),
    "e_user_rank": of_rank("e_user", "[U, K_user, N]", ones(11, 8)),
    "not_an_array": of_list("e_user", "[U, K_user, N]"),
    "k_cand": ({"w_cand": ones(10, 4)}, "w_cand has K=4 but e_cand has K=5"),
    "k_user": ({"e_user": ones(3, 12, 8)}, "w_user has K=11 but e_user has K=12"),
    "m": ({"w_cand": ones(9, 5)}, "w_user has M=10 but w_cand has M=9"),
    "n": ({"e_cand": ones(7, 5, 16)}, "e_user has N=8 but e_cand has N=16"),
    **refusals.of_indices("e_cand"),
    **refusals.of_dtypes(ARRAYS, "w_user", ["e_cand", "w_cand", "e_user", "w_user", "w_cand"]),
    "no_users": (
        {"e_user": ones(0, 11, 8)},
        "e_user has no rows, shape (0, 11, 8), but e_cand has B=7",
    ),
}


WEIGHT = ones(10, 4)
TERM = ikbo.Term(WEIGHT, ones(3, 4, 8))
CHILD = ikbo.Term(WEIGHT, ones(6, 4, 8), jnp.zeros(6, jnp.int32))


def child(weight: jax.Array, message: str) -> tuple[list[ikbo.Term], str]:
    return [TERM, CHILD._replace(weight=weight)], message


BAD_TERMS: dict[str, tuple[Any, str]] = {
    "none": ([], "terms must hold at least 1 Term, but holds 0"),
    "no_sequence": (None, "terms must be a sequence of Term, coarsest level first, but is None"),
    "one_term": (TERM, "coarsest level first, but is one Term"),
    "not_a_term": ([TERM, (WEIGHT, WEIGHT)], "terms[1] must be a Term, but is a tuple"),
    "an_array": (
        [WEIGHT],
        "terms[0] must be a Term, but is bfloat16[10, 4]: a level's weight [M, K], embedding",
    ),
    "padded_of_text": (
        [TERM._replace(weight=ikbo.PaddedWeight(ones(10, 64), "6"))],
        "k of terms[0].weight must be an integer of at least 0, known while tracing, but is '6'",
    ),
    "padded_of_nothing": (
        [TERM._replace(weight=ikbo.PaddedWeight(None, 5))],
        "terms[0].weight must be an array of shape [M, K], but is None",
    ),
    "parent_on_first": ([CHILD], "terms[0].parent must be None, but is int32[6]"),
    "parent_shape": (
        [TERM, CHILD, CHILD._replace(parent=jnp.zeros(5, jnp.int32))],
        "terms[2].parent has shape (5,) but terms[2].embedding has B=6",
    ),
    "rank": (
        [TERM._replace(weight=WEIGHT[0])],
        "terms[0].weight must have shape [M, K], but has shape (4,)",
    ),
    "k": child(ones(10, 5), "terms[1].weight has K=5 but terms[1].embedding has K=4"),
    "m": child(ones(11, 4), "terms[0].weight has M=10 but terms[1].weight has M=11"),
    "n": (
        [TERM, CHILD._replace(embedding=ones(6, 4, 9))],
        "terms[0].embedding has N=8 but terms[1].embedding has N=9",
    ),
    "mixed": child(
        WEIGHT.astype(jnp.float32), "terms[0].weight is bfloat16 but terms[1].weight is float32"
    ),
    "empty_middle": (
        [TERM, CHILD._replace(embedding=CHILD.embedding[:0], parent=CHILD.parent[:0]), CHILD],
        "terms[1].embedding has no rows, shape (0, 4, 8), but terms[2].embedding has B=6",
    ),
}


@pytest.mark.parametrize(("terms", "message"), BAD_TERMS.values(), ids=BAD_TERMS)
def test_bad_terms_raise_and_name_both_values(terms: list, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ikbo.multilevel_linear_compression(terms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"n": 12}, ("12", "8")), ({"dtype": "float32"}, ("float32", "bfloat16"))],
    ids=["n", "dtype"],
)
def test_mosaic_gpu_says_what_it_cannot_do(fake_hopper, changes: dict, words: tuple) -> None:
    n, dtype = changes.get("n", 8), changes.get("dtype", "bfloat16")
    inputs = problems.make_inputs(problems.LinearCompressionShape(3, 7, 16, 8, 8, n), dtype)
    with pytest.raises(NotImplementedError) as raised:
        ikbo.linear_compression(*inputs, implementation="mosaic_gpu")
    for word in words:
        assert word in str(raised.value)
    assert jax.eval_shape(ikbo.linear_compression, *inputs).dtype == dtype
    assert fake_hopper.calls == []

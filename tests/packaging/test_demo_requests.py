"""The requests of the demo: what they hold, and the bytes that they move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax import demo, demo_attention


def test_requests_are_seeded_and_ragged():
    request = demo.FULL
    counts = demo.candidate_counts(request)
    assert counts.sum() == request.candidates
    assert len(set(counts.tolist())) > 1
    np.testing.assert_array_equal(counts, demo.candidate_counts(request))
    assert (counts != demo.candidate_counts(dataclasses.replace(request, seed=1))).any()


def test_inputs_have_the_sizes_of_the_request():
    request = dataclasses.replace(demo.SMALL, dtype="float16")
    inputs = jax.eval_shape(lambda: demo.make_inputs(request)).arguments
    w_cand, w_user, e_cand, e_user, cand_to_user = inputs
    assert w_cand.shape == (request.m, request.k_cand)
    assert w_user.shape == (request.m, request.k_user)
    assert e_cand.shape == (request.candidates, request.k_cand, request.n)
    assert e_user.shape == (request.users, request.k_user, request.n)
    assert cand_to_user.shape == (request.candidates,)
    assert cand_to_user.dtype == jnp.int32
    assert {x.dtype for x in inputs[:4]} == {jnp.dtype(jnp.float16)}


def test_bytes_moved_are_counted_by_hand():
    # One candidate of one user, every size 1, bfloat16: two weights, two embeddings, one output,
    # the index; the user's float32 partial result goes out and comes back.
    request = demo.Request(1, 1, 1, 1, 1, 1, "bfloat16")
    moved = {stage.name.split(maxsplit=1)[1]: stage.bytes_moved for stage in demo.stages(request)}
    inputs_and_output = 2 * 5 + 4
    assert moved == {
        "materialised": inputs_and_output + 2 * 2 * 2,
        "aligned K": inputs_and_output + 2 * 2 * 8,
        "decomposed": inputs_and_output + 2 * 4 + 2 * 4,
        "fused": inputs_and_output + 2 * 4,
        "single launch": inputs_and_output + 2 * 4,
    }
    # Each stage of the full request moves less.
    moved = [stage.bytes_moved for stage in demo.stages(demo.FULL)]
    assert moved[1] > moved[0] > moved[2] > moved[3] == moved[4]


def test_what_attention_moves_is_counted_by_hand():
    # Every size 1, bfloat16: query, key, value, result and the index; a copied key and value goes
    # out and comes back.
    ranking = demo.Request(1, 1, 1, 1, 1, 1, "bfloat16")
    found = demo_attention.stages(demo_attention.Request(ranking, 1, 1, 1, 1))
    moved = {stage.name.split(maxsplit=1)[1]: stage.bytes_moved for stage in found}
    assert moved["materialised"] == 4 * 2 + 4 + 4 * 2
    assert moved["decomposed"] == moved["fused"] == 4 * 2 + 4

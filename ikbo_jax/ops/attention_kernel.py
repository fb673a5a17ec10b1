"""Launches of broadcast attention's kernels: which of them, and in which order of candidates."""

import functools
from typing import Any

import jax

from ikbo_jax.ops import dispatch
from ikbo_jax.ops.attention_arrays import Arrays
from ikbo_jax.problems import FewQueriesConfig
from ikbo_jax.problems.hopper import WGMMA_M


def merges_own_tokens(plan: dispatch.Plan, self_key: jax.Array | None = None) -> bool:
    """Whether the plan's kernel merges own tokens, of which a candidate may have one."""
    if plan.implementation != "mosaic_gpu" or (self_key is not None and self_key.shape[1] > 1):
        return False
    return plan.config.takes_own_tokens(plan.problem)


def run(call: Any, plan: dispatch.Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel of a planned call, `AttentionCall`."""
    query, key, value, index, lengths, ranges, self_key, self_value, page_table, _ = arrays
    users = arrays.keys[0]
    # Imported here because Mosaic GPU takes 0.3 s to import.
    from ikbo_jax.pallas.few_queries import kernel as few_queries
    from ikbo_jax.pallas.flash import attention as kernel
    from ikbo_jax.pallas.worklist import counted_order

    has_few_queries = isinstance(plan.config, FewQueriesConfig)
    order, targets, lists = None, None, False
    if not call.indices_are_sorted and query.shape[0] > 1 and users > 1:
        # A launch that lists candidates itself needs no order, and no other launch.
        lists = has_few_queries and self_key is None
        lists = lists and plan.config.lists(plan.problem, call.request.num_sms)
        # The kernel reads and writes unsorted candidates in place only if T is a multiple of 64, so
        # that no 64-row tile holds queries of two candidates. Otherwise the queries are copied into
        # the order of users, and the results are stored in the caller's order; keys and values stay
        # in place.
        if not lists and (has_few_queries or query.shape[1] % WGMMA_M):
            query, index, targets, _ = counted_order.ordered(query, index, users)
        elif not lists:
            order = counted_order.ordered(None, index, users).order
    launch: Any = functools.partial(
        few_queries.few_queries_kernel, key_value_ranges=ranges, lists=lists
    )
    if not has_few_queries:
        launch = functools.partial(kernel.attention_kernel, order=order)
    if merges_own_tokens(plan):
        launch = functools.partial(launch, self_key=self_key, self_value=self_value)
    result: tuple[jax.Array, jax.Array | None] = launch(
        query,
        key,
        value,
        index,
        lengths,
        scale=call.scale,
        logit_cap=call.logit_cap,
        targets=targets,
        page_table=page_table,
        return_residuals=call.return_residuals,
        config=plan.config,
        num_sms=call.request.num_sms,
    )
    return result

"""The kernel for few queries: how its CTAs go through items."""

import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.few_queries import producer
from ikbo_jax.pallas.few_queries.context import Context, Place, Shape
from ikbo_jax.problems.few_queries import FewQueriesConfig

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("users", "extra", "groups", "splits"),
    [
        (1, 1, 1, 1),
        (5, 3, 1, 2),
        (63, 30, 8, 1),
        (565, 989, 1, 1),
        (102, 17, 3, 1),
        (1025, 1024, 1, 4),
        (3, 4000, 1, 1),
        (4000, 3, 2, 1),
        (900, 9000, 1, 1),
        (152, 828, 1, 1),
    ],
)
def test_ctas_go_through_both_kinds_of_row_slots_evenly(users, extra, groups, splits) -> None:
    """Every item once; every CTA has equally many first slots; both kinds end together."""
    shape = Shape(
        *(1, 1, groups, groups, 1, users, 64),
        *(1, 64, 64, users + extra, splits, 1, 1.0),
        workers=min(132, (users + extra) * groups * splits),
        alternates=True,
    )
    workers = np.arange(shape.workers, dtype=np.int32)
    ctx = Context(shape, FewQueriesConfig(), None, None, None, worker=workers)
    counts, items, firsts = np.asarray(ctx.count()), [], np.zeros(shape.workers, int)
    for i in range(counts.max()):
        place = [np.asarray(x)[i < counts] for x in ctx.place(jnp.int32(i))[:3]]
        items += zip(*place, strict=True)
        is_first = place[0] < users
        firsts[i < counts] += is_first
        # So far, each kind has made as much progress as all items.
        progress = (i + 1) * shape.workers / shape.bundles
        for last, number in ((place[0][is_first], users), (place[0][~is_first] - users, extra)):
            if last.size and number > shape.workers:
                assert (last.max() + 1) / number == pytest.approx(progress, abs=0.1)
    assert len(items) == len(set(items)) == shape.bundles
    assert counts.max() - counts.min() <= 1
    assert firsts.max() - firsts.min() <= 1


@pytest.mark.parametrize(("is_void", "blocks"), [(False, 3), (True, 0)])
def test_an_item_without_rows_loads_no_keys(is_void, blocks, monkeypatch) -> None:
    shape = Shape(*(1, 1, 1, 1, 1024, 1, 64), *(1, 64, 64, 1, 1, 1, 1.0), workers=1)
    shared = types.SimpleNamespace(items=mock.Mock(), key=None, value=None)
    config = FewQueriesConfig(block_kv=128)
    operands = mock.Mock(lengths=None, ranges=None)
    ctx = Context(shape, config, shared, operands, None, worker=0)
    monkeypatch.setattr(producer, "_load_block", lambda *_: None)
    rows = producer._Rows(0, 0, 0, is_void, jnp.int32(300))
    start = producer._Progress(jnp.int32(0), jnp.int32(0))
    assert producer._send_rows(ctx, start, rows, Place(0, 0, 0, 0), 0).steps == blocks

"""Metrics of rankings, their confidence intervals, and the scores of a data part.

Metrics are computed for every request by itself and averaged: what counts is the order within a
request. Equal scores count as the mean over all of their orders.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from examples.movielens.impressions import IMPRESSIONS, Batch, Impressions, Requests

#: Positions that count for NDCG.
TOP = 10
#: Share of intervals that contain the value that they estimate.
CONFIDENCE = 0.95
RESAMPLES = 2000

#: Takes a batch; returns the scores of its candidates, [B].
Scorer = Callable[[Batch], np.ndarray]


class Metrics(NamedTuple):
    """Metrics of every request, [R] each, and its user."""

    auc: np.ndarray
    ndcg: np.ndarray
    user: np.ndarray


class Interval(NamedTuple):
    """An estimate, and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def evaluate(scorer: Scorer, data: Impressions, chosen: Requests, users: int) -> Metrics:
    """Metrics of a scorer on requests, which it gets in batches of `users`."""
    scores, labels = [], []
    for batch, count in data.evaluation(chosen, users):
        rows = (users, IMPRESSIONS)
        scores.append(np.asarray(scorer(batch)).reshape(rows)[:count])
        labels.append(np.asarray(batch.label).reshape(rows)[:count])
    score, label = np.concatenate(scores), np.concatenate(labels)
    return Metrics(auc(score, label), ndcg(score, label), chosen.user)


def auc(score: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Area under the ROC curve of every row: the share of pairs in the right order.

    Args:
      score: [R, C] float.
      label: [R, C], 1 or 0.

    Returns:
      [R] float64; NaN for a row with equal labels.
    """
    positive = label.sum(axis=1)
    pairs = positive * (label.shape[1] - positive)
    ranks = (stats.rankdata(score, axis=1) * label).sum(axis=1)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = (ranks - positive * (positive + 1) / 2) / pairs
    return found


def ndcg(score: np.ndarray, label: np.ndarray, top: int = TOP) -> np.ndarray:
    """Normalised discounted cumulative gain at `top` of every row.

    Args:
      score: [R, C] float.
      label: [R, C], 1 or 0.
      top: number of positions that count.

    Returns:
      [R] float64; NaN for a row without label 1.

    Source: Järvelin and Kekäläinen, 2002; McSherry and Najork, 2008, for equal scores.
    """
    position = np.arange(score.shape[1])
    discount = np.where(position < top, 1 / np.log2(position + 2), 0.0)
    found = np.empty(len(score))
    for row, (scores, labels) in enumerate(zip(score, label, strict=True)):
        order = np.argsort(-scores, kind="stable")
        _, group, size = np.unique(-scores[order], return_inverse=True, return_counts=True)
        mean = np.bincount(group, discount) / size
        best = discount[: int(labels.sum())].sum()
        found[row] = (mean[group] * labels[order]).sum() / best if best else np.nan
    return found


def over_users(values: np.ndarray, user: np.ndarray, seed: int = 0) -> Interval:
    """The mean of requests' values, with an interval by bootstrap over users.

    Requests of one user are not independent, so users are drawn with replacement.
    """
    _, group = np.unique(user, return_inverse=True)
    sums, counts = np.bincount(group, values), np.bincount(group)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(values.mean()), float(low), float(high))


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean of a metric over runs, with Student's interval; infinite for a single run."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean, -np.inf, np.inf)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.std(values, ddof=1) / count**0.5
    return Interval(mean, mean - float(half), mean + float(half))

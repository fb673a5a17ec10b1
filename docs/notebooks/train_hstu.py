# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train HSTU on MovieLens
#
# HSTU reads a request as one sequence of [history, candidates]. Every candidate sees the history
# and itself, so one pass scores all candidates of a request. Histories have different lengths,
# and the ops take them as they are, sequence after sequence, without padding. The network is
# [examples/hstu/model.py](../../examples/hstu/model.py); run this notebook from the source tree,
# with the extra `examples`.

# %%
import os
import pathlib
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np

folder = pathlib.Path.cwd()
root = next((x for x in (folder, *folder.parents) if (x / "examples").exists()), folder)
sys.path.insert(0, str(root))  # The examples are no part of the package.

import ikbo_jax as ikbo
from examples.hstu.__main__ import Trainer
from examples.hstu.model import Sizes
from examples.movielens import data, train
from examples.movielens.impressions import Impressions
from examples.movielens.model import PROFILE, Catalogue

IS_SMALL = "IKBO_SMALL" in os.environ  # The tests run this notebook with small sizes.
STEPS = 5 if IS_SMALL else 400

# %% [markdown]
# ## The data
#
# `make train` downloads MovieLens-100k once. Without it, the notebook draws ratings: users with
# an even number prefer movies with an even number.


# %%
def drawn(users=40, movies=300, seed=0):
    """Draws ratings in the layout of MovieLens-100k."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(1, users + 1):
        odds = np.where(np.arange(1, movies + 1) % 2 == user % 2, 12.0, 1.0)
        count = int(rng.integers(30, 45))
        chosen = 1 + rng.choice(movies, count, replace=False, p=odds / odds.sum())
        times = 880_000_000 + 3600 * np.arange(count)
        rows += [(user, movie, 3, at) for movie, at in zip(chosen, times, strict=True)]
    user, movie, rating, at = np.array(rows, np.int64).T
    ratings = data.Ratings(*(x.astype(np.int32) for x in (user, movie, rating)), at)
    profile = np.zeros((users + 1, len(PROFILE)), np.int32)
    genres = np.zeros((movies + 1, len(data.GENRES)), np.float32)
    catalogue = Catalogue(genres, np.zeros(movies + 1, np.int32))
    return data.Data(ratings, profile, catalogue, [f"Movie {i}" for i in range(movies + 1)])


is_there = data.cache_folder().exists() and not IS_SMALL
found = data.load() if is_there else drawn()
print("MovieLens-100k" if is_there else "drawn ratings", len(found.ratings.user))

# %% [markdown]
# ## The model

# %%
sizes = Sizes(movies=len(found.titles), history=16 if IS_SMALL else 64, layers=1 if IS_SMALL else 2)
impressions = Impressions(found, sizes.history)
protocol = train.Protocol(steps=STEPS, users=4 if IS_SMALL else 8)
trainer = Trainer("ikbo", sizes, protocol)

tokens = trainer.tokens(impressions.train_batch(protocol.users, 0, 0))
lengths = np.diff(np.asarray(tokens.cu_seqlens))
print("lengths of the sequences of a step:", lengths)
padded = len(lengths) * lengths.max()
print(f"rows: {lengths.sum()} jagged, {padded} padded to the longest")

# %% [markdown]
# Which ops run; print the whole `plan` to see how:

# %%
params = trainer.network.start(0)
plan = str(ikbo.explain(trainer.network.logits, params, tokens))
print(*(line for line in plan.splitlines() if line[0].isdigit()), sep="\n")

# %% [markdown]
# ## Training
#
# `Trainer.run` trains with a seed, and evaluates the requests of the test part: movies that the
# user watched next, among sampled ones.

# %%
with jax.numpy_dtype_promotion("standard"):
    losses, metrics = trainer.run(impressions, seed=0)
print(f"loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}")
print(f"test AUC {metrics.auc.mean():.3f}, NDCG@10 {metrics.ndcg.mean():.3f}")

# %%
window = max(1, STEPS // 20)
smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
axes[0].plot(losses, color="C0", alpha=0.25)
axes[0].plot(np.arange(len(smooth)) + window - 1, smooth, color="C0")
axes[0].set(title="loss", xlabel="step")
axes[1].hist(metrics.auc, bins=20)
axes[1].set(title="AUC of a request", xlabel="AUC", ylabel="requests")
plt.show()

# %% [markdown]
# [The example](../training.md#hstu) compares this network with the same function in plain XLA,
# over seeds; [the layer](../hstu.md) takes Meta's parameters.

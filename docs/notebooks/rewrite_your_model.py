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
# # Rewrite your own model and read the report
#
# `ikbo.rewrite(model)` finds the places where a model copies users to candidates, and replaces
# them. No line of the model changes. This notebook rewrites a small ranker, reads the report,
# finds a copy that stays, and removes it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ikbo_jax as ikbo

B, U, S, D = 512, 8, 64, 64  # candidates, users, events of a history, width

# %% [markdown]
# ## A ranker as people write it
#
# `profile` and `history` belong to users, `item` to candidates. The first lines copy the users.


# %%
def model(params, profile, history, item, cand_to_user):
    profile, history = profile[cand_to_user], history[cand_to_user]  # one copy per candidate
    tower = jax.nn.relu(profile @ params["tower"])
    scores = jnp.einsum("bd,bsd->bs", item, history) * D**-0.5
    interest = jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), history)
    hidden = jax.nn.relu(jnp.concatenate([tower, interest, item], axis=1) @ params["hidden"])
    return hidden @ params["out"]


rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)


params = {"tower": normal(D, D), "hidden": normal(3 * D, D), "out": normal(D)}
cand_to_user = jnp.asarray(np.sort(rng.integers(0, U, B)), jnp.int32)
request = normal(U, D), normal(U, S, D), normal(B, D), cand_to_user

fast = ikbo.rewrite(model)
expected, found = jax.jit(model)(params, *request), jax.jit(fast)(params, *request)
print("largest difference", float(jnp.abs(expected - found).max()))

# %% [markdown]
# ## The report
#
# `explain` prints what was found, and which op runs for it; its `details` also say what replaced
# it. Lines that begin with *copied by* would name what is still copied; here nothing is.

# %%
print(ikbo.explain(fast, params, *request))

# %% [markdown]
# The report is also data:

# %%
report = ikbo.explain(fast, params, *request).notes[0]
print(len(report.broadcasts), "broadcasts,", len(report.materialised), "copies left")
print(f"{report.bytes_saved / 1e6:.1f} MB saved")

# %% [markdown]
# ## What the compiler says
#
# Gradients are rewritten, too: rewrite the loss, then differentiate it. In XLA, attention computes
# groups of one user's candidates and pads each user's last group, so a CPU saves memory rather than
# operations in the forward pass.


# %%
def loss(params, *request):
    return jnp.mean(model(params, *request) ** 2)


programs = {
    "scores": (model, ikbo.rewrite(model)),
    "gradient": (jax.grad(loss), jax.grad(ikbo.rewrite(loss))),
}
costs = {}
for name, pair in programs.items():
    for label, fn in zip(("with copies", "rewritten"), pair, strict=True):
        compiled = jax.jit(fn).lower(params, *request).compile()
        scratch = compiled.memory_analysis().temp_size_in_bytes / 2**20
        costs[name, label] = compiled.cost_analysis()["flops"] / 1e6, scratch
        print(f"{name:9} {label:12} {costs[name, label][0]:8.2f} MFLOP {scratch:8.3f} MiB scratch")

figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
for axis, title, column in zip(axes, ("MFLOP", "MiB of scratch"), range(2), strict=True):
    labels = [f"{name},\n{label}" for name, label in costs]
    axis.barh(labels, [cost[column] for cost in costs.values()], color=["C0", "C1"] * 2)
    axis.set(title=title)
    axis.invert_yaxis()
plt.show()

# %% [markdown]
# ## A copy that stays
#
# This version sorts the copies along the candidates, an order that no user's row has. The report
# names the value, the line and the reason.


# %%
def sorted_model(params, profile, history, item, cand_to_user):
    tower = jnp.sort(jax.nn.relu(profile[cand_to_user] @ params["tower"]), axis=0)
    return (tower * item).sum(axis=1)


print(ikbo.explain(ikbo.rewrite(sorted_model), params, *request))

# %% [markdown]
# Sort before the lookup, at user batch, if that is what you meant; then nothing is left to
# report:


# %%
def mended_model(params, profile, history, item, cand_to_user):
    tower = jnp.sort(jax.nn.relu(profile @ params["tower"]), axis=0)[cand_to_user]
    return (tower * item).sum(axis=1)


report = ikbo.explain(ikbo.rewrite(mended_model), params, *request).notes[0]
print(len(report.materialised), "copies left")

# %% [markdown]
# [What `rewrite` finds, and what it does not](../rewrite.md).

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
# # Rank a request with and without copies
#
# A request has many candidates of few users. Most models copy the user to every candidate before
# the first layer that combines the two. This notebook writes such a layer twice, with the copies
# and without, and compares results, memory and operations over the candidates per user. It
# runs on a CPU, where XLA computes both; on a Hopper GPU the second one is a kernel.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ikbo_jax as ikbo

USERS, PER_USER = 4, [1, 2, 4, 8, 16, 32, 64]
M, N, K_CAND, K_USER = 64, 64, 128, 512

# %% [markdown]
# ## The layer
#
# A user has `K_USER` embeddings of `N` numbers, a candidate `K_CAND`. The layer compresses both
# together to `M` rows: one matrix product over `K_USER + K_CAND` embeddings.


# %%
def with_copies(w_cand, w_user, e_cand, e_user, cand_to_user):
    """Copies the user's embeddings to every candidate, and multiplies the copies."""
    embeddings = jnp.concatenate([e_cand, e_user[cand_to_user]], axis=1)  # [B, K_cand + K_user, N]
    weights = jnp.concatenate([w_cand, w_user], axis=1)  # [M, K_cand + K_user]
    return jnp.einsum("mk,bkn->bmn", weights, embeddings)


def request(per_user):
    """Draws a request whose users all have `per_user` candidates."""
    rng, batch = np.random.default_rng(per_user), USERS * per_user
    shapes = (M, K_CAND), (M, K_USER), (batch, K_CAND, N), (USERS, K_USER, N)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.asarray(np.arange(batch) // per_user, jnp.int32)


args = request(PER_USER[-1])
copied = jax.jit(with_copies)(*args)
ours = jax.jit(ikbo.linear_compression)(*args)
print("shape", ours.shape, "largest difference", float(jnp.abs(copied - ours).max()))

# %% [markdown]
# The results agree up to the order of additions. `explain` says what runs here. In bfloat16 it
# also says which kernel a Hopper GPU would run:

# %%
half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in args[:-1]]
print(ikbo.explain(ikbo.linear_compression, *half, args[-1]))

# %% [markdown]
# ## Memory and work over the candidates per user
#
# The compiler knows how much temporary memory a program needs, and how many floating-point
# operations it has. Time depends on the machine: [performance](../performance.md) has an H100's.

# %%
versions = {"with copies": with_copies, "ikbo.linear_compression": ikbo.linear_compression}
figures = {name: [] for name in versions}
for per_user in PER_USER:
    args = request(per_user)
    for name, fn in versions.items():
        program = jax.jit(fn).lower(*args).compile()
        scratch = program.memory_analysis().temp_size_in_bytes / 2**20
        figures[name].append((scratch, program.cost_analysis()["flops"] / 1e9))

for name, rows in figures.items():
    print(f"{name:24} {rows[-1][0]:7.2f} MiB of scratch {rows[-1][1]:6.2f} GFLOP")

# %%
titles = "MiB of scratch", "GFLOP"
figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
for axis, title, column in zip(axes, titles, range(2), strict=True):
    for name, rows in figures.items():
        axis.plot(PER_USER, [row[column] for row in rows], marker="o", label=name)
    axis.set(title=title, xlabel="candidates per user", xscale="log", ylim=(0, None))
axes[0].legend(fontsize="small")
plt.show()

# %% [markdown]
# The users' part is computed once per user, so the work per candidate falls with the candidates
# per user. The same index serves the other ops: `ikbo.attention` over a user's history,
# `ikbo.look_up` where a layer needs the rows themselves. [Which door to
# take](../../README.md#which-door-to-take).

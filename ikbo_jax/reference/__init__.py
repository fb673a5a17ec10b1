"""Every op in plain jnp: `materialised`, the oracle, and the path that XLA runs."""

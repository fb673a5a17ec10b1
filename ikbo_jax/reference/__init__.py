"""Every op in plain jnp: `materialised`, the oracle, and `decomposed`, the path XLA runs."""

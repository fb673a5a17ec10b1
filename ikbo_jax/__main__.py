"""`python -m ikbo_jax` is the command `ikbo-jax`."""

import sys

from ikbo_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m ikbo_jax` runs the command `ikbo-jax`."""

import sys

from ikbo_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

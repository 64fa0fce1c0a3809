"""`python -m ddtree_jax`: the same as the command `ddtree-jax`."""

import sys

from ddtree_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m serving`: the same as `ddtree-jax serve`."""

import sys

from ddtree_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))

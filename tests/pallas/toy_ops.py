"""Small operations in plain JAX that take the place of the package's in tests of what is around the kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.backend import HOPPER
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.dispatch import Op


def product(x, w, *, platform, scale=1.0):
    del platform
    return x @ w * scale


def hopper_only(x, w, *, platform, scale=1.0):
    if platform.generation != HOPPER:
        raise NotImplementedError("needs a Hopper GPU")
    return product(x, w, platform=platform, scale=scale)


def wrong(x, w, *, platform, scale=1.0):
    return product(x, w, platform=platform, scale=scale) * 1.5


def broken(x, w, *, platform, scale=1.0):
    raise RuntimeError("no such instruction\n in this program")


def write_row(cache, row, at, *, platform):
    """Gives (the sum of the row, the cache with it)."""
    del platform
    return row.sum(), jax.lax.dynamic_update_slice(cache, row[None], (at, 0))


def make_product(rows):
    def make(key):
        left, right = jax.random.split(key)
        return jax.random.normal(left, (rows, 32)), jax.random.normal(right, (32, 64))

    return make


def make_row(key):
    return jnp.zeros((10, 8)), jax.random.normal(key, (8,)), jnp.int32(3)


def exact_product(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64) * 2.0


def exact_row(cache, row, at):
    out = np.array(cache, np.float64)
    out[int(at)] = np.asarray(row)
    return np.asarray(row, np.float64).sum(), out


def product_case(name, rows, **changes):
    settings = {
        "static": {"scale": 2.0},
        "traffic": 4 * (rows * 32 + 32 * 64 + rows * 64),
        "flops": 2 * rows * 32 * 64,
        "tolerance": 1e-5,
        "exact": exact_product,
        "baselines": {"einsum": lambda x, w: 2.0 * jnp.einsum("mk,kn->mn", x, w)},
        "rotate": (1,),
    }
    return Case("toy_product", name, make_product(rows), **{**settings, **changes})


OPS = {
    "toy_product": Op(
        "toy_product",
        {"fast": product, "hopper_only": hopper_only, "reference": product},
        {HOPPER: ("hopper_only", "fast"), "cpu": ("fast",)},
    ),
    "toy_row": Op("toy_row", {"reference": write_row}, {}),
}
CASES = (
    product_case("4 rows", 4),
    product_case("8 rows", 8),
    # The sum of a few random numbers may all but cancel.
    Case("toy_row", "a cache of 10", make_row, {}, 64, 8, 1e-2, exact=exact_row, rotate=(0,), carries={1: 0}),
)

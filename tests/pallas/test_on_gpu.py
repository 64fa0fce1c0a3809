"""Every implementation at the shapes of real models, on the GPU at hand: what `doctor --kernels` checks, as tests."""

import functools

import jax
import numpy as np
import pytest

from ddtree_jax.pallas.backend import current_platform
from ddtree_jax.pallas.cases.registry import load_registry
from ddtree_jax.pallas.measure import relative_error

pytestmark = pytest.mark.gpu
REGISTRY = load_registry()
# Long to check in float64, and no other code than at 8k.
PAIRS = [(case, name) for case, name in REGISTRY.pairs(reference=True) if "64k" not in case.name]


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_real_shapes(case, name):
    if not case.is_for(current_platform()):
        pytest.skip("laid out for another GPU")
    key = jax.random.key(np.random.default_rng().integers(1 << 31))
    arrays = jax.jit(case.make)(key)
    run = jax.jit(functools.partial(REGISTRY.ops[case.op], implementation=name, **case.static))
    try:
        out = run(*arrays)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert relative_error(case, arrays, out) <= case.tolerance

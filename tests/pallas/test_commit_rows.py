"""The commit against numpy, byte by byte: what is written, and that nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.models.cache import Cache, write_rows
from ddtree_jax.pallas import commit_rows as module
from ddtree_jax.pallas.backend import HOST, INTERPRETED
from ddtree_jax.tree import gather_rows

COMMITS = {
    "reference": module.commit_rows_reference,
    "triton": functools.partial(module.commit_rows_triton, tiles=module.Tiles(piece=32, nodes=4)),
}
SLOTS, NODES = 19, 7


def arrays(rng, dtype, new_dtype=None, batch=3):
    """Two stacks; widths of one piece, of several, and of a part of one; lengths 0, 1 and the largest there can be."""
    shapes = ({"latent": (2, 72), "index_key": (2, 16)}, {"latent": (3, 72)}, {"odd": (1, 5)})
    path = np.full((batch, 5), -1, np.int32)
    for b in range(batch):
        count = (1, 5, 3)[b % 3]
        path[b, :count] = np.sort(rng.choice(NODES - 1, count, replace=False) + (b > 0))
    lengths = np.array([0, SLOTS - 5, 1][:batch], np.int32)

    def rows(tokens, dtype):
        def draw(shape):
            return jnp.asarray(rng.normal(size=(shape[0], batch, tokens, shape[1])), dtype)

        return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int))

    return rows(SLOTS, dtype), rows(NODES, new_dtype or dtype), jnp.asarray(path), jnp.asarray(lengths)


def assert_committed(got, caches, new_rows, node_ids, lengths):
    for have, old, new in zip(*map(jax.tree.leaves, (got, caches, new_rows)), strict=True):
        assert have.dtype == old.dtype
        have, want, new = np.array(have), np.array(old), np.array(new.astype(old.dtype))
        for b, (ids, length) in enumerate(zip(np.asarray(node_ids), np.asarray(lengths), strict=True)):
            count = int((ids >= 0).sum())
            want[:, b, length : length + count] = new[:, b, ids[:count]]
            garbage = slice(length + count, length + len(ids))
            assert np.isfinite(have[:, b, garbage].astype(np.float32)).all()
            want[:, b, garbage] = have[:, b, garbage]
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtypes", [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("name", COMMITS)
def test_writes_the_path_and_nothing_else(name, dtypes):
    caches, new_rows, node_ids, lengths = arrays(np.random.default_rng(), *dtypes)
    got = jax.jit(functools.partial(COMMITS[name], platform=INTERPRETED))(caches, new_rows, node_ids, lengths)
    assert_committed(got, caches, new_rows, node_ids, lengths)


@pytest.mark.parametrize("name", COMMITS)
def test_one_sequence(name):
    caches, new_rows, node_ids, lengths = arrays(np.random.default_rng(), jnp.float32, batch=1)
    for length in (0, 1, SLOTS - 5):
        lengths = jnp.array([length], jnp.int32)
        got = COMMITS[name](caches, new_rows, node_ids, lengths, platform=INTERPRETED)
        assert_committed(got, caches, new_rows, node_ids, lengths)


def test_equals_the_two_steps_it_joins():
    caches, new_rows, node_ids, lengths = arrays(np.random.default_rng(), jnp.float32)
    picked = gather_rows(new_rows, node_ids, node_axis=2, batch_axis=1)
    cache = write_rows(Cache(rows=caches, lengths=lengths), picked, jnp.zeros_like(lengths))
    got = module.commit_rows_reference(caches, new_rows, node_ids, lengths)
    jax.tree.map(np.testing.assert_array_equal, got, cache.rows)


def test_nan_of_rejected_nodes_stays_out():
    caches, new_rows, node_ids, lengths = arrays(np.random.default_rng(), jnp.float32, batch=1)
    node_ids = jnp.array([[0, 2, 3, -1, -1]], jnp.int32)
    new_rows = jax.tree.map(lambda x: x.at[:, :, jnp.array([1, 4, 5, 6])].set(jnp.nan), new_rows)
    for commit in COMMITS.values():
        got = commit(caches, new_rows, node_ids, lengths, platform=INTERPRETED)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_wrong_arguments_are_named():
    caches, new_rows, node_ids, lengths = arrays(np.random.default_rng(0), jnp.float32)
    narrow = jax.tree.map(lambda x: x[..., :-1], new_rows)
    short = jax.tree.map(lambda x: x[:, :, :4], caches)
    for wrong, name in (
        ((caches, new_rows[:2], node_ids, lengths), "new_rows"),
        ((caches, narrow, node_ids, lengths), "new_rows"),
        ((caches, new_rows, node_ids[0], lengths), "node_ids"),
        ((caches, new_rows, node_ids[:2], lengths[:2]), "node_ids"),
        ((caches, new_rows, node_ids, lengths[:2]), "lengths"),
        ((short, new_rows, node_ids, lengths), "slots"),
        (((), (), node_ids, lengths), "caches"),
    ):
        for commit in COMMITS.values():
            with pytest.raises(ValueError, match=name):
                commit(*wrong, platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="GPU"):
        module.commit_rows_triton(caches, new_rows, node_ids, lengths, platform=HOST)

"""Committing the accepted path of GLM-5: rows of 78 layers into the latents and index keys of the cache."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_INDEX, GLM5_MLA
from ddtree_jax.pallas.cases.base import WHOLE, Case

# Layers of one stack, and whether they hold index keys: GLM-5.2 by `models.glm5.layer_plan`.
STACKS = ((3, True), (3, False), (18, True), (18, False), (18, False), (18, False))
PATH, NODES = 16, 17


def _rows(key: jax.Array, batch: int, slots: int) -> tuple[dict[str, jax.Array], ...]:
    stacks = []
    for i, (layers, full) in enumerate(STACKS):
        widths = {"latent": GLM5_MLA.rank + GLM5_MLA.rope} | ({"index_key": GLM5_INDEX.head_dim} if full else {})
        keys = jax.random.split(jax.random.fold_in(key, i), len(widths))
        stacks.append(
            {
                name: jax.random.normal(key, (layers, batch, slots, width), jnp.bfloat16)
                for key, (name, width) in zip(keys, widths.items(), strict=True)
            }
        )
    return tuple(stacks)


def _arrays(key: jax.Array, batch: int, slots: int) -> tuple[Any, ...]:
    old, new = jax.random.split(key)
    path = np.full((batch, PATH), -1, np.int32)
    for b in range(batch):
        accepted = PATH - b % PATH
        path[b, :accepted] = np.arange(accepted) + b % 2
    lengths = np.linspace(0, slots - PATH, batch + 1).astype(np.int32)[1:]
    return _rows(old, batch, slots), _rows(new, batch, NODES), jnp.asarray(path), jnp.asarray(lengths)


def _error(arrays: tuple[Any, ...], result: Any) -> float:
    """Share of cache leaves with any wrong byte outside the slots that hold garbage."""
    caches, new_rows, node_ids, lengths = jax.tree.map(np.asarray, jax.device_get(arrays))
    wrong, leaves = 0, list(zip(*map(jax.tree.leaves, (caches, new_rows, result)), strict=True))
    for old, new, got in leaves:
        want, got = old.copy(), np.array(got)
        for b, (ids, length) in enumerate(zip(node_ids, lengths, strict=True)):
            count = int((ids >= 0).sum())
            want[:, b, length : length + count] = new[:, b, ids[:count]]
            want[:, b, length + count : length + len(ids)] = got[:, b, length + count : length + len(ids)] = 0
        wrong += not np.array_equal(want, got)
    return wrong / len(leaves)


def _case(batch: int, slots: int) -> Case:
    width = GLM5_MLA.rank + GLM5_MLA.rope
    columns = sum(layers * (width + full * GLM5_INDEX.head_dim) for layers, full in STACKS)
    return Case(
        op="commit_rows",
        name=f"glm5 commit, {batch} sequences, {PATH} rows, {slots} slots",
        make=functools.partial(_arrays, batch=batch, slots=slots),
        static={},
        traffic=2 * 2 * batch * PATH * columns,
        flops=0,
        tolerance=0.0,
        check=_error,
        rotate=(0,),
        carries={WHOLE: 0},
    )


CASES = (_case(1, 8192), _case(8, 1024))

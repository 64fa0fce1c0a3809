"""Thin drivers of the two networks over their caches, and trees as plain numpy arrays."""

import functools

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models.cache import write_rows
from ddtree_jax.tree import gather_rows

STATIC = ("graphdef", "layer_ids", "absorbed")
# Compilation is most of what these tests cost.
FAST = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=STATIC, compiler_options=FAST)
def forward(graphdef, params, token_ids, positions, block_mask, cache, *, layer_ids=(), absorbed=False):
    model = nnx.merge(graphdef, params)
    output = model(token_ids, positions, block_mask, cache, layer_ids=layer_ids, absorbed=absorbed)
    return model.logits(output.hidden), output


@jax.jit
def commit(cache, rows, node_ids, counts):
    return write_rows(cache, gather_rows(rows, node_ids, node_axis=2, batch_axis=1), counts)


append = jax.jit(write_rows)


class Session:
    """One batch over one cache; every call takes numpy and returns numpy logits.

    `absorbed` is the form of the latent attention in trees and single steps; prefill is expanded.
    """

    def __init__(self, target, batch, capacity, *, absorbed=False, forward=forward):
        self.graphdef, self.params, self.forward = target.graphdef, target.params, forward
        self.absorbed = absorbed
        self.cache = nnx.merge(self.graphdef, self.params).empty_cache(batch, capacity)
        self.output = None

    @property
    def lengths(self):
        return np.asarray(self.cache.lengths)

    def run(self, token_ids, positions, mask, *, absorbed=None):
        """One forward pass, nothing committed: logits [B, T, V]; `self.output` keeps rows and features."""
        arguments = (jnp.asarray(x, t) for x, t in ((token_ids, "int32"), (positions, "int32"), (mask, bool)))
        absorbed = self.absorbed if absorbed is None else absorbed
        options = dict(layer_ids=golden_models.LAYER_IDS, absorbed=absorbed)
        logits, self.output = self.forward(self.graphdef, self.params, *arguments, self.cache, **options)
        return np.asarray(logits)

    def extend(self, token_ids, counts=None):
        """A causal chunk, its first `counts[b]` tokens committed (default all): logits [B, T, V]."""
        batch, length = np.shape(token_ids)
        positions = self.lengths[:, None] + np.arange(length)
        mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), (batch, length, length))
        logits = self.run(token_ids, positions, mask, absorbed=self.absorbed and length == 1)
        counts = np.full(batch, length) if counts is None else counts
        self.cache = append(self.cache, self.output.rows, jnp.asarray(counts, jnp.int32))
        return logits

    def verify(self, token_ids, parents):
        """A tree ([N] for all sequences or [B, N]) whose root is the next token of each sequence."""
        parents = np.broadcast_to(parents, np.shape(token_ids))
        positions = self.lengths[:, None] + np.stack([depths(row) for row in parents])
        return self.run(token_ids, positions, np.stack([ancestor_mask(row) for row in parents]))

    def commit(self, node_ids, counts):
        """Keeps the first `counts[b]` of the nodes `node_ids` [B, D] of the last pass."""
        arguments = (jnp.asarray(x, jnp.int32) for x in (node_ids, counts))
        self.cache = commit(self.cache, self.output.rows, *arguments)


@functools.partial(jax.jit, static_argnames=("graphdef",), compiler_options=FAST)
def context_rows(graphdef, params, features, positions):
    return nnx.merge(graphdef, params).context_rows(features, positions)


@functools.partial(jax.jit, static_argnames=("graphdef", "target_graphdef"), compiler_options=FAST)
def draft(graphdef, params, target_graphdef, target_params, cache, block_ids):
    drafter, target = nnx.merge(graphdef, params), nnx.merge(target_graphdef, target_params)
    hidden = drafter.draft(cache, target.embed_tokens(block_ids))
    return drafter.scale_logits(target.head_logits(hidden))


class DraftSession:
    """The drafter over its own cache of context keys and values."""

    def __init__(self, drafter, target, batch, capacity):
        self.drafter, self.target = drafter, target
        self.cache = nnx.merge(drafter.graphdef, drafter.params).empty_cache(batch, capacity)

    @property
    def lengths(self):
        return np.asarray(self.cache.lengths)

    def extend(self, features, counts=None):
        """Commits the first `counts[b]` (default all) of the features [B, T, F] of consecutive tokens."""
        batch, length = np.shape(features)[:2]
        positions = self.lengths[:, None] + np.arange(length)
        positions = jnp.asarray(positions, jnp.int32)
        rows = context_rows(self.drafter.graphdef, self.drafter.params, jnp.asarray(features), positions)
        counts = np.full(batch, length) if counts is None else counts
        self.cache = append(self.cache, rows, jnp.asarray(counts, jnp.int32))

    def draft(self, root_ids):
        """Logits [B, L, V] after the committed context and the root tokens [B]."""
        config = self.drafter.config
        block = np.full((len(root_ids), config.block_size), config.mask_token_id, np.int32)
        block[:, 0] = root_ids
        models = self.drafter.graphdef, self.drafter.params, self.target.graphdef, self.target.params
        return np.asarray(draft(*models, self.cache, jnp.asarray(block)))


def gather_features(features, node_ids):
    """[B, N, F], [B, D] -> [B, D, F]; a negative node gives any finite row."""
    return np.take_along_axis(np.asarray(features), np.maximum(node_ids, 0)[:, :, None], axis=1)


def tree_path(parents, node):
    """Nodes from the root to `node`, both included."""
    path = []
    while node != -1:
        path.insert(0, int(node))
        node = parents[node]
    return path


def depths(parents):
    return np.array([len(tree_path(parents, n)) - 1 for n in range(len(parents))])


def ancestor_mask(parents):
    """bool[N, N]: row n is True at n, its ancestors and the root."""
    mask = np.zeros((len(parents),) * 2, bool)
    for n in range(len(parents)):
        mask[n, tree_path(parents, n)] = True
    return mask

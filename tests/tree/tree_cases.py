"""Random drafter logits of every awkward kind, and comparison of array trees with the plain heap."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.tree import reference

KINDS = ("continuous", "integer", "bfloat16", "uniform", "peaked", "masked", "mostly_masked", "nan")


def random_logits(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 logits; every kind but the first two has exact ties or missing candidates."""
    logits = (rng.normal(size=shape) * 3).astype(np.float32)
    if kind == "integer":
        return np.round(logits)
    if kind == "bfloat16":
        return (logits * 4).astype(ml_dtypes.bfloat16).astype(np.float32)
    if kind == "uniform":
        return np.zeros_like(logits)
    if kind == "peaked":
        return logits * 40
    if kind == "masked":
        return np.where(rng.random(shape) < 0.4, -np.inf, np.round(logits))
    if kind == "mostly_masked":
        # Whole rows without a candidate are common here.
        return np.where(rng.random(shape) < 0.9, -np.inf, logits)
    if kind == "nan":
        return np.where(rng.random(shape) < 0.3, np.nan, logits)
    return logits


def logits_batch(seed: int, per_kind: int, depth: int, vocab: int) -> np.ndarray:
    """[len(KINDS) * per_kind, depth, vocab]."""
    rng = np.random.default_rng(seed)
    return np.concatenate([random_logits(rng, kind, (per_kind, depth, vocab)) for kind in KINDS])


def heap_trees(
    log_probs, token_ids, root_token_ids, budget: int, *, force_spine: bool = False
) -> list[list[reference.Node]]:
    rows = zip(np.asarray(log_probs), np.asarray(token_ids), np.asarray(root_token_ids), strict=True)
    return [reference.best_first_tree(lp, ids, int(root), budget, force_spine=force_spine) for lp, ids, root in rows]


def assert_trees_equal(tree, expected: list[list[reference.Node]]) -> None:
    """Exact equality with the plain trees, padding included."""
    slots = tree.token_ids.shape[1]
    for name, fill, value in (
        ("token_ids", 0, lambda node: node.token_id),
        ("parents", -1, lambda node: node.parent),
        ("depths", 0, lambda node: node.depth),
        ("log_probs", -np.inf, lambda node: node.log_prob),
    ):
        wanted = [[value(node) for node in nodes] + [fill] * (slots - len(nodes)) for nodes in expected]
        np.testing.assert_array_equal(np.asarray(getattr(tree, name)), np.asarray(wanted), err_msg=name)
    np.testing.assert_array_equal(np.asarray(tree.num_nodes), [len(nodes) for nodes in expected])


def tree_from_lists(parents: list[list[int]], token_ids: list[list[int]], slots: int):
    """A DraftTree from plain per-sequence lists (root included), padded to `slots`."""
    from ddtree_jax.tree import DraftTree

    def pad(rows, fill, dtype):
        return jnp.asarray([row + [fill] * (slots - len(row)) for row in rows], dtype)

    depths = []
    for row in parents:
        row_depths: list[int] = []
        for parent in row:
            row_depths.append(0 if parent < 0 else row_depths[parent] + 1)
        depths.append(row_depths)
    return DraftTree(
        token_ids=pad(token_ids, 0, jnp.int32),
        parents=pad(parents, -1, jnp.int32),
        depths=pad(depths, 0, jnp.int32),
        log_probs=pad([[-float(d) for d in np.maximum.accumulate(row)] for row in depths], -np.inf, jnp.float32),
        num_nodes=jnp.asarray([len(row) for row in parents], jnp.int32),
    )


def random_tree(rng: np.random.Generator, num_nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    """(parents, token_ids) of a random tree, root first, siblings distinct."""
    parents, tokens, used = [-1], [int(rng.integers(vocab))], {}
    while len(parents) < num_nodes:
        parent = int(rng.integers(len(parents)))
        free = [t for t in range(vocab) if t not in used.setdefault(parent, set())]
        if free:
            token = int(rng.choice(free))
            used[parent].add(token)
            parents.append(parent)
            tokens.append(token)
    return parents, tokens

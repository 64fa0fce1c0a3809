"""Plain-Python oracle of the tree: slow, obvious, and the definition that the fast code is tested against.

Nothing here is traced or batched. A tree is a list of `Node`, the root first, parents before children.
"""

import heapq
from typing import NamedTuple

import numpy as np


class Node(NamedTuple):
    """One node of a plain tree."""

    token_id: int
    parent: int  # index in the list; -1 for the root
    depth: int
    log_prob: np.float32
    ranks: tuple[int, ...]


def best_first_tree(log_probs, token_ids, root_token_id: int, budget: int, *, force_spine: bool = False) -> list[Node]:
    """The `budget` most probable prefixes by a heap (DDTree, best-first construction).

    Args:
      log_probs: [L, K], each row non-increasing, -inf where there is no candidate.
      token_ids: [L, K].
      root_token_id: the current token.
      budget: nodes besides the root.
      force_spine: guarantee the top-1 chain, as deep as the candidates and the budget go; the best other
        prefixes get the rest of the budget.

    Returns:
      The root and up to `budget` nodes in pop order (with `force_spine` sorted into the same order). Popping a
      prefix pushes its next sibling and its first child, so every prefix is pushed exactly once. Scores are
      float32 sums from the root outward; ties pop the lexicographically smaller rank tuple.
    """
    log_probs = np.asarray(log_probs, np.float32)
    depth, k = log_probs.shape
    tree = [Node(int(root_token_id), -1, 0, np.float32(0.0), ())]
    if force_spine:
        return _best_first_tree_with_spine(tree, log_probs, token_ids, budget)
    heap: list[tuple[np.float32, tuple[int, ...], int]] = []

    def push(ranks, parent):
        level = len(ranks) - 1
        if level < depth and ranks[-1] < k:
            with np.errstate(over="ignore"):
                score = np.float32(tree[parent].log_prob + log_probs[level, ranks[-1]])
            if score > -np.inf:
                heapq.heappush(heap, (-score, ranks, parent))

    push((0,), 0)
    while heap and len(tree) <= budget:
        negated, ranks, parent = heapq.heappop(heap)
        level = len(ranks) - 1
        tree.append(Node(int(token_ids[level][ranks[-1]]), parent, len(ranks), -negated, ranks))
        push((*ranks[:-1], ranks[-1] + 1), parent)
        push((*ranks, 0), len(tree) - 1)
    return tree


def _best_first_tree_with_spine(tree: list[Node], log_probs: np.ndarray, token_ids, budget: int) -> list[Node]:
    """The whole spine first; then, node by node, the best prefix whose parent is in the tree; sorted at the end."""
    depth, k = log_probs.shape

    def below(parent: Node, rank: int) -> tuple[np.float32, tuple[int, ...]] | None:
        """(negated score, ranks) of a child, or None if there is no such candidate."""
        if parent.depth >= depth or rank >= k:
            return None
        with np.errstate(over="ignore"):
            score = np.float32(parent.log_prob + log_probs[parent.depth, rank])
        return (-score, (*parent.ranks, rank)) if score > -np.inf else None

    def add(parent: int, found: tuple[np.float32, tuple[int, ...]]) -> None:
        negated, ranks = found
        tree.append(Node(int(token_ids[len(ranks) - 1][ranks[-1]]), parent, len(ranks), -negated, ranks))

    while len(tree) <= budget and (found := below(tree[-1], 0)):
        add(len(tree) - 1, found)
    num_children = [1] * (len(tree) - 1) + [0]
    while len(tree) <= budget:
        # Of each node's children, only the first that is missing can be the best.
        options = [(found, n) for n, node in enumerate(tree) if (found := below(node, num_children[n]))]
        if not options:
            break
        found, parent = min(options)
        num_children[parent] += 1
        num_children.append(0)
        add(parent, found)

    order = sorted(range(1, len(tree)), key=lambda n: (-tree[n].log_prob, tree[n].ranks))
    slots = {old: new for new, old in enumerate([0, *order])}
    return [tree[0], *(tree[old]._replace(parent=slots[tree[old].parent]) for old in order)]


def best_first_tree_from_pairs(pair_log_probs, token_ids, root_token_id: int, budget: int) -> list[Node]:
    """As `best_first_tree`, for log-probabilities that depend on the parent's candidate.

    Args:
      pair_log_probs: [L, K, K], entry [l, p, c]: of candidate c below candidate p of the row above, <= 0; the root
        reads [0, 0]. Anything that is not <= 0 and finite is no candidate.
      token_ids: [L, K].
      root_token_id: the current token.
      budget: nodes besides the root.

    A node's rank is its place among its parent's candidates: higher log-probability first, equal ones by the smaller
    token id.
    """
    pair_log_probs = np.asarray(pair_log_probs, np.float32)
    depth, k = pair_log_probs.shape[:2]
    tree, columns = [Node(int(root_token_id), -1, 0, np.float32(0.0), ())], [0]
    heap: list[tuple[np.float32, tuple[int, ...], int, int]] = []

    def push(parent: int, rank: int):
        level = tree[parent].depth
        if level == depth:
            return
        row = pair_log_probs[level, columns[parent]]
        children = sorted((c for c in range(k) if -np.inf < row[c] <= 0), key=lambda c: (-row[c], token_ids[level][c]))
        if rank < len(children):
            with np.errstate(over="ignore"):
                score = np.float32(tree[parent].log_prob + row[children[rank]])
            if score > -np.inf:
                heapq.heappush(heap, (-score, (*tree[parent].ranks, rank), parent, children[rank]))

    push(0, 0)
    while heap and len(tree) <= budget:
        negated, ranks, parent, column = heapq.heappop(heap)
        tree.append(Node(int(token_ids[len(ranks) - 1][column]), parent, len(ranks), -negated, ranks))
        columns.append(column)
        push(parent, ranks[-1] + 1)
        push(len(tree) - 1, 0)
    return tree


def candidates(draft_logits, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best (log_probs float32[L, k], token_ids int[L, k]) of each row of [L, V] logits.

    Equal logits rank by the smaller token id; entries that are not finite are no candidates (log-prob -inf).
    """
    logits = np.asarray(draft_logits, np.float32)
    logits = np.where(np.isfinite(logits), logits, -np.inf)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    log_probs = np.full(order.shape, -np.inf, np.float32)
    for row, ids in enumerate(order):
        peak = logits[row].max()
        if np.isfinite(peak):
            normalizer = np.float32(peak + np.log(np.sum(np.exp(logits[row] - peak), dtype=np.float64)))
            log_probs[row] = logits[row, ids] - normalizer
    return log_probs, order


def chain(draft_logits, root_token_id: int) -> list[Node]:
    """The drafter's greedy chain; a row without candidates ends it."""
    draft_logits = np.asarray(draft_logits, np.float32)
    log_probs, token_ids = candidates(draft_logits, 1)
    return best_first_tree(log_probs, token_ids, root_token_id, budget=len(draft_logits))


def visibility(parents: list[int]) -> np.ndarray:
    """bool[n, n]: row n sees its ancestors, the root and itself, found by following parents one step at a
    time.
    """
    visible = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        cursor = node
        while cursor >= 0:
            visible[node, cursor] = True
            cursor = parents[cursor]
    return visible


def walk(token_ids: list[int], parents: list[int], target_token_ids) -> tuple[list[int], int]:
    """Follows the target's choices: (accepted node indices, the root first; the bonus token).

    From the root, step to the child that carries the target's choice after the current node. The first choice
    that no child carries is the bonus.
    """
    path = [0]
    while True:
        choice = int(target_token_ids[path[-1]])
        matching = [n for n in range(1, len(parents)) if parents[n] == path[-1] and token_ids[n] == choice]
        if not matching:
            return path, choice
        path.append(matching[0])


def cut(emitted: list[int], stop_token_ids, remaining: int) -> list[int]:
    """What the sequence keeps of a round: up to `remaining` tokens, ending with the first stop token."""
    kept = []
    for token in emitted[:remaining]:
        kept.append(token)
        if token in stop_token_ids:
            break
    return kept

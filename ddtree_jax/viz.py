"""Views of one draft tree and the path that the target took: plain text, Graphviz DOT, a matplotlib figure.

Each function takes the fields of `DraftTree` and `AcceptedPath` (letters: B batch, N tree slots) as arrays
that NumPy can read, draws the row `batch_index` of them, and returns an object; none writes a file.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddtree_jax.tree import AcceptedPath, DraftTree

TokenText = Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class _View:
    """One row of a tree as Python values: lists over its valid nodes, and which of them are shown."""

    labels: list[str]
    log_probs: list[float]
    parents: list[int]
    depths: list[int]
    children: list[list[int]]
    shown: frozenset[int]
    accepted: tuple[int, ...]  # the root first; empty without a path
    bonus: str | None

    def shown_children(self, node: int) -> list[int]:
        return [child for child in self.children[node] if child in self.shown]

    def num_hidden_below(self, node: int) -> int:
        """Counts the nodes left out whose nearest shown ancestor is `node`."""
        count = 0
        stack = [child for child in self.children[node] if child not in self.shown]
        while stack:
            count += 1
            stack.extend(self.children[stack.pop()])
        return count

    def summary(self) -> str:
        length = len(self.accepted)
        return (
            f"accepted {length - 1} of {len(self.labels) - 1} drafted, and the bonus token: "
            f"{length} token{'' if length == 1 else 's'} from one target pass"
        )


def _view(
    tree: "DraftTree",
    path: "AcceptedPath | None",
    token_text: TokenText | None,
    batch_index: int,
    max_nodes: int,
) -> _View:
    token_ids = np.asarray(tree.token_ids)
    if not 0 <= batch_index < token_ids.shape[0]:
        raise ValueError(f"batch_index: got {batch_index}; allowed are 0 to {token_ids.shape[0] - 1}")
    if max_nodes < 1:
        raise ValueError(f"max_nodes: got {max_nodes}; at least 1 (the root)")
    num_nodes = int(np.asarray(tree.num_nodes)[batch_index])
    parents = np.asarray(tree.parents)[batch_index, :num_nodes].tolist()
    log_probs = np.asarray(tree.log_probs)[batch_index, :num_nodes].tolist()
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    for node in range(1, num_nodes):
        children[parents[node]].append(node)

    text = _quoted(token_text)
    accepted: tuple[int, ...] = ()
    bonus = None
    if path is not None:
        length = int(np.asarray(path.length)[batch_index])
        accepted = tuple(np.asarray(path.node_ids)[batch_index, :length].tolist())
        bonus = text(int(np.asarray(path.bonus_token_ids)[batch_index]))

    # The path is always shown. No child scores above its parent, so the best nodes include their ancestors.
    shown = {0, *accepted}
    for node in sorted(range(num_nodes), key=lambda n: (-log_probs[n], n)):
        if len(shown) >= max_nodes:
            break
        shown.add(node)
    return _View(
        labels=[text(token_id) for token_id in token_ids[batch_index, :num_nodes].tolist()],
        log_probs=log_probs,
        parents=parents,
        depths=np.asarray(tree.depths)[batch_index, :num_nodes].tolist(),
        children=children,
        shown=frozenset(shown),
        accepted=accepted,
        bonus=bonus,
    )


def _quoted(token_text: TokenText | None) -> TokenText:
    """Wraps `token_text` so that a label fits one line and shows its spaces; ids without it."""
    if token_text is None:
        return lambda token_id: f"<{token_id}>"
    return lambda token_id: repr(token_text(token_id))


def ascii_tree(
    tree: "DraftTree",
    path: "AcceptedPath | None" = None,
    token_text: TokenText | None = None,
    *,
    batch_index: int = 0,
    max_nodes: int = 40,
) -> str:
    """Draws a tree as text, one node a line, in pre-order, the most probable child first.

    Args:
      tree: fields [B, N].
      path: the accepted path; its nodes get a `*` in the first column, the bonus token is a line with `+`.
      token_text: token id -> text; without it ids are shown.
      batch_index: row of the batch.
      max_nodes: nodes drawn at most, the accepted path in any case; `(3 more)` counts those left out.

    Returns:
      Lines joined by newlines, without one at the end. The number beside a node is the drafter's
      log-probability of the whole path from the root.

    Raises:
      ValueError: `batch_index` or `max_nodes` out of range.
    """
    view = _view(tree, path, token_text, batch_index, max_nodes)
    rows: list[tuple[str, str, str]] = []  # mark, drawing, log-probability
    # A stack, not recursion: a chain may be as deep as the budget. An item is a node, or a line of text.
    stack: list[tuple[int | str, str, str]] = [(0, "", "")]
    while stack:
        item, stem, branch = stack.pop()
        if isinstance(item, str):
            rows.append(("+" if item.startswith("bonus") else " ", stem + branch + item, ""))
            continue
        label = view.labels[item] if item else f"{view.labels[item]} (root)"
        score = f"{view.log_probs[item]:.2f}" if item else ""
        rows.append(("*" if item in view.accepted else " ", stem + branch + label, score))
        entries: list[int | str] = list(view.shown_children(item))
        if view.accepted and item == view.accepted[-1]:
            entries.insert(0, f"bonus {view.bonus}")
        if hidden := view.num_hidden_below(item):
            entries.append(f"({hidden} more)")
        below = stem + {"": "", "|-- ": "|   ", "`-- ": "    "}[branch]
        for number, entry in reversed(list(enumerate(entries, start=1))):
            stack.append((entry, below, "`-- " if number == len(entries) else "|-- "))

    width = max(len(drawing) for _, drawing, _ in rows)
    lines = [f"{mark} {drawing:<{width}}  {score:>6}".rstrip() for mark, drawing, score in rows]
    if path is not None:
        lines.append(view.summary())
    return "\n".join(lines)


def to_dot(
    tree: "DraftTree",
    path: "AcceptedPath | None" = None,
    token_text: TokenText | None = None,
    *,
    batch_index: int = 0,
    max_nodes: int = 200,
) -> str:
    """Returns the tree as a Graphviz DOT graph; arguments as in `ascii_tree`, the accepted path filled."""
    view = _view(tree, path, token_text, batch_index, max_nodes)
    lines = ["digraph draft_tree {", '  node [shape=box, fontname="monospace"];']
    for node in sorted(view.shown):
        score = "" if node == 0 else f"\\n{view.log_probs[node]:.2f}"
        style = ', style="filled,bold", fillcolor="#c8e6c9"' if node in view.accepted else ""
        lines.append(f'  n{node} [label="{_dot_text(view.labels[node])}{score}"{style}];')
    for node in sorted(view.shown - {0}):
        style = " [penwidth=2]" if node in view.accepted else ""
        lines.append(f"  n{view.parents[node]} -> n{node}{style};")
    if view.bonus is not None:
        lines.append(f'  bonus [label="{_dot_text(view.bonus)}\\nbonus", style=dashed];')
        lines.append(f"  n{view.accepted[-1]} -> bonus [style=dashed];")
    lines.append("}")
    return "\n".join(lines)


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def to_figure(
    tree: "DraftTree",
    path: "AcceptedPath | None" = None,
    token_text: TokenText | None = None,
    *,
    batch_index: int = 0,
    max_nodes: int = 60,
) -> "Figure":
    """Returns a matplotlib figure: depth downwards, the accepted path green; arguments as in `ascii_tree`.

    Raises:
      ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("to_figure needs matplotlib: pip install 'ddtree-jax[viz]'") from error

    view = _view(tree, path, token_text, batch_index, max_nodes)
    columns = _columns(view)
    leaves = max(columns.values()) + 1
    deepest = max(view.depths[node] for node in view.shown)
    figure = Figure(figsize=(max(4.0, 0.9 * leaves), max(2.0, 0.8 * (deepest + 1))), layout="constrained")
    axes: Any = figure.add_subplot()
    for node in sorted(view.shown):
        x, y = columns[node], -view.depths[node]
        on_path = node in view.accepted
        if node != 0:
            parent = view.parents[node]
            axes.plot(
                [columns[parent], x],
                [-view.depths[parent], y],
                color="tab:green" if on_path else "lightgrey",
                linewidth=2.5 if on_path else 1.0,
                zorder=1,
            )
        # Labels hold arbitrary text: parse_math off, or a token with two dollar signs would be typeset.
        axes.text(
            x,
            y,
            view.labels[node],
            ha="center",
            va="center",
            fontsize=8,
            family="monospace",
            parse_math=False,
            bbox={"boxstyle": "round", "facecolor": "#c8e6c9" if on_path else "white", "edgecolor": "grey"},
        )
    axes.set_xlim(-0.7, leaves - 0.3)
    axes.set_ylim(-deepest - 0.6, 0.6)
    axes.set_axis_off()
    if path is not None:
        axes.set_title(f"accepted {len(view.accepted) - 1} of {len(view.labels) - 1} drafted", fontsize=9)
    return figure


def _columns(view: _View) -> dict[int, float]:
    """Places leaves side by side in drawing order and every other node over the middle of its children."""
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(view.shown_children(node)))
    columns: dict[int, float] = {}
    leaf = 0
    for node in order:
        if not view.shown_children(node):
            columns[node] = float(leaf)
            leaf += 1
    for node in reversed(order):
        if places := [columns[child] for child in view.shown_children(node)]:
            columns[node] = sum(places) / len(places)
    return columns

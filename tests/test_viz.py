"""Views of a tree: read back against the arrays, on a tree with one accepted branch and on random ones."""

import dataclasses
import io
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_jax import viz


@dataclasses.dataclass
class Tree:
    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    num_nodes: np.ndarray


@dataclasses.dataclass
class Path:
    node_ids: np.ndarray
    length: np.ndarray
    bonus_token_ids: np.ndarray


# Row 0 is the tree of the drawing below, row 1 a root alone; the padding would break any view that read it.
TREE = Tree(
    token_ids=np.array([[0, 1, 2, 3, 4, 5, 6, 99], [7, 99, 99, 99, 99, 99, 99, 99]]),
    parents=np.array([[-1, 0, 1, 0, 2, 2, 3, -1], [-1] * 8]),
    depths=np.array([[0, 1, 2, 1, 3, 3, 2, 0], [0] * 8]),
    log_probs=np.array([[0, -0.1, -0.3, -2.0, -2.2, -2.5, -10.1, -np.inf], [0] + [-np.inf] * 7]),
    num_nodes=np.array([7, 1]),
)
PATH = Path(
    node_ids=np.array([[0, 1, 2, 5, -1], [0, -1, -1, -1, -1]]),
    length=np.array([4, 1]),
    bonus_token_ids=np.array([8, 0]),
)
TEXTS = ["def", " main", "(", "\n    ", '"x"', "\\", "é", "end", ")"]


def text(token_id: int) -> str:
    return TEXTS[token_id]


def test_the_drawing():
    assert viz.ascii_tree(TREE, PATH, text).splitlines() == [
        "* 'def' (root)",
        "* |-- ' main'                 -0.10",
        "* |   `-- '('                 -0.30",
        "  |       |-- '\"x\"'           -2.20",
        "* |       `-- '\\\\'            -2.50",
        "+ |           `-- bonus ')'",
        "  `-- '\\n    '                -2.00",
        "      `-- 'é'                -10.10",
        "accepted 3 of 6 drafted, and the bonus token: 4 tokens from one target pass",
    ]


def test_pruned_it_keeps_the_path_and_counts_the_rest():
    lines = viz.ascii_tree(TREE, PATH, text, max_nodes=4).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["'def'", "|--", "|", "|"]
    assert sum(int(n) for n in re.findall(r"\((\d+) more\)", "\n".join(lines))) == 7 - 4
    # a limit below the length of the path does not cut the path
    assert viz.ascii_tree(TREE, PATH, text, max_nodes=1).count("*") == 4


def test_the_batch_index_chooses_the_row():
    assert viz.ascii_tree(TREE, PATH, text, batch_index=1).splitlines() == [
        "* 'end' (root)",
        "+ `-- bonus 'def'",
        "accepted 0 of 0 drafted, and the bonus token: 1 token from one target pass",
    ]
    for index in (-1, 2):
        with pytest.raises(ValueError, match="batch_index"):
            viz.ascii_tree(TREE, PATH, text, batch_index=index)
    with pytest.raises(ValueError, match="max_nodes"):
        viz.ascii_tree(TREE, PATH, text, max_nodes=0)


def test_without_path_and_text():
    drawing = viz.ascii_tree(TREE)
    assert "*" not in drawing and "bonus" not in drawing and "accepted" not in drawing
    assert "<0> (root)" in drawing and "99" not in drawing


def random_tree(choices: list[int]) -> Tree:
    """A tree in best-first order: a node hangs below an earlier one, with a score below all before it."""
    parents, depths = [-1], [0]
    for number, choice in enumerate(choices, start=1):
        parents.append(choice % number)
        depths.append(depths[parents[-1]] + 1)
    size = len(parents)
    return Tree(
        token_ids=np.arange(size)[None],
        parents=np.array([parents]),
        depths=np.array([depths]),
        log_probs=-0.25 * np.arange(size)[None],
        num_nodes=np.array([size]),
    )


@given(st.lists(st.integers(0, 10_000), max_size=40), st.integers(1, 50))
def test_a_random_tree_reads_back(choices, max_nodes):
    tree = random_tree(choices)
    drawing = viz.ascii_tree(tree, max_nodes=max_nodes)
    size = int(tree.num_nodes[0])
    stack: list[int] = []
    parents = {}
    for line in drawing.splitlines():
        found = re.search(r"<(\d+)>", line)
        if found is None:
            continue
        node = int(found[1])
        depth = (found.start() - 2) // 4
        del stack[depth:]
        parents[node] = stack[-1] if stack else -1
        stack.append(node)
    assert parents == {node: int(tree.parents[0, node]) for node in range(min(size, max_nodes))}
    hidden = sum(int(n) for n in re.findall(r"\((\d+) more\)", drawing))
    assert hidden == max(0, size - max_nodes)


def test_a_chain_deeper_than_the_recursion_limit():
    tree = random_tree(list(range(sys.getrecursionlimit() + 10)))
    assert viz.ascii_tree(tree, max_nodes=10_000).count("\n") == int(tree.num_nodes[0]) - 1
    viz.to_dot(tree, max_nodes=10_000)


def test_dot_has_every_edge_and_quotes_labels():
    dot = viz.to_dot(TREE, PATH, text)
    edges = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+)", dot)}
    assert edges == {(int(TREE.parents[0, n]), n) for n in range(1, 7)}
    assert {int(n) for n in re.findall(r"n(\d+) \[label=.*filled", dot)} == {0, 1, 2, 5}
    assert r'''label="'\"x\"'\n-2.20"''' in dot
    assert r"""label="'\\\\'\n-2.50""" in dot
    assert "n5 -> bonus" in dot
    for label in re.findall(r'label=("(?:[^"\\]|\\.)*")', dot):
        assert label.startswith('"') and "\n" not in label


def test_the_figure_shows_every_node_without_overlap():
    figure = viz.to_figure(TREE, PATH, text)
    (axes,) = figure.axes
    assert {entry.get_text() for entry in axes.texts} == {repr(text(n)) for n in range(7)}
    places = {entry.get_position() for entry in axes.texts}
    assert len(places) == 7
    assert len(axes.lines) == 6
    figure.savefig(io.BytesIO())


def test_dollar_signs_are_no_formula():
    tree = random_tree([0])
    viz.to_figure(tree, None, lambda token_id: "$\\nope{$").savefig(io.BytesIO())


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"ddtree-jax\[viz\]"):
        viz.to_figure(TREE)

"""Tables on a device against the matcher and the host's filtered trees; free requests against the unfiltered trees."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from ddtree_jax.grammar import Grammar, unpack
from ddtree_jax.grammar_automaton import NO_STATE, token_automaton
from ddtree_jax.grammar_tree import filtered_chain, filtered_tree
from ddtree_jax.tree import (
    DraftTree,
    advance_states,
    build_constrained_tree,
    build_tree_from_candidates,
    build_tree_from_pairs,
    chain_from_pairs,
    constrained_chain,
    invariants,
    node_states,
    stack_tables,
    state_rows,
)

from .conftest import OTHER_STOP, STOP, TINY_SIZE, allowed, compiled, random_tree
from .grammars import CHOICES, REGEXES
from .proposals import KINDS, random_proposals

GRAMMARS = {
    **{name: Grammar.regex(REGEXES[name]) for name in ("alternatives", "loop", "not quote", "lines", "empty or more")},
    **{name: Grammar.choices(choices) for name, choices in CHOICES.items()},
    "forced": Grammar.regex("xyz1(c|d)y{2}!"),
}
DEPTH, K, BUDGET = 5, 6, 14
ROOT = 9


@dataclasses.dataclass
class Batch:
    """All grammars and two free requests at the ends, in one table."""

    made: list
    automata: list
    table: object

    @property
    def size(self) -> int:
        return len(self.made)

    def places(self, rng) -> tuple[list, np.ndarray, np.ndarray]:
        """(host states or None, device states, newest tokens) somewhere into each text; some have stopped."""
        states, device, roots = [], [], []
        for made, automaton in zip(self.made, self.automata, strict=True):
            state, place, root = None, 0, ROOT
            if made is not None:
                state = made.start()
                for _ in range(int(rng.integers(4))):
                    options = allowed(made, state.root_row())
                    text = [i for i in options if i not in made.stop_token_ids]
                    root = int(rng.choice(text if text and rng.random() < 0.8 else options))
                    state.advance([root])
                    place = automaton.step(place, root)
            states.append(state)
            device.append(place)
            roots.append(root)
        return states, np.array(device, np.int32), np.array(roots, np.int32)

    def proposals(self, rng, *, kind, paired) -> tuple[np.ndarray, np.ndarray]:
        """([B, L, K] or [B, L, K, K], [B, L, K]); unpaired rows best first, equal ones by the smaller token."""
        scores, tokens = [], []
        for made in self.made:
            some = made or self.made[int(rng.integers(1, self.size - 1))]
            s, t = random_proposals(some, rng, DEPTH, K, kind=kind, paired=paired)
            if not paired:
                s = np.where(s <= 0, s, -np.inf)
                order = np.lexsort((t, -s), axis=-1)
                s, t = np.take_along_axis(s, order, axis=-1), np.take_along_axis(t, order, axis=-1)
            scores.append(s.astype(np.float32))
            tokens.append(t)
        return np.stack(scores), np.stack(tokens)


@pytest.fixture(scope="module")
def batch(tiny) -> Batch:
    stops = [(STOP, OTHER_STOP), (STOP,)]
    made = [None, *(compiled(tiny, grammar, stops[i % 2]) for i, grammar in enumerate(GRAMMARS.values())), None]
    automata = [None if m is None else token_automaton(m) for m in made]
    return Batch(made, automata, stack_tables(automata, TINY_SIZE))


def _sequence(tree: DraftTree, number: int) -> DraftTree:
    return jax.tree.map(lambda x: np.asarray(x)[number], tree)


def _build(scores, tokens, roots, table, states, make):
    if make == "chain":
        return constrained_chain(scores, tokens, roots, table, states)
    return build_constrained_tree(scores, tokens, roots, table, states, budget=BUDGET)


@pytest.mark.parametrize("make", ["tree", "chain"])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", ["continuous", "few values", "uniform", "sparse"])
def test_equal_to_the_host(batch, kind, paired, make):
    nodes, forced = 0, 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        scores, tokens = batch.proposals(rng, kind=kind, paired=paired)
        states, device, roots = batch.places(rng)
        found = _build(scores, tokens, roots, batch.table, device, make)
        rows = np.asarray(state_rows(batch.table, node_states(found, batch.table, device, max_depth=DEPTH)))
        for number, state in enumerate(states):
            if state is None:
                continue
            arguments = (state, int(roots[number]), scores[number], tokens[number])
            if make == "chain":
                expected = filtered_chain(*arguments, forced="token")
            else:
                expected = filtered_tree(*arguments, BUDGET, forced="token")
            one = _sequence(found, number)
            assert one.num_nodes == expected.num_nodes
            np.testing.assert_allclose(one.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
            if kind == "continuous" or make == "chain":
                for name in ("token_ids", "parents", "depths"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(expected, name), err_msg=name)
                np.testing.assert_array_equal(rows[number], expected.rows())
            else:  # equal scores may stand in another order, and the last place may be another's
                walked, alive = state.walk(one.token_ids, one.parents, int(one.num_nodes))
                assert alive[: one.num_nodes].all()
                np.testing.assert_array_equal(rows[number], walked)
            nodes += int(one.num_nodes) - 1
            forced += int(np.sum(~np.isin(one.token_ids[1 : one.num_nodes], tokens[number])))
    assert nodes > 60 and forced > 10


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_free_requests_are_unfiltered(batch, kind, paired):
    """To the bit, ties and all, beside constrained ones."""
    rng = np.random.default_rng(3)
    scores, tokens = batch.proposals(rng, kind=kind, paired=paired)
    _, device, roots = batch.places(rng)
    if paired:
        tree = build_tree_from_pairs(scores, tokens, roots, budget=BUDGET)
        chain = chain_from_pairs(scores, tokens, roots)
    else:
        tree = build_tree_from_candidates(scores, tokens, roots, budget=BUDGET)
        chain = build_tree_from_candidates(scores[:, :, :1], tokens[:, :, :1], roots, budget=DEPTH)
    for make, expected in (("tree", tree), ("chain", chain)):
        found = _build(scores, tokens, roots, batch.table, device, make)
        for number in (0, batch.size - 1):
            chex.assert_trees_all_equal(_sequence(found, number), _sequence(expected, number))
    alone = build_constrained_tree(
        scores[:1], tokens[:1], roots[:1], stack_tables([None], TINY_SIZE), device[:1], budget=BUDGET
    )
    chex.assert_trees_all_equal(_sequence(alone, 0), _sequence(tree, 0))


@pytest.mark.parametrize("paired", [False, True])
def test_trees_are_valid(batch, paired):
    check = jax.jit(checkify.checkify(invariants.check_tree))
    for seed, kind in enumerate(KINDS):
        rng = np.random.default_rng(seed)
        scores, tokens = batch.proposals(rng, kind=kind, paired=paired)
        _, device, roots = batch.places(rng)
        found = _build(scores, tokens, roots, batch.table, device, "tree")
        check(found)[0].throw()
        assert int(found.depths.max()) <= DEPTH


def test_states_and_rows_are_those_of_the_walk(batch):
    dead = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        slots, trees = 14, []
        for made in batch.made:
            tokens, parents = random_tree(made or batch.made[1], rng, int(rng.integers(1, slots + 1)))
            tokens[1:] = [OTHER_STOP if t % 5 == 0 else t for t in tokens[1:]] if seed % 2 else tokens[1:]
            trees.append((tokens, parents))
        tree = _stacked(trees, slots)
        roots = np.zeros((batch.size,), np.int32)
        states = node_states(tree, batch.table, roots)
        chex.assert_trees_all_equal(states, node_states(tree, batch.table, roots, max_depth=10))
        assert int(tree.depths.max()) <= 10
        rows = np.asarray(state_rows(batch.table, states))
        for number, made in enumerate(batch.made):
            count = int(tree.num_nodes[number])
            assert (np.asarray(states)[number, count:] == NO_STATE).all()
            if made is None:
                assert (np.asarray(states)[number, :count] == 0).all()
                assert unpack(rows[number, :count], TINY_SIZE).all() and not rows[number, count:].any()
                continue
            expected, alive = made.start().walk(*(np.asarray(x)[number] for x in (tree.token_ids, tree.parents)), count)
            np.testing.assert_array_equal(rows[number], expected)
            np.testing.assert_array_equal(np.asarray(states)[number] != NO_STATE, alive)
            dead += count - int(alive.sum())
    assert dead > 30


def _stacked(trees, slots: int) -> DraftTree:
    def pad(rows, fill):
        return jnp.asarray([[*row, *[fill] * (slots - len(row))] for row in rows], jnp.int32)

    depths = []
    for _, parents in trees:
        own: list[int] = []
        for parent in parents:
            own.append(0 if parent < 0 else own[parent] + 1)
        depths.append(own)
    depths = pad(depths, 0)
    return DraftTree(
        token_ids=pad([tokens for tokens, _ in trees], 0),
        parents=pad([parents for _, parents in trees], -1),
        depths=depths,
        log_probs=-depths.astype(jnp.float32),
        num_nodes=jnp.asarray([len(tokens) for tokens, _ in trees], jnp.int32),
    )


def test_bits_beyond_the_vocabulary_are_zero(batch):
    free = np.asarray(batch.table.allowed)[0, 0]
    assert TINY_SIZE % 32 and unpack(free, 32 * len(free)).tolist() == [True] * TINY_SIZE + [False] * (-TINY_SIZE % 32)
    assert not np.asarray(batch.table.allowed)[0, 1:].any()


def test_a_row_of_no_state_is_zero(batch):
    states = np.full((batch.size, 3), NO_STATE, np.int32)
    assert not np.asarray(state_rows(batch.table, states)).any()
    # Nor does anything come below a root without a state.
    scores, tokens = batch.proposals(np.random.default_rng(0), kind="continuous", paired=False)
    found = _build(scores, tokens, np.full((batch.size,), ROOT, np.int32), batch.table, states[:, 0], "tree")
    assert (np.asarray(found.num_nodes) == 1).all()


def test_states_follow_what_is_emitted(batch):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        states, device, _ = batch.places(rng)
        emitted = np.full((batch.size, 5), -7, np.int32)
        counts = rng.integers(0, 6, batch.size).astype(np.int32)
        for number, state in enumerate(states):
            for place in range(counts[number]):
                options = range(TINY_SIZE) if state is None else allowed(state.compiled, state.root_row())
                emitted[number, place] = rng.choice(options)
                if state is not None:
                    state.advance([int(emitted[number, place])])
        moved = np.asarray(advance_states(batch.table, device, emitted, counts))
        rows = np.asarray(state_rows(batch.table, moved[:, None]))[:, 0]
        for number, state in enumerate(states):
            expected = np.asarray(batch.table.allowed)[number, 0] if state is None else state.root_row()
            np.testing.assert_array_equal(rows[number], expected)
        # What is not allowed, or no token at all, leads nowhere, and nothing leads back.
        for bad in (-1, TINY_SIZE, 2**31 - 1):
            lost = advance_states(batch.table, moved, np.full((batch.size, 2), [bad, STOP], np.int32), counts * 0 + 2)
            assert (np.asarray(lost) == NO_STATE).all()


def _one(batch, made, scores, tokens, *, budget=BUDGET):
    """The tree of one sequence at the start of its text, in place of the batch's first: one program for all of them.

    Every row has the given candidates, or each its own.
    """
    table = stack_tables([token_automaton(made), *batch.automata[1:]], TINY_SIZE)
    assert table.next_state.shape == batch.table.next_state.shape
    scores, tokens = np.atleast_2d(np.asarray(scores, np.float32)), np.atleast_2d(np.asarray(tokens, np.int32))
    scores = np.pad(scores, ((0, 0), (0, K - scores.shape[1])), constant_values=-np.inf)
    tokens = np.pad(tokens, ((0, 0), (0, K - tokens.shape[1])))
    scores, tokens = (np.broadcast_to(x, (batch.size, DEPTH, K)) for x in (scores, tokens))
    zeros = np.zeros((batch.size,), np.int32)
    return _sequence(build_constrained_tree(scores, tokens, zeros + ROOT, table, zeros, budget=budget), 0)


def test_only_what_is_forced(batch, tiny):
    """Nothing proposed is allowed: the forced tokens alone, until a choice, a possible stop, or the last row."""
    x, y, z = (tiny.token_bytes.index(bytes([b])) for b in b"xyz")
    for pattern, chain in (
        ("xyz(q|é)", [x, y, z]), ("xyz?", [x, y]), ("z{9}", [z] * DEPTH), ("yz", [y, z]), ("[xy]z", []),
    ):  # fmt: skip
        found = _one(batch, compiled(tiny, Grammar.regex(pattern)), [0.0], [5])
        assert found.token_ids.tolist() == [ROOT, *chain, *[0] * (BUDGET - len(chain))]
        assert found.log_probs[: len(chain) + 1].tolist() == [0.0] * (len(chain) + 1)


@pytest.mark.parametrize("shape, budget", [((2, 0, 0), 3), ((3, 1), 2), ((3, 1), 0), ((0, 3), 4)])
def test_small_sizes(tiny, shape, budget):
    """Without candidates the forced tokens remain; neither L nor the budget is exceeded."""
    table = stack_tables([token_automaton(compiled(tiny, Grammar.regex("z{9}")))], TINY_SIZE)
    z, zeros = tiny.token_bytes.index(b"z"), np.zeros((1,), np.int32)
    scores, tokens = np.zeros((1, *shape), np.float32), np.zeros((1, *shape[:2]), np.int32)
    tree = build_constrained_tree(scores, tokens, zeros + ROOT, table, zeros, budget=budget)
    count = min(shape[0], budget)
    assert tree.token_ids.tolist() == [[ROOT, *[z] * count, *[0] * (budget - count)]]
    chain = constrained_chain(scores, tokens, zeros + ROOT, table, zeros)
    assert chain.token_ids.tolist() == [[ROOT, *[z] * shape[0]]]


def test_proposals_that_lead_nowhere(batch, tiny):
    a, b, q, z = (tiny.token_bytes.index(bytes([i])) for i in b"abqz")
    rows = [[a, b, 5], [q, z, 5], *[[a, b, 5]] * (DEPTH - 2)]
    found = _one(batch, compiled(tiny, Grammar.regex("(a|b)[xy]b*")), [-0.1, -3.0, -4.0], rows)
    assert found.token_ids[: found.num_nodes].tolist() == [ROOT, a, b]


def test_the_only_allowed_candidate_costs_nothing(batch, tiny):
    x, y, q = (tiny.token_bytes.index(bytes([i])) for i in b"xyq")
    made = compiled(tiny, Grammar.regex("xyx"))
    found = _one(batch, made, [-0.01, -20.0, -30.0], [[q, x, 5], [q, y, 5], [q, 5, x], *[[q, 5, 6]] * (DEPTH - 3)])
    assert found.token_ids[: found.num_nodes].tolist() == [ROOT, x, y, x]
    assert found.log_probs[: found.num_nodes].tolist() == [0.0] * 4
    # Two of them share as the drafter has them; a third that is no candidate has its part of the rest.
    for pattern, num_others in (("x|y", 0), ("x|y|z", 1)):
        made = compiled(tiny, Grammar.regex(pattern))
        found = _one(batch, made, np.log([0.5, 0.3, 0.1]), [[q, x, y], *[[q, 5, 6]] * (DEPTH - 1)])
        mass = 0.4 + 0.1 * num_others / TINY_SIZE
        np.testing.assert_allclose(np.exp(found.log_probs[1:3]), [0.3 / mass, 0.1 / mass], rtol=1e-6)


def test_a_stop_token_ends_its_prefix(batch, tiny):
    a = tiny.token_bytes.index(b"a")
    made = compiled(tiny, Grammar.regex("a*"), (STOP, OTHER_STOP))
    found = _one(batch, made, [-0.1, -0.2, -2.0], [STOP, OTHER_STOP, a])
    is_stop = np.isin(found.token_ids, [STOP, OTHER_STOP])
    assert found.num_nodes == 1 + BUDGET and is_stop.sum() == 10
    assert not is_stop[found.parents[1 : found.num_nodes]].any()


def test_tables_are_padded_to_powers_of_two(batch, tiny):
    made = compiled(tiny, Grammar.regex("(ab|ac)*d"))
    automaton = token_automaton(made)
    for automata in ([automaton], [automaton, None], [None]):
        table = stack_tables(automata, TINY_SIZE)
        for size, least in zip(table.next_state.shape[1:], automaton.next_state.shape, strict=True):
            assert size & (size - 1) == 0 and (size >= least) == (automata[0] is not None)
            assert size < 2 * least
        assert all(array.dtype == jnp.int32 for array in jax.tree.leaves(table))
    assert stack_tables([], TINY_SIZE).class_of.shape == (0, TINY_SIZE)
    with pytest.raises(ValueError, match=f"number 1 is over {TINY_SIZE} tokens"):
        stack_tables([None, automaton], TINY_SIZE + 1)


def test_forced_is_what_the_matcher_says(batch):
    for number, (made, automaton) in enumerate(zip(batch.made, batch.automata, strict=True)):
        if made is None:
            assert (np.asarray(batch.table.forced)[number] == -1).all()
            continue
        seen, todo = {0}, [(0, made.start())]
        while todo:
            place, state = todo.pop()
            assert np.asarray(batch.table.forced)[number, place] == (state.forced_tokens(1) or [-1])[0]
            for token in allowed(made, state.root_row()):
                if (below := automaton.step(place, token)) not in seen:
                    seen.add(below)
                    todo.append((below, state.copy()))
                    todo[-1][1].advance([token])
        assert len(seen) == automaton.num_states


def test_one_program_for_grammars_of_similar_size(tiny):
    chex.clear_trace_counter()
    made = [compiled(tiny, Grammar.regex(pattern)) for pattern in ("(ab|ac)*d", "(xy|xz)*1", "(a|b)c")]
    zeros = np.zeros((2,), np.int32)

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def everything(table, scores, tokens, states):
        tree = build_constrained_tree(scores, tokens, zeros, table, states, budget=5)
        chain = constrained_chain(scores, tokens, zeros, table, states)
        rows = state_rows(table, node_states(tree, table, states, max_depth=3))
        return tree, chain, rows, advance_states(table, states, tree.token_ids, tree.num_nodes)

    shapes = set()
    for number, one in enumerate(made):
        table = stack_tables([token_automaton(one), None], TINY_SIZE)
        shapes.add(token_automaton(one).next_state.shape)
        scores, tokens = random_proposals(one, np.random.default_rng(number), 3, 4, kind="continuous", paired=False)
        everything(table, np.stack([scores] * 2), np.stack([tokens] * 2), zeros)
    assert len(shapes) > 1


GOOD = {
    "log_probs": np.zeros((2, 3, 4), np.float32),
    "token_ids": np.zeros((2, 3, 4), np.int32),
    "root_token_ids": np.zeros((2,), np.int32),
    "root_states": np.zeros((2,), np.int32),
}


@pytest.mark.parametrize(
    "name, value",
    [
        ("log_probs", np.zeros((2, 3, 5), np.float32)), ("log_probs", np.zeros((2, 3, 4), np.int32)),
        ("log_probs", np.zeros((2, 3, 4, 5), np.float32)), ("log_probs", np.zeros((2, 3), np.float32)),
        ("token_ids", np.zeros((2, 4, 4), np.int32)), ("token_ids", np.zeros((2, 3, 4), np.float32)),
        ("root_token_ids", np.zeros((3,), np.int32)), ("root_states", np.zeros((2, 1), np.int32)),
        ("root_states", np.zeros((2,), np.float32)), ("table", 3),
    ],
)  # fmt: skip
def test_wrong_array_is_named_at_trace_time(name, value):
    table = stack_tables([None] * (value if name == "table" else 2), 50)
    arguments = {**GOOD, **({} if name == "table" else {name: value})}
    word = {"log_probs": "token_ids|log_probs", "table": r"table\.class_of"}.get(name, name)
    for make in (functools.partial(build_constrained_tree, budget=3), constrained_chain):
        with pytest.raises(AssertionError, match=f"({word}) must be"):
            jax.eval_shape(make, table=table, **arguments)


@pytest.mark.parametrize("field", ["class_of", "next_state", "allowed", "forced", "stopped"])
def test_a_wrong_table_is_named_at_trace_time(field):
    table = stack_tables([None] * 2, 50)
    wrong = dataclasses.replace(table, **{field: getattr(table, field)[:, None]})
    tree = build_constrained_tree(**GOOD, table=table, budget=0)
    for call in (
        lambda: build_constrained_tree(**GOOD, table=wrong, budget=3),
        lambda: constrained_chain(**GOOD, table=wrong),
        lambda: node_states(tree, wrong, GOOD["root_states"]),
        lambda: state_rows(wrong, GOOD["root_states"][:, None]),
        lambda: advance_states(wrong, GOOD["root_states"], GOOD["root_states"][:, None], GOOD["root_states"]),
    ):
        with pytest.raises(AssertionError, match=r"table\.\w+ must be"):
            call()


def test_wrong_static_arguments():
    table = stack_tables([None] * 2, 50)
    with pytest.raises(ValueError, match="budget"):
        build_constrained_tree(**GOOD, table=table, budget=-1)
    with pytest.raises(ValueError, match="budget"):
        build_constrained_tree(**GOOD, table=table, budget=2**30)
    with pytest.raises(ValueError, match="max_depth"):
        tree = build_constrained_tree(**GOOD, table=table, budget=0)
        node_states(tree, table, GOOD["root_states"], max_depth=-1)

"""Decoding draws from exactly the target's distribution: by enumeration, and by large samples of the real
round.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
import toy_model
import tree_cases
from toy_model import Toy

from ddtree_jax import sampling
from ddtree_jax.tree import accept, build_tree, speculative_round

ALPHA = 1e-6
SAMPLES = 40_000
LENGTH = 4
# A drafter that is right about half of the time: paths of every length occur.
TOY = Toy(vocab=4, contexts=37, depth=3, scale=1.0, drafter_noise=1.0, seed=5)
PROMPT = [1, 2]
FILTERS = {
    "plain": ("sample", dict(temperature=1.0)),
    "cool": ("sample", dict(temperature=0.6)),
    "filtered": ("filtered", dict(temperature=1.3, top_k=3, top_p=0.93, min_p=0.05)),
}


def test_law_of_the_walk_by_enumeration():
    """All target choices of all nodes, weighted by their probabilities: the emitted tokens have the law of
    plain sampling, whatever the tree (random, under-full and uniform drafters).
    """
    vocab, budget, length = 3, 5, 4
    assignments = np.asarray(list(itertools.product(range(vocab), repeat=budget + 1)), np.int32)
    walk = jax.jit(accept)
    for kind in ("continuous", "integer", "uniform", "masked", "mostly_masked"):
        for seed in range(2):
            rng = np.random.default_rng(seed)
            target = rng.dirichlet(np.ones(vocab), size=200)

            def conditional(prefix, target=target):
                return target[hash(prefix) % len(target)]

            logits = tree_cases.random_logits(rng, kind, (1, 3, vocab))
            tree = build_tree(logits, np.zeros(1, np.int32), budget=budget)
            tokens, parents = np.asarray(tree.token_ids)[0], np.asarray(tree.parents)[0]
            prefixes = [()]
            for node in range(1, budget + 1):
                prefixes.append((*prefixes[parents[node]], int(tokens[node])) if parents[node] >= 0 else (-1, node))
            # Padding slots choose too; their choices are integrated out like all others.
            weights = np.prod([conditional(p)[assignments[:, n]] for n, p in enumerate(prefixes)], axis=0)
            many = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (len(assignments), *x.shape[1:])), tree)
            path = jax.device_get(walk(many, assignments))
            law = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
            for nodes, n, bonus, weight in zip(path.node_ids, path.length, path.bonus_token_ids, weights, strict=True):
                emitted = (*(int(t) for t in tokens[nodes[1:n]]), int(bonus))[:length]
                for rest in itertools.product(range(vocab), repeat=length - len(emitted)):
                    probability = weight
                    for i in range(len(rest)):
                        probability *= conditional(emitted + rest[:i])[rest[i]]
                    law[emitted + rest] += probability
            plain = laws.autoregressive_law(conditional, vocab, length)
            assert max(abs(law[s] - plain[s]) for s in plain) < 1e-12


@functools.partial(jax.jit, static_argnames=("algorithm", "budget", "mode", "biased"))
def sample_rounds(params, *, algorithm, budget, mode, biased=False):
    """Rounds until every sequence has LENGTH tokens: (tokens int32[B, LENGTH], first acceptance length
    int32[B]).
    """
    batch = params.keys.shape[0]
    max_depth = toy_model.round_depth(TOY, algorithm, budget)
    prompt = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (batch, len(PROMPT)))
    rows = {
        "token": prompt,
        "position": jnp.broadcast_to(jnp.arange(len(PROMPT), dtype=jnp.int32), prompt.shape),
    }
    filled = jnp.full((batch,), len(PROMPT) - 1, jnp.int32)
    cache = toy_model.append(toy_model.empty_cache(batch, 12), rows, filled)
    zeros = jnp.zeros((batch,), jnp.int32)
    # The last prompt token plays the root, so that output index 0 already comes from a round.
    state = toy_model.RoundState(
        cache=cache,
        draft_cache=cache,
        root_token_ids=prompt[:, -1],
        lengths=filled,
        emitted=zeros,
        remaining=zeros + LENGTH,
        finished=zeros > 0,
    )
    tokens, first = jnp.zeros((batch, LENGTH), jnp.int32), None
    rows_index = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def one_round(state, tokens):
        def choose(logits, depths, emitted):
            if biased:
                return biased_choice(state, logits, depths, emitted, params)
            return sampling.choose_tokens(logits, depths, emitted, params, mode=mode, max_depth=max_depth)

        fns = toy_model.functions(TOY, algorithm, budget, choose)
        new, out = speculative_round(state, fns, jnp.zeros((0,), jnp.int32), max_depth=max_depth)
        index = jnp.arange(out.token_ids.shape[1], dtype=jnp.int32)[None, :]
        place = jnp.where(index < out.counts[:, None], state.emitted[:, None] + index, LENGTH)
        return new, tokens.at[rows_index, place].set(out.token_ids, mode="drop"), out.acceptance_lengths

    state, tokens, first = one_round(state, tokens)
    state, tokens = jax.lax.while_loop(
        lambda carry: ~jnp.all(carry[0].finished), lambda carry: one_round(*carry)[:2], (state, tokens)
    )
    return tokens, first


def biased_choice(state, logits, depths, emitted, params):
    """The negative control: accept the chain's deterministic token with min(1, p/q), else draw from the
    residual.
    """
    p = jax.nn.softmax(logits, axis=-1)
    draft_logits = toy_model.draft(TOY, state.draft_cache, state.root_token_ids, state.lengths)
    q = jax.nn.softmax(draft_logits, axis=-1)
    q = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)  # no child below the last node
    child = jnp.argmax(q, axis=-1)[..., None]
    ratio = jnp.take_along_axis(p, child, -1) / jnp.maximum(jnp.take_along_axis(q, child, -1), 1e-9)
    has_child = (depths < TOY.depth)[..., None]
    residual = jnp.where(has_child, jnp.maximum(p - q, 0.0), p)

    def draw(key, index, weights, ratio):
        uniform_key, choice_key = jax.random.split(jax.random.fold_in(key, index))
        return jax.random.uniform(uniform_key) < ratio[0], jax.random.categorical(choice_key, jnp.log(weights))

    accepted, other = jax.vmap(jax.vmap(draw, in_axes=(None, 0, 0, 0)))(
        params.keys, emitted[:, None] + depths, residual, ratio
    )
    return jnp.where(accepted & has_child[..., 0], child[..., 0], other).astype(jnp.int32)


@functools.cache
def draw_samples(filters: str, algorithm: str, budget: int, biased: bool = False, samples: int = SAMPLES):
    mode, settings = FILTERS[filters]
    one = sampling.SamplingParams.create(1, **settings)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (samples,)), dataclasses.replace(one, keys=None))
    params = dataclasses.replace(params, keys=jax.random.split(jax.random.key(20), samples))
    return jax.device_get(sample_rounds(params, algorithm=algorithm, budget=budget, mode=mode, biased=biased))


def conditional_law(filters: str):
    """Conditional probabilities by float64 filtering in plain numpy."""
    _, settings = FILTERS[filters]

    def conditional(prefix):
        scaled = TOY.logits_after([*PROMPT, *prefix]).astype(np.float64) / settings["temperature"]
        p = np.exp(scaled - scaled.max())
        if "top_k" in settings:
            p = np.where(p >= np.sort(p)[::-1][settings["top_k"] - 1], p, 0)
            order = np.argsort(-p, kind="stable")
            before = (np.cumsum(p[order]) - p[order]) / p.sum()
            p[order] = np.where(before < settings["top_p"], p[order], 0)
            p = np.where(p >= settings["min_p"] * p.max(), p, 0)
        return p / p.sum()

    return functools.cache(conditional)


@pytest.mark.parametrize(
    "filters, algorithm, budget",
    [
        ("plain", "none", 0),
        ("plain", "chain", 0),
        ("plain", "tree", 6),
        ("filtered", "tree", 6),
        ("cool", "tree", 6),
        pytest.param("filtered", "none", 0, marks=pytest.mark.slow),
    ],
)
def test_joint_law_of_the_first_tokens(filters, algorithm, budget):
    tokens, _ = draw_samples(filters, algorithm, budget)
    law = laws.autoregressive_law(conditional_law(filters), TOY.vocab, LENGTH)
    assert laws.chi_square_p_value(laws.histogram(tokens), law) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("filters", list(FILTERS))
@pytest.mark.parametrize("budget", [3, 15])
def test_joint_law_of_the_first_tokens_large(filters, budget):
    tokens, _ = draw_samples(filters, "tree", budget, samples=400_000)
    law = laws.autoregressive_law(conditional_law(filters), TOY.vocab, LENGTH)
    assert laws.chi_square_p_value(laws.histogram(tokens), law) > ALPHA


def test_biased_acceptance_fails_the_same_test():
    """Power: the rule that many implementations ship is caught with the same samples, test and level."""
    tokens, _ = draw_samples("plain", "chain", 0, biased=True)
    law = laws.autoregressive_law(conditional_law("plain"), TOY.vocab, LENGTH)
    assert laws.chi_square_p_value(laws.histogram(tokens), law) < ALPHA
    first = laws.autoregressive_law(conditional_law("plain"), TOY.vocab, 1)
    assert laws.chi_square_p_value(laws.histogram(tokens[:, :1]), first) < ALPHA


def first_tree():
    """(prefixes of the first round's tree as token tuples) by the same drafter."""
    cache = toy_model.append(
        toy_model.empty_cache(1, 12),
        {"token": jnp.asarray([PROMPT[:-1]], jnp.int32), "position": jnp.zeros((1, 1), jnp.int32)},
        jnp.ones((1,), jnp.int32),
    )
    root, lengths = jnp.asarray([PROMPT[-1]], jnp.int32), jnp.ones((1,), jnp.int32)
    tree = build_tree(toy_model.draft(TOY, cache, root, lengths), root, budget=6)
    prefixes = [()]
    for node in range(1, int(tree.num_nodes[0])):
        prefixes.append((*prefixes[int(tree.parents[0, node])], int(tree.token_ids[0, node])))
    return set(prefixes)


def acceptance_length(sequence, prefixes) -> int:
    depth = 0
    while depth < len(sequence) and sequence[: depth + 1] in prefixes:
        depth += 1
    return depth + 1


def test_law_of_the_accepted_length():
    """P(length > d) is the target's mass on the tree's depth-d nodes."""
    _, lengths = draw_samples("plain", "tree", 6)
    prefixes, conditional = first_tree(), conditional_law("plain")
    mass = [0.0] * (TOY.depth + 2)
    for prefix in prefixes:
        mass[len(prefix)] += np.prod([conditional(prefix[:i])[t] for i, t in enumerate(prefix)])
    law = {(d,): mass[d - 1] - mass[d] for d in range(1, TOY.depth + 2)}
    law = {cell: p for cell, p in law.items() if p > 1e-12}
    assert len(law) > 2
    assert laws.chi_square_p_value(laws.histogram(lengths[:, None]), law) > ALPHA


def test_joint_law_across_the_bonus():
    """(length of the first round, its last tokens, the next round's first token): the bonus is where a
    misplaced cache row or feature would show.
    """
    tokens, lengths = draw_samples("plain", "tree", 6)
    prefixes, conditional = first_tree(), conditional_law("plain")

    def cell(sequence, length):
        return (length, *sequence[max(length - 2, 0) : length + 1])

    law: dict = {}
    for sequence, p in laws.autoregressive_law(conditional, TOY.vocab, LENGTH).items():
        key = cell(sequence, acceptance_length(sequence, prefixes))
        law[key] = law.get(key, 0.0) + p
    counts: dict = {}
    for sequence, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        assert length == acceptance_length(tuple(sequence), prefixes)
        key = cell(tuple(sequence), length)
        counts[key] = counts.get(key, 0) + 1
    assert laws.chi_square_p_value(counts, law) > ALPHA

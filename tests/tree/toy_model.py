"""A toy target and drafter without a transformer: logits are a hash of every visible (token, position).

The cache really stores the committed tokens and positions, slot by slot, and a node's logits depend on all of
them and on exactly the tree nodes that its mask row shows. So a wrong commit, mask, position or length
changes the next logits. The hash is an int32 sum: the same bits in any order, width and batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import sampling
from ddtree_jax.tree import (
    RoundFunctions,
    RoundState,
    Verified,
    build_tree,
    chain_tree,
    gather_rows,
    speculative_round,
)

PERIOD = 13


@dataclasses.dataclass(frozen=True)
class Toy:
    """Sizes and seed of a toy pair; hashable."""

    vocab: int = 12
    contexts: int = 211
    depth: int = 6
    seed: int = 0
    scale: float = 2.0
    drafter_noise: float = 0.7

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, 2**20, size=(self.vocab, PERIOD)).astype(np.int32)

    @functools.cached_property
    def table(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 1)
        return (rng.normal(size=(self.contexts, self.vocab)) * self.scale).astype(np.float32)

    @functools.cached_property
    def draft_table(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 2)
        noise = rng.normal(size=self.table.shape) * self.drafter_noise
        return (self.table + noise).astype(np.float32)

    def context_of(self, tokens) -> int:
        """Plain Python: the context number after a sequence of tokens."""
        return int(sum(int(self.hashes[t, i % PERIOD]) for i, t in enumerate(tokens)) % self.contexts)

    def logits_after(self, tokens) -> np.ndarray:
        return self.table[self.context_of(tokens)]

    def hash_rows(self, rows) -> jax.Array:
        return jnp.asarray(self.hashes)[rows["token"], rows["position"] % PERIOD]


def empty_cache(batch: int, capacity: int):
    zeros = jnp.zeros((batch, capacity), jnp.int32)
    # Unwritten slots hold a token that would change every hash if it were read.
    return {"rows": {"token": zeros + 1, "position": zeros + 5}, "lengths": jnp.zeros((batch,), jnp.int32)}


def committed_hash(toy: Toy, cache) -> jax.Array:
    hashes = toy.hash_rows(cache["rows"])
    slots = jnp.arange(hashes.shape[1], dtype=jnp.int32)[None, :]
    return jnp.sum(jnp.where(slots < cache["lengths"][:, None], hashes, 0), axis=1)


def append(cache, rows, counts):
    """Writes the first `counts` of rows [B, R] after each sequence's committed ones."""
    batch = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
    width = rows["token"].shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    capacity = cache["rows"]["token"].shape[1]
    slots = jnp.where(index < counts[:, None], cache["lengths"][:, None] + index, capacity)
    written = jax.tree.map(lambda buffer, new: buffer.at[batch, slots].set(new, mode="drop"), cache["rows"], rows)
    return {"rows": written, "lengths": cache["lengths"] + counts}


def draft(toy: Toy, draft_cache, root_token_ids, lengths):
    """The drafter's table along its own greedy chain."""
    context = committed_hash(toy, draft_cache)
    token, rows = root_token_ids, []
    for d in range(toy.depth):
        context = context + toy.hash_rows({"token": token, "position": lengths + d})
        rows.append(jnp.asarray(toy.draft_table)[context % toy.contexts])
        token = jnp.argmax(rows[-1], axis=-1).astype(jnp.int32)
    return jnp.stack(rows, axis=1)


def verify(toy: Toy, cache, token_ids, positions, mask):
    rows = {"token": token_ids, "position": positions}
    visible = jnp.sum(jnp.where(mask, toy.hash_rows(rows)[:, None, :], 0), axis=-1)
    context = committed_hash(toy, cache)[:, None] + visible
    return Verified(logits=jnp.asarray(toy.table)[context % toy.contexts], rows=rows, features=rows)


def commit(cache, draft_cache, verified, node_ids, counts):
    kept = gather_rows(verified.rows, node_ids, node_axis=1, batch_axis=0)
    features = gather_rows(verified.features, node_ids, node_axis=1, batch_axis=0)
    return append(cache, kept, counts), append(draft_cache, features, counts)


def functions(toy: Toy, algorithm: str, budget: int, choose) -> RoundFunctions:
    """Round functions of "none", "chain" or "tree"."""
    base = RoundFunctions(verify=functools.partial(verify, toy), choose=choose, commit=commit)
    if algorithm == "none":
        return base
    build = chain_tree if algorithm == "chain" else functools.partial(build_tree, budget=budget)
    return dataclasses.replace(base, draft=functools.partial(draft, toy), build=build)


def round_depth(toy: Toy, algorithm: str, budget: int) -> int:
    return {"none": 0, "chain": toy.depth, "tree": min(toy.depth, budget)}[algorithm]


@functools.partial(jax.jit, static_argnames=("toy", "algorithm", "budget", "mode"))
def round_step(state, params, stop_token_ids, *, toy, algorithm, budget, mode):
    max_depth = round_depth(toy, algorithm, budget)

    def choose(logits, depths, emitted):
        return sampling.choose_tokens(logits, depths, emitted, params, mode=mode, max_depth=max_depth)

    fns = functions(toy, algorithm, budget, choose)
    return speculative_round(state, fns, stop_token_ids, max_depth=max_depth)


def prefill(toy: Toy, prompts, params, mode: str, max_new_tokens, stop_token_ids, capacity: int) -> RoundState:
    """Commits the prompts and chooses each sequence's first token (output index 0), on the host."""
    batch, longest = len(prompts), max(len(p) for p in prompts)
    tokens = jnp.asarray([list(p) + [0] * (longest - len(p)) for p in prompts], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), tokens.shape)
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    rows = {"token": tokens, "position": positions}
    logits = jnp.asarray(np.stack([toy.logits_after(p) for p in prompts]))[:, None]
    zeros = jnp.zeros((batch,), jnp.int32)
    first = sampling.choose_tokens(logits, zeros[:, None], zeros, params, mode=mode)[:, 0]
    remaining = jnp.asarray(np.broadcast_to(np.asarray(max_new_tokens), (batch,)) - 1, jnp.int32)
    stopped = jnp.asarray([int(t) in stop_token_ids for t in np.asarray(first)])
    return RoundState(
        cache=append(empty_cache(batch, capacity), rows, lengths),
        draft_cache=append(empty_cache(batch, capacity), rows, lengths),
        root_token_ids=first,
        lengths=lengths,
        emitted=zeros + 1,
        remaining=remaining,
        finished=stopped | (remaining <= 0),
    )


def generate(
    toy: Toy,
    prompts,
    *,
    algorithm: str,
    budget: int = 0,
    max_new_tokens=24,
    params=None,
    mode: str = "greedy",
    stop_token_ids=(),
    capacity: int = 64,
):
    """Runs rounds until all sequences finish: (token lists, acceptance lengths per sequence, final state)."""
    params = sampling.SamplingParams.create(len(prompts)) if params is None else params
    state = prefill(toy, prompts, params, mode, max_new_tokens, stop_token_ids, capacity)
    outputs = [[t] for t in np.asarray(state.root_token_ids).tolist()]
    accepted: list[list[int]] = [[] for _ in prompts]
    stops = jnp.asarray(list(stop_token_ids), jnp.int32)
    while not bool(np.all(state.finished)):
        state, out = round_step(state, params, stops, toy=toy, algorithm=algorithm, budget=budget, mode=mode)
        tokens, counts, lengths = jax.device_get((out.token_ids, out.counts, out.acceptance_lengths))
        for b, count in enumerate(counts.tolist()):
            outputs[b].extend(tokens[b, :count].tolist())
            accepted[b].extend(lengths[b : b + 1][lengths[b : b + 1] > 0].tolist())
    return outputs, accepted, state


def greedy_reference(toy: Toy, prompt, max_new_tokens: int, stop_token_ids=()) -> list[int]:
    """Plain autoregressive greedy decoding, one token at a time."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(np.argmax(toy.logits_after(tokens))))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]

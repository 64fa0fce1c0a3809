"""`generate` and `stream`: checked arguments in, prefill and rounds on the device, text at the edge."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import decoding, grammar_rounds
from ddtree_jax.algorithm import capabilities
from ddtree_jax.debug import debugging
from ddtree_jax.engine import Engine
from ddtree_jax.grammar import CompiledGrammar, Grammar
from ddtree_jax.grammar_rounds import Failure, GrammarRounds, HostRounds, TableRounds
from ddtree_jax.requests import MAX_BATCH, Request, check_request
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.stats import Chunk, Result, RoundTree, Stats
from ddtree_jax.tokenizer import StreamDecoder
from ddtree_jax.tree import RoundState, grammar_rows

OUTPUT_BUCKET = 128


def generate(
    engine: Engine,
    prompt: Any,
    max_new_tokens: int = 128,
    algorithm: Any = "ddtree",
    budget: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    *,
    grammar_implementation: str = "auto",
    debug: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Result | list[Result]:
    """Continues a prompt, or each prompt of a list.

    Greedy output is that of plain autoregressive decoding, token for token in float32, for every algorithm and budget;
    sampled output has exactly the target's distribution, and is the same for every algorithm, alone or in a batch.

    Args:
      engine: from `load`.
      prompt: str, list of token ids, or a list of either (one result a prompt, in order).
      max_new_tokens: new tokens at most, >= 1.
      algorithm: `SpeculativeAlgorithm` or its name in any case: none, dflash (chain), ddtree (tree).
      budget: tree nodes besides the root, 0..1024; read by ddtree alone.
      temperature: 0 is greedy.
      top_k, top_p, min_p: filters of the target's distribution, in this order; None is off.
      seed: an int, or one a prompt.
      stop_token_ids: None for the model's own end tokens; [] for none.
      grammar: a `Grammar` that each output must match, or a list of one a prompt, None for a free one. Tokens that
        break the grammar get no probability, and the rest is as without: greedy output is that of plain decoding under
        the grammar, sampled output has exactly its distribution. Needs stop tokens: they are allowed exactly where the
        text is complete, and "stop" then means that it is.
      grammar_implementation: where the allowed tokens are worked out; the tokens are the same. "table": on the device,
        for small grammars (choices, plain patterns); "host": for any, beside the target's pass; "unfiltered": as host,
        without keeping the drafts from what the grammar forbids, for comparison; "auto": table where there is one.
      debug: check every round's values against the rules of `ddtree_jax.tree.invariants` (slow); also on inside
        `ddtree_jax.debug_checks()`.
      progress: called with a line of text before a program compiles.

    Returns:
      `Result`, or a list of them.

    Raises:
      ValueError: a bad argument, named, before any device work.
      UnsupportedRequestError: the engine or the algorithm cannot do it.
      InvariantError: with `debug`, a round broke a rule; a bug here.
    """
    request = check_request(
        engine,
        prompt,
        max_new_tokens,
        algorithm,
        budget,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        stop_token_ids,
        grammar,
        grammar_implementation,
    )
    results: list[Result] = []
    for group in _groups(request):
        results += _generate_group(engine, request, group, debug or debugging(), progress)
    return results if request.batched else results[0]


def stream(
    engine: Engine,
    prompt: Any,
    max_new_tokens: int = 128,
    algorithm: Any = "ddtree",
    budget: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    *,
    grammar_implementation: str = "auto",
    with_tree: bool = False,
    debug: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Chunk]:
    """As `generate`, but yields a `Chunk` for the first token and then one a round and sequence, as they come.

    Arguments are checked at the call, not at the first `next`. `chunk.index` says which prompt it continues; the chunks
    of a prompt join to its `Result`; its last chunk carries `finish_reason` and `stats`. `with_tree` adds each round's
    tree and accepted path.
    """
    request = check_request(
        engine,
        prompt,
        max_new_tokens,
        algorithm,
        budget,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        stop_token_ids,
        grammar,
        grammar_implementation,
    )
    return _stream_groups(engine, request, with_tree, debug or debugging(), progress)


@dataclasses.dataclass
class _Sequence:
    """Host side of one sequence: what it has emitted, and when its last token came."""

    index: int
    num_prompt_tokens: int
    decoder: StreamDecoder | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    failure: Failure | None = None

    def stats(self, request: Request) -> Stats:
        branching = capabilities(request.algorithm).branching
        return Stats(
            algorithm=request.algorithm.value,
            budget=request.budget if branching else None,
            acceptance_lengths=tuple(self.acceptance_lengths),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.token_ids),
            time_to_first_token_s=self.first_token_s,
            tokens_per_second=len(self.token_ids) / max(self.last_token_s, 1e-9),
        )

    def finish_reason(self, request: Request) -> str:
        if self.failure is not None:
            return self.failure.finish_reason
        return "stop" if self.token_ids[-1] in request.stop_token_ids else "length"

    @property
    def error(self) -> str | None:
        return None if self.failure is None else self.failure.message


def _groups(request: Request) -> list[list[int]]:
    count = len(request.prompts)
    return [list(range(at, min(at + MAX_BATCH, count))) for at in range(0, count, MAX_BATCH)]


@dataclasses.dataclass(frozen=True)
class _Run:
    """One group on the device, up to its first token. `rounds` is None where no sequence has a grammar."""

    plan: decoding.Plan
    weights: decoding.Weights
    state: RoundState
    sampling: SamplingParams
    stop_token_ids: jax.Array
    roots: np.ndarray
    started: float
    rounds: GrammarRounds | None

    def failure(self, row: int) -> Failure | None:
        return None if self.rounds is None else self.rounds.failures.get(row)


def _announce(engine: Engine, progress: Callable[[str], None] | None, what: str, *key: Any) -> None:
    """Says that a program compiles, once for each program of this engine."""
    if progress is not None and (what, *key) not in engine.compiled:
        progress(f"compiling {what} ...")
    engine.compiled.add((what, *key))


def _prefill(
    engine: Engine, request: Request, group: list[int], debug: bool, progress: Callable[[str], None] | None
) -> _Run:
    started = request.started  # of the call: a later group of a long list has waited for the earlier ones
    kind, compiled = _grammar_kind(request, group)
    plan, weights = decoding.make_plan(
        engine, request.algorithm, request.budget, request.mode, debug=debug, grammar=kind
    )
    prompts = [request.prompts[i] for i in group]
    rows = len(group) if len(request.prompts) <= MAX_BATCH else MAX_BATCH  # the last group is padded with inert rows
    prompts += [[0]] * (rows - len(group))
    longest = max(len(p) for p in prompts)
    capacity = decoding.cache_capacity(longest, request.max_new_tokens, plan.draft_depth)
    seeds = [request.seeds[i] for i in group] + [0] * (rows - len(group))
    limits = np.where(np.arange(rows) < len(group), request.max_new_tokens, 0).astype(np.int32)
    sampling = SamplingParams.create(
        rows,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=seeds,
    )
    stop_token_ids = jnp.asarray(request.stop_token_ids, jnp.int32)
    _announce(engine, progress, "prefill", plan.for_prefill(), rows, decoding.chunk_tokens(longest), capacity)
    state = decoding.prefill(plan, weights, prompts, capacity)
    sampled_plan = plan.for_prefill(keep_mode=True)
    prompt = (state.cache, state.draft_cache, state.hidden)
    grammars = [one.start() if one is not None else None for one in compiled] + [None] * (rows - len(group))
    num_words = grammar_rows.num_words(engine.target.config.vocab_size)
    allowed = grammar_rounds.first_rows(grammars, num_words) if any(compiled) else None
    first = decoding.first_token(sampled_plan, weights, *prompt, sampling, stop_token_ids, jnp.asarray(limits), allowed)
    roots = np.array(first.root_token_ids)  # a copy: the state is donated to the next program
    rounds = None
    if kind == "table":
        rounds = TableRounds(plan, grammars, engine.target.config.vocab_size)
    elif kind == "rows":
        rounds = HostRounds(plan, grammars, num_words, filtered=request.grammar_implementation != "unfiltered")
    if rounds is not None:
        first = rounds.begin(first)
    return _Run(plan, weights, first, sampling, stop_token_ids, roots, started, rounds)


def _grammar_kind(request: Request, group: list[int]) -> tuple[str, list[CompiledGrammar | None]]:
    """The kind of a group's rounds (`decoding.GRAMMAR_KINDS`), and the grammar of each of its prompts.

    An algorithm whose row says that it takes no grammar gets no rows: admission has refused the request, and where it
    has not, the round does.
    """
    compiled = [request.grammars[i] for i in group]
    if not any(compiled) or not capabilities(request.algorithm).grammar:
        return "none", compiled
    tables = request.grammar_implementation in ("auto", "table")
    has_tables = tables and all(one is None or one.automaton is not None for one in compiled)
    return "table" if has_tables else "rows", compiled


def _sequences(engine: Engine, request: Request, group: list[int], run: _Run) -> list[_Sequence]:
    now = time.perf_counter() - run.started
    out = []
    for row, index in enumerate(group):
        decoder = None if engine.tokenizer is None else StreamDecoder(engine.tokenizer)
        sequence = _Sequence(index, len(request.prompts[index]), decoder, first_token_s=now, last_token_s=now)
        sequence.token_ids.append(int(run.roots[row]))
        sequence.failure = run.failure(row)
        out.append(sequence)
    return out


def _generate_group(
    engine: Engine, request: Request, group: list[int], debug: bool, progress: Callable[[str], None] | None
) -> list[Result]:
    if debug:  # the checks of a device loop would report only at its end: the rounds run one by one
        return _collect(engine, request, _stream_group(engine, request, group, False, True, progress), group)
    run = _prefill(engine, request, group, debug, progress)
    sequences = _sequences(engine, request, group, run)
    if isinstance(run.rounds, HostRounds):
        return _collect(engine, request, _rounds(engine, request, run, sequences, False, progress), group)
    table = run.rounds.table if isinstance(run.rounds, TableRounds) else None
    capacity = -(-request.max_new_tokens // OUTPUT_BUCKET) * OUTPUT_BUCKET
    slots = run.state.cache.capacity
    _announce(engine, progress, f"the {request.algorithm.value} loop", run.plan, len(run.roots), slots, capacity)
    state, out = decoding.decode_loop(
        run.plan, run.weights, run.state, run.sampling, run.stop_token_ids, capacity, table
    )
    collected = jax.tree.map(np.asarray, out)
    if isinstance(run.rounds, TableRounds):
        run.rounds.finish(state, collected.token_ids, collected.counts)
    elapsed = time.perf_counter() - run.started
    for row, sequence in enumerate(sequences):
        count = int(collected.counts[row])
        lengths = collected.acceptance_lengths[row]
        sequence.token_ids += collected.token_ids[row, :count].tolist()
        sequence.acceptance_lengths += lengths[lengths > 0].tolist()
        sequence.last_token_s = elapsed if count else sequence.first_token_s
        sequence.failure = run.failure(row)
    return [_result(engine, request, sequence) for sequence in sequences]


def _result(engine: Engine, request: Request, sequence: _Sequence) -> Result:
    text = None if engine.tokenizer is None else engine.tokenizer.decode(sequence.token_ids)
    reason, stats = sequence.finish_reason(request), sequence.stats(request)
    return Result(text, sequence.token_ids, reason, stats, sequence.error)


def _collect(engine: Engine, request: Request, chunks: Iterator[Chunk], group: list[int]) -> list[Result]:
    token_ids: dict[int, list[int]] = {i: [] for i in group}
    last: dict[int, Chunk] = {}
    for chunk in chunks:
        token_ids[chunk.index] += chunk.token_ids
        last[chunk.index] = chunk
    decode = (lambda ids: None) if engine.tokenizer is None else engine.tokenizer.decode
    return [
        Result(decode(token_ids[i]), token_ids[i], last[i].finish_reason, last[i].stats, last[i].error) for i in group
    ]


def _stream_groups(
    engine: Engine, request: Request, with_tree: bool, debug: bool, progress: Callable[[str], None] | None
) -> Iterator[Chunk]:
    for group in _groups(request):
        yield from _stream_group(engine, request, group, with_tree, debug, progress)


def _stream_group(
    engine: Engine,
    request: Request,
    group: list[int],
    with_tree: bool,
    debug: bool,
    progress: Callable[[str], None] | None,
) -> Iterator[Chunk]:
    run = _prefill(engine, request, group, debug, progress)
    yield from _rounds(engine, request, run, _sequences(engine, request, group, run), with_tree, progress)


def _rounds(
    engine: Engine,
    request: Request,
    run: _Run,
    sequences: list[_Sequence],
    with_tree: bool,
    progress: Callable[[str], None] | None,
) -> Iterator[Chunk]:
    """The chunks of a group, round by round."""
    state = run.state
    finished = np.asarray(state.finished)[: len(sequences)].copy()
    for row, sequence in enumerate(sequences):
        yield _chunk(request, sequence, sequence.token_ids, bool(finished[row]), None)
    slots = state.cache.capacity
    _announce(engine, progress, f"the {request.algorithm.value} round", run.plan, len(run.roots), slots)
    step = run.rounds
    if step is None:
        step = grammar_rounds.round_runner(run.plan, decoding.run_round, decoding.round_step)
    while not finished.all():
        state, out = step(run.weights, state, run.sampling, run.stop_token_ids)
        counts, tokens, lengths, now_finished = jax.device_get(
            (out.counts, out.token_ids, out.acceptance_lengths, state.finished)
        )
        now = time.perf_counter() - run.started
        trees = jax.device_get((out.tree, out.path)) if with_tree else None
        active = ~finished
        finished = np.asarray(now_finished)[: len(sequences)].copy()
        for row, sequence in enumerate(sequences):
            if not active[row]:
                continue
            new = tokens[row, : counts[row]].tolist()
            sequence.token_ids += new
            if new:
                sequence.acceptance_lengths.append(int(lengths[row]))
                sequence.last_token_s = now
            sequence.failure = run.failure(row)
            tree = None if trees is None else RoundTree(*trees, batch_index=row)
            yield _chunk(request, sequence, new, bool(finished[row]), tree)


def _chunk(
    request: Request, sequence: _Sequence, token_ids: list[int], finished: bool, tree: RoundTree | None
) -> Chunk:
    text = None
    if sequence.decoder is not None:
        text = sequence.decoder.push(token_ids)
        if finished:
            text += sequence.decoder.flush()
    return Chunk(
        text=text,
        token_ids=list(token_ids),
        index=sequence.index,
        finish_reason=sequence.finish_reason(request) if finished else None,
        stats=sequence.stats(request) if finished else None,
        tree=tree,
        error=sequence.error if finished else None,
    )

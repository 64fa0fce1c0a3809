"""Between the protocol's messages and jobs: a GenerateRequest checked and filled in, and events as responses.

Host only. `admit` tokenises text and compiles grammars, which takes up to seconds: call it off the event loop.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from ddtree_jax import Grammar
from ddtree_jax.engine import Engine
from ddtree_jax.errors import shown
from ddtree_jax.requests import Request, check_request
from serving.errors import NotBuiltError
from serving.grammar_guard import GrammarGuard
from serving.jobs import Finished, LoopSettings

MAX_REQUEST_ID_CHARS = 128  # of a client's request_id; it comes back in metadata and messages, which are small
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
# A text with more characters than this for each position of the context is too long without being tokenised.
MAX_CHARS_PER_TOKEN = 256
# Details of a status travel in a header, percent-encoded: with four-byte characters 12 bytes each, of 8 KiB in all.
MAX_DETAILS_CHARS = 400

# The fields whose proto3 zero, or absence, means "the client did not say": what else means the same, and what then
# holds. vLLM's servicer reads them so, and the `smg` gateway writes 0 or 1 where a user gave nothing. A field that is
# `optional` in the protocol is unset where it is absent, and its zero is a value: temperature 0 is greedy decoding.
UNSET_VALUES: Mapping[str, tuple[tuple[float, ...], Any]] = {
    "temperature": ((), 1.0),
    "top_p": ((0.0, 1.0), None),  # None: the filter is off
    "top_k": ((0,), None),
    "min_p": ((0.0,), None),
    "max_tokens": ((), None),  # None: what fits behind the prompt
    "seed": ((), None),  # None: a random one, which the trailing metadata tells
}


def _sampling(name: str, built: Sequence[float]) -> Callable[[pb.GenerateRequest], Any]:
    """A getter: the value of a sampling field, None where it is one of the values that are served."""

    def get(message: pb.GenerateRequest) -> Any:
        value = getattr(message.sampling_params, name)
        return None if value in built else value

    return get


def _present(name: str, *, sampling: bool = False) -> Callable[[pb.GenerateRequest], Any]:
    """A getter: the value of a field where the message has it (of a message field, its kind), else None."""

    def get(message: pb.GenerateRequest) -> Any:
        part = message.sampling_params if sampling else message
        if not part.HasField(name):
            return None
        value = getattr(part, name)
        return value if isinstance(value, (int, float, str)) else type(value).__name__

    return get


def _count(name: str, *, sampling: bool = False) -> Callable[[pb.GenerateRequest], Any]:
    """A getter: how many entries a repeated field has, None for none."""

    def get(message: pb.GenerateRequest) -> Any:
        size = len(getattr(message.sampling_params if sampling else message, name))
        return f"{size} entries" if size else None

    return get


def _rank(message: pb.GenerateRequest) -> int | None:
    return message.data_parallel_rank or None


# What the protocol has and this server has not: field, the value if the client asks for it, what is allowed.
NOT_BUILT: tuple[tuple[str, Callable[[pb.GenerateRequest], Any], str], ...] = (
    ("n", _sampling("n", (0, 1)), "1; send one request for each output"),
    ("logprobs", _present("logprobs", sampling=True), "unset"),
    ("prompt_logprobs", _present("prompt_logprobs", sampling=True), "unset"),
    ("frequency_penalty", _sampling("frequency_penalty", (0.0,)), "0"),
    ("presence_penalty", _sampling("presence_penalty", (0.0,)), "0"),
    ("repetition_penalty", _sampling("repetition_penalty", (0.0, 1.0)), "1"),
    ("min_tokens", _sampling("min_tokens", (0,)), "0"),
    ("logit_bias", _count("logit_bias", sampling=True), "none"),
    ("truncate_prompt_tokens", _present("truncate_prompt_tokens", sampling=True), "unset; shorten the prompt"),
    ("structural_tag", _present("structural_tag", sampling=True), "json_schema, regex, grammar, json_object, choice"),
    ("mm_inputs", _present("mm_inputs"), "text"),
    ("extra_mm_inputs", _count("extra_mm_inputs"), "text"),
    ("media_refs", _present("media_refs"), "text"),
    ("kv_transfer_params", _present("kv_transfer_params"), "unset"),
    ("kv_transfer_params_json", _present("kv_transfer_params_json"), "unset"),
    ("data_parallel_rank", _rank, "0"),
)

# Of the parameters, and whether JSON is compact.
_CONSTRAINTS: Mapping[str, Callable[[pb.SamplingParams, bool], Grammar | None]] = {
    "json_schema": lambda params, compact: Grammar.json_schema(params.json_schema, compact=compact),
    "regex": lambda params, _: Grammar.regex(params.regex),
    "grammar": lambda params, _: _lark(params.grammar),
    "json_object": lambda params, compact: (
        Grammar.json_schema({"type": "object"}, compact=compact) if params.json_object else None
    ),
    "choice": lambda params, _: Grammar.choices(list(params.choice.choices)),
}

# Kinds of constraint whose text is the client's own, as `GrammarGuard.check` takes them.
_TEXTS: Mapping[str, Callable[[pb.SamplingParams], tuple[str, str | list[str]]]] = {
    "json_schema": lambda params: ("json_schema", params.json_schema),
    "regex": lambda params: ("regex", params.regex),
    "grammar": lambda params: ("lark", params.grammar),
    "choice": lambda params: ("choices", list(params.choice.choices)),
}


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A request that may be queued.

    named_stops: stop tokens that the client named itself. Only these count as matched: that a model's own end token
      came is no news to a client.
    """

    request: Request
    stop_strings: tuple[str, ...]
    named_stops: frozenset[int]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompts[0])


def admit(
    engine: Engine, settings: LoopSettings, message: pb.GenerateRequest, guard: GrammarGuard | None = None
) -> Admitted:
    """Everything that a client can send wrong, checked before it costs device work.

    Fields about text (original_text, skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output)
    have no say here: the responses are token ids, and whoever decodes them reads these. grammar_from_first_token is
    what this server always does.

    Args:
      engine: the engine or its outline; only config and tokenizer are read.
      guard: tries grammars out before they are compiled here.

    Raises:
      NotBuiltError: the protocol has it, this server does not.
      ValueError, UnsupportedRequestError: as `ddtree_jax.requests.check_request`, in the protocol's field names.
    """
    for name, get, allowed in NOT_BUILT:
        if (value := get(message)) is not None:
            raise NotBuiltError(f"{name}: got {shown(value, 80)}, allowed is {allowed}; this server does not have it")
    params = message.sampling_params
    stop_strings = _stop_strings(engine, params)
    stops = _stop_token_ids(engine, params)
    asked = {name: _asked(params, name) for name in UNSET_VALUES}
    prompt = _prompt(engine, settings, message)
    request = check_request(
        engine,
        prompt,
        _max_tokens(settings, len(prompt), asked["max_tokens"]),
        settings.algorithm,
        settings.budget,
        asked["temperature"],
        asked["top_k"],
        asked["top_p"],
        asked["min_p"],
        secrets.randbits(63) if asked["seed"] is None else asked["seed"],
        stops,
        _grammar(params, stops, settings.compact_json, guard),
    )
    return Admitted(request, stop_strings, frozenset(params.stop_token_ids))


def _asked(params: pb.SamplingParams, name: str) -> Any:
    unset, default = UNSET_VALUES[name]
    if params.DESCRIPTOR.fields_by_name[name].has_presence and not params.HasField(name):
        return default
    value = getattr(params, name)
    return default if value in unset else value


def _prompt(engine: Engine, settings: LoopSettings, message: pb.GenerateRequest) -> list[int]:
    """The token ids, not yet checked against the vocabulary, and at least one position short of the context."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise ValueError("input: got none, allowed is tokenized or text")
    longest = settings.context_length - 1
    if kind == "tokenized":
        # Counted before they become Python objects: a message may hold many millions.
        ids = message.tokenized.input_ids
        if len(ids) > longest:
            raise ValueError(_too_long(f"{len(ids)} tokens", longest))
        return list(ids)
    if engine.tokenizer is None:
        raise ValueError(f"text: got one, but {engine.name} has no tokenizer; allowed is tokenized")
    if len(message.text) > settings.context_length * MAX_CHARS_PER_TOKEN:
        raise ValueError(_too_long(f"{len(message.text)} characters", longest))
    ids = engine.tokenizer.encode(message.text)
    if len(ids) > longest:
        raise ValueError(_too_long(f"{len(ids)} tokens", longest))
    return ids


def _too_long(size: str, longest: int) -> str:
    return f"prompt: got {size}, allowed are {longest} tokens (the context less one for the output); shorten it"


def _max_tokens(settings: LoopSettings, num_prompt: int, asked: int | None) -> int:
    room = settings.context_length - num_prompt
    if asked is None:
        return room
    if not 1 <= asked <= room:
        raise ValueError(
            f"max_tokens: got {asked} after a prompt of {num_prompt} tokens, allowed is an integer in [1, {room}] "
            f"(a context of {settings.context_length} tokens), or unset for all of them"
        )
    return asked


def _stop_strings(engine: Engine, params: pb.SamplingParams) -> tuple[str, ...]:
    if not params.stop:
        return ()
    if engine.tokenizer is None:
        raise ValueError(f"stop: got strings, but {engine.name} has no tokenizer; allowed is stop_token_ids")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop: got {len(params.stop)} strings, allowed are {MAX_STOP_STRINGS}")
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise ValueError(
                f"stop: got a string of {len(text)} characters, allowed are 1 to {MAX_STOP_STRING_CHARS} characters"
            )
    return tuple(dict.fromkeys(params.stop))


def _stop_token_ids(engine: Engine, params: pb.SamplingParams) -> tuple[int, ...]:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids: got {len(params.stop_token_ids)} ids, allowed are {MAX_STOP_TOKEN_IDS}")
    own = () if params.ignore_eos else engine.stop_token_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))


def _grammar(
    params: pb.SamplingParams, stops: tuple[int, ...], compact_json: bool, guard: GrammarGuard | None
) -> Grammar | None:
    kind = params.WhichOneof("constraint")
    if guard is not None and kind in _TEXTS:
        guard.check(*_TEXTS[kind](params))
    grammar = None if kind is None else _CONSTRAINTS[kind](params, compact_json)
    if grammar is not None and not stops:
        raise ValueError(
            f"ignore_eos: got true with {kind} and no stop_token_ids, allowed is false or at least one of them: "
            "a text that is complete can only stop"
        )
    return grammar


def _lark(text: str) -> Grammar:
    try:
        return Grammar.lark(text)
    except ValueError as error:
        if "::=" not in text:
            raise
        raise ValueError(
            f"grammar: got rules with '::=', allowed is Lark (name: ...), whose rule start is the whole text; {error}"
        ) from None


def chunk(token_ids: Sequence[int], num_prompt_tokens: int, num_cached_tokens: int) -> pb.GenerateResponse:
    """New tokens. `completion_tokens` counts those of this chunk, as vLLM's servicer does: readers add them up."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=num_prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=num_cached_tokens,
        )
    )


def complete(token_ids: Sequence[int], admitted: Admitted, finished: Finished) -> pb.GenerateResponse:
    """The end, stop or length, with all tokens."""
    stop: dict[str, Any] = {}
    matched = finished.matched_stop
    if isinstance(matched, str):
        stop["matched_stop_str"] = matched
    elif matched in admitted.named_stops:
        stop["matched_token_id"] = matched
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=token_ids,
            finish_reason=finished.finish_reason,
            prompt_tokens=admitted.num_prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=finished.num_cached_tokens,
            spec_accepted_tokens=finished.num_accepted_draft_tokens,
            spec_draft_tokens=finished.num_draft_tokens,
            **stop,
        )
    )


def statistics(admitted: Admitted, finished: Finished) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: what the messages have no field for, each value as JSON.

    `seed` repeats a sampled output.
    """
    stats = finished.stats
    values: dict[str, Any] = {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "num_spec_steps": stats.num_rounds,
        "num_accepted_draft_tokens": finished.num_accepted_draft_tokens,
        "num_draft_tokens": finished.num_draft_tokens,
        "tree_budget": admitted.request.budget,
        "mean_tree_size": finished.mean_tree_size,
        "seed": admitted.request.seeds[0],
    }
    return as_metadata(values)


def as_metadata(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Values as JSON, which is ASCII, as a header must be."""
    return tuple((name, json.dumps(value, separators=(",", ":"))) for name, value in values.items())

"""The requests of the load test: what is asked, as `generate` takes it and as the protocol has it."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from ddtree_jax import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[Grammar, dict[str, Any]]] = {
    "schema": (Grammar.json_schema(SCHEMA), {"json_schema": json.dumps(SCHEMA)}),
    "regex": (Grammar.regex("[a-z_]{3,16} = [0-9]{1,6}"), {"regex": "[a-z_]{3,16} = [0-9]{1,6}"}),
    "choice": (
        Grammar.choices(["import os", "import sys", "from typing import Any"]),
        {"choice": pb.ChoiceConstraint(choices=["import os", "import sys", "from typing import Any"])},
    ),
}
SAMPLING: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": -5},
    {"temperature": 1.3, "min_p": 0.05, "seed": 123456},
]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One request that can be answered. `sampling` has the names of `generate`; `stop` one stop string or None."""

    prompt: str
    max_new_tokens: int
    sampling: dict[str, Any]
    grammar: str | None
    stop: str | None

    def generate_options(self) -> dict[str, Any]:
        grammar = None if self.grammar is None else GRAMMARS[self.grammar][0]
        return {"max_new_tokens": self.max_new_tokens, "grammar": grammar, **self.sampling}

    def message(self, request_id: str, *, stream: bool) -> pb.GenerateRequest:
        params = pb.SamplingParams(
            **({"temperature": 0.0} | self.sampling),
            max_tokens=self.max_new_tokens,
            stop=[] if self.stop is None else [self.stop],
            **({} if self.grammar is None else GRAMMARS[self.grammar][1]),
        )
        return pb.GenerateRequest(request_id=request_id, text=self.prompt, sampling_params=params, stream=stream)


def make_specs(prompts: list[str], count: int, seed: int) -> list[Spec]:
    """Distinct requests of mixed lengths and settings; every third with a grammar, every fifth with a stop string."""
    rng = random.Random(seed)
    specs = []
    for i in range(count):
        prompt = prompts[i % len(prompts)]
        specs.append(
            Spec(
                prompt=prompt[: rng.choice([1, 20, 150, 400, len(prompt)])],
                max_new_tokens=rng.choice([1, 2, 9, 24, 48, 64]),
                sampling=rng.choice(SAMPLING),
                grammar=rng.choice(list(GRAMMARS)) if i % 3 == 0 else None,
                stop=rng.choice(["\n\n", "self", "("]) if i % 5 == 1 else None,
            )
        )
    return specs


# What is refused: how a good request is spoilt, and the name of the status.
INVALID: list[tuple[str, Any, str]] = [
    ("temperature", -1.0, "INVALID_ARGUMENT"),
    ("temperature", float("nan"), "INVALID_ARGUMENT"),
    ("top_p", 1.5, "INVALID_ARGUMENT"),
    ("max_tokens", 0, "INVALID_ARGUMENT"),
    ("max_tokens", 10**6, "INVALID_ARGUMENT"),
    ("regex", "(", "INVALID_ARGUMENT"),
    ("json_schema", '{"type": "nothing"}', "INVALID_ARGUMENT"),
    ("n", 3, "UNIMPLEMENTED"),
    ("logprobs", 1, "UNIMPLEMENTED"),
    ("presence_penalty", 0.5, "UNIMPLEMENTED"),
]

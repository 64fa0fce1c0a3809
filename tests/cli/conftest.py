"""A fake engine under the command line: what is asked of it is recorded, what it answers is chosen."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import Chunk, Result, Stats
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.stats import RoundTree

STATS = Stats(
    algorithm="ddtree",
    budget=32,
    acceptance_lengths=(3,),
    num_prompt_tokens=2,
    num_output_tokens=4,
    time_to_first_token_s=0.5,
    tokens_per_second=8.0,
)
TREE = RoundTree(
    tree=types.SimpleNamespace(
        token_ids=np.array([[1, 2, 3]]),
        parents=np.array([[-1, 0, 0]]),
        depths=np.array([[0, 1, 1]]),
        log_probs=np.array([[0.0, -0.5, -1.0]]),
        num_nodes=np.array([3]),
    ),
    path=types.SimpleNamespace(node_ids=np.array([[0, 2, -1]]), length=np.array([2]), bonus_token_ids=np.array([4])),
)
CHUNKS = (
    Chunk("one ", [1]),
    Chunk("two ☃", [2, 3, 4], finish_reason="length", stats=STATS, tree=TREE),
)


@dataclasses.dataclass
class FakeLibrary:
    """Stands in for load, stream and generate.

    Attributes:
      loads, streams: arguments of each call.
      chunks: what `stream` yields; an exception among them is raised in its place.
      outputs: (algorithm name, budget, prompt) -> token ids of `generate`.
    """

    engine: Any = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(
            target=types.SimpleNamespace(dtype=np.dtype("float32")),
            slot_order_layers=(),
            allow_hybrid_unsafe=False,
            name="fake",
            drafter=object(),
            tokenizer=types.SimpleNamespace(token_text=lambda token_id: f"t{token_id}"),
        )
    )
    loads: list[tuple[tuple, dict]] = dataclasses.field(default_factory=list)
    streams: list[tuple[Any, dict]] = dataclasses.field(default_factory=list)
    generated: list[tuple[list[str], dict]] = dataclasses.field(default_factory=list)
    chunks: tuple = CHUNKS
    outputs: Callable[[str, int, str], list[int]] = lambda algorithm, budget, prompt: [1, 2, 3, 4, 5, 6, 7]

    def load(self, *args, **kwargs):
        self.loads.append((args, kwargs))
        if kwargs.get("progress"):
            kwargs["progress"]("loading the weights")
        return self.engine

    def stream(self, engine, prompt, **kwargs):
        assert engine is self.engine
        self.streams.append((prompt, kwargs))
        for chunk in self.chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    def generate(self, engine, prompts, *, algorithm, budget, **kwargs):
        assert engine is self.engine
        member = SpeculativeAlgorithm.parse(algorithm)
        self.generated.append((prompts, {"algorithm": member, "budget": budget, **kwargs}))
        results = []
        for prompt in prompts:
            token_ids = self.outputs(member.value, budget, prompt)
            # acceptance by the last character of the prompt, so that the three averages of the table differ
            length = 1 if member is SpeculativeAlgorithm.NONE else 1 + int(prompt[-1])
            rounds = (length,) * (6 // length)
            stats = dataclasses.replace(STATS, algorithm=member.value, acceptance_lengths=rounds)
            results.append(Result("", token_ids, "length", stats))
        return results


@pytest.fixture
def library(monkeypatch) -> FakeLibrary:
    fake = FakeLibrary()
    # setitem on the module's dict, not setattr: setattr would first read, and so import, the real one
    for name in ("load", "stream", "generate"):
        monkeypatch.setitem(vars(ddtree_jax), name, getattr(fake, name))
    return fake

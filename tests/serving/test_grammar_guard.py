"""Grammars that keep the library's compiler busy for ever: refused, and nobody else waits for them."""

import functools
import json

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from serving import servicer, translate
from serving.grammar_guard import GrammarGuard
from tests.serving.harness import outline, run, serving

# The first complement is small enough for the library, the three together are not.
ENDLESS = r"start: A" "\n" r"A: /[a-z ]*/ & ~/.*(a|b|c).*/ & ~/.*(d.{1,100}e).*/ & ~/.*(f.{1,100}g.{1,100}h).*/"
LARGE = json.dumps({"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(200)]})


@pytest.fixture
def make_guard():
    guards = []

    def make(**limits) -> GrammarGuard:
        guards.append(GrammarGuard(outline().tokenizer, outline().target.config.vocab_size, **limits))
        return guards[-1]

    yield make
    for guard in guards:
        guard.close()


def test_time_and_memory_are_bounded_and_the_next_grammar_is_tried(make_guard) -> None:
    for limits, kind, text in (
        ({"max_seconds": 0.5}, "lark", ENDLESS),
        ({"max_seconds": 30.0, "max_bytes": 600 * 2**20}, "json_schema", LARGE),
    ):
        limit = "600 MiB" if "max_bytes" in limits else "0.5 s"
        guard = make_guard(**limits)
        with pytest.raises(
            ValueError, match=f"^grammar {kind}: takes more than {limit} to compile, allowed is a simpler"
        ):
            guard.check(kind, text)
        guard.check("regex", "a+")


def test_what_else_is_wrong_is_left_to_who_makes_the_grammar(make_guard) -> None:
    guard = make_guard()
    for kind, text in (("regex", "("), ("choices", []), ("json_schema", "{"), ("regex", "a" * 10**7)):
        guard.check(kind, text)


def test_the_server_refuses_it_and_serves_others_meanwhile(monkeypatch) -> None:
    monkeypatch.setattr(servicer, "GrammarGuard", functools.partial(GrammarGuard, max_seconds=1.0))
    prompt = pb.TokenizedInput(input_ids=[5, 6, 7])
    endless = pb.GenerateRequest(tokenized=prompt, sampling_params=pb.SamplingParams(grammar=ENDLESS))

    async def test() -> None:
        async with serving() as up:
            calls = [up.stub.Generate(endless) for _ in range(servicer.ADMISSION_THREADS)]
            assert (await up.collect(pb.GenerateRequest(tokenized=prompt)))[-1].complete.finish_reason == "length"
            assert not any(call.done() for call in calls)
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details().startswith("grammar lark: takes more than 1 s")
            fine = pb.GenerateRequest(tokenized=prompt, sampling_params=pb.SamplingParams(regex="a+"))
            assert await up.collect(fine)
            assert up.loop.seen.qsize() == 2

    run(test())


def test_every_kind_with_a_text_of_the_client_is_tried() -> None:
    fields = [field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields]
    unbuilt = {name for name, _, _ in translate.NOT_BUILT}
    assert set(translate._TEXTS) == set(fields) - unbuilt - {"json_object"}

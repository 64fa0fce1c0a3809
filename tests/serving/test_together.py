"""RPCs, device thread and device together, on the small pair."""

import asyncio
import contextlib
import logging

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

import ddtree_jax
from ddtree_jax import Grammar
from ddtree_jax import slots as device
from tests.serving.harness import run, serving

PROMPT = list(range(10, 30))


@pytest.fixture
def up(make_loop):
    """Makes the server; the device thread is compiled before the clock of a test starts."""
    loop = make_loop()

    @contextlib.asynccontextmanager
    async def make():
        async with serving(engine=loop.engine, loop_settings=loop.settings, loop=loop.thread) as running:
            yield running

    return make


def ask(request_id="a", prompt=PROMPT, *, stream=True, **params):
    params = {"temperature": 0.0, "max_tokens": 20} | params
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def idle(running):
    while running.loop.load().running:
        await asyncio.sleep(0.01)


def test_answers_are_those_of_generate(up, text_engine):
    pattern = "[a-d]{2,6}-[0-9]{3,9}"
    asked = [
        ({}, {}),
        ({"stream": False, "ignore_eos": True}, {"stop_token_ids": []}),
        ({"temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": -4}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9}),
        ({"temperature": 1.0, "seed": 3}, {"temperature": 1.0}),
        (
            {"regex": pattern, "ignore_eos": True, "stop_token_ids": [0]},
            {"grammar": Grammar.regex(pattern), "stop_token_ids": [0]},
        ),
    ]

    async def test():
        async with up() as running:
            messages = [ask(str(i), PROMPT[i:], **params) for i, (params, _) in enumerate(asked)]
            return await asyncio.gather(*map(running.collect, messages))

    for i, ((params, options), answers) in enumerate(zip(asked, run(test()), strict=True)):
        seed = params.get("seed", 0)
        host = {"grammar_implementation": "host"} if "grammar" in options else {}
        expected = ddtree_jax.generate(text_engine, PROMPT[i:], 20, "ddtree", 4, seed=seed, **options, **host)
        end = answers[-1].complete
        assert list(end.output_ids) == expected.token_ids
        assert end.finish_reason == expected.finish_reason
        chunks = [token for answer in answers[:-1] for token in answer.chunk.token_ids]
        assert chunks == (expected.token_ids if params.get("stream", True) else [])


def test_a_fault_in_a_round_is_INTERNAL_with_the_id_and_the_next_request_works(up, monkeypatch, caplog):
    real, faults = device.finish_slots, [True]

    def faulty(*args, **kwargs):
        if faults:
            faults.pop()
            raise RuntimeError("a secret of the program")
        return real(*args, **kwargs)

    async def test():
        async with up() as running:
            monkeypatch.setattr(device, "finish_slots", faulty)
            status, details = await running.refusal(ask("hit"))
            assert status is grpc.StatusCode.INTERNAL
            assert "hit" in details and "secret" not in details
            assert (await running.collect(ask("next")))[-1].complete.completion_tokens == 20
            assert running.loop.load().running == 0

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "a secret of the program" in caplog.text


def test_a_client_that_vanishes_frees_its_slot(up):
    async def test():
        async with up() as running:
            call = running.stub.Generate(ask(max_tokens=130, ignore_eos=True))
            await call.read()
            call.cancel()
            await idle(running)
            assert (await running.collect(ask()))[-1].complete.completion_tokens == 20

    run(test())


def test_a_reader_that_does_not_read_stalls_nobody(up):
    async def test():
        async with up() as running:
            slow = running.stub.Generate(ask("slow", max_tokens=130, ignore_eos=True))
            responses = [await slow.read()]
            for i in range(5):
                assert (await running.collect(ask(str(i))))[-1].complete.completion_tokens == 20
            await idle(running)
            while (response := await slow.read()) is not grpc.aio.EOF:
                responses.append(response)
            tokens = [token for response in responses for token in response.chunk.token_ids]
            assert tokens == list(responses[-1].complete.output_ids) and len(tokens) == 130

    run(test())

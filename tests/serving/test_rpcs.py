"""Each RPC, in front of a loop without a device."""

import asyncio
import dataclasses
import hashlib
import io
import json
import logging
import time
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ddtree_jax.errors import InvariantError, UnsupportedRequestError
from serving import errors, translate
from serving.jobs import Failed
from tests.serving.harness import CONTEXT, outline, run, serving, settings


def ask(request_id: str = "a", *, stream: bool = True, **params) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
        stream=stream,
        sampling_params=pb.SamplingParams(**params),
    )


class TestGenerate:
    def test_chunks_join_to_the_complete_message(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                responses = aiter(up.stub.Generate(ask(max_tokens=9)))
                assert await up.loop.next_seen() == "a"
                up.loop.emit("a", 11)
                first = (await anext(responses)).chunk
                up.loop.emit("a", 12, 13)
                up.loop.emit("a", 14)
                up.loop.finish("a")
                *chunks, last = [response async for response in responses]
                tokens = [*first.token_ids, *(token for c in chunks for token in c.chunk.token_ids)]
                assert tokens == list(last.complete.output_ids) == [11, 12, 13, 14]
                assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (3, 1, 1)
                assert all(c.chunk.completion_tokens == len(c.chunk.token_ids) > 0 for c in chunks)
                complete = last.complete
                assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 4)
                assert (complete.cached_tokens, complete.spec_accepted_tokens, complete.spec_draft_tokens) == (1, 2, 16)
                assert complete.WhichOneof("matched_stop") is None

        run(test())

    def test_without_a_stream_there_is_only_the_complete_message(self) -> None:
        async def test() -> None:
            async with serving() as up:
                (only,) = await up.collect(ask(stream=False, max_tokens=7))
                assert list(only.complete.output_ids) == [5, 6, 7, 5, 6, 7, 5]

        run(test())

    def test_trailing_metadata(self) -> None:
        async def test() -> None:
            async with serving() as up:
                call = up.stub.Generate(ask(seed=7, max_tokens=4))
                assert dict(await call.initial_metadata())["request_id"] == '"a"'
                assert [response async for response in call]
                values = {name: json.loads(value) for name, value in await call.trailing_metadata()}
                assert values == {
                    "mean_acceptance_length": 2.0,
                    "acceptance_histogram": {"1": 1, "3": 1},
                    "num_spec_steps": 2,
                    "num_accepted_draft_tokens": 2,
                    "num_draft_tokens": 16,
                    "tree_budget": 8,
                    "mean_tree_size": 9.0,
                    "seed": 7,
                }

        run(test())

    @pytest.mark.parametrize(
        ("changes", "reason", "matched"),
        [
            ({"finish_reason": "stop", "matched_stop": 7}, "stop", {"matched_token_id": 7}),
            ({"finish_reason": "stop", "matched_stop": "é\n"}, "stop", {"matched_stop_str": "é\n"}),
            ({"finish_reason": "stop", "matched_stop": 0}, "stop", {}),  # the model's own end token
        ],
        ids=["token", "string", "end of text"],
    )
    def test_finish_reasons(self, changes: dict, reason: str, matched: dict) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask(stop_token_ids=[7], stop=["é\n"]))
                job = up.loop.jobs[await up.loop.next_seen()]
                assert job.stop_strings == ("é\n",) and job.request.stop_token_ids == (0, 7)
                up.loop.emit("a", 11, 7)
                up.loop.finish("a", **changes)
                complete = [response async for response in call][-1].complete
                assert complete.finish_reason == reason
                stops = {field.name: value for field, value in complete.ListFields() if "matched" in field.name}
                assert stops == matched

        run(test())

    @pytest.mark.parametrize("reason", ["dead_end", "error"])
    def test_a_grammar_that_cannot_be_followed_ends_with_a_status_after_its_tokens(self, reason: str) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                up.loop.emit("a", 11, 7)
                assert list((await call.read()).chunk.token_ids) == [11, 7]
                up.loop.finish("a", finish_reason=reason, error="grammar: no way\non")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details() == "grammar: no way on"

        run(test())

    def test_many_at_a_time_each_get_their_own(self) -> None:
        async def one(up, i: int) -> None:
            prompt = [i + 1, i + 2, i + 3]
            message = pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=prompt),
                stream=i % 2 == 0,
                sampling_params=pb.SamplingParams(max_tokens=20),
            )
            responses = await up.collect(message)
            assert list(responses[-1].complete.output_ids) == [prompt[k % 3] for k in range(20)]

        async def test() -> None:
            async with serving(loop_settings=settings(max_queued_requests=100)) as up:
                await asyncio.gather(*(one(up, i) for i in range(40)))
                assert (
                    not up.loop.jobs and (await up.stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0
                )

        run(test())

    def test_an_empty_id_is_made_up(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                calls = [up.stub.Generate(ask("")) for _ in range(2)]
                ids = [await up.loop.next_seen() for _ in calls]
                told = {json.loads(dict(await call.initial_metadata())["request_id"]) for call in calls}
                assert told == set(ids) and len(told) == 2 and "" not in told
                await up.stub.Abort(pb.AbortRequest(request_ids=ids))
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call.read()
                    assert caught.value.code() is grpc.StatusCode.CANCELLED

        run(test())

    def test_an_id_in_use_is_refused_and_the_first_goes_on(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                status, details = await up.refusal(ask())
                assert status is grpc.StatusCode.INVALID_ARGUMENT
                assert details.startswith("request_id: got 'a', which is in use")
                up.loop.finish("a")
                assert [response async for response in call][-1].complete.finish_reason == "length"
                again = up.stub.Generate(ask())
                assert await up.loop.next_seen() == "a"
                up.loop.finish("a")
                assert [response async for response in again]

        run(test())

    def test_a_full_queue(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                calls = [up.stub.Generate(ask(str(i))) for i in range(8)]
                for _ in calls:
                    await up.loop.next_seen()
                status, details = await up.refusal(ask("one more"))
                assert status is grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith("queue: got 4")
                assert [record.outcome for record in up.records.requests] == ["RESOURCE_EXHAUSTED"]
                for i, call in enumerate(calls):
                    up.loop.finish(str(i))
                    assert [response async for response in call]

        run(test())

    @pytest.mark.parametrize(
        ("error", "status", "part"),
        [
            (errors.CancelledError("the client asked"), grpc.StatusCode.CANCELLED, "the client asked"),
            (errors.DeadlineError("deadline: passed"), grpc.StatusCode.DEADLINE_EXCEEDED, "deadline: passed"),
            (errors.NotReadyError("draining"), grpc.StatusCode.UNAVAILABLE, "draining"),
            (errors.QueueFullError("queue: full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: full"),
            (errors.NotBuiltError("lora: none"), grpc.StatusCode.UNIMPLEMENTED, "lora: none"),
            (UnsupportedRequestError("algorithm X"), grpc.StatusCode.INVALID_ARGUMENT, "algorithm X"),
            (ValueError("prompt:\nbad"), grpc.StatusCode.INVALID_ARGUMENT, "prompt: bad"),
            (errors.InternalError("request a: boom"), grpc.StatusCode.INTERNAL, "request a: internal error"),
            (InvariantError("secret of the program"), grpc.StatusCode.INTERNAL, "request a: internal error"),
            (KeyError("secret of the program"), grpc.StatusCode.INTERNAL, "request a: internal error"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_the_status_of_each_failure(self, error, status, part, caplog: pytest.LogCaptureFixture) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                up.loop.emit("a", 11)
                assert list((await call.read()).chunk.token_ids) == [11]
                up.loop.end("a", Failed(error))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is status and part in caught.value.details()
                assert "Traceback" not in caught.value.details() and "secret" not in caught.value.details()
                assert dict(caught.value.trailing_metadata())["request_id"] == '"a"'
                assert not up.records.requests, "the loop reports what it was given"

        with caplog.at_level(logging.ERROR):
            run(test())
        logged = isinstance(error, (InvariantError, KeyError))
        assert ("request a: unexpected" in caplog.text and "secret" in caplog.text) is logged

    def test_a_fault_in_the_checks(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        def broken(*_) -> None:
            raise RuntimeError("secret of the program")

        async def test() -> None:
            async with serving() as up:
                with monkeypatch.context() as patch:
                    patch.setattr("serving.translate.admit", broken)
                    status, details = await up.refusal(ask())
                assert status is grpc.StatusCode.INTERNAL
                assert details == "request a: internal error; the server's log has more under this id"
                assert [record.outcome for record in up.records.requests] == ["INTERNAL"]
                assert await up.collect(ask())

        run(test())
        assert "RuntimeError: secret of the program" in caplog.text

    def test_details_fit_into_a_header(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                name = "\N{DEVANAGARI LETTER KA}\N{GRINNING FACE}" * 64
                call = up.stub.Generate(ask(name))
                await up.loop.next_seen()
                up.loop.end(name, Failed(ValueError("\N{GRINNING FACE}" * 10_000)))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert json.loads(dict(caught.value.trailing_metadata())["request_id"]) == name

        run(test())


class TestEnds:
    def test_a_client_that_goes_frees_its_slot(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                up.loop.emit("a", 11)
                await call.read()
                call.cancel()
                assert await up.loop.next_aborted() == "a"
                await up.loop.settled()
                assert not up.loop.jobs
                assert up.loop.aborted.empty()

        run(test())

    def test_an_id_stays_in_use_until_the_loop_is_done_with_it(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                held = up.loop.abort
                up.loop.abort = up.loop.aborted.put  # a loop inside a long round
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                call.cancel()
                await up.loop.next_aborted()
                assert (await up.refusal(ask()))[0] is grpc.StatusCode.INVALID_ARGUMENT
                up.loop.abort = held
                up.loop.abort("a")
                await up.loop.settled()
                again = up.stub.Generate(ask())
                assert await up.loop.next_seen() == "a"
                up.loop.finish("a")
                assert [response async for response in again]

        run(test())

    def test_abort_twice_and_of_unknown_ids(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                both = pb.AbortRequest(request_ids=["a", "never heard of", "a", ""])
                assert await up.stub.Abort(both) == await up.stub.Abort(both) == pb.AbortResponse()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.CANCELLED
                assert await up.stub.Abort(both) == pb.AbortResponse()
                assert await up.stub.Abort(pb.AbortRequest()) == pb.AbortResponse()

        run(test())

    def test_abort_while_the_request_is_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def test() -> None:
            checking, go_on = asyncio.Event(), asyncio.Event()
            loop, admit = asyncio.get_running_loop(), translate.admit

            def slow(*args):
                loop.call_soon_threadsafe(checking.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
                return admit(*args)

            async with serving() as up:
                monkeypatch.setattr(translate, "admit", slow)
                call = up.stub.Generate(ask())
                reading = asyncio.ensure_future(call.read())
                await checking.wait()
                await up.stub.Abort(pb.AbortRequest(request_ids=["a"]))
                go_on.set()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await reading
                assert caught.value.code() is grpc.StatusCode.CANCELLED
                assert up.loop.seen.empty(), "an aborted request reached the loop"
                monkeypatch.setattr(translate, "admit", admit)
                assert await up.collect(ask())

        run(test())

    def test_too_many_in_the_checks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def test() -> None:
            go_on, loop, admit = asyncio.Event(), asyncio.get_running_loop(), translate.admit

            def slow(*args):
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
                return admit(*args)

            async with serving() as up:
                monkeypatch.setattr(translate, "admit", slow)
                reads = [asyncio.ensure_future(up.collect(ask(str(i), max_tokens=1))) for i in range(9)]
                done, others = await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
                (refused,) = done
                assert refused.exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                go_on.set()
                assert all([responses[-1].complete for responses in await asyncio.gather(*others)])

        run(test())

    def test_deadlines(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                before = time.monotonic()
                limited, free = up.stub.Generate(ask(), timeout=1000.0), up.stub.Generate(ask("b"))
                jobs = [up.loop.jobs[await up.loop.next_seen()] for _ in range(2)]
                deadlines = {job.request_id: job.deadline for job in jobs}
                assert 900 < deadlines["a"] - before < 1100 and deadlines["b"] is None
                limited.cancel()
                free.cancel()
                assert {await up.loop.next_aborted(), await up.loop.next_aborted()} == {"a", "b"}
                for seconds in (0.1, 1.0, 10.0):  # the shortest that leaves time to arrive
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await up.collect(ask("c"), timeout=seconds)
                    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    if not up.loop.seen.empty():
                        break
                assert {(await up.loop.next_ended())[0] for _ in "ab"} == {"a", "b"}
                name, end = await up.loop.next_ended()
                assert name == "c" and isinstance(end.error, errors.DeadlineError) and up.loop.aborted.empty()

        run(test())

    def test_at_its_deadline_a_job_is_left_to_the_loop(self) -> None:
        """gRPC ends the RPC by itself: an abort would make it one whose client has gone."""

        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask(), timeout=1.0)
                name = await up.loop.next_seen()
                job = up.loop.jobs[name]
                up.loop.jobs[name] = dataclasses.replace(job, deadline=None)  # a loop inside a long round
                up.loop.emit(name, 11)  # wakes a loop that waits for the deadline
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    [response async for response in call]
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                while (await up.stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests:
                    pass
                assert up.loop.aborted.empty()
                up.loop.end(name, Failed(errors.DeadlineError("deadline: passed")))

        run(test())

    def test_a_slow_reader_stalls_nobody(self) -> None:
        rounds, width = 600, 2048  # about 2.4 MB, far more than a stream may have under way

        async def test() -> None:
            async with serving(manual=True) as up:
                slow = up.stub.Generate(ask())
                await up.loop.next_seen()
                for _ in range(rounds):
                    up.loop.emit("a", *range(width))
                await up.loop.settled()
                fast = up.stub.Generate(ask("b"))
                await up.loop.next_seen()
                up.loop.emit("b", 1, 2)
                up.loop.finish("b")
                assert list([r async for r in fast][-1].complete.output_ids) == [1, 2]
                up.loop.finish("a")
                await up.loop.settled()
                *chunks, last = [response async for response in slow]
                assert len(chunks) < rounds // 4, "what waited was not merged"
                tokens = [token for c in chunks for token in c.chunk.token_ids]
                assert tokens == list(last.complete.output_ids) == list(range(width)) * rounds

        run(test())


class TestAbout:
    def test_model(self) -> None:
        async def test() -> None:
            async with serving() as up:
                info = await up.stub.GetModelInfo(pb.GetModelInfoRequest())
                folder = str(outline().target.folder)
                assert (info.model_path, info.tokenizer_path, info.served_model_name) == (folder, folder, "demo")
                assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (
                    CONTEXT,
                    CONTEXT - 1,
                    2048,
                )
                assert info.is_generation and not info.supports_vision
                assert (info.model_type, list(info.architectures)) == ("glm_moe_dsa", ["GlmMoeDsaForCausalLM"])
                assert list(info.eos_token_ids) == [0] and info.default_sampling_params_json == ""

        run(test())

    def test_server_and_health(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                health = await up.stub.HealthCheck(pb.HealthCheckRequest())
                assert health.healthy and health.message == "ready"
                before = await up.stub.GetServerInfo(pb.GetServerInfoRequest())
                assert (before.active_requests, before.last_receive_timestamp) == (0, 0.0)
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                info = await up.stub.GetServerInfo(pb.GetServerInfoRequest())
                assert info.active_requests == 1 and info.last_receive_timestamp > 0 and not info.is_paused
                assert (info.max_num_seqs, info.data_parallel_size, info.model_dtype) == (4, 1, "float32")
                assert info.uptime_seconds > before.uptime_seconds
                call.cancel()

        run(test())

    def test_loads(self) -> None:
        async def test() -> None:
            async with serving() as up:
                answer = await up.stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
                (load,) = answer.loads
                assert answer.dp_rank_count == 1 and answer.version and answer.timestamp
                assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 3, 3)
                assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (64, 256, 0.25)
                assert (load.gen_throughput, load.cache_hit_rate, load.max_running_requests) == (12.5, 0.25, 4)
                assert load.num_waiting_uncached_tokens == 30

        run(test())

    def test_tokenizer(self) -> None:
        async def test() -> None:
            async with serving() as up:
                for _ in range(2):
                    call = up.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
                    *parts, last = [part async for part in call]
                    content = b"".join(part.data for part in (*parts, last))
                    assert last.sha256 == hashlib.sha256(content).hexdigest()
                    assert all(part.sha256 == "" for part in parts)
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    names = archive.namelist()
                    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(names)
                    assert not any("safetensors" in name for name in names)
                    source = outline().target.folder / "tokenizer.json"
                    assert archive.read("tokenizer.json") == source.read_bytes()

        run(test())

    def test_a_folder_without_a_tokenizer(self, tmp_path) -> None:
        engine = dataclasses.replace(
            outline(), target=dataclasses.replace(outline().target, folder=tmp_path), tokenizer=None
        )

        async def test() -> None:
            async with serving(engine=engine) as up:
                for _ in range(2):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await up.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
                    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                    assert "has no tokenizer.json" in caught.value.details()
                assert (await up.stub.GetModelInfo(pb.GetModelInfoRequest())).tokenizer_path == ""

        run(test())

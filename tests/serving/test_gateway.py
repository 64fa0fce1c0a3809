"""The OpenAI HTTP API: the published gateway `smg` in front of server processes with the shipped pair, asked over HTTP.

Every text is compared with plain decoding in this process (`algorithm="none"`), which shares neither the server's
rounds nor its slots.
"""

import functools
import json
import signal
import threading

import jsonschema
import pytest

import ddtree_jax
from ddtree_jax import Grammar
from tests.serving.processes import START_S, WAIT_S, events_of, gateway_process, server_process, wait_for

pytestmark = pytest.mark.timeout(START_S + 300)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = ("--max-running-requests", "1", "--context-length", "96", "--chunked-prefill-size", "32")
CONTEXT = 512
PROMPT = "import os\ndef f("
PROMPTS = [PROMPT, "class Node:\n", "for key, value in "]
LONG_PROMPT = 'A = {"name": "x", "size": 1}\nB = {"name": "y", "size": 2}\nC = '
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
REGEX = "[a-z_]{3,16} = [0-9]{1,6}"


@pytest.fixture(scope="module")
def plain(demo_engine):
    """The result of plain decoding of a prompt, worked out once."""

    @functools.cache
    def decode(prompt, max_new_tokens, **options):
        return ddtree_jax.generate(demo_engine, prompt, max_new_tokens, "none", **options)

    return decode


def messages(prompt):
    """The conversation that the template of the shipped pair makes this prompt of."""
    return [{"role": "user", "content": line} for line in prompt.split("\n")]


def joined(events):
    """Text and finish reason of a stream of either kind."""
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(texts), reason


def ask(gateway, path, prompt, *, stream=False, **body):
    """(text, finish reason, usage) of a request that has to be answered."""
    body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": messages(prompt)}
    if stream:
        *events, last = gateway.stream(path, stream_options={"include_usage": True}, **body)
        assert last["choices"] == []
        return *joined(events), last["usage"]
    status, answer = gateway.ask(path, **body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text, choice["finish_reason"], answer["usage"]


def test_a_server_that_still_loads_is_served_through_the_gateway_once_it_is_ready(plain):
    """The whole way in the smallest configuration; what is registered while it loads keeps its name."""
    with (
        server_process(*SMALL, "--served-model-name", "small", wait=False) as server,
        gateway_process(server.address, model="small", wait=False) as gateway,
    ):
        assert not server.is_healthy() and gateway.num_healthy() == 0
        wait_for(lambda: gateway.num_healthy() == 1, START_S)
        assert [model["id"] for model in gateway.get("/v1/models")[1]["data"]] == ["small"]
        expected = plain(PROMPT, 16)
        for path in (COMPLETIONS, CHAT):
            for stream in (False, True):
                text, reason, usage = ask(gateway, path, PROMPT, stream=stream, max_tokens=16)
                assert (text, reason) == (expected.text, "length"), (path, stream)
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 16)
        status, answer = gateway.ask(COMPLETIONS, prompt=PROMPT, logprobs=1)
        assert status == 501 and "logprobs: got 1" in answer["error"]["message"]


@pytest.fixture(scope="module")
def server():
    with server_process("--max-running-requests", "2", "--context-length", str(CONTEXT)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server):
    with gateway_process(server.address) as gateway:
        yield gateway


@pytest.mark.slow
class TestAnswers:
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_the_text_is_that_of_plain_decoding(self, gateway, plain, path, stream):
        for prompt in PROMPTS:
            expected = plain(prompt, 40)
            text, reason, usage = ask(gateway, path, prompt, stream=stream, max_tokens=40)
            assert (text, reason) == (expected.text, expected.finish_reason)
            counts = expected.stats.num_prompt_tokens, len(expected.token_ids)
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*counts, sum(counts))
            details = usage["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 10 and details["rejected_prediction_tokens"] > 0

    def test_many_at_a_time_each_get_their_own(self, gateway, plain):
        jobs = [(path, prompt, n) for path in (COMPLETIONS, CHAT) for prompt in PROMPTS for n in (9, 40)]
        answers = {}

        def one(job):
            path, prompt, n = job
            answers[job] = ask(gateway, path, prompt, stream=n == 9, max_tokens=n)[0]

        threads = [threading.Thread(target=one, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert answers == {(path, prompt, n): plain(prompt, n).text for path, prompt, n in jobs}

    def test_a_list_of_prompts(self, gateway, plain):
        status, answer = gateway.ask(COMPLETIONS, prompt=PROMPTS, max_tokens=9)
        assert status == 200
        assert {c["index"]: c["text"] for c in answer["choices"]} == {
            i: plain(prompt, 9).text for i, prompt in enumerate(PROMPTS)
        }

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_a_stop_string_cuts_the_text(self, gateway, plain, path, stream):
        expected = plain(PROMPT, 40)
        for stop in ("return", "x\n\n"):
            text, reason, usage = ask(gateway, path, PROMPT, stream=stream, max_tokens=40, stop=["nowhere", stop])
            assert stop in expected.text
            assert (text, reason) == (expected.text[: expected.text.index(stop)], "stop")
            assert usage["completion_tokens"] < 40

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_a_seed_repeats_a_text(self, gateway, plain, path):
        seen = set()
        for seed in (7, -3):
            sampling = {"temperature": 0.8, "top_p": 0.9, "seed": seed}
            expected = plain(PROMPT, 24, **sampling).text
            for stream in (False, True):
                assert ask(gateway, path, PROMPT, stream=stream, max_tokens=24, **sampling)[0] == expected
            seen.add(expected)
        assert len(seen) == 2

    def test_a_front_that_was_computed_before_is_counted(self, gateway, plain):
        prompt = f"# counted\n{LONG_PROMPT}"
        expected, cached = plain(prompt, 9), []
        for stream in (False, False, True):
            text, _, usage = ask(gateway, COMPLETIONS, prompt, stream=stream, max_tokens=9)
            assert text == expected.text
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, *2 * [expected.stats.num_prompt_tokens - 1]]

    def test_without_max_tokens_the_context_is_the_limit(self, gateway):
        _, reason, usage = ask(gateway, COMPLETIONS, PROMPT, ignore_eos=True)
        assert (reason, usage["total_tokens"]) == ("length", CONTEXT)


@pytest.mark.slow
class TestGrammars:
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize(
        ("response_format", "schema"),
        [
            ({"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}, SCHEMA),
            ({"type": "json_object"}, {"type": "object"}),
        ],
        ids=["json_schema", "json_object"],
    )
    def test_the_response_format_of_a_chat_is_followed(self, gateway, plain, response_format, schema, stream):
        expected = plain(LONG_PROMPT, 64, grammar=Grammar.json_schema(schema))
        text, reason, _ = ask(gateway, CHAT, LONG_PROMPT, stream=stream, max_tokens=64, response_format=response_format)
        assert (text, reason) == (expected.text, "stop")
        jsonschema.validate(json.loads(text), schema)
        assert text not in plain(LONG_PROMPT, 64).text  # the grammar was needed

    @pytest.mark.parametrize(
        ("field", "grammar"),
        [
            ({"regex": REGEX}, Grammar.regex(REGEX)),
            ({"json_schema": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
            ({"ebnf": 'start: "x" ("a" | "b")~3'}, Grammar.lark('start: "x" ("a" | "b")~3')),
        ],
        ids=["regex", "json_schema", "ebnf"],
    )
    def test_the_fields_of_completions(self, gateway, plain, field, grammar):
        expected = plain(LONG_PROMPT, 64, grammar=grammar)
        assert expected.finish_reason == "stop"
        for stream in (False, True):
            text, reason, _ = ask(gateway, COMPLETIONS, LONG_PROMPT, stream=stream, max_tokens=64, **field)
            assert (text, reason) == (expected.text, "stop")

    def test_a_dead_end_is_told_and_not_tried_again(self, server, gateway):
        """A special token is no text, and the server finds out when the text has come to it."""
        body = {"prompt": PROMPT, "max_tokens": 40, "ebnf": 'start: "import" <[1]>'}
        status, answer = gateway.ask(COMPLETIONS, **body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "grammar: dead end" in answer["error"]["message"]
        *events, error = gateway.stream(COMPLETIONS, **body)
        assert "".join(event["choices"][0]["text"] for event in events) == "import"
        assert "grammar: dead end" in error["error"]["message"]
        status, last = gateway.ask(COMPLETIONS, prompt=PROMPT, max_tokens=1)
        assert status == 200
        server.request(last["id"])  # lines come in order: those of the tries are there
        assert [line["outcome"] for line in server.requests()].count("dead_end") == 2


def refused(gateway, path, prompt, body):
    """Status and error of a request that has to be refused the same way, streamed or not."""
    body = body | ({"prompt": prompt} if path == COMPLETIONS else {"messages": messages(prompt)})
    answers = [gateway.ask(path, **body | {"stream": stream}) for stream in (False, True)]
    (status, answer), (stream_status, stream_answer) = answers
    assert status == stream_status and answer["error"]["code"] == stream_answer["error"]["code"]
    return status, answer["error"]


@pytest.mark.slow
class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            (COMPLETIONS, {"logprobs": 1}, "logprobs: got 1, allowed is unset"),
            (CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs: got 2, allowed is unset"),
            (COMPLETIONS, {"n": 2}, "n: got 2, allowed is 1"),
            (CHAT, {"n": 2}, "n: got 2, allowed is 1"),
            (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty: got 0.5, allowed is 0"),
            (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty: got 0.5, allowed is 0"),
            (COMPLETIONS, {"min_tokens": 3}, "min_tokens: got 3, allowed is 0"),
        ],
    )
    def test_what_is_not_built_is_501_with_the_reason(self, gateway, path, body, named):
        status, error = refused(gateway, path, PROMPT, body)
        assert status == 501 and named in error["message"]

    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            (COMPLETIONS, {"temperature": -1}, "temperature"),
            (CHAT, {"top_p": 1.5}, "top_p"),
            (COMPLETIONS, {"max_tokens": 0}, "max_tokens: got 0 after a prompt of 6 tokens"),
            (CHAT, {"max_tokens": CONTEXT}, f"max_tokens: got {CONTEXT} after a prompt of 6 tokens"),
            (COMPLETIONS, {"regex": "("}, "grammar regex: "),
            (COMPLETIONS, {"json_schema": '{"type": "nothing"}'}, "grammar json_schema: Invalid type: nothing"),
            (
                CHAT,
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
                "grammar json_schema: ",
            ),
        ],
    )
    def test_bad_values_are_400_with_the_reason(self, gateway, path, body, named):
        status, error = refused(gateway, path, PROMPT, body)
        assert (status, error["type"]) == (400, "invalid_request_error") and named in error["message"]

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_prompts_without_room(self, gateway, path):
        status, error = refused(gateway, path, "x = 1\n" * CONTEXT, {})
        assert (status, error["type"]) == (400, "invalid_request_error") and f"{CONTEXT} tokens" in error["message"]
        status, error = refused(gateway, path, "", {})
        assert (status, error["type"]) == (400, "invalid_request_error") and "prompt" in error["message"]

    def test_refusals_leave_the_server_in_use(self, gateway, plain):
        """More of them than the failures that make the gateway leave a server alone."""
        for _ in range(12):
            assert gateway.ask(COMPLETIONS, prompt=PROMPT, n=2)[0] == 501
        assert ask(gateway, COMPLETIONS, PROMPT, max_tokens=9)[0] == plain(PROMPT, 9).text


@pytest.mark.slow
class TestClientsThatLeave:
    # The one prompt here of so many tokens: a log line has no other mark that a client could give it.
    BODY = {"prompt": "# left\n" * 40, "max_tokens": 300, "ignore_eos": True}

    def cancelled(self, server):
        return [line for line in server.requests() if line["outcome"] == "CANCELLED" and line["prompt_tokens"] >= 120]

    def check_left(self, server, before):
        (line,) = wait_for(lambda: self.cancelled(server)[len(before) :])
        assert line["output_tokens"] < self.BODY["max_tokens"]
        wait_for(lambda: server.load().num_total_reqs == 0)
        assert (server.load().num_used_tokens, server.load().utilization) == (0, 0.0)

    def test_in_the_middle_of_a_stream(self, server, gateway, plain):
        before = self.cancelled(server)
        with gateway.opened(COMPLETIONS, self.BODY | {"stream": True}) as response:
            assert next(events_of(response)) and server.load().num_running_reqs == 1
        self.check_left(server, before)
        assert ask(gateway, COMPLETIONS, PROMPT, max_tokens=9)[0] == plain(PROMPT, 9).text

    def test_before_the_answer(self, server, gateway):
        before = self.cancelled(server)
        with gateway.sent(COMPLETIONS, self.BODY):
            wait_for(lambda: server.load().num_running_reqs == 1)
        self.check_left(server, before)


@pytest.mark.slow
def test_two_servers_share_the_requests_and_one_that_stops_is_left_out(server, plain):
    with server_process(*SMALL) as other, gateway_process(server.address, other.address) as gateway:
        workers = gateway.get("/workers")[1]["workers"]
        assert {worker["url"] for worker in workers} == {f"grpc://{s.address}" for s in (server, other)}
        assert [model["id"] for model in gateway.get("/v1/models")[1]["data"]] == ["demo"]
        ids = []
        for prompt in PROMPTS * 2:
            status, answer = gateway.ask(COMPLETIONS, prompt=prompt, max_tokens=9)
            assert (status, answer["choices"][0]["text"]) == (200, plain(prompt, 9).text)
            ids.append(answer["id"])

        def shares():
            """Which of the ids each of the two has brought to their end."""
            lines = [[line for line in each.requests() if line["outcome"] == "length"] for each in (server, other)]
            return [[line["request_id"] for line in some if line["request_id"] in ids] for some in lines]

        wait_for(lambda: sum(map(len, shares())) == len(ids))
        assert sorted(sum(shares(), [])) == sorted(ids) and min(map(len, shares())) >= 2

        long = {"prompt": PROMPT, "max_tokens": 80, "stream": True}
        with gateway.opened(COMPLETIONS, long) as one, gateway.opened(COMPLETIONS, long) as two:
            streams = [events_of(one), events_of(two)]
            firsts = [next(stream) for stream in streams]
            ids = [json.loads(first)["id"] for first in firsts]
            other.process.send_signal(signal.SIGTERM)
            for first, stream in zip(firsts, streams, strict=True):
                *events, done = [first, *stream]
                assert done == "[DONE]" and joined(map(json.loads, events)) == (plain(PROMPT, 80).text, "length")
        for prompt in PROMPTS * 2:  # at once, and so before the gateway can know
            assert ask(gateway, COMPLETIONS, prompt, max_tokens=9)[0] == plain(prompt, 9).text
        assert other.process.wait(WAIT_S) == 0
        wait_for(lambda: sum(map(len, shares())) == 2)
        assert list(map(len, shares())) == [1, 1]  # the one that was told to stop has finished its own
        wait_for(lambda: gateway.num_healthy() == 1)
        for prompt in PROMPTS:
            assert ask(gateway, COMPLETIONS, prompt, max_tokens=9)[0] == plain(prompt, 9).text

"""The client against a server without a model: text and stop strings, errors, cancellation, what goes over the wire."""

import itertools
import random

import grpc
import pytest

from ddtree_jax import Grammar, InvariantError
from ddtree_jax.grammar import vocabulary_of
from serving.client import Client, ServerError, Tls, generate_request, tokenizer_from_zip
from serving.stops import StopCutter
from tests.serving.fake_server import SECONDS, STATISTICS, FakeServer, demo_tokenizer, running, zipped
from tests.serving.tls_files import certificate

pytestmark = pytest.mark.timeout(60)
TOKENIZER = demo_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def client(fake):
    with running(fake) as address, Client(address) as client:
        yield client


def test_text_comes_in_pieces_and_ends_with_a_result(fake, client):
    text = "def f(x):\n    return 'é☃'\n"
    fake.chunks = [[i] for i in ids_of(text)]
    generation = client.generate("p", max_new_tokens=9)
    pieces = list(generation)
    assert "".join(pieces) == text and len(pieces) > 3
    result = generation.result
    assert (result.text, list(result.token_ids), result.finish_reason) == (text, ids_of(text), "length")
    assert (result.num_prompt_tokens, result.num_cached_tokens, result.matched_stop) == (3, 1, None)
    assert dict(result.statistics) == STATISTICS
    assert 0 < result.time_to_first_token_s <= result.total_s
    line = result.summary_line()
    assert "acceptance length 2.50" in line and "budget 8" in line and "in 2 rounds" in line and "1 cached" in line


def test_a_result_without_iterating_and_tokens_that_only_the_end_has(fake, client):
    ids = ids_of("one two three")
    fake.chunks, fake.last = [ids[:1]], ids[1:]
    assert client.generate([1, 2]).result.text == "one two three"
    fake.chunks, fake.last = [], ids
    assert client.generate([1, 2]).result.token_ids == tuple(ids)


def test_no_token_at_all(fake, client):
    result = client.generate("p").result
    assert (result.text, result.token_ids, result.time_to_first_token_s) == ("", (), None)
    assert "no token" in result.summary_line()


def test_the_tokenizer_is_asked_for_once(fake, client):
    assert client.tokenizer().encode("a b") == ids_of("a b")
    client.generate("p").result  # noqa: B018
    assert fake.tokenizer_calls == 1


def test_without_a_tokenizer_there_are_ids(fake, client):
    fake.archive = None
    fake.chunks = [[5, 6], [7]]
    with pytest.raises(ServerError) as caught:
        client.generate("p")
    assert caught.value.status is grpc.StatusCode.UNIMPLEMENTED and "none here" in str(caught.value)
    generation = client.generate([1], detokenise=False)
    assert list(generation) == [] and generation.result.token_ids == (5, 6, 7) and generation.result.text is None


@pytest.mark.parametrize(
    ("archive", "digest"),
    [(zipped(tokenizer_json=b"{}"), None), (zipped(other_json=b"{}"), None), (b"no zip", None), (b"", "x")],
)
def test_an_archive_that_is_no_tokenizer(fake, client, archive, digest):
    fake.archive, fake.digest = archive, digest
    with pytest.raises(ServerError, match="DATA_LOSS: tokenizer"):
        client.tokenizer()


def test_an_archive_that_was_cut_on_the_way():
    content = zipped(tokenizer_json=TOKENIZER.to_json().encode())
    with pytest.raises(ServerError, match="are not those of"):
        tokenizer_from_zip(content[:-1], "0" * 64)


def test_an_archive_without_an_end_is_given_up(fake, client, monkeypatch):
    monkeypatch.setattr("serving.client.MAX_TOKENIZER_BYTES", 1 << 20)
    fake.archive = bytes(3 << 20)  # two chunks: the second is not waited for
    with pytest.raises(ServerError, match="DATA_LOSS: tokenizer: its archive is longer than 1048576 bytes"):
        client.tokenizer()


def test_a_stop_string_is_cut_and_never_shown_in_part(fake, client):
    fake.end = {"finish_reason": "stop", "matched_stop_str": "STOP"}
    fake.chunks = [[i] for i in ids_of("abSTOSTOPcd")]
    generation = client.generate("p", stop="STOP")
    pieces = list(generation)
    assert "".join(pieces) == "abSTO" and generation.result.text == "abSTO"
    assert generation.result.matched_stop == "STOP" and list(fake.requests[0].sampling_params.stop) == ["STOP"]


def test_the_front_of_a_stop_string_is_text_where_nothing_completes_it(fake, client):
    fake.chunks = [[i] for i in ids_of("ab STO")]
    assert client.generate("p", stop=["STOP"]).result.text == "ab STO"


def first_complete(pieces: list[str], stops: list[str]) -> str:
    """The slow way: after each piece, look for stop strings in all that has come."""
    text = ""
    for piece in pieces:
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)]
    return text


@pytest.mark.parametrize("stops", [["aab"], ["ab", "abab"], ["bb", "aab"], ["aa", "aba"], ["abcabd", "cab"]])
def test_no_piece_shows_what_a_stop_string_takes_back(stops):
    generator = random.Random(0)
    seen = set()
    for _ in range(300):
        text = "".join(generator.choices("abcd", weights=(5, 4, 2, 1), k=12))
        cuts = sorted(generator.sample(range(13), 4))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        expected = first_complete(pieces, stops)
        cutter, shown = StopCutter(stops), ""
        for piece in pieces:
            shown += cutter.push(piece)
            assert expected.startswith(shown)
        shown += cutter.flush()
        assert shown == expected, (pieces, stops)
        assert (cutter.matched is not None) == (len(expected) < len(text))
        seen.add(cutter.matched)
    assert None in seen and len(seen) > 1


def test_no_stop_strings_hold_nothing_back():
    cutter = StopCutter(())
    assert [cutter.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"] and cutter.flush() == ""


def test_a_refusal_is_an_exception_with_status_and_message(fake, client):
    fake.failure = (grpc.StatusCode.INVALID_ARGUMENT, "temperature: got -1.0")
    fake.trailing = {"request_id": '"r7"'}
    generation = client.generate("p")
    with pytest.raises(ServerError) as caught:
        list(generation)
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.message, caught.value.request_id) == ("temperature: got -1.0", "r7")
    with pytest.raises(ServerError, match="temperature"):
        generation.result  # noqa: B018


def test_a_failure_after_some_text_keeps_the_text(fake, client):
    fake.chunks = [ids_of("some text")]
    fake.failure = (grpc.StatusCode.UNAVAILABLE, "the server shuts down")
    generation = client.generate("p", request_id="mine")
    assert next(generation) == "some text"
    with pytest.raises(ServerError) as caught:
        next(generation)
    assert (caught.value.status, caught.value.request_id) == (grpc.StatusCode.UNAVAILABLE, "mine")


def test_a_stream_without_its_end_is_an_error(fake, client):
    fake.end = None
    with pytest.raises(ServerError, match="INTERNAL: the stream ended without its end"):
        client.generate("p").result  # noqa: B018


def test_an_end_that_is_an_error_says_what_happened(fake, client):
    fake.end = {"finish_reason": "error"}
    result = client.generate("p").result
    assert (result.finish_reason, result.error) == ("error", "the server ended it: error")


def test_metadata_of_others_are_not_statistics(fake, client):
    fake.trailing["x-proxy"] = "not json"
    assert dict(client.generate("p").result.statistics) == STATISTICS


@pytest.mark.parametrize("value", ['"x"', "null", "[1]", "[" * 2000])
def test_statistics_that_are_no_numbers_count_as_none(fake, client, value):
    fake.trailing = dict.fromkeys(("mean_acceptance_length", "num_spec_steps", "tree_budget"), value)
    assert (
        client.generate("p").result.summary_line().startswith("[server] 0 tokens in 0 rounds | acceptance length 0.0")
    )


@pytest.mark.parametrize("leave", ["break", "interrupt", "cancel"])
def test_leaving_a_generation_cancels_it_on_the_server(fake, client, leave):
    fake.chunks, fake.hold = [ids_of("some text")], True
    generation = client.generate("p")
    if leave == "interrupt":
        with pytest.raises(KeyboardInterrupt), generation:
            next(generation)
            raise KeyboardInterrupt
    else:
        next(generation)
        (generation.cancel if leave == "cancel" else generation._pieces.close)()
    assert fake.cancelled.wait(SECONDS)
    with pytest.raises(ServerError, match="CANCELLED"):
        generation.result  # noqa: B018


def test_a_deadline(fake, client):
    fake.hold = True
    with pytest.raises(ServerError) as caught:
        client.generate("p", timeout_s=0.2).result  # noqa: B018
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert fake.cancelled.wait(SECONDS)


def test_a_server_that_is_not_there():
    with Client("127.0.0.1:1") as client, pytest.raises(ServerError) as caught:
        client.model_info()
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE


def test_the_other_answers(fake, client):
    assert client.health().message == "ready" and client.model_info().served_model_name == "fake"
    assert client.server_info().server_type == "fake" and client.loads().version == "1"
    client.abort("a", "b")
    assert fake.aborted == ["a", "b"]


def request(**changes):
    options = dict.fromkeys(("max_new_tokens", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "grammar"))
    return generate_request(**{"prompt": "p", "temperature": 0.0, "stop": (), "request_id": "", **options, **changes})


def test_what_is_not_asked_is_not_sent():
    sent = request()
    params = sent.sampling_params
    assert sent.text == "p" and sent.stream and params.HasField("temperature") and params.temperature == 0.0
    assert not params.HasField("seed") and not params.HasField("max_tokens") and params.WhichOneof("constraint") is None
    assert (params.top_k, params.top_p, params.min_p, params.ignore_eos) == (0, 0.0, 0.0, False)


def test_what_is_asked_is_sent():
    sent = request(
        prompt=[1, 2],
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=-7,
        stop=("x",),
        stop_token_ids=[4],
        request_id="r",
    )
    params = sent.sampling_params
    assert list(sent.tokenized.input_ids) == [1, 2] and sent.WhichOneof("input") == "tokenized"
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 3, 0.25)
    assert (params.min_p, params.seed, list(params.stop), list(params.stop_token_ids)) == (0.125, -7, ["x"], [4])
    assert params.ignore_eos and sent.request_id == "r"


def test_an_empty_stop_list_is_a_list_and_not_the_default():
    params = request(stop_token_ids=[]).sampling_params
    assert params.ignore_eos and not params.stop_token_ids


def test_an_empty_prompt_stays_one():
    assert request(prompt=[]).WhichOneof("input") == "tokenized" and request(prompt="").WhichOneof("input") == "text"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"seed": 2**31}, f"seed: got {2**31}"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"max_new_tokens": "x"}, "max_new_tokens: got 'x'"),
        ({"temperature": "warm"}, "temperature: got 'warm'"),
        ({"prompt": [1, -2]}, "prompt: got [1, -2]"),
        ({"prompt": [1.5]}, "prompt: got [1.5]"),
        ({"prompt": "\ud800"}, "prompt: got '\\ud800'"),
        ({"prompt": None}, "prompt: got None"),
        ({"stop_token_ids": [2**32]}, "stop_token_ids: got"),
        ({"stop": (1,)}, "stop: got"),
        ({"request_id": 5}, "request_id: got 5"),
    ],
)
def test_what_the_protocol_cannot_carry_is_named(changes, named):
    with pytest.raises(ValueError) as caught:
        request(**changes)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "field", "value"),
    [
        (Grammar.json_schema({"type": "integer"}), "json_schema", '{"type": "integer"}'),
        (Grammar.regex("[0-9]+"), "regex", "[0-9]+"),
        (Grammar.lark('start: "a"'), "grammar", 'start: "a"'),
    ],
)
def test_a_grammar_is_sent(grammar, field, value):
    params = request(grammar=grammar).sampling_params
    assert params.WhichOneof("constraint") == field and getattr(params, field) == value


def test_choices_and_a_compact_schema_are_sent():
    assert list(request(grammar=Grammar.choices(["b", "a"])).sampling_params.choice.choices) == ["b", "a"]
    compact = Grammar.json_schema({"type": "array", "items": {"type": "integer"}}, compact=True)
    sent = Grammar.lark(request(grammar=compact).sampling_params.grammar)
    vocabulary = vocabulary_of(TOKENIZER, 2048)
    for grammar in (sent, compact):
        state = vocabulary.compile(grammar, (0,)).start()
        state.advance(ids_of("[1,2]"))
        assert state.is_complete
        with pytest.raises(InvariantError):
            vocabulary.compile(grammar, (0,)).start().advance(ids_of("[1, 2]"))


def test_tls_with_a_certificate_of_the_client(fake, tmp_path):
    server, own = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    credentials = grpc.ssl_server_credentials([(server.key, server.certificates)], own.certificates, True)
    with running(fake, lambda s: s.add_secure_port("127.0.0.1:0", credentials)) as address:
        with Client(address, tls=Tls(server.certificates, own.key, own.certificates)) as client:
            assert client.health().healthy
        for tls in (None, Tls(server.certificates)):
            with Client(address, tls=tls) as client, pytest.raises(ServerError, match="UNAVAILABLE"):
                client.health()

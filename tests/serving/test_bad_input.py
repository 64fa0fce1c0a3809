"""Everything that a client can send wrong: one row each, over the wire, and the server lives on."""

import dataclasses
import math

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from serving import translate
from tests.serving.harness import CONTEXT, outline, run, serving, settings

INVALID, UNBUILT = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
PROMPT = pb.TokenizedInput(input_ids=[5, 6, 7])
VOCABULARY = 2048


@dataclasses.dataclass(frozen=True)
class Row:
    """field: what is wrong. message: with it in. part: of the details, which start with the field's own name."""

    field: str
    message: pb.GenerateRequest
    status: grpc.StatusCode
    part: str


def ask(**fields) -> pb.GenerateRequest:
    """A request that would be served, but for `fields`."""
    if not {"tokenized", "text"} & set(fields):
        fields["tokenized"] = PROMPT
    return pb.GenerateRequest(**fields)


def sampling(field: str, value, status: grpc.StatusCode, part: str, **others) -> Row:
    return Row(field, ask(sampling_params=pb.SamplingParams(**{field: value}, **others)), status, part)


def ids(count: int) -> pb.TokenizedInput:
    return pb.TokenizedInput(input_ids=[5] * count)


DEEP = '{"not":' * 200 + "{}" + "}" * 200
TABLE = [
    # the prompt
    Row("input", pb.GenerateRequest(), INVALID, "got none, allowed is tokenized or text"),
    Row("prompt", ask(tokenized=ids(0)), INVALID, "at least one token"),
    Row("prompt", ask(text=""), INVALID, "at least one token"),
    Row("prompt", ask(tokenized=pb.TokenizedInput(original_text="no ids")), INVALID, "at least one token"),
    Row(
        "prompt", ask(tokenized=pb.TokenizedInput(input_ids=[5, VOCABULARY])), INVALID, "2048, allowed are integers in"
    ),
    Row("prompt", ask(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1])), INVALID, "got token id 4294967295"),
    Row("prompt", ask(tokenized=ids(CONTEXT)), INVALID, f"got {CONTEXT} tokens, allowed are {CONTEXT - 1}"),
    Row("prompt", ask(tokenized=ids(1_000_000)), INVALID, "got 1000000 tokens"),
    Row("prompt", ask(text="a b " * CONTEXT), INVALID, f"allowed are {CONTEXT - 1} tokens"),
    Row("prompt", ask(text="a" * (CONTEXT * 256 + 1)), INVALID, f"got {CONTEXT * 256 + 1} characters"),
    Row("request_id", ask(request_id="x" * 129), INVALID, "got 129 characters, allowed are 128"),
    # lengths
    sampling(
        "max_tokens", 0, INVALID, f"got 0 after a prompt of 3 tokens, allowed is an integer in [1, {CONTEXT - 3}]"
    ),
    sampling("max_tokens", CONTEXT - 2, INVALID, f"got {CONTEXT - 2} after"),
    sampling("max_tokens", 2**32 - 1, INVALID, "got 4294967295"),
    # sampling
    sampling("temperature", math.nan, INVALID, "got nan, allowed is a number in [0, "),
    sampling("temperature", math.inf, INVALID, "got inf"),
    sampling("temperature", -0.5, INVALID, "got -0.5"),
    sampling("top_p", 1.5, INVALID, "got 1.5, allowed is a number in (0, 1]"),
    sampling("top_p", -0.5, INVALID, "got -0.5"),
    sampling("top_p", math.nan, INVALID, "got nan"),
    sampling("top_p", math.inf, INVALID, "got inf"),
    sampling("top_k", 2**31, INVALID, "got 2147483648, allowed is an integer in [1, 2147483647]"),
    sampling("min_p", 1.5, INVALID, "got 1.5, allowed is a number in [0, 1]"),
    sampling("min_p", -0.5, INVALID, "got -0.5"),
    sampling("min_p", math.nan, INVALID, "got nan"),
    # stops
    sampling("stop", [""], INVALID, "got a string of 0 characters, allowed are 1 to 1024"),
    sampling("stop", ["x" * 1025], INVALID, "got a string of 1025 characters"),
    sampling("stop", ["x"] * 33, INVALID, "got 33 strings, allowed are 32"),
    sampling("stop_token_ids", [VOCABULARY], INVALID, "allowed are token ids in [0, 2047]"),
    sampling("stop_token_ids", [7] * 1025, INVALID, "got 1025 ids, allowed are 1024"),
    sampling("ignore_eos", True, INVALID, "got true with regex and no stop_token_ids", regex="a+"),
    # grammars: the message names the kind as the library does
    Row("grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema="")), INVALID, "not JSON"),
    Row("grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema="{")), INVALID, "not JSON"),
    Row(
        "grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema="[]")), INVALID, "allowed is an object"
    ),
    Row("grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema='{"type":"x"}')), INVALID, "x"),
    Row("grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema=DEEP)), INVALID, "nested deeper"),
    Row("grammar json_schema", ask(sampling_params=pb.SamplingParams(json_schema="false")), INVALID, ""),
    Row("grammar regex", ask(sampling_params=pb.SamplingParams(regex="(")), INVALID, ""),
    Row("grammar regex", ask(sampling_params=pb.SamplingParams(regex="a" * 200_000)), INVALID, "131072 bytes"),
    Row("grammar lark", ask(sampling_params=pb.SamplingParams(grammar="start: nothing")), INVALID, ""),
    Row("grammar", ask(sampling_params=pb.SamplingParams(grammar='root ::= "a"')), INVALID, "'::=', allowed is Lark"),
    Row(
        "grammar choices", ask(sampling_params=pb.SamplingParams(choice=pb.ChoiceConstraint())), INVALID, "at least one"
    ),
    # what the protocol has and this server has not
    sampling("n", 2, UNBUILT, "got 2, allowed is 1"),
    sampling("logprobs", 0, UNBUILT, "got 0, allowed is unset"),
    sampling("logprobs", -1, UNBUILT, "got -1"),
    sampling("prompt_logprobs", 5, UNBUILT, "got 5"),
    sampling("frequency_penalty", 0.5, UNBUILT, "got 0.5, allowed is 0"),
    sampling("presence_penalty", math.nan, UNBUILT, "got nan"),
    sampling("repetition_penalty", 1.5, UNBUILT, "got 1.5, allowed is 1"),
    sampling("min_tokens", 1, UNBUILT, "got 1, allowed is 0"),
    sampling("logit_bias", {5: 1.0}, UNBUILT, "got '1 entries'"),
    sampling("truncate_prompt_tokens", -1, UNBUILT, "got -1, allowed is unset"),
    sampling("structural_tag", "{}", UNBUILT, "got '{}', allowed is json_schema"),
    Row("mm_inputs", ask(mm_inputs=pb.MultimodalInputs()), UNBUILT, "allowed is text"),
    Row("extra_mm_inputs", ask(extra_mm_inputs=[pb.MultimodalInputs()]), UNBUILT, "got '1 entries'"),
    Row("media_refs", ask(media_refs=pb.MediaRefs()), UNBUILT, "allowed is text"),
    Row("kv_transfer_params", ask(kv_transfer_params=pb.KvTransferParams()), UNBUILT, "allowed is unset"),
    Row("kv_transfer_params_json", ask(kv_transfer_params_json="{}"), UNBUILT, "got '{}'"),
    Row("data_parallel_rank", ask(data_parallel_rank=1), UNBUILT, "got 1, allowed is 0"),
]


def test_every_row_of_the_table() -> None:
    async def test() -> None:
        async with serving() as up:
            for row in TABLE:
                status, details = await up.refusal(row.message)
                assert status is row.status and row.part in details, f"{row.field}: {status} {details}"
                assert details.startswith(f"{row.field}: "), f"{row.field}: {details}"
                assert "\n" not in details and len(details) <= translate.MAX_DETAILS_CHARS
            assert up.loop.seen.empty(), "a bad request reached the loop"
            assert [record.outcome for record in up.records.requests] == [row.status.name for row in TABLE]
            assert all(record.error for record in up.records.requests)
            assert (await up.collect(ask()))[-1].complete.finish_reason == "length"

    run(test())


def test_every_unbuilt_feature_has_a_row() -> None:
    assert {name for name, _, _ in translate.NOT_BUILT} == {row.field for row in TABLE if row.status is UNBUILT}


@pytest.mark.parametrize("data", [b"\x0a\x03\xff\xfe\xfd", b"\xff\xff\xff"], ids=["text not UTF-8", "no protobuf"])
def test_bytes_that_are_no_message(data: bytes) -> None:
    async def test() -> None:
        async with serving() as up:
            raw = up.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in raw(data):
                    pass
            assert caught.value.code() is INVALID
            assert "no message of this method" in caught.value.details()
            raw = up.channel.unary_unary("/vllm.grpc.engine.VllmEngine/Abort")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(data)
            assert caught.value.code() is INVALID
            assert await up.collect(ask())

    run(test())


def test_an_engine_without_a_tokenizer() -> None:
    engine = dataclasses.replace(outline(), tokenizer=None)

    async def test() -> None:
        async with serving(engine=engine) as up:
            assert await up.refusal(ask(text="a")) == (
                INVALID,
                "text: got one, but demo has no tokenizer; allowed is tokenized",
            )
            assert (await up.refusal(ask(sampling_params=pb.SamplingParams(stop=["a"]))))[1].startswith("stop: ")
            assert (await up.refusal(ask(sampling_params=pb.SamplingParams(regex="a"))))[1].startswith("grammar: ")
            assert (await up.collect(ask()))[-1].complete.prompt_tokens == 3

    run(test())


def test_a_text_that_the_tokenizer_cannot_encode() -> None:
    class Refusing(type(outline().tokenizer)):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise ValueError("prompt: text that the model's tokenizer cannot encode (no unknown token)")

    refusing = Refusing(outline().tokenizer._inner)

    async def test() -> None:
        async with serving(engine=dataclasses.replace(outline(), tokenizer=refusing)) as up:
            status, details = await up.refusal(ask(text="a"))
            assert status is INVALID and details.startswith("prompt: text that the model's tokenizer cannot encode")

    run(test())


def test_a_rank_that_is_not_there() -> None:
    async def test() -> None:
        async with serving() as up:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await up.stub.GetLoads(pb.GetLoadsRequest(dp_rank=3))
            assert caught.value.code() is INVALID and caught.value.details().startswith("dp_rank: got 3")

    run(test())


@pytest.mark.parametrize(
    ("name", "request_type"),
    [
        ("Embed", pb.EmbedRequest),
        ("FlushCache", common_pb2.FlushCacheRequest),
        ("StartProfile", common_pb2.StartProfileRequest),
        ("StopProfile", common_pb2.StopProfileRequest),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest),
    ],
)
def test_rpcs_that_are_not_built(name: str, request_type: type) -> None:
    async def test() -> None:
        async with serving() as up:
            call = getattr(up.stub, name)(request_type())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if name == "SubscribeKvEvents" else call)
            assert caught.value.code() is UNBUILT and caught.value.details().startswith(f"{name}: ")

    run(test())


class TestUnset:
    """What proto3 zeros mean: `translate.UNSET_VALUES`."""

    def admitted(self, **params) -> translate.Admitted:
        return translate.admit(outline(), settings(), ask(sampling_params=pb.SamplingParams(**params)))

    def test_nothing_set(self) -> None:
        for admitted in (translate.admit(outline(), settings(), ask()), self.admitted()):
            request = admitted.request
            assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1.0, None, None, None)
            assert request.max_new_tokens == CONTEXT - 3
            assert request.stop_token_ids == (0,) and admitted.stop_strings == () and not admitted.named_stops
            assert request.grammars == [None] and request.budget == 8

    def test_values_that_mean_off(self) -> None:
        request = self.admitted(top_p=1.0, repetition_penalty=1.0, n=1, json_object=False).request
        assert request.top_p is None and request.grammars == [None]

    def test_zero_is_a_value_of_an_optional_field(self) -> None:
        request = self.admitted(temperature=0.0, seed=0).request
        assert request.temperature == 0.0 and request.seeds == [0] and request.mode == "greedy"

    def test_values_that_are_set(self) -> None:
        admitted = self.admitted(
            temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, max_tokens=7, seed=-5, stop=["b", "a", "b"]
        )
        request = admitted.request
        assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 3, 0.75, 0.25)
        assert request.max_new_tokens == 7 and request.seeds == [-5] and admitted.stop_strings == ("b", "a")

    def test_a_seed_of_its_own_for_each_request(self) -> None:
        assert len({self.admitted().request.seeds[0] for _ in range(8)}) == 8

    def test_stop_tokens(self) -> None:
        assert self.admitted(stop_token_ids=[7, 0, 7]).request.stop_token_ids == (0, 7)
        assert self.admitted(stop_token_ids=[7], ignore_eos=True).request.stop_token_ids == (7,)
        assert self.admitted(ignore_eos=True).request.stop_token_ids == ()

    @pytest.mark.parametrize(
        ("params", "kind", "text"),
        [
            ({"json_schema": '{"type": "boolean"}'}, "json_schema", '{"type": "boolean"}'),
            ({"json_object": True}, "json_schema", '{"type": "object"}'),
            ({"regex": "a+"}, "regex", "a+"),
            ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
            ({"choice": pb.ChoiceConstraint(choices=["yes", "no"])}, "choices", '["yes", "no"]'),
        ],
        ids=["json_schema", "json_object", "regex", "grammar", "choice"],
    )
    def test_grammars(self, params: dict, kind: str, text: str) -> None:
        (compiled,) = self.admitted(**params).request.grammars
        assert (compiled.grammar.kind, compiled.grammar.text) == (kind, text)
        assert compiled.stop_token_ids == (0,)

    @pytest.mark.parametrize("params", [{"json_schema": '{"type": "array"}'}, {"json_object": True}])
    def test_json_is_compact_where_the_server_says_so(self, params: dict) -> None:
        for compact in (False, True):
            message = ask(sampling_params=pb.SamplingParams(**params))
            admitted = translate.admit(outline(), settings(compact_json=compact), message)
            assert admitted.request.grammars[0].grammar.compact is compact

    def test_text_is_tokenised_as_the_library_does(self) -> None:
        text = "Once upon a time"
        admitted = translate.admit(outline(), settings(), ask(text=text))
        assert admitted.request.prompts == [outline().tokenizer.encode(text)]
        assert admitted.num_prompt_tokens == len(admitted.request.prompts[0])

    def test_the_last_position_can_be_asked_for(self) -> None:
        assert self.admitted(max_tokens=CONTEXT - 3).request.max_new_tokens == CONTEXT - 3
        longest = translate.admit(outline(), settings(), ask(tokenized=ids(CONTEXT - 1)))
        assert longest.request.max_new_tokens == 1

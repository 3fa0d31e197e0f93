"""Every field of `vllm.grpc.engine.GenerateRequest`: carried to our own request, or refused with a sentence."""

from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from octavo.generation.v1 import generation_pb2
from scheduler_svc.front.api.vllm_engine.requests import generation_request
from shared.errors import InvalidFieldError
from shared.sampling_parameters import SAMPLING_PARAMETERS
from tests.support.vllm_engine import ask, engine_request, running_gateway_stack

# What the request says -> what GenerationService's parameters say. Fields that are not named are neutral in both.
CARRIED: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0.0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_p": 0.0}, {"top_p": 1.0}),
    ({"top_k": 4}, {"top_k": 4}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": 2**32 - 1}, {"top_k": 0}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repetition_penalty": 0.0}, {"repetition_penalty": 1.0}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"min_tokens": 2}, {"min_tokens": 2}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
    ({"skip_special_tokens": True}, {"skip_special_tokens": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"spaces_between_special_tokens": True}, {}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"n": 3}, {"n": 3}),
    ({"n": 0}, {"n": 1}),
    ({"n": 3, "temperature": 0.0}, {"n": 1, "temperature": 0.0}),
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"logprobs": 5}, {"logprobs": 5}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ({"seed": 5}, {"seed": 5}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    (
        {"logit_bias": {7: 1.5, 3: -2.0}},
        {"logit_bias": [{"token_id": 3, "bias": -2.0}, {"token_id": 7, "bias": 1.5}]},
    ),
]

NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "skip_special_tokens": False, "top_k": 0, "min_p": 0.0}
NEUTRAL_OCTAVO = generation_pb2.SamplingParams(
    top_k=0, top_p=1.0, min_p=0.0, min_tokens=0, skip_special_tokens=False, n=1, repetition_penalty=1.0,
    presence_penalty=0.0, frequency_penalty=0.0, temperature=1.0, typical_p=1.0,
)  # fmt: skip


def set_param(**params: object) -> Callable[[pb.GenerateRequest], None]:
    def change(request: pb.GenerateRequest) -> None:
        request.sampling_params.MergeFrom(pb.SamplingParams(**params))  # type: ignore[arg-type]

    return change


def set_field(**fields: object) -> Callable[[pb.GenerateRequest], None]:
    def change(request: pb.GenerateRequest) -> None:
        request.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]

    return change


def set_unknown(choose: Callable[[pb.GenerateRequest], Message]) -> Callable[[pb.GenerateRequest], None]:
    def change(request: pb.GenerateRequest) -> None:
        choose(request).MergeFromString(b"\xb8\x3e\x01")  # field 999, a number

    return change


def clear_input(request: pb.GenerateRequest) -> None:
    request.ClearField("input")


def prompt_logprobs_of_text(request: pb.GenerateRequest) -> None:
    request.text = "Hello"
    request.sampling_params.prompt_logprobs = 1


# What is set -> the field that the error names and how its sentence goes on.
REFUSED = [
    (set_param(json_schema="{}"), "sampling_params.json_schema is set; it must be unset"),
    (set_param(regex="a"), "sampling_params.regex is set; it must be unset"),
    (set_param(grammar="root"), "sampling_params.grammar is set; it must be unset"),
    (set_param(structural_tag="{}"), "sampling_params.structural_tag is set; it must be unset"),
    (set_param(json_object=True), "sampling_params.json_object is set; it must be unset"),
    (set_param(choice=pb.ChoiceConstraint(choices=["a"])), "sampling_params.choice is set; it must be unset"),
    (set_param(grammar_from_first_token=True), "sampling_params.grammar_from_first_token is true; it must be unset"),
    (set_param(truncate_prompt_tokens=-1), "sampling_params.truncate_prompt_tokens is -1; it must be unset"),
    (set_param(logprobs=-1), "sampling_params.logprobs is -1; it must be 0 or more"),
    (set_param(logprobs=21), "sampling_params.logprobs is 21; it must be"),
    (set_param(prompt_logprobs=-1), "sampling_params.prompt_logprobs is -1; it must be 0 or more"),
    (prompt_logprobs_of_text, "sampling_params.prompt_logprobs is 1; it must be unset with text"),
    (set_param(temperature=-1.0), "sampling_params.temperature is -1; it must be from 0 to 100"),
    (set_param(temperature=float("nan")), "sampling_params.temperature is nan; it must be from 0 to 100"),
    (set_param(top_p=1.5), "sampling_params.top_p is 1.5; it must be above 0 and at most 1"),
    (set_param(min_p=2.0), "sampling_params.min_p is 2; it must be from 0 to 1"),
    (set_param(frequency_penalty=101.0), "sampling_params.frequency_penalty is 101; it must be"),
    (set_param(presence_penalty=101.0), "sampling_params.presence_penalty is 101; it must be"),
    (set_param(repetition_penalty=101.0), "sampling_params.repetition_penalty is 101; it must be"),
    (set_param(max_tokens=0), "sampling_params.max_tokens is 0; it must be at least 1"),
    (set_param(min_tokens=13), "sampling_params.min_tokens is 13; it must be"),
    (set_param(stop=[""]), "sampling_params.stop is a list with a string of 0 characters; it must be"),
    (set_param(stop_token_ids=[999]), "sampling_params.stop_token_ids is "),
    (set_param(stop_token_ids=[2**31]), "sampling_params.stop_token_ids is a list with token id 2147483648"),
    (set_param(n=999, temperature=1.0), "sampling_params.n is 999; it must be from 1 to"),
    (set_param(n=2**32 - 1, temperature=1.0), "sampling_params.n is 4294967295; it must be from 1 to"),
    (set_param(n=129), "sampling_params.n is 129; it must be from 1 to 128 with temperature 0"),
    (set_param(logit_bias={999: 1.0}), "sampling_params.logit_bias is "),
    (set_field(kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params is set; it must be unset"),
    (set_field(kv_transfer_params_json="{}"), "kv_transfer_params_json is set; it must be unset"),
    (set_field(mm_inputs=pb.MultimodalInputs()), "mm_inputs is set; it must be unset"),
    (set_field(extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs is set; it must be unset"),
    (set_field(media_refs=pb.MediaRefs()), "media_refs is set; it must be unset"),
    (set_field(data_parallel_rank=1), "data_parallel_rank is 1; it must be 0 or unset"),
    (set_field(request_id="x" * 257), "request_id is 257 characters long; it must be at most 256"),
    (set_field(tokenized=pb.TokenizedInput(input_ids=[2**31])), "tokenized.input_ids is a list with token id"),
    (set_field(tokenized=pb.TokenizedInput(input_ids=[300])), "token_ids is a list with token id 300"),
    (clear_input, "token_ids is empty; it must be at least 1 token long"),
    (set_unknown(lambda request: request), "field 999 of GenerateRequest is set"),
    (set_unknown(lambda request: request.tokenized), "field 999 of TokenizedInput is set"),
    (set_unknown(lambda request: request.sampling_params), "field 999 of SamplingParams is set"),
]


@pytest.mark.parametrize(("params", "octavo"), CARRIED, ids=[str(params) for params, _ in CARRIED])
def test_a_parameter_is_carried(params: dict[str, object], octavo: dict[str, object]) -> None:
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(**{**NEUTRAL, **params}))  # type: ignore[arg-type]
    expected = generation_pb2.SamplingParams()
    expected.CopyFrom(NEUTRAL_OCTAVO)
    for name in octavo:
        expected.ClearField(name)  # type: ignore[arg-type]
    expected.MergeFrom(generation_pb2.SamplingParams(**octavo))  # type: ignore[arg-type]
    assert generation_request(request, "").sampling_params == expected


def test_unset_means_the_default_of_openai_and_not_the_models() -> None:
    params = generation_request(pb.GenerateRequest(), "").sampling_params
    for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
        assert not params.HasField(name)
    for parameter in SAMPLING_PARAMETERS:
        if parameter.may_model_set:
            assert params.HasField(parameter.name)  # type: ignore[arg-type]
            assert getattr(params, parameter.name) == parameter.default


def test_the_request_itself_is_carried() -> None:
    octavo = generation_request(engine_request(request_id="chatcmpl-7", prompt=[1, 2]), "web")
    assert (octavo.request_id, list(octavo.token_ids.ids), octavo.tenant) == ("chatcmpl-7", [1, 2], "web")
    assert generation_request(pb.GenerateRequest(text="Hello", data_parallel_rank=0), "").text == "Hello"


def test_every_field_is_in_a_table() -> None:
    """A newer proto has fields that somebody must decide about."""
    decided = {name for params, _ in CARRIED for name in params}
    decided |= {sentence.partition(" ")[0].removeprefix("sampling_params.") for _, sentence in REFUSED}
    decided |= {"tokenized", "text", "sampling_params", "stream"}  # tested by what they do
    fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    fields |= {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert fields - decided == set()


async def test_what_cannot_be_honoured_is_refused_with_a_sentence() -> None:
    async with running_gateway_stack() as gateway:
        for change, sentence in REFUSED:
            request = engine_request()
            change(request)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await gateway.stub.Generate(request).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, sentence
            assert str(refused.value.details()).startswith(sentence)
        assert not gateway.stack.engine.requests
        assert (await ask(gateway, engine_request())).completes


def test_a_greedy_request_for_too_many_is_refused_before_anything_runs() -> None:
    request = engine_request(n=2**32 - 1)
    with pytest.raises(InvalidFieldError, match="from 1 to 128"):
        generation_request(request, "")

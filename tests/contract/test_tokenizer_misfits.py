"""Models whose tokenizer is missing, or knows more tokens than the model: what can be served is."""

import grpc.aio
import pytest
import tokenizers

from executor_svc.fake.tokenizer import VOCAB_SIZE, fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.executor_info import TokenizerFile
from tests.support.stack import Stack, WithoutTokenizer, collect, running_stack, token_request

IMAGE = "<|image|>"


class WithAnotherToken(FakeWorker):
    """As Gemma 3 without images has it: a token is added behind the last id of the model."""

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        own, *others = fake_tokenizer_files()
        tokenizer = tokenizers.Tokenizer.from_buffer(own.content)
        while tokenizer.get_vocab_size() < VOCAB_SIZE:
            tokenizer.add_tokens([f"<|unused{tokenizer.get_vocab_size()}|>"])
        tokenizer.add_special_tokens([IMAGE])
        return (TokenizerFile(own.name, tokenizer.to_str().encode()), *others)


async def refusal(stack: Stack, **fields: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack, pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


async def test_a_model_without_a_tokenizer_serves_token_ids(caplog: pytest.LogCaptureFixture) -> None:
    async with running_stack(WithoutTokenizer()) as stack:
        model = await stack.generation.GetModel(pb.GetModelRequest())
        assert (model.takes_token_ids_only, model.has_chat_template) == (True, False)
        for request in (token_request(5, 9, ignore_eos=True), token_request(5, 9, beam_width=2, ignore_eos=True)):
            output = (await collect(stack, request)).output
            assert (len(output.token_ids), output.text) == (9, "")
        assert stack.driver.num_losses == 0
    assert [record.getMessage() for record in caplog.records if "no_tokenizer" in record.getMessage()]


ids = pb.TokenIds(ids=[33])
NEEDS_TEXT: dict[str, tuple[dict[str, object], str]] = {
    "text": ({"text": "hi"}, "token_ids"),
    "messages": ({"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])}, "token_ids"),
    "sampling_params.stop": (
        {"token_ids": ids, "sampling_params": generation_pb2.SamplingParams(stop=["x"])},
        "stop_token_ids",
    ),
    "sampling_params.banned_words": (
        {"token_ids": ids, "sampling_params": generation_pb2.SamplingParams(banned_words=["x"])},
        "banned_token_ids",
    ),
}


async def test_what_needs_a_tokenizer_is_refused_by_name_with_the_fix() -> None:
    async with running_stack(WithoutTokenizer()) as stack:
        for field, (fields, instead) in NEEDS_TEXT.items():
            assert await refusal(stack, **fields) == (
                f"{field} is set; it must be unset: this model has no tokenizer; send {instead}, or start the "
                "scheduler with --tokenizer DIRECTORY, a directory with a tokenizer.json"
            )


async def test_a_token_that_only_the_tokenizer_knows_is_refused_and_all_else_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_stack(WithAnotherToken()) as stack:
        model = await stack.generation.GetModel(pb.GetModelRequest())
        assert not model.takes_token_ids_only
        sentence = (
            f"is a text with the token '{IMAGE}', id {VOCAB_SIZE}; it must be of token ids 0 to {VOCAB_SIZE - 1}: the "
            "tokenizer has tokens that the model lacks"
        )
        assert await refusal(stack, text=f"see {IMAGE}") == f"text {sentence}"
        message = pb.ChatMessage(role="user", content=IMAGE)
        assert await refusal(stack, messages=pb.ChatMessages(messages=[message])) == f"messages {sentence}"
        params = generation_pb2.SamplingParams(max_tokens=3, ignore_eos=True, banned_words=[IMAGE])
        answer = await collect(stack, pb.GenerateRequest(text="see", sampling_params=params))
        assert len(answer.output.token_ids) == 3
        assert stack.driver.num_losses == 0
    (line,) = [r.getMessage() for r in caplog.records if "tokenizer_larger_than_model" in r.getMessage()]
    assert f"token_id={VOCAB_SIZE}" in line

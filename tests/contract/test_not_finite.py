"""A request behind which the model's logits are NaN ends with one error that says where; nobody else notices."""

import asyncio
from typing import Any

import grpc
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo
from octavo_shared.step_wire.step import RowFlag
from tests.support.stack import Stack, collect, running_stack, token_request, until

NAN_TOKEN = 200
NUM_TOKENS = 60
OTHERS = [
    token_request(20 + first_id, NUM_TOKENS, first_id=first_id, logprobs=1, seed=first_id) for first_id in range(6)
]
WHY = "(NaN or infinity, or every token is ruled out)"


def with_nan(place: int = -1, **options: object) -> pb.GenerateRequest:
    """Return a request whose prompt has the token that makes NaN in a place."""
    request = token_request(40, NUM_TOKENS, first_id=50, **options)  # type: ignore[arg-type]
    request.token_ids.ids[place] = NAN_TOKEN
    return request


def workers(**options: int) -> list[FakeWorker]:
    plan = {"step_ms": 1, "nan_token_id": NAN_TOKEN, "max_num_seqs": 16, "max_num_batched_tokens": 16}
    return [FakeWorker(**{**plan, **options}) for _ in range(2)]  # type: ignore[arg-type]


async def error_of(stack: Stack, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """Return what a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stack.generation.Generate(request):
            pass
    return caught.value


async def others(stack: Stack) -> list[object]:
    found = await asyncio.gather(*(collect(stack, request) for request in OTHERS))
    return [(answer.token_ids, answer.logprobs) for answer in found]


REQUESTS = {
    "plain": (with_nan(), "output 0 are not finite at token 0"),
    "sampled": (with_nan(temperature=1.0, seed=3), "output 0 are not finite at token 0"),
    "with log-probabilities": (with_nan(logprobs=0), "output 0 are not finite at token 0"),
    "with alternatives": (with_nan(logprobs=2, temperature=1.0), "output 0 are not finite at token 0"),
    "with stop strings": (with_nan(stop=["x"]), "output 0 are not finite at token 0"),
    "several outputs": (with_nan(n=3, temperature=1.0, logprobs=0), "output 0 are not finite at token 0"),
    "beams": (with_nan(beam_width=3, n=2), "a beam are not finite at token 0"),
    "log-probabilities of the prompt": (with_nan(20, prompt_logprobs=2), "the prompt are not finite at token 21"),
    "of several outputs": (
        with_nan(20, prompt_logprobs=0, n=2, temperature=1.0),
        "the prompt are not finite at token 21",
    ),
    "beams with log-probabilities": (with_nan(beam_width=3, logprobs=0), "a beam are not finite at token 0"),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_it_ends_with_one_error_and_nobody_else_notices(what: str) -> None:
    request, place = REQUESTS[what]
    async with running_stack(*workers()) as stack:
        undisturbed, is_over = await others(stack), asyncio.Event()

        async def run_others() -> None:
            while not is_over.is_set():
                assert await others(stack) == undisturbed

        running = asyncio.create_task(run_others())
        errors = [await error_of(stack, request) for _ in range(3)]

        assert {error.code() for error in errors} == {grpc.StatusCode.INTERNAL}
        assert {error.details() for error in errors} == {f"the model's logits for {place} {WHY}"}
        is_over.set()
        await running
        assert stack.engine.meter.num_flagged[RowFlag.NOT_FINITE] == 3
        assert [stack.driver_of(executor).num_losses for executor in stack.executors] == [0, 0]
        assert not stack.engine.requests
        assert [core.blocks.allocator.num_used_blocks for core in stack.engine.fleet.planners] == [0, 0]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"beam_width": 2, "n": 2}])
async def test_an_output_for_which_no_token_is_left_ends_with_an_error(options: dict[str, Any]) -> None:
    request = token_request(5, 6, allowed_token_ids=[65, 66], no_repeat_ngram_size=1, **options)
    what = "a beam" if "n" in options else "output 0"
    async with running_stack() as stack:
        error = await error_of(stack, request)
        assert error.details() == f"the model's logits for {what} are not finite at token 2 {WHY}"
        assert len((await collect(stack, token_request(5, 6))).token_ids) == 6


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_an_output_that_runs_into_it_has_its_tokens_until_then(num_fronts: int) -> None:
    request = token_request(12, NUM_TOKENS, first_id=7, temperature=1.0, seed=4, logprobs=0, n=3)
    async with running_stack() as stack:
        whole: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for event in stack.generation.Generate(request):
            whole[event.delta.output_index] += event.delta.token_ids
    token_id = whole[1][17]
    first = min((ids.index(token_id), index) for index, ids in whole.items() if token_id in ids)
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with running_stack(*workers(nan_token_id=token_id), fronts=num_fronts) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in stack.generation.Generate(request):
                got[event.delta.output_index] += event.delta.token_ids
    assert (
        caught.value.details()
        == f"the model's logits for output {first[1]} are not finite at token {first[0] + 1} {WHY}"
    )
    assert all(whole[index][: len(ids)] == ids for index, ids in got.items())
    assert len(got.pop(first[1])) == first[0] + 1
    assert {len(ids) for ids in got.values()} == {first[0] + 2}, "what the others got in that step is theirs"


async def test_towards_an_executor_that_cannot_tell_all_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    able = frozenset({Capability.NUMERICS, Capability.NAMED_BLOCKS})
    monkeypatch.setattr(ExecutorInfo, "capabilities", able)
    async with running_stack(*workers()) as stack:
        answer = await collect(stack, with_nan())
        assert len(answer.token_ids) == NUM_TOKENS
        call = stack.generation.Generate(with_nan(logprobs=0))
        await until(lambda: stack.engine.meter.num_executor_losses > 0)
        call.cancel()
        assert stack.engine.meter.num_flagged[RowFlag.NOT_FINITE] == 0

"""What ends by itself is whole and valid, whatever happens meanwhile: forty schemas, in company and across losses."""

import asyncio
import json

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.processes.service import SchedulerService
from tests.support.json_schemas import BOUNDED, MOST_BYTES, SCHEMAS, require_valid
from tests.support.stack import Answer, Stack, collect, running_stack, token_request, until

NUM_TOGETHER = 64
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)
CUT_AT = 100  # what may go on for ever
NAMES = [[*SCHEMAS][number % len(SCHEMAS)] for number in range(NUM_TOGETHER)]


def request(number: int) -> pb.GenerateRequest:
    """Return one of the requests; the fake knows their prompts apart."""
    name = NAMES[number]
    max_tokens = MOST_BYTES if name in BOUNDED else CUT_AT
    temperature = TEMPERATURES[(number + number // len(SCHEMAS)) % len(TEMPERATURES)]
    asked = token_request(8, max_tokens, first_id=number, temperature=temperature, seed=number, logprobs=0)
    asked.sampling_params.grammar.json_schema = json.dumps(SCHEMAS[name])
    return asked


async def all_together(stack: Stack) -> list[Answer]:
    return await asyncio.gather(*(collect(stack, request(number)) for number in range(NUM_TOGETHER)))


def workers(num: int = 1) -> list[FakeWorker]:
    sizes = {"max_num_seqs": NUM_TOGETHER, "max_model_len": 2 * MOST_BYTES, "num_device_blocks": 16_384}
    return [FakeWorker(**sizes) for _ in range(num)]  # type: ignore[arg-type]


def bits(answers: list[Answer]) -> list[tuple[list[int], list[float], int]]:
    return [(answer.token_ids, answer.logprobs, answer.output.finish_reason) for answer in answers]


@pytest.fixture(scope="module")
def together() -> list[Answer]:
    """Return the answers of an undisturbed batch."""

    async def run() -> list[Answer]:
        async with running_stack(*workers()) as stack:
            return await all_together(stack)

    return asyncio.run(run())


def test_what_ends_by_itself_is_valid_and_what_is_bounded_does(together: list[Answer]) -> None:
    num_cut = 0
    for name, answer in zip(NAMES, together, strict=True):
        if answer.output.finish_reason == generation_pb2.FINISH_REASON_STOP:
            require_valid(SCHEMAS[name], answer.text)
            continue
        assert answer.output.finish_reason == generation_pb2.FINISH_REASON_LENGTH, name
        assert name not in BOUNDED, (name, answer.text)
        assert len(answer.token_ids) == CUT_AT
        num_cut += 1
    assert num_cut, "some of the endless ones are cut"


async def test_an_output_is_the_same_alone(together: list[Answer]) -> None:
    async with running_stack(*workers()) as stack:
        alone = [await collect(stack, request(number)) for number in range(len(SCHEMAS))]
    assert bits(alone) == bits(together[: len(SCHEMAS)])


async def tokens_have_come(stack: Stack, num: int) -> None:
    await until(lambda: stack.engine.meter.num_output_tokens >= num)


async def test_an_output_is_the_same_across_a_killed_executor(together: list[Answer]) -> None:
    async with running_stack(*workers(2)) as stack:
        running = asyncio.create_task(all_together(stack))
        await tokens_have_come(stack, 20 * NUM_TOGETHER)
        assert min(map(stack.num_groups_on, stack.executors)) > 0
        await stack.executors[0].kill()
        assert bits(await running) == bits(together)
        assert stack.engine.meter.num_executor_losses == 1


async def test_an_output_is_the_same_across_a_killed_engine(together: list[Answer]) -> None:
    async with running_stack(*workers(), fronts=1) as stack:
        assert stack.fronts is not None
        running = asyncio.create_task(all_together(stack))
        await tokens_have_come(stack, 20 * NUM_TOGETHER)
        assert stack.engine.requests
        await stack.service._end_tasks()
        await stack.service._ports.stop(0)
        next_engine = SchedulerService(stack.fronts.config, stack.fronts.link)
        await next_engine.start()
        try:
            assert bits(await running) == bits(together)
            all_tokens = sum(len(answer.token_ids) for answer in together)
            assert 0 < next_engine.engine.meter.num_output_tokens < all_tokens
        finally:
            await next_engine.stop("the test ends")

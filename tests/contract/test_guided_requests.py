"""Guided requests through both services: flags, losses, more grammars than slots, fleets in which some follow none."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.telemetry.metrics import scheduler_families
from tests.support.stack import Answer, Stack, collect, running_stack, token_request, until

PATTERN = "[a-d]{20,40}"


def guided(number: int, pattern: str = PATTERN, **options: Any) -> pb.GenerateRequest:
    """Return a request whose output matches a pattern."""
    request = token_request(12, 60, first_id=20 + number, temperature=1.0, seed=number, **options)
    request.sampling_params.grammar.regex = pattern
    return request


def workers(num: int = 2, **options: Any) -> list[FakeWorker]:
    return [
        FakeWorker(**{"step_ms": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}) for _ in range(num)
    ]


def text_of(answer: Answer) -> str:
    return bytes(token_id for token_id in answer.token_ids if token_id < 256).decode()


async def texts(stack: Stack, *requests: pb.GenerateRequest) -> list[str]:
    return [text_of(answer) for answer in await asyncio.gather(*(collect(stack, request) for request in requests))]


CONFLICT = (
    "output 0 at token 0: the grammar allows no token that the other rules of the request allow (min_tokens, banned or "
    "allowed tokens, no_repeat_ngram_size, logit_bias); change these rules or the grammar"
)


@pytest.mark.parametrize("fronts", [0, 1])
async def test_rules_that_leave_a_grammar_nothing_end_one_request_with_a_sentence(fronts: int) -> None:
    async with running_stack(*workers(), fronts=fronts) as stack:
        beside = asyncio.create_task(texts(stack, guided(1), guided(2)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, guided(3, banned_token_ids=[*b"abcd"]))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, CONFLICT)
        assert all(re.fullmatch(PATTERN, text) for text in await beside)
        assert stack.engine.meter.num_flagged == {RowFlag.NO_TOKEN_ALLOWED: 1}
        assert [stack.driver_of(executor).num_losses for executor in stack.executors] == [0, 0]


async def test_more_grammars_than_slots_wait_for_each_other_and_plain_requests_for_none() -> None:
    patterns = [f"[a-d]{{20,{40 + number}}}" for number in range(5)]
    async with running_stack(*workers(1, max_grammar_slots=1)) as stack:
        plain = token_request(8, 30, first_id=90)
        answers = await texts(stack, *(guided(number, pattern) for number, pattern in enumerate(patterns)), plain)
        assert all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, answers, strict=False))
        [planner] = stack.engine.fleet.planners
        slots = planner.batch.things.grammars
        assert (slots.num_in_use, slots.num_loaded, slots.num_loads) == (0, 1, 5)
        found = {
            family.name: [sample.value for sample in family.samples] for family in scheduler_families(stack.engine)
        }
        names = ("octavo_grammar_slots", "octavo_grammar_loads", "octavo_grammar_slot_waits")
        assert [found[name] for name in names] == [[0, 1, 0], [5], [4]]


async def test_a_lost_executor_changes_nothing_of_what_a_grammar_allows() -> None:
    requests = [guided(number) for number in range(6)]
    async with running_stack(*workers(1)) as stack:
        alone = await texts(stack, *requests)
    async with running_stack(*workers()) as stack:
        async with stack.together(len(requests)):
            moved = asyncio.create_task(texts(stack, *requests))
        await until(lambda: sum(len(core.batch.running) for core in stack.engine.fleet.planners) == len(requests))
        await stack.executors[0].kill()
        assert await moved == alone
        assert stack.engine.meter.num_executor_losses == 1


async def test_where_some_executors_follow_no_grammars_the_others_have_all_guided_requests() -> None:
    able, unable = FakeWorker(step_ms=1), FakeWorker(step_ms=1, max_grammar_slots=0)
    async with running_stack(unable, able) as stack:
        answers = await texts(stack, *(guided(number) for number in range(4)))
        assert all(re.fullmatch(PATTERN, text) for text in answers)
        outputs = [stack.driver_of(executor).num_output_tokens for executor in stack.executors]
        assert outputs[0] == 0 < outputs[1]


async def test_a_slow_load_ends_beside_a_plain_stream_and_on_an_idle_executor() -> None:
    async with running_stack(*workers(1, grammar_load_steps=20)) as stack:
        beside = token_request(8, 30, first_id=90)
        plain, answer = await asyncio.gather(collect(stack, beside), collect(stack, guided(1)))
        [planner] = stack.engine.fleet.planners
        assert len(plain.token_ids) == 30
        assert re.fullmatch(PATTERN, text_of(answer))
        # Nobody else runs: steps without work bring the end of the load.
        assert re.fullmatch("[xy]{3}", text_of(await collect(stack, guided(2, "[xy]{3}"))))
        assert planner.batch.things.grammars.num_loads == 2

"""Who is to blame for a loss: broken executors, requests that break executors, and the innocent beside them."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from executor_svc.fake.faults import FakeFaults, FaultPlan
from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.grammar_masks import GrammarMasks
from octavo import Client, SamplingParams
from octavo.errors import LostTooOftenError
from octavo_shared.errors import StepFailedError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import OutputMatcher
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.step import Step, StepResult
from scheduler_svc.executors import circuit_breaker
from scheduler_svc.executors import client as executor_client
from scheduler_svc.executors import driver as executor_driver
from scheduler_svc.executors.circuit_breaker import Backoff
from tests.support.stack import Stack, collect, running_stack, token_request, until

NUM_REQUESTS = 60
NUM_SLOTS = 16
POISON_LENGTH = 200


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(0.02, 0.2))


def executor(**plan: int) -> FakeWorker:
    return FakeWorker(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=512, faults=FakeFaults(FaultPlan(**plan)))


class Mortal(FakeWorker):
    """A fake executor whose steps fail that admit the poison, a prompt of POISON_LENGTH tokens."""

    def execute(self, step: Step) -> StepResult:
        if any(len(admission.token_ids) == POISON_LENGTH for admission in step.delta.admissions):
            raise StepFailedError("this prompt kills")
        return super().execute(step)


async def answer_lengths(stack: Stack, num_requests: int = NUM_REQUESTS, max_tokens: int = 12) -> list[int]:
    """Return how many tokens each of so many requests at once gets."""
    requests = [token_request(5, max_tokens, first_id=i) for i in range(num_requests)]
    answers = await asyncio.gather(*(collect(stack, request) for request in requests))
    return [len(answer.token_ids) for answer in answers]


@pytest.mark.parametrize("num_broken", [1, 3])
async def test_executors_of_which_every_step_fails_take_no_request_along(num_broken: int) -> None:
    broken = [executor(fail_step_every=1) for _ in range(num_broken)]
    async with running_stack(*broken, executor()) as stack:
        assert await answer_lengths(stack) == [12] * NUM_REQUESTS
        assert min(stack.driver_of(lost).num_losses for lost in stack.executors[:-1]) >= 1
        assert stack.driver_of(stack.executors[-1]).num_losses == 0


@pytest.mark.parametrize("num_executors", [1, 2, 4])
@pytest.mark.parametrize("num_innocent", [0, 20])
async def test_a_request_that_breaks_executors_ends_and_it_alone(num_executors: int, num_innocent: int) -> None:
    mortals = [Mortal(max_num_seqs=NUM_SLOTS, step_ms=2) for _ in range(num_executors)]
    async with running_stack(*mortals) as stack:
        async with stack.together(num_innocent):
            innocent = asyncio.create_task(answer_lengths(stack, num_innocent, max_tokens=60))
        with pytest.raises(grpc.aio.AioRpcError, match="4 times in a row") as caught:
            await collect(stack, token_request(POISON_LENGTH, 5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await innocent == [60] * num_innocent
        # Two losses in company make it a suspect. Whether the first loss of an executor counts is known after its
        # probe, and others may be lost meanwhile.
        num_losses = sum(stack.driver_of(each).num_losses for each in stack.executors)
        assert 4 <= num_losses < 6 + num_executors
        assert not stack.engine.requests


class MortalLater(FakeWorker):
    """A fake executor of which the step fails that computes the rest of a prompt of two chunks."""

    _has_begun = False

    def execute(self, step: Step) -> StepResult:
        had_begun = self._has_begun
        self._has_begun = any(len(admission.token_ids) == POISON_LENGTH for admission in step.delta.admissions)
        if had_begun:
            raise StepFailedError("the end of this prompt kills")
        return super().execute(step)


async def test_a_request_that_breaks_executors_late_ends_though_each_had_run_nothing_else() -> None:
    mortal = MortalLater(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=POISON_LENGTH // 2, step_ms=2)
    async with running_stack(mortal) as stack, asyncio.timeout(20.0):
        with pytest.raises(grpc.aio.AioRpcError, match="4 times in a row"):
            await collect(stack, token_request(POISON_LENGTH, 5))
        assert stack.driver.num_losses == 4
        await until(lambda: bool(stack.engine.fleet.planners))
        assert await answer_lengths(stack, 2) == [12, 12]


async def test_our_client_does_not_send_a_request_again_that_breaks_executors() -> None:
    async with running_stack(Mortal(step_ms=2)) as stack, Client(stack.address) as client:
        with pytest.raises(LostTooOftenError, match="4 times in a row"):
            await client.generate([1] * POISON_LENGTH, SamplingParams(max_tokens=5))
        assert stack.driver.num_losses == 4


def compute_for(duration_s: float) -> None:
    """Use the processor for so long."""
    end_s = time.thread_time() + duration_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(("pass_time", "num_losses"), [(compute_for, 0), (time.sleep, 1)])
async def test_a_step_that_takes_too_long_hangs_only_if_it_stands_still(
    pass_time: Callable[[float], None], num_losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_driver, "WATCH_INTERVAL_S", 0.2)
    monkeypatch.setattr(executor_driver, "HANG_AFTER_S", 0.5)
    faults = FakeFaults(FaultPlan(slow_step_every=20, slow_step_ms=1500), sleep=pass_time)
    async with running_stack(FakeWorker(step_ms=2, faults=faults)) as stack:
        assert await answer_lengths(stack, 1, max_tokens=25) == [25]
        assert stack.driver.num_losses == num_losses


@pytest.mark.parametrize(("pass_time", "num_losses"), [(compute_for, 0), (time.sleep, 1)])
async def test_a_step_that_waits_for_a_grammar_hangs_only_if_nothing_computes_and_the_log_says_whose_it_is(
    pass_time: Callable[[float], None],
    num_losses: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(executor_driver, "WATCH_INTERVAL_S", 0.2)
    monkeypatch.setattr(executor_driver, "HANG_AFTER_S", 0.5)
    compile_grammar, pauses_s = GrammarMasks._compile, iter([1.5])

    def compile_slowly(masks: GrammarMasks, grammar: Grammar) -> OutputMatcher:
        pass_time(next(pauses_s, 0.0))
        return compile_grammar(masks, grammar)

    monkeypatch.setattr(GrammarMasks, "_compile", compile_slowly)
    monkeypatch.setattr(
        executor_client, "WANTED", executor_client.WANTED - {Capability.GRAMMARS_READY}
    )  # else it loads
    request = token_request(5, 4)
    request.request_id = "the-guilty"
    request.sampling_params.grammar.regex = "[a-z]{4}"
    async with running_stack(FakeWorker(step_ms=2, has_grammar_threads=True)) as stack:
        assert await answer_lengths(stack, 1, max_tokens=25) == [25]
        assert len((await collect(stack, request)).token_ids) == 4
        assert stack.driver.num_losses == num_losses
    name = "hung_step_has_grammars" if num_losses else "slow_step"
    [line] = [text for text in caplog.messages if text.startswith(f"event={name} ")]
    assert "num_guided=1" in line
    assert "request_id=the-guilty" in line
    assert "event=slow_grammar grammar_slot=0 bytes=" in caplog.text


async def test_equal_grammars_that_are_slow_are_compiled_once_for_a_beginning_and_cost_no_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_grammar, compiled = GrammarMasks._compile, list[int]()

    def count(masks: GrammarMasks, grammar: Grammar) -> OutputMatcher:
        compiled.append(len(grammar.body))
        return compile_grammar(masks, grammar)

    monkeypatch.setattr(GrammarMasks, "_compile", count)
    params = SamplingParams(regex="a?" * 1000 + "b", temperature=0, max_tokens=20)
    worker = FakeWorker(step_ms=2, max_num_seqs=80, has_grammar_threads=True)
    async with running_stack(worker) as stack, Client(stack.address) as client:
        plain = asyncio.create_task(answer_lengths(stack, 1, max_tokens=200))
        answers = await asyncio.gather(*(client.generate("x", replace(params, seed=seed)) for seed in range(64)))
        assert len({answer.outputs[0].text for answer in answers}) == 1
        assert await plain == [200]
        assert stack.driver.num_losses == 0
    assert len(compiled) == 1


async def test_the_requests_of_an_executor_that_hangs_go_on_elsewhere() -> None:
    is_over = threading.Event()
    hanging = FakeWorker(step_ms=2, faults=FakeFaults(FaultPlan(hang_step_every=20), hang=is_over.wait))
    try:
        async with running_stack(hanging, FakeWorker(step_ms=2)) as stack:
            assert await answer_lengths(stack, 8, max_tokens=60) == [60] * 8
            assert stack.driver.num_losses == 1
    finally:
        is_over.set()
    assert executor_driver.HANG_AFTER_S + executor_driver.WATCH_INTERVAL_S < 2.0, "so long nobody waits at most"

"""Several executors behind one scheduler: they share the work, come and go, and may be wrong."""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import StepFailedError
from octavo_shared.grpc.membership import Membership
from octavo_shared.step_wire.step import Step, StepResult
from tests.support.patience import PATIENCE_S
from tests.support.stack import Answer, ExecutorProcess, Stack, collect, readiness, running_stack, token_request, until

NUM_TOKENS = 40
REQUESTS = [
    token_request(30, NUM_TOKENS, first_id=1),
    token_request(17, NUM_TOKENS, first_id=2, temperature=0.8, seed=11, logprobs=0),
    token_request(64, NUM_TOKENS, first_id=3, temperature=1.0, seed=12, stop=["zz", "qj"]),
    token_request(25, NUM_TOKENS, first_id=4, temperature=1.0, seed=13, logprobs=0),
]
RANKED = [
    token_request(21, 24, first_id=11, beam_width=3, n=2, logprobs=0),
    token_request(9, 30, first_id=12, temperature=1.0, seed=14, n=2, best_of=4, logprobs=0),
]
SEVERAL = token_request(12, NUM_TOKENS, first_id=13, temperature=1.0, seed=15, n=3, logprobs=0)
NUM_REQUESTS = len([*REQUESTS, *RANKED, SEVERAL])

Expected = tuple[list[Answer], list[pb.RequestFinished]]


class Directory:
    """A name server: who is behind the one name that it knows may change at any time."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.is_down = False

    async def resolve(self, name: str, port: int) -> set[str]:
        assert (name, port) == ("executors.example", 50061)
        if self.is_down:
            raise OSError("the name server does not answer")
        return set(self.addresses)

    def membership(self, *listed: str) -> Membership:
        return Membership([*listed, "dns:///executors.example:50061"], 0.01, self.resolve, forget_after_s=0.0)


def slow_worker(**options: float) -> FakeWorker:
    """A fake executor whose steps take a moment, so that a test can act between two of them."""
    return FakeWorker(step_ms=2, **options)  # type: ignore[arg-type]


def endless(first_id: int) -> pb.GenerateRequest:
    """A request that runs until the test has seen enough of it."""
    return token_request(10, 8000, first_id=first_id)


async def shut_down(stack: Stack, executor: ExecutorProcess) -> None:
    """End an executor as SIGTERM does; return when the scheduler knows."""
    await executor.servicer.drain()
    await executor.kill()
    await until(lambda: stack.driver_of(executor).planner is None)


async def finished(stack: Stack, request: pb.GenerateRequest) -> pb.RequestFinished:
    """Run a request of several outputs; return its last event. The deltas of each output add up to it."""
    token_ids: dict[int, list[int]] = {}
    last = None
    async for event in stack.generation.Generate(request):
        if event.HasField("delta"):
            token_ids.setdefault(event.delta.output_index, []).extend(event.delta.token_ids)
        elif event.HasField("finished"):
            assert last is None
            last = event.finished
    assert last is not None
    assert {output.output_index: list(output.token_ids) for output in last.outputs} == token_ids
    return last


async def all_answers(stack: Stack) -> Expected:
    """Run all kinds of requests at once."""
    answers = asyncio.gather(*(collect(stack, request) for request in REQUESTS))
    others = asyncio.gather(*(finished(stack, request) for request in [*RANKED, SEVERAL]))
    return list(await answers), list(await others)


def assert_same(actual: Expected, expected: Expected) -> None:
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert (mine.token_ids, mine.text, mine.logprobs) == (other.token_ids, other.text, other.logprobs)
    assert [last.outputs for last in actual[1]] == [last.outputs for last in expected[1]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """What an undisturbed scheduler with one executor answers."""

    async def run() -> Expected:
        async with running_stack() as stack:
            return await all_answers(stack)

    return asyncio.run(run())


# Placement -------------------------------------------------------------------------------------------


async def test_requests_are_spread_over_both_executors() -> None:
    async with running_stack(slow_worker(), slow_worker()) as stack:
        calls = [stack.generation.Generate(endless(first_id)) for first_id in range(6)]
        await until(lambda: sum(map(stack.num_groups_on, stack.executors)) == 6)
        assert min(map(stack.num_groups_on, stack.executors)) >= 2, "one has nearly everything"
        for call in calls:
            call.cancel()


async def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    async with running_stack(FakeWorker(), FakeWorker()) as stack:
        prompt = token_request(200, 1)
        await collect(stack, prompt)
        [owner] = [e for e in stack.executors if stack.driver_of(e).recent_steps.kept_ids != (0, 0)]
        for _ in range(3):
            again = await collect(stack, prompt)
            assert again.finished is not None
            assert again.finished.usage.num_cached_tokens == 192
        [other] = [e for e in stack.executors if e is not owner]
        assert stack.driver_of(other).recent_steps.kept_ids == (0, 0)


class Gated(FakeWorker):
    """A fake executor with a small cache that waits at a gate in steps after which it has two sequences."""

    def __init__(self) -> None:
        super().__init__(num_device_blocks=8, block_size_tokens=4, step_ms=2)
        self.gate = threading.Event()

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        if self.table.live.sum() == 2:
            assert self.gate.wait(PATIENCE_S), "the gate was not opened in time"
        return result


async def test_what_one_executor_preempts_runs_on_another_that_has_nothing_to_do() -> None:
    gated, other, directory = Gated(), FakeWorker(num_device_blocks=8, block_size_tokens=4), Directory()
    async with running_stack(gated, other, membership=directory.membership(), ready=False) as stack:
        first, second = stack.executors
        directory.addresses = {first.address}
        await stack.attached()
        async with stack.together(2):
            answers = asyncio.gather(*(collect(stack, token_request(4, 28, first_id=first_id)) for first_id in (1, 2)))
        await until(lambda: stack.num_groups_on(first) == 2)
        directory.addresses = {first.address, second.address}
        await until(lambda: second.address in stack.engine.drivers and stack.driver_of(second).planner is not None)
        gated.gate.set()
        assert [len(answer.token_ids) for answer in await answers] == [28, 28]
        assert stack.driver_of(second).recent_steps.kept_ids != (0, 0)


# Losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "num_steps"), [(0, 1), (1, 9), (0, 25)])
async def test_the_streams_of_a_lost_executor_go_on_on_the_other(
    victim: int, num_steps: int, expected: Expected
) -> None:
    async with running_stack(slow_worker(), slow_worker(), loses_soon=True) as stack:
        async with stack.together(NUM_REQUESTS):
            answers = asyncio.create_task(all_answers(stack))
        lost = stack.executors[victim]
        await until(lambda: stack.driver_of(lost).recent_steps.kept_ids[1] >= num_steps)
        assert stack.num_groups_on(lost) > 0
        await lost.kill()
        assert_same(await answers, expected)
        assert stack.driver_of(lost).num_losses == 1
        assert stack.driver_of(stack.executors[1 - victim]).num_losses == 0
        for core in stack.engine.fleet.planners:
            assert core.blocks.allocator.num_used_blocks == 0


async def test_a_request_that_breaks_every_executor_ends_and_the_others_do_not(expected: Expected) -> None:
    class Mortal(FakeWorker):
        def execute(self, step: Step) -> StepResult:
            if any(len(admission.token_ids) == 200 for admission in step.delta.admissions):
                raise StepFailedError("this prompt kills")
            return super().execute(step)

    async with running_stack(Mortal(step_ms=2), Mortal(step_ms=2)) as stack:
        async with stack.together(NUM_REQUESTS):
            answers = asyncio.create_task(all_answers(stack))
        with pytest.raises(grpc.aio.AioRpcError, match="4 times in a row") as caught:
            await collect(stack, token_request(200, 5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert_same(await answers, expected)
        # A loss whose verdict is still to come counts later: the other executor may be lost meanwhile.
        assert sum(stack.driver_of(executor).num_losses for executor in stack.executors) in range(4, 8)
        assert not stack.engine.requests


# What executors answer -------------------------------------------------------------------------------


def a_row_too_few(result: StepResult) -> StepResult:
    logprobs = None if result.logprobs is None else result.logprobs[:-1]
    return replace(result, sampled_token_ids=result.sampled_token_ids[:-1], logprobs=logprobs)


def token_out_of_vocabulary(result: StepResult) -> StepResult:
    return replace(result, sampled_token_ids=result.sampled_token_ids + 100_000)


def a_candidate_too_few(result: StepResult) -> StepResult:
    if result.candidate_token_ids is None or result.candidate_logprobs is None:
        return result
    ids, logprobs = result.candidate_token_ids[:-1], result.candidate_logprobs[:-1]
    return replace(result, candidate_token_ids=ids, candidate_logprobs=logprobs)


def fewer_logprobs_than_tokens(result: StepResult) -> StepResult:
    return result if result.logprobs is None else replace(result, logprobs=result.logprobs[:-1])


def no_logprobs(result: StepResult) -> StepResult:
    return result if result.logprobs is None else replace(result, logprobs=None)


class Liar(FakeWorker):
    """A fake executor that falsifies its results from a step on until one is really false."""

    def __init__(self, falsify: Callable[[StepResult], StepResult], first_step_id: int) -> None:
        super().__init__(step_ms=2)
        self.has_lied = False
        self._falsify = falsify
        self._first_step_id = first_step_id

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        if self.has_lied or step.step_id < self._first_step_id:
            return result
        false = self._falsify(result)
        self.has_lied = false is not result
        return false


@pytest.mark.parametrize(
    ("falsify", "words"),
    [
        (a_row_too_few, r"has \d+ sampled tokens for \d+ rows"),
        (token_out_of_vocabulary, r"has token ids outside 0 to 258"),
        (a_candidate_too_few, r"has \d+ beam candidates instead of \d+"),
        # Of a step with one token none are left.
        (fewer_logprobs_than_tokens, r"\d+ logprobs for \d+ sampled tokens|lacks the requested log-probabilities"),
        (no_logprobs, "lacks the requested log-probabilities"),
    ],
)
async def test_an_executor_that_answers_nonsense_is_lost_and_the_log_says_what_was_wrong(
    falsify: Callable[[StepResult], StepResult],
    words: str,
    expected: Expected,
    caplog: pytest.LogCaptureFixture,
) -> None:
    liars = [Liar(falsify, first_step_id=6), Liar(falsify, first_step_id=9)]
    async with running_stack(*liars) as stack:
        async with stack.together(NUM_REQUESTS):
            answers = asyncio.create_task(all_answers(stack))
        assert_same(await answers, expected)
        num_losses = [stack.driver_of(executor).num_losses for executor in stack.executors]
        assert num_losses == [int(liar.has_lied) for liar in liars]
        assert sum(num_losses) >= 1
    causes = [record.getMessage() for record in caplog.records if "event=no_executor" in record.getMessage()]
    # On a busy machine an attempt to attach again may time out and be logged as well.
    assert sum(re.search(words, cause) is not None for cause in causes) == sum(num_losses)


# Who belongs to the fleet -----------------------------------------------------------------------------


def described_as(**values: str) -> FakeWorker:
    """Return a fake executor that says other things of itself."""
    worker = FakeWorker()
    worker.info = replace(worker.info, **values)  # type: ignore[arg-type]
    return worker


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (
            lambda: described_as(model_id="b", model_hash="5", weights_digest=""),
            ("it serves a different model, b; the fleet"),
        ),
        (
            lambda: described_as(model_hash="5", weights_digest=""),
            "its weights or quantization of fake differ from the fleet's",
        ),
        (lambda: described_as(model_hash="5"), "its quantization of fake differs from the fleet's;"),
        (lambda: described_as(dtype="bfloat16"), "its dtype is bfloat16, the fleet's is float32;"),
        (
            lambda: FakeWorker(weights_digest="5" * 64),
            "its weights of fake differ from the fleet's: their digest is 5555555555555555,",
        ),
        (lambda: FakeWorker(max_message_bytes=2**16), "max_message_bytes"),
    ],
)
async def test_an_executor_that_cannot_serve_the_same_is_refused_with_the_reason_and_the_others_serve(
    stranger: Callable[[], FakeWorker], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory()
    async with running_stack(FakeWorker(), stranger(), membership=directory.membership(), ready=False) as stack:
        first, second = stack.executors
        directory.addresses = {first.address}
        await stack.attached()
        directory.addresses = {first.address, second.address}
        await until(lambda: words in stack.engine.last_trouble)
        answers = await asyncio.gather(*(collect(stack, request) for request in REQUESTS[:2]))
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS, NUM_TOKENS]
        refused = stack.driver_of(second)
        assert refused.planner is None
        assert refused.num_losses == 0
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert words in {executor.address: executor.last_error for executor in state.executors}[second.address]
    assert sum(words in record.getMessage() for record in caplog.records) == 1


async def test_an_executor_of_unknown_weights_joins_and_does_not_hide_those_of_the_fleet() -> None:
    directory = Directory()
    unknown = FakeWorker(weights_digest="", max_model_len=16384)  # the largest: it says what is served
    workers = [FakeWorker(weights_digest="a" * 64), unknown, FakeWorker(weights_digest="b" * 64)]
    async with running_stack(*workers, membership=directory.membership(), ready=False) as stack:
        first, second, third = [executor.address for executor in stack.executors]
        directory.addresses = {first}
        await stack.attached()
        directory.addresses = {first, second}
        await until(lambda: len(stack.engine.fleet.planners) == 2)
        directory.addresses = {first, second, third}
        trouble = "their digest is bbbbbbbbbbbbbbbb, the fleet's is aaaaaaaaaaaaaaaa"
        await until(lambda: trouble in stack.engine.last_trouble or len(stack.engine.fleet.planners) == 3)
        assert len(stack.engine.fleet.planners) == 2


@pytest.mark.parametrize("first", [0, 1])
async def test_what_is_served_does_not_depend_on_who_attaches_first(first: int) -> None:
    directory = Directory()
    large, small = FakeWorker(num_device_blocks=512, step_ms=2), FakeWorker(num_device_blocks=24, step_ms=2)
    async with running_stack(large, small, membership=directory.membership(), ready=False) as stack:
        both = [executor.address for executor in stack.executors]
        directory.addresses = {both[first]}
        await stack.attached()
        directory.addresses = set(both)
        await until(lambda: len(stack.engine.fleet.planners) == 2)
        assert (await stack.generation.GetModel(pb.GetModelRequest())).max_model_len == 8192
        endless_one = asyncio.create_task(collect(stack, token_request(10, 400, first_id=50)))
        answers = await asyncio.gather(*(collect(stack, request) for request in REQUESTS))
        assert [len(answer.token_ids) for answer in answers] == [
            len(answer.token_ids) for answer in answers if answer.finished is not None
        ]
        assert len((await endless_one).token_ids) == 400, "longer than the small one can hold"
        kept = [stack.driver_of(executor).recent_steps.kept_ids != (0, 0) for executor in stack.executors]
        assert kept == [True, True], "both are used"


async def test_a_long_request_waits_for_the_one_executor_that_can_hold_it() -> None:
    large, small = slow_worker(num_device_blocks=512), slow_worker(num_device_blocks=64)
    async with running_stack(large, small) as stack:
        await shut_down(stack, stack.executors[0])
        waiting = asyncio.create_task(collect(stack, token_request(3000, 10, first_id=1)))
        assert len((await collect(stack, token_request(10, 20, first_id=2))).token_ids) == 20
        await until(lambda: stack.engine.has_waiting)
        stack.executors[0].worker = slow_worker(num_device_blocks=512)
        await stack.executors[0].start()
        assert len((await waiting).token_ids) == 10


async def test_an_address_that_vanished_does_not_count_for_what_is_served() -> None:
    directory = Directory()
    large, small = FakeWorker(num_device_blocks=512), FakeWorker(num_device_blocks=64)
    async with running_stack(large, small, membership=directory.membership(), ready=False) as stack:
        directory.addresses = {executor.address for executor in stack.executors}
        await until(lambda: len(stack.engine.fleet.planners) == 2)
        directory.addresses = {stack.executors[1].address}
        await until(lambda: stack.engine.model is not None and stack.engine.model.max_model_len == 1024)
        with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is 1024 tokens"):
            await collect(stack, token_request(1024, 5))


async def test_a_refused_executor_does_not_take_over_while_the_right_one_restarts() -> None:
    directory = Directory()
    wrong = FakeWorker(eos_probability=0.5)
    async with running_stack(
        slow_worker(), wrong, membership=directory.membership(), ready=False, loses_soon=True
    ) as stack:
        right, stranger = stack.executors
        directory.addresses = {right.address}
        await stack.attached()
        directory.addresses = {right.address, stranger.address}
        await until(lambda: "its weights" in stack.engine.last_trouble)
        answer = asyncio.create_task(collect(stack, token_request(20, 60)))
        await until(lambda: stack.driver_of(right).recent_steps.kept_ids[1] >= 9)
        await right.kill()
        await until(lambda: f"the fleet serves fake from {right.address}" in stack.driver_of(stranger).last_trouble)
        right.worker = slow_worker()
        await right.start()
        assert len((await answer).token_ids) == 60
        assert stack.driver_of(stranger).planner is None


async def test_an_executor_that_starts_late_joins_and_one_that_shuts_down_leaves() -> None:
    async with running_stack(slow_worker(), slow_worker()) as stack:
        first, second = stack.executors
        await shut_down(stack, second)
        calls = [stack.generation.Generate(endless(first_id)) for first_id in range(2)]
        await until(lambda: stack.num_groups_on(first) == 2)
        second.worker = slow_worker()
        await second.start()
        await until(lambda: stack.driver_of(second).planner is not None)
        calls.append(stack.generation.Generate(endless(2)))
        await until(lambda: stack.num_groups_on(second) == 1)
        core = stack.driver_of(second).planner
        assert core is not None
        await until(lambda: core.load == 1)  # its prompt is computed
        calls.append(stack.generation.Generate(endless(3)))
        await until(lambda: stack.num_groups_on(second) == 2)
        await shut_down(stack, first)
        await until(lambda: stack.num_groups_on(second) == 4)
        assert stack.engine.last_trouble
        for call in calls:
            call.cancel()


async def test_the_addresses_of_a_name_join_as_they_appear() -> None:
    directory = Directory()
    async with running_stack(slow_worker(), slow_worker(), membership=directory.membership(), ready=False) as stack:
        with pytest.raises(grpc.aio.AioRpcError, match="no executor is attached"):
            await collect(stack, token_request(5, 5))
        for num_known, executor in enumerate(stack.executors, start=1):
            directory.addresses |= {executor.address}
            await until(lambda num_known=num_known: len(stack.engine.fleet.planners) == num_known)  # type: ignore[misc]
        calls = [stack.generation.Generate(endless(first_id)) for first_id in range(2)]
        await until(lambda: [stack.num_groups_on(executor) for executor in stack.executors] == [1, 1])
        for call in calls:
            call.cancel()


async def test_a_vanished_address_gets_no_new_requests_and_ends_those_it_has(expected: Expected) -> None:
    directory = Directory()
    async with running_stack(slow_worker(), slow_worker(), membership=directory.membership(), ready=False) as stack:
        staying, leaving = stack.executors
        directory.addresses = {staying.address, leaving.address}
        await until(lambda: len(stack.engine.fleet.planners) == 2)
        await stack.attached()
        driver = stack.driver_of(leaving)
        async with stack.together(NUM_REQUESTS):
            answers = asyncio.create_task(all_answers(stack))
        await until(lambda: stack.num_groups_on(leaving) > 1 and not stack.engine.has_waiting)
        directory.addresses = {staying.address}
        await until(lambda: driver.is_retired)
        running = stack.num_groups_on(leaving)
        for first_id in range(30, 36):
            await collect(stack, token_request(4, 2, first_id=first_id))
            assert leaving.address not in stack.engine.drivers or stack.num_groups_on(leaving) <= running
        assert_same(await answers, expected)
        assert driver.num_losses == 0
        await until(lambda: leaving.address not in stack.engine.drivers)
        assert len(stack.engine.fleet.planners) == 1
        assert len((await collect(stack, token_request(5, 5))).token_ids) == 5


async def test_an_address_that_comes_back_while_its_executor_still_works_takes_requests_again() -> None:
    directory = Directory()
    async with running_stack(slow_worker(), membership=directory.membership(), ready=False) as stack:
        directory.addresses = {stack.executor.address}
        await stack.attached()
        driver = stack.driver
        running = stack.generation.Generate(endless(1))
        await until(lambda: stack.num_groups_on(stack.executor) == 1)
        directory.addresses = set()
        await until(lambda: driver.is_retired)
        waiting = asyncio.create_task(collect(stack, token_request(5, 5, first_id=2)))
        await until(lambda: stack.engine.has_waiting)
        directory.addresses = {stack.executor.address}
        assert len((await waiting).token_ids) == 5
        assert stack.driver is driver
        assert driver.session is not None
        assert driver.session.epoch == 1
        running.cancel()


async def test_an_executor_that_every_other_look_up_misses_is_attached_once_and_stays() -> None:
    """Name servers with a cache each: one of them names a new executor, and for a while the other does not."""
    directory, num_missed = Directory(), 0

    async def resolve(name: str, port: int) -> set[str]:
        nonlocal num_missed
        found = await directory.resolve(name, port)
        if not found or len(stack.engine.fleet.planners) < 2:  # at first there is no stack
            return found
        num_missed += 1
        return found if num_missed % 2 else found - {late.address}

    members = Membership(["dns:///executors.example:50061"], 0.001, resolve)
    async with running_stack(FakeWorker(), FakeWorker(), membership=members, ready=False) as stack:
        _, late = stack.executors
        directory.addresses = {executor.address for executor in stack.executors}
        await until(lambda: num_missed > 20)
        driver = stack.driver_of(late)
        assert driver.session is not None
        assert (driver.session.epoch, driver.is_retired, driver.num_losses) == (1, False, 0)

        directory.addresses.remove(late.address)
        await late.kill()
        await until(lambda: late.address not in stack.engine.drivers)  # nobody answers there: one look-up is enough


async def test_a_name_that_cannot_be_looked_up_keeps_its_executors() -> None:
    directory = Directory()
    async with running_stack(membership=directory.membership(), ready=False) as stack:
        directory.addresses = {stack.executor.address}
        await stack.attached()
        directory.is_down = True
        await until(lambda: "the name server does not answer" in stack.engine.last_trouble)
        assert len((await collect(stack, token_request(5, 5))).token_ids) == 5
        directory.is_down = False
        await until(lambda: not stack.engine.last_trouble)


async def test_an_executor_with_two_addresses_is_used_once_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = Directory()
    async with running_stack(slow_worker(), membership=directory.membership(), ready=False) as stack:
        numeric = stack.executor.address
        named = numeric.replace("127.0.0.1", "localhost")
        directory.addresses = {numeric, named}
        await stack.attached()
        drivers = stack.engine.drivers
        await until(lambda: "it is the same executor as" in stack.engine.last_trouble)
        [used] = [driver for driver in drivers.values() if driver.planner is not None]
        [other] = [driver for driver in drivers.values() if driver is not used]
        assert drivers.is_complete
        assert len((await collect(stack, token_request(20, 60))).token_ids) == 60
        assert used.session is not None
        assert (used.session.epoch, used.num_losses, other.num_losses) == (1, 0, 0)

        directory.addresses = {other.address}
        await until(lambda: other.planner is not None)
        assert len((await collect(stack, token_request(20, 60))).token_ids) == 60
        assert list(drivers) == [other.address]
    assert sum("it is the same executor as" in message for message in caplog.messages) == 1


async def test_health_says_whether_an_executor_stays() -> None:
    directory = Directory()
    async with running_stack(slow_worker(), membership=directory.membership(), ready=False) as stack:

        async def told(status: int) -> None:
            while await readiness(stack) != status:
                pass

        directory.addresses = {stack.executor.address}
        await told(health_pb2.HealthCheckResponse.SERVING)
        running = stack.generation.Generate(endless(1))
        await until(lambda: stack.num_groups_on(stack.executor) == 1)
        directory.addresses = set()
        await told(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert stack.num_groups_on(stack.executor) == 1
        directory.addresses = {stack.executor.address}
        await told(health_pb2.HealthCheckResponse.SERVING)
        running.cancel()


# Preemption meets the end ----------------------------------------------------------------------------


async def test_a_stop_string_in_a_late_token_of_a_preempted_request_ends_it() -> None:
    requests = [token_request(6, 24, first_id=4 * i, temperature=1.0, seed=i, n=1 + i % 2) for i in range(1, 7)]
    async with running_stack() as stack:
        alone = [await finished(stack, request) for request in requests]
    tight = FakeWorker(num_device_blocks=32, block_size_tokens=2, max_model_len=32)
    async with running_stack(tight, steps_in_flight=3, watermark=0.0) as stack:
        for position in range(2, 16):
            stopping = [pb.GenerateRequest.FromString(request.SerializeToString()) for request in requests]
            for request, last in zip(stopping, alone, strict=True):
                request.sampling_params.stop.append(last.outputs[0].text[position : position + 2])
            async with stack.together(len(stopping)):
                answers = asyncio.gather(*(finished(stack, request) for request in stopping))
            for answer, last, request in zip(await answers, alone, stopping, strict=True):
                stop = request.sampling_params.stop[0]
                assert [o.text for o in answer.outputs] == [o.text.partition(stop)[0] for o in last.outputs]
        assert sum(stack.engine.fleet.num_preemptions.values()) > 20

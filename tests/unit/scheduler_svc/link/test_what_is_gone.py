"""Messages of the link about what is gone when they arrive: nobody else notices, and nobody waits for ever."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np

from executor_svc.fake.worker import FakeWorker
from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import OctavoServiceError, RequestAbortedError, RequestExistsError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import PoolingTask, SamplingRow
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.link.early_aborts import EarlyAborts
from scheduler_svc.link.engine_servicer import engine_state
from scheduler_svc.link.front_session import AnswerBatch, FrontSession
from scheduler_svc.link.messages import encode_failure, encode_losses, encode_pooled, encode_search_end, encode_span
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.link.remote_request import RemoteRequest
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.losses import Losses
from scheduler_svc.request.outputs import Alternatives, FinishReason, Hypothesis
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.provenance import Numerics, Progress, Span
from scheduler_svc.request.served_model import Reproducibility, ServedModel
from tests.support.driving import small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine
from tests.support.live_requests import RecordingSink
from tests.support.toy_executor import ToyExecutor, count_up

LIMITS = small_limits(max_num_seqs=8, blocks=40, max_model_len=24)
MODEL = ServedModel(FakeWorker().info, LIMITS.max_model_len, 4, None, Reproducibility((), "", ""))
NUM_TOKENS = 5
UNUSED: Any = Mock()


async def nothing(*_: object) -> None:
    """Stand for what is of no interest here."""


class Answer(RecordingSink):
    """What a client has; with a stop string nothing more is taken."""

    is_stopped = False

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        if not self.is_stopped:
            super().push(output_index, token_id, logprob, alternatives)

    def stop(self, num_tokens: int) -> None:
        """Its text holds a stop string."""
        self.is_stopped, self.reasons[0] = True, FinishReason.STOP
        del self.token_ids[0][num_tokens:]
        self.handle.finish_output(0, num_tokens, FinishReason.STOP)

    def so_far(self) -> Continuation:
        """See `AnswerSink`."""
        return Continuation((ContinuedOutput(np.array(self.token_ids[0], np.int32), self.reasons.get(0)),))


class Front:
    """A front, joined to an engine; the messages between them are carried by hand."""

    def __init__(self, name: str, engine: "Core") -> None:
        self.front = RemoteEngine(UNUSED, name, nothing, UNUSED)
        self.join(engine)

    def join(self, core: "Core") -> None:
        """Begin a session with an engine."""
        engine = core.idle.engine
        self.front._outbox.clear()
        arguments = self.front.front_id, 1, UNUSED, nothing, 1.0, core.early_aborts
        self.session = FrontSession(engine, lambda: engine_state(engine), *arguments)

    async def say(self) -> None:
        """Carry what the front says."""
        message = self.front._outbox._take()
        await self.session.take(pb.JoinRequest.FromString(message.SerializeToString()))

    async def hear(self) -> None:
        """Carry what the engine says."""
        self.session.tell_state()
        batch, self.session._batch = self.session._batch, AnswerBatch()
        await self.front.take(pb.JoinResponse.FromString(batch.message().SerializeToString()), UNUSED)
        for _ in range(3):  # whoever waits for that goes on
            await asyncio.sleep(0)

    async def submit(self, tenant: str, **fields: Any) -> tuple[Answer, "asyncio.Task[None]"]:
        """Begin to submit a request with the id r1."""
        conditions = StopConditions(NUM_TOKENS, ignore_eos=True)
        plain = EngineRequest("r1", np.array([40, 41], np.int32), SamplingRow(), conditions, tenant=tenant)
        answer = Answer()
        task = asyncio.create_task(self.front.submit(replace(plain, **fields), answer, MODEL))
        await asyncio.sleep(0)
        return answer, task


class Core:
    """An engine with an executor."""

    def __init__(self) -> None:
        self.idle = IdleEngine(["a"], LIMITS)
        self.idle.engine.fleet_model.model = MODEL
        self.early_aborts = EarlyAborts()
        self._executor = ToyExecutor(LIMITS, count_up)

    def step(self) -> None:
        """Compute a step, if there is something to do."""
        engine, [planner] = self.idle.engine, self.idle.planners
        if (sent := engine.schedule(planner, "a", 0.0)) is not None:
            engine.deliver(planner, engine.fleet.process(planner, self._executor.execute(sent.step)))


class Scene:
    """Red and blue each have a request r1 at one front, with tokens; red's is what messages are about."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.core = Core()
        self.front, self.other_front = Front("0", self.core), Front("1", self.core)
        self.tasks: list[asyncio.Task[Any]] = []
        self.newcomer: Answer | None = None
        self.second: Answer | None = None

    async def begin(self) -> None:
        """Let both have tokens."""
        for front in (self.front, self.other_front):
            await front.hear()
        self.blue, blue_task = await self.front.submit("blue")
        self.red, red_task = await self.front.submit("red", has_stop_strings=self.kind == "stop")
        self.tasks += [blue_task, red_task]
        await self.exchange(2)
        assert self.blue.token_ids
        assert self.red.token_ids
        self.live = self.core.idle.engine.requests["red", "r1"]

    async def exchange(self, num_steps: int) -> None:
        """Carry messages and compute steps."""
        for _ in range(num_steps):
            for front in (self.front, self.other_front):
                await front.say()
            self.core.step()
            for front in (self.front, self.other_front):
                await front.hear()

    async def say(self) -> None:
        """The front says something of red's request."""
        if self.kind == "stop" and self.red.ended is None:
            self.red.stop(2)
        elif self.kind == "abort":
            self.red.handle.abort(RequestAbortedError("its client left"))
        elif self.kind == "abort call":
            self.tasks.append(asyncio.create_task(self.front.front.abort_request("r1", "red")))
        elif self.kind == "submission":
            self.second, task = await self.front.submit("red")
            self.tasks.append(task)
        await asyncio.sleep(0)

    async def lose(self, gone: str) -> None:
        """Something goes."""
        engine = self.core.idle.engine
        if gone in ("request", "request, for another"):
            engine.requests.abort(self.live, OctavoServiceError("it has ended"))
        if gone == "request, for another":
            self.newcomer, task = await self.other_front.submit("red", received_at_s=monotonic_s() - 60)
            self.tasks.append(task)
            await self.other_front.say()
            engine.requests.abort(self.live, OctavoServiceError("it ends again"))
        if gone == "tenant":
            engine.set_tenants(Tenants({"blue": TenantQuota()}, serves_others=False))
        if gone == "caller" and self.tasks[-1].cancel():
            await asyncio.sleep(0)
        if gone in ("session", "engine", "engine, for good"):
            await self.front.session._abort_all()
            await self.front.front.lose("it is gone")
        if gone.startswith("engine"):
            await self.other_front.front.lose("it is gone")

    async def find(self, gone: str) -> None:
        """What comes in its place comes."""
        if gone == "engine":
            self.core = Core()
            self.other_front.join(self.core)
        if gone in ("session", "engine"):
            self.front.join(self.core)
            await self.front.hear()
        if gone == "engine, for good":
            self.front.front._absence._give_up(30.0)

    def require_all_over(self, gone: str) -> None:
        """Whatever was asked is answered, and neither side has anything left."""
        assert all(task.done() for task in self.tasks), "somebody waits for ever"
        assert not self.front.front._requests
        assert not self.front.front._abort_calls
        assert not self.front.front._num_untold
        if gone != "engine, for good":
            assert not self.core.idle.engine.requests
            assert not self.front.session._requests
            assert not self.core.idle.planners[0].batch.num_rows


MESSAGES = ("submission", "stop", "abort", "abort call")
GONE = (
    "nothing",
    "request",
    "request, for another",
    "tenant",
    "caller",
    "session",
    "engine",
    "engine, for good",
)
# When it goes.
ORDERS = ("before it is said", "before it comes", "before it is answered")


@each_row(*product(MESSAGES, GONE, ORDERS))
async def test_what_a_front_says_of_what_is_gone_concerns_nobody_else(kind: str, gone: str, order: str) -> None:
    scene = Scene(kind)
    await scene.begin()
    if order != "before it is said":
        await scene.say()
    if order == "before it is answered":
        await scene.front.say()
    await scene.lose(gone)
    if order == "before it is said":
        await scene.say()
    await scene.find(gone)
    await scene.exchange(NUM_TOKENS + 3)

    scene.require_all_over(gone)
    is_over = gone == "engine, for good"
    assert (scene.blue.error is not None) == is_over
    assert is_over or scene.blue.token_ids[0] == list(range(42, 42 + NUM_TOKENS))
    assert scene.red.ended is not None
    is_undisturbed = kind == "submission" and gone not in ("request", "request, for another", "engine, for good")
    if is_undisturbed:
        assert (scene.red.error, len(scene.red.token_ids[0])) == (None, NUM_TOKENS)
    if scene.second is not None and gone == "request" and order != "before it is answered":
        assert (scene.second.error, len(scene.second.token_ids[0])) == (None, NUM_TOKENS)
    if kind == "stop" and scene.red.error is None:
        assert scene.red.token_ids[0] == [42, 43]
    if scene.newcomer is not None:
        is_meant = kind == "abort call" and order != "before it is answered"
        assert (scene.newcomer.error is not None) == is_meant, "another request of the same id"
        assert is_meant or len(scene.newcomer.token_ids[0]) == NUM_TOKENS
    for task in scene.tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            is_second = kind == "submission" and isinstance(error, RequestExistsError)
            assert is_second or is_over or isinstance(error, RequestAbortedError), error


def tokens(message: pb.JoinResponse, numbers: list[int]) -> None:
    batch = AnswerBatch()
    for number in numbers:
        batch.add_token(
            number, 0, 0, 10 + number, -0.5, Alternatives([20 + number, 30 + number], [-0.5, -float(number)])
        )
    message.MergeFrom(batch.message())


# How a message says something of a request, by the field of it that does.
SAYS: dict[str, Callable[[pb.JoinResponse, int], object]] = {
    "accepted": lambda m, n: m.accepted.append(n),
    "prompt_logprobs": lambda m, n: m.prompt_logprobs.add(number=n, logprobs=[-float(n)]),
    "output_ends": lambda m, n: m.output_ends.add(number=n, reason=pb.END_REASON_STOP),
    "search_ends": lambda m, n: m.search_ends.append(
        encode_search_end(n, [Hypothesis(np.array([n], np.int32), np.zeros(1, np.float32), -1.0, FinishReason.STOP)])
    ),
    "ended": lambda m, n: m.ended.add(number=n, failure=encode_failure(RequestAbortedError(str(n)))),
    "span_begins": lambda m, n: m.span_begins.add(
        number=n, span=encode_span(Span(Numerics(str(n)), Progress((0,), 0)))
    ),
    "pooled_answers": lambda m, n: m.pooled_answers.append(encode_pooled(n, np.array([n], np.float32))),
    "losses": lambda m, n: m.losses.add(number=n, losses=encode_losses(Losses(n, 0, "a:1"))),
}


@each_row(*product([*SAYS, "tokens"], [[1, 2], [2, 1], [1, 2, 1]]))
async def test_what_an_engine_says_of_a_request_that_is_gone_goes_to_no_other(kind: str, numbers: list[int]) -> None:
    heard: list[str] = []
    for told in ([2], numbers):
        front, sink, message = RemoteEngine(UNUSED, "0", nothing, UNUSED), Mock(), pb.JoinResponse()
        pooling = PoolingTask.EMBED if kind == "pooled_answers" else None
        request = EngineRequest("r", np.zeros(1, np.int32), SamplingRow(), StopConditions(), pooling=pooling)
        remote = front._requests[2] = RemoteRequest(front, 2, request, sink, MODEL)
        remote.queued.set_result(None)
        if kind == "tokens":
            tokens(message, told)
        else:
            for number in told:
                SAYS[kind](message, number)
        await front.take(message, UNUSED)
        ended = [call.args[1] for call in sink.end.call_args_list]
        others = [call for call in sink.method_calls if call[0] not in ("end", "begin")]
        heard.append(repr((others, list(map(str, ended)), sink.begin.call_count, remote.losses, front.num_requests)))
    assert heard[0] == heard[1]
    assert len(front._requests) == (kind != "ended")


def test_every_field_that_says_something_of_a_request_has_a_row() -> None:
    assert {field.name for field in pb.JoinResponse.DESCRIPTOR.fields} - {"welcome", "state", "abort_answers"} == {
        *SAYS,
        "tokens",
    }


async def test_answers_to_aborts_that_nobody_waits_for_are_dropped() -> None:
    front = RemoteEngine(UNUSED, "0", nothing, UNUSED)
    waiting = asyncio.get_running_loop().create_future()
    front._abort_calls[1] = pb.AbortCall(call=1), waiting
    answers = [pb.AbortAnswer(call=call, was_live=True) for call in (7, 1, 1)]
    await front.take(pb.JoinResponse(abort_answers=answers), UNUSED)
    assert waiting.result() is True

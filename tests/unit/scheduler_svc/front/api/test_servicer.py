"""From a GenerateRequest to the events of its stream, with an engine that the test plays itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError, QueueFullError, RequestAbortedError, RequestExistsError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from scheduler_svc.front.access import identity
from scheduler_svc.front.api import generation
from scheduler_svc.front.api.generation import CLIENT_LEFT, Generation
from scheduler_svc.front.api.models import UNNAMED, Models
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_limits import FrontSettings, RequestLimits
from scheduler_svc.front.api.servicer import DEADLINE_PASSED, GenerationServicer
from scheduler_svc.front.text.text_model import ModelTokenizer, TextModel
from scheduler_svc.request.engine_client import EngineClient, TokenSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.served_model import ServedModel
from tests.support.live_requests import PlayedEngineSide
from tests.support.tokenizers import byte_level_backend, make_tokenizer

TOKENIZER = make_tokenizer(byte_level_backend())
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class PlayedEngine:
    """Queues requests for the test to play; none of their tokens comes by itself."""

    def __init__(self) -> None:
        info = SimpleNamespace(
            is_generative=True,
            max_model_len=64,
            max_cached_tokens=64,
            vocab_size=256,
            eos_token_ids=(0,),
            sampling_defaults={},
            max_encoder_tokens=0,
            decoder_start_token_ids=(),
            banned_token_ids=(),
        )
        self.model = ServedModel(cast("ExecutorInfo", info), max_model_len=64, max_num_seqs=8)
        self.submitted: asyncio.Queue[PlayedEngineSide] = asyncio.Queue()
        self.sides: list[PlayedEngineSide] = []
        self.crowded_tenant: str | None = None
        self.num_checked = 0

    async def wait_until_reachable(self) -> None:
        """It is here."""

    @contextmanager
    def checking(self, request_id: str, tenant: str) -> Iterator[ServedModel]:
        if tenant == self.crowded_tenant:
            raise QueueFullError(1, 1.0, tenant)
        self.num_checked += 1
        try:
            yield self.model
        finally:
            self.num_checked -= 1

    async def submit(self, request: EngineRequest, sink: TokenSink, checked_for: ServedModel) -> None:
        assert checked_for is self.model
        assert not self.num_checked, "it counts as checked and as submitted"
        self.sides.append(PlayedEngineSide(request, sink))
        self.submitted.put_nowait(self.sides[-1])

    @property
    def aborted(self) -> list[str]:
        """What requests were ended with."""
        return [str(error) for side in self.sides for error in side.abort_errors]

    async def abort_request(self, request_id: str, tenant: str | None) -> bool:
        return False


class PlayedTokenizer:
    """The tokenizer of whatever is served."""

    def model(self, served: ServedModel) -> TextModel:
        return TextModel(served, TOKENIZER)


def servicer_of(engine: PlayedEngine) -> GenerationServicer:
    settings = FrontSettings(max_beam_width=4, tenants=frozenset({"", "red"}))
    generation = Generation(cast("EngineClient", engine), cast("ModelTokenizer", PlayedTokenizer()), settings)
    return GenerationServicer(Models({UNNAMED: generation}))


@pytest.fixture
def engine() -> PlayedEngine:
    return PlayedEngine()


class TimedContext:
    """A call with a deadline; None: without one."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


def generate(
    engine: PlayedEngine, *, remaining_s: float | None = None, **params: Any
) -> AsyncIterator[pb.GenerateResponse]:
    servicer = servicer_of(engine)
    request = pb.GenerateRequest(request_id="a", text="Why?", sampling_params=generation_pb2.SamplingParams(**params))
    return servicer.Generate(request, cast("Context", TimedContext(remaining_s)))


async def accepted(engine: PlayedEngine, events: AsyncIterator[pb.GenerateResponse]) -> PlayedEngineSide:
    """Take the first event; return the live request behind it."""
    told = (await anext(events)).accepted
    assert (told.request_id, told.num_prompt_tokens, told.sampling_params.max_tokens) == ("a", 4, 60)
    return engine.submitted.get_nowait()


def push_text(request: PlayedEngineSide, output_index: int, text: str, logprob: float | None = None) -> None:
    for token_id in text.encode():
        request.push(output_index, token_id, logprob)


async def test_a_request_holds_a_place_in_the_queue_while_it_is_tokenized(
    engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, held = generation.tokenize, []

    def watched(request: pb.GenerateRequest, model: TextModel, limits: RequestLimits) -> object:
        held.append(engine.num_checked)
        return tokenize(request, model, limits)

    monkeypatch.setattr(generation, "tokenize", watched)
    await accepted(engine, generate(engine))
    assert held == [1]
    assert engine.num_checked == 0


@contextmanager
def held_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no check go on in its thread until the event is set."""
    tokenize, may_go_on = generation.tokenize, threading.Event()

    def held(request: pb.GenerateRequest, model: TextModel, limits: RequestLimits) -> object:
        may_go_on.wait()
        return tokenize(request, model, limits)

    monkeypatch.setattr(generation, "tokenize", held)
    try:
        yield may_go_on
    finally:
        may_go_on.set()


@pytest.mark.parametrize(("tenant", "is_aborted"), [(None, True), ("", True), ("red", False)])
async def test_an_abort_while_the_prompt_is_checked_ends_the_request(
    engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch, tenant: str | None, is_aborted: bool
) -> None:
    servicer = servicer_of(engine)
    with held_checks(monkeypatch) as may_go_on:
        request, context = pb.GenerateRequest(request_id="a", text="Why?"), cast("Context", TimedContext(None))
        events = servicer.Generate(request, context)
        answer = asyncio.ensure_future(anext(events))
        while not engine.num_checked:
            await asyncio.sleep(0)
        with pytest.raises(RequestExistsError, match="'a'"):  # the id is taken already
            await anext(
                servicer.Generate(pb.GenerateRequest(request_id="a", text="b"), cast("Context", TimedContext(None)))
            )
        token = identity._identity.set(identity.Identity(tenant))
        said = await servicer.Abort(pb.AbortRequest(request_id="a"), cast("Any", None))
        identity._identity.reset(token)
        may_go_on.set()
        assert said.was_live is is_aborted
        if is_aborted:
            with pytest.raises(RequestAbortedError, match="request 'a' was aborted"):
                await answer
            assert engine.submitted.empty()
        else:
            await answer
            await cast("Any", events).aclose()
    assert not servicer._models.choose("")._checks.abort("a")  # its check is over


async def test_a_tenant_whose_share_of_the_queue_is_full_is_refused_and_no_other(engine: PlayedEngine) -> None:
    engine.crowded_tenant = "red"
    servicer = servicer_of(engine)
    with pytest.raises(QueueFullError, match="of tenant 'red'"):
        await anext(
            servicer.Generate(pb.GenerateRequest(text="Why?", tenant="red"), cast("Context", TimedContext(None)))
        )
    await accepted(engine, generate(engine))


async def test_several_outputs_share_a_stream(engine: PlayedEngine) -> None:
    events = generate(engine, n=2, stop=["!"])
    request = await accepted(engine, events)
    push_text(request, 1, "b")
    push_text(request, 0, "a!")
    assert (await anext(events)).delta == pb.OutputDelta(output_index=1, text="b", token_ids=b"b")
    assert (await anext(events)).delta == pb.OutputDelta(output_index=0, text="a", token_ids=b"a!")
    request.live.group.num_cached_tokens = 3
    request.finish_output(1, STOP)
    first = generation_pb2.Output(
        output_index=0,
        text="a",
        token_ids=b"a!",
        finish_reason=generation_pb2.FINISH_REASON_STOP,
        stop_string="!",
    )
    second = generation_pb2.Output(
        output_index=1,
        text="b",
        token_ids=b"b",
        finish_reason=generation_pb2.FINISH_REASON_STOP,
        stop_token_id=ord("b"),
    )
    usage = generation_pb2.Usage(num_prompt_tokens=4, num_output_tokens=3, num_cached_tokens=3)
    assert (await anext(events)).finished == pb.RequestFinished(outputs=[first, second], usage=usage)
    assert [event async for event in events] == []
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("remaining_s", "cause"),
    [
        (None, CLIENT_LEFT),
        (3.5, CLIENT_LEFT),
        (0.0, DEADLINE_PASSED),
        (-0.1, DEADLINE_PASSED),
    ],
)
async def test_a_client_that_leaves_before_the_last_output_aborts_the_request(
    engine: PlayedEngine, remaining_s: float | None, cause: str
) -> None:
    events = generate(engine, n=2, remaining_s=remaining_s)
    request = await accepted(engine, events)
    push_text(request, 0, "a")
    request.finish_output(0, LENGTH)
    await anext(events)
    await cast("Any", events).aclose()
    assert engine.aborted == [cause]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"n": 9}}, "^sampling_params.n .* from 1 to 8 .max_num_seqs"),
        ({"sampling_params": {"beam_width": 5}}, "^sampling_params.beam_width .* from 2 to 4 .max_beam_width"),
        ({"tenant": "green"}, "^tenant .* one of the 2 tenants"),
        ({"priority": 1}, "^priority .* --policy fcfs"),
    ],
)
async def test_the_servers_limits_bound_the_request(fields: dict[str, Any], message: str, engine: PlayedEngine) -> None:
    events = servicer_of(engine).Generate(
        pb.GenerateRequest(text="Why?", **fields), cast("Context", TimedContext(None))
    )
    with pytest.raises(InvalidFieldError, match=message):
        await anext(events)
    assert engine.submitted.empty()


@pytest.mark.parametrize(("num_characters", "is_in_thread"), [(10, False), (20_000, True)])
async def test_only_a_small_request_is_read_on_the_event_loop(
    engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch, num_characters: int, is_in_thread: bool
) -> None:
    decode, read_by = RequestBody.decode, []

    def watched(self: RequestBody[Any], *args: Any) -> object:
        read_by.append((threading.current_thread(), engine.num_checked))
        return decode(self, *args)

    monkeypatch.setattr(RequestBody, "decode", watched)
    content = pb.GenerateRequest(text="a" * num_characters, request_id="a").SerializeToString()
    events = servicer_of(engine).Generate(RequestBody(content, pb.GenerateRequest), cast("Context", TimedContext(None)))
    if is_in_thread:
        with pytest.raises(InvalidFieldError, match=r"^prompt is too long: it has 20000 "):
            await anext(events)
    else:
        await anext(events)
    [(thread, num_waiting)] = read_by
    assert (thread is not threading.main_thread()) is is_in_thread
    assert num_waiting == 1, "who is being read counts as waiting"
    assert engine.num_checked == 0

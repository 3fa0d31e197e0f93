"""The client goes on with an answer whose call was cut: at the same scheduler or another one, to the same end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import DeadlineError, NotConnectedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Delta, Event, FailedRequest, Finished, PromptLogprobs
from octavo_shared.grpc import grpc_server
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, running_stack, until

PROMPT = [40, 41, 42, 43, 44]
NUM_TOKENS = 40
# Of a step: a call is cut long before its answer is there, as both need turns of one event loop.
SLOW_MS = 5

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "log-probabilities": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "three outputs": {"temperature": 1.0, "seed": 3, "n": 3},
    "stop strings": {"temperature": 1.0, "seed": 4, "n": 2, "stop": ["a", "e"]},
    "best of three": {"temperature": 1.0, "seed": 5, "best_of": 3, "n": 2},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 0},
}


class Cutter:
    """A TCP proxy before a scheduler, whose connections a test breaks."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.refuses = False  # connections are closed at once, as by a load balancer with nobody behind it
        self.num_connections = 0

    async def __aenter__(self) -> "Cutter":
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def listen(self) -> None:
        """Take connections, at the same port as before."""
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def lead_to(self, address: str) -> None:
        """Lead new connections to another scheduler."""
        self._port = int(address.rpartition(":")[2])

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        """Take no more connections, and break those that are there."""
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.refuses:
            writer.transport.abort()
            return
        upstream_reader, upstream = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, upstream}
        try:
            await asyncio.gather(self._carry(reader, upstream), self._carry(upstream_reader, writer))
        finally:
            self._writers -= {writer, upstream}
            writer.transport.abort()
            upstream.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@dataclass
class Received:
    """What came of one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        """The last event."""
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]

    def num_tokens(self) -> int:
        """How many tokens the deltas brought."""
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Delta))

    def check(self, whole: Finished) -> None:
        """It is what an uncut call brings: one Accepted, each token once, one Finished, all equal to the bit."""
        kinds = [type(event) for event in self.events]
        assert (kinds[0], kinds.count(Accepted)) == (Accepted, 1)
        assert (kinds[-1], kinds.count(Finished)) == (Finished, 1)
        last = self.finished
        assert (last.outputs, last.prompt_logprobs) == (whole.outputs, whole.prompt_logprobs)
        assert last.usage.num_output_tokens == whole.usage.num_output_tokens
        for output in last.outputs:
            deltas = [e for e in self.events if isinstance(e, Delta) and e.output_index == output.output_index]
            assert "".join(delta.text for delta in deltas) == output.text
            assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == output.token_ids
            assert tuple(logprob for delta in deltas for logprob in delta.logprobs) == output.logprobs
        prompt = [e for e in self.events if isinstance(e, PromptLogprobs)]
        if last.prompt_logprobs is not None:
            assert tuple(x for part in prompt for x in part.logprobs) == last.prompt_logprobs.logprobs


@asynccontextmanager
async def served(step_ms: float = 1) -> AsyncIterator[tuple[Stack, Cutter]]:
    """Run a scheduler behind a proxy."""
    async with running_stack(FakeWorker(step_ms=step_ms)) as stack, Cutter(stack.address) as cutter:
        yield stack, cutter


async def take_cut(cutter: Cutter, events: AsyncIterator[Event], cuts: Sequence[int] = (0, 8, 16)) -> "Received":
    """Take an answer whose connection is cut as soon as so many tokens have come."""
    received, left = Received(), list(cuts)
    async for event in events:
        received.events.append(event)
        if left and received.num_tokens() >= left[0] and not isinstance(event, Finished):
            del left[0]
            cutter.cut()
    return received


async def whole_answer(client: Client, prompt: Any = PROMPT, **params: Any) -> Finished:
    """Return the last event of a call that is not cut."""
    events = [event async for event in client.stream(prompt, max_tokens=NUM_TOKENS, **params)]
    assert isinstance(events[-1], Finished)
    assert events[-1].num_resumptions == 0
    return events[-1]


def record_requests(client: Client, wrap: Callable[[Any], Any] = lambda call: call) -> list[pb.GenerateRequest]:
    """Return a list that gets every message which the client sends by Generate; `wrap` may change the calls."""
    sent: list[pb.GenerateRequest] = []
    make_stub = client._stub

    def stub(endpoint: Any) -> Any:
        real = make_stub(endpoint)

        class Recording:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def Generate(self, request: pb.GenerateRequest, **arguments: Any) -> Any:  # noqa: N802
                sent.append(request)
                return wrap(real.Generate(request, **arguments))

        return Recording()

    client._stub = stub  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("prompt", [PROMPT, "Once upon a time"], ids=["token ids", "text"])
async def test_a_call_that_is_cut_again_and_again_goes_on_to_the_same_end(prompt: Any, params: dict[str, Any]) -> None:
    async with served(SLOW_MS) as (stack, cutter), Client(cutter.address) as client:
        if params.get("stop"):
            texts = [output.text for output in (await whole_answer(client, prompt, **{**params, "stop": []})).outputs]
            params = {**params, "stop": [texts[0][25:28], texts[1][20:23]]}
        whole = await whole_answer(client, prompt, **params)
        events = client.stream(prompt, max_tokens=NUM_TOKENS, **params)
        received = await take_cut(cutter, events)
        received.check(whole)
        assert received.finished.num_resumptions >= 1
        await until(lambda: not stack.engine.requests)


async def test_a_seed_that_the_scheduler_chose_is_kept() -> None:
    async with served(SLOW_MS) as (_, cutter), Client(cutter.address) as client:
        sent = record_requests(client)
        received = await take_cut(cutter, client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, n=3))
        assert received.finished.num_resumptions >= 1
        seeds = {request.sampling_params.seed for request in sent[1:]}
        assert len(seeds) == 1
        received.check(await whole_answer(client, temperature=1.0, n=3, seed=seeds.pop()))


async def test_each_continuation_says_how_many_there_were() -> None:
    async with served(SLOW_MS) as (_, cutter), Client(cutter.address) as client:
        sent = record_requests(client)
        events = client.stream("Once", max_tokens=NUM_TOKENS, temperature=0, tenant="red", request_id="mine")
        received = await take_cut(cutter, events)
    assert received.finished.num_resumptions >= 1
    assert [request.continuation.attempt for request in sent] == list(range(len(sent)))
    assert {(request.request_id, request.tenant) for request in sent} == {("mine", "red")}
    assert [request.WhichOneof("prompt") for request in sent] == ["text"] + ["token_ids"] * (len(sent) - 1)


async def test_generate_tells_how_often_it_was_cut() -> None:
    async with served(SLOW_MS) as (stack, cutter), Client(cutter.address) as client:
        running = asyncio.create_task(client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0))
        await until(lambda: stack.engine.meter.num_output_tokens >= 3)
        cutter.cut()
        output = await running
        assert output.num_resumptions >= 1
        assert output.outputs == (await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0)).outputs
        with pytest.raises(UnavailableError, match="gone"):
            _ = FailedRequest(PROMPT, UnavailableError("gone")).num_resumptions


@pytest.mark.parametrize("include_text", [True, False])
async def test_many_requests_on_one_stream_go_on(include_text: bool) -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client:
        prompts = [[50 + number, 41, 42] for number in range(6)]
        options: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, "max_tokens": NUM_TOKENS}
        brought = {number: Received() for number in range(6)}
        uncut = client.stream_many(prompts, include_text=include_text, **options)
        whole = {index: event async for index, event in uncut if isinstance(event, Finished)}
        num_events = 0
        held = AsyncExitStack()
        await held.enter_async_context(stack.together(4))
        released = asyncio.create_task(held.aclose())
        async for index, event in client.stream_many(prompts, include_text=include_text, max_in_flight=4, **options):
            assert not isinstance(event, FailedRequest), event.error
            brought[index].events.append(event)
            num_events += 1
            if num_events in (2, 20, 60):
                cutter.cut()
        await released
        for number, received in brought.items():
            received.check(whole[number])
        assert sum(received.finished.num_resumptions for received in brought.values()) >= 4
        await until(lambda: not stack.engine.requests)


async def close_proxy(stack: Stack, cutter: Cutter) -> None:
    """Let nobody reach a scheduler any more."""
    del stack
    cutter.close()


async def drain(stack: Stack, cutter: Cutter) -> None:
    """End a scheduler in order: it drains for a second, and then its streams end."""
    del cutter
    await stack.service.stop("the test says so")


@pytest.mark.parametrize("end", [close_proxy, drain], ids=["cut off", "drained"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["a call", "one stream for many"])
async def test_another_address_goes_on_and_takes_new_requests(
    end: Callable[[Stack, Cutter], Coroutine[None, None, None]], is_stream: bool
) -> None:
    async with (
        served(step_ms=50) as (first, cutter),  # slow: it does not finish within the second that it has
        running_stack(FakeWorker(step_ms=1)) as second,
        Client([cutter.address, second.address]) as client,
    ):
        assert client.address == cutter.address
        received = Received()
        ending: asyncio.Task[None] | None = None
        options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
        stream = client.stream_many([PROMPT], **options) if is_stream else client.stream(PROMPT, **options)
        async for item in stream:
            event = item[1] if isinstance(item, tuple) else item
            assert not isinstance(event, FailedRequest), event.error
            received.events.append(event)
            if ending is None and isinstance(event, Delta):
                ending = asyncio.create_task(end(first, cutter))
        assert ending is not None
        await ending
        assert client.address == second.address
        assert received.finished.num_resumptions == 1
        received.check(await whole_answer(client, temperature=0.0))


async def test_many_calls_that_fail_at_once_move_on_once() -> None:
    async with (
        served() as (_, cutter),
        running_stack(FakeWorker(step_ms=1)) as second,
        Client([cutter.address, second.address, "127.0.0.1:1"]) as client,
    ):
        whole = [await whole_answer(client, [60 + number, 41], temperature=0.0) for number in range(5)]
        received = [Received() for _ in whole]

        async def take(number: int) -> None:
            async for event in client.stream([60 + number, 41], max_tokens=NUM_TOKENS, temperature=0.0):
                received[number].events.append(event)

        running = [asyncio.create_task(take(number)) for number in range(5)]
        await until(lambda: all(each.num_tokens() for each in received))
        cutter.close()
        await asyncio.gather(*running)
        assert client.address == second.address
        for each, finished in zip(received, whole, strict=True):
            each.check(finished)


async def test_a_request_that_nobody_has_accepted_goes_to_each_address_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    async with running_stack() as stack:
        async with Client([nobody, stack.address]) as client:
            assert (await client.generate(PROMPT, max_tokens=3)).num_resumptions == 0
            assert client.address == stack.address
        async with Client([nobody, stack.address]) as client:
            assert (await client.tokenize("Hi")).token_ids
        async with Client([nobody, stack.address]) as client:
            assert await client.abort("nobody") is False
        async with Client([nobody, stack.address]) as client:
            await client.wait_until_ready(timeout_s=PATIENCE_S)
            assert client.address == stack.address
    async with Client([nobody, "127.0.0.1:1"]) as client:
        sent = record_requests(client)
        with pytest.raises(NotConnectedError):
            await client.generate(PROMPT, max_tokens=3)
        assert len(sent) == 2


async def test_an_abort_reaches_the_scheduler_that_has_the_request() -> None:
    async with (
        running_stack(FakeWorker(step_ms=1)) as first,
        running_stack(FakeWorker(step_ms=1)) as second,
        Client(second.address) as other,
        Client([first.address, second.address]) as client,
    ):
        running = asyncio.create_task(other.generate(PROMPT, max_tokens=8000, ignore_eos=True, request_id="mine"))
        await until(lambda: second.engine.requests)
        assert await client.abort("mine") is True
        assert await client.abort("mine") is False
        await asyncio.gather(running, return_exceptions=True)


class EndsCut:
    """A call whose connection breaks between its last event and its status."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        async for response in self._call:
            yield response
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "closed")

    def cancel(self) -> None:
        """End it."""
        self._call.cancel()


async def test_an_answer_that_is_whole_ends_once_though_its_call_is_cut_then() -> None:
    async with served() as (_, cutter), Client(cutter.address) as client:
        sent = record_requests(client, EndsCut)
        events = [event async for event in client.stream(PROMPT, max_tokens=3, temperature=0)]
        assert [type(event) for event in events].count(Finished) == 1
        assert len(sent) == 1


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
async def test_it_tries_for_a_limited_time(timeout_s: float) -> None:
    async with served() as (stack, cutter), Client(cutter.address, resume_timeout_s=timeout_s) as client:
        with pytest.raises(UnavailableError, match=r"lost|no scheduler is reachable") as error:
            async for event in client.stream(PROMPT, max_tokens=8000, ignore_eos=True):
                if isinstance(event, Delta):
                    cutter.close()
        assert ("no scheduler resumed it within 0.3 s" in str(error.value)) == bool(timeout_s)
        await until(lambda: not stack.engine.requests)


async def test_many_requests_are_tried_for_a_limited_time() -> None:
    async with served() as (stack, cutter), Client(cutter.address, resume_timeout_s=0.3) as client:
        with pytest.raises(UnavailableError, match=r"no scheduler resumed it within 0\.3 s"):
            async for _, event in client.stream_many([PROMPT], max_tokens=8000, ignore_eos=True):
                if isinstance(event, Delta):
                    cutter.close()
        await until(lambda: not stack.engine.requests)


async def test_a_scheduler_that_is_back_at_its_address_goes_on_though_connections_were_closed_at_once() -> None:
    async with served() as (_, cutter), Client(cutter.address) as client:
        whole = await whole_answer(client, temperature=0.0)
        received = Received()
        async with aclosing(client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)) as events:
            while received.num_tokens() < 3:
                received.events.append(await anext(events))
            cutter.refuses, before = True, cutter.num_connections
            cutter.cut()
            rest = asyncio.create_task(take_all(events, received))
            await until(lambda: cutter.num_connections >= before + 2)
            cutter.refuses = False
            await rest
        received.check(whole)


async def take_all(events: AsyncIterator[Event], received: Received) -> None:
    """Take what is left of an answer."""
    async for event in events:
        received.events.append(event)


def tasks_of_clients() -> list[str]:
    """Return the tasks that run code of a client's calls."""
    return [name for task in asyncio.all_tasks() if "GenerationCalls" in (name := repr(task.get_coro()))]


async def test_whoever_is_cancelled_while_it_pauses_leaves_nothing_behind() -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client:
        received = Received()
        events = client.stream(PROMPT, max_tokens=8000, ignore_eos=True)
        running = asyncio.create_task(take_all(events, received))
        await until(lambda: received.num_tokens())
        cutter.close()
        await until(lambda: not stack.engine.requests)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not tasks_of_clients())
        await cutter.listen()
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        assert len((await client.generate(PROMPT, max_tokens=3)).outputs[0].token_ids) == 3
        assert not stack.engine.requests


async def test_a_time_limit_is_of_the_whole_answer() -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client:
        begin_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match="the answer was not complete within the time limit"):
            async for event in client.stream(PROMPT, max_tokens=8000, timeout_s=1.0):
                if isinstance(event, Delta):
                    cutter.close()
        assert asyncio.get_running_loop().time() - begin_s >= 1.0
        await until(lambda: not stack.engine.requests)
        await cutter.listen()
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        with pytest.raises(DeadlineError, match="the answer was not complete within the time limit"):
            async for event in client.stream(PROMPT, max_tokens=8000, timeout_s=1.0):
                if isinstance(event, Delta):
                    cutter.cut()
        await until(lambda: not stack.engine.requests)


async def test_a_refused_continuation_says_what_was_lost_and_why_it_cannot_go_on() -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client, Client(stack.address) as other:
        sent = record_requests(client)
        received = Received()
        events = client.stream(PROMPT, max_tokens=8000, ignore_eos=True, request_id="mine")
        running = asyncio.create_task(take_all(events, received))
        await until(lambda: received.num_tokens() >= 3)
        cutter.close()
        await until(lambda: not stack.engine.requests)
        # Somebody else goes on with it, and says that it is a later attempt.
        stolen = pb.GenerateRequest()
        stolen.CopyFrom(sent[0])
        stolen.sampling_params.seed = 1
        stolen.continuation.attempt = 1000
        call = other._stub(other._endpoint()).Generate(stolen)
        await until(lambda: stack.engine.requests)
        await cutter.listen()
        with pytest.raises(
            UnavailableError, match=r"cut off after [\d,]+ tokens, cannot be resumed: request_id 'mine' is in use"
        ):
            await running
        call.cancel()


async def _all_calls(client: Client) -> list[Any]:
    """Make a call of each kind."""

    async def run_many() -> Event | FailedRequest:
        return [event async for _, event in client.stream_many([PROMPT], max_tokens=3)][-1]

    return [*await asyncio.gather(client.generate(PROMPT, max_tokens=3), client.get_model(), run_many())]


@pytest.mark.parametrize("how", ["draining", "lost"])
async def test_a_request_that_a_scheduler_refuses_as_it_goes_is_accepted_by_the_next_one_at_its_address(
    how: str,
) -> None:
    """As behind the name of a Service: one address, and others behind it than before."""
    async with (
        running_stack() as first,
        running_stack() as second,
        Cutter(first.address) as cutter,
        Client(cutter.address) as client,
    ):
        await client.get_model()
        if how == "draining":
            await first.engine.start_draining()
        else:
            cutter.close()
        sent = record_requests(client)
        running = asyncio.create_task(_all_calls(client))
        await until(lambda: len(sent) > 1)  # it was refused, and sent again
        cutter.lead_to(second.address)
        if how == "draining":
            cutter.cut()
        else:
            await cutter.listen()
        [output, _, last] = await running
        assert output.num_resumptions == 0
        assert isinstance(last, Finished)


async def test_a_request_that_a_scheduler_refuses_as_it_goes_is_sent_again_for_a_limited_time() -> None:
    async with running_stack() as stack, Client(stack.address, resume_timeout_s=0.3) as client:
        await stack.engine.start_draining()
        sent = record_requests(client)
        with pytest.raises(UnavailableError, match=r"draining.*, and no scheduler accepted it within 0\.3 s"):
            await client.generate(PROMPT, max_tokens=3)
        assert len(sent) > 2
        with pytest.raises(DeadlineError):
            await client.generate(PROMPT, max_tokens=3, timeout_s=0.1)


async def test_what_has_no_executor_yet_is_refused_at_once() -> None:
    async with running_stack(None, ready=False) as stack, Client(stack.address) as client:
        await stack.executor.kill()
        await until(lambda: not stack.engine.fleet.planners)
        sent = record_requests(client)
        with pytest.raises(UnavailableError, match="no executor"):
            await client.generate(PROMPT, max_tokens=3)
        assert len(sent) == 1


async def test_a_connection_has_an_age_and_no_call_is_cut_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look a name up with each connection, so a front that comes gets its share of those that are there."""
    monkeypatch.setattr(grpc_server, "CLIENT_CONNECTION_AGE_MS", 300)
    async with (
        running_stack(FakeWorker(step_ms=SLOW_MS)) as stack,
        Cutter(stack.address) as cutter,
        Client(cutter.address, resume_timeout_s=0) as client,  # it hides nothing
    ):
        long = asyncio.create_task(client.generate(PROMPT, max_tokens=400, ignore_eos=True))
        while cutter.num_connections < 4:
            await client.generate([60, 61], max_tokens=3)
            assert not long.done(), "its connection is the only one, or was cut"
        assert (await long).num_resumptions == 0

"""However a request ends, it is counted once and has one line in the log."""

import logging
from collections.abc import Awaitable, Callable

import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.process.events import Event
from tests.monitoring.live import scrape, value_of
from tests.support.stack import Stack, collect, running_stack, token_request, until

ID = "the-request"
End = Callable[[Stack], Awaitable[object]]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Return the fields of every line that says that a request has ended."""
    events = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    return [dict(event.fields) for event in events if event.name == "request_ended"]


async def start(stack: Stack) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
    """Start a long request, and return its call once a token has come."""
    call = stack.generation.Generate(token_request(20, 5000, request_id=ID))
    async for event in call:
        if event.HasField("delta"):
            return call
    raise AssertionError("the stream has no delta")


async def finishes(stack: Stack) -> None:
    await collect(stack, token_request(20, 10, request_id=ID))


async def finishes_with_several_outputs(stack: Stack) -> None:
    call = stack.generation.Generate(token_request(20, 10, request_id=ID, n=3, temperature=1.0, seed=1))
    assert len([event async for event in call][-1].finished.outputs) == 3


async def finishes_with_beams(stack: Stack) -> None:
    call = stack.generation.Generate(token_request(20, 10, request_id=ID, n=2, beam_width=3))
    assert len([event async for event in call][-1].finished.outputs) == 2


async def is_aborted(stack: Stack) -> None:
    await start(stack)
    await stack.generation.Abort(pb.AbortRequest(request_id=ID))


async def is_cancelled(stack: Stack) -> None:
    (await start(stack)).cancel()


async def misses_its_deadline(stack: Stack) -> None:
    call = stack.generation.Generate(token_request(20, 5000, request_id=ID), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError):
        [_ async for _ in call]


async def is_ended_by_the_shutdown(stack: Stack) -> None:
    await start(stack)
    await stack.engine.drain(0.01)


@pytest.mark.parametrize(
    ("end", "how", "num_tokens"),
    [
        (finishes, {"finish_reason": "length"}, 10),
        (finishes_with_several_outputs, {"finish_reason": "length"}, 30),
        (finishes_with_beams, {"finish_reason": "length"}, 20),
        (is_aborted, {"error": "ABORTED"}, None),
        (is_cancelled, {"error": "ABORTED"}, None),
        (misses_its_deadline, {"error": "ABORTED"}, None),
        (is_ended_by_the_shutdown, {"error": "UNAVAILABLE"}, None),
    ],
)
async def test_an_end_counts_once(
    end: End, how: dict[str, str], num_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_stack(FakeWorker(step_ms=1.0), metrics_listen="127.0.0.1:0") as stack:
        await end(stack)
        await stack.engine.requests.wait_until_all_ended()
        page = await scrape(stack.service.other_addresses["metrics"])

    [line] = lines(caplog)
    assert line["request_id"] == ID
    assert how.items() <= line.items()
    assert len({"finish_reason", "error"} & set(line)) == 1
    finished = sum(
        value_of(page, "octavo_requests_finished_total", finish_reason=reason) for reason in ("stop", "length")
    )
    codes = ("ABORTED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
    failed = [value_of(page, "octavo_request_errors_total", code=code) for code in codes]
    assert finished + sum(failed) == 1
    assert finished == ("finish_reason" in line)
    if num_tokens is not None:
        assert line["num_output_tokens"] == num_tokens
        assert value_of(page, "octavo_output_tokens_total") == num_tokens
    assert value_of(page, "octavo_time_to_first_token_seconds_count") == 1


async def test_a_refused_request_has_no_line_and_counts_as_a_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_stack(metrics_listen="127.0.0.1:0") as stack:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(stack, token_request(20, 10, temperature=-1.0))
        page = await scrape(stack.service.other_addresses["metrics"])

    assert not lines(caplog)
    assert value_of(page, "grpc_server_handled_total", grpc_code="INVALID_ARGUMENT") == 1


async def test_a_request_that_outlives_an_executor_is_recovered_and_the_loss_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pair = FakeWorker(step_ms=1.0), FakeWorker(step_ms=1.0)
    async with running_stack(*pair, metrics_listen="127.0.0.1:0", loses_soon=True) as stack:
        call = stack.generation.Generate(token_request(20, 300, request_id=ID))
        await until(lambda: any(stack.num_groups_on(executor) for executor in stack.executors))
        await until(lambda: stack.engine.requests["", ID].num_output_tokens)
        [lost] = [executor for executor in stack.executors if stack.num_groups_on(executor)]
        await lost.kill()
        events = [event async for event in call]
        page = await scrape(stack.service.other_addresses["metrics"])

    assert len(events[-1].finished.outputs[0].token_ids) == 300
    assert value_of(page, "octavo_requests_recovered_total") == 1
    assert value_of(page, "octavo_executor_losses_total") == 1
    assert value_of(page, "octavo_output_tokens_total") == 300
    assert value_of(page, "octavo_executors", state="connecting") == 1
    assert f'octavo_requests_running{{executor="{lost.address}"}}' not in page
    assert [line["finish_reason"] for line in lines(caplog)] == ["length"]

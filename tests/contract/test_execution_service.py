"""ExecutionService beside the steps: loading, attaching, leases, health, the batch table."""

import asyncio
import hashlib
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor_svc.service.servicer import SERVICE_NAME
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.grpc.grpc_server import LIVENESS, READINESS
from tests.contract.execution_harness import Executor, first_step, refusal, steps

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# Before the model is loaded


async def test_while_the_model_loads_the_process_lives_and_is_not_ready(loading_executor: Executor) -> None:
    assert await loading_executor.health(LIVENESS) == SERVING
    assert [await loading_executor.health(name) for name in (READINESS, "", SERVICE_NAME)] == [NOT_SERVING] * 3
    code, details = await refusal(loading_executor.stub.GetExecutorInfo(pb.GetExecutorInfoRequest()))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the model is loading")


async def test_once_loaded_it_is_ready_and_describes_itself(executor: Executor) -> None:
    assert [await executor.health(name) for name in (LIVENESS, READINESS, "", SERVICE_NAME)] == [SERVING] * 4
    info = await executor.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())
    assert (info.model_id, info.block_size_tokens, info.min_wire_version) == ("fake", 4, 1)


async def test_reflection_lists_every_service(executor: Executor) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(executor.channel)  # type: ignore[no-untyped-call]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = [response async for response in stub.ServerReflectionInfo(iter([request]))]
    assert {service.name for service in response.list_services_response.service} == {
        "octavo.execution.v1.ExecutionService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_tokenizer_files_come_with_their_hash(executor: Executor) -> None:
    files = (await executor.stub.GetTokenizer(pb.GetTokenizerRequest())).files
    assert "tokenizer.json" in {file.name for file in files}
    assert all(file.sha256 == hashlib.sha256(file.content).hexdigest() for file in files)


# Attach, leases, fencing


async def test_attach_gives_rising_epochs_and_the_common_wire_version(executor: Executor) -> None:
    request = pb.AttachRequest(scheduler_id="a", lease_ms=1000, min_wire_version=1, max_wire_version=9)
    first, second = await executor.stub.Attach(request), await executor.stub.Attach(request)
    assert (first.wire_version, second.epoch) == (2, first.epoch + 1)
    assert first.info.instance_id == executor.worker.info.instance_id


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.AttachRequest(lease_ms=1000, min_wire_version=1, max_wire_version=1), "scheduler_id is empty"),
        (
            pb.AttachRequest(scheduler_id="a", lease_ms=99, max_wire_version=1),
            "lease_ms is 99; it must be 100 to 600000",
        ),
        (pb.AttachRequest(scheduler_id="a", lease_ms=600_001, max_wire_version=1), "lease_ms is 600001"),
        (
            pb.AttachRequest(scheduler_id="a", lease_ms=1000, min_wire_version=3, max_wire_version=4),
            "max_wire_version is 3 to 4 (the range); it must be a range that overlaps 1 to 2",
        ),
        (
            pb.AttachRequest(scheduler_id="a", lease_ms=1000, max_wire_version=2, keep=True),
            "keep is True; it must be false, unless capabilities has CAPABILITY_NAMED_BLOCKS",
        ),
    ],
)
async def test_a_wrong_attach_is_refused_and_changes_nothing(
    executor: Executor, request_: pb.AttachRequest, words: str
) -> None:
    code, details = await refusal(executor.stub.Attach(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details
    assert await executor.attach() == 1


async def test_another_scheduler_waits_for_the_lease_to_run_out(executor: Executor) -> None:
    epoch = await executor.attach("a", lease_ms=10_000)
    executor.now += 8
    await executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch))
    executor.now += 8
    code, details = await refusal(executor.attach("b"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "scheduler 'a' holds the lease for another 2.0 s" in details
    executor.now += 2
    assert await executor.attach("b") == epoch + 1


async def test_a_detached_executor_takes_another_scheduler_at_once(executor: Executor) -> None:
    epoch = await executor.attach("a", lease_ms=60_000)
    await executor.stub.Detach(pb.DetachRequest(epoch=epoch))
    assert await executor.attach("b") == epoch + 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await executor.stub.Detach(pb.DetachRequest(epoch=epoch))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_steps_renew_the_lease_too(executor: Executor) -> None:
    epoch = await executor.attach("a", lease_ms=10_000)
    executor.now += 8
    await executor.stub.ExecuteModel(first_step(epoch))
    executor.now += 8
    code, _ = await refusal(executor.attach("b"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


async def test_every_call_of_an_older_epoch_is_fenced(executor: Executor) -> None:
    old = await executor.attach()
    await executor.attach()
    for call in (
        executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=old)),
        executor.stub.ExecuteModel(first_step(old)),
        executor.open_stream(old),
    ):
        code, _ = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert not executor.worker.table.live.any()


async def test_a_caller_of_an_instance_that_is_gone_is_fenced(executor: Executor) -> None:
    epoch = await executor.attach()
    for call in (
        executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch, instance_id="another")),
        executor.stub.Detach(pb.DetachRequest(epoch=epoch, instance_id="another")),
    ):
        code, details = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details.startswith("instance another has exited, and its cache is lost; this is ")
    own = executor.worker.info.instance_id
    await executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch, instance_id=own))


async def test_attach_ends_the_open_stream(executor: Executor) -> None:
    stream = await executor.open_stream(await executor.attach())
    await executor.attach()
    code, details = await refusal(stream.read())
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "epoch 1 ended: scheduler 'a' attached")


async def test_attach_waits_for_the_running_step_and_drops_the_queued_ones(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    executor.gate.close()
    for step in steps(epoch, 1, 3):
        await stream.send(step)
    await executor.gate.wait_entered()
    attaching = asyncio.ensure_future(executor.attach())
    await refusal(stream.read())  # the attach has begun: it ended the stream
    assert not attaching.done()
    executor.gate.open()
    new_epoch = await attaching
    assert not executor.gate.entered.acquire(blocking=False), "a queued step of the old epoch ran"
    table = await executor.stub.GetBatchTable(pb.GetBatchTableRequest())
    assert (table.epoch, table.last_executed_step_id, len(table.rows)) == (new_epoch, 0, 0)


async def test_the_lease_counts_from_the_answer_of_a_long_attach(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    executor.gate.close()
    await stream.send(first_step(epoch))
    await executor.gate.wait_entered()
    attaching = asyncio.ensure_future(executor.attach("a", lease_ms=10_000))
    await refusal(stream.read())  # the attach has begun: it ended the stream
    executor.now += 8
    executor.gate.open()
    await attaching
    executor.now += 8
    code, _ = await refusal(executor.attach("b"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


async def heartbeat_forever(executor: Executor, epoch: int) -> None:
    while True:
        await executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch))


async def test_an_attach_that_was_overtaken_while_it_waited_is_fenced(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    executor.gate.close()
    await stream.send(first_step(epoch))
    await executor.gate.wait_entered()
    overtaken = asyncio.ensure_future(executor.attach())
    await refusal(stream.read())
    last = asyncio.ensure_future(executor.attach())
    await refusal(heartbeat_forever(executor, epoch + 1))  # the last attach has begun: the one before is fenced
    executor.gate.open()
    code, _ = await refusal(overtaken)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert await last == epoch + 2


# During a step


async def test_health_info_and_heartbeats_answer_during_a_step(executor: Executor) -> None:
    epoch = await executor.attach()
    executor.gate.close()
    running = asyncio.ensure_future(executor.stub.ExecuteModel(first_step(epoch)))
    await executor.gate.wait_entered()
    assert await executor.health(READINESS) == SERVING
    assert (await executor.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())).model_id == "fake"
    assert (await executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch))).last_executed_step_id == 0
    assert not running.done()
    executor.gate.open()
    assert (await running).step_id == 1


async def test_draining_answers_the_running_step_and_drops_the_rest(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    executor.gate.close()
    for step in steps(epoch, 1, 2):
        await stream.send(step)
    await executor.gate.wait_entered()
    draining = asyncio.ensure_future(executor.servicer.drain())
    # A unary call is answered after the drain has begun.
    code, details = await refusal(executor.stub.GetExecutorInfo(pb.GetExecutorInfoRequest()))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the executor is shutting down")
    executor.gate.open()
    await draining
    assert (await stream.read_step()).step_id == 1
    code, _ = await refusal(stream.read())
    assert code is grpc.StatusCode.UNAVAILABLE


# The batch table, for people


async def test_the_batch_table_is_shown_in_words(executor: Executor) -> None:
    epoch = await executor.attach("scheduler-7")
    response = await executor.stub.ExecuteModel(first_step(epoch, slot=2))
    sampled = int(np.frombuffer(response.sampled_token_ids, "<i4")[0])
    table = await executor.stub.GetBatchTable(pb.GetBatchTableRequest(slot=2, include_token_ids=True))
    (row,) = table.rows
    assert (table.epoch, table.scheduler_id, table.last_executed_step_id) == (epoch, "scheduler-7", 1)
    assert (row.slot, row.generation, row.active) == (2, 1, True)
    assert (row.num_prompt_tokens, row.num_tokens, row.num_computed_tokens) == (3, 4, 3)
    assert list(row.token_ids) == [97, 98, 99, sampled]
    assert list(row.block_table) == list(range(50))


async def test_token_ids_are_shown_only_when_asked_for(executor: Executor) -> None:
    await executor.stub.ExecuteModel(first_step(await executor.attach()))
    (row,) = (await executor.stub.GetBatchTable(pb.GetBatchTableRequest())).rows
    assert list(row.token_ids) == []


async def test_a_slot_that_is_not_live_is_not_found(executor: Executor) -> None:
    code, details = await refusal(executor.stub.GetBatchTable(pb.GetBatchTableRequest(slot=1)))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "slot 1 is not live; 0 slots are")

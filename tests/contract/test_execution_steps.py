"""ExecutionService while it runs steps: order, resuming, refusals."""

import asyncio

import grpc
import numpy as np
import pytest

from executor_svc.service.kept_responses import NUM_KEPT_RESPONSES
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import TableDelta
from octavo_shared.step_wire.wire import decode_admission
from tests.contract.execution_harness import (
    MAX_MESSAGE_BYTES,
    Executor,
    Stream,
    decode_step,
    first_step,
    refusal,
    steps,
)

# Steps on a stream


async def test_a_stream_answers_every_step_in_order(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    assert (stream.started.instance_id, stream.started.last_executed_step_id) == (executor.worker.info.instance_id, 0)
    for step in steps(epoch, 1, 5):
        await stream.send(step)
    responses = [await stream.read_step() for _ in range(5)]
    assert [response.step_id for response in responses] == [1, 2, 3, 4, 5]
    assert all(len(response.sampled_token_ids) == 4 for response in responses)
    heartbeat = await executor.stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch))
    assert heartbeat.last_executed_step_id == 5


async def test_a_half_closed_stream_ends_after_its_last_response(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    await stream.send(first_step(epoch))
    await stream.call.done_writing()
    assert (await stream.read_step()).step_id == 1
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_stream_must_begin_with_start(executor: Executor) -> None:
    stream = Stream(executor.stub.StreamSteps())
    await stream.send(first_step(await executor.attach()))
    code, details = await refusal(stream.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "message is step; it must be start, in the first message of a stream"


async def test_a_second_start_ends_the_stream(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    await stream.call.write(pb.StreamStepsRequest(start=pb.StreamStart(epoch=epoch)))
    code, _ = await refusal(stream.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_responses_that_got_lost_are_sent_again(executor: Executor) -> None:
    epoch = await executor.attach()
    broken = await executor.open_stream(epoch)
    responses = [await broken.run(step) for step in steps(epoch, 1, 4)]
    broken.call.cancel()
    stream = await executor.open_stream(epoch, last_received_step_id=2)
    assert stream.started.last_executed_step_id == 4
    assert [await stream.read_step(), await stream.read_step()] == responses[2:]
    assert (await stream.run(decode_step(epoch, 5))).step_id == 5


async def test_a_new_stream_takes_over_from_one_that_seems_open(executor: Executor) -> None:
    epoch = await executor.attach()
    broken = await executor.open_stream(epoch)
    executor.gate.close()
    for step in steps(epoch, 1, 3):
        await broken.send(step)
    await executor.gate.wait_entered()
    resuming = asyncio.ensure_future(executor.open_stream(epoch))
    code, details = await refusal(broken.read())
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "replaced by a newer stream of the same epoch")
    executor.gate.open()
    stream = await resuming
    executed = stream.started.last_executed_step_id
    for step in steps(epoch, executed + 1, 4):
        await stream.send(step)
    assert [(await stream.read_step()).step_id for _ in range(4)] == [1, 2, 3, 4]


async def test_a_step_that_comes_twice_runs_once(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    first = [await stream.run(step) for step in steps(epoch, 1, 3)]
    again = [await stream.run(step) for step in steps(epoch, 1, 3)]
    assert again == first
    assert executor.worker.table.num_tokens[0] == 6


async def test_a_skipped_step_ends_the_stream(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    await stream.run(first_step(epoch))
    await stream.send(decode_step(epoch, 3))
    code, details = await refusal(stream.read())
    assert (code, details) == (grpc.StatusCode.OUT_OF_RANGE, "step 3 arrived after step 1; step 2 is missing")


async def test_a_stream_cannot_resume_before_the_stored_responses(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    for step in steps(epoch, 1, NUM_KEPT_RESPONSES + 2):
        await stream.run(step)
    code, details = await refusal(executor.open_stream(epoch, last_received_step_id=1))
    assert code is grpc.StatusCode.OUT_OF_RANGE
    assert "the response of step 2 is no longer kept" in details


async def test_a_stream_cannot_resume_after_steps_that_never_ran(executor: Executor) -> None:
    code, _ = await refusal(executor.open_stream(await executor.attach(), last_received_step_id=7))
    assert code is grpc.StatusCode.OUT_OF_RANGE


# Steps one by one


async def test_unary_steps_are_refused_while_a_stream_is_open(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    code, details = await refusal(executor.stub.ExecuteModel(first_step(epoch)))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "a step stream is open; send the step on it")
    await stream.call.done_writing()
    await stream.call.code()
    assert (await executor.stub.ExecuteModel(first_step(epoch))).step_id == 1


async def test_an_equal_unary_step_returns_the_stored_response(executor: Executor) -> None:
    epoch = await executor.attach()
    first = await executor.stub.ExecuteModel(first_step(epoch))
    assert await executor.stub.ExecuteModel(first_step(epoch)) == first
    assert executor.worker.table.num_tokens[0] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill_chunks": [9, 3]}, "slot 9 is given a prefill chunk; slots are 0 to 3"),
        ({"prefill_chunks": [0, 4]}, "would compute more tokens than it has"),
        ({"prefill_chunks": [0]}, "prefill_chunks has 1 numbers, not a multiple of 2"),
        ({"appended_blocks": [0, 64]}, "slot 0 is given block 64; blocks are 0 to 63"),
        ({"blocks_to_copy": [0, 1, 1, 2]}, "copies from a block that it also copies to"),
        ({"blocks_to_swap_in": [0, 1]}, "moves host block 0; there are 0 host blocks"),
        ({"released_slots": [3]}, "slot 3 is released but not live"),
    ],
)
async def test_a_step_that_does_not_fit_writes_nothing(
    executor: Executor, change: dict[str, list[int]], words: str
) -> None:
    epoch = await executor.attach()
    wrong = first_step(epoch)
    for name, values in change.items():
        del getattr(wrong, name)[:]
        getattr(wrong, name).extend(values)
    code, details = await refusal(executor.stub.ExecuteModel(wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details
    assert not executor.worker.table.live.any()
    assert (await executor.stub.ExecuteModel(first_step(epoch))).step_id == 1


async def test_after_a_failed_step_the_epoch_runs_no_more(executor: Executor) -> None:
    epoch = await executor.attach()
    stream = await executor.open_stream(epoch)
    wrong = first_step(epoch)
    wrong.admissions[0].num_computed_tokens = 2  # claims what no block holds
    wrong.prefill_chunks[1] = 1
    await stream.send(wrong)
    code, details = await refusal(stream.read())
    assert code is grpc.StatusCode.INTERNAL
    assert "slot 0 reads position 0 from block 0, which is unwritten there" in details
    code, details = await refusal(executor.stub.ExecuteModel(first_step(epoch)))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "step 1 failed (StepFailedError); attach again")
    assert (await executor.stub.ExecuteModel(first_step(await executor.attach()))).step_id == 1


async def test_an_equal_digest_is_answered_and_another_fails_the_step(executor: Executor) -> None:
    epoch = await executor.attach()
    step = first_step(epoch)
    truth = BatchTable(max_num_seqs=4, max_model_len=200, block_size=4, num_device_blocks=64)
    truth.apply(
        TableDelta(admissions=(decode_admission(step.admissions[0]),), prefill_chunks=np.array([[0, 3]], np.int32))
    )
    step.table_digest = truth.digest()
    assert (await executor.stub.ExecuteModel(step)).table_digest == truth.digest()
    code, details = await refusal(
        executor.stub.ExecuteModel(step_pb2.ExecuteModelRequest(epoch=epoch, step_id=2, table_digest=5))
    )
    assert code is grpc.StatusCode.INTERNAL
    assert "the scheduler's 0000000000000005" in details


async def test_an_oversized_message_is_refused_and_harms_nothing(executor: Executor) -> None:
    epoch = await executor.attach()
    huge = first_step(epoch)
    huge.admissions[0].token_ids = bytes(2 * MAX_MESSAGE_BYTES)
    code, _ = await refusal(executor.stub.ExecuteModel(huge))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await executor.stub.ExecuteModel(first_step(epoch))).step_id == 1

"""Vectors and scores on the execution wire: beside sequences and alone, refusals, flags, no blocks."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from executor_svc.fake.pooling import fake_values
from executor_svc.fake.worker import FakeWorker
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo.execution.v1 import step_pb2
from octavo_shared.step_wire.step import PoolingTask, RowFlag
from tests.contract.execution_harness import Executor, first_step, refusal
from tests.skew.peers import executor_here
from tests.support.each_row import each_row

POOLING = 10
EMBED, SCORE = step_pb2.POOLING_TASK_EMBED, step_pb2.POOLING_TASK_SCORE


@asynccontextmanager
async def stub_of(worker: FakeWorker) -> AsyncIterator["pb_grpc.ExecutionServiceAsyncStub"]:
    """Run an executor for the length of a block."""
    async with executor_here(worker) as here, grpc.aio.insecure_channel(here.address) as channel:
        yield pb_grpc.ExecutionServiceStub(channel)


async def attach(stub: "pb_grpc.ExecutionServiceAsyncStub") -> pb.AttachResponse:
    request = pb.AttachRequest(
        scheduler_id="a",
        lease_ms=10_000,
        min_wire_version=1,
        max_wire_version=2,
        capabilities=[POOLING],  # type: ignore[list-item]
    )
    return await stub.Attach(request)


def text(
    number: int, *token_ids: int, types: bytes = b"", task: step_pb2.PoolingTask.ValueType = EMBED
) -> step_pb2.PoolingInput:
    tokens = np.array(token_ids, "<i4").tobytes()
    return step_pb2.PoolingInput(number=number, token_ids=tokens, token_type_ids=types, task=task)


def step_of(epoch: int, *texts: step_pb2.PoolingInput, step_id: int = 1) -> step_pb2.ExecuteModelRequest:
    return step_pb2.ExecuteModelRequest(epoch=epoch, step_id=step_id, pooling_inputs=texts, feature_bits=1 << POOLING)


def values_of(output: step_pb2.PoolingOutput) -> list[float]:
    numbers: list[float] = np.frombuffer(output.values, "<f4").tolist()
    return numbers


async def test_texts_are_answered_in_their_order_beside_a_sequence_as_alone(executor: Executor) -> None:
    agreed = await attach(executor.stub)
    parameters = agreed.capability_parameters
    assert (list(parameters.pooling_tasks), parameters.embedding_size, parameters.num_scores) == ([EMBED, SCORE], 16, 1)
    texts = text(7, 5, 6), text(3, 5, 6, types=b"\0\1", task=SCORE), text(0, 9)
    beside = first_step(agreed.epoch)
    beside.MergeFrom(step_of(agreed.epoch, *texts))
    both = await executor.stub.ExecuteModel(beside)
    alone = [
        (await executor.stub.ExecuteModel(step_of(agreed.epoch, one, step_id=step_id))).pooling_outputs[0]
        for one, step_id in zip(texts, itertools.count(2))
    ]
    assert len(both.sampled_token_ids) == 4
    assert list(both.pooling_outputs) == alone
    assert [(output.number, output.flag, values_of(output)) for output in alone] == [
        (7, 0, fake_values(PoolingTask.EMBED, [5, 6]).tolist()),
        (3, 0, fake_values(PoolingTask.SCORE, [5, 6], b"\0\1").tolist()),
        (0, 0, fake_values(PoolingTask.EMBED, [9]).tolist()),
    ]


@each_row(
    ((text(4),), "pooling input 4 has 0 tokens; it may have 1 to 200"),
    ((text(4, *[1] * 201),), "pooling input 4 has 201 tokens; it may have 1 to 200"),
    ((text(4, 1, 259),), "pooling input 4 has token id 259; ids are 0 to 258"),
    ((text(4, 1, types=b"\0\0"),), "pooling input 4 has 2 token types for 1 token"),
    ((text(4, 1, 2, types=b"\0\2"),), "pooling input 4 has token type 2; types are 0 to 1"),
    ((text(4, 1, task=step_pb2.POOLING_TASK_UNSPECIFIED),), "pooling input 4 has task 0; it may be 1 (EMBED) or 2"),
    ((text(4, 1), text(4, 2)), "step 2 has two pooling inputs with number 4"),
    (tuple(text(number, *[1] * 200) for number in range(11)), "step 2 pools 2200 tokens; the limit is 2048"),
)
async def test_texts_that_cannot_be_pooled_are_refused_and_nothing_changes(
    texts: tuple[step_pb2.PoolingInput, ...], words: str
) -> None:
    async with stub_of(FakeWorker(has_pooling=True, max_model_len=200, block_size_tokens=4)) as stub:
        epoch = (await attach(stub)).epoch
        await stub.ExecuteModel(first_step_of_version_2(epoch))
        code, details = await refusal(stub.ExecuteModel(step_of(epoch, *texts, step_id=2)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(words)
        answer = await stub.ExecuteModel(step_of(epoch, text(4, 1), step_id=2))
    assert (len(answer.sampled_token_ids), len(answer.pooling_outputs)) == (4, 1)


def first_step_of_version_2(epoch: int) -> step_pb2.ExecuteModelRequest:
    step = first_step(epoch)
    step.feature_bits = 0
    return step


@pytest.fixture
async def encoder() -> AsyncIterator["pb_grpc.ExecutionServiceAsyncStub"]:
    """An executor that generates nothing and makes no numbers of token 9."""
    async with stub_of(FakeWorker(has_pooling=True, is_generative=False, nan_token_id=9)) as stub:
        yield stub


async def test_an_executor_that_generates_nothing_has_no_blocks_and_refuses_sequences(
    encoder: "pb_grpc.ExecutionServiceAsyncStub",
) -> None:
    agreed = await attach(encoder)
    assert (agreed.capability_parameters.pooling_only, agreed.info.num_device_blocks) == (True, 0)
    code, details = await refusal(encoder.ExecuteModel(first_step_of_version_2(agreed.epoch)))
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "step 1 admits a sequence; the model computes vectors or scores alone",
    )


async def test_values_that_are_not_finite_are_flagged_and_others_are_not(
    encoder: "pb_grpc.ExecutionServiceAsyncStub",
) -> None:
    epoch = (await attach(encoder)).epoch
    answer = await encoder.ExecuteModel(step_of(epoch, text(0, 8), text(1, 9)))
    assert [output.flag for output in answer.pooling_outputs] == [0, RowFlag.NOT_FINITE]
    assert np.isfinite(values_of(answer.pooling_outputs[0])).all()
    assert len(values_of(answer.pooling_outputs[1])) == 16

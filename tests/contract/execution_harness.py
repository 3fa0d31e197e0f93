"""An executor's service in this process, over real gRPC, with the fake worker behind it.

Blocks have 4 tokens. The step time of the worker is a gate that a test can close, the clock a number
that a test can set.
"""

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import SERVICE_NAME, ExecutionServicer
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc, step_pb2
from octavo_shared.grpc.grpc_server import GrpcServer

MAX_MESSAGE_BYTES = 2**20


class Gate:
    """Stands for the time that a step takes: steps wait in it while it is closed."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        while self.entered.acquire(blocking=False):
            pass

    def open(self) -> None:
        self._open.set()

    def sleep(self, _seconds: float) -> None:
        self.entered.release()
        self._open.wait()

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


class Executor:
    def __init__(self) -> None:
        self.gate = Gate()
        self.now = 1000.0
        self.worker = FakeWorker(
            block_size_tokens=4,
            num_device_blocks=64,
            max_model_len=200,
            max_num_seqs=4,
            has_pooling=True,
            sleep=self.gate.sleep,
        )
        self.servicer = ExecutionServicer(clock=lambda: self.now)
        self.server = GrpcServer(
            listen="127.0.0.1:0", max_message_bytes=MAX_MESSAGE_BYTES, service_names=[SERVICE_NAME]
        )
        execution_service_pb2_grpc.add_ExecutionServiceServicer_to_server(self.servicer, self.server.server)

    async def start(self) -> None:
        self.channel = grpc.aio.insecure_channel(await self.server.start())
        self.stub = execution_service_pb2_grpc.ExecutionServiceStub(self.channel)
        health: Any = health_pb2_grpc.HealthStub(self.channel)  # type: ignore[no-untyped-call]
        self._check_health = health.Check

    async def load(self) -> None:
        await self.servicer.load(lambda: self.worker)
        await self.server.set_ready(True)

    async def stop(self) -> None:
        self.gate.open()
        await self.channel.close()
        await self.server.stop(0)
        self.servicer.close()

    async def attach(self, scheduler_id: str = "a", lease_ms: int = 10_000) -> int:
        request = pb.AttachRequest(scheduler_id=scheduler_id, lease_ms=lease_ms, min_wire_version=1, max_wire_version=1)
        return (await self.stub.Attach(request)).epoch

    async def health(self, name: str) -> int:
        response = await self._check_health(health_pb2.HealthCheckRequest(service=name))
        return int(response.status)

    async def open_stream(self, epoch: int, last_received_step_id: int = 0) -> "Stream":
        stream = Stream(self.stub.StreamSteps())
        start = pb.StreamStart(epoch=epoch, last_received_step_id=last_received_step_id)
        await stream.call.write(pb.StreamStepsRequest(start=start))
        stream.started = (await stream.read()).started
        return stream


class Stream:
    def __init__(self, call: Any) -> None:
        self.call = call
        self.started = pb.StreamStarted()

    async def send(self, step: step_pb2.ExecuteModelRequest) -> None:
        await self.call.write(pb.StreamStepsRequest(step=step))

    async def read(self) -> pb.StreamStepsResponse:
        response = await self.call.read()
        assert isinstance(response, pb.StreamStepsResponse), "the executor ended the stream"
        return response

    async def read_step(self) -> step_pb2.ExecuteModelResponse:
        return (await self.read()).step

    async def run(self, step: step_pb2.ExecuteModelRequest) -> step_pb2.ExecuteModelResponse:
        await self.send(step)
        return await self.read_step()


def first_step(epoch: int, slot: int = 0) -> step_pb2.ExecuteModelRequest:
    """Return step 1: a prompt of 3 tokens in slot 0, with blocks for 200 tokens."""
    admission = step_pb2.Admission(
        slot=slot,
        generation=1,
        token_ids=np.array([97, 98, 99], "<i4").tobytes(),
        num_prompt_tokens=3,
        block_ids=range(50),
    )
    return step_pb2.ExecuteModelRequest(epoch=epoch, step_id=1, admissions=[admission], prefill_chunks=[slot, 3])


def decode_step(epoch: int, step_id: int) -> step_pb2.ExecuteModelRequest:
    return step_pb2.ExecuteModelRequest(epoch=epoch, step_id=step_id)


def steps(epoch: int, first: int, last: int) -> list[step_pb2.ExecuteModelRequest]:
    return [first_step(epoch) if step_id == 1 else decode_step(epoch, step_id) for step_id in range(first, last + 1)]


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""

"""Fields that a newer peer of the same wire version adds are passed over, wherever they stand."""

from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo.execution.v1 import sampling_params_pb2, step_pb2
from tests.skew.requests import REQUESTS, Stream, run_all
from tests.support.stack import running_stack

pytestmark = pytest.mark.timeout(120)

# Field 2,000 with the number 42 and field 2,001 with the text "new", as protobuf writes them.
UNKNOWN_FIELDS = bytes.fromhex("807d 2a 8a7d 03 6e6577")


class NewerWire:
    """A channel on which each side seems to come from a later release: all messages have fields that nobody knows."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.kinds: set[str] = set()

    def unary_unary(self, method: str, **options: Any) -> object:
        return self._channel.unary_unary(method, **self._with_unknown_fields(options))

    def stream_unary(self, method: str, **options: Any) -> object:
        return self._channel.stream_unary(method, **self._with_unknown_fields(options))

    def stream_stream(self, method: str, **options: Any) -> object:
        return self._channel.stream_stream(method, **self._with_unknown_fields(options))

    def _with_unknown_fields(self, options: dict[str, Any]) -> dict[str, Any]:
        read: Callable[[bytes], Message] = options["response_deserializer"]
        return {
            **options,
            "request_serializer": self._write,
            "response_deserializer": lambda content: read(self._write(read(content))),
        }

    def _write(self, message: Message) -> bytes:
        self.kinds.add(message.DESCRIPTOR.name)
        return as_newer_peer(message)


def as_newer_peer(message: Message) -> bytes:
    """Return a message with unknown fields in it and in every message inside it."""
    newer = type(message)()
    newer.CopyFrom(message)
    add_unknown_fields(newer)
    return newer.SerializeToString()


def add_unknown_fields(message: Message) -> None:
    """Add fields to a message and to those inside it."""
    for descriptor, value in message.ListFields():
        if descriptor.type == descriptor.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                add_unknown_fields(inner)
    message.MergeFromString(UNKNOWN_FIELDS)


def test_unknown_fields_arrive_at_every_depth() -> None:
    sampling = sampling_params_pb2.SamplingParams(temperature=0.5)
    step = step_pb2.ExecuteModelRequest(admissions=[step_pb2.Admission(sampling_params=sampling)])
    arrived = step_pb2.ExecuteModelRequest.FromString(as_newer_peer(step))
    for message in (arrived, arrived.admissions[0], arrived.admissions[0].sampling_params):
        unknown = UnknownFieldSet(message)
        assert [unknown[i].field_number for i in range(len(unknown))] == [2000, 2001]
    assert arrived.admissions[0].sampling_params.temperature == 0.5


async def test_requests_are_the_same_between_peers_that_send_each_other_unknown_fields(
    monkeypatch: pytest.MonkeyPatch, undisturbed: list[Stream]
) -> None:
    streams = [Stream() for _ in REQUESTS]
    wires: list[NewerWire] = []
    connect: Callable[..., None] = pb_grpc.ExecutionServiceStub.__init__

    def connect_to_newer(stub: pb_grpc.ExecutionServiceStub, channel: grpc.aio.Channel) -> None:
        wires.append(NewerWire(channel))
        connect(stub, wires[-1])

    monkeypatch.setattr(pb_grpc.ExecutionServiceStub, "__init__", connect_to_newer)
    worker = FakeWorker(
        block_size_tokens=4, num_device_blocks=90, num_host_blocks=90, max_num_seqs=32, max_num_batched_tokens=64
    )
    async with running_stack(worker, lease_s=1) as stack, Client(stack.address) as client:
        await run_all(client, streams)
    assert streams == undisturbed
    assert wires[0].kinds >= {
        *("GetExecutorInfoRequest", "GetExecutorInfoResponse", "AttachRequest", "AttachResponse"),
        *("GetTokenizerRequest", "GetTokenizerResponse", "StreamStepsRequest", "StreamStepsResponse"),
    }

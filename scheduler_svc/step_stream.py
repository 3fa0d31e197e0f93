"""One step stream as the scheduler sees it: write, read, and how it ended."""

import asyncio
import contextlib

import grpc
import grpc.aio

from octavo.execution.v1 import execution_service_pb2 as pb

StepStream = grpc.aio.StreamStreamCall[pb.StreamStepsRequest, pb.StreamStepsResponse]


class StreamBrokenError(Exception):
    """A step stream ended; `code` tells how."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        super().__init__(f"{code.name}: {details}")

    @property
    def may_resume(self) -> bool:
        """Whether the transport ended it. Other codes are the executor's own word that it is over."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.OK)


async def write_message(stream: StepStream, message: pb.StreamStepsRequest) -> None:
    """Write unless the stream is broken: only reading tells how it broke, and reads come first."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.write(message)


async def read_message(stream: StepStream) -> pb.StreamStepsResponse:
    """Return the next message.

    Raises: StreamBrokenError: the stream ended.
    """
    try:
        message = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise StreamBrokenError(error.code(), error.details() or "") from error
    if not isinstance(message, pb.StreamStepsResponse):
        raise StreamBrokenError(grpc.StatusCode.OK, "the executor ended the stream")
    return message

"""One step stream as the scheduler sees it: write, read, and how it ended."""

import asyncio
import contextlib

import grpc
import grpc.aio

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.values.status_details import is_from_service
from octavo_shared.errors import ExecutorFaultError, MalformedMessageError
from octavo_shared.grpc.grpc_status import failure_text, is_refused

StepStream = grpc.aio.StreamStreamCall[pb.StreamStepsRequest, pb.StreamStepsResponse]


class StreamBrokenError(Exception):
    """A step stream ended.

    Args:
        message: How it ended, in one line.
        may_resume: Whether the connection broke; if not, the executor itself ended the stream.
        is_refused: Whether the address refuses connections: then the process is gone. A machine that is slow or cannot
            be reached does not refuse.
    """

    def __init__(self, message: str, *, may_resume: bool, is_refused: bool = False) -> None:
        self.may_resume = may_resume
        self.is_refused = is_refused
        super().__init__(message)


async def write_message(stream: StepStream, message: pb.StreamStepsRequest) -> None:
    """Write unless the stream is broken: only reading tells how it broke."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.write(message)


async def read_message(stream: StepStream) -> pb.StreamStepsResponse:
    """Return the next message.

    Raises: StreamBrokenError: the stream ended. ExecutorFaultError: the bytes are no message.
    """
    try:
        message = await stream.read()
    except grpc.aio.AioRpcError as error:
        # The code alone does not tell: a write that meets the break leaves INTERNAL behind.
        text = failure_text(error)
        may_resume = not is_from_service(error)
        raise StreamBrokenError(text, may_resume=may_resume, is_refused=may_resume and is_refused(error)) from error
    if isinstance(message, MalformedMessageError):
        raise ExecutorFaultError("it sent a message on the step stream that cannot be decoded") from message
    if not isinstance(message, pb.StreamStepsResponse):
        raise StreamBrokenError("the executor closed the stream", may_resume=True)
    return message

"""No request of a client keeps the event loop, and so the streams of the others, waiting."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from tests.support.loop_gap import loop_gaps
from tests.support.stack import Stack, running_stack

SERVICE = "/octavo.generation.v1.GenerationService"
METHODS = {
    "Generate": pb.GenerateRequest.DESCRIPTOR,
    "StreamRequests": pb.StreamRequestsRequest.DESCRIPTOR,
    "Tokenize": pb.TokenizeRequest.DESCRIPTOR,
    "Detokenize": pb.DetokenizeRequest.DESCRIPTOR,
}
CODES = {code.value[0]: code for code in grpc.StatusCode}
BODY_BYTES = 4 * 2**20 - 64

# So many characters are tokenized before it is known that they are too many.
TOKENIZED_BYTES = 400_000

# In CPU time, so that other work on the machine does not count: the longest gap is 60 ms. Each planted fault makes it
# 200 ms and more, of seconds in all.
GAP_S = 0.15

SMALLEST_ELEMENTS = {FieldDescriptor.TYPE_MESSAGE: b"", FieldDescriptor.TYPE_STRING: b"a"}


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def filled(element: bytes, num_bytes: int) -> bytes:
    """Return an element so often that it takes so many bytes."""
    return element * (num_bytes // len(element))


def bodies(descriptor: Descriptor, num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield, for each field of a message and of those inside it, a body that is full of it, in each form."""
    room = num_bytes - 32
    for entry in descriptor.fields:
        smallest = SMALLEST_ELEMENTS.get(entry.type)
        if smallest is not None:
            yield f"{entry.name}, tiny ones", filled(field(entry.number, smallest), room)
        if entry.type == FieldDescriptor.TYPE_STRING:
            yield f"{entry.name}, a long one", field(entry.number, filled(b"word and ", room))
            yield f"{entry.name}, not ASCII", field(entry.number, filled("\U0001f600".encode(), room))
        elif smallest is None and entry.is_repeated:
            yield f"{entry.name}, packed", field(entry.number, filled(b"\x01", room))
            yield f"{entry.name}, one by one", filled(varint(entry.number << 3) + b"\x01", room)
        if entry.message_type is not None:
            for name, body in bodies(entry.message_type, room):
                yield f"{entry.name}.{name}", field(entry.number, body)
    yield "unknown fields", filled(b"\xa0\x06\x01", room)


async def longest_gap_s(stack: Stack, body: bytes, method: str = "Generate") -> tuple[float, grpc.StatusCode]:
    """Send a body; return how long the loop was kept at most until it was answered, and how.

    On a stream of requests the end of the first one is the answer, or that of the stream.
    """
    code = grpc.StatusCode.OK
    async with grpc.aio.insecure_channel(stack.address) as channel, loop_gaps() as gaps_s:
        if method == "StreamRequests":
            stream: Any = channel.stream_stream(f"{SERVICE}/{method}")
            call = stream()
            await call.write(body)
        else:
            send: Any = channel.unary_stream(f"{SERVICE}/{method}")
            call = send(body)
        try:
            async for answer in call:
                if method == "StreamRequests":
                    [failed] = pb.StreamRequestsResponse.FromString(answer).failed
                    code = CODES[failed.code]
                call.cancel()
        except grpc.aio.AioRpcError as error:
            code = error.code()
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED if code is grpc.StatusCode.OK else code
    return max(gaps_s), code


def is_told_twice(method: str, name: str) -> bool:
    """Whether the scan, which takes a second for it, has met a shape through the other door, and a like one here."""
    scanned = method == "StreamRequests" and "continuation." in name and name.endswith(", one by one")
    return scanned and "outputs.token_ids" not in name


@pytest.mark.timeout(300)
async def test_no_request_of_any_shape_stops_the_event_loop() -> None:
    slow = {}
    async with running_stack(FakeWorker(max_model_len=32_768, num_device_blocks=2100)) as stack:
        shapes = (  # one after the other: all of them are a gigabyte
            (method, name, body)
            for method, descriptor in METHODS.items()
            for num_bytes in (BODY_BYTES, TOKENIZED_BYTES)
            for name, body in bodies(descriptor, num_bytes)
            if num_bytes == BODY_BYTES or ("long" in name and "reasoning_content" not in name)  # a template may drop it
            if not is_told_twice(method, name)
        )
        for method, name, body in shapes:
            gap_s, code = await longest_gap_s(stack, body, method)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, name)
            if gap_s > GAP_S:  # a busy machine is late once, not twice
                gap_s = min(gap_s, (await longest_gap_s(stack, body, method))[0])
            if gap_s > GAP_S:
                slow[method, name] = gap_s
    assert slow == {}


async def test_bytes_that_are_no_request_are_the_callers_fault() -> None:
    async with running_stack() as stack:
        assert (await longest_gap_s(stack, b"\xff"))[1] is grpc.StatusCode.INVALID_ARGUMENT
        assert (await longest_gap_s(stack, field(2, b"\xff")))[1] is grpc.StatusCode.INVALID_ARGUMENT

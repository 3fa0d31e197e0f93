"""What clients and handlers see when the connection or the server goes away."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from tests.simulation.scenes.stage import Scene, Stage, end_of, method

unary = grpc.unary_unary_rpc_method_handler
both = grpc.stream_stream_rpc_method_handler


class Held:
    """Handlers that answer once, and then wait until they are told.

    Attributes:
        may_end: Set by the scene: they end.
    """

    def __init__(self, stage: Stage) -> None:
        self.may_end = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._stage = stage

    @property
    def handlers(self) -> dict[str, Any]:
        """Two methods."""
        return {"Ask": unary(self._ask), "Echo": unary(self._echo), "Stream": both(self._stream)}

    async def _echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def _ask(self, request: bytes, context: Any) -> bytes:
        await self._wait()
        return b"last"

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        yield b"second"
        await self._wait()
        yield b"last"

    async def _wait(self) -> None:
        self.has_begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self._stage.notes["handler"].append("cancelled")
            raise
        finally:
            self.has_ended.set()


async def nobody_listens(stage: Stage) -> None:
    channel = stage.channel()
    stage.notes["client"].append(await end_of(method(channel, "Echo")(b"")))
    stage.notes["client"].append(await end_of(method(channel, "Echo")(b"")))
    stream = method(channel, "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(stream.write(b"")), await end_of(stream.read()), stream.done()]


async def server_comes_late(stage: Stage) -> None:
    channel = stage.channel()
    stage.notes["client"].append(await end_of(method(channel, "Echo")(b"")))
    await stage.serve(Held(stage).handlers)
    while (answer := await end_of(method(channel, "Echo")(b"a"))).startswith("UNAVAILABLE"):
        await asyncio.sleep(0.02)
    stage.notes["client"].append(answer)


async def reset_while_waiting(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    channel = stage.channel()
    asking = asyncio.create_task(end_of(method(channel, "Ask")(b"")))
    await held.has_begun.wait()
    stage.reset()
    stage.notes["client"].append(await asking)
    await held.has_ended.wait()
    stage.notes["client"].append(await end_of(method(channel, "Echo")(b"again")))


async def reset_while_reading(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    call = method(stage.channel(), "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    reading = asyncio.create_task(end_of(call.read()))
    await held.has_begun.wait()
    stage.reset()
    stage.notes["client"] += [await reading, await end_of(call.read()), await end_of(call.write(b"")), call.done()]
    await held.has_ended.wait()


async def reset_with_messages_unread(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    call = method(stage.channel(), "Stream", "stream_stream")()
    stage.notes["client"].append(await end_of(call.read()))
    await held.has_begun.wait()
    await asyncio.sleep(0.05)  # the second message has arrived
    stage.reset()
    await held.has_ended.wait()
    await asyncio.sleep(0.05)  # the client knows, too
    stage.notes["client"] += [await end_of(call.read()), await end_of(call.read())]


async def write_after_a_reset(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    call = method(stage.channel(), "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    stage.reset()
    await held.has_ended.wait()
    await asyncio.sleep(0.05)  # the client knows
    stage.notes["client"] += [await end_of(call.write(b"")), (await end_of(call.read())).partition(":")[0]]
    stage.notes["client"].append(await end_of(call.write(b"")))


async def silence(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    call = method(stage.channel(keeps_alive=True), "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    await held.has_begun.wait()
    stage.silence()
    stage.notes["client"] += [await end_of(call.read()), held.has_ended.is_set()]


async def server_stopped_at_once(stage: Stage) -> None:
    held = Held(stage)
    server = await stage.serve(held.handlers)
    channel = stage.channel()
    call = method(channel, "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    reading = asyncio.create_task(end_of(call.read()))
    await held.has_begun.wait()
    await server.stop(0)
    stage.notes["client"] += [await reading, call.done()]
    await held.has_ended.wait()


async def server_stopped_with_grace(stage: Stage) -> None:
    held = Held(stage)
    server = await stage.serve(held.handlers)
    channel = stage.channel()
    call = method(channel, "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    await held.has_begun.wait()
    stopping = asyncio.create_task(server.stop(10.0))
    await asyncio.sleep(0.05)  # the client knows
    refused = (await end_of(method(channel, "Echo")(b""))).partition(":")[0]
    stage.notes["client"].append(refused in ("UNAVAILABLE", "CANCELLED"))  # gRPC's threads decide which
    held.may_end.set()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    await stopping


async def server_stopped_after_its_grace(stage: Stage) -> None:
    held = Held(stage)
    server = await stage.serve(held.handlers)
    call = method(stage.channel(), "Stream", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()) for _ in range(2)]
    await held.has_begun.wait()
    await server.stop(0.1)
    stage.notes["client"].append(await end_of(call.read()))
    await held.has_ended.wait()


async def channel_closed(stage: Stage) -> None:
    held = Held(stage)
    await stage.serve(held.handlers)
    channel = stage.channel()
    asking = asyncio.create_task(end_of(method(channel, "Ask")(b"")))
    await held.has_begun.wait()
    call = method(channel, "Stream", "stream_stream")()
    stage.notes["client"].append(await end_of(call.read()))
    reading = asyncio.create_task(end_of(call.read()))
    await channel.close()
    stage.notes["client"] += [await asking, await reading, await end_of(call.read())]
    while len(stage.notes["handler"]) < 2:
        await asyncio.sleep(0.005)


async def call_on_a_closed_channel(stage: Stage) -> None:
    channel = stage.channel()
    await channel.close()

    async def ask() -> Any:
        return await method(channel, "Echo")(b"")

    stage.notes["client"].append(await end_of(ask()))


SCENES: tuple[Scene, ...] = (
    nobody_listens,
    server_comes_late,
    reset_while_waiting,
    reset_while_reading,
    reset_with_messages_unread,
    write_after_a_reset,
    silence,
    server_stopped_at_once,
    server_stopped_with_grace,
    server_stopped_after_its_grace,
    channel_closed,
    call_on_a_closed_channel,
)

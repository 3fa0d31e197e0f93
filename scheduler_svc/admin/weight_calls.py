"""The calls of AdminService that pause the fleet and change its weights."""

from collections.abc import AsyncIterator

import grpc.aio

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin.v1 import admin_service_pb2_grpc
from octavo.execution.v1 import execution_service_pb2
from octavo_shared.errors import CallerError, InvalidFieldError
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.weights import PauseMode

Chunk = execution_service_pb2.WeightsChunk

MAX_CHUNK_BYTES = 2 * 2**20

_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.RECOMPUTE,
    **{getattr(pb, f"PAUSE_MODE_{mode.name}"): mode for mode in PauseMode},
}


class WeightCalls(admin_service_pb2_grpc.AdminServiceServicer):
    """Answers them for one engine."""

    _engine: Engine

    async def Pause(  # noqa: N802 (named by the proto)
        self, request: pb.PauseRequest, context: grpc.aio.ServicerContext[pb.PauseRequest, pb.PauseResponse]
    ) -> pb.PauseResponse:
        """Let nothing be computed."""
        if (mode := _MODES.get(request.mode)) is None:
            raise InvalidFieldError("mode", request.mode, "a PauseMode")
        await self._engine.weights.pause(mode)
        return pb.PauseResponse()

    async def Resume(  # noqa: N802
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.ResumeResponse]
    ) -> pb.ResumeResponse:
        """End a pause."""
        await self._engine.weights.resume()
        return pb.ResumeResponse()

    async def UpdateWeights(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.UpdateWeightsRequest],
        context: grpc.aio.ServicerContext[pb.UpdateWeightsRequest, pb.UpdateWeightsResponse],
    ) -> pb.UpdateWeightsResponse:
        """Put other weights in place."""
        messages = aiter(request_iterator)
        begin = await anext(messages, None)
        if begin is None:
            raise CallerError("an update needs a source, or files")
        if begin.source and begin.content:
            raise InvalidFieldError("content", "set", "empty with a source")
        if begin.source and begin.stays_open:
            raise InvalidFieldError("stays_open", "true", "false with a source, which is a whole update")
        begins_anew = begin.stays_open and begin.is_last and not (begin.content or begin.begins_file)
        chunks = _chunks(begin, messages)
        digest = await self._engine.weights.update(
            begin.source, begin.weights_digest, chunks, stays_open=begin.stays_open, begins_anew=begins_anew
        )
        return pb.UpdateWeightsResponse(weights_digest=digest)

    async def GetWeightVersion(  # noqa: N802
        self,
        request: pb.GetWeightVersionRequest,
        context: grpc.aio.ServicerContext[pb.GetWeightVersionRequest, pb.GetWeightVersionResponse],
    ) -> pb.GetWeightVersionResponse:
        """Say which weights are served."""
        weights = self._engine.weights
        sessions = [driver.session for driver in self._engine.drivers.values()]
        return pb.GetWeightVersionResponse(
            weights_digest=weights.version,
            num_updates=weights.num_updates,
            is_paused=weights.is_paused,
            mode=getattr(pb, f"PAUSE_MODE_{weights.mode.name}") if weights.mode else pb.PAUSE_MODE_UNSPECIFIED,
            sleep_level=weights.sleep_level,
            has_open_update=weights.is_open,
            world_size=sum(session.info.tp_size for session in sessions if session is not None),
        )

    async def ResetPrefixCache(  # noqa: N802
        self,
        request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[pb.ResetPrefixCacheRequest, pb.ResetPrefixCacheResponse],
    ) -> pb.ResetPrefixCacheResponse:
        """Let no cached block be found again."""
        self._engine.weights.reset_prefix_cache()
        return pb.ResetPrefixCacheResponse()

    async def Sleep(  # noqa: N802
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        """Let executors give memory back."""
        if request.level > 2:
            raise InvalidFieldError("level", request.level, "1 or 2")
        await self._engine.weights.sleep(request.level or 1)
        return pb.SleepResponse()

    async def WakeUp(  # noqa: N802
        self, request: pb.WakeUpRequest, context: grpc.aio.ServicerContext[pb.WakeUpRequest, pb.WakeUpResponse]
    ) -> pb.WakeUpResponse:
        """End a sleep."""
        await self._engine.weights.wake_up()
        return pb.WakeUpResponse()


async def _chunks(
    first: pb.UpdateWeightsRequest, others: AsyncIterator[pb.UpdateWeightsRequest]
) -> AsyncIterator[Chunk]:
    """Yield the pieces of files in messages. Raises CallerError: one is too large, or the last one is missing."""
    message: pb.UpdateWeightsRequest | None = first
    while message is not None:
        if len(message.content) > MAX_CHUNK_BYTES:
            raise CallerError(f"a message has {len(message.content)} bytes of content; the limit is {MAX_CHUNK_BYTES}")
        ends_update = message.is_last and not first.stays_open
        if message.content or message.begins_file or ends_update:
            yield Chunk(content=message.content, begins_file=message.begins_file, is_last=ends_update)
        if message.is_last:
            return
        message = await anext(others, None)
    if not first.source:
        raise CallerError("the update was cut: its last message must have is_last")

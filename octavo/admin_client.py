"""The async client of AdminService: what operators ask a scheduler, with typed errors.

Answers are the messages of octavo/admin/v1, which protos/ explains. Errors: octavo/errors.py and the two below.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import grpc
import grpc.aio

from octavo.admin.v1 import admin_pb2, admin_service_pb2_grpc
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.answer_reading import message_of
from octavo.calls.scheduler_channel import Endpoint, SchedulerChannel
from octavo.calls.tls import TlsOptions
from octavo.calls.weight_files import WeightFile, update_messages
from octavo.client import DEFAULT_ADMIN_ADDRESS
from octavo.errors import InvalidRequestError, OctavoError, UnavailableError

if TYPE_CHECKING:  # only the type stub of the generated module has it
    _Stub = admin_service_pb2_grpc.AdminServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

# The most that one page of the scheduler has.
MAX_PAGE_SIZE = 1000

# An answer is a picture of memory; a scheduler that needs longer is stuck or far away.
CALL_TIMEOUT_S = 5.0

# An adapter is read from a disk, and computes a token behind the requests that wait.
LOAD_TIMEOUT_S = 300.0

# A pause may wait for the ends of live requests, and an update for the disks of all executors.
CHANGE_TIMEOUT_S = 3600.0

PauseMode: TypeAlias = Literal["abort", "wait", "keep", "recompute"]


class NotFoundError(OctavoError):
    """The scheduler does not know the request, the executor or the block."""


class AdminPortError(OctavoError):
    """What answers at the address is not a scheduler's admin port.

    Args:
        address: The dialled address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is not the port for operators; give the scheduler's --admin-listen, by default "
            f"{DEFAULT_ADMIN_ADDRESS}"
        )


class AdminClient(SchedulerChannel):
    """Asks one scheduler; use it as `async with AdminClient(address) as client`.

    It belongs to the event loop in which it is opened. Every method raises `OctavoError`: UnavailableError if nothing
    answers, or not within CALL_TIMEOUT_S (LOAD_TIMEOUT_S of a load, CHANGE_TIMEOUT_S of what changes a fleet);
    AdminPortError at another port; UnauthenticatedError and PermissionDeniedError if the token may not do this.

    Args:
        address: HOST:PORT of the scheduler's admin port, or any gRPC target.
        tls: How to speak TLS; None: plaintext. The files are read when the client is opened.
        token: An operator's, for a scheduler with --tokens-file; over plaintext it goes to this machine only.

    Raises: ConnectionOptionsError: the token cannot be sent; when the client is opened, also: a file cannot be used.
    """

    def __init__(
        self, address: str = DEFAULT_ADMIN_ADDRESS, *, tls: TlsOptions | None = None, token: str | None = None
    ) -> None:
        super().__init__(address, tls=tls, token=token)

    def page_url(self, port: int) -> str | None:
        """Return where the live page is; None: it is not served, or no browser can open the address.

        Args:
            port: `GetSchedulerStateResponse.page_port`.
        """
        if not port or "/" in self.address or self.address.startswith(("unix", "dns:", "ipv4:", "ipv6:")):
            return None
        return f"{'http' if self._tls is None else 'https'}://{self.address.rpartition(':')[0]}:{port}/"

    async def get_state(self) -> pb.GetSchedulerStateResponse:
        """Return queue lengths, blocks, counters and executors."""
        return await self._call(lambda stub: stub.GetSchedulerState, pb.GetSchedulerStateRequest())

    async def list_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        """Return the oldest live requests, at most `limit`, by age, without block tables and events."""
        requests: list[admin_pb2.RequestState] = []
        page_token = ""
        while len(requests) < limit:
            page_size = min(limit - len(requests), MAX_PAGE_SIZE)
            page = await self._call(
                lambda stub: stub.ListRequests, pb.ListRequestsRequest(page_size=page_size, page_token=page_token)
            )
            requests += page.requests
            page_token = page.next_page_token
            if not (page.requests and page_token):
                break
        return requests

    async def list_ended_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        """Return the last requests that ended, the newest end first, at most `limit` (1 to MAX_PAGE_SIZE)."""
        request = pb.ListEndedRequestsRequest(num_requests=limit)
        return list((await self._call(lambda stub: stub.ListEndedRequests, request)).requests)

    async def list_queue(self, limit: int) -> list[admin_pb2.QueuedRequest]:
        """Return the head of the waiting queue with reasons, at most `limit` (1 to MAX_PAGE_SIZE)."""
        request = pb.ListQueueRequest(page_size=limit)
        return list((await self._call(lambda stub: stub.ListQueue, request)).requests)

    async def get_request(self, request_id: str, tenant: str | None = None) -> admin_pb2.RequestState:
        """Return a live or ended request, with block tables and events; `tenant` None: of any tenant.

        Raises: NotFoundError: no request has the id. InvalidRequestError: several tenants have it, and none is named.
        """
        request = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        return (await self._call(lambda stub: stub.GetRequest, request)).request

    async def explain_request(self, request_id: str, tenant: str | None = None) -> pb.ExplainRequestResponse:
        """Return why a request waits, that it runs, or how it ended; see `get_request`."""
        request = pb.ExplainRequestRequest(request_id=request_id, tenant=tenant)
        return await self._call(lambda stub: stub.ExplainRequest, request)

    async def get_block_map(self, executor: str) -> pb.GetBlockMapResponse:
        """Return the state of every block of an executor.

        Raises: NotFoundError: there is no such executor; UnavailableError: it is not attached.
        """
        return await self._call(lambda stub: stub.GetBlockMap, pb.GetBlockMapRequest(executor=executor))

    async def get_block(self, executor: str, block: int) -> pb.GetBlockResponse:
        """Return which sequences use a block of an executor's device pool.

        Raises: NotFoundError: there is no such executor; UnavailableError: it is not attached.
        """
        return await self._call(lambda stub: stub.GetBlock, pb.GetBlockRequest(executor=executor, block=block))

    async def drain_executor(self, executor: str, *, undo: bool = False) -> pb.DrainExecutorResponse:
        """Empty an executor, or with `undo` let it take requests again; return what it has now.

        Raises: NotFoundError: there is no such executor.
        """
        request = pb.DrainExecutorRequest(executor=executor, undo=undo)
        return await self._call(lambda stub: stub.DrainExecutor, request)

    async def load_adapter(self, name: str, source: str, *, in_place: bool = False) -> pb.Adapter:
        """Load an adapter, and let requests name it from then on.

        Args:
            name: For requests.
            source: Where executors find it: a path in a folder of their --lora-dir, or a name of their --lora.
            in_place: Whether the name may stand for another adapter until now.

        Raises: InvalidRequestError: the name is taken, or one cannot be. InternalError: no executor can load it.
        """
        request = pb.LoadAdapterRequest(name=name, source=source, in_place=in_place)
        return (await self._call(lambda stub: stub.LoadAdapter, request, LOAD_TIMEOUT_S)).adapter

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter; those that run go on. Raises NotFoundError: there is none."""
        await self._call(lambda stub: stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name))

    async def list_adapters(self) -> list[pb.Adapter]:
        """Return the adapters that requests may name, by name."""
        return list((await self._call(lambda stub: stub.ListAdapters, pb.ListAdaptersRequest())).adapters)

    async def pause(self, mode: PauseMode = "recompute") -> None:
        """Let the fleet compute nothing until `resume`; return when no step is in flight.

        Args:
            mode: What becomes of live requests. "abort": they end with an error. "wait": they run to their ends. "keep"
                and "recompute": they stop, and after an update go on with their keys and values as they are, or are
                computed again from their tokens.

        Raises: InvalidRequestError: the weights are being changed, or the fleet was resumed meanwhile.
        """
        name = f"PAUSE_MODE_{mode.upper()}"
        if name not in pb.PauseMode.keys() or name == "PAUSE_MODE_UNSPECIFIED":  # noqa: SIM118  # no mapping
            raise InvalidRequestError(f"mode is {mode}; it must be abort, wait, keep or recompute", field="mode")
        await self._call(lambda stub: stub.Pause, pb.PauseRequest(mode=pb.PauseMode.Value(name)), CHANGE_TIMEOUT_S)

    async def resume(self) -> None:
        """End a pause; without one nothing happens. Raises InvalidRequestError: the executors sleep, or change."""
        await self._call(lambda stub: stub.Resume, pb.ResumeRequest())

    async def update_weights(
        self,
        source: str = "",
        *,
        files: Sequence[WeightFile] | str | os.PathLike[str] | bytes = (),
        weights_digest: str = "",
    ) -> str:
        """Put other weights of the same model in place on all executors of a paused fleet; return their digest.

        Args:
            source: A folder with safetensors files that every executor finds in its --weights-dir.
            files: Or else safetensors files to send: paths, bytes, or iterables of bytes, which threads read. One path
                or one bytes object is one file.
            weights_digest: That they must have; "": any.

        Raises:
            InvalidRequestError: the fleet is not paused, a file cannot be read, or no executor takes the weights: all
                go on with those that they have.
            UnavailableError: no executor is attached, or none is left.
        """
        if bool(source) == bool(files):
            raise InvalidRequestError("give either source, a folder, or files", field="source")
        endpoint = self._endpoint()
        stub: _Stub = admin_service_pb2_grpc.AdminServiceStub(endpoint.channel)
        call = stub.UpdateWeights(timeout=CHANGE_TIMEOUT_S, metadata=self._metadata)
        messages = _one_message(source, weights_digest) if source else update_messages(files, weights_digest)
        try:
            async with aclosing(messages):
                await _write_all(call, messages)
            return message_of(await call).weights_digest
        except grpc.aio.AioRpcError as error:
            raise self._to_octavo_error(error, endpoint) from error
        finally:
            call.cancel()  # does nothing to a call that has ended; one that is cut changes nothing

    async def weight_version(self) -> pb.GetWeightVersionResponse:
        """Return which weights are served, and whether the fleet is paused."""
        return await self._call(lambda stub: stub.GetWeightVersion, pb.GetWeightVersionRequest())

    async def reset_prefix_cache(self) -> None:
        """Let no block be found again that is cached now; running requests go on."""
        await self._call(lambda stub: stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())

    async def sleep(self, level: int = 1) -> None:
        """Let all executors give memory back until `wake_up`; a fleet that runs is paused until then.

        Args:
            level: 1, the cache, and on GPUs the weights, which the host keeps; 2, the weights altogether: then
                `update_weights` comes before `wake_up`.

        Raises: InvalidRequestError: they cannot, sleep already, or are being changed.
        """
        await self._call(lambda stub: stub.Sleep, pb.SleepRequest(level=level), CHANGE_TIMEOUT_S)

    async def wake_up(self) -> None:
        """End `sleep`. Raises InvalidRequestError: they do not sleep, or have no weights."""
        await self._call(lambda stub: stub.WakeUp, pb.WakeUpRequest(), CHANGE_TIMEOUT_S)

    async def _call(
        self,
        method: "Callable[[_Stub], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]",
        request: _Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> _Response:
        endpoint = self._endpoint()
        stub: _Stub = admin_service_pb2_grpc.AdminServiceStub(endpoint.channel)
        try:
            return message_of(await method(stub)(request, timeout=timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                waited = f"the scheduler at {endpoint.address} did not answer within {timeout_s:g} s"
                raise UnavailableError(waited) from error
            raise self._to_octavo_error(error, endpoint) from error

    def _to_octavo_error(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> OctavoError:
        """Add what only this client knows: which port it dialled."""
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                return NotFoundError(error.details() or "")
            case grpc.StatusCode.UNIMPLEMENTED:
                return AdminPortError(endpoint.address)
        return super()._to_octavo_error(error, endpoint)

    def _not_grpc(self, endpoint: Endpoint) -> OctavoError:
        return AdminPortError(endpoint.address)


async def _one_message(source: str, weights_digest: str) -> AsyncGenerator[pb.UpdateWeightsRequest, None]:
    yield pb.UpdateWeightsRequest(source=source, weights_digest=weights_digest)


async def _write_all(
    call: "grpc.aio.StreamUnaryCall[pb.UpdateWeightsRequest, pb.UpdateWeightsResponse]",
    messages: AsyncIterator[pb.UpdateWeightsRequest],
) -> None:
    """Write messages until there are no more, or the call has ended; its answer says why."""
    async for message in messages:
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
    await call.done_writing()

"""AdminService without a scheduler, over HTTP as the page calls it: for sizes and failures that are hard to come by."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from scheduler_svc.admin.page.bundle import load_page

PATH = "/octavo.admin.v1.AdminService/"


class RefusedError(Exception):
    """An answer with an error: the Connect protocol's name of the code, and the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


HTTP_STATUS = {"not_found": 404, "unauthenticated": 401, "unavailable": 503}


@dataclass(slots=True)
class FakeAdmin:
    """Answers what it is told to.

    Attributes:
        state: What GetSchedulerState answers.
        num_blocks: Blocks of each executor.
        share_changed: Share of the blocks of an executor that are in another state at each GetBlockMap.
        token: What a call has to send; empty: nothing.
        front_tokens_per_s: Tokens that go to each ready front between two GetSchedulerState, a second apart.
        address: Where it serves, host:port; after `start`.
    """

    state: pb.GetSchedulerStateResponse
    num_blocks: int = 64
    share_changed: float = 0.0
    token: str = ""
    front_tokens_per_s: int = 0
    address: str = "127.0.0.1:0"
    maps: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = field(default_factory=dict)
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serve; again on the same port if it was stopped."""
        app = web.Application()
        app.add_routes([web.get("/", _get_page), web.post(PATH + "{method}", self._call)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        host, port = self.address.rsplit(":", 1)
        await web.TCPSite(self._runner, host, int(port), reuse_address=True).start()
        self.address = f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End it as a crash would."""
        assert self._runner is not None
        await self._runner.cleanup()

    async def _call(self, request: web.Request) -> web.Response:
        if self.token and not secrets.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.token}"):
            return _error(RefusedError("unauthenticated", "unknown bearer token"))
        try:
            answer = self._answer(request.match_info["method"], await request.text())
        except RefusedError as error:
            return _error(error)
        return web.Response(text=json_format.MessageToJson(answer), content_type="application/json")

    def _answer(self, method: str, body: str) -> Message:
        if method == "GetSchedulerState":
            self.state.uptime_ms += 1000
            for front in self.state.fronts:
                front.num_output_tokens += self.front_tokens_per_s * front.is_ready
            return self.state
        if method == "GetBlockMap":
            return self._block_map(json_format.Parse(body, pb.GetBlockMapRequest()).executor)
        if method in ("GetRequest", "ExplainRequest"):
            raise RefusedError("not_found", "no request has this id")
        return {
            "ListQueue": pb.ListQueueResponse(),
            "ListRequests": pb.ListRequestsResponse(),
            "ListEndedRequests": pb.ListEndedRequestsResponse(),
            "ListSteps": pb.ListStepsResponse(),
        }[method]

    def _block_map(self, executor: str) -> pb.GetBlockMapResponse:
        generator = np.random.default_rng(len(executor))
        states = self.maps.setdefault(executor, generator.integers(1, 5, self.num_blocks, np.uint8))
        changed = generator.choice(self.num_blocks, int(self.share_changed * self.num_blocks), replace=False)
        states[changed] = states[changed] % 4 + 1
        return pb.GetBlockMapResponse(executor=executor, block_size_tokens=16, states=states.tobytes())


def state_with(num_executors: int, num_blocks: int = 64) -> pb.GetSchedulerStateResponse:
    """Return a scheduler with so many executors that are attached."""
    return pb.GetSchedulerStateResponse(
        version="0.0.1",
        status_text="ready" if num_executors else "not ready: no executor is attached",
        uptime_ms=5000,
        num_blocks=num_executors * num_blocks,
        executors=_executors(num_executors, num_blocks),
    )


def _executors(num_executors: int, num_blocks: int) -> Iterator[admin_pb2.ExecutorState]:
    for index in range(num_executors):
        yield admin_pb2.ExecutorState(
            address=f"executor-{index:02}:50061",
            status=admin_pb2.EXECUTOR_STATUS_ATTACHED,
            status_text="attached",
            instance_id=f"instance-{index}",
            epoch=1,
            model_id="fake",
            num_blocks=num_blocks,
            num_free_blocks=num_blocks // 2,
            num_used_blocks=num_blocks - num_blocks // 2,
        )


async def _get_page(request: web.Request) -> web.Response:
    page = load_page()
    headers = {"Content-Security-Policy": page.content_security_policy}
    return web.Response(body=page.html, content_type="text/html", charset="utf-8", headers=headers)


def _error(error: RefusedError) -> web.Response:
    return web.json_response({"code": error.code, "message": str(error)}, status=HTTP_STATUS[error.code])

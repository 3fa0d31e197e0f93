"""A scheduler whose answers a test writes, and the numbers of a picture made by hand."""

from dataclasses import dataclass, field

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import NotFoundError
from octavo.errors import OctavoError
from octavo.top.polling import Answers
from octavo.top.rates import Picture, Rates

GIB_BLOCKS = 4096


@dataclass
class Scripted:
    """Answers with what it holds; `error` is raised instead, if there is one."""

    state: pb.GetSchedulerStateResponse = field(default_factory=lambda: state())
    live: list[admin_pb2.RequestState] = field(default_factory=list)
    ended: list[admin_pb2.RequestState] = field(default_factory=list)
    queue: list[admin_pb2.QueuedRequest] = field(default_factory=list)
    explanations: dict[str, pb.ExplainRequestResponse] = field(default_factory=dict)
    block_map: pb.GetBlockMapResponse = field(default_factory=lambda: pb.GetBlockMapResponse(block_size_tokens=16))
    block: pb.GetBlockResponse = field(default_factory=pb.GetBlockResponse)
    error: OctavoError | None = None
    address: str = "127.0.0.1:50052"
    limits: list[int] = field(default_factory=list)
    num_pictures: int = 0

    def page_url(self, port: int) -> str | None:
        return f"http://127.0.0.1:{port}/" if port else None

    async def get_state(self) -> pb.GetSchedulerStateResponse:
        if self.error is not None:
            raise self.error
        return self.state

    async def list_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        self.num_pictures += 1
        self.limits.append(limit)
        return self.live[:limit]

    async def list_ended_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        self.limits.append(limit)
        return self.ended[:limit]

    async def list_queue(self, limit: int) -> list[admin_pb2.QueuedRequest]:
        self.limits.append(limit)
        return self.queue[:limit]

    async def get_request(self, request_id: str, tenant: str | None = None) -> admin_pb2.RequestState:
        for request in (*self.live, *self.ended):
            if request.request_id == request_id:
                return request
        raise NotFoundError(f"no live request has request_id {request_id!r}, and none that ended")

    async def explain_request(self, request_id: str, tenant: str | None = None) -> pb.ExplainRequestResponse:
        request = await self.get_request(request_id)
        return self.explanations.get(request_id) or pb.ExplainRequestResponse(status=request.status, explanation="is")

    async def get_block_map(self, executor: str) -> pb.GetBlockMapResponse:
        return self.block_map

    async def get_block(self, executor: str, block: int) -> pb.GetBlockResponse:
        return self.block


def executor(address: str = "127.0.0.1:50061", **values: object) -> admin_pb2.ExecutorState:
    """Return an executor that is attached, with 4,096 blocks: 1,024 used, of them 256 shared, and 512 cached."""
    numbers: dict[str, object] = {
        "status": admin_pb2.EXECUTOR_STATUS_ATTACHED,
        "status_text": "attached",
        "instance_id": f"instance of {address}",
        "model_id": "smollm2",
        "num_blocks": GIB_BLOCKS,
        "num_used_blocks": 1024,
        "num_shared_blocks": 256,
        "num_cached_blocks": 512,
        "num_free_blocks": GIB_BLOCKS - 1024,
    }
    return admin_pb2.ExecutorState(address=address, **{**numbers, **values})  # type: ignore[arg-type]


def lost_executor(address: str = "127.0.0.1:50062") -> admin_pb2.ExecutorState:
    """Return one that is looked for."""
    return admin_pb2.ExecutorState(
        address=address,
        status=admin_pb2.EXECUTOR_STATUS_CONNECTING,
        status_text="not attached",
        num_losses=2,
        last_error="cannot connect to 127.0.0.1:50062: connection refused",
    )


def state(*executors: admin_pb2.ExecutorState, **values: object) -> pb.GetSchedulerStateResponse:
    """Return a scheduler with these executors; none: with one that is attached."""
    numbers: dict[str, object] = {"version": "0.1.0", "uptime_ms": 60_000, "page_port": 50055, "status_text": "ready"}
    return pb.GetSchedulerStateResponse(executors=executors or [executor()], **{**numbers, **values})  # type: ignore[arg-type]


def running(request_id: str, age_ms: int = 1000, **values: object) -> admin_pb2.RequestState:
    """Return a request that runs and had its last token 20 ms ago."""
    numbers: dict[str, object] = {
        "status": admin_pb2.REQUEST_STATUS_RUNNING,
        "status_text": "running",
        "executor": "127.0.0.1:50061",
        "num_prompt_tokens": 100,
        "num_output_tokens": 10,
        "queue_ms": 5,
        "time_to_first_token_ms": 30,
        "last_token_age_ms": 20,
    }
    return admin_pb2.RequestState(request_id=request_id, age_ms=age_ms, **{**numbers, **values})  # type: ignore[arg-type]


def waiting(request_id: str, age_ms: int = 1000, **values: object) -> admin_pb2.RequestState:
    """Return a request that has not run."""
    numbers: dict[str, object] = {
        "status": admin_pb2.REQUEST_STATUS_WAITING,
        "status_text": "waiting",
        "num_prompt_tokens": 100,
    }
    return admin_pb2.RequestState(request_id=request_id, age_ms=age_ms, **{**numbers, **values})  # type: ignore[arg-type]


def ended(request_id: str, outcome: str = "length", **values: object) -> admin_pb2.RequestState:
    """Return a request that has ended."""
    numbers: dict[str, object] = {
        "num_prompt_tokens": 100,
        "num_output_tokens": 64,
        "age_ms": 900,
        "ended_ago_ms": 3000,
        "status_text": "failed" if ":" in outcome else "finished",
    }
    return admin_pb2.RequestState(
        request_id=request_id,
        status=admin_pb2.REQUEST_STATUS_ENDED,
        outcome=outcome,
        **{**numbers, **values},  # type: ignore[arg-type]
    )


def picture(
    scheduler: pb.GetSchedulerStateResponse | None = None,
    *live: admin_pb2.RequestState,
    rates: Rates | None = None,
    **values: object,
) -> Picture:
    """Return a picture of a scheduler and its live requests."""
    answers = Answers(at_s=1.0, state=scheduler or state(), live=live, **values)  # type: ignore[arg-type]
    return Picture(answers, rates or Rates())

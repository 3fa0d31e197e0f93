"""What a gateway is told about the model, the server and its load: pictures of the engine, taken between steps."""

import time
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import octavo
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.served_model import ServedModel

# What gateways tell engines apart by.
SERVER_TYPE = "vllm-grpc"

# A gateway looks for a tokenizer under `model_path`, in its file system and at a model hub, before it asks for ours.
# No directory and no repository has a name like this.
NOWHERE = "octavo://"


def model_info(model: ServedModel, name: str) -> pb.GetModelInfoResponse:
    """Describe the model; clients of the gateway call it by `name`."""
    return pb.GetModelInfoResponse(
        model_path=NOWHERE + name,
        served_model_name=name,
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len - 1,
        vocab_size=model.info.vocab_size,
        eos_token_ids=model.info.eos_token_ids,
    )


def server_info(
    engine: Engine, model: ServedModel, started_at_s: float, received_at_s: float
) -> pb.GetServerInfoResponse:
    """Describe the scheduler; the times are those of its start and its last request, in seconds since 1970."""
    return pb.GetServerInfoResponse(
        active_requests=len(engine.requests),
        is_paused=engine.readiness.is_draining,
        last_receive_timestamp=received_at_s,
        uptime_seconds=time.time() - started_at_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,  # a fleet is one engine to its clients
        block_size=model.info.block_size_tokens,
        model_dtype=model.info.dtype,
        max_num_seqs=sum(core.limits.max_num_seqs for core in engine.fleet.cores),
    )


def loads(engine: Engine) -> pb.GetLoadsResponse:
    """Return the load of the whole fleet as that of one rank; rates are 0, not measured here."""
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=octavo.__version__,
        dp_rank_count=1,
        loads=[_fleet_load(engine)],
    )


def _fleet_load(engine: Engine) -> pb.SchedulerLoad:
    cores = engine.fleet.cores
    num_running = sum(len(core.batch.running) for core in cores)
    num_used_tokens = sum(core.blocks.allocator.num_used_blocks * core.limits.block_size for core in cores)
    num_tokens = sum(core.blocks.allocator.num_blocks * core.limits.block_size for core in cores)
    max_num_seqs = sum(core.limits.max_num_seqs for core in cores)
    return pb.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=len(engine.requests) - num_running,
        num_total_reqs=len(engine.requests),
        num_used_tokens=num_used_tokens,
        max_total_num_tokens=num_tokens,
        token_usage=num_used_tokens / num_tokens if num_tokens else 0.0,
        utilization=sum(_num_taken_slots(core) for core in cores) / max_num_seqs if max_num_seqs else 0.0,
        max_running_requests=max_num_seqs,
        num_waiting_uncached_tokens=sum(group.num_prompt_tokens for group in engine.queue),
    )


def _num_taken_slots(core: ExecutorCore) -> int:
    return core.limits.max_num_seqs - core.batch.num_free_slots

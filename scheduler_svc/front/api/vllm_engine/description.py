"""What a gateway is told about the model, the server and its load: pictures of the engine, taken between steps."""

import time
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import octavo
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.request.engine_client import EngineClient, EngineLoad

# What gateways tell engines apart by.
SERVER_TYPE = "vllm-grpc"

# A gateway looks for a tokenizer under `model_path`, in its file system and at a model hub, before it asks for ours.
# No directory and no repository has a name like this.
NOWHERE = "octavo://"


def model_info(model: TextModel) -> pb.GetModelInfoResponse:
    """Describe the model; clients of the gateway call it by its name."""
    return pb.GetModelInfoResponse(
        model_path=NOWHERE + model.name,
        served_model_name=model.name,
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len - 1,
        vocab_size=model.info.vocab_size,
        eos_token_ids=model.info.eos_token_ids,
    )


def server_info(
    engine: EngineClient, model: TextModel, started_at_s: float, received_at_s: float
) -> pb.GetServerInfoResponse:
    """Describe the scheduler; the times are those of its start and its last request, in seconds since 1970."""
    load = engine.load
    return pb.GetServerInfoResponse(
        active_requests=load.num_requests,
        is_paused=engine.is_draining,
        last_receive_timestamp=received_at_s,
        uptime_seconds=time.time() - started_at_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,  # a fleet is one engine to its clients
        block_size=model.info.block_size_tokens,
        model_dtype=model.info.dtype,
        max_num_seqs=load.max_num_seqs,
    )


def loads(engine: EngineClient) -> pb.GetLoadsResponse:
    """Return the load of the whole fleet as that of one rank; rates are 0, not measured here."""
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=octavo.__version__,
        dp_rank_count=1,
        loads=[_fleet_load(engine.load)],
    )


def _fleet_load(load: EngineLoad) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_requests,
        num_used_tokens=load.num_used_cache_tokens,
        max_total_num_tokens=load.num_cache_tokens,
        token_usage=load.num_used_cache_tokens / load.num_cache_tokens if load.num_cache_tokens else 0.0,
        utilization=load.num_taken_slots / load.max_num_seqs if load.max_num_seqs else 0.0,
        max_running_requests=load.max_num_seqs,
        num_waiting_uncached_tokens=load.num_waiting_prompt_tokens,
    )

"""How the engine is: told to fronts when it changes, so that they can refuse requests before they tokenize."""

from dataclasses import astuple, dataclass

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.step_wire.wire_info import decode_info, encode_info
from scheduler_svc.request.engine_client import EngineLoad
from scheduler_svc.request.served_model import Reproducibility, ServedModel


@dataclass(frozen=True, slots=True)
class EngineState:
    """See the message of this name."""

    model: ServedModel | None
    why_not_ready: str
    is_draining: bool
    last_trouble: str
    has_executor: bool
    num_waiting: int
    max_waiting: int
    retry_after_s: float
    load: EngineLoad
    max_requests: int | None
    max_waiting_tokens: int | None = None
    orphan_timeout_s: float = 0.0
    tenants_at_share: frozenset[str] = frozenset()


UNREACHABLE = EngineState(
    model=None,
    why_not_ready="the engine does not answer",
    is_draining=False,
    last_trouble="the engine does not answer",
    has_executor=False,
    num_waiting=0,
    max_waiting=0,
    retry_after_s=1.0,
    load=EngineLoad(0, 0, 0, 0, 0, 0, 0),
    max_requests=None,
)


def encode_state(state: EngineState) -> pb.CoreState:
    """Return the message of a state."""
    return pb.CoreState(
        model=None if state.model is None else encode_model(state.model),
        why_not_ready=state.why_not_ready,
        is_draining=state.is_draining,
        last_trouble=state.last_trouble,
        has_executor=state.has_executor,
        num_waiting=state.num_waiting,
        max_waiting=state.max_waiting,
        retry_after_s=state.retry_after_s,
        load=pb.Load(**dict(zip(_LOAD_FIELDS, astuple(state.load), strict=True))),
        max_requests=state.max_requests,
        max_waiting_tokens=state.max_waiting_tokens,
        orphan_timeout_s=state.orphan_timeout_s,
        tenants_at_share=sorted(state.tenants_at_share),
    )


def decode_state(message: pb.CoreState) -> EngineState:
    """Return the state in a message."""
    return EngineState(
        model=decode_model(message.model) if message.HasField("model") else None,
        why_not_ready=message.why_not_ready,
        is_draining=message.is_draining,
        last_trouble=message.last_trouble,
        has_executor=message.has_executor,
        num_waiting=message.num_waiting,
        max_waiting=message.max_waiting,
        retry_after_s=message.retry_after_s,
        load=EngineLoad(*(getattr(message.load, name) for name in _LOAD_FIELDS)),
        max_requests=message.max_requests if message.HasField("max_requests") else None,
        max_waiting_tokens=message.max_waiting_tokens if message.HasField("max_waiting_tokens") else None,
        orphan_timeout_s=message.orphan_timeout_s,
        tenants_at_share=frozenset(message.tenants_at_share),
    )


def encode_model(model: ServedModel) -> pb.ServedModel:
    """Return the message of the served model."""
    return pb.ServedModel(
        info=encode_info(model.info),
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        served_name=model.served_name or "",
        numerics_ids=model.reproducibility.numerics_ids,
        weights_digest=model.reproducibility.weights_digest,
        why_not_reproducible=model.reproducibility.why_not,
    )


def decode_model(message: pb.ServedModel) -> ServedModel:
    """Return the served model."""
    return ServedModel(
        decode_info(message.info),
        message.max_model_len,
        message.max_num_seqs,
        message.served_name or None,
        Reproducibility(tuple(message.numerics_ids), message.weights_digest, message.why_not_reproducible),
    )


_LOAD_FIELDS = tuple(EngineLoad.__dataclass_fields__)

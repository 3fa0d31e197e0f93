"""A continuation as a message, for the link of the fronts and for the step log."""

from typing import TypedDict

import numpy as np

from octavo.core.v1 import continuation_pb2 as pb
from octavo.core.v1 import core_service_pb2 as core_pb
from octavo_shared.step_wire.step import Adapter
from octavo_shared.step_wire.wire import INT32
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.provenance import Numerics


def encode_continuation(continuation: Continuation) -> pb.Continuation:
    """Return the message."""
    return pb.Continuation(
        outputs=[
            pb.ContinuedOutput(
                token_ids=output.token_ids.astype(INT32, copy=False).tobytes(),
                finish_reason="" if output.finish_reason is None else output.finish_reason.value,
            )
            for output in continuation.outputs
        ],
        num_prompt_logprobs=continuation.num_prompt_logprobs,
        numerics_id=continuation.numerics.numerics_id,
        weights_digest=continuation.numerics.weights_digest,
        attempt=continuation.attempt,
        max_model_len=continuation.max_model_len or 0,
        **adapter_fields(continuation.adapter),
    )


def decode_continuation(message: pb.Continuation) -> Continuation:
    """Return what is in a message. Raises ValueError: a text of it is unknown, or an array is cut."""
    return Continuation(
        tuple(
            ContinuedOutput(
                np.frombuffer(output.token_ids, INT32).astype(np.int32),
                FinishReason(output.finish_reason) if output.finish_reason else None,
            )
            for output in message.outputs
        ),
        message.num_prompt_logprobs,
        Numerics(message.numerics_id, message.weights_digest),
        message.attempt,
        message.max_model_len or None,
        decode_adapter(message),
    )


class AdapterFields(TypedDict):
    """The fields of a message that say an adapter."""

    adapter_source: str
    adapter_digest: bytes


def adapter_fields(adapter: Adapter | None) -> AdapterFields:
    """Return the fields of an adapter whose content is known; else they are empty."""
    known = adapter if adapter is not None and adapter.digest else Adapter("")
    return {"adapter_source": known.source, "adapter_digest": known.digest}


def decode_adapter(message: pb.Continuation | core_pb.ProvenanceSpan) -> Adapter | None:
    """Return the adapter in a message; None: there is none."""
    return Adapter(message.adapter_source, message.adapter_digest) if message.adapter_digest else None

"""`vllm.grpc.engine.VllmEngine` on the scheduler's port: what the SMG gateway speaks, and so the OpenAI API.

A thin adapter. `requests.py` turns a request into one of `octavo.generation.v1`, GenerationService's servicer runs it,
`responses.py` turns its events into responses; `servicer.py` is the RPCs. Nothing else of the scheduler
knows this protocol.

The stubs come from the package smg-grpc-proto, of the extra `octavo[openai]`. They are imported only when
the scheduler is set up for it, so a scheduler without --vllm-engine needs none.
"""

import grpc.aio
from google.protobuf.message import Message

from scheduler_svc.front.api.servicer import GenerationServicer
from shared.errors import OctavoServiceError


def generate_request_class() -> type[Message]:
    """Return the class of what `Generate` takes. Raises OctavoServiceError: the stubs are missing."""
    try:
        from smg_grpc_proto.generated import vllm_engine_pb2
    except ImportError as error:
        raise OctavoServiceError(
            f"--vllm-engine needs the package smg-grpc-proto ({error}): install octavo[openai]"
        ) from error
    request_class: type[Message] = vllm_engine_pb2.GenerateRequest
    return request_class


def add_vllm_engine(server: grpc.aio.Server, generation: GenerationServicer, gateway_tenant: str) -> None:
    """Serve it on a server that has not started yet.

    Args:
        server: The scheduler's.
        generation: Runs the requests.
        gateway_tenant: The tenant of all of them.

    Raises: OctavoServiceError: no such tenant is served.
    """
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from scheduler_svc.front.api.vllm_engine.servicer import VllmEngineServicer

    tenants = generation.settings.tenants
    if tenants is not None and gateway_tenant not in tenants:
        raise OctavoServiceError(
            f"--gateway-tenant is {gateway_tenant or 'empty'}; it must be one of the tenants in --tenant-weights"
        )
    servicer = VllmEngineServicer(generation, gateway_tenant)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]

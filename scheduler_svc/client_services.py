"""The names of the services that clients call, for whoever serves them or says how they are."""

from octavo.generation.v1 import generation_service_pb2
from scheduler_svc.client_side_config import ClientSideConfig

GENERATION_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
VLLM_ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"


def client_services(config: ClientSideConfig) -> list[str]:
    """Return the full names of the services at --listen."""
    return [GENERATION_SERVICE, VLLM_ENGINE_SERVICE] if config.vllm_engine else [GENERATION_SERVICE]

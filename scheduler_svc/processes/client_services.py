"""The name of the service that clients call."""

from octavo.generation.v1 import generation_service_pb2

GENERATION_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

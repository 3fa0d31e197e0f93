"""All that clients reach, put together from the configuration: the gRPC port, OpenAI's, and what stands behind both.

It runs in the engine's process, or in one of its own; the engine looks the same to it. The engine's process has one
more port, for operators.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from octavo.generation.v1 import generation_service_pb2, generation_service_pb2_grpc
from octavo_shared.grpc import grpc_server
from octavo_shared.grpc.grpc_metrics import CallMetrics
from octavo_shared.grpc.grpc_server import GrpcServer, Health
from octavo_shared.grpc.tls import server_tls
from octavo_shared.process.metric import Family
from octavo_shared.process.tracing import Tracing, start_tracing
from scheduler_svc.config.client_side_config import ClientSideConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.front.access.access_control import AccessInterceptor, access_control
from scheduler_svc.front.api.generation import Generation
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.api.request_body import KeepBodies
from scheduler_svc.front.api.request_limits import FrontSettings
from scheduler_svc.front.api.servicer import GenerationServicer
from scheduler_svc.front.api_meter import ApiMeter
from scheduler_svc.front.delta_pace import DeltaPace
from scheduler_svc.front.grammars.grammar_checks import GrammarChecks, GrammarMeter
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.front.text.text_threads import LOST_THREADS
from scheduler_svc.processes.process import GENERATION_SERVICE
from scheduler_svc.request.engine_client import EngineClient

if TYPE_CHECKING:  # these import aiohttp and opentelemetry
    from scheduler_svc.front.openai.set_up import OpenAIServer
    from scheduler_svc.telemetry.request_tracing import RequestTracer

# The methods whose requests may be large, with the class of the request.
PROMPT_METHODS: Mapping[str, type[Message]] = {
    f"/{GENERATION_SERVICE}/Generate": generation_service_pb2.GenerateRequest,
    f"/{GENERATION_SERVICE}/StreamRequests": generation_service_pb2.StreamRequestsRequest,
    f"/{GENERATION_SERVICE}/Embed": generation_service_pb2.EmbedRequest,
    f"/{GENERATION_SERVICE}/Score": generation_service_pb2.ScoreRequest,
    f"/{GENERATION_SERVICE}/Tokenize": generation_service_pb2.TokenizeRequest,
    f"/{GENERATION_SERVICE}/Detokenize": generation_service_pb2.DetokenizeRequest,
}


class Front:
    """The ports of clients.

    Args:
        models: The engine of each model, and its tokenizer, by name; see `Models`.
        health: The health that the ports report.
        collect: Returns the metrics of the process, for OpenAI's port.
        is_shared: Whether other fronts serve at the same addresses.

    Attributes:
        main: The gRPC port.
        generations: What runs the requests of each model, by name.
        tls: The TLS of its ports; None: they speak plaintext.
        pace: The pace of the streams; its `watch` must be run.
        openai: The port of OpenAI's API; None: there is none.

    Raises: OctavoServiceError: --tracing lacks what it needs, or a file of TLS or of tokens cannot be used.
    """

    def __init__(
        self,
        config: ClientSideConfig,
        models: Mapping[str, tuple[EngineClient, ModelTokenizer]],
        health: Health,
        collect: Callable[[], list[Family]],
        *,
        call_metrics: CallMetrics,
        is_shared: bool = False,
    ) -> None:
        self.tls = tls = server_tls(config)
        access = access_control(config)
        self._tracing = start_tracing(config.tracing, "octavo-scheduler")
        self.pace, self._grammar_meter = DeltaPace(), GrammarMeter()
        self.generations = {
            name: Generation(
                engine,
                tokenizer,
                front_settings(config),
                request_tracer(self._tracing),
                GrammarChecks(meter=self._grammar_meter),
                self.pace,
            )
            for name, (engine, tokenizer) in models.items()
        }
        self._meter = ApiMeter()
        chosen = Models(self.generations, self._meter)
        self.generation = GenerationServicer(chosen)
        self.openai: OpenAIServer | None = None
        if config.openai_listen is not None:
            from scheduler_svc.front.openai.set_up import openai_server

            self.openai = openai_server(config, config.openai_listen, chosen, access, collect, is_shared=is_shared)
        self.main = GrpcServer(
            listen=config.listen,
            max_message_bytes=config.max_message_bytes,
            max_request_bytes=config.max_request_bytes,
            service_names=[GENERATION_SERVICE],
            health=health,
            credentials=None if tls is None else tls.credentials(),
            interceptors=[] if access is None else [AccessInterceptor(access, on_refused=self._meter.call_refused)],
            readers=[KeepBodies(PROMPT_METHODS)],
            call_metrics=call_metrics,
            is_shared=is_shared,
            max_connection_age_ms=grpc_server.CLIENT_CONNECTION_AGE_MS,
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, self.main.server)

    def families(self) -> Iterator[Family]:
        """Yield the metrics of what clients reach, beside those of every gRPC service."""
        yield from self._meter.families()
        yield from self._grammar_meter.families()
        yield LOST_THREADS.single(sum(each.text_threads.num_lost for each in self.generations.values()))
        if self.openai is not None:
            yield from self.openai.families()

    async def close(self, timeout_s: float) -> None:
        """Send the remaining traces, within `timeout_s`."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, timeout_s)


def request_tracer(tracing: Tracing | None) -> "RequestTracer | None":
    """Return what makes the spans of requests; None: requests are not traced, and opentelemetry is not imported."""
    if tracing is None:
        return None
    from scheduler_svc.telemetry.request_tracing import RequestTracer

    return RequestTracer(tracing.tracer)


def front_settings(config: ClientSideConfig) -> FrontSettings:
    """Return the front's part of the configuration; a standalone front hears the rest from the engine."""
    settings = FrontSettings(
        max_beam_width=config.max_beam_width, has_model_defaults=config.generation_config == "auto"
    )
    if not isinstance(config, SchedulerConfig):
        return settings
    return replace(settings, has_priorities=config.policy == "priority")

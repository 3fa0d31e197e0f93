"""The port of OpenAI's API, put together from the configuration; `routing.py` answers the requests."""

from collections.abc import Callable, Iterable, Iterator

from aiohttp import web

from octavo.values.address import is_loopback
from octavo_shared.process.metric import Family
from scheduler_svc.config.client_side_config import ClientSideConfig
from scheduler_svc.front.access.access_control import AccessControl
from scheduler_svc.front.anthropic.errors import in_shape_of
from scheduler_svc.front.anthropic.fields import OTHER_FIELDS
from scheduler_svc.front.anthropic.messages import Messages
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.openai.answering import Answering
from scheduler_svc.front.openai.chat import Chat
from scheduler_svc.front.openai.chat_outputs import ChatFormats
from scheduler_svc.front.openai.chat_page import chat_page_routes
from scheduler_svc.front.openai.completions import Completions
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.field_reader import Reader, UnknownFields
from scheduler_svc.front.openai.pooling_routes import PoolingRoutes
from scheduler_svc.front.openai.routing import Route, Routes, RouteSettings, refuse
from scheduler_svc.front.openai.service_routes import ServiceRoutes
from scheduler_svc.front.openai.trainer_routes import TrainerRoutes
from scheduler_svc.front.responses.endpoint import Responses
from scheduler_svc.front.responses.fields import OTHER_FIELDS as RESPONSES
from scheduler_svc.http.connections import ConnectionTimes
from scheduler_svc.http.http_port import HttpPort
from scheduler_svc.http.http_tls import HttpTls, http_tls

# Clients and proxies keep connections for the next request; nginx does so for 60 s.
TIMES = ConnectionTimes(first_request_s=15.0, idle_s=75.0, linger_s=2.0, stall_s=60.0)


class OpenAIServer(HttpPort):
    """Serves OpenAI's API on one address.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        tls: Of the port; None: it speaks plaintext.
    """

    def __init__(self, listen: str, routes: Routes, tls: HttpTls | None, *, is_shared: bool = False) -> None:
        super().__init__(listen, "--openai-listen", routes.answer, tls, TIMES, _refuse, is_shared=is_shared)
        self._routes = routes

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the port."""
        return self._routes.families()


def _refuse(status: int, what: str) -> web.Response:
    """Answer what is not an HTTP request."""
    return refuse(ApiError(status, f"malformed request: {what}"), {"Server": "octavo"})


def openai_server(
    config: ClientSideConfig,
    listen: str,
    models: Models,
    access: AccessControl | None,
    collect: Callable[[], Iterable[Family]],
    *,
    is_shared: bool = False,
) -> OpenAIServer:
    """Return the port.

    Args:
        config: The scheduler's.
        listen: Where it listens, host:port.
        models: Run the requests.
        access: Checks callers; None: all may call.
        collect: Returns the metrics of the scheduler.
        is_shared: Whether other processes serve at the address too.

    Raises: TlsFileError: a file cannot be used.
    """
    unknown = UnknownFields(config.openai_unknown_fields)
    reader = Reader(unknown)
    answering = Answering(models, reader)
    formats = ChatFormats(config.tool_call_parser, config.reasoning_parser)
    responses = Responses(Answering(models, Reader(unknown, RESPONSES)), formats)
    routes = {
        "/v1/chat/completions": Route("POST", Chat(answering, formats).answer, "chat_completions"),
        "/v1/completions": Route("POST", Completions(answering).answer, "completions"),
        **responses.routes(),
        **Messages(Answering(models, Reader(unknown, OTHER_FIELDS)), formats).routes(),
        **PoolingRoutes(answering).routes(),
        **ServiceRoutes(models, reader, collect).routes(),
        **(TrainerRoutes(models, reader, answering).routes() if config.trainer_api == "on" else {}),
        **(chat_page_routes() if config.chat_page == "on" else {}),
    }
    tls = http_tls(config)
    settings = RouteSettings(
        max_bytes=config.max_request_bytes, is_local=is_loopback(listen), speaks_tls=tls is not None
    )
    return OpenAIServer(listen, Routes(routes, access, settings, models.meter, in_shape_of), tls, is_shared=is_shared)

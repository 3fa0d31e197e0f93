"""The port of OpenAI's API: `routing.py` answers the requests."""

from collections.abc import Iterator

from aiohttp import web

from octavo_shared.process.metric import Family
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.routing import Routes, refuse
from scheduler_svc.http.connections import ConnectionTimes
from scheduler_svc.http.http_port import HttpPort
from scheduler_svc.http.http_tls import HttpTls

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

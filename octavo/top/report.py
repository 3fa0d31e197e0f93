"""All that a scheduler knows of one request, and how a part of its id finds it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from urllib.parse import quote

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import NotFoundError
from octavo.errors import OctavoError, UnavailableError
from octavo.top.polling import MAX_SEARCHED_REQUESTS, AdminSource
from octavo.values.wording import printable

# Live requests among which an id is looked for by its beginning, the oldest ones.
_MAX_SEARCHED_LIVE = 10 * MAX_SEARCHED_REQUESTS
_MAX_NAMED = 3


class UnknownRequestError(OctavoError):
    """No request has the id, or several have the beginning of one."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The requests that share blocks of the device pool with a request.

    Attributes:
        num_shared_blocks: Its blocks that other sequences use too, of other requests or of its own.
        request_ids: The other requests that use the first of these, in the order of their ids.
    """

    num_shared_blocks: int = 0
    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a scheduler says of one request.

    Attributes:
        request: What it is, and its life.
        explanation: Why it waits, that it runs, or how it ended.
        sharing: The blocks that it shares; None: it has none on a device.
        url: Its live page; None: it is not served, or no browser can reach it.
        warnings: What is wrong with attached executors, by address: its own, or the ones that it waits for.
    """

    request: admin_pb2.RequestState
    explanation: pb.ExplainRequestResponse
    sharing: Sharing | None = None
    url: str | None = None
    warnings: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.explanation.status == admin_pb2.REQUEST_STATUS_ENDED

    @property
    def device_blocks(self) -> list[int]:
        """Its blocks of the device pool, each once, in the order of its sequences and of their tokens."""
        return list(dict.fromkeys(b for s in self.request.sequences for b in s.block_table if b >= 0))

    @property
    def host_blocks(self) -> list[int]:
        """Its blocks of the host pool, each once."""
        return list(dict.fromkeys(b for s in self.request.sequences for b in s.host_block_table if b >= 0))


async def ask_report(source: AdminSource, request_id: str, tenant: str | None = None) -> Report:
    """Ask for all of one request: three calls, and two more if it has blocks on a device.

    Raises: NotFoundError: no request has this id; OctavoError: see AdminClient.
    """
    request, explanation, state = await asyncio.gather(
        source.get_request(request_id, tenant), source.explain_request(request_id, tenant), source.get_state()
    )
    page = source.page_url(state.page_port)
    url = None if page is None else f"{page}#request={quote(request_id, safe='')}"
    concerned = {explanation.executor, *(fit.executor for fit in explanation.executors)}
    warnings = {e.address: e.warning for e in state.executors if e.warning and e.address in concerned}
    report = Report(request, explanation, url=url, warnings=warnings)
    if not report.device_blocks:
        return report
    try:
        return replace(report, sharing=await _ask_sharing(source, report))
    except (NotFoundError, UnavailableError):  # its executor was lost meanwhile
        return report


async def resolve_id(source: AdminSource, text: str, tenant: str | None = None) -> str:
    """Return the id that a text stands for: the id itself, or a beginning that only one request has.

    Raises: UnknownRequestError: none, or several; the message names the nearest.
    """
    try:
        return (await source.get_request(text, tenant)).request_id
    except NotFoundError as error:
        unknown = str(error)
    live = await source.list_requests(_MAX_SEARCHED_LIVE)
    ended = await source.list_ended_requests(MAX_SEARCHED_REQUESTS)
    ids = list(dict.fromkeys(request.request_id for request in (*live, *ended)))
    begins = [request_id for request_id in ids if text and request_id.startswith(text)]
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise UnknownRequestError(f"{len(begins):,} requests have an id that begins with {text!r}: {_named(begins)}")
    near = _near(text, ids)
    hint = f"; did you mean {_named(near)}?" if near else '; "octavo top" lists the requests'
    raise UnknownRequestError(f"{printable(unknown)}{hint}")


def _near(text: str, ids: list[str]) -> list[str]:
    """Return the ids that contain a text, else similar ones, in upper or lower case."""
    folded = text.casefold()
    if containing := [request_id for request_id in ids if folded and folded in request_id.casefold()]:
        return containing
    close = get_close_matches(folded, dict.fromkeys(request_id.casefold() for request_id in ids))
    return [request_id for request_id in ids if request_id.casefold() in close]


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED:,} more" if len(ids) > _MAX_NAMED else ""
    return ", ".join(printable(request_id) for request_id in ids[:_MAX_NAMED]) + more


async def _ask_sharing(source: AdminSource, report: Report) -> Sharing:
    """Ask which requests share blocks: shared blocks are a prefix, so all are found at the first one."""
    executor = report.request.executor
    states = (await source.get_block_map(executor)).states
    shared = [b for b in report.device_blocks if b < len(states) and states[b] == admin_pb2.BLOCK_STATE_SHARED]
    if not shared:
        return Sharing()
    holders = (await source.get_block(executor, shared[0])).holders
    others = {holder.request_id for holder in holders} - {report.request.request_id}
    return Sharing(len(shared), tuple(sorted(others)))

"""All that a scheduler knows of one request, and how a person who has half of an id finds the request."""

import asyncio
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import quote

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import NotFoundError
from octavo.errors import OctavoError, UnavailableError
from octavo.top.formatting import printable
from octavo.top.polling import MAX_SEARCHED_REQUESTS, AdminSource

# Live requests among which an id is looked for by its beginning, the oldest ones.
_MAX_SEARCHED_LIVE = 10 * MAX_SEARCHED_REQUESTS
_MAX_NAMED = 3


class UnknownRequestError(OctavoError):
    """No request has the id, or several have the beginning of one."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """With whom a request shares blocks of the device pool.

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
        sharing: With whom it shares blocks; None: it has none on a device.
        url: Its live page; None: no browser can reach it.
    """

    request: admin_pb2.RequestState
    explanation: pb.ExplainRequestResponse
    sharing: Sharing | None = None
    url: str | None = None

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


async def ask_report(source: AdminSource, request_id: str) -> Report:
    """Ask for all of one request: two calls, and two more if it has blocks on a device.

    Raises: NotFoundError: no request has this id; OctavoError: see AdminClient.
    """
    request, explanation = await asyncio.gather(source.get_request(request_id), source.explain_request(request_id))
    url = None if source.url is None else f"{source.url}#request={quote(request_id, safe='')}"
    report = Report(request, explanation, url=url)
    if not report.device_blocks:
        return report
    try:
        sharing = await _ask_sharing(source, report)
    except (NotFoundError, UnavailableError):  # its executor was lost meanwhile
        return report
    return Report(request, explanation, sharing, url)


async def resolve_id(source: AdminSource, text: str) -> str:
    """Return the id that a text stands for: the id itself, or a beginning that only one request has.

    Raises: UnknownRequestError: none, or several; the message names those that come near.
    """
    try:
        return (await source.get_request(text)).request_id
    except NotFoundError:
        pass
    live = await source.list_requests(_MAX_SEARCHED_LIVE)
    ended = await source.list_ended_requests(MAX_SEARCHED_REQUESTS)
    ids = list(dict.fromkeys(request.request_id for request in (*live, *ended)))
    begins = [request_id for request_id in ids if text and request_id.startswith(text)]
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise UnknownRequestError(f"{len(begins):,} requests have an id that begins with {text!r}: {_named(begins)}")
    near = [request_id for request_id in ids if text and text in request_id] or get_close_matches(text, ids)
    hint = f"; did you mean {_named(near)}?" if near else '; "octavo top" lists those that there are'
    raise UnknownRequestError(f"no live request has the id {text!r}, and none of the last that ended{hint}")


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED:,} more" if len(ids) > _MAX_NAMED else ""
    return ", ".join(printable(request_id) for request_id in ids[:_MAX_NAMED]) + more


async def _ask_sharing(source: AdminSource, report: Report) -> Sharing:
    """Ask who uses the blocks of a request; what is shared with others is a prefix, so its first block names them."""
    executor = report.request.executor
    states = (await source.get_block_map(executor)).states
    shared = [b for b in report.device_blocks if b < len(states) and states[b] == admin_pb2.BLOCK_STATE_SHARED]
    if not shared:
        return Sharing()
    holders = (await source.get_block(executor, shared[0])).holders
    others = {holder.request_id for holder in holders} - {report.request.request_id}
    return Sharing(len(shared), tuple(sorted(others)))

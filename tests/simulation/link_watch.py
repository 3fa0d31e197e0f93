"""Rare things on the link between a core and its fronts, for watchers; as `watching.py` does it for the engine."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.core.v1 import core_service_pb2 as pb
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.link.core_servicer import CoreServicer
from scheduler_svc.link.front_session import FrontSession, _RemoteSink
from scheduler_svc.link.remote_core import RemoteCore
from scheduler_svc.request.outputs import FinishReason
from shared.errors import OctavoServiceError, RequestExistsError, SlowCallerError
from tests.simulation.watching import Watcher

RARE_ON_THE_LINK = {
    "session fenced by a newer one": "a front joined again, and its core had not noticed that it was gone",
    "fenced session had requests": "they ended with it",
    "front left with requests": "a session ended, and its requests with it",
    "tokens for a dead session": "a session ended, and its core had tokens for it that were not sent",
    "tokens for nobody": "tokens reached a front behind the end of their request",
    "slow front": "a front took nothing for so long that its session ended",
    "credits exhausted": "a core had nothing more that it may send to a front",
    "steps in one message": "what several steps brought grew together for a front that was behind",
    "stop string met a length": "a front found a stop string in an output that the core had ended otherwise",
    "stop string of an ended request": "a front said how an output ends, and the request had ended",
    "abort met an end": "a front aborted what had ended",
    "abort through another front": "a request of one front was aborted at another one",
    "id known from another front": "a request was refused whose id another front's request had",
    "core refused what its front let in": "a front knew of the core what was not true any more",
    "core lost with submissions": "a session broke before its core had said that it took a request",
    "core lost with requests": "a session broke, and live requests of its front ended",
    "core lost with an Abort": "a session broke, and somebody waited for an Abort",
}

Note = Callable[[str], None]


def watch_link(link: CoreServicer, engine: Engine, process: str, watchers: Sequence[Watcher]) -> None:
    """Let watchers see what happens at a core's side of the link from now on."""
    note = partial(_note, process, watchers)
    link._begin = partial(_begin, link._begin, link, note)  # type: ignore[method-assign]
    engine.requests.finish_output = partial(_finish, engine.requests.finish_output, note)  # type: ignore[method-assign]


def watch_front(core: RemoteCore, process: str, watchers: Sequence[Watcher]) -> None:
    """Let watchers see what happens at a front's side of the link from now on."""
    note = partial(_note, process, watchers)
    core._lose = partial(_lose, core._lose, core, note)  # type: ignore[method-assign]
    core._take = partial(_take, core._take, core, note)  # type: ignore[method-assign]


def _note(process: str, watchers: Sequence[Watcher], name: str) -> None:
    for watcher in watchers:
        watcher.linked(process, name)


# The core's side --------------------------------------------------------------------------------------------------


def _begin(
    begin: Callable[..., None],
    link: CoreServicer,
    note: Note,
    key: tuple[bool, str],
    hello: pb.FrontHello,
    session: FrontSession,
) -> None:
    for older in link.sessions:
        if older.name == session.name:
            note("session fenced by a newer one")
            if older.num_requests:
                note("fenced session had requests")
    begin(key, hello, session)
    session.run = partial(_run, session.run, session, note)  # type: ignore[method-assign]
    session.take = partial(_take_request, session.take, session, link, note)  # type: ignore[method-assign]
    session.refuse = partial(_refuse, session.refuse, note)  # type: ignore[method-assign]


async def _run(
    run: Callable[..., Any],
    session: FrontSession,
    note: Note,
    welcome: pb.CoreWelcome,
    num_credits: int,
    requests: Any,
    write: Callable[[pb.JoinResponse], Any],
) -> None:
    async def tell(message: pb.JoinResponse) -> None:
        if session._gate._num_credits == 0:
            note("credits exhausted")
        tokens = message.tokens
        if len(tokens.numbers) > len(set(zip(tokens.numbers, tokens.output_indexes or tokens.numbers, strict=True))):
            note("steps in one message")
        await write(message)

    try:
        await run(welcome, num_credits, requests, tell)
    except SlowCallerError:
        note("slow front")
        raise
    finally:
        if session._batch.num_tokens:
            note("tokens for a dead session")
        if any(ended.HasField("failure") for ended in session._batch.response.ended):
            note("front left with requests")


async def _take_request(
    take: Callable[[pb.JoinRequest], Any],
    session: FrontSession,
    link: CoreServicer,
    note: Note,
    message: pb.JoinRequest,
) -> None:
    submitted = {submission.number for submission in message.submissions}
    for end in message.output_ends:
        if end.number not in session._requests:
            note("stop string of an ended request")
    for abort in message.aborts:
        if abort.number not in session._requests and abort.number not in submitted:
            note("abort met an end")
    for call in message.abort_calls:
        for other in link.sessions:
            if other is not session and any(_id_of(sink) == call.request_id for sink in other._requests.values()):
                note("abort through another front")
    await take(message)


def _id_of(sink: _RemoteSink) -> str:
    return sink.handle._request.request_id  # type: ignore[attr-defined, no-any-return]


def _refuse(refuse: Callable[..., None], note: Note, number: int, error: OctavoServiceError) -> None:
    if isinstance(error, RequestExistsError):
        note("id known from another front")
    else:
        note("core refused what its front let in")
    refuse(number, error)


def _finish(
    finish: Callable[..., None],
    note: Note,
    request: LiveRequest,
    output_index: int,
    num_tokens: int,
    reason: FinishReason,
) -> None:
    if request.ends.get(output_index, reason) is not reason:
        note("stop string met a length")
    finish(request, output_index, num_tokens, reason)


# A front's side ---------------------------------------------------------------------------------------------------


async def _lose(lose: Callable[[str], Any], core: RemoteCore, note: Note, trouble: str) -> None:
    if core._requests:
        note("core lost with requests")
    if any(not request.queued.done() for request in core._requests.values()):
        note("core lost with submissions")
    if core._abort_calls:
        note("core lost with an Abort")
    await lose(trouble)


async def _take(take: Callable[..., Any], core: RemoteCore, note: Note, message: pb.JoinResponse, stub: Any) -> None:
    if any(number not in core._requests for number in message.tokens.numbers):
        note("tokens for nobody")
    await take(message, stub)

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
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import FinishReason
from shared.errors import CallerError, FencedError, OctavoServiceError, RequestExistsError, SlowCallerError
from tests.simulation.watching import Watcher

RARE_ON_THE_LINK = {
    "session fenced by a newer one": "a front joined again, and its core had not noticed that it was gone",
    "fenced session had requests": "they ended with it",
    "front left with requests": "a session ended, and its requests with it",
    "tokens for a dead session": "a session ended, and its core had tokens for it that were not sent",
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
    "Abort asked again": "the next core was asked for an Abort that the one before had not answered",
    "requests go on": "a front had the next core go on with its requests",
    "tokens go on": "and one of them had tokens",
    "request goes on unqueued": "and of one the core before had not said that it took it",
    "ended output goes on": "and of one an output had ended, and another one had not",
    "end not delivered": "and of one all outputs had ended: the end was on its way when the core went",
    "abort without a core": "a request that waited for the next core was aborted",
    "early Abort": "an Abort came to the core before its request did",
    "core refused by a front's number": "a core was there that a front knew to be the older one",
    "core raised its number": "a front had joined a core of a larger number",
    "absence too long": "no core came for so long that requests of a front ended",
    "attempt took a request over": "a continuation took a request from a call that lived",
}

Note = Callable[[str], None]


def watch_link(
    link: CoreServicer, engine: Engine, process: str, watchers: Sequence[Watcher], accuse: Callable[[str], None]
) -> None:
    """Let watchers see what happens at a core's side of the link from now on; `accuse`: told of a broken promise."""
    note = partial(_note, process, watchers)
    link._end_older = partial(_end_older, link._end_older, link, note)  # type: ignore[method-assign]
    link._begin = partial(_begin, link._begin, link, note, accuse)  # type: ignore[method-assign]
    link._keep_order = partial(_keep_order, link._keep_order, link, note)  # type: ignore[method-assign]
    link._early_aborts.has = partial(_has_early, link._early_aborts.has, note)  # type: ignore[method-assign]
    engine._supersede = partial(_supersede, engine._supersede, engine, note)  # type: ignore[method-assign]
    engine.requests.finish_output = partial(_finish, engine.requests.finish_output, note)  # type: ignore[method-assign]


def watch_front(core: RemoteCore, process: str, watchers: Sequence[Watcher]) -> None:
    """Let watchers see what happens at a front's side of the link from now on."""
    note = partial(_note, process, watchers)
    core._lose = partial(_lose, core._lose, core, note)  # type: ignore[method-assign]
    core._go_on = partial(_go_on, core._go_on, core, note)  # type: ignore[method-assign]
    core._absence._on_limit = partial(_give_up, core._absence._on_limit, core, note)
    core.abort = partial(_abort, core.abort, core, note)  # type: ignore[method-assign]


def _note(process: str, watchers: Sequence[Watcher], name: str) -> None:
    for watcher in watchers:
        watcher.linked(process, name)


# The core's side --------------------------------------------------------------------------------------------------


async def _end_older(
    end: Callable[..., Any], link: CoreServicer, note: Note, key: tuple[bool, str], hello: pb.FrontHello
) -> None:
    for older in link.sessions:
        if older.name == hello.front_id:
            note("session fenced by a newer one")
            if older.num_requests:
                note("fenced session had requests")
    await end(key, hello)


def _begin(
    begin: Callable[..., None],
    link: CoreServicer,
    note: Note,
    accuse: Callable[[str], None],
    key: tuple[bool, str],
    hello: pb.FrontHello,
    session: FrontSession,
) -> None:
    begin(key, hello, session)
    session.run = partial(_run, session.run, session, note, accuse)  # type: ignore[method-assign]
    session.take = partial(_take_request, session.take, session, link, note)  # type: ignore[method-assign]
    session.refuse = partial(_refuse, session.refuse, note)  # type: ignore[method-assign]


async def _run(
    run: Callable[..., Any],
    session: FrontSession,
    note: Note,
    accuse: Callable[[str], None],
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
    except FencedError:
        raise
    except CallerError as error:
        accuse(f"the core says of one of our fronts: {error}")
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


def _keep_order(keep: Callable[[pb.FrontHello], None], link: CoreServicer, note: Note, hello: pb.FrontHello) -> None:
    former = link.incarnation.number
    try:
        keep(hello)
    except FencedError:
        note("core refused by a front's number")
        raise
    if link.incarnation.number != former:
        note("core raised its number")


def _has_early(has: Callable[..., bool], note: Note, *arguments: Any) -> bool:
    found = has(*arguments)
    if found:
        note("early Abort")
    return found


def _supersede(supersede: Callable[[EngineRequest], None], engine: Engine, note: Note, request: EngineRequest) -> None:
    key = request.tenant, request.request_id
    was_live = key in engine.requests
    supersede(request)
    if was_live and key not in engine.requests:
        note("attempt took a request over")


# A front's side ---------------------------------------------------------------------------------------------------


async def _lose(lose: Callable[[str], Any], core: RemoteCore, note: Note, trouble: str) -> None:
    if core._requests:
        note("core lost with requests")
    if any(not request.queued.done() for request in core._requests.values()):
        note("core lost with submissions")
    if core._abort_calls:
        note("core lost with an Abort")
    await lose(trouble)


def _go_on(go_on: Callable[[], None], core: RemoteCore, note: Note) -> None:
    was_away, num_aborts = core._absence.is_on, len(core._abort_calls)
    go_on()
    if not was_away or core._absence.is_on:
        return
    if num_aborts:
        note("Abort asked again")
    if core._requests:
        note("requests go on")
    for request in core._requests.values():
        if not request.queued.done():
            note("request goes on unqueued")
        outputs = request.sink.so_far().outputs
        num_ended = sum(output.finish_reason is not None for output in outputs)
        if any(len(output.token_ids) for output in outputs):
            note("tokens go on")
        if num_ended:
            note("end not delivered" if num_ended == len(outputs) else "ended output goes on")


def _give_up(give_up: Callable[[float], None], core: RemoteCore, note: Note, after_s: float) -> None:
    if core._requests:
        note("absence too long")
    give_up(after_s)


def _abort(
    abort: Callable[[int, OctavoServiceError], None],
    core: RemoteCore,
    note: Note,
    number: int,
    error: OctavoServiceError,
) -> None:
    if core._absence.is_on and number in core._requests:
        note("abort without a core")
    abort(number, error)

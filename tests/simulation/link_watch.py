"""Rare things on the link between a core and its fronts, for watchers; as `watching.py` does it for the engine."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import CallerError, FencedError, OctavoServiceError, SlowCallerError
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.link.engine_servicer import EngineServicer
from scheduler_svc.link.front_session import FrontSession, _RemoteSink
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import FinishReason
from tests.simulation.watching import Watcher

RARE_ON_THE_LINK = {
    "session fenced by a newer one": "a front joined again, and its core had not noticed that it was gone",
    "slow front": "a front took nothing for so long that its session ended",
    "credits exhausted": "a core had nothing more that it may send to a front",
    "stop string met a length": "a front found a stop string in an output that the core had ended otherwise",
    "abort through another front": "a request of one front was aborted at another one",
    "tokens go on": "a front had the next core go on with a request that had tokens",
    "request goes on unqueued": "and with one of which the core before had not said that it took it",
    "end not delivered": "and with one whose outputs had all ended: the end was on its way when the core went",
    "abort in the message of its submission": "its client left at once",
    "credits beside a submission": "a front granted further messages in the message of a request",
    "core lost with an abort": "a session broke, and its core may not have heard of an abort",
    "abort without a core": "a request that waited for the next core was aborted",
    "early Abort": "an Abort came to the core before its request did",
    "core raised its number": "a front had joined a core of a larger number",
    "absence too long": "no core came for so long that requests of a front ended",
    "attempt took a request over": "a continuation took a request from a call that lived",
    "moved to another scheduler": "a front had another scheduler of its cell go on with a request",
    "moved with its scheduler": "and with its own scheduler at another address",
}

Note = Callable[[str], None]


def watch_link(
    link: EngineServicer, engine: Engine, process: str, watchers: Sequence[Watcher], accuse: Callable[[str], None]
) -> None:
    """Let watchers see what happens at a core's side of the link from now on; `accuse`: told of a broken promise."""
    note = partial(_note, process, watchers)
    link._end_older = partial(_end_older, link._end_older, link, note)  # type: ignore[method-assign]
    link._begin = partial(_begin, link._begin, link, note, accuse)  # type: ignore[method-assign]
    link._keep_order = partial(_keep_order, link._keep_order, link, note)  # type: ignore[method-assign]
    link._early_aborts.has = partial(_has_early, link._early_aborts.has, note)  # type: ignore[method-assign]
    engine._supersede = partial(_supersede, engine._supersede, engine, note)  # type: ignore[method-assign]
    engine.requests.finish_output = partial(_finish, engine.requests.finish_output, note)  # type: ignore[method-assign]


def watch_front(engine: RemoteEngine, process: str, watchers: Sequence[Watcher]) -> None:
    """Let watchers see what happens at a front's side of the link from now on."""
    note = partial(_note, process, watchers)
    engine.lose = partial(_lose, engine.lose, engine, note)  # type: ignore[method-assign]
    engine._go_on = partial(_go_on, engine._go_on, engine, note)  # type: ignore[method-assign]
    engine._absence._on_limit = partial(_give_up, engine._absence._on_limit, engine, note)
    engine.take_over = partial(_take_over, engine.take_over, engine, note)  # type: ignore[method-assign]
    engine.abort = partial(_abort, engine.abort, engine, note)  # type: ignore[method-assign]


def _note(process: str, watchers: Sequence[Watcher], name: str) -> None:
    for watcher in watchers:
        watcher.linked(process, name)


# The core's side --------------------------------------------------------------------------------------------------


async def _end_older(
    end: Callable[..., Any], link: EngineServicer, note: Note, key: tuple[bool, str], hello: pb.FrontHello
) -> None:
    for older in link.sessions:
        if older.name == hello.front_id:
            note("session fenced by a newer one")
    await end(key, hello)


def _begin(
    begin: Callable[..., None],
    link: EngineServicer,
    note: Note,
    accuse: Callable[[str], None],
    key: tuple[bool, str],
    hello: pb.FrontHello,
    session: FrontSession,
) -> None:
    begin(key, hello, session)
    session.run = partial(_run, session.run, session, note, accuse)  # type: ignore[method-assign]
    session.take = partial(_take, session.take, session, link, note)  # type: ignore[method-assign]


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


async def _take(
    take: Callable[[pb.JoinRequest], Any],
    session: FrontSession,
    link: EngineServicer,
    note: Note,
    message: pb.JoinRequest,
) -> None:
    submitted = {submission.number for submission in message.submissions}
    if any(abort.number in submitted for abort in message.aborts):
        note("abort in the message of its submission")
    if submitted and message.credits:
        note("credits beside a submission")
    for call in message.abort_calls:
        for other in link.sessions:
            if other is not session and any(_id_of(sink) == call.request_id for sink in other._requests.values()):
                note("abort through another front")
    await take(message)


def _id_of(sink: _RemoteSink) -> str:
    return sink.handle._request.request_id  # type: ignore[attr-defined, no-any-return]


def _finish(
    finish: Callable[..., None],
    note: Note,
    request: LiveRequest,
    output_index: int,
    num_tokens: int,
    reason: FinishReason,
) -> None:
    if request.ends[output_index].reason not in (None, reason):
        note("stop string met a length")
    finish(request, output_index, num_tokens, reason)


async def _keep_order(
    keep: Callable[[pb.FrontHello], Awaitable[None]], link: EngineServicer, note: Note, hello: pb.FrontHello
) -> None:
    former = link.incarnation.number, link.incarnation.granted
    await keep(hello)
    if (link.incarnation.number, link.incarnation.granted) != former:
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


async def _lose(lose: Callable[[str], Any], engine: RemoteEngine, note: Note, trouble: str) -> None:
    if any(request.aborted_with is not None for request in engine._requests.values()):
        note("core lost with an abort")
    await lose(trouble)


def _go_on(go_on: Callable[[], None], engine: RemoteEngine, note: Note) -> None:
    was_away = engine._absence.is_on
    go_on()
    if not was_away or engine._absence.is_on:
        return
    for request in engine._requests.values():
        if not request.queued.done():
            note("request goes on unqueued")
        if request.request.pooling is not None:
            note("text goes on")
            continue
        outputs = request.sink.so_far().outputs
        if any(len(output.token_ids) for output in outputs):
            note("tokens go on")
        if all(output.finish_reason is not None for output in outputs):
            note("end not delivered")


def _give_up(give_up: Callable[[float], None], engine: RemoteEngine, note: Note, after_s: float) -> None:
    if engine._requests:
        note("absence too long")
    give_up(after_s)


def _abort(
    abort: Callable[[int, OctavoServiceError], None],
    engine: RemoteEngine,
    note: Note,
    number: int,
    error: OctavoServiceError,
) -> None:
    if engine._absence.is_on and number in engine._requests:
        note("abort without a core")
    abort(number, error)


def _take_over(
    take_over: Callable[[RemoteEngine, int], None], engine: RemoteEngine, note: Note, lost: RemoteEngine, number: int
) -> None:
    is_same = engine.scheduler_id == lost.scheduler_id
    note("moved with its scheduler" if is_same else "moved to another scheduler")
    take_over(lost, number)

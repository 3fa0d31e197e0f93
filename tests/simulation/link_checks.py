"""What is looked at on the link between a core and its fronts: promises that no client can see broken.

- Each live request of a core, but for its own loads of adapters, belongs to a session that has not ended, and each
  session's to the core.
- When all is quiet, nothing is left on either side, and each front has granted its core all credits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_svc.engine.adapters import _LoadSink
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.cell import Cell
from scheduler_svc.link.engine_servicer import EngineServicer
from scheduler_svc.link.engine_stream import MAX_MESSAGES_ON_THEIR_WAY
from scheduler_svc.link.front_session import FrontSession, _RemoteSink
from scheduler_svc.link.remote_engine import RemoteEngine


@dataclass(slots=True)
class LinkChecks:
    """Watches the core's side of the link.

    Args:
        link: Where fronts join.
        engine: Behind it.
        accuse: Told of a broken promise.
    """

    link: EngineServicer
    engine: Engine
    accuse: Callable[[str], None]

    def look(self) -> None:
        """Look at all requests between two callbacks."""
        sessions = self.link.sessions
        requests = [request for request in self.engine.requests.values() if not isinstance(request.sink, _LoadSink)]
        for request in requests:
            sink = request.sink
            assert isinstance(sink, _RemoteSink), "all requests of a core with fronts come over the link"
            if sink._session not in sessions:
                self.accuse(f"{request.request_id} goes on, and the session of its front has ended")
            elif sink._session._requests.get(sink.number) is not sink:
                self.accuse(f"{request.request_id} goes on, and the session of its front does not know it")
        num_requests = sum(session.num_requests for session in sessions)
        if num_requests != len(requests):
            self.accuse(f"sessions have {num_requests} requests, and their core {len(requests)}")


def left_on_the_link(link: EngineServicer, cells: Sequence[Cell], num_engines: int) -> str:
    """Return what is left of requests, sessions and engines that have ended, in words.

    Args:
        link: Of an engine.
        cells: Of the fronts that join it.
        num_engines: How many they join.
    """
    checked = [f"{num} requests that are checked" for cell in cells if (num := cell._num_checked_of.total())]
    checked += [f"{num} engines" for cell in cells if (num := len(cell.engines)) != num_engines]
    all_engines = [engine for cell in cells for engine in cell.engines]
    engines = [engine for engine in all_engines if engine.scheduler_id == link.incarnation.scheduler_id]
    of_fronts = (what for engine in engines for what in _left_at(link, engine))
    return ", ".join([*_left_at_the_engine(link, len(cells)), *checked, *of_fronts])


def _left_at_the_engine(link: EngineServicer, num_fronts: int) -> Iterator[str]:
    if len(link.sessions) != num_fronts:
        yield f"{len(link.sessions)} sessions of {num_fronts} fronts"
    if len(link.metrics._current) != len(link.own_sessions):  # standalone fronts serve theirs
        yield f"metrics of {len(link.metrics._current)} sessions"
    for session in link.sessions:
        if session.num_requests:
            yield f"{session.num_requests} requests in the session of {session.name}"
        if session._batch.is_announced:
            yield f"news for {session.name}"


def _left_at(link: EngineServicer, engine: RemoteEngine) -> Iterator[str]:
    outgoing = engine._outbox.message
    left = {
        "requests": engine.num_requests,
        "calls of Abort": len(engine._abort_calls),
        "messages to the engine": len(engine._outbox._full),
        "submissions": len(outgoing.submissions),
        "ends of outputs": len(outgoing.output_ends),
        "aborts": len(outgoing.aborts),
    }
    yield from (f"{number} {what} at {engine.front_id}" for what, number in left.items() if number)
    for session in link.sessions:
        if session.name == engine.front_id:
            num_credits = credits_of(session, engine)
            if num_credits != MAX_MESSAGES_ON_THEIR_WAY:
                yield f"{num_credits} credits of {engine.front_id} instead of {MAX_MESSAGES_ON_THEIR_WAY}"


def credits_of(session: FrontSession, engine: RemoteEngine) -> int:
    """Return the credits of a session, wherever they are; none of its messages is on its way."""
    return (session._gate._num_credits or 0) + engine._stream._num_taken + engine._outbox.message.credits

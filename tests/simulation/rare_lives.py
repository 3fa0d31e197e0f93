"""Rare things in the life of a request, as a scheduler tells it at its end.

A life is a word, one letter for each event: A admitted, P preempted, O swapped out, I swapped in, D dropped from the
host pool, L executor lost, K parked, T first token. The last letter is its end: F finished, C another call aborted it,
G its client was gone, X its deadline had passed, U unavailable, R too large, E another error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.request.life import EndedRequest, EventKind
from tests.simulation.engine_checks import COUNTED_OUT
from tests.simulation.rare import Rare

_LETTERS = {
    EventKind.ADMITTED: "A",
    EventKind.PREEMPTED: "P",
    EventKind.SWAPPED_OUT: "O",
    EventKind.SWAPPED_IN: "I",
    EventKind.DROPPED: "D",
    EventKind.EXECUTOR_LOST: "L",
    EventKind.PARKED: "K",
}
_ENDS = {"UNAVAILABLE": "U", "RESOURCE_EXHAUSTED": "R"}
_SEVERAL = ("several", "best_of")

# An end and a loss that are so close meet in the same callbacks, in seconds.
_CLOSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a request.

    Attributes:
        ended: What the scheduler says of it.
        kind: Its kind of shape; empty: unknown.
        word: As above.
        meets_resume: Whether it ended while the step stream of its executor was being resumed.
    """

    ended: EndedRequest
    kind: str
    word: str
    meets_resume: bool = False


def word_of(ended: EndedRequest, *, has_left: bool, is_late: bool) -> str:
    """Return the life of a request in letters; whether its client went away, or its deadline had passed."""
    first_s, letters = ended.times.first_token_at_s, []
    for event in ended.events:
        if first_s is not None and event.at_s >= first_s:
            letters.append("T")
            first_s = None
        letters.append(_LETTERS[event.kind])
    letters += [] if first_s is None else ["T"]
    if ended.error_code is None:
        return "".join(letters) + "F"
    if ended.error_code == "ABORTED":
        return "".join(letters) + ("G" if has_left else "X" if is_late else "C")
    return "".join(letters) + _ENDS.get(ended.error_code, "E")


def _is(pattern: str, *kinds: str) -> Callable[[Life], bool]:
    search = re.compile(pattern).search
    return lambda life: (not kinds or life.kind in kinds) and search(life.word) is not None


def _says(text: str) -> Callable[[Life], bool]:
    return lambda life: text in life.ended.error_message


def _moved(life: Life, before: EventKind) -> bool:
    """Return whether it went on at another executor after an event."""
    events, where = life.ended.events, ""
    is_away = False
    for event in events:
        if event.kind is before:
            is_away = True
        elif event.kind is EventKind.ADMITTED:
            if is_away and where and event.executor != where:
                return True
            where, is_away = event.executor, False
    return False


def _came_back(life: Life) -> bool:
    lost_on = ""
    for event in life.ended.events:
        if event.kind is EventKind.EXECUTOR_LOST:
            lost_on = event.executor
        elif event.kind is EventKind.ADMITTED and event.executor == lost_on:
            return True
    return False


def _hit_after_loss(life: Life) -> bool:
    events = iter(life.ended.events)
    was_lost = any(event.kind is EventKind.EXECUTOR_LOST for event in events)
    return was_lost and any(event.num_computed_tokens > 0 for event in events if event.kind is EventKind.ADMITTED)


def _ended_by_loss(life: Life) -> bool:
    """Return whether it was aborted right after it lost its executor."""
    if life.word[-1] not in "CGX" or not life.ended.events or life.ended.times.ended_at_s is None:
        return False
    last = life.ended.events[-1]
    return last.kind is EventKind.EXECUTOR_LOST and life.ended.times.ended_at_s - last.at_s < _CLOSE_S


RARE_LIVES: tuple[Rare[Life], ...] = (
    Rare("lost, finished", "a request lost its executor, and finished", _is("L.*F$")),
    Rare("lost twice, finished", "a request lost two executors, and finished", _is("L.*L.*F$")),
    Rare("lost three times", "a request lost three executors", _is("L.*L.*L")),
    Rare("lost before its first token", "an executor was lost in the middle of a prompt", _is("A[^TL]*L")),
    Rare("lost in mid-stream", "a request lost its executor after its first token, and finished", _is("T.*L.*F$")),
    Rare("lost while swapped out", "its executor was lost while its blocks were in the host pool", _is("O[^IDA]*L")),
    Rare("lost while preempted", "its executor was lost while it waited to be computed again", _is("P[^AL]*L")),
    Rare("lost after a swap", "it came back from the host pool, lost its executor, and finished", _is("I.*L.*F$")),
    Rare("beams lost", "a beam search lost its executor, and finished", _is("L.*F$", "beams")),
    Rare("beams lost in mid-swap", "a beam search lost its executor while swapped out", _is("O[^IDA]*L", "beams")),
    Rare("beams swapped", "a beam search went to the host pool and back, and finished", _is("O.*I.*F$", "beams")),
    Rare("beams preempted", "a beam search was computed again, and finished", _is("P.*F$", "beams")),
    Rare("several lost", "a request of several outputs lost its executor, and finished", _is("L.*F$", *_SEVERAL)),
    Rare("several swapped", "one of several outputs went to the host pool and back", _is("O.*I.*F$", *_SEVERAL)),
    Rare("several preempted", "one of several outputs was computed again", _is("P.*F$", *_SEVERAL)),
    Rare("preempted twice", "a request was preempted twice, and finished", _is("P.*P.*F$")),
    Rare("swapped twice", "a request was swapped out twice", _is("O.*I.*O")),
    Rare("swapped and preempted", "a request was swapped out once and computed again once", _is("O.*P|P.*O")),
    Rare("preempted before its first token", "a request was preempted in its prompt", _is("A[^T]*P")),
    Rare("preempted, lost, finished", "all of this in this order", _is("P.*L.*F$")),
    Rare("dropped", "blocks in the host pool were given up for others", _is("D")),
    Rare("parked, finished", "a suspect waited for other suspects, and finished", _is("K.*F$")),
    Rare("parked, ended by its client", "a suspect's client left or aborted it", _is("K[^A]*[CGX]$")),
    Rare("late before it began", "a deadline passed while a request waited for its first step", _is("^X$")),
    Rare("late after a loss", "a deadline passed before another executor took it", _is("L[^A]*X$")),
    Rare("late while preempted", "a deadline passed while it waited to come back", _is("[POD][^AIL]*X$")),
    Rare("aborted while it waited", "another call aborted what had never run, or its client left", _is("^[CG]$")),
    Rare("aborted while swapped out", "it was aborted, or its client left, in the host pool", _is("O[^IDAL]*[CG]$")),
    Rare("aborted while preempted", "it was aborted, or its client left, out of the batch", _is("P[^AL]*[CG]$")),
    Rare("aborted after a loss", "it was aborted, or its client left, and no executor had it", _is("L[^A]*[CG]$")),
    Rare("aborted within 50 ms of a loss", "a loss and an end met", _ended_by_loss),
    Rare("ended during a resume", "an abort met the resume of its executor's stream", lambda life: life.meets_resume),
    Rare("counted out", "a request ended that seemed to break executors", _says(COUNTED_OUT)),
    Rare("orphan ended", "nobody came for so long that a request ended", _says("(--orphan-timeout-s)")),
    Rare("orphan waited", "a request found no executor at first, and finished", lambda life: _waited(life)),
    Rare("outgrew the fleet", "no executor could ever hold a request that had run", _is("A.*R$")),
    Rare("ended by a shutdown", "a scheduler ended, and a request with it", _says("the scheduler shut down")),
    Rare("moved after a loss", "another executor went on", lambda life: _moved(life, EventKind.EXECUTOR_LOST)),
    Rare("moved after a preemption", "another executor went on", lambda life: _moved(life, EventKind.PREEMPTED)),
    Rare("came back to who was lost", "the executor that was lost computed it again", _came_back),
    Rare("prefix hit after a loss", "what was to be computed again was in the cache", _hit_after_loss),
    Rare("mixed numerics", "two kinds of executors made one answer", lambda life: len(life.ended.provenance.spans) > 1),
)


def _waited(life: Life) -> bool:
    """Return whether it finished although nothing happened to it for longer than a lease."""
    queue_s = life.ended.times.queue_s
    return life.word[-1] == "F" and queue_s is not None and queue_s > 5.0

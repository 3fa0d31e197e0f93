"""Rare things in the life of a request, as a scheduler tells it at its end.

A life is a word, one letter for each event: A admitted, P preempted, O swapped out, I swapped in, D dropped from the
host pool, L executor lost, K parked, W weights changed, T first token. The last letter is its end: F finished, C
another call aborted it, G its client was gone, X its deadline had passed, U unavailable, R too large, E another error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.step.executor_planner import BLOCKS_ARE_OLD
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
    EventKind.WEIGHTS_CHANGED: "W",
}
# In place of a kind of shape: a text to be pooled, and the load of an adapter.
TEXT, LOAD = "text", "load"

_ENDS = {"UNAVAILABLE": "U", "RESOURCE_EXHAUSTED": "R"}


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a request.

    Attributes:
        ended: What the scheduler says of it.
        kind: Its kind of shape, TEXT or LOAD.
        word: As above.
    """

    ended: EndedRequest
    kind: str
    word: str


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


def _hit_after_loss(life: Life) -> bool:
    events = iter(life.ended.events)
    was_lost = any(event.kind is EventKind.EXECUTOR_LOST for event in events)
    return was_lost and any(event.num_computed_tokens > 0 for event in events if event.kind is EventKind.ADMITTED)


def _was_computed_again(life: Life) -> bool:
    return life.word[-1] == "F" and any(event.cause == BLOCKS_ARE_OLD for event in life.ended.events)


RARE_LIVES: tuple[Rare[Life], ...] = (
    Rare("lost, finished", "a request lost its executor, and finished", _is("L.*F$")),
    Rare("lost before its first token", "an executor was lost in the middle of a prompt", _is("A[^TL]*L")),
    Rare("lost while swapped out", "its executor was lost while its blocks were in the host cache", _is("O[^IDA]*L")),
    Rare("lost while preempted", "its executor was lost while it waited to be computed again", _is("P[^AL]*L")),
    Rare("guided lost", "a request with a grammar lost its executor, and finished", _is("L.*F$", "guided")),
    Rare("guided preempted", "one was swapped out or computed again, and finished", _is("[OP].*F$", "guided")),
    Rare("text lost", "a text to be pooled lost its executor, and was answered", _is("L.*F$", TEXT)),
    Rare(
        "adapter lost",
        "an answer with an adapter had begun, lost its executor, and finished",
        lambda life: bool(life.ended.lora_adapter) and _is("T.*L.*F$")(life),
    ),
    Rare("adapter not found", "no executor had the content that began an answer", _says("has another content now")),
    Rare("beams lost", "a beam search lost its executor, and finished", _is("L.*F$", "beams")),
    Rare("beams swapped", "a beam search went to the host pool and back, and finished", _is("O.*I.*F$", "beams")),
    Rare("swapped and preempted", "a request was swapped out once and computed again once", _is("O.*P|P.*O")),
    Rare("dropped", "blocks in the host pool were given up for others", _is("D")),
    Rare("parked, finished", "a suspect waited for other suspects, and finished", _is("K.*F$")),
    Rare("aborted while it waited", "another call aborted what had never run, or its client left", _is("^[CG]$")),
    Rare("aborted while swapped out", "it was aborted, or its client left, in the host cache", _is("O[^IDAL]*[CG]$")),
    Rare("aborted after a loss", "it was aborted, or its client left, and no executor had it", _is("L[^A]*[CG]$")),
    Rare("counted out", "a request ended that seemed to break executors", _says(COUNTED_OUT)),
    Rare("orphan ended", "nobody came for so long that a request ended", _says("(--orphan-timeout-s)")),
    Rare("outgrew the fleet", "no executor could ever hold a request that had run", _is("A.*R$")),
    Rare("ended by a shutdown", "a scheduler ended, and a request with it", _says("the scheduler shut down")),
    Rare("moved after a loss", "another executor went on", lambda life: _moved(life, EventKind.EXECUTOR_LOST)),
    Rare("prefix hit after a loss", "what was to be computed again was in the cache", _hit_after_loss),
    Rare("kept", "weights changed, and a request went on with its blocks, and finished", _is("W.*F$")),
    Rare("lost after it was kept", "it lost its executor, and finished", _is("W.*L.*F$")),
    Rare("preempted after it was kept", "it made room, and finished", _is("W.*P.*F$")),
    Rare("computed again", "weights changed, and a request was computed again, and finished", _was_computed_again),
    Rare("mixed numerics", "two kinds of executors made one answer", lambda life: len(life.ended.provenance.spans) > 1),
)

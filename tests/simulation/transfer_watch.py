"""Watches transfers of blocks between executors, at the core that begins them and at both ends.

Watchers hear of rare things; whoever waits for a moment looks again when something has changed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from executor_svc.service.servicer import ExecutionServicer
from executor_svc.transfers.pending import PendingTransfers
from scheduler_svc.core.fleet.transfers import Transfers
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.engine import Engine
from tests.simulation.watching import Watcher

# Where every prefix pays that fills a block: prompts are short here.
LEAST_TOKENS, FIXED_TOKENS = 4, 1

RARE_TRANSFERS = {
    "sent ahead": "blocks of a running group were sent ahead of it",
    "transfer aborted": "a group ended whose prefix was on its way",
    "transfer beyond its deadline": "a group waited no longer for a prefix that did not come",
    "transfer failed": "an executor told that a transfer was cancelled",
    "transfer gave way": "a transfer was cancelled because its blocks were wanted",
    "sender lost": "an executor was lost that was sending blocks",
    "receiver lost": "an executor was lost that blocks were sent to",
}

Note = Callable[[str], None]


def pending_of(servicer: ExecutionServicer) -> PendingTransfers:
    """Return what an executor process has begun and not told the end of."""
    return servicer._transfers._pending


def watch_transfers_of(servicer: ExecutionServicer, on_progress: Callable[[], None]) -> None:
    """Call a function after each change at one end."""
    pending = pending_of(servicer)
    for name in ("begin", "claim", "_end"):
        setattr(pending, name, partial(_call_and_tell, getattr(pending, name), on_progress))


def watch_transfers(engine: Engine, process: str, watchers: Sequence[Watcher], on_progress: Callable[[], None]) -> None:
    """Let watchers see what an engine does with transfers, and let more of them pay."""
    transfers = engine.fleet.dispatcher.transfers
    transfers.least_tokens, transfers.fixed_tokens = LEAST_TOKENS, FIXED_TOKENS
    note = partial(_note, process, watchers)
    for name, told in (("begin", _begin), ("take", _take), ("look", _look), ("abort", _abort), ("forget", _forget)):
        watched = partial(told, getattr(transfers, name), transfers, note)
        setattr(transfers, name, partial(_call_and_tell, watched, on_progress) if told is _begin else watched)


def _note(process: str, watchers: Sequence[Watcher], name: str) -> None:
    for watcher in watchers:
        watcher.transferred(process, name)


def _call_and_tell(call: Callable[..., Any], on_progress: Callable[[], None], *arguments: Any) -> Any:
    result = call(*arguments)
    on_progress()
    return result


def _begin(
    begin: Callable[..., bool],
    transfers: Transfers,
    note: Note,
    sender: ExecutorPlanner,
    receiver: ExecutorPlanner,
    names: list[bytes],
    group: SequenceGroup,
    now_s: float,
) -> bool:
    has_begun = begin(sender, receiver, names, group, now_s)
    if has_begun and group in sender.batch:
        note("sent ahead")
    return has_begun


def _take(take: Callable[..., None], transfers: Transfers, note: Note, planner: ExecutorPlanner) -> None:
    ended = planner.ended_transfers
    waited_for = {number for number in ended.cancelled if transfers._pending[number].group is not None}
    take(planner)
    if waited_for & ended.given_up:
        note("transfer gave way")
    if waited_for - ended.given_up:
        note("transfer failed")


def _look(look: Callable[..., None], transfers: Transfers, note: Note, now_s: float) -> None:
    num_cancelled = transfers.num_cancelled
    look(now_s)
    if transfers.num_cancelled > num_cancelled:
        note("transfer beyond its deadline")


def _abort(abort: Callable[..., None], transfers: Transfers, note: Note, group: SequenceGroup) -> None:
    if group in transfers.of_group:
        note("transfer aborted")
    abort(group)


def _forget(forget: Callable[..., None], transfers: Transfers, note: Note, planner: ExecutorPlanner) -> None:
    open_ones = list(transfers._pending.values())
    if any(each.sender is planner and each.is_open[0] for each in open_ones):
        note("sender lost")
    if any(each.receiver is planner and each.is_open[1] for each in open_ones):
        note("receiver lost")
    forget(planner)

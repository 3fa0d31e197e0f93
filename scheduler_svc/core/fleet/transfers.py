"""Transfers between the executors of a fleet: who sends which prefix to whom, and which group it is for.

A group whose prefix is cached at another executor than the best one for it may have it sent there; placement compares
going there, having it sent, and computing it (`placement.py`). A group that leaves a draining executor, or one that
only computes prompts, has its blocks sent ahead while it goes on, and moves when little is left.

The fleet has both block tables, so a transfer needs no handshake: each end is told in a step, and tells its end in an
answer. Whatever goes wrong costs a computation: a lost executor, a refusal, the deadline and the end of the group
cancel what is left at the other end, and after a failure the one sends the other nothing for a while.

Pure. Read next: `core/step/block_transfers.py`, the end of one executor.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.values.wording import counted
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner

# What a token that comes costs of one that is computed, before any has come.
_FIRST_SHARE = 0.3
# Transfers of which the fastest counts.
_NUM_RECENT = 8
# How long a group waits: this at least, so many times what the transfer should take, or if that is not known.
_LEAST_WAIT_S, _PATIENCE, _FIRST_WAIT_S = 1.0, 4.0, 10.0
# How long an executor sends another one nothing after a failure, and after many in a row.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_DOUBLINGS = 5.0, 300.0, 6


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer on its way; `is_open` says at which ends it is pending: the sender's, the receiver's.

    `group` waits for it, or moves behind it; None: no longer. `was_cut`: it is cancelled without a fault of its ends.
    """

    number: int
    sender: ExecutorPlanner
    receiver: ExecutorPlanner
    group: SequenceGroup | None
    num_tokens: int
    begun_at_s: float
    deadline_s: float
    is_open: list[bool]
    was_cut: bool = False

    @property
    def pair(self) -> tuple[str, str]:
        """The names of its ends, the sender's first."""
        return self.sender.name, self.receiver.name


class Transfers:
    """All transfers of a fleet.

    Attributes:
        least_tokens: A prefix that saves fewer is computed.
        fixed_tokens: What a transfer costs beside its tokens, in tokens that are computed.
        senders: The planners that have another one to send to, by their bits in the fleet's index.
        of_group: The transfers that groups wait for, or move behind.
        is_idle: Whether nothing is to be looked at.
        woken: Executors whose next step has something to tell them; the caller clears it.
        num_arrived, num_cancelled, num_tokens: Transfers that have ended, and the tokens of those that arrived.
    """

    def __init__(self) -> None:
        self.least_tokens, self.fixed_tokens = 64, 16
        self.senders: dict[int, ExecutorPlanner] = {}
        self.of_group: dict[SequenceGroup, Transfer] = {}
        self.woken: set[ExecutorPlanner] = set()
        self.num_arrived = self.num_cancelled = self.num_tokens = 0
        self.is_idle = True
        self._pending: dict[int, Transfer] = {}
        self._last_number = 0
        self._arrived: list[Transfer] = []  # since the last decision, which has the time
        self._token_s: deque[float] = deque(maxlen=_NUM_RECENT)
        # Of pairs of executors that are here: failures in a row, and when they are tried again.
        self._pauses: dict[tuple[str, str], tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def follow(self, planners: Sequence[ExecutorPlanner]) -> None:
        """Note that these are the planners of the fleet from now on."""
        self.senders = {
            cache.bit: planner
            for planner in planners
            if (cache := planner.blocks.prefix_cache) is not None
            and any(other is not planner and exchange(planner, other) for other in planners)
        }
        names = {planner.name for planner in planners}
        self._pauses = {pair: pause for pair, pause in self._pauses.items() if names.issuperset(pair)}

    # What may be sent, and its price -----------------------------------------------------------------

    def can_send(self, sender: ExecutorPlanner, receiver: ExecutorPlanner, now_s: float) -> bool:
        """Return whether one executor may send blocks to another one now: the same bits would have come of them."""
        if sender is receiver or not self._has_room(sender) or not self._has_room(receiver):
            return False
        paused = self._pauses.get((sender.name, receiver.name))
        return exchange(sender, receiver) and (paused is None or now_s >= paused[1])

    def _has_room(self, planner: ExecutorPlanner) -> bool:
        return len(planner.transfers) < planner.limits.max_transfers

    def price(self, num_tokens: int, receiver: ExecutorPlanner) -> int:
        """Return what a prefix of so many tokens that comes costs its executor, in tokens that it computes."""
        token_s = receiver.blocks.step_cost.token_s
        share = min(self._token_s) / token_s if self._token_s and token_s else _FIRST_SHARE
        return round(share * num_tokens) + self.fixed_tokens

    def begin(
        self, sender: ExecutorPlanner, receiver: ExecutorPlanner, names: list[bytes], group: SequenceGroup, now_s: float
    ) -> bool:
        """Begin to send a prefix for a group; return False if too little of it can be sent, or there is no room.

        Args:
            sender: Has the prefix, or most of it.
            receiver: Can get it from there, as `can_send` says.
            names: Of its full blocks.
            group: Has no transfer.
            now_s: Monotonic time.
        """
        size = receiver.limits.block_size
        _, parts = sender.blocks.prefixes.exportable(names)
        reserved = receiver.blocks.prefixes.reserve(parts, least=-(-self.least_tokens // size))
        if reserved is None:
            return False
        sent, received = reserved
        self._last_number += 1
        number, num_tokens = self._last_number, len(received[0].names) * size
        wait_s = max(_LEAST_WAIT_S, _PATIENCE * num_tokens * min(self._token_s)) if self._token_s else _FIRST_WAIT_S
        transfer = Transfer(number, sender, receiver, group, num_tokens, now_s, now_s + wait_s, [True, True])
        sender.transfers.send(number, receiver.name, sent)
        receiver.transfers.receive(number, received)
        self._pending[number] = self.of_group[group] = transfer
        self.is_idle = False
        self.woken |= {sender, receiver}
        return True

    # Ahead of groups that move ---------------------------------------------------------------------

    def sends_ahead(
        self, planner: ExecutorPlanner, receiver: ExecutorPlanner, group: SequenceGroup, now_s: float
    ) -> bool:
        """Return whether blocks of a group travel ahead of it, from now on or since before.

        Whatever it fills meanwhile is computed at the receiver.
        """
        if group in self.of_group:
            return True
        if group.pulls_nothing or group.beams is not None or group not in planner.batch:
            return False
        if not self.can_send(planner, receiver, now_s):
            return exchange(planner, receiver) and not (self._has_room(planner) and self._has_room(receiver))
        return self.begin(planner, receiver, _names_of(planner, group), group, now_s)

    def has_sent(self, planner: ExecutorPlanner, receiver: ExecutorPlanner, group: SequenceGroup, now_s: float) -> bool:
        """Return whether a receiver has all blocks of a running group but a few, and its prompt is computed.

        If not, send what there is. The group has no transfer.
        """
        names, size = _names_of(planner, group), planner.limits.block_size
        if self.can_send(planner, receiver, now_s) and self.begin(planner, receiver, names, group, now_s):
            return False
        num_left = planner.blocks.prefixes.exportable(names)[0] - receiver.blocks.prefixes.num_held(names)
        return num_left * size < self.least_tokens and not planner.prefills.is_running(group)

    # Ends --------------------------------------------------------------------------------------------

    def take(self, planner: ExecutorPlanner) -> None:
        """Take the ends that the last result of a planner has told."""
        ended = planner.ended_transfers
        for number in ended.arrived:
            transfer = self._pending[number]
            if transfer.group is not None:  # else it was cancelled too late
                self.num_arrived += 1
                self.num_tokens += transfer.num_tokens
                self._pauses.pop(transfer.pair, None)
            self._arrived.append(transfer)
            self._close(transfer, 1)
        for number in ended.sent:
            self._close(self._pending[number], 0)
        for number in ended.cancelled:
            transfer = self._pending[number]
            self._close(transfer, int(planner is transfer.receiver))
            transfer.was_cut |= number in ended.given_up
            self._fail(transfer, planner.now_s)

    def look(self, now_s: float) -> None:
        """Learn from transfers that have arrived, and give up those that take too long."""
        for transfer in self._arrived:
            took_s = max(0.0, now_s - transfer.begun_at_s)
            self._token_s.append(took_s / transfer.num_tokens)
            if (group := transfer.group) is not None:
                group.num_arrived_tokens += transfer.num_tokens
                tokens = counted(transfer.num_tokens, "token")
                group.pulled = f"{tokens} were pulled from {transfer.sender.name} in {1000 * took_s:.0f} ms"
                transfer.group = None
        self._arrived.clear()
        if self._pending:
            for transfer in [each for each in self._pending.values() if now_s > each.deadline_s and each.group]:
                self._fail(transfer, now_s)
        self.is_idle = not self._pending

    def abort(self, group: SequenceGroup) -> None:
        """Cancel the transfer of a group that ends or is taken away, at both ends."""
        if (transfer := self.of_group.pop(group, None)) is not None:
            transfer.group, transfer.was_cut = None, True
            self._cancel(transfer)

    def forget(self, planner: ExecutorPlanner) -> None:
        """Cancel the transfers of a lost executor at their other ends."""
        self.woken.discard(planner)
        for transfer in list(self._pending.values()):
            if planner in (transfer.sender, transfer.receiver):
                self._close(transfer, int(planner is transfer.receiver))
                transfer.was_cut = True
                self._fail(transfer, planner.now_s)

    def _close(self, transfer: Transfer, end: int) -> None:
        """Note that a transfer is pending at one of its ends no more."""
        transfer.is_open[end] = False
        if end == 1 and transfer.group is not None:
            self.of_group.pop(transfer.group, None)
        if not any(transfer.is_open):
            self._pending.pop(transfer.number, None)

    def _cancel(self, transfer: Transfer) -> None:
        for end, planner in enumerate((transfer.sender, transfer.receiver)):
            if transfer.is_open[end]:
                self.woken.add(planner)
                if planner.transfers.cancel(transfer.number):
                    self._close(transfer, end)

    def _fail(self, transfer: Transfer, now_s: float) -> None:
        """Cancel what is left of a transfer, and let its group be computed; its ends pause if it is their fault."""
        self.num_cancelled += transfer.group is not None
        if (group := transfer.group) is not None:
            self.of_group.pop(group, None)
            group.pulls_nothing = True
        if not transfer.was_cut:
            transfer.was_cut = True
            num_failures = self._pauses.get(transfer.pair, (0, 0.0))[0] + 1
            self._pauses[transfer.pair] = (
                num_failures,
                now_s + min(_FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS), _LONGEST_PAUSE_S),
            )
        transfer.group = None
        self._cancel(transfer)


def _names_of(planner: ExecutorPlanner, group: SequenceGroup) -> list[bytes]:
    """Return the names of the full blocks of a running group's first sequence."""
    lead = group.live_sequences[0]
    planner.batch.register_blocks(lead.slot)
    return lead.block_hashes


def exchange(one: ExecutorPlanner, other: ExecutorPlanner) -> bool:
    """Return whether blocks of two executors hold the same bits for the same tokens, as far as they say."""
    numerics = one.numerics
    if numerics != other.numerics or not (numerics.numerics_id and numerics.weights_digest):
        return False
    if not (one.limits.max_transfers and other.limits.max_transfers):
        return False
    return _format_of(one) == _format_of(other)


def _format_of(planner: ExecutorPlanner) -> tuple[object, ...]:
    limits, info = planner.limits, planner.info
    windows = [pool.sliding_window for pool in limits.groups]
    return (
        limits.block_size,
        bool(limits.num_state_blocks),
        limits.prefix_caching,
        *windows,
        *(() if info is None else (info.kv_cache_dtype, info.tp_size)),
    )

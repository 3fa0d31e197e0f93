"""A fleet as bytes, with everything that its decisions depend on, and back.

The header of a file says how the queue and the planners of the fleet are made; a snapshot has what they hold, as
`state_fields.py` declares it and `state_codec.py` writes it. It is read back by the same sources of the core only
(`core_digest`), as data: what it says is checked, and none of it is the name of anything.
"""

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import octavo_shared
import scheduler_svc.core
import scheduler_svc.request
from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.step_log import decoding
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.replayed_fleet import ReplayedFleet
from scheduler_svc.step_log.state_codec import SnapshotError as SnapshotError
from scheduler_svc.step_log.state_codec import StateReader, StateWriter
from scheduler_svc.step_log.state_fields import FORMS, Surroundings, masks_of

# What the planner imports of other rooms and decides with.
_STEP_WIRE_SOURCES = (
    *("batch_table", "delta_check", "executor_info", "sampling_row", "step", "step_layout"),
    *("table_columns", "token_rules"),
)
_REQUEST_SOURCES = ("continuation", "life", "outputs", "parameters", "provenance")


AnyFleet = TypeVar("AnyFleet", bound=Fleet)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[AnyFleet]):
    """A fleet at one moment.

    Attributes:
        fleet: Its `is_complete` is to be set by whoever restores it.
        core_numbers: Those of `fleet.cores`, in order.
        outside: Live groups that no planner has and that do not wait, by arrival.
    """

    fleet: AnyFleet
    planner_numbers: tuple[int, ...]
    outside: dict[int, SequenceGroup]


@functools.cache
def core_digest() -> str:
    """Return the SHA-256 of the sources of the core, in hexadecimal digits."""
    planner, request, shared = (
        Path(package.__path__[0]) for package in (scheduler_svc.core, scheduler_svc.request, octavo_shared)
    )
    paths = [
        *sorted(planner.rglob("*.py")),
        *(request / f"{name}.py" for name in _REQUEST_SOURCES),
        *(shared / "step_wire" / f"{name}.py" for name in _STEP_WIRE_SOURCES),
        shared / "grammar" / "grammar.py",
        *(Path(__file__).with_name(f"{name}.py") for name in ("state_codec", "state_fields")),
    ]
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def dump(snapshot: Snapshot[Any], mask: TokenMask | None = None) -> pb.Snapshot:
    """Return a snapshot, with masked tokens if there is a mask; the fleet is not changed.

    Blocks have the names that they have in the fleet: `LogNames` gives them others.
    """
    surroundings = Surroundings(snapshot.planner_numbers, snapshot.outside, snapshot.fleet._past_preemptions)
    rows, arrays, names = StateWriter(FORMS, masks_of(mask)).write([surroundings, *_parts(snapshot.fleet)])
    return pb.Snapshot(rows=rows, arrays=arrays, names=names)


def empty_fleet(header: pb.LogHeader) -> ReplayedFleet:
    """Return the fleet of a log before its first call. Raises SnapshotError: the header does not say which."""
    policies: dict[str, Policy] = {"fcfs": FcfsPolicy(), "priority": PriorityPolicy()}
    if header.policy not in policies:
        raise SnapshotError("the header has a policy that no scheduler has")
    policy = policies[header.policy]
    try:
        shares = decoding.decode_shares(header.tenants)
    except ValueError as error:
        raise SnapshotError(str(error)) from error
    return ReplayedFleet(WaitingQueue(policy, shares), policy)


def load(content: bytes, header: pb.LogHeader) -> Snapshot[ReplayedFleet]:
    """Return the snapshot that was dumped, by the same sources of the core, for a file with a header.

    Raises: SnapshotError: the bytes are none of ours.
    """
    try:
        message = pb.Snapshot.FromString(content)
        fleet = empty_fleet(header)
        for joined in header.cores:
            decoding.join(fleet, joined)
        surroundings = Surroundings((), {}, Counter())
        reader = StateReader(FORMS, message.rows, message.arrays, message.names)
        for value in reader.read([surroundings, *_parts(fleet)]):
            if isinstance(value, SequenceGroup):
                decoding.check_group(value)
        fleet._past_preemptions = surroundings.past_preemptions
        _check(fleet, surroundings)
        return Snapshot(fleet, surroundings.planner_numbers, surroundings.outside)
    except Exception as error:  # whatever somebody wrote
        said = f"{type(error).__name__}: {error}" if not isinstance(error, SnapshotError) else str(error)
        raise SnapshotError(f"the snapshot cannot be read: {said}") from error


def _parts(fleet: Fleet) -> list[Any]:
    """Return what a fleet, and each planner that joins, has from the beginning, in an order."""
    queue, dispatcher = fleet.queue, fleet.dispatcher
    parts = [queue, queue.work, queue._fair_share, dispatcher, *dispatcher.inboxes]
    for planner in fleet.planners:
        batch = planner.batch
        parts += [planner, planner.step_cost, planner.pace, batch, batch.table, batch.stop_checker, planner.beam_batch]
        parts += [*batch.things.pools, planner.prefills, planner.preempted, planner.preemption, planner.swapped]
        parts += [planner.pooled]
        for group in planner.blocks.groups:
            parts += [group, group.allocator, group.allocator._cached_blocks]
        for pool in planner.swapped.pools:
            parts += [pool, pool.host, pool.host._cached_blocks]
        parts += [group.prefix_cache for group in planner.blocks.groups if group.prefix_cache is not None]
    return parts


def _check(fleet: Fleet, surroundings: Surroundings) -> None:
    """See that the parts fit each other. Raises SnapshotError, or AssertionError."""
    if len(set(surroundings.planner_numbers)) != len(fleet.planners) or len(surroundings.planner_numbers) != len(
        fleet.planners
    ):
        raise SnapshotError("its cores and their numbers differ")
    caches = [planner.blocks.prefix_cache for planner in fleet.planners if planner.blocks.prefix_cache is not None]
    bits = [cache.bit for cache in caches]
    if len(set(bits)) != len(bits):
        raise SnapshotError("two cores have one bit")
    fleet.dispatcher.holders._bits = sum(bits)
    for planner in fleet.planners:
        check_integrity(planner, has_key=False)

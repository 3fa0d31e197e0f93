"""A fleet as bytes, with everything that its decisions depend on, and back.

The header of a file says how the queue and the planners of the fleet are made; a snapshot has what they hold, as
`state.py` writes it. It is read back by the same sources of the core only (`core_digest`), as data: what it says is
checked, and none of it is the name of anything that is called.
"""

import functools
import hashlib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.sampling_params_table import MAX_ALTERNATIVES
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.step_log import records, state
from scheduler_svc.step_log.block_names import KnownNames, LookUpHasher
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.state import SnapshotError as SnapshotError
from scheduler_svc.step_log.state import StateReader, StateWriter

# That one row of a step is answered with, and all that a step is answered with, at most.
MAX_CANDIDATES = 2**16
_MAX_ANSWERS = 2**24

AnyFleet = TypeVar("AnyFleet", bound=Fleet)


class ReplayedFleet(Fleet):
    """A fleet whose names of blocks are those of a log: it has no key, and computes none.

    Attributes:
        names: What is known of them.
    """

    def __init__(self, queue: WaitingQueue, policy: Policy) -> None:
        super().__init__(queue, policy)
        self.names = KnownNames()

    def _hasher(self, block_size: int) -> BlockHasher:
        return LookUpHasher(self.names, block_size, self.naming.key_number)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[AnyFleet]):
    """A fleet at one moment.

    Attributes:
        fleet: Its `is_complete` is to be set by whoever restores it.
        planner_numbers: Those of `fleet.planners`, in order.
        outside: Live groups that no planner has and that do not wait, by arrival.
    """

    fleet: AnyFleet
    planner_numbers: tuple[int, ...]
    outside: dict[int, SequenceGroup]


@functools.cache
def core_digest() -> str:
    """Return the SHA-256 of the sources of the core and of what it imports, in hexadecimal digits."""
    rooms = [Path(room.__file__ or "") for room in state.ROOMS]
    found = [
        path.parent.rglob("*.py") if path.name == "__init__.py" else [path] for path in [*rooms, Path(state.__file__)]
    ]
    digest = hashlib.sha256()
    for path in sorted(path for of_room in found for path in of_room):
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def dump(snapshot: Snapshot[Any], mask: TokenMask | None = None) -> pb.Snapshot:
    """Return a snapshot, with masked tokens if there is a mask; the fleet is not changed.

    Blocks have the names that they have in the fleet: `LogNames` gives them others.
    """
    fleet = snapshot.fleet
    root = [*_roots(fleet), fleet.naming, fleet._past_preemptions, snapshot.planner_numbers, snapshot.outside]
    rows, arrays, names = StateWriter({} if mask is None else mask.of_attributes).write(root)
    return pb.Snapshot(rows=rows, arrays=arrays, names=names)


def _roots(fleet: Fleet) -> list[Any]:
    return [fleet.queue, fleet.dispatcher, *fleet.planners]


def empty_fleet(header: pb.LogHeader) -> ReplayedFleet:
    """Return the fleet of a log before its first call. Raises SnapshotError: the header does not say which."""
    policies: dict[str, Policy] = {"fcfs": FcfsPolicy(), "priority": PriorityPolicy()}
    if header.policy not in policies:
        raise SnapshotError("the header has a policy that no scheduler has")
    policy = policies[header.policy]
    try:
        shares = records.decode_shares(header.tenants)
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
            records.join(fleet, joined)
        reader = StateReader(message.rows, message.arrays, message.names)
        *roots, fleet.naming, fleet._past_preemptions, planner_numbers, outside = reader.read()
        state.complete(_roots(fleet), roots)
        for value in reader.objects:
            _check_value(value)
        fleet.queue, fleet.dispatcher, *fleet.planners = roots
        for planner in fleet.planners:
            planner.blocks.hasher = fleet._hasher(planner.blocks.block_size)
        if planner_numbers != tuple(joined.core for joined in header.cores):
            raise SnapshotError("its cores and their numbers differ")
        _check(fleet, planner_numbers)
        return Snapshot(fleet, planner_numbers, outside)
    except Exception as error:  # whatever somebody wrote
        said = f"{type(error).__name__}: {error}" if not isinstance(error, SnapshotError) else str(error)
        raise SnapshotError(f"the snapshot cannot be read: {said}") from error


def _check(fleet: Fleet, planner_numbers: tuple[int, ...]) -> None:
    """See that the parts fit each other. Raises SnapshotError, or AssertionError."""
    if len(set(planner_numbers)) != len(planner_numbers):
        raise SnapshotError("two cores have one number")
    bits = [cache.bit for planner in fleet.planners if (cache := planner.blocks.prefix_cache) is not None]
    if len(set(bits)) != len(bits) or any(bit.bit_count() != 1 for bit in bits):
        raise SnapshotError("two cores have one bit")
    if not all(isinstance(group, SequenceGroup) for group in fleet.queue):
        raise SnapshotError("what waits is no request")
    for planner in fleet.planners:
        check_integrity(planner, has_key=False)


def _check_value(value: Any) -> None:
    """See that a value is whole, and asks for no more than a scheduler lets it. Raises SnapshotError, or ValueError."""
    declared: Any = fields(value) if is_dataclass(value) else ()
    if missing := [field.name for field in declared if not hasattr(value, field.name)]:
        raise SnapshotError(f"a {type(value).__name__} has no {missing[0]}")
    if isinstance(value, SequenceGroup):
        records.check_group(value)
    elif isinstance(value, StepLayout):
        asked = value.num_candidates, value.num_alternatives, value.num_prompt_logprobs, value.num_prompt_alternatives
        for counts in asked:
            if counts is not None and counts.size and (counts.min() < 0 or counts.sum(dtype=np.int64) > _MAX_ANSWERS):
                raise SnapshotError("a step asks for more numbers than an executor answers")
        alternatives = value.num_prompt_alternatives
        if alternatives is not None and alternatives.max(initial=0) > MAX_ALTERNATIVES:
            raise SnapshotError(f"a step asks for more than {MAX_ALTERNATIVES} alternatives")
    elif isinstance(value, BatchTable):
        lengths = value.num_tokens, value.num_scheduled_tokens, value.num_known_tokens, value.num_open_tokens
        counted = [(counts, value.max_model_len) for counts in lengths]
        counted += [(group.counts, group.block_ids.shape[1]) for group in value.all_tables]
        counted += [(value.allowance, MAX_ALLOWANCE), (value.num_encoder_tokens, value.max_encoder_tokens)]
        numbers = value.num_prompt_logprobs, value.num_logprobs, value.num_candidates
        too_many = any(counts.max() > MAX_CANDIDATES for counts in numbers)
        if too_many or any(counts.min() < 0 or counts.max() > most for counts, most in counted):
            raise SnapshotError("a slot has more tokens, blocks or candidates than it can have, or less than none")
        for group in value.all_tables:
            if not 0 <= group.block_ids.min(initial=0) <= group.block_ids.max(initial=0) < group.num_device_blocks:
                raise SnapshotError("a batch table names a block that is not there")

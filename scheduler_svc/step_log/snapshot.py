"""A fleet as bytes, with everything that its decisions depend on, and back.

The header of a file says how the queue and the planners of the fleet are made; a snapshot has what they hold, as
`state.py` writes it. It is read back by the same sources of the core only (`core_digest`), as data: what it says is
checked, and none of it is the name of anything that is called.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.sampling_params_table import MAX_ALTERNATIVES
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from octavo_shared.step_wire.step import Admission, PoolingInput, TableDelta
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.beam_search import BeamSearch, Candidates, _Node
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.beam_batch import BeamBatch, Continuation
from scheduler_svc.core.step.slotted_things import GrammarSlots
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy, PriorityPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.continuation import ContinuedOutput
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.step_log import decoding, state
from scheduler_svc.step_log.masking import MASKED_ERROR, TokenMask
from scheduler_svc.step_log.replayed_fleet import ReplayedFleet
from scheduler_svc.step_log.state import Masks, StateReader, StateWriter
from scheduler_svc.step_log.state import SnapshotError as SnapshotError

# That one row of a step is answered with, and all that a step is answered with, at most.
MAX_CANDIDATES = 2**16
_MAX_ANSWERS = 2**24

AnyFleet = TypeVar("AnyFleet", bound=Fleet)


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
    root = [*_roots(fleet), fleet._past_preemptions, snapshot.planner_numbers, snapshot.outside]
    rows, arrays, names = StateWriter(_masks_of(mask)).write(root)
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
        reader = StateReader(message.rows, message.arrays, message.names)
        *roots, fleet._past_preemptions, planner_numbers, outside = reader.read()
        state.complete(_roots(fleet), roots)
        for value in reader.objects:
            _check_value(value)
        fleet.queue, fleet.dispatcher, *fleet.planners = roots
        _check(fleet, planner_numbers)
        return Snapshot(fleet, planner_numbers, outside)
    except Exception as error:  # whatever somebody wrote
        said = f"{type(error).__name__}: {error}" if not isinstance(error, SnapshotError) else str(error)
        raise SnapshotError(f"the snapshot cannot be read: {said}") from error


def _check(fleet: Fleet, planner_numbers: tuple[int, ...]) -> None:
    """See that the parts fit each other. Raises SnapshotError, or AssertionError."""
    if len(set(planner_numbers)) != len(fleet.planners) or len(planner_numbers) != len(fleet.planners):
        raise SnapshotError("its cores and their numbers differ")
    bits = [cache.bit for planner in fleet.planners if (cache := planner.blocks.prefix_cache) is not None]
    if len(set(bits)) != len(bits) or any(bit.bit_count() != 1 for bit in bits):
        raise SnapshotError("two cores have one bit")
    for planner in fleet.planners:
        check_integrity(planner, has_key=False)


def _check_value(value: Any) -> None:
    """See that a value asks for no more than a scheduler lets it. Raises SnapshotError, or ValueError."""
    if isinstance(value, SequenceGroup):
        decoding.check_group(value)
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
        counted += [(group.counts, group.block_ids.shape[1]) for group in value.groups]
        counted += [(value.allowance, MAX_ALLOWANCE)]
        numbers = value.num_prompt_logprobs, value.num_logprobs, value.num_candidates
        too_many = any(counts.max() > MAX_CANDIDATES for counts in numbers)
        if too_many or any(counts.min() < 0 or counts.max() > most for counts, most in counted):
            raise SnapshotError("a slot has more tokens, blocks or candidates than it can have, or less than none")
        for group in value.groups:
            if not 0 <= group.block_ids.min(initial=0) <= group.block_ids.max(initial=0) < group.num_device_blocks:
                raise SnapshotError("a batch table names a block that is not there")


def _masks_of(mask: TokenMask | None) -> Masks:
    """Return what becomes of all attributes that tell of tokens; None: they stay."""
    if mask is None:
        return {}

    def ids(_: Any, token_ids: Any) -> Any:
        return mask.ids(token_ids)

    def one(_: Any, token_id: int) -> int:
        return mask.id(token_id)

    return {
        SequenceGroup: {"prompt_token_ids": ids},
        Sequence: {"token_ids": ids},
        ContinuedOutput: {"token_ids": ids},
        StopConditions: {"stop_token_ids": lambda _, token_ids: mask.id_set(token_ids)},
        StopChecker: {
            "_stop_token_ids": lambda _, sets: list(map(mask.id_set, sets)),
            "_eos_token_ids": lambda _, token_ids: mask.id_tuple(token_ids),
        },
        BatchTable: {"token_ids": ids},
        Grammar: {
            "body": lambda _, body: mask.grammar_body(body),
            "digest": lambda grammar, _: mask.grammar(grammar).digest,
        },
        GrammarSlots: {
            "errors": lambda _, errors: [MASKED_ERROR if error else "" for error in errors],
            "_slot_of": lambda slots, _: {
                mask.grammar(key).digest: slot for slot, key in enumerate(slots.keys) if key is not None
            },
        },
        BeamBatch: {"_eos_token_ids": lambda _, token_ids: mask.id_set(token_ids)},
        Candidates: {"token_ids": ids},
        Continuation: {"token_id": one},
        Admission: {"token_ids": ids},
        PoolingInput: {"token_ids": ids},
        TableDelta: {"appended_tokens": lambda _, pairs: np.column_stack((pairs[:, 0], mask.ids(pairs[:, 1])))},
        BeamSearch: {"_stop_token_ids": lambda _, token_ids: np.sort(mask.ids(token_ids))},
        _Node: {"token_id": one},
        TokenRules: {
            **dict.fromkeys(("biased_token_ids", "stop_token_ids", "banned_token_ids", "banned_words"), ids),
            "allowed_mask": lambda _, content: mask.allowed_mask(content),
        },
    }

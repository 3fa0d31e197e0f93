"""What a snapshot tells of tokens, and what is read of its data."""

import json
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.snapshot import Snapshot, dump
from scheduler_svc.step_log.state import SnapshotError, StateReader, StateWriter
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.toy_executor import ToyExecutor, hashed_next_token

VOCAB = 64
EOS, STOP, BANNED = 60, 61, 62


def described(arrival: int, mask: TokenMask) -> SequenceGroup:
    """A request of one of four kinds, with other names of its tokens."""
    conditions = StopConditions(max_tokens=14, stop_token_ids=mask.id_set(frozenset([STOP])))
    prompt = mask.ids((3 * arrival + np.arange(5 + arrival % 7)).astype(np.int32))
    search = BeamSearchParams(2) if arrival % 4 == 2 else None
    asked = group(arrival, prompt.tolist(), conditions, num_sequences=1 + (arrival % 4 == 1), beam_search=search)
    if arrival % 4 == 3:
        ids, none = np.array([7], np.int32), np.empty(0, np.int32)
        asked.token_rules = mask.rules(TokenRules(ids, np.ones(1, np.float32), ids, np.array([BANNED], np.int32), none))
    return asked


def dump_under(permutation: npt.NDArray[np.int32], *, is_masked: bool) -> pb.Snapshot:
    """A fleet in the midst of its work. Its tokens have other names from the beginning, or get them in the snapshot."""
    mask, as_is = TokenMask(permutation, b""), TokenMask(np.arange(VOCAB, dtype=np.int32), b"")
    names, back = (as_is, as_is) if is_masked else (mask, TokenMask(np.argsort(permutation).astype(np.int32), b""))
    policy = FcfsPolicy()
    fleet = Fleet(WaitingQueue(policy), policy)
    planners, executors = [], []
    for host_blocks in (0, 8):
        limits = small_limits(
            vocab_size=VOCAB,
            budget=16,
            eos_token_ids=(names.id(EOS),),
            blocks=9,
            host_blocks=host_blocks,
            preemption_mode=PreemptionMode.SWAP if host_blocks else None,
            prefix_caching=True,
        )
        planners.append(fleet.join(limits, 1))
        executors.append(ToyExecutor(limits, hashed_next_token(VOCAB - 8)))
    for arrival in range(12):
        fleet.add(described(arrival, names))
    for turn in range(14):
        for planner, executor in zip(planners, executors, strict=True):
            step = fleet.schedule(planner, 1.0)[0].step
            if step is not None and turn < 13:  # the last ones are in flight
                fleet.process(planner, names.result(executor.execute(back.step(step))))
    assert sum(len(planner.swapped) for planner in planners) and fleet.planners[0].beam_batch.ready is not None
    return dump(Snapshot(fleet, (1, 2), {}), mask if is_masked else None)


def test_a_masked_snapshot_is_the_one_of_a_fleet_whose_tokens_have_other_names() -> None:
    """So nothing in it tells which tokens there were. What is forgotten in `_masks_of` differs here."""
    permutation = np.random.default_rng(5).permutation(VOCAB).astype(np.int32)
    masked, renamed = dump_under(permutation, is_masked=True), dump_under(permutation, is_masked=False)
    assert json.loads(masked.rows) == json.loads(renamed.rows)
    assert masked.arrays == renamed.arrays
    assert masked.rows != dump_under(np.arange(VOCAB, dtype=np.int32), is_masked=False).rows


def test_a_masked_snapshot_does_not_tell_what_a_grammar_says() -> None:
    bench = Bench(small_limits(vocab_size=VOCAB, grammar_slots=2))
    body = b'{"secret": "grammar"}'
    bench.queue.add(group(0, [1, 2, 3], max_tokens(5), grammar=Grammar(body)))
    bench.step()
    fleet = Fleet(bench.queue, bench.policy)
    fleet.planners.append(bench.planner)
    snapshot, mask = Snapshot(fleet, (1,), {}), TokenMask.make(VOCAB)
    for told in (body, Grammar(body).digest):
        assert told in dump(snapshot).arrays
        assert told not in dump(snapshot, mask).arrays


def of_a_sequence(value: Any) -> Any:
    """What is read of a value of some attribute."""
    [owner] = group(0, 3).sequences
    owner.__dict__ if hasattr(owner, "__dict__") else None
    object.__setattr__(owner, "block_hashes", value)
    read = StateReader(*StateWriter({}).write([owner])).read()
    assert type(read[0]) is Sequence
    return read[0].block_hashes


COLUMN = np.arange(12, dtype=np.int32)


@pytest.mark.parametrize(
    "value",
    [
        (1, -2.5, None, "x", True, 2**4000, float("-inf")),
        [b"", b"0123456789abcdef"],
        {b"0123456789abcdef": 2**70, b"": 1},
        OrderedDict([((3, "a"), None), ((1, "b"), None)]),
        deque([1, 2], maxlen=7),
        frozenset([3, 1]),
        [*range(1000)],
        bytearray(b"ab"),
        np.zeros((2, 3), np.uint64),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_what_it_was(value: Any) -> None:
    read = of_a_sequence(value)
    assert type(read) is type(value)
    assert np.array_equal(read, value) if isinstance(value, np.ndarray) else read == value
    assert getattr(read, "maxlen", None) == getattr(value, "maxlen", None)


def test_what_is_shared_is_shared_again() -> None:
    flags, names = bytearray(4), [b"x"]
    read = of_a_sequence(
        [COLUMN, COLUMN[2:6], COLUMN.reshape(3, 4)[:, 1], np.frombuffer(flags, np.bool_), flags, names, names]
    )
    column, part, strided, view, owner, *lists = read
    column[:] = 7
    owner[1] = 1
    assert part.tolist() == [7] * 4
    assert strided.tolist() == [7] * 3
    assert view.tolist() == [False, True, False, False]
    assert lists[0] is lists[1]


def test_what_is_no_data_is_refused_when_it_is_written() -> None:
    with pytest.raises(SnapshotError, match="a object is no data"):
        of_a_sequence([object()])

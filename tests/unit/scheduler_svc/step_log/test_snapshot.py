"""What a snapshot tells of tokens, and what is read of its data."""

import json
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import PoolingTask
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.snapshot import Snapshot, _check_value, dump
from scheduler_svc.step_log.state import SnapshotError, StateReader, StateWriter
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.toy_executor import ToyExecutor, hashed_next_token

VOCAB = 64
EOS, STOP, BANNED = 60, 61, 62


def described(arrival: int, mask: TokenMask, *, has_encoder: bool) -> SequenceGroup:
    """A request of one of four kinds, with other names of its tokens."""
    encoder = mask.ids((arrival % 5 + np.arange(10)).astype(np.int32)).tolist() if has_encoder else None
    conditions = StopConditions(max_tokens=14, stop_token_ids=frozenset([mask.id(STOP)]))
    prompt = mask.ids((3 * arrival + np.arange(5 + arrival % 7)).astype(np.int32))
    search = BeamSearchParams(2) if arrival % 4 == 2 else None
    asked = group(
        arrival, prompt.tolist(), conditions, num_sequences=1 + (arrival % 4 == 1), beam_search=search, encoder=encoder
    )
    if arrival == 12 and not has_encoder:
        asked.pooling = PoolingTask.EMBED
    if arrival % 4 == 3:
        ids, none = np.array([7], np.int32), np.empty(0, np.int32)
        asked.token_rules = mask.masked(
            TokenRules(ids, np.ones(1, np.float32), ids, np.array([BANNED], np.int32), none)
        )
    return asked


def dumps_under(permutation: npt.NDArray[np.int32], *, is_masked: bool, has_encoder: bool) -> list[pb.Snapshot]:
    """Snapshots of a fleet at work. Its tokens have other names from the beginning, or get them in the snapshots."""
    mask, as_is = TokenMask(permutation, b""), TokenMask(np.arange(VOCAB, dtype=np.int32), b"")
    names, back = (as_is, as_is) if is_masked else (mask, TokenMask(np.argsort(permutation).astype(np.int32), b""))
    policy = FcfsPolicy()
    fleet = Fleet(WaitingQueue(policy), policy)
    members = []
    for host_blocks in (0, 8):
        mode = PreemptionMode.SWAP if host_blocks else None
        eos_token_ids = (names.id(EOS),)
        limits = small_limits(
            vocab_size=VOCAB, eos_token_ids=eos_token_ids, budget=16, blocks=9, host_blocks=host_blocks,
            preemption_mode=mode, prefix_caching=True,
        )  # fmt: skip
        limits = replace(limits, pooling_tasks=(PoolingTask.EMBED,), embedding_size=3)
        if has_encoder:
            limits = replace(limits, max_encoder_tokens=12, num_encoder_blocks=7)
        elif host_blocks:
            limits = replace(limits, has_states=True, num_state_blocks=24, num_host_state_blocks=4)
        members.append((fleet.join(limits, 1), ToyExecutor(limits, hashed_next_token(VOCAB - 8))))
    for arrival in range(13):
        fleet.add(described(arrival, names, has_encoder=has_encoder))
    found = []
    for _ in range(14):
        steps = [fleet.schedule(planner, 1.0)[0].step for planner, _ in members]
        found.append(dump(Snapshot(fleet, (1, 2), {}), mask if is_masked else None))
        for (planner, executor), step in zip(members, steps, strict=True):
            if step is not None:
                fleet.process(planner, names.masked(executor.execute(back.masked(step))))
    return found


@pytest.mark.parametrize("has_encoder", [False, True])
def test_a_masked_snapshot_is_the_one_of_a_fleet_whose_tokens_have_other_names(*, has_encoder: bool) -> None:
    """So nothing in it tells which tokens there were. What is forgotten in `of_attributes` differs here."""
    permutation = np.random.default_rng(5).permutation(VOCAB).astype(np.int32)
    masked, renamed = (dumps_under(permutation, is_masked=each, has_encoder=has_encoder) for each in (True, False))
    kinds: set[str] = set()
    for one, other in zip(masked, renamed, strict=True):
        heads, rows = json.loads(one.rows)
        assert [heads, rows] == json.loads(other.rows)
        assert one.arrays == other.arrays
        kinds |= {head[0].partition(":")[2] for head in heads}
    assert kinds >= {"Admission", "SwappedTable", "TableDelta", "TokenRules", "_Node"}
    assert kinds >= ({"EncoderInput", "Encoding"} if has_encoder else {"PoolingInput", "Save"})


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
        Counter({"a": 3}),
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


@pytest.mark.parametrize("number", [0, 1])
def test_a_table_that_names_a_block_that_is_not_there_is_refused(number: int) -> None:
    table = Bench(small_limits(max_encoder_tokens=12, encoder_blocks=8)).planner.table
    _check_value(table)
    tables = table.all_tables[number]
    tables.block_ids[0, 0] = tables.num_device_blocks
    with pytest.raises(SnapshotError, match="names a block that is not there"):
        _check_value(table)

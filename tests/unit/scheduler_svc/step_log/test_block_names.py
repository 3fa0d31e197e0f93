"""Names of blocks in a log: a replay finds the same ones, and nobody learns those of the fleet."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.step_log import block_names
from scheduler_svc.step_log.block_names import KnownNames, LogNames, LookUpHasher, NamedBlocks, NotingHasher
from scheduler_svc.step_log.log_files import files_in, read_records
from scheduler_svc.step_log.masking import TokenMask
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import check_replay, recording
from tests.support.toy_executor import ToyExecutor, count_up

BLOCK_SIZE = 4
MASK = TokenMask.make(64)


class Log:
    """The names of a log, and what a replay makes of its rows."""

    def __init__(self, mask: TokenMask | None = None) -> None:
        self.noted: list[NamedBlocks] = []
        self.mask = mask
        self.names = LogNames()
        self.known = KnownNames()

    def name(self, token_ids: Int32Array, cache_salt: int = 0, block_size: int = BLOCK_SIZE) -> bytes:
        """Name blocks in the fleet; return their names in the log."""
        hashes: list[bytes] = []
        NotingHasher(b"key", block_size, self.noted).extend(hashes, token_ids, cache_salt)
        return self.names.others(b"".join(hashes))

    def write(self) -> bytes:
        """Let the replay read a record; return its rows."""
        rows = self.names.rows(self.noted, self.mask)
        self.noted.clear()
        self.known.learn(rows)
        return rows

    def find(self, token_ids: Int32Array, cache_salt: int = 0, block_size: int = BLOCK_SIZE) -> bytes:
        """Return the names that the replay gives to blocks."""
        hashes: list[bytes] = []
        as_logged = token_ids if self.mask is None else self.mask.ids(token_ids)
        LookUpHasher(self.known, block_size).extend(hashes, as_logged, cache_salt)
        return b"".join(hashes)


def tokens(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


TEN = tokens(*range(10, 20))
PROMPT = [7, 8, 9, 10, 11]


@pytest.mark.parametrize("mask", [None, MASK])
def test_blocks_have_the_name_that_the_log_gave_them(mask: TokenMask | None) -> None:
    log = Log(mask)
    named = [(TEN, 0, 4), (TEN, 2**64 - 1, 4), (TEN, 0, 2), (tokens(*TEN[:4], *TEN), 0, 4), (tokens(*TEN[4:]), 0, 4)]
    expected = [log.name(*one) for one in named]
    assert log.write()
    assert [log.find(*one) for one in named] == expected
    assert len({name[start : start + 16] for name in expected for start in range(0, len(name), 16)}) == 12


def test_a_row_is_written_once_a_file() -> None:
    log = Log()
    log.name(TEN)
    assert len(log.write()) == 2 * 24
    log.name(tokens(*TEN, 1, 2))
    assert len(log.write()) == 24
    log.names.begin_file()
    log.name(TEN)
    assert len(log.write()) == 2 * 24


def test_what_is_remembered_is_bounded_and_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_names, "MAX_WRITTEN_NAMES", 8)
    monkeypatch.setattr(block_names, "MAX_KNOWN_NAMES", 16)
    log = Log()
    generator = np.random.default_rng(0)
    num_rows = 0
    for _ in range(300):
        prompt = tokens(*generator.integers(0, 2, 12).tolist())
        expected = log.name(prompt)
        num_rows += len(log.write()) // 24
        assert log.find(prompt) == expected
        assert len(log.names._written) <= 8
        assert len(log.known._name_of) <= 16
    assert 3 * 300 > num_rows > 300


def test_another_vocabulary_has_rows_of_its_own() -> None:
    log = Log(MASK)
    log.name(TEN)
    log.write()
    log.mask = TokenMask.make(32)
    expected = log.name(TEN)
    log.write()
    assert log.find(TEN) == expected


def test_what_a_replay_names_first_keeps_its_name() -> None:
    log = Log()
    own = log.find(TEN)
    logged = log.name(TEN)
    log.write()
    assert own != logged
    assert log.find(TEN) == own == log.known.own(logged)
    longer = tokens(*TEN, 1, 2)
    last = log.name(longer)[-16:]
    log.write()
    assert log.find(longer) == own + last


def test_another_log_has_other_names() -> None:
    assert Log().name(TEN) != Log().name(TEN)
    assert LogNames().others(bytes(32)) == bytes(32)


# Whole logs --------------------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Fleet, SequenceGroup], object]] = {
    "cached tokens": lambda fleet, waiting: fleet.num_cached_tokens(waiting),
    "obstacles": lambda fleet, waiting: fleet.obstacles(waiting, 1.0),
    "place": lambda fleet, waiting: fleet.place(waiting, 1.0),
}


def alone(directory: Path, number: int) -> Path:
    """Return the folder with the files of a log from a number on."""
    for path in files_in(directory)[: number - 1]:
        path.unlink()
    return directory


def begin_file(bench: FleetBench) -> None:
    assert isinstance(bench.fleet, RecordingFleet)
    bench.fleet._begin_file()


@pytest.mark.parametrize("masks_tokens", [False, True])
@pytest.mark.parametrize("first_file", [1, 2])
@pytest.mark.parametrize("look", LOOKS)
def test_a_block_that_a_look_has_named_is_found(look: str, first_file: int, masks_tokens: bool, tmp_path: Path) -> None:
    with recording(tmp_path, masks_tokens=masks_tokens) as make:
        bench = FleetBench(small_limits(prefix_caching=True), make_fleet=make)
        prompt = bench.add(group(0, 9, max_tokens(2))).prompt_token_ids.tolist()
        bench.run()
        begin_file(bench)
        LOOKS[look](bench.fleet, group(7, prompt))  # refused, say: the log never has it
        again = group(1, prompt, max_tokens(2))
        LOOKS[look](bench.fleet, again)
        bench.add(again)
        bench.run()
        assert again.num_cached_tokens == 8
    assert check_replay(alone(tmp_path, first_file)).counts.num_steps


@pytest.mark.parametrize("masks_tokens", [False, True])
@pytest.mark.parametrize("first_file", [1, 2, 3])
def test_blocks_that_an_executor_has_kept_are_found(first_file: int, masks_tokens: bool, tmp_path: Path) -> None:
    limits = small_limits(prefix_caching=True)
    before, former = FleetBench(), ToyExecutor(limits, count_up)
    member = before.join(limits, former)
    prompt = before.add(group(0, 9, max_tokens(2))).prompt_token_ids.tolist()
    before.run()
    cache = member.planner.blocks.prefix_cache
    assert cache is not None
    kept = cache.is_registered.nonzero()[0].astype(np.int32)
    names = b"".join(cache.hash_of(block) or b"" for block in kept.tolist())
    executor = ToyExecutor(limits, count_up)
    executor._cache = former._cache
    with recording(tmp_path, masks_tokens=masks_tokens) as make:
        bench = FleetBench(make_fleet=make)
        member = bench.join(limits, executor)
        bench.fleet.adopt_blocks(member.planner, kept, names)
        begin_file(bench)
        again = bench.add(group(1, prompt, max_tokens(2)))
        bench.run()
        begin_file(bench)
        longer = bench.add(group(2, [*prompt, 1, 2, 3, 4], max_tokens(9)))
        bench.run()
        assert again.num_cached_tokens == longer.num_cached_tokens == 8
    assert check_replay(alone(tmp_path, first_file)).counts.num_steps


@pytest.mark.parametrize("masks_tokens", [False, True])
@pytest.mark.parametrize("first_file", [1, 2, 3])
def test_inputs_of_an_encoder_and_what_attends_to_them_are_found(
    first_file: int, masks_tokens: bool, tmp_path: Path
) -> None:
    with recording(tmp_path, masks_tokens=masks_tokens) as make:
        limits = replace(small_limits(prefix_caching=True, max_encoder_tokens=12, encoder_blocks=8), names_blocks=True)
        bench = FleetBench(limits, make_fleet=make)
        given = ([1, 2, 3, 4, 5], 0), ([5, 4, 3, 2, 1], 0), ([1, 2, 3, 4, 5], 0), ([1, 2, 3, 4, 5], 7)
        cached: list[int] = []
        for round_ in range(3):
            for index, (encoder, salt) in enumerate(given):
                LOOKS["place"](bench.fleet, group(90, PROMPT, encoder=encoder, cache_salt=salt))
                added = group(10 * round_ + index, PROMPT, max_tokens(6), encoder=encoder, cache_salt=salt)
                bench.add(added)
                if round_ == 1 and index == 1:
                    bench.step(bench.members[0])
                    bench.fleet.reset_prefixes()
                bench.run()
                cached.append(added.num_cached_tokens)
            begin_file(bench)
        assert cached == [0, 0, 4, 0, 4, 4, 0, 0, 4, 0, 4, 4]
    assert check_replay(alone(tmp_path, first_file)).counts.num_steps


@pytest.mark.parametrize("masks_tokens", [False, True])
def test_a_log_has_neither_the_key_nor_a_name_of_the_fleet(masks_tokens: bool, tmp_path: Path) -> None:
    key = bytes(range(1, 33))
    names: set[bytes] = set()
    with recording(tmp_path, masks_tokens=masks_tokens, calls_per_file=20) as make:
        limits = replace(small_limits(prefix_caching=True), names_blocks=True)
        bench = FleetBench(
            limits, limits, make_fleet=lambda queue, policy, _, is_complete: make(queue, policy, key, is_complete)
        )
        bench.fleet.adopt_blocks(bench.members[1].planner, tokens(7), b"kept from before")
        names.add(b"kept from before")
        for arrival in range(8):
            bench.add(group(arrival, 6 + arrival % 4, max_tokens(6)))
            for _ in range(3):
                for member in bench.members:
                    bench.step(member)
                    names |= bench.fleet.dispatcher.holders.holders_of.keys()
                    while member.results:
                        bench.process(member)
        bench.run()
    content = b"".join(map(readable, files_in(tmp_path)))
    assert len(files_in(tmp_path)) > 2
    assert len(names) > 10
    assert num_named_in_steps(tmp_path) > 10
    for secret in (key, *names):
        for start in range(0, len(secret), 8):
            assert secret[start : start + 8] not in content
    check_replay(tmp_path)


def readable(path: Path) -> bytes:
    """Return a file, and the snapshot with which it begins."""
    header = pb.LogHeader.FromString(next(read_records(path)).content)
    return path.read_bytes() + (zlib.decompress(header.snapshot) if header.snapshot else b"")


def num_named_in_steps(directory: Path) -> int:
    """Return how many names the recorded steps tell executors."""
    records = [
        pb.LogRecord.FromString(one.content) for path in files_in(directory) for one in read_records(path) if one.number
    ]
    return sum(len(record.step_decided.step.registered_blocks.block_ids) for record in records)

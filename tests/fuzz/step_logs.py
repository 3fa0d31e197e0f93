"""Step logs: whatever a log holds, a replay of it ends, with a sentence or without, in little memory.

Each case is a real log with some changes: of bytes, of fields of its header and calls, and of the values of its
snapshot, each in files whose checksums are right.
"""

import json
import random
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.replay.run import ReplayRun
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.step_log.log_files import MAGIC, files_in, frame, read_records
from tests.fuzz.target import Case, Target, flipped
from tests.fuzz.values import HOSTILE, change_a_value, hostile
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import recording


class StepLogs(Target):
    """`octavo replay`. A case is the files of a log."""

    name = "step-logs"
    max_seconds = 20.0

    def corpus(self) -> Sequence[Case]:
        """Record a log; the bytes of its files."""
        with tempfile.TemporaryDirectory() as folder:
            self._files = record(Path(folder))
            self._names = [path.name for path in files_in(Path(folder))]
        self._folder = tempfile.TemporaryDirectory()
        return [()]

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return the files of a log of which one is spoiled."""
        return tuple(Mutator(chance).files(self._files))

    def one(self, case: Case) -> None:
        """Replay a log."""
        directory = Path(self._folder.name)
        for path in directory.iterdir():
            path.unlink()
        for name, content in zip(self._names[-len(case) :], case, strict=True):
            (directory / name).write_bytes(content)
        for _ in ReplayRun(directory).play():
            pass

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


def record(directory: Path) -> list[list[bytes]]:
    """Return the records of the files of a log with a bit of everything."""
    with recording(directory, calls_per_file=40) as make:
        swapping = small_limits(
            budget=24, blocks=8, host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=True
        )
        bench = FleetBench(
            small_limits(prefix_caching=True),
            swapping,
            policy=PriorityPolicy(),
            tenant_weights={"a": 2.0},
            make_fleet=make,
        )
        for arrival in range(12):
            several = 2 if arrival % 4 == 1 else 1
            search = BeamSearchParams(2) if arrival % 4 == 2 else None
            what = max_tokens(4 + arrival % 5)
            asked = group(
                arrival, 5 + arrival % 7, what, num_sequences=several, beam_search=search, priority=arrival % 2
            )
            asked.tenant = "ab"[arrival % 2]
            bench.add(asked)
        bench.run()
    files = [[framed.content for framed in read_records(path)] for path in files_in(directory)]
    assert len(files) >= 3
    return files


class Mutator:
    """Makes one case of a real log."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def files(self, files: list[list[bytes]]) -> list[bytes]:
        """Return the files of a log, some of them changed; the first one is left out, so that snapshots are read."""
        chance = self._chance
        first = chance.choice([0, 1, 1, 1, 2])
        kept = [list(records) for records in files[first:]]
        change = chance.choice([self._snapshot, self._snapshot, self._snapshot, self._header, self._call, self._raw])
        change(kept[0])
        whole = [MAGIC + b"".join(map(frame, records)) for records in kept]
        if chance.random() < 0.05:
            whole[0] = flipped(whole[0], self._chance)
        return whole

    def _snapshot(self, records: list[bytes]) -> None:
        header = pb.LogHeader.FromString(records[0])
        if not header.HasField("snapshot"):
            self._call(records)
            return
        snapshot = pb.Snapshot.FromString(zlib.decompress(header.snapshot))
        kind = self._chance.random()
        if kind < 0.75:
            rows = json.loads(snapshot.rows)
            for _ in range(self._chance.choice([1, 1, 1, 2, 5])):
                change_a_value(rows, self._chance)
            snapshot.rows = json.dumps(rows)
        elif kind < 0.8:
            snapshot.rows = self._chance.choice(["[" * 10**6, "[]", "1" * 10**6, "{}", "[[],[]]", "nonsense"])
        else:
            name = self._chance.choice(["arrays", "names"])
            setattr(snapshot, name, flipped(getattr(snapshot, name), self._chance))
        content = snapshot.SerializeToString()
        header.snapshot = zlib.compress(content if self._chance.random() < 0.97 else flipped(content, self._chance))
        records[0] = header.SerializeToString()

    def _header(self, records: list[bytes]) -> None:
        header = pb.LogHeader.FromString(records[0])
        choice = self._chance.random()
        if choice < 0.6 and header.cores:
            core = self._chance.choice(header.cores)
            limits = json.loads(core.limits_json)
            limits[
                self._chance.choice([*limits, "prefix_caching", "sliding_window", "num_host_blocks", "__init__"])
            ] = hostile(self._chance)
            core.limits_json = json.dumps(limits)
        elif choice < 0.7:
            header.snapshot = zlib.compress(bytes(2**29), 1)
        else:
            core_digest = header.core_digest
            try:
                header = pb.LogHeader.FromString(flipped(records[0], self._chance))
                header.core_digest = core_digest
            except DecodeError:
                return
        records[0] = header.SerializeToString()

    def _call(self, records: list[bytes]) -> None:
        """Change a number somewhere in a call, or its bytes."""
        place = self._chance.randrange(1, len(records))
        call = pb.LogRecord.FromString(records[place])
        inner: Any = getattr(call, str(call.WhichOneof("call")))
        names = [field for field, _ in inner.ListFields()]
        if not names or self._chance.random() < 0.3:
            records[place] = flipped(records[place], self._chance)
            return
        field = self._chance.choice(names)
        numbers = [value for value in HOSTILE if isinstance(value, int | float)]
        if field.name == "limits_json":
            limits = json.loads(inner.limits_json)
            limits[self._chance.choice(list(limits))] = hostile(self._chance)
            inner.limits_json = json.dumps(limits)
        else:
            try:
                setattr(inner, field.name, self._chance.choice(numbers))
            except (TypeError, ValueError, OverflowError, AttributeError):
                records[place] = flipped(records[place], self._chance)
                return
        records[place] = call.SerializeToString()

    def _raw(self, records: list[bytes]) -> None:
        place = self._chance.randrange(len(records))
        action = self._chance.random()
        if action < 0.5:
            records[place] = flipped(records[place], self._chance)
        elif action < 0.7:
            del records[place]
        elif action < 0.9:
            records.insert(place, records[self._chance.randrange(len(records))])
        else:
            records[place] = self._chance.randbytes(self._chance.randrange(100))

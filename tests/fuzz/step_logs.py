"""Fuzzes step logs: whatever a log holds, a replay of it ends, with a sentence or without, in little memory.

    python -m tests.fuzz.step_logs [--minutes 10] [--cases 1000] [--seed 1]

Each case is a real log with some changes: of bytes, of fields of its header and calls, and of the values of its
snapshot, each in files whose checksums are right. What fails is printed with the seed of its case.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.replay.run import ReplayRun
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.step_log.log_files import MAGIC, files_in, frame, read_records
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import recording

# What a case may take; a replay of the log takes a hundredth of a second, and the process some 150 MiB.
MAX_SECONDS = 20
MAX_MIB = 1500

_HOSTILE: list[Any] = [
    *(-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63, -(2**63), 2**64, 10**30, True, False, None),
    *(
        0.5,
        -0.0,
        1e-300,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "__class__",
        [],
        [[]],
        {},
        [0, 1],
        [0, 2**40],
    ),
]


def record(directory: Path) -> list[list[bytes]]:
    """Return the records of the files of a log with a bit of everything."""
    with recording(directory, calls_per_file=40, weights={"a": 2.0}) as make:
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

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def files(self, files: list[list[bytes]]) -> list[bytes]:
        """Return the files of a log, some of them changed; the first one is left out, so that snapshots are read."""
        chance = self._chance
        first = chance.choice([0, 1, 1, 1, 2])
        kept = [list(records) for records in files[first:]]
        change = chance.choice([self._snapshot, self._snapshot, self._snapshot, self._header, self._call, self._raw])
        change(kept[0])
        whole = [MAGIC + b"".join(map(frame, records)) for records in kept]
        if chance.random() < 0.05:
            whole[0] = self._flipped(whole[0])
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
                self._change_a_value(rows)
            snapshot.rows = json.dumps(rows)
        elif kind < 0.8:
            snapshot.rows = self._chance.choice(["[" * 10**6, "[]", "1" * 10**6, "{}", "[[],[]]", "nonsense"])
        else:
            name = self._chance.choice(["arrays", "names"])
            setattr(snapshot, name, self._flipped(getattr(snapshot, name)))
        content = snapshot.SerializeToString()
        header.snapshot = zlib.compress(content if self._chance.random() < 0.97 else self._flipped(content))
        records[0] = header.SerializeToString()

    def _change_a_value(self, value: list[Any]) -> None:
        """Change one value somewhere in lists of lists."""
        while True:
            if not value:
                value.append(self._chance.choice(_HOSTILE))
                return
            place = self._chance.randrange(len(value))
            if isinstance(value[place], list) and self._chance.random() < 0.95:
                value = value[place]
                continue
            break
        action = self._chance.random()
        if action < 0.5:
            value[place] = self._chance.choice(_HOSTILE)
        elif action < 0.8 and isinstance(value[place], int):
            value[place] += self._chance.choice([-2, -1, 1, 2, 100])
        elif action < 0.9:
            value[place] = value[self._chance.randrange(len(value))]
        else:
            del value[place]

    def _header(self, records: list[bytes]) -> None:
        header = pb.LogHeader.FromString(records[0])
        choice = self._chance.random()
        if choice < 0.6 and header.cores:
            core = self._chance.choice(header.cores)
            limits = json.loads(core.limits_json)
            limits[
                self._chance.choice([*limits, "prefix_caching", "sliding_window", "num_host_blocks", "__init__"])
            ] = self._chance.choice(_HOSTILE)
            core.limits_json = json.dumps(limits)
        elif choice < 0.7:
            header.snapshot = zlib.compress(bytes(2**29), 1)
        else:
            core_digest = header.core_digest
            try:
                header = pb.LogHeader.FromString(self._flipped(records[0]))
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
            records[place] = self._flipped(records[place])
            return
        field = self._chance.choice(names)
        hostile = [value for value in _HOSTILE if isinstance(value, int | float)]
        if field.name == "limits_json":
            limits = json.loads(inner.limits_json)
            limits[self._chance.choice(list(limits))] = self._chance.choice(_HOSTILE)
            inner.limits_json = json.dumps(limits)
        else:
            try:
                setattr(inner, field.name, self._chance.choice(hostile))
            except (TypeError, ValueError, OverflowError, AttributeError):
                records[place] = self._flipped(records[place])
                return
        records[place] = call.SerializeToString()

    def _raw(self, records: list[bytes]) -> None:
        place = self._chance.randrange(len(records))
        action = self._chance.random()
        if action < 0.5:
            records[place] = self._flipped(records[place])
        elif action < 0.7:
            del records[place]
        elif action < 0.9:
            records.insert(place, records[self._chance.randrange(len(records))])
        else:
            records[place] = self._chance.randbytes(self._chance.randrange(100))

    def _flipped(self, content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(self._chance.choice([1, 1, 2, 8])):
            if changed:
                changed[self._chance.randrange(len(changed))] = self._chance.choice([0, 1, 0x7F, 0x80, 0xFF])
        return bytes(changed)


def replay_case(directory: Path, files: list[bytes], names: list[str]) -> str:
    """Replay the files of a case; return what the replay said. Raises whatever it raises, which is a bug."""
    for path in directory.iterdir():
        path.unlink()
    for name, content in zip(names[-len(files) :], files, strict=True):
        (directory / name).write_bytes(content)
    run = ReplayRun(directory)
    for _ in run.play():
        pass
    return "; ".join(run.counts.troubles) or (str(run.difference) if run.difference else "")


def fuzz(num_cases: int, seconds: float, seed: int, say: Callable[[str], None]) -> int:
    """Run cases; return how many failed."""
    num_failed = num_whole = 0
    end_s = time.monotonic() + seconds
    signal.signal(signal.SIGALRM, _too_slow)
    with tempfile.TemporaryDirectory() as folder:
        (real := Path(folder, "real")).mkdir()
        files = record(real)
        names = [path.name for path in files_in(real)]
        (directory := Path(folder, "case")).mkdir()
        for number in range(seed, seed + num_cases):
            if time.monotonic() > end_s:
                break
            signal.alarm(MAX_SECONDS)
            try:
                num_whole += not replay_case(directory, Mutator(number).files(files), names)
            except (Exception, TooSlowError):
                num_failed += 1
                say(f"seed {number}:\n{traceback.format_exc()}")
            finally:
                signal.alarm(0)
            used_mib = _peak_mib()
            if used_mib > MAX_MIB:
                say(f"seed {number}: {used_mib:.0f} MiB were used")
                return num_failed + 1
        say(f"{number - seed + 1} cases, {num_whole} replayed to their end, {num_failed} failed, {used_mib:.0f} MiB")
    return num_failed


def _peak_mib() -> float:
    """Return the most memory of this program so far; unlike getrusage without that of the process that started it."""
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


class TooSlowError(BaseException):
    """A case takes too long."""


def _too_slow(*_: object) -> None:
    raise TooSlowError


def main() -> None:
    """Fuzz."""
    parser = argparse.ArgumentParser(description="Fuzz the replay of step logs.")
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--cases", type=int, default=2**31, help="most of them (default: as the time allows)")
    parser.add_argument("--seed", type=int, default=1, help="of the first case (default: %(default)s)")
    arguments = parser.parse_args()
    sys.exit(bool(fuzz(arguments.cases, 60 * arguments.minutes, arguments.seed, print)))


if __name__ == "__main__":
    main()

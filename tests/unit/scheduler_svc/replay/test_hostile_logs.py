"""Logs that somebody wrote to harm whoever replays them: each ends in a sentence, and takes no memory or time."""

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.waiting.policy import VirtualTokenCounter
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.step_log.log_files import files_in
from scheduler_svc.step_log.state_fields import FORMS
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench
from tests.support.step_logs import edit_header, recording, replayed


@pytest.fixture
def header_of(tmp_path: Path) -> Callable[[Callable[[pb.LogHeader], None]], str]:
    """What a replay says of a log whose only file begins with a snapshot, once its header was edited."""
    with recording(tmp_path / "log", calls_per_file=15) as make:
        bench = FleetBench(small_limits(prefix_caching=True), make_fleet=make)
        for arrival in range(6):
            bench.add(group(arrival, 6 + arrival, max_tokens(5)))
        bench.run()
    first, path, *rest = files_in(tmp_path / "log")
    for other in (first, *rest):
        other.unlink()

    def said(edit: Callable[[pb.LogHeader], None]) -> str:
        edit_header(path, edit)
        [trouble] = replayed(tmp_path / "log").counts.troubles
        assert "\n" not in trouble
        return trouble

    return said


HeaderOf = Callable[[Callable[[pb.LogHeader], None]], str]


def edited(edit: Callable[[list[int], list[list[Any]], pb.Snapshot], None]) -> Callable[[pb.LogHeader], None]:
    """Edit the snapshot of a header, given the classes of its objects that are no parts, and all rows."""

    def edit_snapshot(header: pb.LogHeader) -> None:
        snapshot = pb.Snapshot.FromString(zlib.decompress(header.snapshot))
        kinds, rows = json.loads(snapshot.rows)
        edit(kinds, rows, snapshot)
        snapshot.rows = json.dumps([kinds, rows])
        header.snapshot = zlib.compress(snapshot.SerializeToString())

    return edit_snapshot


def row_of(kind: type, kinds: list[int], rows: list[list[Any]]) -> list[Any]:
    """Return the row of the first object of a class."""
    return rows[len(rows) - len(kinds) + kinds.index(list(FORMS).index(kind))]


def place_of(kind: type, name: str) -> int:
    return list(FORMS[kind].hints).index(name)


def set_in(kind: type, name: str, value: Any) -> Callable[[pb.LogHeader], None]:
    """Give a field of the first object of a class another value."""

    def edit(kinds: list[int], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
        row_of(kind, kinds, rows)[place_of(kind, name)] = value

    return edited(edit)


def a_field_more(kinds: list[int], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    row_of(StopConditions, kinds, rows).append("__class__")


def names_out_of_nothing(kinds: list[int], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    """Take nearly all bytes for the names of blocks of each of a thousand slots."""
    cache = rows[len(rows) - len(kinds) - 1]
    cache[place_of(PrefixCache, "written")] = [[slot, len(snapshot.names) // 32 * 16] for slot in range(1000)]


def limits_of(**values: Any) -> Callable[[pb.LogHeader], None]:
    def edit(header: pb.LogHeader) -> None:
        header.cores[0].limits_json = json.dumps(json.loads(header.cores[0].limits_json) | values)

    return edit


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (edited(a_field_more), "list stands where a list of 4 should"),
        (set_in(StopConditions, "ignore_eos", 1), "int '1' stands where a bool should"),
        (set_in(StopConditions, "max_tokens", 2**70), "stands where an integer from .* should"),
        (
            set_in(VirtualTokenCounter, "base", float("nan")),
            "float 'nan' stands where a number of at most 1e\\+100 should",
        ),
        (set_in(VirtualTokenCounter, "tenant", 0), "object \\d+ is a VirtualTokenCounter where a _Tenant should be"),
        (
            set_in(VirtualTokenCounter, "tenant", 10**6),
            "int '1000000' stands where an integer from -\\d+ to \\d+ should",
        ),
        (edited(names_out_of_nothing), "names of blocks have \\d+ bytes, and \\d+ are left"),
        (
            lambda header: setattr(header, "snapshot", zlib.compress(bytes(2**28 + 1), 1)),
            "more than the 268435456 bytes",
        ),
        (lambda header: setattr(header, "snapshot", header.snapshot[:-9]), "the snapshot was truncated"),
        (
            lambda header: setattr(header, "policy", "__init__"),
            "a policy that no scheduler has",
        ),
        (lambda header: header.tenants.named.add(tenant="a", weight=5e-324), "a share that no scheduler gives"),
        (limits_of(num_blocks=2**24), "the executors of the log have more than the 16777216 blocks"),
        (limits_of(num_blocks=2**60), r"an executor of the log has num_blocks \d+; it is from 0 to 16777216"),
        (limits_of(num_blocks=[]), "num_blocks of an executor of the log is not what this release knows"),
        (limits_of(__class__="os.system"), "CoreLimits has no __class__ in this release"),
    ],
)
def test_what_is_hostile_is_refused(header_of: HeaderOf, edit: Callable[[pb.LogHeader], None], sentence: str) -> None:
    assert re.search(f"the snapshot cannot be read: .*{sentence}|{sentence}", header_of(edit))


def fuzz(*options: str) -> None:
    """Fuzz in a process of its own, which says how much memory it has used."""
    command = [sys.executable, "-m", "tests.fuzz", "--only", "step-logs", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mutated_logs_give_a_sentence_or_a_replay() -> None:
    fuzz("--cases", "60")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_mutated_logs_give_a_sentence_or_a_replay() -> None:
    fuzz("--minutes", "5", "--seed", "1000000")

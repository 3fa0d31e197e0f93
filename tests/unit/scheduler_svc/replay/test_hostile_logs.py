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
from scheduler_svc.step_log.log_files import files_in
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


def edited(edit: Callable[[list[Any], list[list[Any]], pb.Snapshot], None]) -> Callable[[pb.LogHeader], None]:
    """Edit the snapshot of a header, given the classes and attributes of its rows, and the rows."""

    def edit_snapshot(header: pb.LogHeader) -> None:
        snapshot = pb.Snapshot.FromString(zlib.decompress(header.snapshot))
        heads, rows = json.loads(snapshot.rows)
        edit(heads, rows, snapshot)
        snapshot.rows = json.dumps([heads, rows])
        header.snapshot = zlib.compress(snapshot.SerializeToString())

    return edit_snapshot


def row_of(kind: str, heads: list[Any], rows: list[list[Any]]) -> list[Any]:
    """Return the row of the first object of a class."""
    return next(row for row in rows if heads[row[0]][0].rpartition(":")[2] == kind)


def set_in(kind: str, name: str, value: Any) -> Callable[[pb.LogHeader], None]:
    """Give an attribute of the first object of a class another value."""

    def edit(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
        row = row_of(kind, heads, rows)
        row[heads[row[0]].index(name)] = value

    return edited(edit)


def a_field_more(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    row_of("StopConditions", heads, rows).append(1)


def another_name(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    heads[row_of("StopConditions", heads, rows)[0]][1] = "__class__"


def another_class(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    heads[row_of("StopConditions", heads, rows)[0]][0] = "os:_Environ"


def names_out_of_nothing(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    """Take all names of blocks for each of a thousand sets."""
    number = next(number for number, head in enumerate(heads) if head == ["set"])
    rows += [[number, ["names", 0, len(snapshot.names)]] for _ in range(1000)]


def a_view_that_repeats(heads: list[Any], rows: list[list[Any]], snapshot: pb.Snapshot) -> None:
    row = next(row for row in rows if heads[row[0]] == ["ndarray"] and isinstance(row[-1], list) and len(row) == 5)
    row[2], row[4][1:] = [2**40], [0]


def limits_of(**values: Any) -> Callable[[pb.LogHeader], None]:
    def edit(header: pb.LogHeader) -> None:
        header.cores[0].limits_json = json.dumps(json.loads(header.cores[0].limits_json) | values)

    return edit


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (edited(a_field_more), "a StopConditions has 5 attributes instead of 4"),
        (edited(another_name), "an attribute has a name that none has"),
        (edited(another_class), "of a class that the core does not have"),
        (edited(names_out_of_nothing), "more bytes are used than there are"),
        (edited(a_view_that_repeats), "a view is larger than what it is a view of"),
        (set_in("StopConditions", "max_tokens", 2**5000), "int '\\d+' is no number that is written"),
        (set_in("VirtualTokenCounter", "base", float("nan")), "float 'nan' is no number that is written"),
        (set_in("VirtualTokenCounter", "tenant", [10**6]), "object 1000000 is not there"),
        (set_in("Batch", "running", 5), "int '5' stands where running of a Batch should"),
        (set_in("Batch", "running", ["t"]), "tuple stands where running of a Batch should"),
        (set_in("BlockAllocator", "num_blocks", 2**40), "'1099511627776' stands where num_blocks of a BlockAllocator"),
        (set_in("BlockAllocator", "ref_counts", [0]), "ref_counts of a BlockAllocator has another size"),
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
        (limits_of(has_states=True, num_state_blocks=2**60), r"has num_state_blocks \d+; it is from 0 to 16777216"),
        (
            limits_of(has_states=True, num_state_blocks=2**24),
            "the executors of the log have more than the 16777216 blocks",
        ),
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

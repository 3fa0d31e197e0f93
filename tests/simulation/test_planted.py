"""The simulation finds bugs: three that show at once here, all of them with `python -m tests.simulation.planted`."""

import ast
import asyncio
from pathlib import Path

import pytest

from tests.mutants.fault import REPOSITORY, TreeCopy
from tests.simulation.endless import watching_callbacks
from tests.simulation.loop import SimulationLoop
from tests.simulation.planted import try_bug
from tests.simulation.planted_bugs import BUGS, Bug

QUICK = (
    "a fork does not count its references on the shared blocks",
    "computed tokens are not charged to their tenant",
    "an abort does not reach the core",
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_row_fits_the_code(bug: Bug) -> None:
    ast.parse(bug.plant((REPOSITORY / bug.path).read_text(encoding="utf-8")))
    assert bug.old != bug.new


def test_names_are_distinct_and_there_are_enough() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


def test_three_planted_bugs_are_found_at_once(tmp_path: Path) -> None:
    copy = TreeCopy(tmp_path / "copy")
    for bug in BUGS:
        if bug.name in QUICK:
            assert try_bug(copy, bug, "0:5").is_found, bug.name


def test_a_callback_that_never_ends_is_noticed() -> None:
    loop, accused = SimulationLoop("endless"), []  # type: ignore[abstract]

    async def spin() -> None:
        event = asyncio.Event()
        event.set()
        while True:
            await event.wait()  # goes on at once

    def accuse(what: str) -> None:
        accused.append(what)
        loop.end(RuntimeError(what))

    with pytest.raises(RuntimeError, match="a callback takes more than"), watching_callbacks(loop, accuse, 0.05):
        loop.run_until_complete(spin())
    loop.close()
    assert len(accused) == 1

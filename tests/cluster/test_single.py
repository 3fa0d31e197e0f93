"""One scheduler, which clients reach without fronts: what they notice when pods go."""

from collections.abc import Callable, Collection

import pytest

from tests.cluster.conftest import Load
from tests.cluster.test_faults import ALL, EXECUTOR, GOES_ON, NOW, SCHEDULER, kill, restart, scale, under

# With one scheduler its clients notice when it goes, but those of octavo.Client.
SINGLE: list[tuple[str, Callable[[], None], frozenset[str]]] = [
    ("executors to 3, 1, 2", lambda: scale(EXECUTOR, 3, 1, 2), ALL),
    ("executors restarted", lambda: restart(EXECUTOR), ALL),
    ("an executor killed", lambda: kill("executor", *NOW), ALL),
    ("the scheduler restarted", lambda: restart(SCHEDULER), GOES_ON),
    ("the scheduler killed", lambda: kill("scheduler", *NOW), GOES_ON),
]


@pytest.mark.parametrize(("name", "fault", "unharmed"), SINGLE, ids=[name for name, *_ in SINGLE])
def test_with_one_scheduler(single: Load, name: str, fault: Callable[[], None], unharmed: Collection[str]) -> None:
    with under(single, unharmed=unharmed):
        fault()

"""How long requests wait for a core that is away."""

from unittest.mock import Mock

import pytest

from scheduler_svc.link import absence
from scheduler_svc.link.absence import Absence


async def test_a_core_that_goes_again_is_waited_for_again_after_one_that_stayed_away_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(absence, "LIMIT_S", 0.0)
    on_limit = Mock()
    away = Absence(on_limit)
    for times in (1, 2):
        away.begin()
        was_on = away.is_on
        await away.wait()
        assert (was_on, away.is_on, on_limit.call_count) == (True, False, times)


async def test_a_core_without_an_executor_is_waited_for_as_long_as_orphans_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "LIMIT_S", 0.01)
    on_limit = Mock()
    away = Absence(on_limit)
    away.wait_for_executor(0.0)
    assert not away.is_on, "it is not away"
    away.begin()
    away.wait_for_executor(0.03)
    away.wait_for_executor(0.0)  # nothing new
    await away.wait()
    on_limit.assert_called_once_with(0.03)

    away.begin()
    away.wait_for_executor(2.0)
    away.begin()  # it has gone again
    await away.wait()
    assert on_limit.call_args.args == (0.01,)

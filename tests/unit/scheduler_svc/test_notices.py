"""What a scheduler says on stdout for whoever started it."""

import logging

import pytest

from octavo_shared.process.events import SLOW_STEP, Event
from scheduler_svc.processes.process import NOTICE, NoticeHandler


def test_a_slow_step_is_told_in_a_line_and_nothing_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    handler = NoticeHandler()
    for event in (Event("attached", executor="a:1"), Event(SLOW_STEP, executor="a:1", step_id=7, cause="it takes 9 s")):
        handler.handle(logging.LogRecord("x", logging.WARNING, "", 0, event, None, None))
    text = "the executor at a:1 is slow: other work keeps its processor busy; it takes 9 s\n"
    assert capsys.readouterr().out == NOTICE + text

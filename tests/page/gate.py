"""Executors that hold their steps, so that a scheduler stands still while tests look at it."""

import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.executors import driver as executor_driver

# Longer than any test; a step that waits so long fails.
MAX_HOLD_S = 60.0


class Gate(AbstractAsyncContextManager["Gate"]):
    """Lets steps through while it is open, at first and in the end. Safe to use from any thread."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._patience = pytest.MonkeyPatch()

    async def __aenter__(self) -> "Gate":
        self._patience.setattr(executor_driver, "HANG_AFTER_S", MAX_HOLD_S)  # or a held step would be one that hangs
        return self

    def close(self) -> None:
        """Hold every step that comes to its end from here on."""
        self._is_open.clear()

    async def __aexit__(self, *_: object) -> None:
        self.open()
        self._patience.undo()

    def open(self) -> None:
        """Let all through."""
        self._is_open.set()

    def worker(self, **settings: Any) -> FakeWorker:
        """Return a fake executor's worker whose steps end only while the gate is open."""

        def hold(_: float) -> None:
            assert self._is_open.wait(MAX_HOLD_S), "nobody opened the gate"

        return FakeWorker(sleep=hold, **settings)

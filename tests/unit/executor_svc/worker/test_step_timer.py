"""How the time of a step is taken, and what becomes of a device that fails."""

from typing import Any

import pytest
import torch

from executor_svc.worker.step_timer import CudaTimer, HostTimer, start_timer


class Event:
    """A CUDA event as torch has it, of a device that does what the test wants."""

    is_reached = False
    error: str | None = None

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing
        self.blocking = blocking
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.is_reached

    def synchronize(self) -> None:
        assert self.blocking, "who waits would keep a core busy"
        if self.error is not None:
            raise RuntimeError(self.error)

    def elapsed_time(self, end: Any) -> float:
        assert self.is_recorded
        assert end.is_recorded
        return 1.5  # milliseconds


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    class EventOfThisTest(Event):
        pass

    monkeypatch.setattr("torch.cuda.Event", EventOfThisTest)
    return EventOfThisTest


def test_a_step_on_a_device_is_over_when_the_device_has_come_to_its_end(event: type[Event]) -> None:
    timer = start_timer(torch.device("cuda", 0))
    timer.stop()
    assert not timer.is_over()
    event.is_reached = True
    assert timer.is_over()
    timer.wait()
    assert timer.duration_us() == 1500


def test_a_device_that_failed_is_not_waited_for(event: type[Event]) -> None:
    timer = CudaTimer()
    timer.stop()
    event.error = "an illegal memory access was encountered"
    assert timer.is_over()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timer.wait()


def test_a_step_on_the_host_is_over_when_it_was_launched() -> None:
    timer = start_timer(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    timer.stop()
    assert timer.is_over()
    timer.wait()
    assert timer.duration_us() >= 0

"""A step that fails is an error of the step; a device that computes nothing any more is the end of the process."""

import threading
from collections.abc import Callable

import pytest
import torch

from executor_svc.device.probe import CudaProbe, device_probe, step_error
from octavo_shared.errors import DeviceLostError, StepFailedError


def raising(error: Exception) -> Callable[[], None]:
    def probe() -> None:
        raise error

    return probe


def test_a_device_that_computes_is_not_lost() -> None:
    error = step_error(7, torch.OutOfMemoryError("CUDA out of memory"), device_probe(torch.device("cpu")))
    assert type(error) is StepFailedError
    assert str(error) == "step 7 failed: OutOfMemoryError: CUDA out of memory"


def test_a_device_without_memory_for_the_probe_is_not_lost() -> None:
    error = step_error(7, RuntimeError("bad input"), raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert type(error) is StepFailedError


def test_a_device_that_fails_the_probe_is_lost() -> None:
    probe = raising(RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ..."))
    error = step_error(7, RuntimeError("CUDA error: unspecified launch failure"), probe)
    assert type(error) is DeviceLostError
    assert str(error) == (
        "step 7 failed: RuntimeError: CUDA error: unspecified launch failure; the device is lost: "
        "CUDA error: an illegal memory access was encountered"
    )


def test_a_device_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.device.probe.PROBE_TIMEOUT_S", 0.01)
    answers = threading.Event()

    def probe() -> None:
        answers.wait()

    error = step_error(7, RuntimeError("no launch"), probe)
    answers.set()
    assert type(error) is DeviceLostError
    assert str(error).endswith("the device is lost: it does not respond within 0.01 s")


def test_the_probe_of_a_gpu_computes_and_then_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited_for.append)
    device = torch.device("cpu")  # stands for a GPU
    probe = CudaProbe(device)
    assert waited_for == [device]  # the kernel is loaded while all is well

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.Tensor, "add_", fail)
    assert isinstance(step_error(1, RuntimeError("x"), probe), DeviceLostError)

"""Kernels in Triton as launches of a `LaunchLog`, beside torch's operations."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from executor_svc.triton_kernels.routing import route_kernel
from tests.numerics.strict_capture import LaunchLog


def log_kernels(monkeypatch: pytest.MonkeyPatch, *, are_run: bool = True) -> None:
    """Let a `LaunchLog` that is entered see each kernel as one operation; what the interpreter does is nobody's.

    Args:
        monkeypatch: Of the test.
        are_run: Otherwise a kernel is a launch and nothing more: it writes nothing.
    """
    run = type(route_kernel).run

    def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, LaunchLog):
                mode.add(self.__name__, args, is_on_device=True)
        if not are_run:
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return run(self, *args, **kwargs)

    monkeypatch.setattr(type(route_kernel), "run", logged)

"""A capture for a CPU, where there is no CUDA graph: it fails at what a capture on a device would forbid."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.worker.decode_graphs import Replay

# They make the host wait for values, or copy memory of the host.
FORBIDDEN = {"_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique_dim", "_unique2"}
# The same, of tensors that a CPU has anyway: no operation sees them.
FORBIDDEN_METHODS = {"cpu", "numpy", "tolist", "item", "__array__"}
# They give memory, and launch nothing.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}


class LaunchLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation with the shapes of its tensors, and counts those that a device would run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[tuple[Any, ...]] = []
        self.on_device: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in FORBIDDEN, f"{name} makes the host wait"
        self.add(name, args, is_on_device=not func.is_view and name not in ALLOCATIONS)
        return func(*args, **(kwargs or {}))

    def add(self, name: str, args: tuple[Any, ...], *, is_on_device: bool) -> None:
        """Write down an operation, or a kernel."""
        shapes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in args)
        self.launches.append((name, *shapes))
        if is_on_device:
            self.on_device.append(name)


class NoHostReads(TorchFunctionMode):
    """Fails at methods that bring values to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in FORBIDDEN_METHODS, f"{name} makes the host wait"
        return func(*args, **(kwargs or {}))


class StrictCapture:
    """Runs the function again for each replay, and expects it to do the same as when it was captured."""

    def __init__(self) -> None:
        self.num_replays: dict[int, int] = {}  # by batch size
        self.sizes: list[int] = []  # of what was captured

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        run()  # as before a capture
        with NoHostReads(), LaunchLog() as captured:
            size = len(run())
        self.sizes.append(size)

        def replay() -> torch.Tensor:
            with NoHostReads(), LaunchLog() as log:
                output = run()
            assert log.launches == captured.launches
            self.num_replays[size] = self.num_replays.get(size, 0) + 1
            return output

        return replay

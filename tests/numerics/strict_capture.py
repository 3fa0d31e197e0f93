"""A capture for a CPU, where there is no CUDA graph: it fails at what a capture on a device would forbid."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.worker.graph_capture import Cut, Launch, Replay

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


class Recording(LaunchLog):  # type: ignore[no-untyped-call]
    """Keeps what is launched, with its tensors, to launch it again: the same memory is read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ in ALLOCATIONS:
            return result
        # Of a view, and of what was written in place, nothing has to be kept: some operations are views at times.
        own = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        made = [None if each.untyped_storage().data_ptr() in own else each for each in _tensors(result)]

        def again() -> None:
            for kept, new in zip(made, _tensors(func(*args, **(kwargs or {}))), strict=True):
                if kept is not None:
                    kept.copy_(new)

        self.calls.append(again)
        return result

    def launch(self) -> None:
        """Do it all again."""
        with torch.inference_mode():
            for call in self.calls:
                call()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


class PiecewiseCapture(StrictCapture):
    """Records what lies between cuts by its operations, and fails at what a capture would forbid."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[int, list[Recording]] = {}  # by number of tokens
        self.num_launched = 0  # pieces

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        run(lambda: None)
        recordings = [Recording()]
        entered = ExitStack()

        def begin() -> None:
            entered.enter_context(NoHostReads())
            entered.enter_context(recordings[-1])

        def cut() -> None:
            entered.close()
            recordings.append(Recording())
            begin()

        begin()
        output = run(cut)
        entered.close()
        self.pieces[len(output)] = recordings

        def launch(recording: Recording) -> None:
            self.num_launched += 1
            recording.launch()

        return [partial(launch, recording) for recording in recordings], output

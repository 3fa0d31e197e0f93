"""The collectives of the forward pass, for one rank and for several."""

from datetime import timedelta
from typing import Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

_ARRIVED = "arrived"
_AS_LONG_AS_IT_TAKES = timedelta(days=7)


class Releasable(Protocol):
    """Graphs that hold collectives."""

    def release(self) -> None:
        """Free them; they are not run any more."""


class TensorParallelGroup(Protocol):
    """The ranks that share a forward pass. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process, 0 to `size` - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def why_not_capturable(self) -> str | None:
        """Why a CUDA graph cannot hold the collectives, in a few words; None: it can. All ranks say the same."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place of `partial`; it is added in any order."""

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        """Write the parts of all ranks to `parts`, [size, *shape of a part], in the order of the ranks."""

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of all ranks side by side at rank 0, [num_rows, size * num_columns]; None elsewhere."""

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the `values` of rank 0, in place of our own."""

    def least(self, number: int) -> int:
        """Return the least `number` of all ranks."""

    def wait_for_all(self) -> None:
        """Return once all ranks have called this. It may take hours, unlike a collective."""

    def release_at_end(self, graphs: Releasable) -> None:
        """Release what holds collectives before the group ends, if it is still there then."""


class SingleRank:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1
    why_not_capturable = None

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return `partial`."""
        return partial

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        """Copy `part`."""
        parts[0].copy_(part)

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return `part`."""
        return part

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def least(self, number: int) -> int:
        """Return `number`."""
        return number

    def wait_for_all(self) -> None:
        """Return at once: there is no other rank."""

    def release_at_end(self, graphs: Releasable) -> None:
        """Do nothing: the group does not end."""


SINGLE_RANK: Final = SingleRank()


class DistributedGroup:
    """Several ranks, joined by torch.distributed: gloo on CPUs, NCCL on GPUs.

    Args:
        store: Where they meet.
        rank, size: This process among them.
        device: Where the tensors are.
        timeout: Longest wait for the others in a collective; then the process ends with an error.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._store = store
        self._num_waits = 0
        self._graphs = WeakSet[Releasable]()
        backend = "nccl" if device.type == "cuda" else "gloo"
        # NCCL's are kernels in the stream that is captured. The threads of gloo exchange what is on the host.
        self.why_not_capturable = None if backend == "nccl" else f"the ranks exchange by {backend}, on the host"
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the current one
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place of `partial` if that is contiguous."""
        partial = partial.contiguous()
        dist.all_reduce(partial)
        return partial

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        """Write the parts of all ranks to `parts`, [size, *shape of a part], in the order of the ranks."""
        dist.all_gather(list(parts.unbind()), part.contiguous())

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of all ranks side by side at rank 0, [num_rows, size * num_columns]; None elsewhere."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0)
        return None if parts is None else torch.cat(parts, dim=1)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the `values` of rank 0 on the device that they came from, in place of our own if that is ours."""
        ours = values.to(self._device)
        dist.broadcast(ours, src=0)
        return ours.to(values.device)

    def least(self, number: int) -> int:
        """Return the least `number` of all ranks."""
        value = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def wait_for_all(self) -> None:
        """Return once all ranks have called this. A rank that is lost meanwhile ends the group by its step channel."""
        self._num_waits += 1
        arrived = [f"{_ARRIVED}/{self._num_waits}/{rank}" for rank in range(self.size)]
        self._store.set(arrived[self.rank], "")
        self._store.wait(arrived, _AS_LONG_AS_IT_TAKES)

    def release_at_end(self, graphs: Releasable) -> None:
        """Release what holds collectives before the group ends, if it is still there then."""
        self._graphs.add(graphs)

    def close(self) -> None:
        """Leave the group. NCCL waits, without an end, until no graph holds its collectives any more."""
        for graphs in list(self._graphs):
            graphs.release()
        dist.destroy_process_group()

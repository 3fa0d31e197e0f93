"""The adapters of a worker: from the loads of steps to the slots of its model, and to the rows of each step."""

from collections.abc import Callable

import torch

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.worker.adapter_loads import AdapterLoads
from executor_svc.worker.adapter_sources import AdapterSources
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import ADAPTER_DIGEST_BYTES, Adapter, AdapterLoaded, TableDelta


class WorkerAdapters:
    """Loads adapters into the slots of a model, as steps say.

    Args:
        slots: Of the model.
        sources: Where adapters may be read from.
        group: The ranks of the model. With several a step waits for its own loads, which end on all ranks alike.

    Attributes:
        check, follow, take_loaded: See `AdapterLoads`.
    """

    check: Callable[[TableDelta], None]
    follow: Callable[[TableDelta], None]
    take_loaded: Callable[[], tuple[AdapterLoaded, ...]]

    def __init__(self, slots: AdapterSlots, sources: AdapterSources, group: TensorParallelGroup) -> None:
        self._slots, self._sources, self._group = slots, sources, group
        is_alone = group.size == 1
        self._loads = AdapterLoads(
            self._load, slots.drop, has_thread=is_alone, agrees=None if is_alone else self._ranks_agree
        )
        self.check, self.follow, self.take_loaded = self._loads.check, self._loads.follow, self._loads.take_loaded

    def reset(self, table: BatchTable) -> None:
        """Empty all slots: a scheduler has attached, and `table` is the new one."""
        self._loads.reset()
        self._slots.of_sequences = table.adapter_slot

    def _ranks_agree(self, digest: bytes) -> bool:
        """Return whether all ranks loaded the content of a digest; all of them are at the same load."""
        own = torch.tensor(list(digest or bytes(ADAPTER_DIGEST_BYTES)), dtype=torch.uint8)
        of_first = self._group.broadcast(own.clone())
        return bool(self._group.least(int(bool(digest) and torch.equal(of_first, own))))

    def _load(self, slot: int, adapter: Adapter) -> bytes:
        read = self._slots.read(self._sources.find(adapter.source))
        self._slots.load(slot, read)
        return bytes.fromhex(read.digest)

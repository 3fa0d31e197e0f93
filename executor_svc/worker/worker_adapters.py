"""The adapters of a worker: from the loads of steps to the slots of its model, and to the rows of each step."""

from collections.abc import Callable

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.worker.adapter_loads import AdapterLoads
from executor_svc.worker.adapter_sources import AdapterSources
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Adapter, AdapterLoaded, TableDelta


class WorkerAdapters:
    """Loads adapters into the slots of a model, as steps say.

    Args:
        slots: Of the model.
        sources: Where adapters may be read from.
        has_thread: Whether loads go on beside steps; else a step waits for its own, as ranks of a group do, which end
            them with the same step.

    Attributes:
        check, follow, take_loaded: See `AdapterLoads`.
    """

    check: Callable[[TableDelta], None]
    follow: Callable[[TableDelta], None]
    take_loaded: Callable[[], tuple[AdapterLoaded, ...]]

    def __init__(self, slots: AdapterSlots, sources: AdapterSources, *, has_thread: bool) -> None:
        self._slots, self._sources = slots, sources
        self._loads = AdapterLoads(self._load, slots.drop, has_thread=has_thread)
        self.check, self.follow, self.take_loaded = self._loads.check, self._loads.follow, self._loads.take_loaded

    def reset(self, table: BatchTable) -> None:
        """Empty all slots: a scheduler has attached, and `table` is the new one."""
        self._loads.reset()
        self._slots.of_sequences = table.adapter_slot

    def _load(self, slot: int, adapter: Adapter) -> bytes:
        read = self._slots.read(self._sources.find(adapter.source))
        self._slots.load(slot, read)
        return bytes.fromhex(read.digest)

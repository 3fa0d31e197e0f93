"""The loads of adapters: they begin in a step, go on beside later ones, and are told when they have ended."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from octavo_shared.errors import InvalidStepError, ModelLoadError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import MAX_ERROR_CHARS, Adapter, AdapterLoaded, TableDelta

_logger = logging.getLogger(__name__)

# Loads an adapter into a slot, which no step uses, and returns the digest of its content. Raises ModelLoadError.
LoadAdapter = Callable[[int, Adapter], bytes]


class AdapterLoads:
    """Owns what is in the adapter slots of one executor. Called on the thread of steps; loads on one of its own.

    Args:
        load: Loads an adapter; where its digest is not the one that was asked for, the slot is dropped again.
        drop: Empties a slot that no step uses.
        has_thread: Whether loads go on beside the caller; else the caller does them.
        num_load_steps: Without a thread: how many steps after its own a load ends.
        agrees: Called at the end of each load with its digest, or with nothing if it failed; returns whether all ranks
            have the same content. Of one rank: None.
    """

    def __init__(
        self,
        load: LoadAdapter,
        drop: Callable[[int], None],
        *,
        has_thread: bool,
        num_load_steps: int = 0,
        agrees: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._load = load
        self._drop = drop
        self._num_load_steps = num_load_steps
        self._agrees = agrees
        self._thread = ThreadPoolExecutor(1, "adapter-loader") if has_thread else None
        self._loading: dict[int, _Loading] = {}  # by slot; their ends were not told yet
        self.digests: dict[int, bytes] = {}  # by slot, of loads that were told

    def reset(self) -> None:
        """Empty all slots: a scheduler has attached."""
        for slot in [*self._loading, *self.digests]:
            self._give_up(slot)

    def check(self, delta: TableDelta) -> None:
        """Accept a delta that admits with adapters only whose loads have been told. Raises InvalidStepError."""
        for admission in delta.admissions:
            slot = admission.resources.adapter_slot
            if slot is not None and (slot not in self.digests or slot in delta.adapter_drops):
                raise InvalidStepError(f"slot {admission.slot} uses adapter slot {slot}, whose adapter is not loaded")

    def follow(self, delta: TableDelta) -> None:
        """Drop, and begin to load, what a delta says that the table has taken."""
        for slot in delta.adapter_drops:
            self._give_up(slot)
        for load in delta.adapter_loads:
            self._loading[load.slot] = _Loading(load.slot, load.adapter, self._num_load_steps, self._run, self._thread)

    def take_loaded(self) -> tuple[AdapterLoaded, ...]:
        """Return the loads that have ended since the last call; called once in each step, behind `follow`."""
        if not self._loading:
            return ()
        ended = [end for loading in self._loading.values() if (end := loading.poll()) is not None]
        for end in ended:
            del self._loading[end.slot]
            if not end.error:
                self.digests[end.slot] = end.digest
        return tuple(ended)

    def _give_up(self, slot: int) -> None:
        if (loading := self._loading.pop(slot, None)) is not None:
            loading.cancel()
        if self.digests.pop(slot, None) is not None or loading is not None:
            self._on_thread(self._drop, slot)

    def _on_thread(self, work: Callable[[int], None], slot: int) -> None:
        """Do it behind the loads that have begun, so that no load comes into a slot after its drop."""
        if self._thread is None:
            work(slot)
        else:
            self._thread.submit(work, slot)

    def _run(self, slot: int, adapter: Adapter) -> AdapterLoaded:
        end = self._run_here(slot, adapter)
        if self._agrees is None or self._agrees(end.digest):
            return end
        if end.error:
            _logger.warning(Event("adapter_not_loaded", slot=slot, source=adapter.source, cause=end.error))
            return end
        self._drop(slot)
        error = f"{adapter.source} was not loaded: the ranks read other contents of it, or one could not read it"
        if not adapter.digest:  # an operator's load, not a client's request
            error += f"; rank 0 has the SHA-256 {end.digest.hex()}"
        return AdapterLoaded(slot, error=error[:MAX_ERROR_CHARS])

    def _run_here(self, slot: int, adapter: Adapter) -> AdapterLoaded:
        try:
            digest = self._load(slot, adapter)
        except ModelLoadError as error:
            return AdapterLoaded(slot, error=str(error)[:MAX_ERROR_CHARS])
        except Exception as error:  # a full memory, or a bug: it ends this load, not the steps beside it
            _logger.exception(Event("adapter_not_loaded", slot=slot, source=adapter.source))
            self._drop(slot)  # half of it may be there
            text = f"{type(error).__name__}: {error}"
            return AdapterLoaded(slot, error=f"{adapter.source} was not loaded: {text}"[:MAX_ERROR_CHARS])
        if adapter.digest and digest != adapter.digest:
            self._drop(slot)
            asked = adapter.digest.hex()
            event = Event(
                "adapter_has_other_content", slot=slot, source=adapter.source, digest=digest.hex(), asked=asked
            )
            _logger.warning(event)
            why = f"{adapter.source} has another content now; its SHA-256 is not {asked}, which was asked for"
            return AdapterLoaded(slot, error=why[:MAX_ERROR_CHARS])
        return AdapterLoaded(slot, digest)


class _Loading:
    """A load that has begun."""

    def __init__(
        self,
        slot: int,
        adapter: Adapter,
        num_steps: int,
        run: Callable[[int, Adapter], AdapterLoaded],
        thread: ThreadPoolExecutor | None,
    ) -> None:
        self._slot, self._adapter, self._run = slot, adapter, run
        self._num_steps_left = num_steps
        self._future: Future[AdapterLoaded] | None = None if thread is None else thread.submit(run, slot, adapter)

    def poll(self) -> AdapterLoaded | None:
        """Return the end of the load; None: it goes on."""
        if self._future is not None:
            return self._future.result() if self._future.done() else None
        if self._num_steps_left:
            self._num_steps_left -= 1
            return None
        return self._run(self._slot, self._adapter)

    def cancel(self) -> None:
        """Do not begin, if it has not begun."""
        if self._future is not None:
            self._future.cancel()

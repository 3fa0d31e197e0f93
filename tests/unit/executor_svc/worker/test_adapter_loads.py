"""What a load of an adapter leaves behind when it fails."""

import pytest

from executor_svc.worker.adapter_loads import AdapterLoads
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import Adapter, AdapterLoad, TableDelta


@pytest.mark.parametrize(
    ("error", "text"), [(ModelLoadError("it is damaged"), "it is damaged"), (MemoryError("it is full"), "it is full")]
)
def test_whatever_a_load_raises_ends_the_load_alone(error: Exception, text: str) -> None:
    dropped: list[int] = []

    def fail(slot: int, adapter: Adapter) -> bytes:
        if adapter.source == "good":
            return bytes(32)
        raise error

    loads = AdapterLoads(fail, dropped.append, has_thread=False)
    loads.follow(TableDelta(adapter_loads=(AdapterLoad(1, Adapter("bad")), AdapterLoad(2, Adapter("good")))))
    [bad, good] = loads.take_loaded()
    assert text in bad.error
    assert (good.slot, good.error, set(loads.digests)) == (2, "", {2})
    assert loads.take_loaded() == ()

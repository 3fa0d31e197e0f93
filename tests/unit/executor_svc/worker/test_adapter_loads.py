"""What a load of an adapter leaves behind when it fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from executor_svc.worker.adapter_loads import AdapterLoads
from executor_svc.worker.worker_adapters import WorkerAdapters
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import Adapter, AdapterLoad, AdapterLoaded, TableDelta
from tests.numerics.threaded_group import ThreadedGroup, run_ranks


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


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        (["aa", "aa", "aa"], ""),
        (["aa", "aa", "bb"], "one could not read it; rank 0 has the SHA-256 aaaa"),
        (["aa", "", "aa"], "one could not read it; rank 0 has the SHA-256 aaaa"),
        (["", "aa", "aa"], "it is not there"),
    ],
)
def test_ranks_use_an_adapter_only_if_all_of_them_read_the_same(of_ranks: list[str], words: str) -> None:
    """`of_ranks`: the first byte of what each rank reads; empty: it cannot."""

    def load(group: ThreadedGroup) -> tuple[AdapterLoaded, list[int]]:
        dropped: list[int] = []

        def read(source: str) -> Any:
            if not of_ranks[group.rank]:
                raise ModelLoadError("it is not there")
            return SimpleNamespace(digest=of_ranks[group.rank] * 32)

        slots: Any = SimpleNamespace(read=read, load=lambda slot, adapter: None, drop=dropped.append)
        adapters = WorkerAdapters(slots, SimpleNamespace(find=str), group)  # type: ignore[arg-type]
        adapters.follow(TableDelta(adapter_loads=(AdapterLoad(1, Adapter("it")),)))
        [end] = adapters.take_loaded()
        return end, dropped

    ends = run_ranks(len(of_ranks), load)
    for (end, dropped), content in zip(ends, of_ranks, strict=True):
        assert bool(end.error) is bool(words)
        assert dropped == [1] * bool(words and content)
    assert words in ends[0][0].error

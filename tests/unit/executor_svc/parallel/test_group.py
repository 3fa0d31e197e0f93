"""What a group says of graphs, and that it ends behind them."""

import gc
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from executor_svc.parallel.group import SINGLE_RANK, DistributedGroup


class Graphs:
    """Writes down when they are released."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def release(self) -> None:
        self._events.append("released")


def test_a_group_ends_behind_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: events.append("ended"))
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    on_gpus, on_cpus = (
        DistributedGroup(HashStore(), 0, 2, torch.device(device), timedelta(seconds=2)) for device in ("cuda", "cpu")
    )
    assert (on_gpus.why_not_capturable, SINGLE_RANK.why_not_capturable) == (None, None)
    assert on_cpus.why_not_capturable == "the ranks exchange by gloo, on the host"
    kept, gone = Graphs(events), Graphs(events)
    on_gpus.release_at_end(kept)
    on_gpus.release_at_end(gone)
    del gone
    gc.collect()
    on_gpus.close()
    assert events == ["released", "ended"]

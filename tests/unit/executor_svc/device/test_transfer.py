"""The host pool is pinned as large as it is, or stays pageable and says so."""

import pytest
import torch

from executor_svc.device.transfer import pin

DEVICE = torch.device("cpu")  # stands for a GPU


class Runtime:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered.append((pointer, num_bytes, flags))
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.registered = [memory for memory in self.registered if memory[0] != pointer]
        return 0


class Owner:
    pass


def test_exactly_the_memory_of_the_pool_is_pinned() -> None:
    runtime, pool, owner = Runtime(), torch.empty(5, 1000), Owner()
    assert pin(pool, DEVICE, owner, runtime)
    assert runtime.registered == [(pool.data_ptr(), 20_000, 1)]
    del owner  # as the cache that steps are measured on
    assert not runtime.registered


def test_an_empty_pool_asks_for_nothing() -> None:
    runtime = Runtime(error=1)
    assert pin(torch.empty(0, 1000), DEVICE, Owner(), runtime)
    assert not runtime.registered


def test_a_pool_that_cannot_be_pinned_says_what_that_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[torch.device] = []

    def fail_once(*_: object, device: torch.device) -> torch.Tensor:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")  # the one that the registration left

    monkeypatch.setattr("torch.zeros", fail_once)
    assert not pin(torch.empty(2**20), DEVICE, Owner(), Runtime(error=2))
    assert launches == [DEVICE]
    assert "event=host_cache_is_pageable gib=0 cuda_error=2 effect='swaps are several times slower" in caplog.text
    assert "--host-cache-gib" in caplog.text

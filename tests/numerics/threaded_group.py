"""A tensor-parallel group of threads in one process: the collectives by hand, every rank with its own worker."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.parallel.group import Releasable
from executor_svc.worker.interface import DoneStep, WithFixedWeights, WithoutTransfers, execute
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.executor_info import ExecutorInfo, TokenizerFile
from octavo_shared.step_wire.step import Step

TIMEOUT_S = 30.0

Result = TypeVar("Result")


class Exchange:
    """Where the ranks leave a value and take those of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def all_of(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        """Let ranks that wait fail."""
        self._barrier.abort()


class ThreadedGroup:
    """One rank; see `TensorParallelGroup`."""

    why_not_capturable: str | None = "the ranks are threads"

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank = rank
        self.size = exchange.size
        self._exchange = exchange

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange.all_of(self.rank, partial.clone())).sum(0)

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        torch.stack(self._exchange.all_of(self.rank, part.clone()), out=parts)

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchange.all_of(self.rank, part.clone())
        return torch.cat(parts, dim=1) if self.rank == 0 else None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._exchange.all_of(self.rank, values.clone())[0])

    def least(self, number: int) -> int:
        numbers: list[int] = self._exchange.all_of(self.rank, number)
        return min(numbers)

    def wait_for_all(self) -> None:
        self._exchange.all_of(self.rank, None)

    def release_at_end(self, graphs: Releasable) -> None:
        pass


class ThreadedRanks(WithFixedWeights, WithoutTransfers):
    """The workers of all ranks as one worker; see `executor_svc.worker.interface.Worker`."""

    def __init__(
        self, config: ExecutorConfig, size: int, make_group: Callable[[Exchange, int], ThreadedGroup] = ThreadedGroup
    ) -> None:
        self._exchange = Exchange(size)
        self._threads = ThreadPoolExecutor(size)
        groups = [make_group(self._exchange, rank) for rank in range(size)]
        self.workers: list[TorchWorker] = self._on_all(lambda rank: load_worker(config, groups[rank]))

    @property
    def info(self) -> ExecutorInfo:
        return self.workers[0].info

    @property
    def table(self) -> BatchTable:
        return self.workers[0].table

    @property
    def helper_cpu_time_us(self) -> int:
        return self.workers[0].helper_cpu_time_us

    def reset(self, *, uses_groups: bool = False) -> None:
        for worker in self.workers:
            worker.reset(uses_groups=uses_groups)

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        return self.workers[0].tokenizer_files()

    def launch(self, step: Step) -> DoneStep:
        return DoneStep(self._on_all(lambda rank: execute(self.workers[rank], step))[0])

    def close(self) -> None:
        self._threads.shutdown()

    def _on_all(self, run: Callable[[int], Any]) -> list[Any]:
        return _run_all(self._exchange, self._threads, run)


def run_ranks(size: int, run: Callable[[ThreadedGroup], Result]) -> list[Result]:
    """Return what `run` returns on each rank of a new group."""
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as threads:
        return _run_all(exchange, threads, lambda rank: run(ThreadedGroup(exchange, rank)))


def _run_all(exchange: Exchange, threads: ThreadPoolExecutor, run: Callable[[int], Result]) -> list[Result]:
    def run_or_abort(rank: int) -> Result:
        try:
            return run(rank)
        except BaseException:
            exchange.abort()
            raise

    return [future.result() for future in [threads.submit(run_or_abort, i) for i in range(exchange.size)]]

"""Whether the worker of this process is traced; see `traced_worker.py` for what is recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from executor_svc.worker.interface import Worker
from shared.service_config import ServiceConfig
from shared.tracing import start_tracing


@contextmanager
def traced(config: ServiceConfig, load_worker: Callable[[], Worker]) -> Iterator[Callable[[], Worker]]:
    """Give what loads a worker whose requests leave spans; without --tracing, `load_worker` itself.

    At the end the spans are sent, those of requests that are still in the batch table with an error.

    Raises: OctavoServiceError: spans cannot be sent.
    """
    tracing = start_tracing(config.tracing, "octavo-executor")
    if tracing is None:
        yield load_worker
        return
    from executor_svc.service.traced_worker import TracedWorker

    loaded: list[TracedWorker] = []

    def load() -> Worker:
        worker = TracedWorker(load_worker(), tracing.tracer)
        loaded.append(worker)
        return worker

    try:
        yield load
    finally:
        for worker in loaded:
            worker.end_all("the executor shut down")
        tracing.close(config.shutdown_grace_s)

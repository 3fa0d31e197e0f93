"""Octavo without its stack: the scheduler's core and the executor's worker in one loop, in this process.

Both are those of the services, with the same settings. There is no gRPC, no second process, no text and no stream.
"""

import secrets
import time
from importlib.metadata import version
from itertools import count

import numpy as np

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.adapters.octavo_stack import settings_of
from benchmarks.end_to_end.workloads import Request
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo.local.options import LocalOptions
from octavo_shared.process.garbage_collection import settle
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.serving_limits import serving_limits
from scheduler_svc.processes.service import engine_settings
from scheduler_svc.request.parameters import StopConditions


class BareLoop:
    """Decides a step, executes it, gives its result back to the core, until every request has ended.

    Args:
        worker: What the executor's service would run.
        settings: Those of the scheduler's engine.
    """

    def __init__(self, worker: Worker, settings: EngineSettings) -> None:
        worker.reset()
        self._worker = worker
        queue = WaitingQueue(settings.policy)
        self._fleet = Fleet(queue, settings.policy, prefix_key=secrets.token_bytes(16))
        self._core = self._fleet.join(serving_limits(worker.info, settings.planner), epoch=1)
        self._arrivals = count(1)

    def generate(self, requests: list[Request]) -> Generation:
        """Compute requests that arrive at once.

        Raises:
            RuntimeError: a request can never be computed.
        """
        started = time.perf_counter()
        groups = [self._group(request) for request in requests]
        token_ids: dict[SequenceGroup, list[int]] = {group: [] for group in groups}
        first_token_s: dict[SequenceGroup, float] = {}
        for group in groups:
            self._fleet.add(group)
        num_live = len(groups)
        while num_live:
            decision, _ = self._fleet.schedule(self._core, time.monotonic())
            if decision.step is None:
                raise RuntimeError(f"{num_live} of {len(groups)} requests have not ended, and there is no next step")
            updates = self._fleet.process(self._core, execute(self._worker, decision.step))
            now_s = time.perf_counter() - started
            for sequence, token_id in zip(updates.sequences, updates.token_ids, strict=True):
                first_token_s.setdefault(sequence.group, now_s)
                token_ids[sequence.group].append(token_id)
            num_live -= len(updates.finished)
        seconds = time.perf_counter() - started
        outputs = [token_ids[group] for group in groups]
        return Generation(seconds, [first_token_s[group] for group in groups], [len(ids) for ids in outputs], outputs)

    def _group(self, request: Request) -> SequenceGroup:
        conditions = StopConditions(request.output_tokens, ignore_eos=True)
        arrival, prompt = next(self._arrivals), np.array(request.prompt, np.int32)
        return SequenceGroup(str(arrival), prompt, SamplingRow(), conditions, arrival)


class OctavoCore:
    """Loads the model as an executor does, and runs the bare loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop: BareLoop | None = None

    def start(self) -> Description:
        """Load the model."""
        settings = settings_of(self._options)
        local = LocalOptions(self._options.model, settings)
        self._loop = BareLoop(load_worker(local.executor.config), engine_settings(local.scheduler.config, Tenants()))
        settle()
        told = {name: str(value) for name, value in settings.items()}
        return Description({name: version(name) for name in ("octavo", "torch")}, told)

    def generate(self, requests: list[Request]) -> Generation:
        """Compute all requests."""
        assert self._loop is not None, "start() comes first"
        return self._loop.generate(requests)

    def stop(self) -> None:
        """Nothing was started."""


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return OctavoCore(options)

"""Octavo as `octavo up` runs it, and without its stack."""

import asyncio
from dataclasses import replace
from importlib.metadata import version

import numpy as np

from benchmarks.end_to_end.adapters.interface import Description, Generation, Options
from benchmarks.end_to_end.engines import IN_BFLOAT16
from benchmarks.end_to_end.workloads import Request
from benchmarks.gpu.engine import InProcessEngine, Prompt
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from octavo.bench.load import Load
from octavo.bench.octavo_target import OctavoTarget
from octavo.bench.plan import Plan
from octavo.bench.record import RequestRecord
from octavo.client import Client
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from octavo_shared.process.garbage_collection import settle
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.serving_limits import serving_limits
from scheduler_svc.processes.service import engine_settings

RUN_TIMEOUT_S = 900.0


def settings_of(options: Options) -> dict[str, object]:
    """Return every setting of the services that is not their default."""
    return {
        "quantization": "none" if options.model.endswith(".gguf") else options.number_format.removesuffix(IN_BFLOAT16),
        "compute_dtype": "bfloat16" if options.number_format.endswith(IN_BFLOAT16) else "float32",
        "num_threads": options.num_threads,
        "kv_cache_gib": options.kv_cache_gib,
    }


class TokensTarget(OctavoTarget):
    """A scheduler of which the tokens are kept."""

    async def send(self, record: RequestRecord) -> None:
        """Run one request."""
        record.token_ids = []
        await super().send(record)


def target_of(address: str) -> TokensTarget:
    return TokensTarget(Client(address), temperature=0.0, ignore_eos=True, timeout_s=RUN_TIMEOUT_S, account={})


async def generate(target: TokensTarget, requests: list[Request]) -> Generation:
    """Send requests at once; every token is streamed. Raises: RuntimeError: one failed; with its reason."""
    lengths = [len(request.prompt) for request in requests]
    prompts = [request.prompt for request in requests]
    plan = Plan(
        [request.output_tokens for request in requests], lengths, prompts.__getitem__, concurrency=len(requests)
    )
    load = await Load(target, plan, asyncio.Event()).run()
    if reasons := [record.error for record in load.records if record.error]:
        raise RuntimeError(reasons[0])
    records = sorted(load.records, key=lambda record: record.planned.index)
    return Generation(
        load.end_s - load.begin_s,
        [record.event_times_s[0] - load.begin_s for record in records],
        [record.num_output_tokens for record in records],
        [record.token_ids or [] for record in records],
    )


class OctavoStack:
    """Starts both services; every token is streamed to the client."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._services: LocalServices | None = None
        self._target: TokensTarget | None = None

    def start(self) -> Description:
        return self._loop.run_until_complete(self._start())

    async def _start(self) -> Description:
        settings = settings_of(self._options)
        local = LocalOptions(self._options.model, settings)
        self._services = LocalServices.from_options(local)
        await self._services.start()
        self._target = await target_of(self._services.address).__aenter__()
        versions = {name: version(name) for name in ("octavo", "torch", "grpcio")}
        told = {name: str(value) for name, value in settings.items()}
        return Description(versions, {**told, "kernels": self._services.kernels})

    def generate(self, requests: list[Request]) -> Generation:
        assert self._target is not None, "start() comes first"
        return self._loop.run_until_complete(generate(self._target, requests))

    def stop(self) -> None:
        self._loop.run_until_complete(self._stop())

    async def _stop(self) -> None:
        if self._target is not None:
            await self._target.__aexit__(None, None, None)
        if self._services is not None:
            await self._services.stop()


class OctavoLoop:
    """Octavo without its stack: the planner and the executor's worker in one loop, in this process.

    Both are as in the services, with the same settings. There is no gRPC, no second process, no text and no stream.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._engine: InProcessEngine | None = None

    def start(self) -> Description:
        settings = settings_of(self._options)
        local = LocalOptions(self._options.model, settings)
        scheduler = engine_settings(local.scheduler.config, Tenants())
        self._engine = bare_loop(load_worker(local.executor.config), scheduler)
        settle()
        told = {name: str(value) for name, value in settings.items()}
        return Description({name: version(name) for name in ("octavo", "torch")}, told)

    def generate(self, requests: list[Request]) -> Generation:
        assert self._engine is not None, "start() comes first"
        return generate_alone(self._engine, requests)

    def stop(self) -> None:
        """Nothing was started."""


def bare_loop(worker: Worker, settings: EngineSettings) -> InProcessEngine:
    """Return a loop that decides a step, executes it, and gives its result back to the planner."""
    worker.reset()
    info = replace(worker.info, max_allowance=1)  # a token a step, as the services with --speculate off
    return InProcessEngine(worker, num_steps_in_flight=1, limits=serving_limits(info, settings.planner))


def generate_alone(engine: InProcessEngine, requests: list[Request]) -> Generation:
    run = engine.generate([Prompt(np.array(request.prompt, np.int32), request.output_tokens) for request in requests])
    first_token_s = [answer.first_token_s for answer in run.answers]
    return Generation(run.wall_s, first_token_s, [len(output) for output in run.outputs], run.outputs)

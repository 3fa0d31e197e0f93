"""Octavo as `octavo up` runs it, and without its stack."""

import asyncio
import time
from importlib.metadata import version

import numpy as np

from benchmarks.end_to_end.adapters.interface import Description, Generation, Options
from benchmarks.end_to_end.engines import IN_BFLOAT16
from benchmarks.end_to_end.workloads import Request
from benchmarks.gpu.engine import InProcessEngine, Prompt
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from octavo.client import Client
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from octavo.values.outputs import Delta
from octavo.values.sampling_params import SamplingParams
from octavo_shared.process.garbage_collection import settle
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.serving_limits import serving_limits
from scheduler_svc.processes.service import engine_settings


def settings_of(options: Options) -> dict[str, object]:
    """Return every setting of the services that is not their default."""
    return {
        "quantization": "none" if options.model.endswith(".gguf") else options.number_format.removesuffix(IN_BFLOAT16),
        "compute_dtype": "bfloat16" if options.number_format.endswith(IN_BFLOAT16) else "float32",
        "num_threads": options.num_threads,
        "kv_cache_gib": options.kv_cache_gib,
    }


async def generate(client: Client, requests: list[Request]) -> Generation:
    started = time.perf_counter()
    answers = await asyncio.gather(*(_answer(client, request, started) for request in requests))
    seconds = time.perf_counter() - started
    token_ids = [tokens for _, tokens in answers]
    return Generation(seconds, [first_s for first_s, _ in answers], [len(tokens) for tokens in token_ids], token_ids)


async def _answer(client: Client, request: Request, started: float) -> tuple[float, list[int]]:
    """Return when the first token came, and all tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
    first_token_s, token_ids = 0.0, list[int]()
    async for event in client.stream(request.prompt, params):
        if isinstance(event, Delta):
            first_token_s = first_token_s or time.perf_counter() - started
            token_ids.extend(event.token_ids)
    return first_token_s, token_ids


class OctavoStack:
    """Starts both services; every token is streamed to the client."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._services: LocalServices | None = None
        self._client: Client | None = None

    def start(self) -> Description:
        return self._loop.run_until_complete(self._start())

    async def _start(self) -> Description:
        settings = settings_of(self._options)
        local = LocalOptions(self._options.model, settings)
        self._services = LocalServices.from_options(local)
        await self._services.start()
        self._client = Client(self._services.address)
        await self._client.__aenter__()
        versions = {name: version(name) for name in ("octavo", "torch", "grpcio")}
        told = {name: str(value) for name, value in settings.items()}
        return Description(versions, {**told, "kernels": self._services.kernels})

    def generate(self, requests: list[Request]) -> Generation:
        assert self._client is not None, "start() comes first"
        return self._loop.run_until_complete(generate(self._client, requests))

    def stop(self) -> None:
        self._loop.run_until_complete(self._stop())

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
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
    return InProcessEngine(worker, num_steps_in_flight=1, limits=serving_limits(worker.info, settings.planner))


def generate_alone(engine: InProcessEngine, requests: list[Request]) -> Generation:
    run = engine.generate([Prompt(np.array(request.prompt, np.int32), request.output_tokens) for request in requests])
    first_token_s = [answer.first_token_s for answer in run.answers]
    return Generation(run.wall_s, first_token_s, [len(output) for output in run.outputs], run.outputs)

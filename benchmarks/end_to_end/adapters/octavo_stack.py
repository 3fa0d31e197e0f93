"""Octavo as `octavo up` runs it: client (this process), scheduler and executor, joined by gRPC."""

import asyncio
import time
from importlib.metadata import version

from benchmarks.end_to_end.adapters.interface import Description, Engine, Generation, Options
from benchmarks.end_to_end.workloads import Request
from octavo.client import Client
from octavo.local import LocalServices
from octavo.local_options import LocalOptions
from octavo.outputs import Delta
from octavo.sampling_params import SamplingParams


class OctavoStack:
    """Starts both services; every token is streamed to the client."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._services: LocalServices | None = None
        self._client: Client | None = None

    def start(self) -> Description:
        """Start the services and open the client."""
        return self._loop.run_until_complete(self._start())

    async def _start(self) -> Description:
        settings = {
            "quantization": self._options.number_format,
            "num_threads": self._options.num_threads,
            "kv_cache_gib": self._options.kv_cache_gib,
        }
        local = LocalOptions(self._options.model, settings)
        self._services = LocalServices.from_options(local)
        await self._services.start()
        self._client = Client(self._services.address)
        await self._client.__aenter__()
        versions = {name: version(name) for name in ("octavo", "torch", "grpcio")}
        told = {name: str(value) for name, value in settings.items()}
        return Description(versions, {**told, "kernels": self._services.kernels})

    def generate(self, requests: list[Request]) -> Generation:
        """Send all requests at once."""
        return self._loop.run_until_complete(self._generate(requests))

    async def _generate(self, requests: list[Request]) -> Generation:
        started = time.perf_counter()
        answers = await asyncio.gather(*(self._answer(request, started) for request in requests))
        seconds = time.perf_counter() - started
        return Generation(seconds, [first_s for first_s, _ in answers], [tokens for _, tokens in answers])

    async def _answer(self, request: Request, started: float) -> tuple[float, int]:
        """Return when the first token came, and how many came."""
        assert self._client is not None, "start() comes first"
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        first_token_s, num_tokens = 0.0, 0
        async for event in self._client.stream(request.prompt, params):
            if isinstance(event, Delta):
                first_token_s = first_token_s or time.perf_counter() - started
                num_tokens += len(event.token_ids)
        return first_token_s, num_tokens

    def stop(self) -> None:
        """Stop both services."""
        self._loop.run_until_complete(self._stop())

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        if self._services is not None:
            await self._services.stop()


def make_engine(options: Options) -> Engine:
    """Return the engine."""
    return OctavoStack(options)

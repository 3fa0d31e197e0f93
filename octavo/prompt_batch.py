"""Many prompts at a time on the services of this machine: for `octavo.LLM`, which is in octavo/llm.py."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from octavo.client import Client
from octavo.errors import InvalidRequestError, OctavoError, OverloadedError, UnavailableError
from octavo.local import LocalServices
from octavo.outputs import FailedRequest, Prompt, RequestOutput
from octavo.sampling_params import SamplingParams

# Time within which the end of a process is seen here after its connections broke.
_END_IS_SEEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Account:
    """How requests of one call are told apart from others."""

    priority: int
    tenant: str
    cache_salt: str


async def generate_all(
    services: LocalServices,
    requests: Sequence[tuple[Prompt, SamplingParams | None, str]],
    account: Account,
    slots: asyncio.Semaphore,
    on_output: Callable[[RequestOutput | FailedRequest], None],
) -> list[RequestOutput | FailedRequest]:
    """Run requests, as many at a time as there are slots: a prompt, its parameters, its name for sentences about it.

    Raises:
        LocalServiceError: a service stopped.
    """
    async with Client(services.address) as client:

        async def generate(prompt: Prompt, params: SamplingParams | None, name: str) -> RequestOutput | FailedRequest:
            output: RequestOutput | FailedRequest
            try:
                async with slots:
                    output = await _generate_patiently(client, prompt, params, account)
            except UnavailableError as error:
                await _raise_if_stopped(services)
                output = FailedRequest(prompt, error)
            except InvalidRequestError as error:
                is_one = len(requests) == 1
                named = error if is_one else InvalidRequestError(f"{name}: {error}", field=error.field)
                output = FailedRequest(prompt, named)
            except OctavoError as error:
                output = FailedRequest(prompt, error)
            on_output(output)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(*request)) for request in requests]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


async def _generate_patiently(
    client: Client, prompt: Prompt, params: SamplingParams | None, account: Account
) -> RequestOutput:
    """Run one prompt; while the waiting queue is full, as it may be with a small one, wait and try again."""
    while True:
        try:
            return await client.generate(prompt, params, **asdict(account))
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_s)


async def _raise_if_stopped(services: LocalServices) -> None:
    """Raise why a connection broke, if a service stopped: its end is seen a little later than that of its streams."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_IS_SEEN_S):
            raise await services.wait_for_failure()

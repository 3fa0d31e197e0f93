"""`octavo demo`: everything at once, for the first minute with Octavo."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import click
from rich.console import Console

from octavo.client import Client
from octavo.commands.service_options import ServiceCommand, service_options
from octavo.local import LocalOptions, LocalServices
from octavo.outputs import ChatMessage, Delta, Finished
from octavo.sampling_params import SamplingParams

_QUESTION = "Why is the sky blue? Answer in three sentences."

_ROUTE = """\
  question:  client ──text──> scheduler (tokens, queues, block tables) ──a message a step──> executor (model, KV cache)
  answer:    client <──text── scheduler (stop checks, characters)      <──a token a step──── executor (sampler)
"""


@click.command(cls=ServiceCommand)
@click.argument("question", default=_QUESTION)
@service_options
def demo(question: str, model: str, verbose: bool, options: dict[str, Any]) -> None:
    """Prepare the demo model, start both services, stream the answer to QUESTION, stop both."""
    local = LocalOptions(model, is_private=True, **options)
    local.prepare_model()
    asyncio.run(_run_demo(question, local, is_verbose=verbose))


async def _run_demo(question: str, options: LocalOptions, *, is_verbose: bool) -> None:
    console = Console(stderr=True)
    with console.status("starting") as status:
        services = LocalServices.from_options(options, on_status=status.update, is_verbose=is_verbose)
        await services.start()
    try:
        click.echo(_ROUTE)
        await services.run_beside(_answer(question, services.address))
    finally:
        with console.status("stopping both services"):
            await services.stop()


async def _answer(question: str, address: str) -> None:
    """Stream one answer and print how fast it came."""
    sampling_params = SamplingParams(temperature=0.0, max_tokens=256)
    click.echo(f"> {question}")
    async with Client(address) as client:
        prompt = [ChatMessage(role="user", content=question)]
        started_s = time.monotonic()
        first_token_s: float | None = None
        async with aclosing(client.stream(prompt, sampling_params)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    if first_token_s is None:
                        first_token_s = time.monotonic()
                    click.echo(event.text, nl=False)
                elif isinstance(event, Finished):
                    num_tokens = event.usage.num_output_tokens
        ended_s = time.monotonic()
    click.echo("\n")
    if first_token_s is not None:
        rate = (num_tokens - 1) / max(ended_s - first_token_s, 1e-9)
        wait_ms = 1000 * (first_token_s - started_s)
        click.echo(f"{num_tokens} tokens, the first after {wait_ms:.0f} ms, then {rate:.1f} tokens/s")

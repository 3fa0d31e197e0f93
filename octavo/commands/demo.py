"""`octavo demo`: an executor is killed in the middle of an answer, and the answer stays the same."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click
from rich.console import Console

from octavo.admin_client import AdminClient
from octavo.client import Client
from octavo.commands.service_options import ServiceCommand, service_options
from octavo.errors import InternalError, LocalServiceError
from octavo.local.options import LocalOptions
from octavo.local.services import LocalServices
from octavo.values.outputs import Accepted, ChatMessage, Delta
from octavo.values.sampling_params import SamplingParams

_QUESTION = "Why is the sky blue? Answer in three sentences."

# Greedy: the same question has the same answer.
_PARAMS = SamplingParams(temperature=0.0, max_tokens=256)

# Some two lines of text.
_NUM_TOKENS_BEFORE_KILL = 32

_PICTURE = """\
                                                    ┌─> executor 1 (model, KV cache), process {}
  client <──text──> scheduler <──a message a step──>┤
                                                    └─> executor 2 (model, KV cache), process {}
"""


@click.command(cls=ServiceCommand)
@click.argument("question", default=_QUESTION)
@service_options
def demo(question: str, model: str, verbose: bool, options: dict[str, Any]) -> None:
    """Kill an executor in the middle of an answer that goes on.

    Starts a scheduler and two executors, asks QUESTION, and kills the executor that computes the answer. Then it asks
    again without a kill, and compares. Each executor loads the weights, so two take twice the memory.
    """
    local = LocalOptions(model, num_executors=2, is_private=True, **options)
    local.prepare_model()
    asyncio.run(_run_demo(question, local, is_verbose=verbose))


async def _run_demo(question: str, options: LocalOptions, *, is_verbose: bool) -> None:
    console = Console(stderr=True)
    restarts: list[str] = []
    with console.status("starting") as status:
        services = LocalServices.from_options(
            options, on_status=status.update, on_restart=restarts.append, is_verbose=is_verbose
        )
        await services.start()
    are_logs_told = False
    try:
        click.echo(_PICTURE.format(*services.executor_pids.values()))
        await services.run_beside(_show(question, services, console))
        if restarts and "is back" in restarts[-1]:
            click.echo(f"{restarts[-1].capitalize()}. `octavo up` also restarts processes that die.")
    except LocalServiceError:
        are_logs_told = True
        raise
    finally:
        with console.status("stopping the services"):
            await services.stop(discard_logs=not are_logs_told)


async def _show(question: str, services: LocalServices, console: Console) -> None:
    """Have the question answered twice, with and without a killed executor, and compare.

    Raises:
        InternalError: the answers differ.
    """
    prompt = [ChatMessage(role="user", content=question)]
    click.echo(f"> {question}")
    async with Client(services.address) as client:
        token_ids, pause_s = await _answer_and_kill(client, prompt, services)
        if pause_s is None:
            click.echo(
                f"{len(token_ids)} tokens: the answer finished before an executor could be killed; ask for more tokens."
            )
            return
        click.echo(
            f"{len(token_ids)} tokens; the stream paused for {pause_s:.1f} s while the other executor took over."
        )
        with console.status("asking again, without a kill"):
            undisturbed = (await client.generate(prompt, _PARAMS)).outputs[0].token_ids
    compare(token_ids, undisturbed)
    click.echo(f"Asked again, without a kill: the same {len(token_ids)} tokens.")


async def _answer_and_kill(
    client: Client, prompt: Sequence[ChatMessage], services: LocalServices
) -> tuple[list[int], float | None]:
    """Print an answer as it comes, and kill the executor that computes it.

    Returns: the tokens, and the longest pause after the kill; None: the answer was too short for it.
    """
    token_ids: list[int] = []
    pause_s, last_s = None, time.monotonic()
    request_id = ""
    async with (
        AdminClient(services.admin_address) as admin,
        aclosing(client.stream(prompt, _PARAMS)) as events,
    ):
        async for event in events:
            if isinstance(event, Accepted):
                request_id = event.request_id
            if not isinstance(event, Delta):
                continue
            if pause_s is not None:
                pause_s = max(pause_s, time.monotonic() - last_s)
            click.echo(event.text, nl=False)
            token_ids += event.token_ids
            if pause_s is None and len(token_ids) >= _NUM_TOKENS_BEFORE_KILL:
                executor = (await admin.get_request(request_id)).executor
                if executor:  # else it has ended meanwhile
                    _kill(executor, services)
                    pause_s = 0.0
            last_s = time.monotonic()
    click.echo("\n")
    return token_ids, pause_s


def _kill(address: str, services: LocalServices) -> None:
    pids = services.executor_pids
    number = list(pids).index(address) + 1
    os.kill(pids[address], signal.SIGKILL)
    line = (
        f"── executor {number} is computing this answer: kill -9 {pids[address]} ── executor {3 - number} takes over ──"
    )
    click.echo(f"\n{click.style(line, fg='red', bold=True)}")


def compare(token_ids: Sequence[int], undisturbed: Sequence[int]) -> None:
    """Compare the token ids of two answers. Raises: InternalError: they differ."""
    if list(token_ids) == list(undisturbed):
        return
    pairs = zip(token_ids, undisturbed, strict=False)
    index = next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(map(len, (token_ids, undisturbed)))
    )
    raise InternalError(f"the answers differ from token {index} on; this is a bug, please report it")

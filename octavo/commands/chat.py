"""`octavo chat`: a conversation in the terminal."""

import asyncio
import contextlib
from contextlib import aclosing

import click

from octavo.client import Client
from octavo.commands.options import address_option, sampling_options
from octavo.errors import InvalidRequestError, NotConnectedError, OctavoError
from octavo.outputs import ChatMessage, Delta
from octavo.sampling_params import SamplingParams


@click.command()
@address_option
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options
def chat(sampling_params: SamplingParams, address: str, system: str | None) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D ends, /reset starts anew, /quit ends."""
    with contextlib.suppress(ImportError):  # line editing and history for input(), where the system has it
        import readline  # noqa: F401
    # One loop for the whole conversation, entered once an answer: in between, input() may block.
    with asyncio.Runner() as runner:
        client = Client(address)
        runner.run(client.__aenter__())
        try:
            runner.run(_greet(client))
            _converse(runner, client, sampling_params, system)
        finally:
            runner.run(client.close())


def _converse(runner: asyncio.Runner, client: Client, sampling_params: SamplingParams, system: str | None) -> None:
    opening = [ChatMessage(role="system", content=system)] if system else []
    messages = list(opening)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                messages = list(opening)
                continue
            case text:
                messages.append(ChatMessage(role="user", content=text))
        answer: list[str] = []
        try:
            runner.run(_print_answer(client, messages, sampling_params, answer))
        except KeyboardInterrupt:
            click.echo(" [stopped]")
        except NotConnectedError:
            raise
        except OctavoError as error:
            click.echo(f"octavo: {error}", err=True)
            if not answer:
                messages.pop()  # the turn that could not be answered
                continue
        messages.append(ChatMessage(role="assistant", content="".join(answer)))


async def _greet(client: Client) -> None:
    model = await client.get_model()
    if not model.has_chat_template:
        raise InvalidRequestError(f"{model.model_id} has no chat template; use `octavo generate --raw`")
    click.echo(f"{model.model_id} at {client.address}; Ctrl-C stops an answer, Ctrl-D ends")


async def _print_answer(
    client: Client, messages: list[ChatMessage], sampling_params: SamplingParams, answer: list[str]
) -> None:
    """Print an answer as it comes and collect its parts, which outlive a cancellation, in `answer`."""
    async with aclosing(client.stream(messages, sampling_params)) as events:
        async for event in events:
            if isinstance(event, Delta):
                answer.append(event.text)
                click.echo(event.text, nl=False)
    click.echo()


def _read_line() -> str | None:
    """Return what the person types; None: Ctrl-D."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            click.echo()  # as a shell does: the line is dropped
        except EOFError:
            click.echo()
            return None

"""`octavo chat`: a conversation in the terminal."""

import asyncio
import contextlib
from typing import Any

import click

from octavo.client import Client
from octavo.commands.answer import print_answer
from octavo.commands.connection import connection_options
from octavo.commands.flag_names import in_flags
from octavo.commands.options import account_options, sampling_options
from octavo.errors import InvalidRequestError, NotConnectedError, OctavoError
from octavo.outputs import ChatMessage
from octavo.sampling_params import SamplingParams


@click.command()
@connection_options
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@account_options
@sampling_options
def chat(sampling_params: SamplingParams, client: Client, system: str | None, **account: Any) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D ends, /reset starts anew, /quit ends."""
    with contextlib.suppress(ImportError):  # line editing and history for input(), where the system has it
        import readline  # noqa: F401
    # One loop for the whole conversation, entered once an answer: in between, input() may block.
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            runner.run(_greet(client))
            _converse(runner, client, sampling_params, system, account)
        finally:
            runner.run(client.close())


def _converse(
    runner: asyncio.Runner,
    client: Client,
    sampling_params: SamplingParams,
    system: str | None,
    account: dict[str, Any],
) -> None:
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
                click.echo("the conversation is empty")
                continue
            case text if text.startswith("/"):
                click.echo(f"octavo: there is no command {text.split()[0]}; there are /reset and /quit", err=True)
                continue
            case text:
                messages.append(ChatMessage(role="user", content=text))
        answer: list[str] = []
        try:
            runner.run(
                print_answer(
                    client.stream(messages, sampling_params, **account), answer, max_tokens=sampling_params.max_tokens
                )
            )
        except KeyboardInterrupt:
            click.echo(" [stopped]")
            if not answer:
                messages.pop()  # an empty turn of the model would teach it to say nothing
                continue
        except NotConnectedError:
            raise
        except OctavoError as error:
            is_refused = isinstance(error, InvalidRequestError)
            sentence = in_flags(str(error), click.get_current_context()) if is_refused else str(error)
            click.echo(f"octavo: {sentence}", err=True)
            if not answer:
                messages.pop()  # the turn that could not be answered
                continue
        messages.append(ChatMessage(role="assistant", content="".join(answer)))


async def _greet(client: Client) -> None:
    model = await client.get_model()
    if not model.has_chat_template:
        raise InvalidRequestError(f"{model.model_id} has no chat template; use `octavo generate --raw`")
    click.echo(f"{model.model_id} at {client.address}; Ctrl-C stops an answer, Ctrl-D ends")


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

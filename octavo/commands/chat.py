"""`octavo chat`: a conversation in the terminal.

With input from a file or a pipe it prints answers and nothing else. Next: octavo/commands/chat_settings.py, which has
what `/set` changes.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from octavo.client import Client
from octavo.commands.answer import print_answer
from octavo.commands.chat_settings import change_setting, list_settings
from octavo.commands.connection import connection_options
from octavo.commands.flag_names import in_flags
from octavo.commands.options import account_options, adapter_option, bounded, sampling_options
from octavo.errors import InvalidRequestError, NotConnectedError, OctavoError
from octavo.values.outputs import ChatMessage
from octavo.values.sampling_params import SamplingParams

_HELP = """\
/help             show this list
/clear            begin a new conversation
/system TEXT      set the system message to TEXT; without TEXT: remove it
/set NAME VALUE   change a sampling parameter (/set temperature 0.7); without VALUE: its default
/set              show what you changed
/quit             end (or Ctrl-D)
Ctrl-C stops an answer. The arrow keys edit the line and bring back earlier ones."""

_ALIASES = {"/?": "/help", "/new": "/clear", "/reset": "/clear", "/bye": "/quit", "/exit": "/quit"}

_MAX_HISTORY_LINES = 1000


@click.command()
@connection_options
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save the input history in this file.  [default: kept until the chat ends]",
)
@adapter_option
@account_options
@sampling_options
def chat(
    sampling_params: SamplingParams, client: Client, system: str | None, history: Path | None, **account: Any
) -> None:
    """Chat with the model. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat."""
    # One loop for the whole conversation, entered once an answer: in between, input() may block.
    with _line_editing(history), asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            conversation = _Conversation(runner, client, sampling_params, system, account)
            conversation.run()
        finally:
            runner.run(client.close())
    if conversation.has_failed and not conversation.is_interactive:
        click.get_current_context().exit(1)


class _Conversation:
    """What was said, and how to go on.

    Attributes:
        is_interactive: Whether a person types; otherwise only answers are printed.
        has_failed: Whether a turn had no answer because of an error.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        client: Client,
        sampling_params: SamplingParams,
        system: str | None,
        account: dict[str, Any],
    ) -> None:
        self.is_interactive = sys.stdin.isatty()
        self.has_failed = False
        self._runner = runner
        self._client = client
        self._params = sampling_params
        self._system = system
        self._account = account
        self._turns: list[ChatMessage] = []

    def run(self) -> None:
        """Converse until the input ends or the user quits."""
        model = self._runner.run(self._client.get_model())
        if not model.has_chat_template:
            raise InvalidRequestError(f"{model.model_id} has no chat template; use `octavo generate --raw`")
        self._confirm(f"{model.model_id} at {self._client.address}; /help lists commands, Ctrl-D ends")
        while (line := self._read_line()) is not None:
            if not line.startswith("/"):
                if line.strip():
                    self._say(line.strip())
                continue
            name, _, text = line.strip().partition(" ")
            if _ALIASES.get(name, name) == "/quit":
                return
            self._run_command(name, text.strip())

    def _run_command(self, name: str, text: str) -> None:
        match _ALIASES.get(name, name):
            case "/help":
                click.echo(_HELP)
            case "/clear":
                self._turns.clear()
                self._confirm("the conversation is empty")
            case "/system":
                self._system = text or None
                self._confirm("the system message is set" if text else "there is no system message")
            case "/set" if not text:
                click.echo(list_settings(self._params))
            case "/set":
                try:
                    self._params = change_setting(self._params, text, click.get_current_context())
                except click.UsageError as error:
                    self._complain(error.format_message())
                else:
                    self._confirm(list_settings(self._params))
            case _:
                self._complain(
                    f"unknown command {name}; /help lists the commands; to send this as text, start it with a space"
                )

    def _say(self, text: str) -> None:
        """Send a turn and print the answer; a turn without any answer is forgotten."""
        opening = [ChatMessage(role="system", content=self._system)] if self._system else []
        turn = ChatMessage(role="user", content=text)
        answer: list[str] = []
        try:
            events = self._client.stream([*opening, *self._turns, turn], bounded(self._params), **self._account)
            self._runner.run(print_answer(events, answer, self._params, more="/set max_tokens N"))
        except KeyboardInterrupt:
            click.echo(" [stopped]")
        except OctavoError as error:
            if isinstance(error, NotConnectedError) and not self.is_interactive:
                raise
            self.has_failed = True
            self._complain(self._sentence(error))
        if said := "".join(answer):  # an empty turn of the model would teach it to say nothing
            self._turns += [turn, ChatMessage(role="assistant", content=said)]

    def _sentence(self, error: OctavoError) -> str:
        if isinstance(error, NotConnectedError):
            return f'{error}; start one with "octavo up"'
        if not isinstance(error, InvalidRequestError):
            return str(error)
        remedy = "; /clear begins a new conversation" if error.field == "messages" and self._turns else ""
        return in_flags(str(error), click.get_current_context()) + remedy

    def _read_line(self) -> str | None:
        """Return what the person types; None: the input has ended."""
        while True:
            try:
                if not self.is_interactive or sys.stdout.isatty():
                    return input("> " if self.is_interactive else "")
                click.echo("> ", nl=False, err=True)  # input() would write it among the answers
                return input()
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                click.echo(err=True)  # as a shell does: the line is dropped
            except EOFError:
                if self.is_interactive:
                    click.echo(err=True)
                return None

    def _confirm(self, sentence: str) -> None:
        if self.is_interactive:
            click.echo(sentence, err=not sys.stdout.isatty())

    def _complain(self, sentence: str) -> None:
        click.echo(f"octavo: {sentence}", err=True)


@contextlib.contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Let input() edit lines, where the system has readline; keep them in a file if the user wants that."""
    try:
        import readline
    except ImportError:
        if history is not None:
            raise click.ClickException("--history needs the readline module, which this Python lacks") from None
        yield
        return
    if history is None:
        yield
        return
    try:
        history.touch(mode=0o600)  # what people type is their own business
        readline.read_history_file(history)
    except OSError as error:
        raise click.ClickException(f"--history {history} cannot be used: {error.strerror}") from error
    try:
        yield
    finally:
        readline.set_history_length(_MAX_HISTORY_LINES)
        readline.write_history_file(history)

"""`octavo generate`: one prompt in, its answer on stdout, as it comes; several answers one after another."""

import asyncio
import sys
from dataclasses import asdict
from typing import Any

import click

from octavo.client import Client
from octavo.commands.answer import complete_answer, print_answer, print_outputs, say_if_cut_short
from octavo.commands.connection import connection_options
from octavo.commands.options import Number, account_options, adapter_option, bounded, number_option, sampling_options
from octavo.values.outputs import ChatMessage, Prompt
from octavo.values.sampling_params import SamplingParams
from octavo.values.wording import json_line


@click.command()
@click.argument("text", metavar="PROMPT")
@connection_options
@click.option(
    "--stream/--no-stream", default=True, help="Print the text as it arrives, or all at the end.  [default: stream]"
)
@click.option(
    "--chat/--raw",
    "is_chat",
    default=None,
    help=(
        "Apply the model's chat template, or send the prompt unchanged.  [default: --chat if the model has a template]"
    ),
)
@click.option(
    "--encoder-prompt",
    metavar="TEXT",
    help="What the model's encoder reads, \"-\" from stdin; PROMPT is the decoder's then.  [default: PROMPT]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit for the whole answer.",
)
@click.option("--request-id", metavar="ID", help="Request id, for octavo explain.  [default: chosen by the scheduler]")
@number_option("n", "Number of outputs. Several outputs are printed once all are complete.")
@number_option("logprobs", "Add log-probabilities to --json: of each token and of this many alternatives.")
@number_option(
    "prompt_logprobs", "Add log-probabilities of the prompt's tokens to --json, with this many alternatives."
)
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON when the answer is complete.")
@adapter_option
@account_options
@sampling_options
def generate(
    sampling_params: SamplingParams,
    text: str,
    client: Client,
    stream: bool,
    is_chat: bool | None,
    encoder_prompt: str | None,
    timeout_s: float | None,
    is_json: bool,
    **account: Any,
) -> None:
    """Send PROMPT to the scheduler and print the answer. PROMPT "-" reads it from stdin."""
    for flag, value in (
        ("--logprobs", sampling_params.logprobs),
        ("--prompt-logprobs", sampling_params.prompt_logprobs),
    ):
        if value is not None and not is_json:
            raise click.UsageError(f"{flag} needs --json", click.get_current_context())
    if text == encoder_prompt == "-":
        raise click.UsageError("PROMPT and --encoder-prompt both read stdin", click.get_current_context())
    prompt_text, encoder_text = (_read_stdin() if given == "-" else given for given in (text, encoder_prompt))
    if not prompt_text:
        raise click.UsageError("the prompt is empty; give a text", click.get_current_context())
    if encoder_text == "":
        raise click.UsageError("the encoder prompt is empty; give a text", click.get_current_context())
    if encoder_text is not None:
        is_chat, account["encoder_prompt"] = bool(is_chat), encoder_text  # a decoder's prompt is rarely a conversation
    # The deltas of several outputs come interleaved, and a terminal has one place to write.
    is_streamed = stream and not is_json and (sampling_params.n or 1) == 1

    async def run() -> None:
        async with client:
            prompt = await _to_prompt(client, prompt_text, is_chat)
            events = client.stream(prompt, bounded(sampling_params), timeout_s=timeout_s, **account)
            if is_streamed:
                await print_answer(events, [], sampling_params)
                return
            output = await complete_answer(events, prompt, sampling_params)
            if is_json:
                click.echo(json_line(asdict(output)))
            else:
                print_outputs(output.outputs)
            say_if_cut_short(output.outputs, output.usage, sampling_params.max_tokens)

    asyncio.run(run())


async def _to_prompt(client: Client, text: str, is_chat: bool | None) -> Prompt:
    if is_chat is None:
        is_chat = (await client.get_model()).has_chat_template
    return [ChatMessage(role="user", content=text)] if is_chat else text


def _read_stdin() -> str:
    """Return all of stdin; as bytes first, since a POSIX locale would let any of them pass as text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException("standard input is not UTF-8 text") from error

"""`octavo generate`: one prompt in, its answer on stdout, as it comes."""

import asyncio
import json
import sys
from dataclasses import asdict, replace

import click

from octavo.client import Client
from octavo.commands.answer import print_answer
from octavo.commands.options import address_option, sampling_options
from octavo.outputs import ChatMessage, Prompt
from octavo.sampling_params import SamplingParams


@click.command()
@click.argument("text", metavar="PROMPT")
@address_option
@click.option("--stream/--no-stream", default=True, help="Print text as it comes, or all at once.  [default: stream]")
@click.option(
    "--chat/--raw",
    "is_chat",
    default=None,
    help="Send the prompt through the model's chat template, or as it is.  [default: --chat if there is a template]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit for the whole answer.",
)
@click.option(
    "--logprobs", type=int, help="Log-probabilities, with --json. Only 0, the sampled token's own, is supported."
)
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON with everything, at the end.")
@sampling_options
def generate(
    sampling_params: SamplingParams,
    text: str,
    address: str,
    stream: bool,
    is_chat: bool | None,
    timeout_s: float | None,
    logprobs: int | None,
    is_json: bool,
) -> None:
    """Send PROMPT to a scheduler and print the answer; "-" reads the prompt from stdin."""
    if logprobs is not None and not is_json:
        raise click.UsageError("--logprobs needs --json", click.get_current_context())
    prompt_text = _read_stdin() if text == "-" else text
    sampling_params = replace(sampling_params, logprobs=logprobs)

    async def run() -> None:
        async with Client(address) as client:
            prompt = await _to_prompt(client, prompt_text, is_chat)
            if stream and not is_json:
                await print_answer(client.stream(prompt, sampling_params, timeout_s=timeout_s), [])
                return
            output = await client.generate(prompt, sampling_params, timeout_s=timeout_s)
            click.echo(json.dumps(asdict(output), ensure_ascii=False) if is_json else output.outputs[0].text)

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

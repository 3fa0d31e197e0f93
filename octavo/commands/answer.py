"""Printing answers: one as it comes, for `octavo generate` and `octavo chat`, or several when they are complete."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import click

from octavo.commands.options import DEFAULT_MAX_TOKENS
from octavo.commands.waiting import WaitingStatus
from octavo.errors import OctavoError
from octavo.values.outputs import Accepted, Delta, Event, Finished, FinishReason, Output, Prompt, RequestOutput, Usage
from octavo.values.sampling_params import SamplingParams

# To read a prompt of fewer tokens takes no time that a person would notice.
LONG_PROMPT_TOKENS = 1000


async def print_answer(
    events: AsyncGenerator[Event, None],
    parts: list[str],
    sampling_params: SamplingParams,
    *,
    more: str = "--max-tokens N",
) -> None:
    """Print the text of `events` and end the line, also before an error, which then has a line of its own.

    On stderr it says what it waits for, if that takes long, and what cut the answer short, as `say_if_cut_short`.

    Args:
        events: What `Client.stream` yields.
        parts: Takes the pieces of text in order; they outlive a cancellation.
        sampling_params: What was asked for; without `max_tokens`, `bounded` sets it where the request is sent.
        more: What lets an answer be longer, for the sentence that says so.

    Raises:
        OctavoError: as `Client.stream`.
    """
    finished: Finished | None = None
    try:
        with WaitingStatus() as waiting:
            async with aclosing(_watched(events, waiting, sampling_params)) as watched:
                async for event in watched:
                    if isinstance(event, Delta):
                        parts.append(event.text)
                        click.echo(event.text, nl=False)
                        waiting.saw(event.text)
                    elif isinstance(event, Finished):
                        finished = event
    except OctavoError:
        text = "".join(parts)
        if text and not text.endswith("\n"):
            click.echo()
        raise
    click.echo()
    if finished is not None:
        say_if_cut_short(finished.outputs, finished.usage, sampling_params.max_tokens, more=more)


async def complete_answer(
    events: AsyncGenerator[Event, None], prompt: Prompt, sampling_params: SamplingParams
) -> RequestOutput:
    """Return all of an answer, like `Client.generate`; on stderr it says what it waits for, if that takes long.

    Args:
        events: What `Client.stream` yields.
        prompt: The prompt.
        sampling_params: What was asked for.

    Raises:
        OctavoError: as `Client.stream`.
    """
    accepted, finished = Accepted("", 0), None
    with WaitingStatus() as waiting:
        async with aclosing(_watched(events, waiting, sampling_params)) as watched:
            async for event in watched:
                if isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Finished):
                    finished = event
    assert finished is not None, "a stream ends with a Finished event or raises"
    return RequestOutput.of(prompt, accepted, finished)


async def _watched(
    events: AsyncGenerator[Event, None], waiting: WaitingStatus, sampling_params: SamplingParams
) -> AsyncGenerator[Event, None]:
    """Yield events; between them say what has not come yet. Why it has not, only the scheduler knows."""
    explain = ""
    # Ranked outputs come at the end, all at once.
    is_ranked = bool(sampling_params.beam_width) or (sampling_params.best_of or 1) > (sampling_params.n or 1)
    waiting.expect("still waiting for the scheduler")
    async with aclosing(events):
        async for event in events:
            waiting.hide()
            yield event
            if isinstance(event, Accepted):
                explain = f"; why: `octavo explain {event.request_id}`"
                what = "the outputs are not complete yet" if is_ranked else "no token yet"
                if event.num_prompt_tokens >= LONG_PROMPT_TOKENS:
                    what += f" (prompt: {event.num_prompt_tokens:,} tokens)"
                waiting.expect(what, explain, is_usual=is_ranked)
            elif not isinstance(event, Finished):
                waiting.expect("no new token yet", explain)


def print_outputs(outputs: Sequence[Output]) -> None:
    """Print complete outputs one after another, each below a line that tells which it is if there are several."""
    for number, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            click.echo(f"--- output {number} of {len(outputs)}{_rank(output)} ---")
        click.echo(output.text)


def say_if_cut_short(
    outputs: Sequence[Output], usage: Usage, max_tokens: int | None, *, more: str = "--max-tokens N"
) -> None:
    """Say on stderr that an output was cut short, and what allows more."""
    cut = [len(output.token_ids) for output in outputs if output.finish_reason is FinishReason.LENGTH]
    if not cut:
        return
    if min(cut) >= (DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens):
        click.echo(f"octavo: stopped at {min(cut)} tokens; {more} allows more", err=True)
        return
    ending = f"only {min(cut)} of --max-tokens {max_tokens} fit" if max_tokens else f"stopped at {min(cut)} tokens"
    num_tokens = usage.num_prompt_tokens + min(cut)
    whose = "the decoder's " if usage.num_encoder_tokens else ""
    click.echo(f"octavo: {ending}: {whose}prompt and answer together have at most {num_tokens} tokens here", err=True)


def _rank(output: Output) -> str:
    """Return what an output was ranked by, for its headline; empty: it was not."""
    if output.beam_score is not None:
        return f", score {output.beam_score:.3f}"
    if output.cumulative_logprob is not None:
        return f", log-probability {output.cumulative_logprob:.3f}"
    return ""

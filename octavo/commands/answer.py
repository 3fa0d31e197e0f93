"""Printing answers: one as it comes, for `octavo generate` and `octavo chat`, or several when they are complete."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import click

from octavo.errors import OctavoError
from octavo.outputs import Delta, Event, Output


async def print_answer(events: AsyncGenerator[Event, None], parts: list[str]) -> None:
    """Print the text of `events` and end the line, also before an error, which then has a line of its own.

    Args:
        events: What `Client.stream` yields.
        parts: Takes the pieces of text in order; they outlive a cancellation.

    Raises:
        OctavoError: those of `Client.stream`.
    """
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    parts.append(event.text)
                    click.echo(event.text, nl=False)
    except OctavoError:
        text = "".join(parts)
        if text and not text.endswith("\n"):
            click.echo()
        raise
    click.echo()


def print_outputs(outputs: Sequence[Output]) -> None:
    """Print complete outputs one after another, each below a line that tells which it is if there are several."""
    for number, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            click.echo(f"--- output {number} of {len(outputs)}{_rank(output)} ---")
        click.echo(output.text)


def _rank(output: Output) -> str:
    """Return what an output was ranked by, for its headline; empty: it was not."""
    if output.beam_score is not None:
        return f", score {output.beam_score:.3f}"
    if output.cumulative_logprob is not None:
        return f", log-probability {output.cumulative_logprob:.3f}"
    return ""

"""Printing one answer as it comes; `octavo generate` and `octavo chat` share it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import click

from octavo.errors import OctavoError
from octavo.outputs import Delta, Event


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

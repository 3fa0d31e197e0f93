"""The keys of `octavo top`, over the picture."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from octavo.top.overview import legend
from octavo.top.polling import MAX_LISTED_REQUESTS, MAX_SEARCHED_REQUESTS

_KEYS = (
    ("up down", "select a request; page up, page down, home, end"),
    ("enter", "explain it: why it waits, its history, its blocks"),
    ("escape", "close the open pane"),
    ("/", "filter by text in the id or the tenant"),
    ("e", "switch between finished and live requests"),
    ("a s w", "sort by age, time since last token, waiting time"),
    ("t b n", "sort by tokens, blocks, tenant"),
    ("p", "pause or resume"),
    ("+ -", "longer or shorter interval"),
    ("q", "quit"),
)


class HelpScreen(ModalScreen[None]):
    """Says what the keys do; most of them close it."""

    CSS = """
    HelpScreen { align: center middle; }
    #help { width: 72; height: auto; padding: 0 2; border: round $primary; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,space,q,question_mark", "dismiss")]

    def compose(self) -> ComposeResult:
        """Make the text."""
        lines = [Text.assemble((f"{keys:<9}", "bold"), what) for keys, what in _KEYS]
        bounds = Text(
            f"Shown are the {MAX_LISTED_REQUESTS} oldest live requests and the last {MAX_LISTED_REQUESTS} that "
            f"finished; with a filter, {MAX_SEARCHED_REQUESTS:,} of each.",
            "dim",
        )
        yield Static(Text("\n").join([*lines, Text(), Text("blocks   ").append_text(legend()), bounds]), id="help")

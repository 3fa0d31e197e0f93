"""The screen of `octavo top`: asks in turn, draws what came, and obeys keys. What is drawn is made elsewhere."""

import asyncio
import time
from typing import ClassVar, cast

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Input, Static

from octavo.admin_client import NotFoundError
from octavo.errors import OctavoError
from octavo.top.formatting import span_text
from octavo.top.overview import executor_lines, legend, overview_lines
from octavo.top.polling import MAX_LISTED_REQUESTS, MAX_SEARCHED_REQUESTS, Poller
from octavo.top.rates import Picture, RateMeter
from octavo.top.report import ask_report
from octavo.top.report_text import report_lines
from octavo.top.request_table import RequestTable
from octavo.top.rows import Order, RequestRow, ended_rows, in_order, live_rows
from octavo.top.snapshot import requests_title
from octavo.top.terminal import size_trouble
from octavo.values.wording import counted, printable

INTERVALS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_ALL_LINES = 30  # from here on there is room for the executors beside an open pane
_KEYS_TEXT = "q quit   ? keys   enter explain   / filter   e live or ended   p pause   + - interval"
_HELP = (
    ("up down", "select a request; page up, page down, home, end"),
    ("enter", "explain it: why it waits, its history, its blocks"),
    ("escape", "close the open pane"),
    ("/", "filter by text in the id or the tenant"),
    ("e", "switch between ended and live requests"),
    ("a s w", "sort by age, time since last token, waiting time"),
    ("t b n", "sort by tokens, blocks, tenant"),
    ("p", "pause or resume"),
    ("+ -", "longer or shorter interval"),
    ("q", "quit"),
)


class TopApp(App[None]):
    """Shows one scheduler until the user quits.

    Args:
        poller: Asks it.
        interval_s: Time between two questions, in seconds.
    """

    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", priority=False),
        Binding("question_mark", "help"),
        Binding("slash", "filter"),
        Binding("escape", "close"),
        Binding("e", "toggle_ended"),
        Binding("p", "pause"),
        Binding("plus,equals_sign", "change_interval(1)"),
        Binding("minus", "change_interval(-1)"),
        *(
            Binding(key, f"order('{order.name}')")
            for key, order in (
                ("a", Order.AGE),
                ("s", Order.SILENCE),
                ("w", Order.WAIT),
                ("t", Order.TOKENS),
                ("b", Order.BLOCKS),
                ("n", Order.TENANT),
            )
        ),
    ]

    def __init__(self, poller: Poller, interval_s: float) -> None:
        super().__init__()
        self._poller = poller
        self._meter = RateMeter()
        self._picture: Picture | None = None
        self._interval_s = interval_s
        self._order = Order.AGE
        self._shows_ended = False
        self._is_paused = False
        self._pane_id: str | None = None
        self._is_pane_answered = False
        # Since when the scheduler does not answer (wall clock text, monotonic seconds), and why.
        self._trouble: tuple[str, float, str] | None = None
        self._wake = asyncio.Event()
        self._is_asked_for = False

    def compose(self) -> ComposeResult:
        """Make the widgets, from top to bottom."""
        yield Static(id="small")
        with Vertical(id="main"):
            yield Static("asking …", id="overview")
            yield Static(id="notice")
            yield Static(id="executors")
            yield Static(id="title")
            yield RequestTable(id="requests")
            with VerticalScroll(id="pane"):
                yield Static(id="report")
            yield Input(placeholder="part of an id or a tenant; enter applies, escape clears", id="filter")
            yield Static(_KEYS_TEXT, id="keys")

    def on_mount(self) -> None:
        """Begin to ask."""
        self.table.focus()
        self.run_worker(self._poll())

    @property
    def _base(self) -> Screen[None]:
        return cast("Screen[None]", self.screen_stack[0])

    @property
    def table(self) -> RequestTable:
        """The table of requests."""
        return self._base.query_one("#requests", RequestTable)

    # Asking --------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while self.is_running:
            self._wake.clear()
            if self._is_asked_for or not self._is_paused:
                self._is_asked_for = False
                await self.refresh_picture()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def refresh_picture(self) -> None:
        """Ask the scheduler, and show its answers; if there are none, say so and keep the last ones."""
        report = None
        try:
            answers = await self._poller.take(wants_ended=self._shows_ended, is_searching=bool(self._filter_text))
            report = await self._ask_report()
            self._is_pane_answered = report is not None
        except OctavoError as error:
            since = self._trouble[:2] if self._trouble else (time.strftime("%H:%M:%S"), time.monotonic())
            self._trouble = (*since, printable(str(error)))
            if self._pane_id is not None and not self._is_pane_answered:
                report = Text(f"no response: {self._trouble[2]}")
        else:
            self._trouble = None
            self._picture = self._meter.add(answers)
        if not self.is_running:  # the user quit while the scheduler was asked: the widgets are going
            return
        if report is not None:
            self._base.query_one("#report", Static).update(report)
        self._draw()

    async def _ask_report(self) -> Text | None:
        if self._pane_id is None:
            return None
        try:
            return Text("\n").join(report_lines(await ask_report(self._poller.source, self._pane_id)))
        except NotFoundError:
            return Text(f"{printable(self._pane_id)} has finished and is no longer kept")

    def _ask_now(self) -> None:
        """Ask without waiting for the interval, also while paused: a key needs an answer."""
        self._is_asked_for = True
        self._wake.set()

    # Drawing -------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size; say what is needed if it is too small."""
        trouble = size_trouble(event.size.width, event.size.height)
        self._base.query_one("#small", Static).update(Text(trouble or ""))
        self._base.set_class(trouble is not None, "small")
        self._make_room()
        self._draw()

    def _make_room(self) -> None:
        """Leave the executors out while the pane is open in a terminal without room for all."""
        self._base.set_class(self._pane_id is not None and self.size.height < _ALL_LINES, "tight")

    def _draw(self) -> None:
        self._base.query_one("#notice", Static).update(self._notice())
        picture = self._picture
        if picture is None:
            return
        width = max(1, self.size.width - 2)
        address = f"{self._poller.source.address}, every {self._interval_s:g} s"
        max_executor_lines = max(3, (self.size.height - 10) // 3)
        for name, lines in (
            ("#overview", overview_lines(picture, address, width)),
            ("#executors", executor_lines(picture, width, max_executor_lines)),
        ):
            self._base.query_one(name, Static).update(Text("\n").join(lines))
        rows = self._rows(picture)
        self._base.query_one("#title", Static).update(self._title(picture, len(rows)))
        order = None if self._shows_ended else self._order
        self.table.show(rows, max(78, width) - 1, order, shows_ended=self._shows_ended)  # 1 for the scrollbar

    def _rows(self, picture: Picture) -> list[RequestRow]:
        rows = ended_rows(picture) if self._shows_ended else in_order(live_rows(picture), self._order)
        return [row for row in rows if row.matches(self._filter_text)]

    def _title(self, picture: Picture, num_shown: int) -> Text:
        answers = picture.answers
        if self._shows_ended:
            title = Text(f"the last {counted(len(answers.ended or ()), 'request')} that ended, newest first")
        else:
            title = Text(f"{requests_title(len(answers.live), answers.num_live_requests)}, by {self._order.value}")
        if self._filter_text:
            title.append(f"; {num_shown:,} with {printable(self._filter_text)!r}", "yellow")
        return title

    def _notice(self) -> Text:
        if self._trouble is not None:
            at, since_s, why = self._trouble
            lasted = span_text(round(1000 * (time.monotonic() - since_s)))
            notice = Text(f"no response since {at} ({lasted}): {why}")
        elif self._is_paused:
            notice = Text('paused; press "p" to resume', "yellow")
        else:
            return Text()
        notice.truncate(max(1, self.size.width - 2), overflow="ellipsis")
        return notice

    # Keys ----------------------------------------------------------------------------------------

    @property
    def _filter_text(self) -> str:
        return self._base.query_one("#filter", Input).value.strip()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the pane with the request under the cursor."""
        del event
        self._pane_id = self.table.selected_id
        if self._pane_id is None:
            return
        pane = self._base.query_one("#pane", VerticalScroll)
        self._is_pane_answered = False
        self._base.query_one("#report", Static).update("asking …")
        pane.add_class("open")
        self._make_room()
        pane.scroll_home(animate=False)
        pane.focus()
        self._ask_now()

    def on_input_changed(self) -> None:
        """Show what the filter lets through."""
        self._draw()
        self._ask_now()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self._base.query_one("#filter", Input).set_class(bool(self._filter_text), "open")
        self.table.focus()

    def action_close(self) -> None:
        """Close what is open: the pane, or the filter."""
        pane, filter_input = self._base.query_one("#pane", VerticalScroll), self._base.query_one("#filter", Input)
        if filter_input.has_focus or not pane.has_class("open"):
            filter_input.value = ""
            filter_input.remove_class("open")
        else:
            pane.remove_class("open")
            self._pane_id = None
            self._make_room()
        self.table.focus()

    def action_filter(self) -> None:
        """Open the line for the filter."""
        filter_input = self._base.query_one("#filter", Input)
        filter_input.add_class("open")
        filter_input.focus()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())

    def action_toggle_ended(self) -> None:
        """Switch between ended and live requests."""
        self._shows_ended = not self._shows_ended
        self._draw()
        self._ask_now()

    def action_pause(self) -> None:
        """Stop asking, or go on."""
        self._is_paused = not self._is_paused
        self._draw()
        self._wake.set()

    def action_order(self, name: str) -> None:
        """Order the live requests."""
        self._order = Order[name]
        self._draw()

    def action_change_interval(self, direction: int) -> None:
        """Take the next longer interval, or the next shorter one."""
        if direction > 0:
            self._interval_s = next((s for s in INTERVALS_S if s > self._interval_s), INTERVALS_S[-1])
        else:
            self._interval_s = next((s for s in reversed(INTERVALS_S) if s < self._interval_s), INTERVALS_S[0])
        self._draw()
        self._wake.set()


class HelpScreen(ModalScreen[None]):
    """Says what the keys do; most of them close it."""

    CSS = """
    HelpScreen { align: center middle; }
    #help { width: 72; height: auto; padding: 0 2; border: round $primary; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,space,q,question_mark", "dismiss")]

    def compose(self) -> ComposeResult:
        """Make the text."""
        lines = [Text.assemble((f"{keys:<9}", "bold"), what) for keys, what in _HELP]
        bounds = Text(
            f"Shown are the {MAX_LISTED_REQUESTS} oldest live requests and the last {MAX_LISTED_REQUESTS} that "
            f"ended; with a filter, {MAX_SEARCHED_REQUESTS:,} of each.",
            "dim",
        )
        yield Static(Text("\n").join([*lines, Text(), Text("blocks   ").append_text(legend()), bounds]), id="help")

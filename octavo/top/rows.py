"""What a line says of a request, in which order requests are, and which columns a width has room for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from octavo.admin.v1 import admin_pb2
from octavo.top.as_json import enum_word
from octavo.top.formatting import count_text, fit, fit_id, pad, rate_text, span_text
from octavo.top.rates import Picture
from octavo.values.wording import printable

# What waits is yellow, what failed or may never go on is red.
STATUS_STYLES: Mapping[str, str] = {
    "running": "#87af5f",
    "waiting": "#d7af5f",
    "swapped": "#d7af5f",
    "preempted": "#d7af5f",
    "quarantined": "#d75f5f",
    "failed": "red",
}
_NARROW = 100  # cells; narrower tables have less room between columns
_MAX_ID_WIDTH = 36  # of a UUID


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Texts are safe to print; spans of time are in milliseconds.

    Attributes:
        state: As the scheduler shows it.
        tokens_per_s: Output tokens per second since the last picture; None: not known yet, or it has ended.
        place: Where it is, why it waits, or how it ended.
    """

    state: admin_pb2.RequestState
    place: str
    tokens_per_s: float | None = None

    @property
    def shown_id(self) -> str:
        """The id as it can be printed."""
        return printable(self.state.request_id)

    @property
    def status(self) -> str:
        """The state in a word."""
        return status_text(self.state)

    @property
    def tenant(self) -> str:
        """The tenant that it runs for."""
        return printable(self.state.tenant)

    @property
    def silent_ms(self) -> int:
        """Since its last token, or since it arrived if it has none."""
        return self.state.last_token_age_ms if self.state.HasField("last_token_age_ms") else self.state.age_ms

    @property
    def queued_ms(self) -> int:
        """Until it was first admitted, or up to now."""
        return self.state.queue_ms if self.state.HasField("queue_ms") else self.state.age_ms

    @property
    def waiting_ms(self) -> int | None:
        """How long it has not run: since its last token, or since it arrived; None: it runs."""
        return None if self.state.status == admin_pb2.REQUEST_STATUS_RUNNING else self.silent_ms

    @property
    def first_token_ms(self) -> int | None:
        """Until its first token; None: it has none."""
        return self.state.time_to_first_token_ms if self.state.HasField("time_to_first_token_ms") else None

    def matches(self, text: str) -> bool:
        """Return whether the id or the tenant contains a text, in upper or lower case."""
        return any(text.casefold() in own.casefold() for own in (self.shown_id, self.tenant))


def status_text(state: admin_pb2.RequestState) -> str:
    """Return the state of a request in a word; of a scheduler that does not say it, the name of its status."""
    return printable(state.status_text) or enum_word(state, "status")


def live_rows(picture: Picture) -> list[RequestRow]:
    """Return a row for each live request that was asked for, by age."""
    rates, reasons = picture.rates.request_output_tokens, picture.answers.reasons
    return [
        RequestRow(request, printable(_place(request, reasons)), rates.get(request.request_id))
        for request in picture.answers.live
    ]


def ended_rows(picture: Picture) -> list[RequestRow]:
    """Return a row for each request that has ended and was asked for, the newest end first."""
    return [RequestRow(request, printable(request.outcome)) for request in picture.answers.ended or ()]


def _place(request: admin_pb2.RequestState, reasons: Mapping[str, str]) -> str:
    match request.status:
        case admin_pb2.REQUEST_STATUS_WAITING:
            return reasons.get(request.request_id, "far back in the queue")
        case admin_pb2.REQUEST_STATUS_PARKED:
            return "it may crash executors; others go first"
        case admin_pb2.REQUEST_STATUS_SWAPPED:
            return f"in the host cache of {request.executor}"
        case admin_pb2.REQUEST_STATUS_PREEMPTED:
            return f"tokens in flight from {request.executor}"
    return f"on {request.executor}"


# Order -------------------------------------------------------------------------------------------


class Order(Enum):
    """What live requests are ordered by; each value is what is said of it."""

    AGE = "age"
    SILENCE = "time since last token"
    WAIT = "waiting time"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    TENANT = "tenant"


_KEYS: Mapping[Order, Callable[[RequestRow], int | str | tuple[int, int]]] = {
    Order.AGE: lambda row: 0,
    Order.SILENCE: lambda row: -row.silent_ms,
    Order.WAIT: lambda row: (-(row.waiting_ms or 0), -row.queued_ms),
    Order.TOKENS: lambda row: -(row.state.num_prompt_tokens + row.state.num_output_tokens),
    Order.BLOCKS: lambda row: -row.state.num_blocks,
    Order.TENANT: lambda row: row.tenant.casefold(),
}


def in_order(rows: Iterable[RequestRow], order: Order) -> list[RequestRow]:
    """Return rows in an order, the most of it first; where that is equal, the oldest request."""
    return sorted(rows, key=lambda row: (_KEYS[order](row), -row.state.age_ms))


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: At its head.
        width: In cells.
        text: What it says of a request, before it is cut to the width.
        is_right: Whether it is a number.
        order: The order that it shows; None: it shows none.
        min_table_width: Narrower tables leave it out, in cells.
    """

    title: str
    width: int
    text: Callable[[RequestRow], str]
    is_right: bool = False
    order: Order | None = None
    min_table_width: int = 0


def _tokens_text(row: RequestRow) -> str:
    """Return tokens of the prompt and of the output, such as "1,000+64"."""
    return f"{count_text(row.state.num_prompt_tokens)}+{count_text(row.state.num_output_tokens)}"


_ID = Column("REQUEST", 16, lambda row: row.shown_id)
_STATUS = Column("STATUS", 11, lambda row: row.status)
_TENANT = Column("TENANT", 10, lambda row: row.tenant, order=Order.TENANT, min_table_width=114)
_TOKENS = Column("TOKENS", 11, _tokens_text, is_right=True, order=Order.TOKENS)
_PRIORITY = Column("PRIORITY", 8, lambda row: str(row.state.priority), is_right=True, min_table_width=94)
_PREEMPTIONS = Column("PREE", 4, lambda row: count_text(row.state.num_preemptions), True, min_table_width=160)

_LIVE_COLUMNS = (
    _ID,
    _STATUS,
    _TENANT,
    _PRIORITY,
    _TOKENS,
    Column("TOK/S", 6, lambda row: rate_text(row.tokens_per_s), is_right=True),
    Column("AGE", 7, lambda row: span_text(row.state.age_ms), is_right=True, order=Order.AGE),
    Column("SILENT", 7, lambda row: span_text(row.silent_ms), is_right=True, order=Order.SILENCE),
    Column("WAITS", 7, lambda row: span_text(row.waiting_ms), True, Order.WAIT, min_table_width=104),
    Column("QUEUED", 7, lambda row: span_text(row.queued_ms), True, min_table_width=134),
    Column("BLOCKS", 7, lambda row: count_text(row.state.num_blocks), True, Order.BLOCKS, min_table_width=124),
    _PREEMPTIONS,
    Column("LOCATION OR REASON FOR WAITING", 0, lambda row: row.place),
)
_ENDED_COLUMNS = (
    _ID,
    _TENANT,
    _PRIORITY,
    _TOKENS,
    Column("TOOK", 7, lambda row: span_text(row.state.age_ms), is_right=True),
    Column("QUEUED", 7, lambda row: span_text(row.queued_ms), is_right=True, min_table_width=92),
    Column("FIRST", 7, lambda row: span_text(row.first_token_ms), is_right=True, min_table_width=102),
    Column("ENDED", 11, lambda row: f"{span_text(row.state.ended_ago_ms)} ago", is_right=True),
    _PREEMPTIONS,
    Column("OUTCOME", 0, lambda row: row.place),
)


def columns(width: int, rows: Sequence[RequestRow], *, shows_ended: bool) -> list[Column]:
    """Return the columns for a table of a width, at least 76 cells; together with gaps they fill it.

    Ids are shown whole if they fit beside the last column, which takes what is left. Priorities are shown if one of
    the rows has another one than 0.
    """
    has_priorities = any(row.state.priority for row in rows)
    chosen = [
        column
        for column in (_ENDED_COLUMNS if shows_ended else _LIVE_COLUMNS)
        if column.min_table_width <= width and (has_priorities or column is not _PRIORITY)
    ]
    left = width - sum(column.width for column in chosen) - sum(gaps(width, len(chosen)))
    longest_id = max((len(row.shown_id) for row in rows), default=0)
    # The last column gets as much as the id gains, for it is a sentence.
    for_id = min(max(0, longest_id - _ID.width), max(0, left - len(chosen[-1].title)) // 2, _MAX_ID_WIDTH - _ID.width)
    widths = [column.width for column in chosen]
    widths[0] += for_id
    widths[-1] = left - for_id
    return [replace(column, width=column_width) for column, column_width in zip(chosen, widths, strict=True)]


def head_texts(chosen: Sequence[Column], order: Order | None) -> list[str]:
    """Return the titles, as wide as the columns; "▾" marks the order."""
    marks = ["▾" if order is not None and column.order is order else "" for column in chosen]
    return [pad(mark + c.title, c.width, is_right=c.is_right) for mark, c in zip(marks, chosen, strict=True)]


def cell_texts(chosen: Sequence[Column], row: RequestRow) -> list[str]:
    """Return what the columns say of a request, each as wide as its column."""
    texts = [(fit_id if i == 0 else fit)(column.text(row), column.width) for i, column in enumerate(chosen)]
    return [pad(text, c.width, is_right=c.is_right) for text, c in zip(texts, chosen, strict=True)]


def gaps(width: int, num_columns: int) -> list[int]:
    """Return the cells behind each column of a table of a width; there are none behind the last one."""
    gap = 1 if width < _NARROW else 2
    return [*[gap] * (num_columns - 2), 2, 0]


def joined(texts: Sequence[str], width: int) -> str:
    """Return the cells of a line of a table of a width, with the gaps between them."""
    return "".join(text + " " * gap for text, gap in zip(texts, gaps(width, len(texts)), strict=True)).rstrip()

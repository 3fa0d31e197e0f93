"""The columns of the table of requests: which of them a width has room for, and what they say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.top.formatting import count_text, fit, fit_id, pad, rate_text, span_text
from octavo.top.rows import Order, RequestRow

_NARROW = 100  # cells; narrower tables have less room between columns
_MAX_ID_WIDTH = 36  # of a UUID


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


_ID = Column("REQUEST", 16, lambda row: row.shown_id)
_TENANT = Column("TENANT", 10, lambda row: row.tenant, order=Order.TENANT, min_table_width=112)
_TOKENS = Column("TOKENS", 11, lambda row: tokens_text(row), is_right=True, order=Order.TOKENS)
_PRIORITY = Column("PRIORITY", 8, lambda row: str(row.priority), is_right=True, min_table_width=92)
_PREEMPTIONS = Column("PREE", 4, lambda row: count_text(row.num_preemptions), is_right=True, min_table_width=160)

_LIVE_COLUMNS = (
    _ID,
    Column("STATUS", 9, lambda row: row.status),
    _TENANT,
    _PRIORITY,
    _TOKENS,
    Column("TOK/S", 6, lambda row: rate_text(row.tokens_per_s), is_right=True),
    Column("AGE", 7, lambda row: span_text(row.age_ms), is_right=True, order=Order.AGE),
    Column("SILENT", 7, lambda row: span_text(row.silent_ms), is_right=True, order=Order.SILENCE),
    Column("WAITS", 7, lambda row: span_text(row.waiting_ms), True, Order.WAIT, min_table_width=102),
    Column("QUEUED", 7, lambda row: span_text(row.queued_ms), True, min_table_width=132),
    Column("BLOCKS", 7, lambda row: count_text(row.num_blocks), True, Order.BLOCKS, min_table_width=122),
    _PREEMPTIONS,
    Column("LOCATION OR REASON FOR WAITING", 0, lambda row: row.place),
)
_ENDED_COLUMNS = (
    _ID,
    _TENANT,
    _PRIORITY,
    _TOKENS,
    Column("TOOK", 7, lambda row: span_text(row.age_ms), is_right=True),
    Column("QUEUED", 7, lambda row: span_text(row.queued_ms), is_right=True, min_table_width=92),
    Column("FIRST", 7, lambda row: span_text(row.first_token_ms), is_right=True, min_table_width=102),
    Column("ENDED", 11, lambda row: f"{span_text(row.ended_ago_ms)} ago", is_right=True),
    _PREEMPTIONS,
    Column("OUTCOME", 0, lambda row: row.place),
)


def tokens_text(row: RequestRow) -> str:
    """Return tokens of the prompt and of the output, such as "1,000+64"."""
    return f"{count_text(row.num_prompt_tokens)}+{count_text(row.num_output_tokens)}"


def columns(width: int, rows: Sequence[RequestRow], *, shows_ended: bool) -> list[Column]:
    """Return the columns for a table of a width, at least 76 cells; together with gaps they fill it.

    Ids are shown whole if they fit beside the last column, which takes what is left. Priorities are shown if one of
    the rows has another one than 0.
    """
    has_priorities = any(row.priority for row in rows)
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
    texts = []
    for column in chosen:
        is_marked = order is not None and column.order is order
        texts.append(pad(f"▾{column.title}" if is_marked else column.title, column.width, is_right=column.is_right))
    return texts


def cell_texts(chosen: Sequence[Column], row: RequestRow) -> list[str]:
    """Return what the columns say of a request, each as wide as its column."""
    texts = []
    for i, column in enumerate(chosen):
        text = column.text(row)
        text = fit_id(text, column.width) if i == 0 else fit(text, column.width)
        texts.append(pad(text, column.width, is_right=column.is_right))
    return texts


def gaps(width: int, num_columns: int) -> list[int]:
    """Return the cells behind each column of a table of a width; there are none behind the last one."""
    gap = 1 if width < _NARROW else 2
    return [*[gap] * (num_columns - 2), 2, 0]


def joined(texts: Sequence[str], width: int) -> str:
    """Return the cells of a line of a table of a width, with the gaps between them."""
    return "".join(text + " " * gap for text, gap in zip(texts, gaps(width, len(texts)), strict=True)).rstrip()

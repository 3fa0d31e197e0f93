"""The table of requests on the screen; the cursor stays with its request, wherever that goes."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from octavo.top.rows import STATUS_STYLES, Column, Order, RequestRow, cell_texts, columns, gaps, head_texts


class RequestTable(DataTable[Text]):
    """Shows rows of requests; owns nothing but what is on the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, *, id: str) -> None:  # noqa: A002 (textual's name)
        super().__init__(cursor_type="row", cell_padding=0, id=id, cursor_foreground_priority="renderable")
        self._ids: list[str] = []
        self._shown: list[list[tuple[str, str]]] = []
        self._heads: list[str] = []

    @property
    def selected_id(self) -> str | None:
        """The request under the cursor; None: there is none."""
        return self._ids[self.cursor_row] if 0 <= self.cursor_row < len(self._ids) else None

    def show(self, rows: Sequence[RequestRow], width: int, order: Order | None, *, shows_ended: bool) -> None:
        """Show rows in their order, in so many cells of width; `order` is marked in the head."""
        selected_id, cursor_row = self.selected_id, self.cursor_row
        chosen = columns(width, rows, shows_ended=shows_ended)
        self._set_columns(chosen, head_texts(chosen, order), gaps(width, len(chosen)))
        for i, row in enumerate(rows):
            cells = [(text, _style(column, row)) for column, text in zip(chosen, cell_texts(chosen, row), strict=True)]
            if i == len(self._shown):
                self._shown.append(cells)
                self.add_row(*(Text(*cell) for cell in cells), key=str(i))
            else:
                self._update_row(i, cells)
        while len(self._shown) > len(rows):
            self._shown.pop()
            self.remove_row(str(len(self._shown)))
        self._ids = [row.state.request_id for row in rows]
        if selected_id in self._ids:
            cursor_row = self._ids.index(selected_id)
        if cursor_row != self.cursor_row:
            self.move_cursor(row=min(cursor_row, len(rows) - 1))

    def _set_columns(self, chosen: Sequence[Column], heads: list[str], gaps: list[int]) -> None:
        """Begin anew if the columns are others than before."""
        if heads == self._heads:
            return
        self.clear(columns=True)
        self._heads, self._shown = heads, []
        for column, head, gap in zip(chosen, heads, gaps, strict=True):
            self.add_column(Text(head, "bold"), width=column.width + gap)

    def _update_row(self, index: int, cells: list[tuple[str, str]]) -> None:
        for i, (cell, shown) in enumerate(zip(cells, self._shown[index], strict=True)):
            if cell != shown:
                self.update_cell_at(Coordinate(index, i), Text(*cell))
        self._shown[index] = cells


def _style(column: Column, row: RequestRow) -> str:
    return STATUS_STYLES.get(row.status, "") if column.title in ("STATUS", "OUTCOME") else ""

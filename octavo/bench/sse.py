"""Server-sent events, cut out of a byte stream whose chunks end anywhere.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 16 * 2**20


class SseParser:
    """Takes a stream chunk by chunk and gives the data of each event; names, ids and comments are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._ended_in_cr = False
        self._is_at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that are complete with this chunk; lines of one event are joined by a newline.

        Raises:
            ValueError: a line of the stream is longer than 16 MiB, or no UTF-8.
        """
        if self._ended_in_cr and chunk:
            self._ended_in_cr = False
            chunk = chunk.removeprefix(b"\n")  # the second half of a line end that was cut in two
        text = self._rest + chunk
        if self._is_at_start:
            if len(text) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(text):
                self._rest = text
                return []
            self._is_at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        *lines, self._rest = _LINE_END.split(text)
        if chunk:
            self._ended_in_cr = text.endswith(b"\r")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {_MAX_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode())
                    self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

"""Numbers, spans of time, bars and names as a terminal shows them: short, and of a width that is known."""

from collections.abc import Sequence
from datetime import UTC

from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len, set_cell_size

NONE = "–"
_LEVELS = "▁▂▃▄▅▆▇█"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def count_text(number: int) -> str:
    """Return a count in at most 7 characters below 10^12: "12,345", "123k", "12.3M", "4.56G"."""
    if number < 100_000:
        return f"{number:,}"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            value = number / factor
            decimals = 0 if value >= 100 or letter == "k" else 1 if value >= 10 else 2
            return f"{value:,.{decimals}f}{letter}"
    raise AssertionError("numbers from 100,000 have a letter")


def rate_text(rate: float | None) -> str:
    """Return events per second: "0.3", "9.5", "1,234"; a dash for None: not known yet."""
    if rate is None:
        return NONE
    return f"{rate:.1f}" if rate < 9.95 else count_text(round(rate))


def share_text(part: int, whole: int) -> str:
    """Return a share in percent, such as "43 %"; a dash if there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole else NONE


def time_text(time: Timestamp) -> str:
    """Return a time as people write it; in seconds since 1970 if no calendar has it."""
    try:
        return f"{time.ToDatetime(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return f"{time.seconds} s after 1970"


def span_text(milliseconds: int | None) -> str:
    """Return a span of time in at most 7 characters: "42 ms", "3.2 s", "59 s", "3m 05s", "2h 04m", "12d 3h"."""
    if milliseconds is None:
        return NONE
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 9_950:
        return f"{milliseconds / 1000:.1f} s"
    seconds = round(milliseconds / 1000)
    if seconds < _MINUTE_S:
        return f"{seconds} s"
    if seconds < _HOUR_S:
        return f"{seconds // _MINUTE_S}m {seconds % _MINUTE_S:02d}s"
    if seconds < _DAY_S:
        return f"{seconds // _HOUR_S}h {seconds % _HOUR_S // _MINUTE_S:02d}m"
    days = seconds // _DAY_S
    return f"{days}d {seconds % _DAY_S // _HOUR_S}h" if days < 100 else f"{days:,}d"


def short_span_text(microseconds: int) -> str:
    """Return a short span of time in at most 7 characters: "0.42 ms", "5.3 ms", "130 ms"; a long one as `span_text`."""
    milliseconds = microseconds / 1000
    if milliseconds >= 99.95:
        return span_text(round(milliseconds))
    return f"{milliseconds:.2f} ms" if milliseconds < 0.995 else f"{milliseconds:.1f} ms"


def fit(text: str, width: int) -> str:
    """Return text of at most so many cells, with "…" for a tail that is left out; width at least 1."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def fit_id(text: str, width: int) -> str:
    """Return an id of at most so many cells; "…" stands for its middle, since ids differ at both ends. Width from 3."""
    if cell_len(text) <= width:
        return text
    num_last = (width - 1) // 2
    first = set_cell_size(text, width - 1 - num_last)
    last = text[len(text) - num_last :]
    while cell_len(last) > num_last:
        last = last[1:]
    return f"{first}…{last}"


def pad(text: str, width: int, *, is_right: bool = False) -> str:
    """Return text that fills so many cells, cut if it is longer."""
    text = fit(text, width)
    blanks = " " * (width - cell_len(text))
    return blanks + text if is_right else text + blanks


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as bars, the highest one full; blanks where there are no values yet."""
    shown = list(values)[-width:] if width else []
    highest = max(shown, default=0.0)
    if highest <= 0:
        bars = _LEVELS[0] * len(shown)
    else:
        bars = "".join(_LEVELS[round(value / highest * (len(_LEVELS) - 1))] for value in shown)
    return bars.rjust(width)


def bar_lengths(parts: Sequence[int], width: int) -> list[int]:
    """Deal `width` cells to parts of a whole by their size, so that none is off by a whole cell.

    Largest remainders: each part gets the whole cells of its share, the rest goes to the largest fractions. A part
    that is not 0 shows, if there are cells enough: it takes one from the longest.
    """
    whole = sum(parts)
    if whole == 0 or width == 0:
        return [0] * len(parts)
    shares = [part * width / whole for part in parts]
    lengths = [int(share) for share in shares]
    by_fraction = sorted(range(len(parts)), key=lambda i: lengths[i] - shares[i])
    for i in by_fraction[: width - sum(lengths)]:
        lengths[i] += 1
    for i, part in enumerate(parts):
        longest = max(lengths)
        if part and not lengths[i] and longest > 1:
            lengths[lengths.index(longest)] -= 1
            lengths[i] = 1
    return lengths

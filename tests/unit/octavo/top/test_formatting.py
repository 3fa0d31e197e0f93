"""Numbers and names as they are shown: short, exact where it counts, harmless to the terminal."""

import json

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from octavo.admin.v1 import admin_pb2
from octavo.top.as_json import to_values
from octavo.top.formatting import (
    bar_lengths,
    count_text,
    fit,
    fit_id,
    pad,
    rate_text,
    share_text,
    span_text,
    sparkline,
    time_text,
)
from octavo.values.wording import json_line, printable
from tests.support.each_row import each_row


@each_row(
    (0, "0"),
    (99_999, "99,999"),
    (100_000, "100k"),
    (999_499, "999k"),
    (1_234_567, "1.23M"),
    (12_345_678, "12.3M"),
    (100_000_000, "100M"),
    (4_560_000_000, "4.56G"),
)
def test_counts_are_short(number: int, text: str) -> None:
    assert count_text(number) == text


@each_row((None, "–"), (0.0, "0.0"), (0.34, "0.3"), (9.94, "9.9"), (9.96, "10"))
def test_small_rates_have_a_decimal_and_unknown_ones_a_dash(rate: float | None, text: str) -> None:
    assert rate_text(rate) == text


@each_row(
    (None, "–"),
    (0, "0 ms"),
    (999, "999 ms"),
    (1_000, "1.0 s"),
    (9_949, "9.9 s"),
    (9_950, "10 s"),
    (59_499, "59 s"),
    (59_500, "1m 00s"),
    (3_599_499, "59m 59s"),
    (3_600_000, "1h 00m"),
    (86_399_000, "23h 59m"),
    (90_000_000, "1d 1h"),
)
def test_spans_of_time_have_two_units_at_most(milliseconds: int | None, text: str) -> None:
    assert span_text(milliseconds) == text


@given(st.integers(0, 10**11))
def test_counts_and_spans_fit_their_columns(number: int) -> None:
    assert len(count_text(number)) <= 7
    assert len(span_text(min(number, 80_000_000_000))) <= 7


def test_a_share_of_nothing_is_a_dash() -> None:
    assert (share_text(1, 3), share_text(0, 0)) == ("33 %", "–")


def test_a_long_id_keeps_both_ends() -> None:
    assert fit_id("request-0000-1111", 9) == "requ…1111"
    assert fit_id("short", 9) == "short"


def test_what_could_steer_the_terminal_is_not_printed() -> None:
    assert printable("a\x1b[2J\nb\u202e") == "a�[2J�b�"


@given(st.text(max_size=40), st.integers(3, 30))
def test_cut_texts_have_the_width_that_was_asked_for(text: str, width: int) -> None:
    text = printable(text)
    assert cell_len(fit(text, width)) <= width
    assert cell_len(fit_id(text, width)) <= width
    assert cell_len(pad(text, width)) == cell_len(pad(text, width, is_right=True)) == width


def test_a_sparkline_grows_from_the_right_and_is_full_at_its_highest() -> None:
    assert sparkline([0, 5, 10], 5) == "  ▁▅█"
    assert sparkline([1, 2, 4, 4], 2) == "██"
    assert sparkline([0, 0], 3) == " ▁▁"
    assert sparkline([], 3) == "   "


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5), st.integers(0, 80))
def test_a_bar_deals_out_all_cells_fairly(parts: list[int], width: int) -> None:
    lengths = bar_lengths(parts, width)
    whole = sum(parts)
    assert sum(lengths) == (width if whole else 0)
    if whole and width >= 2 * len(parts):
        for part, length in zip(parts, lengths, strict=True):
            assert (length > 0) == (part > 0)
            assert abs(length - part * width / whole) < 1 + len(parts)


def test_a_single_used_block_is_seen() -> None:
    assert bar_lengths([0, 1, 0, 4095], 20) == [0, 1, 0, 19]


def test_json_for_a_terminal_is_read_by_people_and_programs_and_by_no_terminal() -> None:
    value = {"request_id": "a\x1b[2J\x9b31m\x7f\u202e\u2028\ue000\ud800\U000e0001 übung 你好"}

    line = json_line(value)

    assert json.loads(line) == value
    assert line.isprintable()
    assert "übung 你好" in line


@each_row(Timestamp(nanos=2**31 - 1), Timestamp(seconds=2**62), Timestamp(seconds=-(2**62)))
def test_a_time_that_no_calendar_has_is_told_all_the_same(time: Timestamp) -> None:
    assert time_text(time) == f"{time.seconds} s after 1970"
    assert to_values(admin_pb2.RequestState(ended_at=time))["ended_at"] is None
    assert time_text(Timestamp(seconds=86400)) == "1970-01-02 00:00:00 UTC"

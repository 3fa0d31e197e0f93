import itertools

import pytest

from octavo.bench.openai_stream import SseParser
from tests.support.each_row import each_row

STREAM = (
    b"\xef\xbb\xbfdata: zero\n\n"
    b": a comment\r\n\r\n"
    b"data: one\n\n"
    b"event: message\r\nid: 7\r\ndata:two\r\n\r\n"
    b"data: left\r\ndata: right\r\n\r\n"
    b"data: first\rdata: second\r\r"
    b"retry: 100\n\n"
    b"data\n\n"
    b"data:  caf\xc3\xa9 \xf0\x9f\x90\x99\n\n"
    b"data: [DONE]\n\n"
    b"data: not complete\n"
)
EVENTS = ["zero", "one", "two", "left\nright", "first\nsecond", "", " café 🐙", "[DONE]"]


def parse(*chunks: bytes) -> list[str]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_a_stream_in_one_piece() -> None:
    assert parse(STREAM) == EVENTS


@each_row(*range(len(STREAM) + 1))
def test_a_stream_cut_at_any_byte(cut: int) -> None:
    assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


def test_a_stream_cut_at_any_two_bytes() -> None:
    head = STREAM[:60]
    expected = parse(head)
    for first, second in itertools.combinations(range(len(head)), 2):
        assert parse(head[:first], head[first:second], head[second:]) == expected


def test_a_stream_byte_by_byte_with_empty_chunks_between() -> None:
    pieces = [piece for index in range(len(STREAM)) for piece in (STREAM[index : index + 1], b"")]
    assert parse(*pieces) == EVENTS


def test_an_event_is_given_as_soon_as_its_line_has_ended() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x\r\n\r") == ["x"]
    assert parser.feed(b"\ndata: y\n\n") == ["y"]


def test_a_line_without_end_is_refused() -> None:
    parser = SseParser()
    with pytest.raises(ValueError, match="longer than"):
        parser.feed(b"data: " + b"x" * 17 * 2**20)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        parse(b"data: \xff\n\n")

import itertools
import json
from itertools import product

import pytest

from octavo.bench.config import RequestFailedError
from octavo.bench.openai_stream import SseParser, StreamReader, error_message, spread
from octavo.bench.record import RequestRecord
from tests.support.each_row import each_row
from tests.unit.octavo.bench.records import record


def chunk(text: str = "", finish_reason: str | None = None, num_tokens: int | None = None) -> str:
    usage = None if num_tokens is None else {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}], "usage": usage})


def chat_chunk(**delta: object) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})


def usage_chunk(num_tokens: int) -> str:
    details = {"cached_tokens": 3}
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "prompt_tokens_details": details}
    return json.dumps({"choices": [], "usage": usage})


def read(*events: str) -> RequestRecord:
    reader = StreamReader()
    for event in events:
        reader.read_all([event])
    found = record(ended_s=0.0)
    reader.note(found)
    reader.check_complete()
    return found


def test_each_part_is_a_token_if_there_are_as_many() -> None:
    found = read(chunk("a"), chunk("b"), chunk("c", "length"), usage_chunk(3), "[DONE]")
    assert found.event_num_tokens.tolist() == [1, 1, 1]
    assert found.usage == (7, 3, 3)
    assert found.event_times_s.tolist() == sorted(found.event_times_s)


def test_tokens_are_spread_over_fewer_parts() -> None:
    assert read(chunk("a"), chunk("b", "length"), usage_chunk(5), "[DONE]").event_num_tokens.tolist() == [3, 2]


def test_the_usage_so_far_says_how_many_tokens_a_part_brought() -> None:
    found = read(chunk("a", None, 1), chunk("b", None, 5), chunk("c", "stop", 6), usage_chunk(6), "[DONE]")
    assert found.event_num_tokens.tolist() == [1, 4, 1]


def test_without_usage_each_part_is_a_token() -> None:
    found = read(chunk("a"), chunk("b", "stop"), "[DONE]")
    assert (found.event_num_tokens.tolist(), found.usage) == ([1, 1], None)


def test_chunks_without_text_bring_no_token() -> None:
    role, think, text = chat_chunk(role="assistant", content=""), chat_chunk(reasoning="Hm"), chat_chunk(content="Yes")
    assert len(read(role, think, text, usage_chunk(2), "[DONE]").event_times_s) == 2


def test_an_answer_of_special_tokens_only_has_no_times() -> None:
    found = read(chunk("", "length"), usage_chunk(4), "[DONE]")
    assert (len(found.event_times_s), found.num_output_tokens, found.ttft_s) == (0, 4, None)


def test_a_finish_reason_is_an_end_too() -> None:
    assert read(chunk("a", "stop")).num_output_tokens == 1


@each_row(
    ([chunk("a")], "the stream ended early"),
    (["[DONE]"], "the answer had no tokens"),
    ([chunk("a"), '{"error": {"message": "out of memory"}}'], "the stream ended in an error: out of memory"),
    (["<html>"], "an event that is not JSON"),
    (["[1]"], "an event that is not a JSON object"),
    (['{"choices": {"text": "a"}}'], '"choices" are not a list of objects'),
    (['{"choices": ["a"]}'], '"choices" are not a list of objects'),
)
def test_what_is_no_whole_answer_fails(events: list[str], why: str) -> None:
    with pytest.raises(RequestFailedError, match=why):
        read(*events)


@each_row(-1, 10**12, "3", 2.5)
def test_counts_that_cannot_be_are_left_out(count: object) -> None:
    output = json.dumps({"usage": {"completion_tokens": count}})
    assert read(chunk("a"), chunk("b", "stop"), output).event_num_tokens.tolist() == [1, 1]
    others = {"prompt_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    assert read(chunk("a", "stop"), json.dumps({"usage": {"completion_tokens": 1, **others}})).usage == (None, 1, None)


@each_row(*product([1, 2, 3, 7, 64], [0, 1, 5, 7, 64, 1000]))
def test_all_tokens_are_spread_evenly_and_the_first_part_has_one(num_parts: int, num_tokens: int) -> None:
    counts = spread(num_tokens, num_parts)
    assert (sum(counts), len(counts)) == (num_tokens, num_parts)
    assert max(counts) - min(counts) <= 1
    assert counts[0] >= min(1, num_tokens)


@each_row({"error": {"message": "no", "code": 4}}, {"message": "no"}, {"detail": "no"}, {"error": "no"}, "no")
def test_messages_of_the_known_servers(body: object) -> None:
    assert error_message(body) == "no"


def test_an_unknown_error_is_shown_as_it_is() -> None:
    assert error_message({"detail": [{"loc": ["x"]}]}) == '[{"loc": ["x"]}]'


def test_a_message_of_a_server_cannot_steer_the_terminal() -> None:
    assert error_message(json.loads('{"error": "bad \\u001b[2J\\nthing \\ud800"}')) == "bad �[2J thing �"


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

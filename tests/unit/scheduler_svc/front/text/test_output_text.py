from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.front.text.output_text import OutputText, TextOptions
from tests.support.each_row import each_row
from tests.support.tokenizers import byte_level_backend, make_tokenizer

TOKENIZER = make_tokenizer(byte_level_backend())


@given(st.text("ab é🦊", max_size=40), st.lists(st.text("ab é🦊", min_size=1, max_size=4), max_size=4), st.booleans())
def test_text_and_tokens_end_where_the_first_stop_string_ends(text: str, stops: list[str], include: bool) -> None:
    output = OutputText(TOKENIZER, TextOptions(tuple(stops), include))
    found, num_pushed, stop_string = "", 0, None

    for token_id in text.encode():
        new, stop_string = output.push(token_id)
        found, num_pushed = found + new, num_pushed + 1
        if stop_string is not None:
            break
    else:
        found += output.finish()

    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(matches, default=(len(text), 0, None))
    assert stop_string == stop
    assert found == text[: end if include or stop is None else end - len(stop)]
    assert num_pushed == len(text[:end].encode())


def push_all(output: OutputText, token_ids: Iterable[int]) -> list[tuple[str, str | None]]:
    return [output.push(token_id) for token_id in token_ids]


def test_text_waits_while_it_may_become_a_stop_string() -> None:
    output = OutputText(TOKENIZER, TextOptions(("END",)))

    deltas = push_all(output, b"oEoEND")

    assert [text for text, _ in deltas] == ["o", "", "Eo", "", "", ""]
    assert [stop_string for _, stop_string in deltas] == [None] * 5 + ["END"]


def test_finish_releases_what_both_parts_hold() -> None:
    output = OutputText(TOKENIZER, TextOptions(("END",)))

    assert {text for text, _ in push_all(output, b"EN\xf0")} == {""}
    assert output.finish() == "EN�"


def test_finish_ends_before_a_stop_string_that_the_last_broken_character_completes() -> None:
    output = OutputText(TOKENIZER, TextOptions(("x�",)))

    assert [text for text, _ in push_all(output, b"ax\xf0")] == ["a", "", ""]
    assert output.finish() == ""


@each_row(0, 1, 4, 5, 6, 7, 8)
def test_no_stop_string_ends_the_text_before_min_tokens(min_tokens: int) -> None:
    output = OutputText(TOKENIZER, TextOptions(("b",), min_tokens=min_tokens))

    stops = (output.push(token_id)[1] for token_id in b"aabaabaab")
    num_tokens = next(number for number, stop_string in enumerate(stops, 1) if stop_string is not None)

    assert num_tokens == (3 if min_tokens <= 3 else 6 if min_tokens <= 6 else 9)

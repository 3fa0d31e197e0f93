from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.output_text import OutputText, TextDelta, TextOptions
from tests.support.tokenizers import BOS, byte_level_backend, make_tokenizer

TOKENIZER = make_tokenizer(byte_level_backend())


@given(
    st.text("ab é🦊", max_size=40),
    st.lists(st.text("ab é🦊", min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.integers(1, 7),
)
def test_text_and_tokens_end_where_the_first_stop_string_ends(
    text: str, stops: list[str], include: bool, num_per_push: int
) -> None:
    output = OutputText(TOKENIZER, TextOptions(tuple(stops), include))
    token_ids = list(text.encode())
    found, num_used, stop_string = "", 0, None

    for start in range(0, len(token_ids), num_per_push):
        delta = output.push(token_ids[start : start + num_per_push])
        found, num_used, stop_string = found + delta.text, num_used + delta.num_tokens_used, delta.stop_string
        if stop_string is not None:
            break
    else:
        found += output.finish()

    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(matches, default=(len(text), 0, None))
    assert stop_string == stop
    assert found == text[: end if include or stop is None else end - len(stop)]
    assert num_used == len(text[:end].encode())


def test_tokens_after_the_one_that_completes_the_stop_string_are_not_used() -> None:
    output = OutputText(TOKENIZER, TextOptions(("END",)))

    assert output.push(list(b"ok E")) == TextDelta("ok ", None, 4)
    assert output.push(list(b"ND more")) == TextDelta("", "END", 2)


def test_finish_releases_what_both_parts_hold() -> None:
    output = OutputText(TOKENIZER, TextOptions(("END",)))

    assert output.push(list(b"EN\xf0")).text == ""
    assert output.finish() == "EN�"


def test_finish_ends_before_a_stop_string_that_the_last_broken_character_completes() -> None:
    output = OutputText(TOKENIZER, TextOptions(("x�",)))

    assert output.push(list(b"ax\xf0")) == TextDelta("a", None, 3)
    assert output.finish() == ""


def test_special_tokens_count_as_used_and_stay_out_of_the_text() -> None:
    bos = TOKENIZER.id_of(BOS)
    assert bos is not None

    assert OutputText(TOKENIZER, TextOptions()).push([bos, *b"a"]) == TextDelta("a", None, 2)
    shown = OutputText(TOKENIZER, TextOptions(skip_special_tokens=False)).push([bos, *b"a"])
    assert shown == TextDelta(f"{BOS}a", None, 2)

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.tokenizer import Tokenizer
from tests.support.each_row import each_row
from tests.support.tokenizers import BOS, byte_fallback_backend, byte_level_backend, byte_level_ids, make_tokenizer

REPLACEMENT = "�"


@st.composite
def cut_bytes(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes, cut into non-empty pieces anywhere, inside characters too."""
    content = draw(contents)
    cuts = sorted(draw(st.sets(st.integers(1, max(len(content) - 1, 1)))))
    bounds = [0, *(cut for cut in cuts if cut < len(content)), len(content)]
    return [content[a:b] for a, b in pairwise(bounds) if a < b]


def deltas(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@given(cut_bytes(st.text().map(str.encode)))
def test_deltas_of_any_cut_of_any_text_add_up_and_hold_whole_characters(pieces: list[bytes]) -> None:
    tokenizer = make_tokenizer(byte_level_backend(pieces))
    token_ids = byte_level_ids(tokenizer, pieces)
    text = b"".join(pieces).decode()

    found = deltas(tokenizer, token_ids)

    assert "".join(found) == text == tokenizer.decode(token_ids, skip_special_tokens=True)
    assert sum(delta.count(REPLACEMENT) for delta in found) == text.count(REPLACEMENT)


@given(cut_bytes(st.binary(max_size=60)))
def test_deltas_of_invalid_utf8_add_up_to_what_decode_gives(pieces: list[bytes]) -> None:
    tokenizer = make_tokenizer(byte_level_backend(pieces))
    token_ids = byte_level_ids(tokenizer, pieces)

    found = deltas(tokenizer, token_ids)

    assert "".join(found) == tokenizer.decode(token_ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from(["▁", "▁a", "a", "▁你", "é", "\n", "🦊", BOS])), st.booleans())
def test_deltas_of_a_byte_fallback_tokenizer_add_up(tokens: list[str], skip: bool) -> None:
    # Characters without a token of their own become one token a byte.
    tokenizer = make_tokenizer(byte_fallback_backend(["▁a", "a", "▁你"]))
    token_ids = []
    for token in tokens:
        token_id = tokenizer.id_of(token)
        spelled = [f"<0x{byte:02X}>" for byte in token.encode()] if token_id is None else [token]
        token_ids += [part_id for part in spelled if (part_id := tokenizer.id_of(part)) is not None]

    text = "".join(deltas(tokenizer, token_ids, skip))

    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert REPLACEMENT not in text


def test_character_is_delivered_with_its_last_byte() -> None:
    tokenizer = make_tokenizer(byte_level_backend())

    assert deltas(tokenizer, list("a🦊b".encode())) == ["a", "", "", "", "🦊", "b", ""]


def test_text_before_an_incomplete_character_is_not_held_back() -> None:
    tokenizer = make_tokenizer(byte_level_backend())

    assert deltas(tokenizer, list(b"stop\xf0")) == [*"stop", "", REPLACEMENT]


def test_line_break_of_a_byte_fallback_tokenizer_is_delivered_at_once() -> None:
    tokenizer = make_tokenizer(byte_fallback_backend(["▁a"]))
    line_break, a = tokenizer.id_of("<0x0A>"), tokenizer.id_of("▁a")
    assert line_break is not None
    assert a is not None

    assert deltas(tokenizer, [a, line_break, a]) == ["a", "\n", " a", ""]


@given(st.lists(st.sampled_from([0x0A, 0x41, 0xE4, 0xBD, 0xA0, 0xFF]), max_size=40))
def test_invalid_run_of_byte_fallback_never_takes_text_back(run: list[int]) -> None:
    tokenizer = make_tokenizer(byte_fallback_backend(["▁a"]))
    a = tokenizer.id_of("▁a")
    assert a is not None
    token_ids = [a, *(tokenizer.id_of(f"<0x{byte:02X}>") or 0 for byte in run), a]

    text = "".join(deltas(tokenizer, token_ids))

    assert text.startswith("a")
    assert text.endswith(" a")


@each_row(True, False)
def test_special_tokens_follow_the_option(skip: bool) -> None:
    tokenizer = make_tokenizer(byte_level_backend())
    bos = tokenizer.id_of(BOS)
    assert bos is not None

    text = "".join(deltas(tokenizer, [bos, *b"hi", bos], skip=skip))

    assert text == ("hi" if skip else f"{BOS}hi{BOS}")


def test_ids_without_a_token_are_passed_over_even_inside_a_character() -> None:
    tokenizer = make_tokenizer(byte_level_backend())
    first, *others = "é".encode()

    assert "".join(deltas(tokenizer, [first, tokenizer.largest_id + 6, *others])) == "é"


def test_endless_invalid_or_invisible_tokens_keep_the_window_short() -> None:
    tokenizer = make_tokenizer(byte_level_backend())
    bos = tokenizer.id_of(BOS)
    assert bos is not None
    # A window that grew would take minutes: its cost is quadratic.
    token_ids = [0xF0] * 20_000 + [bos] * 20_000

    started_s = time.thread_time()
    text = "".join(deltas(tokenizer, token_ids))

    assert text == REPLACEMENT * 20_000
    assert time.thread_time() - started_s < 10

import time

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.front.text.output_text import StopStringMatcher
from tests.support.each_row import each_row

# A small alphabet makes overlaps, and stop strings inside stop strings, likely.
TEXTS = st.text("ab ", max_size=60)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=6), max_size=16)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include)
    text = ""
    for piece in pieces:
        released, stop = matcher.push(piece)
        text += released
        if stop is not None:
            return text, stop
    return text + matcher.finish(), None


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    return pieces


@given(TEXTS, st.lists(st.integers(0, 7), max_size=20), STOPS, st.booleans())
def test_any_cut_gives_what_a_search_of_the_whole_text_gives(
    text: str, sizes: list[int], stops: list[str], include: bool
) -> None:
    assert run(cut(text, sizes), stops, include) == naive(text, stops, include)


@given(TEXTS, STOPS)
def test_held_text_is_exactly_the_longest_tail_that_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops, include_stop_str_in_output=False)

    released, stop = matcher.push(text)

    if stop is None:
        tails = [text[start:] for start in range(len(text))]
        held = next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
        assert released + held == text
        assert matcher.finish() == held


def test_sixteen_long_self_similar_stop_strings_cost_linear_time() -> None:
    # Each almost matches everywhere: a search that starts over would compare 16 * 1024 * 50,000 times.
    stops = ["a" * (1008 + i) + "b" for i in range(16)]
    matcher = StopStringMatcher(stops, include_stop_str_in_output=False)

    started_s = time.thread_time()
    released = sum(len(matcher.push("aaaa")[0]) for _ in range(12_500))

    assert time.thread_time() - started_s < 10
    assert released == 50_000 - 1023


def run_early(early: list[str], late: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Push pieces in which no stop string counts, then others; return all released text and the stop string."""
    matcher = StopStringMatcher(stops, include_stop_str_in_output=False)
    released = [matcher.push(piece, may_stop=False)[0] for piece in early]
    for piece in late:
        text, stop_string = matcher.push(piece)
        released.append(text)
        if stop_string is not None:
            return "".join(released), stop_string
    return "".join([*released, matcher.finish()]), None


@each_row(
    (["a END b", " END"], [" c"], ("a END b END c", None)),
    (["ENDEND"], ["xEND", "y"], ("ENDENDx", "END")),
    (["a EN"], ["D"], ("a ", "END")),
    (["abab"], ["a", "b"], ("ab", "abab")),
    (["xab"], ["ab"], ("x", "abab")),
    (["", "END"], [], ("END", None)),
)
def test_a_stop_string_that_comes_too_early_is_text_and_one_that_ends_later_counts(
    early: list[str], late: list[str], expected: tuple[str, str | None]
) -> None:
    assert run_early(early, late, ["END", "abab"]) == expected

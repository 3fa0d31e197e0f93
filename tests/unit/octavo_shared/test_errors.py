"""What an error says, and what it keeps for programs."""

from octavo_shared.errors import InvalidFieldError, ModelLoadError
from tests.support.each_row import each_row


@each_row(2.5, "x" * 200)
def test_a_short_value_is_shown_whole(value: object) -> None:
    assert str(InvalidFieldError("top_p", value, "at most 1")) == f"top_p is {value}; it must be at most 1"


def test_a_sentence_has_a_bounded_length_and_cannot_steer_a_terminal() -> None:
    said = str(ModelLoadError("the key " + "\x1b[2J\x7f\x9b\ud800" * 1_000_000 + " is wrong"))
    assert said.startswith(r"the key \x1b[2J\x7f\x9b\ud800\x1b")
    assert said.endswith(" is wrong")
    assert said.isprintable()
    assert len(said) < 10_000
    assert str(ModelLoadError("two\nlines of größe")) == "two\nlines of größe"


@each_row("x" * 1_000_000, [7] * 10_000)
def test_a_long_value_is_shortened_in_the_message_only(value: object) -> None:
    error = InvalidFieldError("prompt", value, "at most 5 tokens long")

    assert str(error) == f"prompt is {str(value)[:200]}...; it must be at most 5 tokens long"
    assert error.value is value

"""Which engines of a cell are used."""

from scheduler_svc.link.engines_in_use import Candidate, Kind, agree
from tests.support.each_row import each_row

OLD, NEW = Kind("chat", "m", "old", "t"), Kind("chat", "m", "new", "t")


def engines(*kinds: Kind) -> dict[str, Candidate]:
    """Return an engine of each kind, the first one the oldest; its address is a letter."""
    return {"abcdef"[number]: Candidate(kind, f"s{number}", 10 + number) for number, kind in enumerate(kinds)}


@each_row(
    ("nobody is there", (), None, None, ""),
    ("nobody is left: what was in use is forgotten", (), OLD, None, ""),
    ("most decide", (OLD, NEW, NEW), None, NEW, "bc"),
    ("of as many, the one that has served longest", (OLD, NEW), None, OLD, "a"),
    ("what is in use stays while one engine of it takes requests", (OLD, NEW, NEW), OLD, OLD, "a"),
    ("and goes when none does", (NEW, NEW), OLD, NEW, "ab"),
)
def test_one_kind_is_used(
    name: str, kinds: tuple[Kind, ...], in_use: Kind | None, used: Kind | None, which: str
) -> None:
    agreement = agree(engines(*kinds), in_use)
    assert (agreement.kind, "".join(agreement.used)) == (used, which), name


@each_row(
    ({"name": "x"}, "another name"),
    ({"model_hash": "x", "weights_digest": "x"}, "another model and other weights"),
    ({"tokenizer_digest": "x"}, "another tokenizer"),
)
def test_the_odd_one_is_named_with_what_differs(other: dict[str, str], words: str) -> None:
    odd = Kind(**{"name": "chat", "model_hash": "m", "weights_digest": "old", "tokenizer_digest": "t"} | other)
    agreement = agree(engines(OLD, OLD, odd), None)
    assert agreement.odd == {"c": f"it serves {words} than the engines in use; drain those to change over to it"}


def test_of_two_engines_with_one_scheduler_id_the_later_one_is_used() -> None:
    doubles = {"a": Candidate(OLD, "one", 11), "b": Candidate(OLD, "one", 12), "c": Candidate(OLD, "two", 1)}
    agreement = agree(doubles, OLD)
    assert agreement.used == ("b", "c")
    assert "its scheduler id 'one' is also that of the engine at b, which came later" in agreement.odd["a"]

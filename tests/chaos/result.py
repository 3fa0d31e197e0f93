"""What a piece of a row of `make chaos` found, and how pieces add up. Read next: `rows.py`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

# So many of what went wrong are kept in words.
MAX_WORDS = 5


@dataclass(slots=True)
class Result:
    """Answers and faults of a piece, or of several that are added up.

    Attributes:
        row: Its name in `rows.py`.
        piece: Which part of the row it is.
        num_asked: Requests whose answers were compared.
        num_equal: Answers equal to the undisturbed ones: token ids, log-probabilities to the bit, text.
        num_lost: Answers that ended with an error, or too early.
        num_repeated: Answers with the right tokens and more.
        num_changed: Other answers that differ.
        longest_gap_s: Longest time between two tokens of a stream.
        pauses_s: Longest time without a token of each request that was struck by a kill of its own.
        largest: Named times and sizes: of each the largest.
        counts: How often each kind of fault struck.
        refusals: Why requests were refused before they were accepted, and how often; they were sent again.
        wrong: What went wrong, in words.
        missed: Times and sizes beyond their targets, in words; a busy machine may be the cause.
        seconds: How long it took.
    """

    row: str
    piece: str
    num_asked: int = 0
    num_equal: int = 0
    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0
    longest_gap_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, name: str, value: float) -> None:
        """Keep the largest of what goes by a name."""
        self.largest[name] = max(value, self.largest.get(name, value))

    def note_fault(self, name: str) -> None:
        """A fault of a kind struck."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def complain(self, text: str) -> None:
        """Something went wrong."""
        self.wrong.append(text)

    @property
    def is_kept(self) -> bool:
        """Whether the target was reached."""
        return not (self.wrong or self.missed) and self.num_equal == self.num_asked


def added_up(row: str, results: Iterable[Result]) -> Result:
    """Return the results of a row as one."""
    total = Result(row, "all")
    for each in results:
        for name in (
            "num_asked",
            "num_equal",
            "num_lost",
            "num_repeated",
            "num_changed",
            "seconds",
        ):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        total.pauses_s += each.pauses_s
        total.longest_gap_s = max(total.longest_gap_s, each.longest_gap_s)
        for name, value in each.largest.items():
            total.note(name, value)
        for name, count in each.counts.items():
            total.counts[name] = total.counts.get(name, 0) + count
        for text, count in each.refusals.items():
            total.refusals[text] = total.refusals.get(text, 0) + count
        total.wrong += [f"{each.piece}: {text}" for text in each.wrong][:MAX_WORDS]
        total.missed += [f"{each.piece}: {text}" for text in each.missed]
    return total

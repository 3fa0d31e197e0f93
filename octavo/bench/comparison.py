"""Requests that were sent with speculation and without: how fast each side was, and whether outputs are equal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from octavo.bench.record import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class Side:
    """All requests with speculation, or all without."""

    output_tokens_per_s: float  # in all, by the time in which requests of this side were on their way
    decode_tokens_per_s: float  # of one stream, from the first part of the answer to the last
    tokens_per_part: float  # with one stream, what a step brings on average


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs of one request part."""

    index: int  # of the request, from 0
    position: int  # of the first token that differs, from 0
    without: int | None  # this token; None: the output has ended before
    with_speculation: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of which both requests were completed."""

    num_pairs: int
    num_tokens: int  # of the outputs without speculation
    without: Side
    with_speculation: Side
    differences: tuple[Difference, ...]  # one for each pair with unequal outputs

    def verdict(self) -> str:
        """Return in a sentence whether the outputs are equal."""
        if not self.differences:
            return f"all {self.num_pairs} pairs equal, token for token ({self.num_tokens} tokens)"
        first = self.differences[0]
        tokens = (
            "the end of the output" if token is None else f"token {token}"
            for token in (first.without, first.with_speculation)
        )
        return (
            f"outputs of {len(self.differences)} of {self.num_pairs} pairs differ, first in request {first.index + 1}: "
            f"at place {first.position + 1} it has {next(tokens)} without speculation, and {next(tokens)} with it"
        )


def compare(records: Sequence[RequestRecord]) -> Comparison | None:
    """Return what the pairs show; None: there is no whole pair."""
    sides: dict[bool, dict[int, RequestRecord]] = {False: {}, True: {}}
    for record in records:
        if record.planned.speculate is not None and record.outcome is Outcome.COMPLETED:
            sides[record.planned.speculate][record.planned.index] = record
    pairs = [(without, sides[True][index]) for index, without in sides[False].items() if index in sides[True]]
    if not pairs:
        return None
    return Comparison(
        num_pairs=len(pairs),
        num_tokens=sum(without.num_output_tokens for without, _ in pairs),
        without=_side([without for without, _ in pairs]),
        with_speculation=_side([with_it for _, with_it in pairs]),
        differences=tuple(found for pair in pairs if (found := _difference(*pair)) is not None),
    )


def comparison_report(comparison: Comparison) -> Iterator[RenderableType]:
    """Return a table of both sides, and whether the outputs are equal."""
    table = Table(title=f"Speculation, {comparison.num_pairs} pairs", title_justify="left", title_style="bold")
    for heading in ("", "without", "with", "ratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, field in (
        ("output tokens/s", "output_tokens_per_s"),
        ("decode tokens/s", "decode_tokens_per_s"),
        ("tokens a part", "tokens_per_part"),
    ):
        without, with_it = getattr(comparison.without, field), getattr(comparison.with_speculation, field)
        ratio = f"{with_it / without:.2f}" if without else "–"
        table.add_row(name, f"{without:.2f}", f"{with_it:.2f}", ratio)
    yield table
    style, name = ("bold red", "NOT EQUAL") if comparison.differences else ("green", "equal")
    yield f"[{style}]{name}:[/{style}] {comparison.verdict()}"


def _side(records: Sequence[RequestRecord]) -> Side:
    num_tokens = sum(record.num_output_tokens for record in records)
    streams = [record for record in records if len(record.event_times_s) > 1]
    decode_s = sum(record.event_times_s[-1] - record.event_times_s[0] for record in streams)
    num_parts = sum(len(record.event_times_s) for record in records)
    return Side(
        output_tokens_per_s=num_tokens / _covered_s(records),
        decode_tokens_per_s=sum(sum(record.event_num_tokens[1:]) for record in streams) / decode_s if decode_s else 0.0,
        tokens_per_part=num_tokens / num_parts if num_parts else 0.0,
    )


def _covered_s(records: Sequence[RequestRecord]) -> float:
    """Return for how long at least one of the requests was on its way."""
    covered_s = until_s = 0.0
    for record in sorted(records, key=lambda record: record.sent_s):
        covered_s += max(0.0, record.ended_s - max(record.sent_s, until_s))
        until_s = max(until_s, record.ended_s)
    return covered_s


def _difference(without: RequestRecord, with_it: RequestRecord) -> Difference | None:
    first, second = without.token_ids, with_it.token_ids
    assert first is not None
    assert second is not None
    for position in range(max(len(first), len(second))):
        ours, theirs = (ids[position] if position < len(ids) else None for ids in (first, second))
        if ours != theirs:
            return Difference(without.planned.index, position, ours, theirs)
    return None

"""The table that `make chaos` prints; in Markdown, so that docs/chaos.md has it as it is."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.chaos.result import Result
from tests.chaos.rows import Row

# Figures by the names under which pieces note them.
_FIGURES = {
    "empty_after_s": "empty after {:.2f} s at most",
    "ended_after_s": "its process ended after {:.2f} s at most",
    "zero_after_s": "all counts are zero {:.2f} s after the last request",
    "even_after_s": "the load was even again after {:.1f} s at most",
    "load_of_mean": "and then {:.2f} times the mean at most",
    "growth_mib": "the scheduler's memory grew by {:.1f} MiB at most, from the second quarter of a piece to the last",
    "scheduler_mib": "and was {:.0f} MiB at most",
}


def table_of(rows: Sequence[tuple[Row, Result, bool]]) -> str:
    """Return the table; of each row its results, added up, and whether it is complete."""
    lines = ["| what | target | came of it | longest pause | reached |", "|---|---|---|---:|---|"]
    for row, result, is_complete in rows:
        verdict = ("yes" if is_complete else "so far") if result.is_kept else "**no**"
        pause = f"{result.longest_gap_s:.2f} s" if result.num_asked else ""
        lines.append(f"| {row.what} | {row.target} | {in_words(result)} | {pause} | {verdict} |")
    return "\n".join(lines)


def in_words(result: Result) -> str:
    """Return what came of a row, in words."""
    parts = [f"{result.num_equal:,} of {result.num_asked:,} equal"]
    if result.num_equal < result.num_asked:
        parts.append(f"{result.num_lost} lost, {result.num_repeated} repeated, {result.num_changed} changed")
    parts.append(", ".join(f"{count:,} {name}" for name, count in sorted(result.counts.items())) or "no fault")
    if result.pauses_s:
        parts.append(f"half of the pauses below {median(result.pauses_s):.2f} s")
    if result.refusals:
        parts.append(f"refused before they were accepted, and sent again: {sum(result.refusals.values())} times")
    parts += [_FIGURES[name].format(value) for name, value in result.largest.items() if name in _FIGURES]
    return "; ".join(parts)


def machine() -> str:
    """Return the date, the processor, its cores and the memory."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = names[0] if names else platform.machine()
    return f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {processor}, {os.cpu_count()} cores, {gib:.0f} GiB"

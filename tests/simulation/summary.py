"""What a campaign found, as tables: speed, faults, rare things, and each failure with the command that replays it."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.simulation.campaign import FinishedRun
from tests.simulation.sometimes import PREFIX, RARE

COMMAND = "python -m tests.simulation"

_NEVER = "[bold red]NEVER[/]"


def replay_command(seed: int, mode: str) -> str:
    """Return what replays a seed."""
    return f"{COMMAND} --seed {seed} --mode {mode}"


def print_summary(console: Console, finished: Sequence[FinishedRun]) -> None:
    """Print what runs were like, and which promises they broke."""
    seen: Counter[str] = Counter()
    for each in finished:
        seen.update(each.seen)
    console.print(_figures(finished))
    console.print(_counts("fault", "times", _of_kind(seen, "fault: ")))
    others = {name: count for name, count in seen.items() if not name.startswith(("fault: ", PREFIX))}
    console.print(_counts("what else happened", "times", others))
    console.print(_rare_things(seen, Counter(name for each in finished for name in each.seen)))
    failed = [each for each in finished if each.broken]
    for each in failed:
        console.print(f"[bold red]BROKEN[/] seed {each.seed}, {each.mode}, ", end="")
        console.print(each.broken, markup=False, highlight=False)
        console.print(
            f"    {replay_command(each.seed, each.mode)} --report", markup=False, highlight=False, soft_wrap=True
        )
    verdict = f"[bold red]{len(failed)} of them broke a promise[/]" if failed else "every promise was kept"
    console.print(f"{len(finished)} runs: {verdict}")


def _figures(finished: Sequence[FinishedRun]) -> Table:
    num_steps, cpu_s = sum(each.num_steps for each in finished), sum(each.cpu_s for each in finished)
    steps, faults = [each.num_steps for each in finished] or [0], [each.num_faults for each in finished] or [0]
    table = Table("what", "figure", title="Simulation")
    rows = [
        ("runs", f"{len(finished):,}"),
        ("seeds", f"{len({each.seed for each in finished}):,}"),
        ("executor steps", f"{num_steps:,}"),
        ("steps of a run, least to most", f"{min(steps):,} to {max(steps):,}"),
        ("faults", f"{sum(faults):,}"),
        ("faults of a run, least to most", f"{min(faults):,} to {max(faults):,}"),
        ("virtual hours", f"{sum(each.virtual_s for each in finished) / 3600:,.1f}"),
        ("processor seconds", f"{cpu_s:,.1f}"),
        ("steps a second, of one core", f"{num_steps / cpu_s:,.0f}" if cpu_s else "-"),
        ("failures", str(sum(bool(each.broken) for each in finished))),
    ]
    return _filled(table, rows)


def _of_kind(seen: Counter[str], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in seen.items() if name.startswith(prefix)}


def _counts(what: str, how_often: str, counts: dict[str, int]) -> Table:
    table = Table(what, how_often)
    return _filled(table, [(name, f"{count:,}" if count else _NEVER) for name, count in sorted(counts.items())])


def _rare_things(seen: Counter[str], num_runs: Counter[str]) -> Table:
    """Return how often each rare thing was seen, and in how many runs; those that never were come first."""
    table = Table("sometimes", "what has happened then", "times", "runs")
    for column in table.columns[2:]:
        column.justify = "right"
    for name in sorted(RARE, key=lambda name: (seen[PREFIX + name], name)):
        times = seen[PREFIX + name]
        table.add_row(name, RARE[name], f"{times:,}" if times else _NEVER, f"{num_runs[PREFIX + name]:,}")
    return table


def _filled(table: Table, rows: Iterable[tuple[str, str]]) -> Table:
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table

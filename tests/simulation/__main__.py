"""`python -m tests.simulation --seeds 0:500`: years of faults in minutes. `--seed 17 --mode safety` replays a run.

Exit status: 0, all promises were kept; 1, one was broken; 2, the arguments make no sense.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.simulation.campaign import FinishedRun, Limits, Run, run_all
from tests.simulation.draw import draw_plan
from tests.simulation.plan import MODES, SAFETY, Plan, shortened
from tests.simulation.plan_json import plan_to_json, read_plan
from tests.simulation.report import Traced, report, traced
from tests.simulation.run import simulate
from tests.simulation.shrink import Shrinker
from tests.simulation.summary import COMMAND, print_summary
from tests.simulation.trace import Trace
from tests.support.run_file import OtherCodeError, RunFile

BOTH = "both"

# Between two lines of progress, in seconds: on a terminal, and in a log.
_PROGRESS_S = 1.0
_PROGRESS_IN_LOG_S = 30.0


def main(words: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.seed is not None or arguments.plan is not None:
        try:
            plan = read_plan(arguments.plan) if arguments.plan else draw_plan(arguments.seed, _one_mode(arguments.mode))
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"--plan {arguments.plan}: {error!r}; it must be a file that --shrink wrote")
        return _replay(shortened(plan) if arguments.short else plan, arguments)
    modes = MODES if arguments.mode == BOTH else (arguments.mode,)
    runs = [Run(seed, mode) for seed in arguments.seed_list or arguments.seeds for mode in modes]
    try:
        return _run_many(arguments, runs)
    except OtherCodeError as error:
        parser.error(str(error))


def _run_many(arguments: argparse.Namespace, runs: list[Run]) -> int:
    file = RunFile(arguments.resume, FinishedRun, "tests/simulation")
    wanted = set(runs)
    finished = [each for each in file.finished if each.run in wanted]
    known = {each.run for each in finished}
    todo = [run for run in runs if run not in known]
    ends_at_s = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    progress = _Progress(len(runs), finished)
    try:
        for each in run_all(todo, arguments.jobs, Limits(ends_at_s, arguments.stop_at_first)):
            file.add(each)
            finished.append(each)
            progress.show(each)
    except KeyboardInterrupt:
        progress.console.print("stopped")
    finally:
        file.close()
    progress.close()
    print_summary(Console(), sorted(finished, key=lambda each: (each.seed, each.mode)))
    if len(finished) < len(runs):
        more = f"; the same command with --resume {arguments.resume} goes on" if arguments.resume else ""
        Console().print(f"{len(runs) - len(finished)} runs are left{more}")
    return int(any(each.broken for each in finished))


def _replay(plan: Plan, arguments: argparse.Namespace) -> int:
    if arguments.shrink is not None:
        return _shrink(plan, arguments)
    run = traced(plan) if arguments.trace else Traced(simulate(plan), Trace())
    for event in run.trace.events:
        print(event)
    outcome = run.outcome
    if arguments.report and outcome.broken:
        print("\n".join(report(plan)))
    print(f"{outcome.num_steps} steps, {outcome.num_faults} faults, {outcome.virtual_s:.1f} virtual seconds")
    print(f"digest {outcome.digest}")
    print(f"broken {outcome.broken}" if outcome.broken else "every promise was kept")
    return int(bool(outcome.broken))


def _shrink(plan: Plan, arguments: argparse.Namespace) -> int:
    max_s = math.inf if arguments.minutes is None else 60 * arguments.minutes
    shrinker = Shrinker(lambda each: simulate(each).broken, arguments.max_runs, max_s, tell=print)
    try:
        smaller = shrinker.shrink(plan)
    except ValueError as error:
        print(f"nothing to shrink: {error}")
        return 0
    arguments.shrink.write_text(plan_to_json(smaller))
    print(f"{shrinker.num_runs} runs; {len(smaller.faults)} faults and {len(smaller.requests)} requests are left")
    print("\n".join(report(smaller)))
    print(f"\n{COMMAND} --plan {arguments.shrink} --report")
    return 1


class _Progress:
    """One line that says how far a campaign is."""

    def __init__(self, num_runs: int, finished: Sequence[FinishedRun]) -> None:
        self.console = Console(stderr=True)
        self._num_runs = num_runs
        self._num_before = self._num_finished = len(finished)
        self._num_broken = sum(bool(each.broken) for each in finished)
        self._num_steps = 0
        self._cpu_s = 0.0
        self._begin_s = time.monotonic()
        self._shown_at_s = self._begin_s

    def show(self, finished: FinishedRun) -> None:
        """A run has finished."""
        self._num_finished += 1
        self._num_broken += bool(finished.broken)
        self._num_steps += finished.num_steps
        self._cpu_s += finished.cpu_s
        now_s, is_terminal = time.monotonic(), self.console.is_terminal
        if now_s - self._shown_at_s < (_PROGRESS_S if is_terminal else _PROGRESS_IN_LOG_S):
            return
        self._shown_at_s = now_s
        left = self._num_runs - self._num_finished
        left_s = left * (now_s - self._begin_s) / (self._num_finished - self._num_before)
        line = (
            f"{self._num_finished} of {self._num_runs} runs, {self._num_broken} broken, "
            f"{self._num_steps / self._cpu_s:,.0f} steps a second, {left_s / 60:.1f} min left"
        )
        self.console.print(line, end="\r" if is_terminal else "\n", highlight=False)

    def close(self) -> None:
        """Leave the line."""
        if self.console.is_terminal:
            self.console.print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=_seeds, metavar="BEGIN:END", help="run these seeds, without END")
    which.add_argument("--seed-list", type=_seed_list, metavar="SEED,SEED", help="run these seeds")
    which.add_argument("--seed", type=int, help="replay one seed")
    which.add_argument("--plan", type=Path, metavar="FILE", help="replay the plan of a file")
    parser.add_argument(
        "--short", action="store_true", help="of one seed: with fewer requests and faults, as `make test`"
    )
    parser.add_argument("--trace", action="store_true", help="of one run: print all that happens")
    parser.add_argument("--report", action="store_true", help="of one run: the last fault and the last steps")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="of one run: make it smaller, into a file")
    parser.add_argument("--max-runs", type=int, default=300, help="of --shrink (default: %(default)s)")
    parser.add_argument("--mode", choices=(*MODES, BOTH), default=BOTH, help="%(default)s; of --seed: safety")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run on so many processes (default: 1)")
    parser.add_argument("--stop-at-first", action="store_true", help="stop when a promise was broken")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so long; --resume goes on")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep finished runs there, and leave them out")
    return parser


def _one_mode(mode: str) -> str:
    return SAFETY if mode == BOTH else mode


def _seeds(text: str) -> range:
    begin, colon, end = text.partition(":")
    if not (colon and begin.isdigit() and end.isdigit() and int(begin) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r}, but it must be BEGIN:END with BEGIN below END, as 0:500")
    return range(int(begin), int(end))


def _seed_list(text: str) -> list[int]:
    if not all(number.isdigit() for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}, but it must be numbers with commas between them, as 3,17")
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

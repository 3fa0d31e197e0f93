"""Runs the cases of targets, each target in a process of its own, and tells what may not be."""

import argparse
import logging
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.target import Case, Target

# What a target's process may take more than after its first case, in MiB.
MAX_MIB = 1500
# How long a target may take to begin, and a case longer than it allows itself.
PATIENCE_S = 60.0
GRACE_S = 5.0
SHRINK_S = 10.0
MAX_FAILURES = 5

Tell = Callable[[int, str], None]
"""Called with a seed when its case begins, and with a report of what was wrong with it."""


def fuzz(target: Target, seeds: range, seconds: float, tell: Tell) -> int:
    """Run the cases of some seeds; return how many there were."""
    cases = target.corpus()
    end_s, known, base_mib = time.monotonic() + seconds, set[str](), 0.0
    try:
        for number, seed in enumerate(seeds):
            if time.monotonic() > end_s or len(known) >= MAX_FAILURES:
                return number
            tell(seed, "")
            chance = random.Random(f"{target.name} {seed}")
            case = target.change(chance.choice(cases), chance)
            if (failure := failure_of(target, case)) and (kind := kind_of(failure)) not in known:
                known.add(kind)
                smallest = shrunk(target, case, kind)
                again = failure_of(target, smallest) or failure
                tell(seed, f"{again}\nthe smallest input: {shown(smallest)}")
            base_mib = base_mib or peak_mib()
            if peak_mib() - base_mib > MAX_MIB:
                tell(seed, f"it took {peak_mib() - base_mib:.0f} MiB\nthe input: {shown(case)}")
                return number + 1
        return len(seeds)
    finally:
        target.close()


def failure_of(target: Target, case: Case) -> str:
    """Run a case; return the traceback of what may not be; empty: nothing was."""
    try:
        target.one(case)
    except target.allowed as error:
        return "" if str(error) else f"{type(error).__name__} without a sentence"
    except KeyboardInterrupt:
        raise
    except BaseException:  # a panic is no Exception
        return traceback.format_exc()
    return ""


def kind_of(failure: str) -> str:
    """Return what a failure has in common with others of its kind: the last place in the code, and the class."""
    lines = failure.strip().splitlines()
    places = [line for line in lines if line.lstrip().startswith("File ")]
    return f"{places[-1] if places else ''} {lines[-1].partition(':')[0]}"


def shrunk(target: Target, case: Case, kind: str) -> Case:
    """Return the smallest case with a failure of a kind that is found in a while, by leaving out bytes."""
    end_s = time.monotonic() + SHRINK_S
    for place, content in enumerate(case):
        size = len(content)
        while size and time.monotonic() < end_s:
            begin = 0
            while begin < len(content) and time.monotonic() < end_s:
                tried = content[:begin] + content[begin + size :]
                smaller = (*case[:place], tried, *case[place + 1 :])
                if (failure := failure_of(target, smaller)) and kind_of(failure) == kind:
                    case, content = smaller, tried
                else:
                    begin += size
            size //= 2
    return case


def shown(case: Case) -> str:
    """Return a case for people."""
    return "\n".join(
        f"  {content[:1000]!r}{'' if len(content) <= 1000 else f' ... {len(content)} bytes'}" for content in case
    )


def peak_mib() -> float:
    """Return the most memory of this program so far; unlike getrusage without that of the process that started it."""
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def run_alone(make: type[Target], seeds: range, seconds: float, say: Callable[[str], None]) -> int:
    """Fuzz a target in a process of its own; return how many failures there were."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_fuzz_here, args=(make, seeds, seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    num_failed, seed, patience_s = 0, seeds.start, PATIENCE_S
    while ours.poll(patience_s):
        try:
            seed, report = ours.recv()
        except EOFError:
            process.join()
            if process.exitcode:
                say(f"{make.name}: seed {seed}: the process ended with {process.exitcode}")
            return num_failed + bool(process.exitcode)
        patience_s = 3 * make.max_seconds + GRACE_S + SHRINK_S
        if seed < 0:
            say(f"{make.name}: {report}, {num_failed} failed")
        elif report:
            num_failed += 1
            say(f"{make.name}: seed {seed}:\n{report}")
    process.kill()
    process.join()
    say(f"{make.name}: seed {seed}: it hangs")
    return num_failed + 1


def _fuzz_here(make: type[Target], seeds: range, seconds: float, pipe: Connection) -> None:
    def tell(seed: int, report: str) -> None:
        pipe.send((seed, report))

    logging.getLogger().addHandler(logging.NullHandler())
    begin_s = time.monotonic()
    num_cases = fuzz(make(), seeds, seconds, tell)
    tell(-1, f"{num_cases} cases in {time.monotonic() - begin_s:.0f} s, {peak_mib():.0f} MiB")


def main(arguments: Sequence[str] | None = None, targets: Sequence[type[Target]] = ()) -> int:
    """Fuzz; return the exit status. `targets`: empty: all."""
    if not targets:  # not before: a process of a planted target needs none of them
        from tests.fuzz.targets import TARGETS

        targets = TARGETS
    names = [target.name for target in targets]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads bytes of others.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=2**31, help="most of a target (default: as the time allows)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=1, help="of the first case (default: %(default)s)")
    options = parser.parse_args(arguments)
    seeds, chosen = range(options.seed, options.seed + options.cases), [t for t in targets if t.name in options.only]
    num_failed = 0
    for target in chosen:
        num_failed += run_alone(target, seeds, 60 * options.minutes / len(chosen), lambda line: print(line, flush=True))
    return int(num_failed > 0)

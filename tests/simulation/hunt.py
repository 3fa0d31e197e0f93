"""`python -m tests.simulation.hunt`: run seeds until a promise is broken, and say which; in a copy with a planted bug.

One line of JSON, so that whoever planted the bug can read it.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tests.simulation.draw import draw_plan
from tests.simulation.plan import MODES
from tests.simulation.run import simulate


@dataclass(frozen=True, slots=True)
class Find:
    """What a hunt found.

    Attributes:
        seed, mode: Of the run in which a promise was broken.
        broken: Which one; empty: none was.
        num_runs: That one included.
        cpu_s: Seconds that the processor was at work for it.
    """

    seed: int
    mode: str
    broken: str
    num_runs: int
    cpu_s: float


def hunt(seeds: range, modes: Iterable[str]) -> Find:
    """Run each seed in each mode until a promise is broken."""
    begin_s, num_runs = time.process_time(), 0
    for seed in seeds:
        for mode in modes:
            num_runs += 1
            outcome = simulate(draw_plan(seed, mode))
            if outcome.broken:
                return Find(seed, mode, outcome.broken, num_runs, time.process_time() - begin_s)
    return Find(-1, "", "", num_runs, time.process_time() - begin_s)


def seed_range(text: str) -> range:
    """Return the seeds of `BEGIN:END`, the end not included. Raises: ValueError: it is something else."""
    begin, end = map(int, text.split(":"))
    return range(begin, end)


def main() -> int:
    """Return 0: the line is written."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hunt", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=seed_range, default=range(200), metavar="BEGIN:END")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both, seed by seed")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # what the modules made is not looked at again after each run
    print(json.dumps(asdict(hunt(arguments.seeds, arguments.mode or MODES))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

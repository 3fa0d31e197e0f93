"""Fuzzes whatever reads bytes of others: an allowed outcome is an error of ours with a sentence.

    python -m tests.fuzz [--minutes 10] [--cases 1000] [--only NAME ...] [--seed 1]

Each target (`targets.py`) has an equal share of the minutes. Any other exception, a hang, a crash and too much memory
are failures: they are printed with the seed and the smallest input that was found, and the exit status is 1.
"""

import sys

from tests.fuzz.driver import main

if __name__ == "__main__":
    sys.exit(main())

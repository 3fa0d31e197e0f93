"""What each part costs, a scenario a row: `python -m benchmarks.costs [SCENARIO ...] [--pairs N]`; `--list` tells all.

Read next: `harness.py` for how they are measured. The scenarios are in the files that `__main__.py` imports;
`workers.py` has the executor's workers that some of them drive.
"""

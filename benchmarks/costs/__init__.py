"""What each part costs, a scenario a row: `python -m benchmarks.costs [SCENARIO ...] [--pairs N]`; `--list` tells all.

Read next: `harness.py` for how they are measured; `services.py`, `scheduler.py` and `model.py` have the scenarios.
"""

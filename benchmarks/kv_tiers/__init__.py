"""What KV tiers and moved blocks save: `python -m benchmarks.kv_tiers [SCENARIO ...] --without FLAGS --with FLAGS`.

Two arms run side by side and take turns: each is a scheduler with flags of its own, and executors with the demo model.
Every output of one arm is compared with the same output of the other one, tokens and log-probabilities, to the bit.

Read next: `scenarios.py` has what is measured, `arms.py` the services and the comparison; turns and medians are of
`benchmarks/costs/harness.py`.
"""

"""Load on a server, measured: `octavo bench`.

From the command (octavo/commands/bench.py, its flags in `options.py`) down: `session.py` prepares a load (`config.py`),
runs it and writes what came of it; `plan.py` says which requests are sent when; `load.py` sends them to a target
(`octavo_target.py`, or `openai_target.py` with `openai_stream.py`), which fills a `record.py` for each; `summary.py`
turns records into numbers, in all and over time, `comparison.py` those with speculation and without, and `report.py`
and `plot.py` show them. `datasets/` has prompts that are sent by name. `provenance.py` says where figures are from,
also those of benchmarks/.

The clock of all of it is `time.perf_counter`, in seconds.
"""

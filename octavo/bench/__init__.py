"""Load on a server, measured: `octavo bench`.

From the command (octavo/commands/bench.py, its flags in `options.py`) down: `runner.py` runs a load (`config.py`) and
writes what came of it (`outputs.py`); `session.py` prepares the load and runs it; `plan.py` says which requests
(`lengths.py`, `prompts.py`, `dataset.py`) are sent when (`arrivals.py`); `load.py` sends them to a target
(`octavo_target.py`, or `openai_target.py` with `openai_stream.py` and `sse.py`), which fills a `record.py` for each;
`summary.py` turns records into numbers (with objectives: `slo.py`; over time: `timeline.py`), and `report.py`,
`json_report.py` and `plot.py` show them.

The clock of all of it is `time.perf_counter`, in seconds.
"""

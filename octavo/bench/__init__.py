"""Load on a server, and what it did to the answers: `octavo bench`.

From the command (octavo/commands/bench.py) down: `session.py` prepares and runs a load; `plan.py` says which requests
(`lengths.py`, `prompts.py`) are sent when (`arrivals.py`); `load.py` sends them to a target (`octavo_target.py`,
`openai_target.py` with `sse.py`), which fills a `record.py` for each; `summary.py` turns records into numbers, and
`report.py`, `json_report.py` and `plot.py` show them.

The clock of all of it is `time.perf_counter`, in seconds.
"""

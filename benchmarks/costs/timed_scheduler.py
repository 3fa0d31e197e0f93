"""A scheduler with the CPU time of some of its functions.

    python -m benchmarks.costs.timed_scheduler --of metrics --times FILE [flags of scheduler_svc]

At its end it writes calls and microseconds of each function, and what the timing itself took, as JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.costs.clock import Clock, timed_functions
from scheduler_svc import __main__ as scheduler
from scheduler_svc.engine import engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.step_log import writer
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.recent_steps import RecentSteps

FUNCTIONS = {
    "metrics": (
        *(
            (RecentSteps, "add"),
            (RecentSteps, "set_result"),
            (LiveRequests, "_note_progress"),
            (Meter, "tokens_delivered"),
        ),
        *((LiveRequest, "summary"), (Meter, "request_ended"), (engine, "log_end")),
    ),
    "step-log": ((RecordingFleet, "_note"), (writer.StepLogWriter, "_write_pending"), (RecordingFleet, "_begin_file")),
}


def main() -> int:
    """Run the scheduler; return its exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--of", choices=FUNCTIONS, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--num-files", type=int, default=writer.NUM_FILES, help="of the step log")
    arguments, sys.argv[1:] = parser.parse_known_args()
    writer.NUM_FILES = arguments.num_files
    clock = Clock()
    with Path(os.devnull).open("w", encoding="utf-8") as sys.stderr, timed_functions(clock, FUNCTIONS[arguments.of]):
        code = scheduler.main()
    times_us = {name: elapsed_ns / 1000 for name, elapsed_ns in clock.elapsed_ns.items()}
    cost_us = clock.calls.total() * clock.cost_ns / 1000
    arguments.times.write_text(json.dumps({"calls": clock.calls, "us": times_us, "cost_us": cost_us}), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())

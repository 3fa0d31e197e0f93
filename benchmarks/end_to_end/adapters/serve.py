"""Run one adapter as a process: `python -m benchmarks.end_to_end.adapters.serve MODULE:CLASS`.

The first line of standard input holds the options, each other one the requests of a run; each is answered with one line
on standard output, and the end of the input stops the engine. What libraries print goes to standard error.
"""

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from typing import TextIO

from benchmarks.end_to_end.adapters.interface import Engine, Message, Options
from benchmarks.end_to_end.workloads import Request


def main() -> int:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine is stopped too
    module, _, name = sys.argv[1].partition(":")
    make = getattr(import_module(f"benchmarks.end_to_end.adapters.{module}"), name)
    engine: Engine = make(Options(**json.loads(sys.stdin.readline())))
    try:
        return _serve(engine, answers)
    finally:
        engine.stop()


def _serve(engine: Engine, answers: TextIO) -> int:
    def answer(message: Message) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        answer(asdict(engine.start()))
        for line in sys.stdin:
            answer(asdict(engine.generate([Request(**request) for request in json.loads(line)["requests"]])))
    except Exception as error:  # the benchmark is told, and goes on with the other engines
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

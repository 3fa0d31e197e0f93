"""The process of one part, as `driver.py` starts it."""

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.part import Progress, SkippedError


def main(arguments: Sequence[str]) -> int:
    """Run one part as `driver.py` asks for it; return 1 if it failed."""
    order = json.loads(arguments[0])
    faulthandler.enable()
    # A descriptor of its own: pytest puts another file in the place of standard input.
    threading.Thread(target=_end_with_the_driver, args=(os.dup(0),), daemon=True).start()
    progress = Progress(order["name"], Path(order["path"]), is_rehearsal=order["is_rehearsal"])
    result = progress.result
    try:
        module, _, function = order["function"].partition(":")
        result.detail = getattr(import_module(module), function)(progress, *order["arguments"]) or ""
        result.status = "passed"
    except SkippedError as why:
        result.status, result.detail = "skipped", str(why)
    except BaseException as error:  # pytest and others exit; the report is to say so
        traceback.print_exc()
        result.status, result.detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        if result.doing:
            result.detail += f" (in {result.doing})"
    result.doing = ""
    progress.write()
    return int(result.status == "failed")


def _end_with_the_driver(standard_input: int) -> None:
    """Wait until the driver is gone, in any way; then end this process and the ones that it started."""
    os.read(standard_input, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

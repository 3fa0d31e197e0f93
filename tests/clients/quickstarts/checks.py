"""Runs the functions of a quickstart; prints one JSON line for each. Runs in the environment of a library, without Octavo."""

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

# The only change to a quickstart but for its address and key, which the libraries read from the environment.
MODEL = os.environ["OCTAVO_MODEL"]


def run(*checks: Callable[[], Any]) -> None:
    """Run checks one after the other, coroutines too; each raises if what came back is wrong."""
    for check in checks:
        error = None
        try:
            came = check()
            if inspect.iscoroutine(came):
                asyncio.run(came)
        except Exception:  # whatever a library raises is its row's result
            error = traceback.format_exc()
        print(json.dumps({"check": check.__name__, "error": error}), flush=True)
    print("end")

"""Runs the functions of a quickstart, in the environment of a library; prints a JSON line for each."""

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
    loop = asyncio.new_event_loop()  # for all of them, as libraries keep connections
    asyncio.set_event_loop(loop)
    for check in checks:
        error = None
        try:
            came = check()
            if inspect.iscoroutine(came):
                loop.run_until_complete(came)
        except Exception:  # whatever a library raises is its row's result
            error = traceback.format_exc()
        print(json.dumps({"check": check.__name__, "error": error}), flush=True)
    print("end")

"""What the scheduler's process does beside serving."""

import subprocess
import sys

PROGRAM = """
import asyncio, gc
from scheduler_svc import __main__ as program
class Stop:
    def __init__(self, **_): pass
    async def wait(self):
        print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0])
        return "the test ends"
program.StopRequest = Stop
config = program.load_config_or_exit(
    program.SchedulerConfig, ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"], {}
)
asyncio.run(program.serve(config))
"""


def test_what_the_process_has_after_its_start_is_never_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "True 100000"
    bare = "import gc, scheduler_svc.__main__, shared.garbage_collection; print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n", "the policy is the process' own, and no import sets it"

"""What the scheduler's process does beside serving."""

import subprocess
import sys

from tests.support.patience import PATIENCE_S

PROGRAM = """
import asyncio, gc
from scheduler_svc import __main__ as program
print(gc.get_freeze_count())
class Stop:
    def __init__(self, **_): pass
    async def wait(self):
        while gc.get_freeze_count() <= 10_000:
            await asyncio.sleep(0.01)
        print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0])
        return "the test ends"
program.StopRequest = Stop
config = program.load_config_or_exit(
    program.SchedulerConfig, ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"], {}
)
asyncio.run(program.serve(config))
"""


def test_what_the_process_has_after_its_start_is_never_looked_at_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    first, *_, last = done.stdout.splitlines()
    assert last == "True 100000"
    assert first == "0", "the policy is the process' own, and no import sets it"

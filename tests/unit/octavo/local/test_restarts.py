"""Children that are started again, with small programs in place of the services."""

import asyncio
import os
import signal
from pathlib import Path

from octavo.local.child_process import ChildProcess
from octavo.local.restarts import RestartPolicy, Restarts
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.unit.octavo.programs import program

AT_ONCE = RestartPolicy(initial_pause_s=0.0, max_failed_starts=3)

# Serves where it is told, and keeps the arguments of its last start.
SERVES = """
    import pathlib, sys
    pathlib.Path({folder!r}, "arguments").write_text(" ".join(sys.argv[1:]))
    print("octavo scheduler serving admin on 127.0.0.1:4323")
    print("octavo scheduler listening on 127.0.0.1:4322, waiting for an executor at 127.0.0.1:4321")
    print("octavo scheduler serving on 127.0.0.1:4322")
    sys.stdin.read()
"""

# Serves the first time, and fails whenever it is started again: before it listens, and after that.
SERVES_ONCE = """
    import pathlib, sys
    lives = pathlib.Path({folder!r}, "lives")
    number = lives.stat().st_size if lives.exists() else 0
    lives.write_text("x" * (number + 1))
    if number % 2:
        sys.exit("octavo executor: no memory")
    print("octavo executor listening on 127.0.0.1:4321, waiting for the model")
    if number:
        sys.exit("octavo executor: no memory for the weights")
    print("octavo executor serving on 127.0.0.1:4321")
    sys.stdin.read()
"""


class Told:
    """Sentences, and a way to wait for the next one."""

    def __init__(self) -> None:
        self.sentences: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, sentence: str) -> None:
        self.sentences.put_nowait(sentence)

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.sentences.get()


async def started(service: str, source: str, folder: Path, number: int | None = None) -> ChildProcess:
    command = program(source.format(folder=str(folder)))
    child = ChildProcess(service, command, log_path=folder / "log", number=number)
    await child.start()
    await child.wait_until_serving()
    return child


async def test_a_service_that_is_killed_is_back_on_its_ports(tmp_path: Path) -> None:
    child, told = await started("scheduler", SERVES, tmp_path), Told()
    running = asyncio.create_task(Restarts([child], told, AT_ONCE).run())
    for _ in range(2):
        os.kill(child.pid, signal.SIGKILL)
        assert await told.next() == (
            "the scheduler stopped (signal SIGKILL, possibly out of memory); its calls were cut off; restarting it in "
            f"0.0 s [log: {tmp_path / 'log'}]"
        )
        assert (await told.next()).startswith("the scheduler is back after ")
        assert (tmp_path / "arguments").read_text() == "--listen 127.0.0.1:4322 --admin-listen 127.0.0.1:4323"
    running.cancel()
    await child.stop(grace_s=1)


async def test_one_that_cannot_start_any_more_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "12"]
    for folder in folders:
        folder.mkdir()
    children = [await started("executor", SERVES_ONCE, folder, int(folder.name)) for folder in folders]
    told = Told()
    running = asyncio.create_task(Restarts(children, told, AT_ONCE).run())

    os.kill(children[0].pid, signal.SIGKILL)
    said = [await told.next() for _ in range(4)]
    assert said[0].startswith(
        "executor 1 stopped (signal SIGKILL, possibly out of memory); the other executors take over its "
    )
    assert said[1].startswith("executor 1 stopped (exit status 1): no memory; ")
    assert said[2].startswith("executor 1 stopped (exit status 1): no memory for the weights; ")
    given_up = "executor {} stopped (exit status 1): no memory; 3 starts in a row failed [log: {}]"
    logs = [folder / "log" for folder in folders]
    assert said[3] == f"{given_up.format(1, logs[0])}; giving up on executor 1; the others keep running"
    assert not running.done()

    os.kill(children[1].pid, signal.SIGKILL)
    assert str(await running) == given_up.format(2, logs[1])
    for child in children:
        await child.stop(grace_s=1)


async def test_the_last_words_of_an_earlier_process_are_not_those_of_a_later_one(tmp_path: Path) -> None:
    says_and_ends = """
        import os, pathlib, signal, sys
        first = pathlib.Path({folder!r}, "first")
        print("octavo executor serving on 127.0.0.1:4321", flush=True)
        if first.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        first.touch()
        sys.stderr.write("octavo executor: first words")
        while "serving" not in pathlib.Path({folder!r}, "log").read_text():
            pass  # what is said on stdout comes between
        sys.exit("")
    """
    child = await started("executor", says_and_ends, tmp_path)
    assert await child.wait_for_end() == "the executor stopped (exit status 1): first words"
    await child.start()
    assert await child.wait_for_end() == "the executor stopped (signal SIGKILL, possibly out of memory)"
    await child.stop(grace_s=1)


@each_row((0, 0.0, 0.25), (0, 1.0, 0.5), (3, 1.0, 4.0), (6, 1.0, 30.0), (5000, 0.0, 15.0))
def test_pauses_grow_up_to_a_limit(num_restarts: int, share: float, pause_s: float) -> None:
    assert RestartPolicy().pause_s(num_restarts, share) == pause_s

"""Starts services again that end by themselves, each on the ports that it had.

octavo/local/services.py hands over its children once they serve; `octavo up` and `octavo.LLM` print what is said here.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.errors import LocalServiceError
from octavo.local.child_process import ChildProcess


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a start, and when to give up.

    Attributes:
        initial_pause_s: Before the first start; it doubles with each one.
        longest_pause_s: Where the doubling ends.
        steady_after_s: A service that served this long begins with the first pause again.
        max_failed_starts: Starts in a row after which the service did not come to serve.
    """

    initial_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_after_s: float = 60.0
    max_failed_starts: int = 5

    def pause_s(self, num_restarts: int, share: float) -> float:
        """Return the pause after so many starts in short order; `share`, from 0 to 1, of its second half is taken."""
        return min(self.initial_pause_s * 2.0 ** min(num_restarts, 32), self.longest_pause_s) * (0.5 + 0.5 * share)


class Restarts:
    """Keeps children running that serve.

    Args:
        children: The services; several executors stand in for each other.
        say: Called with a sentence for each loss and each return.
        policy: The pauses.
        draw: Returns a random number from 0 to 1.
    """

    def __init__(
        self,
        children: Sequence[ChildProcess],
        say: Callable[[str], None],
        policy: RestartPolicy | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._children = children
        self._say = say
        self._policy = policy or RestartPolicy()
        self._draw = draw

    async def run(self) -> LocalServiceError:
        """Keep them running; return the error once the scheduler or the last executor is given up."""
        children = {asyncio.create_task(self._keep(child)): child for child in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(children, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child, error = children.pop(task), task.result()
                    if all(other.service != child.service for other in children.values()):
                        return error
                    self._say(f"{error}; giving up on {child.title}; the others keep running")
        finally:
            for task in children:
                task.cancel()
            await asyncio.gather(*children, return_exceptions=True)

    async def _keep(self, child: ChildProcess) -> LocalServiceError:
        """Start the child again whenever it ends; return the error after too many starts in vain."""
        num_restarts = num_failed_starts = 0
        cause = await child.wait_for_end()
        while num_failed_starts < self._policy.max_failed_starts:
            lost_s = time.monotonic()
            pause_s = self._policy.pause_s(num_restarts, self._draw())
            self._say(f"{cause}; {self._effect(child)}; restarting it in {pause_s:.1f} s{child.log_hint}")
            await asyncio.sleep(pause_s)
            num_restarts += 1
            try:
                await child.start()
                await child.wait_until_serving()
            except LocalServiceError:
                num_failed_starts += 1
                cause = await child.wait_for_end()
                continue
            num_failed_starts = 0
            served_s = time.monotonic()
            self._say(f"{child.title} is back after {served_s - lost_s:.1f} s")
            cause = await child.wait_for_end()
            if time.monotonic() - served_s >= self._policy.steady_after_s:
                num_restarts = 0
        return child.failure(f"{cause}; {num_failed_starts} starts in a row failed")

    def _effect(self, child: ChildProcess) -> str:
        """Return what the loss means for the streams."""
        if child.service != "executor":
            return "its calls were cut off"
        others = [other for other in self._children if other.service == "executor" and other is not child]
        is_taken_over = any(not other.has_ended for other in others)
        return (
            "the other executors take over its streams" if is_taken_over else "its streams are waiting for an executor"
        )

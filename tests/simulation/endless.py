"""Notices a callback that never ends: the loop cannot, since it is not asked any more.

`await event.wait()` goes on at once if the event is set. A coroutine that loops over it, and sets it itself, keeps the
loop for ever; the clock stands still, and no other callback runs.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from tests.simulation.loop import SimulationLoop

# Of processor time: a machine that is busy with other things makes no callback endless. The longest ones take 0.1 s.
LONGEST_CALLBACK_S = 2.5


class EndlessCallbackError(BaseException):
    """A callback does not end. Like a signal's, so that nobody takes it for an error of what is called."""


@contextlib.contextmanager
def watching_callbacks(
    loop: SimulationLoop, accuse: Callable[[str], None], longest_s: float = LONGEST_CALLBACK_S
) -> Iterator[None]:
    """Accuse a callback that takes longer, and end it; outside of the main thread nothing is watched."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = -1, -1

    def look(*_: object) -> None:
        nonlocal former
        if (now := (loop.num_callbacks, len(loop._picks))) != former:
            former = now
            return
        what = f"a callback takes more than {longest_s:g} s of processor time, and the clock stands still"
        accuse(what)
        raise EndlessCallbackError(what)

    handler = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, longest_s, longest_s)
    try:
        yield
    except EndlessCallbackError:
        pass  # it was told
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)

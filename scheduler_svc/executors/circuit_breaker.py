"""The circuit breaker of an executor, and the rules by which the loss of an executor counts against requests.

An attachment is lost when its connection breaks for good, when a step hangs or fails, or when an answer is
invalid. Either the executor is broken, or one of the requests that ran there breaks executors. One loss does not
say which. The rules:

 1. An attachment that returned a result had a working executor. When it is lost, the scheduler attaches again after
    the usual pause. The loss counts against each request in the steps in flight, if a step had finished before the
    request came.
 2. An attachment that is lost without a result, or with a request that got no token there and against which rule 1
    does not count the loss, opens the breaker: the scheduler does not attach for a while. The pause is
    BACKOFF.initial_s at first and doubles each time, up to BACKOFF.longest_s; a random part of it, up to half, is
    left out, so that several schedulers do not come at the same moment. A new process at the address need not wait.
 3. After the pause the breaker is half-open. First a request of the scheduler's own runs there, the probe
    (`probe.py`): no request of a client is at risk. If the probe is lost, the executor is to blame for the loss of
    rule 2, and rule 2 applies again. If it succeeds, the loss counts against the requests of the steps in
    flight that have had no token since. Then the executor takes one request; when a step has finished, the breaker is
    closed. A loss of this attachment counts at once, because the probe has run there before.
 4. A request that lost its executor is placed on another one, and on none that is half-open, as long as another
    attached executor could hold it (`Fleet`). Its next token ends that.
 5. Losses are counted from token to token. With LOSSES_OF_A_SUSPECT losses, unclear ones included, a request is a
    suspect, and is computed alone (`suspects.py`); with more than `max_losses` that it suffered alone it ends.
 6. The front of a request keeps the losses that count against it, and tells them to the scheduler that goes on with
    the request when this one has no executor left. Losses that are unclear by then are not counted.
 7. A request that no attached executor can hold waits, but not for ever (`orphans.py`).

So a broken executor costs requests only time: those that ran there at its first failure are placed on other executors,
no loss is counted, and the next failures hit probes. Each loss counts against a request that breaks executors, even
where there is only one executor, because the probe tells the two apart.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between failures in a row, in seconds: the first one, doubled each time up to the longest."""

    initial_s: float = 0.5
    longest_s: float = 30.0

    def pause_s(self, num_failures: int, share: float) -> float:
        """Return the pause after `num_failures` in a row; `share`, from 0 to 1, of its second half is taken."""
        return min(self.initial_s * 2.0 ** min(num_failures - 1, 32), self.longest_s) * (0.5 + 0.5 * share)


BACKOFF = Backoff()


class CircuitBreaker:
    """Says when a failed executor is tried again, and whether a probe has to run first.

    Args:
        draw: Returns a random number from 0 to 1.
        backoff: The pauses; None: BACKOFF.

    Attributes:
        num_failures: Attachments in a row that were lost without a result; 0: the breaker is closed.
        cause: Why the last attachment was lost.
    """

    def __init__(self, draw: Callable[[], float] = random.random, backoff: Backoff | None = None) -> None:
        self.num_failures = 0
        self.cause = ""
        self._draw = draw
        self._backoff = backoff or BACKOFF
        self._instance_id = ""
        self._opens_until_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the executor is believed to work."""
        return not self.num_failures

    def fail(self, instance_id: str, cause: str, now_s: float) -> None:
        """Open the breaker: an attachment of this executor process was lost without a result."""
        self.num_failures += 1
        self.cause = cause
        self._instance_id = instance_id
        self._opens_until_s = now_s + self._backoff.pause_s(self.num_failures, self._draw())

    def close(self) -> None:
        """Close the breaker: a step has finished."""
        self.num_failures = 0

    def wait_s(self, instance_id: str, now_s: float) -> float:
        """Return for how long this executor process must not be attached yet, in seconds; 0: it may be."""
        if self.is_closed or instance_id != self._instance_id:
            return 0.0
        return max(0.0, self._opens_until_s - now_s)


# The pause between two attempts is at least this long, and this share of the time since the first attempt: so an
# executor that starts is attached soon after it is ready.
FIRST_RETRY_S = 0.05
RETRY_SHARE = 0.1


class RetryPace:
    """The pauses between attempts to attach to one executor, at most `longest_s` seconds."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since_s: float | None = None  # time of the first attempt; None: it is attached, or no attempt was made

    def attached(self) -> None:
        """Note that the executor was attached."""
        self._since_s = None

    def next_pause_s(self, now_s: float) -> float:
        """Return how long to wait before the next attempt, in seconds."""
        if self._since_s is None:
            self._since_s = now_s
        return min(max(FIRST_RETRY_S, RETRY_SHARE * (now_s - self._since_s)), self._longest_s)

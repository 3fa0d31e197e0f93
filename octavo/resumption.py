"""A request across the calls that it takes: when one breaks, the next one goes on behind what has come.

The rest is what the broken call would have brought, to the bit: an output is a function of its request and the tokens
before. Next: octavo/client.py, which makes the calls, and octavo/many_requests.py, which does it for many.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.errors import OctavoError, TlsHandshakeError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.outputs import Event, Finished
from octavo.streamed_answer import StreamedAnswer

# Between a loss and the next call, in seconds: twice as long each time.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How long to try.

    Attributes:
        timeout_s: Since the first loss behind the last news, in seconds; 0: calls that break are not continued.
        draw: Returns a random number from 0 to 1: clients of one scheduler must not come back all at once.
    """

    timeout_s: float = 30.0
    draw: Callable[[], float] = random.random


NEVER = ResumePolicy(0.0)


class Losses:
    """Counts losses in a row, and says how long to wait before the next try.

    Args:
        policy: How long to try.
    """

    def __init__(self, policy: ResumePolicy) -> None:
        self._policy = policy
        self._num_in_a_row = 0
        self._first_at_s = 0.0
        self._first: UnavailableError | None = None

    def forget(self) -> None:
        """Something new came: losses before it do not count."""
        self._num_in_a_row = 0

    def pause_s(self, error: UnavailableError) -> float:
        """Note a loss; return how long to wait now. Raises UnavailableError: it takes too long."""
        policy, now_s = self._policy, asyncio.get_running_loop().time()
        if not policy.timeout_s or isinstance(error, TlsHandshakeError):
            raise error
        if not self._num_in_a_row:
            self._first_at_s, self._first = now_s, error
        elif now_s - self._first_at_s >= policy.timeout_s:
            raise UnavailableError(f"{self._first}; for {now_s - self._first_at_s:.0f} s nobody has gone on with it")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._num_in_a_row)
        self._num_in_a_row += 1
        return pause_s * (0.5 + 0.5 * policy.draw())


class ResumableRequest:
    """One request, and what has come of its answer.

    Args:
        request: Its message; asks for the prompt as tokens if it needs that.
        policy: How long to try.

    Attributes:
        answer: What has come, over all calls.
        losses: Of its calls.
        num_resumptions: How often it was continued.
    """

    def __init__(self, request: pb.GenerateRequest, policy: ResumePolicy) -> None:
        request.include_prompt_token_ids = bool(policy.timeout_s) and request.WhichOneof("prompt") != "token_ids"
        self.answer = StreamedAnswer()
        self.losses = Losses(policy)
        self.num_resumptions = 0
        self._request = request

    @property
    def has_begun(self) -> bool:
        """Whether a scheduler has accepted it."""
        return self.answer.accepted is not None

    @property
    def can_go_on(self) -> bool:
        """Whether enough is known: a scheduler of release 0.1.0 does not tell it."""
        accepted = self.answer.accepted
        return accepted is not None and accepted.HasField("sampling_params")

    def message(self) -> pb.GenerateRequest:
        """Return what is to be sent now: the request itself until it has begun, then its continuation."""
        accepted = self.answer.accepted
        if accepted is None:
            return self._request
        self.num_resumptions += 1
        message = pb.GenerateRequest()
        message.CopyFrom(self._request)
        message.request_id = accepted.request_id
        if accepted.prompt_token_ids:
            message.token_ids.ids[:] = accepted.prompt_token_ids
        message.sampling_params.CopyFrom(accepted.sampling_params)
        message.include_prompt_token_ids = False
        message.continuation.CopyFrom(self.answer.continuation(self.num_resumptions))
        return message

    def completed(self, event: Event) -> Event:
        """Return an event that came as callers get it."""
        event = self.answer.take(event)
        return replace(event, num_resumptions=self.num_resumptions) if isinstance(event, Finished) else event

    def refused(self, error: OctavoError) -> OctavoError:
        """Return what callers get when no call goes on with it."""
        if not self.num_resumptions or isinstance(error, UnavailableError):
            return error
        return UnavailableError(f"the connection to the scheduler broke, and the answer cannot go on: {error}")

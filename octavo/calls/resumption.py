"""How a client goes on with an answer whose call was cut: what it sends, how often, and for how long.

An answer is a function of its request, so a client that has the beginning can get the rest, to the bit, from any
scheduler that serves the model. Time and chance are arguments here. Next: octavo/client.py, which makes the calls, and
octavo/calls/many_requests.py, which does it for many.
"""

from collections.abc import Callable
from dataclasses import replace

from octavo.calls.scheduler_channel import is_elsewhere_better
from octavo.calls.streamed_answer import StreamedAnswer
from octavo.errors import InvalidRequestError, OctavoError, OverloadedError, RequestExistsError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Delta, Event, Finished, PromptLogprobs

DEFAULT_RESUME_TIMEOUT_S = 30.0

# Between a loss and the next call: twice as long each time.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

# What a scheduler of an earlier release calls `max_model_len` of a continuation. It refuses the request; without the
# field it goes on as far as its own executors hold.
_MAX_MODEL_LEN = "field 6 of Continuation"

# What refuses a continuation for good: something in it is wrong, or another caller has the request.
_REFUSALS = (InvalidRequestError, RequestExistsError)


class ResumeWindow:
    """How long something that was cut is tried again, and at which pace.

    Args:
        timeout_s: How long, from the first loss since something new came; 0: not at all.
        random: Returns a number from 0 to 1: pauses are shorter by up to half, so that the clients of a scheduler do
            not come back all at once.
        wanted: What was asked of schedulers, for people.

    Attributes:
        first_loss: Since something new came; None: nothing was lost.
    """

    def __init__(self, timeout_s: float, random: Callable[[], float], wanted: str = "resumed") -> None:
        self.timeout_s = timeout_s
        self._wanted = wanted
        self.first_loss: UnavailableError | None = None
        self._random = random
        self._lost_at_s = 0.0
        self._next_pause_s = FIRST_PAUSE_S

    def note_news(self) -> None:
        """Something new came."""
        self.first_loss = None
        self._next_pause_s = FIRST_PAUSE_S

    def left_s(self, now_s: float) -> float:
        """Return how much of the time is left."""
        return self.timeout_s if self.first_loss is None else self._lost_at_s + self.timeout_s - now_s

    def pause_s(self, error: OctavoError, now_s: float, *, at_least_s: float = 0.0) -> float:
        """Return how long to wait after a loss until the next call.

        Raises: UnavailableError: the time is over. It is the first loss, with what was tried.
        """
        if self.first_loss is None:
            self.first_loss = error if isinstance(error, UnavailableError) else UnavailableError(str(error))
            self._lost_at_s = now_s
        left_s = self.left_s(now_s)
        if self.timeout_s <= 0:
            raise self.first_loss
        if left_s <= 0:
            last = "" if str(error) == str(self.first_loss) else f"; the last time, {error}"
            raise self.first_loss.but(
                f", and no scheduler {self._wanted} it within {self.timeout_s:g} s{last}"
            ) from error
        pause_s = max(at_least_s, self._next_pause_s * (1 - self._random() / 2))
        self._next_pause_s = min(LONGEST_PAUSE_S, 2 * self._next_pause_s)
        return min(pause_s, left_s)


class ResumableRequest:
    """One request over all its calls.

    Args:
        request: Its message; asks for the prompt as tokens if it needs that.
        window: How long it is tried again.
        shows_provenance: Whether the caller asked which executors made the tokens; the client has to know in any case.

    Attributes:
        answer: What has come, over all calls.
        num_resumptions: How many continuations were accepted.
        is_taken: Whether the last message was accepted.
    """

    def __init__(self, request: pb.GenerateRequest, window: ResumeWindow, *, shows_provenance: bool = False) -> None:
        self.answer = StreamedAnswer(request.token_ids.ids)
        self.num_resumptions = 0
        self.is_taken = False
        self._is_told = False  # that it was accepted, to its caller
        self._request = request
        self._window = window
        self._shows_provenance = shows_provenance
        self._attempt = 0
        self._tells_max_model_len = True  # to the scheduler that is asked next

    @property
    def is_accepted(self) -> bool:
        """Whether a scheduler has accepted it, in any call."""
        return self.answer.accepted is not None

    def message(self) -> pb.GenerateRequest:
        """Return what to send now: the request itself until it is accepted, then a continuation of its answer."""
        self.is_taken = False
        accepted = self.answer.accepted
        if accepted is None:
            return self._request
        self._attempt += 1
        message = pb.GenerateRequest()
        message.CopyFrom(self._request)
        message.request_id = accepted.request_id
        message.sampling_params.CopyFrom(accepted.sampling_params)
        if message.include_prompt_token_ids:
            message.token_ids.ids[:] = accepted.prompt_token_ids
            message.include_prompt_token_ids = False
        message.continuation.CopyFrom(self.answer.continuation(self._attempt))
        if not self._tells_max_model_len:
            message.continuation.ClearField("max_model_len")
        self._tells_max_model_len = True
        return message

    def told(self, event: Event) -> Event | None:
        """Return an event that `answer` has taken, as callers get it; None: they have had it."""
        match event:
            case Accepted():
                self.is_taken = True
                self.num_resumptions += self._is_told
                is_new, self._is_told = not self._is_told, True
                return event if is_new else None
            case Delta() | PromptLogprobs():
                self._window.note_news()
            case Finished():
                event = replace(event, num_resumptions=self.num_resumptions)
        return event if self._shows_provenance else _without_provenance(event)

    @property
    def num_tokens_needed(self) -> int:
        """The longest sequence that it may become, as far as the scheduler told it."""
        accepted = self.answer.accepted or pb.Accepted()
        return min(accepted.max_model_len, accepted.num_prompt_tokens + accepted.sampling_params.max_tokens)

    def left_s(self, now_s: float) -> float:
        """Return how long a scheduler may take to accept a continuation."""
        return self._window.left_s(now_s)

    def pause_s(self, error: OctavoError, now_s: float) -> float:
        """Return how long to wait, after a call that ended with an error, until the next one.

        Raises: OctavoError: there is none. It is `error`, or the first loss with what came of it; `outputs` has what
            there is of the answer.
        """
        try:
            return self._pause_s(error, now_s)
        except OctavoError as final:
            final.keep(self.answer.unfinished_outputs())
            raise

    def _pause_s(self, error: OctavoError, now_s: float) -> float:
        is_refused = self._attempt > 0 and not self.is_taken
        if is_refused and isinstance(error, InvalidRequestError) and error.field == _MAX_MODEL_LEN:
            self._tells_max_model_len = False
            return self._window.pause_s(error, now_s)
        if is_refused and isinstance(error, _REFUSALS):
            loss = self._window.first_loss or UnavailableError("the connection to the scheduler was lost")
            raise loss.but(f", and the answer, cut off {self._place}, cannot be resumed: {error}") from error
        if is_refused and isinstance(error, OverloadedError):
            return self._window.pause_s(error, now_s, at_least_s=error.retry_after_s)
        if not is_elsewhere_better(error) or (self.is_accepted and not self._can_continue):
            raise error
        return self._window.pause_s(error, now_s)

    @property
    def _can_continue(self) -> bool:
        """Whether the scheduler told what a continuation needs; one of an earlier release does not."""
        accepted = self.answer.accepted
        if accepted is None or not accepted.HasField("sampling_params"):
            return False
        return self._request.WhichOneof("prompt") == "token_ids" or bool(accepted.prompt_token_ids)

    @property
    def _place(self) -> str:
        num = self.answer.num_tokens
        return f"after {num:,} token{'' if num == 1 else 's'}" if num else "before its first token"


def _without_provenance(event: Event) -> Event:
    match event:
        case Delta(provenance=(_, *_)):
            return replace(event, provenance=())
        case Finished():
            return replace(event, outputs=tuple(replace(output, provenance=()) for output in event.outputs))
    return event

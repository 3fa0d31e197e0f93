"""What happened between two answers: differences of totals over the monotonic time between them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.admin.v1 import admin_pb2
from octavo.top.polling import Answers

NUM_KEPT_RATES = 120  # as many as the widest sparkline shows


@dataclass(frozen=True, slots=True)
class Rates:
    """Events per second between two answers; None or absent: there was none before to compare with.

    Attributes:
        prompt_tokens: Of requests that got their first token.
        output_tokens: Over all outputs.
        finished_requests: That ended with their last output.
        failed_requests: That ended with an error.
        preemptions: In either mode.
        executor_output_tokens: By address.
        request_output_tokens: Of live requests, by id.
        refused_requests: That found the queue full, or their tenant's share of it.
        drafts, accepted_drafts: Of all executors: drafts that were computed, and tokens that came as drafts.
    """

    prompt_tokens: float | None = None
    output_tokens: float | None = None
    finished_requests: float | None = None
    failed_requests: float | None = None
    preemptions: float | None = None
    executor_output_tokens: Mapping[str, float] = field(default_factory=dict)
    request_output_tokens: Mapping[str, float] = field(default_factory=dict)
    refused_requests: float | None = None
    drafts: float | None = None
    accepted_drafts: float | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is shown of one moment.

    Attributes:
        answers: Of the scheduler.
        rates: Since the answers before.
        prompt_history: The last rates of prompt tokens, oldest first.
        output_history: The last rates of output tokens, oldest first.
        model_ids: Of the attached executors; while none is attached, of the last ones.
    """

    answers: Answers
    rates: Rates = Rates()
    prompt_history: tuple[float, ...] = ()
    output_history: tuple[float, ...] = ()
    model_ids: tuple[str, ...] = ()


class RateMeter:
    """Compares each answer with the one before; forgets everything when the scheduler has started anew."""

    def __init__(self) -> None:
        self._last: Answers | None = None
        self._prompt_history: deque[float] = deque(maxlen=NUM_KEPT_RATES)
        self._output_history: deque[float] = deque(maxlen=NUM_KEPT_RATES)
        self._model_ids: tuple[str, ...] = ()

    def add(self, answers: Answers) -> Picture:
        """Return the picture of these answers, which came after all others."""
        last = self._last
        if last is not None and _is_restarted(last, answers):
            last = None
            self._prompt_history.clear()
            self._output_history.clear()
            self._model_ids = ()
        self._last = answers
        rates = Rates() if last is None else _rates(last, answers)
        if rates.prompt_tokens is not None and rates.output_tokens is not None:
            self._prompt_history.append(rates.prompt_tokens)
            self._output_history.append(rates.output_tokens)
        self._model_ids = attached_models(answers) or self._model_ids
        return Picture(answers, rates, tuple(self._prompt_history), tuple(self._output_history), self._model_ids)


def attached_models(answers: Answers) -> tuple[str, ...]:
    """Return the models of the executors that are attached, each once."""
    attached = (e for e in answers.state.executors if e.status == admin_pb2.EXECUTOR_STATUS_ATTACHED)
    return tuple(dict.fromkeys(executor.model_id for executor in attached))


def _is_restarted(last: Answers, answers: Answers) -> bool:
    """Return whether another process answers than the last time: its uptime did not grow as time went by."""
    elapsed_ms = 1000 * (answers.at_s - last.at_s)
    return answers.state.uptime_ms < last.state.uptime_ms + elapsed_ms / 2 - 100  # answers take unequal times


def _rates(last: Answers, answers: Answers) -> Rates:
    seconds = answers.at_s - last.at_s
    if seconds <= 0:
        return Rates()
    old, new = last.state, answers.state
    known = {executor.address: executor for executor in old.executors}
    executors = [(known[executor.address], executor) for executor in new.executors if executor.address in known]
    return Rates(
        prompt_tokens=_rate(old.num_prompt_tokens, new.num_prompt_tokens, seconds),
        output_tokens=_rate(old.num_output_tokens, new.num_output_tokens, seconds),
        finished_requests=_rate(old.num_finished_requests, new.num_finished_requests, seconds),
        failed_requests=_rate(old.num_failed_requests, new.num_failed_requests, seconds),
        refused_requests=_rate(old.num_refused_requests, new.num_refused_requests, seconds),
        preemptions=_rate(old.num_preemptions, new.num_preemptions, seconds),
        executor_output_tokens={
            after.address: _rate(before.num_output_tokens, after.num_output_tokens, seconds)
            for before, after in executors
        },
        drafts=sum(_rate(before.num_draft_tokens, after.num_draft_tokens, seconds) for before, after in executors),
        accepted_drafts=sum(
            _rate(before.num_accepted_draft_tokens, after.num_accepted_draft_tokens, seconds)
            for before, after in executors
        ),
        request_output_tokens=_request_rates(last, answers),
    )


def _request_rates(last: Answers, answers: Answers) -> dict[str, float]:
    """Return tokens per second of live requests; a new request has no rate yet."""
    seconds = answers.live_at_s - last.live_at_s
    if seconds <= 0:
        return {}
    before = {request.request_id: request for request in last.live}
    rates = {}
    for request in answers.live:
        old = before.get(request.request_id)
        # An id may be used again once its request has ended.
        if old is not None and old.age_ms <= request.age_ms:
            rates[request.request_id] = _rate(old.num_output_tokens, request.num_output_tokens, seconds)
    return rates


def _rate(old: int, new: int, seconds: float) -> float:
    """Return the rate of a total; 0 if it has become less, as the live beams of a search may."""
    return max(0, new - old) / seconds

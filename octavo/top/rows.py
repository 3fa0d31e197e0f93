"""What one line says of a request or an executor, and in which order the requests are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from octavo.admin.v1 import admin_pb2
from octavo.top.polling import Answers
from octavo.top.rates import Picture
from octavo.values.wording import printable

_ABORTED = "ABORTED: "

STATUS_WORDS: Mapping["admin_pb2.RequestStatus.ValueType", str] = {
    admin_pb2.REQUEST_STATUS_WAITING: "waiting",
    admin_pb2.REQUEST_STATUS_RUNNING: "running",
    admin_pb2.REQUEST_STATUS_SWAPPED: "swapped",
    admin_pb2.REQUEST_STATUS_PREEMPTED: "preempted",
    admin_pb2.REQUEST_STATUS_PARKED: "parked",
    admin_pb2.REQUEST_STATUS_ENDED: "ended",
}
# What waits is yellow, what may never go on is red.
STATUS_STYLES: Mapping[str, str] = {
    "running": "#87af5f",
    "waiting": "#d7af5f",
    "swapped": "#d7af5f",
    "preempted": "#d7af5f",
    "parked": "#d75f5f",
}


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Texts are safe to print; spans of time are in milliseconds.

    Attributes:
        request_id: As it is, to ask for it.
        shown_id: As it can be printed.
        status: In a word.
        tenant: The tenant that it runs for.
        num_prompt_tokens: Of the prompt.
        num_output_tokens: Made so far, over all outputs.
        tokens_per_s: Output tokens per second since the last picture; None: not known yet, or it has ended.
        age_ms: Since it arrived, or from then until its end.
        silent_ms: Since its last token, or since it arrived if it has none; None: it has ended.
        queued_ms: Until it was first admitted, or up to now.
        waiting_ms: While it does not run, since its last token, or since it arrived; None: it runs, or has ended.
        first_token_ms: Until its first token; None: it has none.
        ended_ago_ms: Since its end; None: it is live.
        num_blocks: Blocks that its tokens in the cache fill; a shared one counts for each of its sequences.
        num_preemptions: How often it was preempted.
        place: Where it is, why it waits, or how it ended.
        has_failed: Whether it ended with an error, and was not aborted.
        priority: Smaller is more urgent.
    """

    request_id: str
    shown_id: str
    status: str
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_s: float | None
    age_ms: int
    silent_ms: int | None
    queued_ms: int
    waiting_ms: int | None
    first_token_ms: int | None
    ended_ago_ms: int | None
    num_blocks: int
    num_preemptions: int
    place: str
    has_failed: bool = False
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    def matches(self, text: str) -> bool:
        """Return whether the id or the tenant contains a text, in upper or lower case."""
        text = text.casefold()
        return text in self.shown_id.casefold() or text in self.tenant.casefold()


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """One executor; counts are 0 while it is not attached.

    Attributes:
        address: Where it is dialled.
        status: In a word.
        trouble: Why it is not attached; empty: it is, or is not dialled.
        warning: What is wrong with it although it is attached; empty: nothing is known.
        num_slots: Sequences that its batch has room for; 0: the scheduler does not say.
        num_used_slots: Sequences that run.
        tokens_per_s: Output tokens per second since the last picture; None: not known yet.
        max_steps_in_flight: Most steps that the scheduler sends before one is answered; 0: it does not say.
        round_trip_us: To the executor, in microseconds; None: not known.
        oldest_step_ms: Age of the oldest step in flight; None: none is.
        num_used_blocks: Used by one sequence.
        num_shared_blocks: Used by several.
        num_cached_blocks: Used by no sequence, with a prefix in it.
        num_free_blocks: Used by no sequence, and empty.
        num_output_tokens: Since the start of the scheduler.
        num_void_rows: Rows computed for sequences that had ended, since then.
    """

    address: str
    status: str
    is_attached: bool
    trouble: str
    warning: str
    num_slots: int
    num_used_slots: int
    num_running: int
    num_swapped: int
    num_steps_in_flight: int
    max_steps_in_flight: int
    round_trip_us: int | None
    oldest_step_ms: int | None
    tokens_per_s: float | None
    num_used_blocks: int
    num_shared_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_losses: int
    num_output_tokens: int
    num_void_rows: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool."""
        return self.num_used_blocks + self.num_shared_blocks + self.num_cached_blocks + self.num_free_blocks

    @property
    def num_taken_blocks(self) -> int:
        """Blocks that at least one sequence uses."""
        return self.num_used_blocks + self.num_shared_blocks


class Order(Enum):
    """What live requests are ordered by; each value is what is said of it."""

    AGE = "age"
    SILENCE = "time since last token"
    WAIT = "waiting time"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    TENANT = "tenant"


_KEYS: Mapping[Order, Callable[[RequestRow], tuple[int | str, ...]]] = {
    Order.AGE: lambda row: (-row.age_ms,),
    Order.SILENCE: lambda row: (-(row.silent_ms or 0), -row.age_ms),
    Order.WAIT: lambda row: (-(row.waiting_ms or 0), -row.queued_ms, -row.age_ms),
    Order.TOKENS: lambda row: (-row.num_tokens, -row.age_ms),
    Order.BLOCKS: lambda row: (-row.num_blocks, -row.age_ms),
    Order.TENANT: lambda row: (row.tenant.casefold(), -row.age_ms),
}


def in_order(rows: Iterable[RequestRow], order: Order) -> list[RequestRow]:
    """Return rows in an order, the most of it first; where that is equal, the oldest request."""
    return sorted(rows, key=_KEYS[order])


def live_rows(picture: Picture) -> list[RequestRow]:
    """Return a row for each live request that was asked for, by age."""
    answers = picture.answers
    return [
        _live_row(request, answers, picture.rates.request_output_tokens.get(request.request_id))
        for request in answers.live
    ]


def ended_rows(picture: Picture) -> list[RequestRow]:
    """Return a row for each request that has ended and was asked for, the newest end first."""
    return [_ended_row(request) for request in picture.answers.ended or ()]


def executor_rows(picture: Picture) -> list[ExecutorRow]:
    """Return a row for each executor, the ones that are not attached first."""
    rates = picture.rates.executor_output_tokens
    rows = [_executor_row(executor, rates.get(executor.address)) for executor in picture.answers.state.executors]
    return sorted(rows, key=lambda row: row.is_attached)


def _live_row(request: admin_pb2.RequestState, answers: Answers, tokens_per_s: float | None) -> RequestRow:
    silent_ms = request.last_token_age_ms if request.HasField("last_token_age_ms") else request.age_ms
    return RequestRow(
        request_id=request.request_id,
        shown_id=printable(request.request_id),
        status=STATUS_WORDS.get(request.status, "unknown"),
        tenant=printable(request.tenant),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        tokens_per_s=tokens_per_s,
        age_ms=request.age_ms,
        silent_ms=silent_ms,
        queued_ms=request.queue_ms if request.HasField("queue_ms") else request.age_ms,
        waiting_ms=None if request.status == admin_pb2.REQUEST_STATUS_RUNNING else silent_ms,
        first_token_ms=_first_token_ms(request),
        ended_ago_ms=None,
        num_blocks=_num_blocks(request, answers.block_sizes.get(request.executor, 0)),
        num_preemptions=request.num_preemptions,
        place=printable(_place(request, answers.reasons)),
        priority=request.priority,
    )


def _ended_row(request: admin_pb2.RequestState) -> RequestRow:
    is_aborted = request.outcome.startswith(_ABORTED)
    return RequestRow(
        request_id=request.request_id,
        shown_id=printable(request.request_id),
        status=STATUS_WORDS[admin_pb2.REQUEST_STATUS_ENDED],
        tenant=printable(request.tenant),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        tokens_per_s=None,
        age_ms=request.age_ms,
        silent_ms=None,
        queued_ms=request.queue_ms if request.HasField("queue_ms") else request.age_ms,
        waiting_ms=None,
        first_token_ms=_first_token_ms(request),
        ended_ago_ms=request.ended_ago_ms,
        num_blocks=0,
        num_preemptions=request.num_preemptions,
        place=printable(f"aborted: {request.outcome.removeprefix(_ABORTED)}" if is_aborted else request.outcome),
        # An error has a status code and a message; finish reasons are single words.
        has_failed=":" in request.outcome and not is_aborted,
        priority=request.priority,
    )


def _executor_row(executor: admin_pb2.ExecutorState, tokens_per_s: float | None) -> ExecutorRow:
    is_attached = executor.status == admin_pb2.EXECUTOR_STATUS_ATTACHED
    kind = "leaving" if executor.is_retired else "draining" if executor.is_draining else "attached"
    return ExecutorRow(
        address=printable(executor.address),
        status=kind if is_attached else "not attached",
        is_attached=is_attached,
        trouble="" if is_attached else printable(executor.last_error),
        warning=printable(executor.warning) if is_attached else "",
        num_slots=executor.num_slots,
        num_used_slots=executor.num_slots - executor.num_free_slots,
        num_running=executor.num_running_requests,
        num_swapped=executor.num_swapped_requests,
        num_steps_in_flight=executor.num_steps_in_flight,
        max_steps_in_flight=executor.max_steps_in_flight,
        round_trip_us=executor.round_trip_us if executor.HasField("round_trip_us") else None,
        oldest_step_ms=executor.oldest_step_age_ms if executor.HasField("oldest_step_age_ms") else None,
        tokens_per_s=tokens_per_s,
        num_used_blocks=executor.num_used_blocks - executor.num_shared_blocks,
        num_shared_blocks=executor.num_shared_blocks,
        num_cached_blocks=executor.num_cached_blocks,
        num_free_blocks=executor.num_free_blocks - executor.num_cached_blocks,
        num_losses=executor.num_losses,
        num_output_tokens=executor.num_output_tokens,
        num_void_rows=executor.num_void_rows,
    )


def _first_token_ms(request: admin_pb2.RequestState) -> int | None:
    return request.time_to_first_token_ms if request.HasField("time_to_first_token_ms") else None


def _num_blocks(request: admin_pb2.RequestState, block_size: int) -> int:
    if not block_size:
        return 0
    return sum(-(-sequence.num_computed_tokens // block_size) for sequence in request.sequences)


def _place(request: admin_pb2.RequestState, reasons: Mapping[str, str]) -> str:
    match request.status:
        case admin_pb2.REQUEST_STATUS_WAITING:
            return reasons.get(request.request_id, "far back in the queue")
        case admin_pb2.REQUEST_STATUS_PARKED:
            return reasons.get(request.request_id, "quarantined: it may crash executors; others go first")
        case admin_pb2.REQUEST_STATUS_SWAPPED:
            return f"in the host cache of {request.executor}"
        case admin_pb2.REQUEST_STATUS_PREEMPTED:
            return f"tokens in flight from {request.executor}"
    return f"on {request.executor}"

"""Records with given times, for tests of what is computed from them."""

from octavo.bench.load import LoadResult
from octavo.bench.record import Outcome, PlannedRequest, RequestRecord, TokenUsage


def record(
    *events: tuple[float, int],
    sent_s: float = 0.0,
    ended_s: float | None = None,
    scheduled_s: float | None = None,
    num_prompt_tokens: int = 10,
    usage: TokenUsage | None = None,
    error: str | None = None,
    outcome: Outcome | None = None,
) -> RequestRecord:
    """Return a request whose events came at those times with so many tokens; completed unless it has an error."""
    planned = PlannedRequest(0, "", num_prompt_tokens, 4, scheduled_s)
    made = RequestRecord(planned, scheduled_s, sent_s)
    for time_s, num_tokens in events:
        made.add_event(time_s, num_tokens)
    made.ended_s = ended_s if ended_s is not None else events[-1][0]
    made.usage = usage
    made.error = error
    made.outcome = outcome or (Outcome.FAILED if error else Outcome.COMPLETED)
    return made


def load_of(*records: RequestRecord, end_s: float, is_interrupted: bool = False) -> LoadResult:
    """Return a load from 0 to `end_s`."""
    return LoadResult(list(records), 0.0, end_s, [0.001, 0.003], 0.25, is_interrupted)

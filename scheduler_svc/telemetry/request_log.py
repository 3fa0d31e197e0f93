"""The log line of each request, at its end. It holds no text of the client's or the model's."""

import logging

from octavo_shared.process.events import Event
from scheduler_svc.request.life import EndedRequest

log = logging.getLogger(__name__)


def log_end(ended: EndedRequest) -> None:
    """Log that a request has ended: how, how large it was, and how long it took, in seconds."""
    if not log.isEnabledFor(logging.INFO):
        return
    times, reason, num_spans = ended.times, ended.finish_reason, len(ended.provenance.spans)
    log.info(
        Event(
            "request_ended",
            request_id=ended.request_id,
            tenant=ended.tenant or None,
            finish_reason=None if reason is None else reason.value,
            error=ended.error_code,
            num_prompt_tokens=ended.num_prompt_tokens,
            num_output_tokens=ended.num_output_tokens,
            num_cached_tokens=ended.num_cached_tokens,
            queue_s=_rounded(times.queue_s),
            ttft_s=_rounded(times.time_to_first_token_s),
            duration_s=_rounded(times.duration_s),
            num_numerics=num_spans if num_spans > 1 else None,
            trace_id=ended.trace_id,
        )
    )


def _rounded(seconds: float | None) -> float | None:
    """Return a time to the microsecond."""
    return None if seconds is None else round(seconds, 6)

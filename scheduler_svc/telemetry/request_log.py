"""The one line that the log has for each request, at its end. It holds no text of the client's or the model's."""

import logging

from scheduler_svc.front.request import Request
from shared.events import Event
from shared.grpc_status import status_code

log = logging.getLogger(__name__)


def log_end(request: Request) -> None:
    """Log that a request has ended: how, how large it was, and how long it took, in seconds."""
    if not log.isEnabledFor(logging.INFO):
        return
    group, times, error = request.group, request.times, request.error
    log.info(
        Event(
            "request_ended",
            request_id=request.request_id,
            tenant=group.tenant or None,
            finish_reason=request.finish_reason.value if error is None else None,
            error=None if error is None else status_code(error).name,
            num_prompt_tokens=group.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=group.num_cached_tokens,
            queue_s=_rounded(times.queue_s),
            ttft_s=_rounded(times.time_to_first_token_s),
            duration_s=_rounded(times.duration_s),
            trace_id=request.trace_id,
        )
    )


def _rounded(seconds: float | None) -> float | None:
    """Return a time to the microsecond."""
    return None if seconds is None else round(seconds, 6)

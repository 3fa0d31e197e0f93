"""The requests that are being checked: no part of the engine yet, but `Abort` finds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.front.access.identity import current_identity
from shared.errors import RequestAbortedError, RequestExistsError


@dataclass(slots=True)
class _Check:
    tenant: str
    is_aborted: bool = False


class RunningChecks:
    """Remembers which of them were aborted."""

    def __init__(self) -> None:
        self._checks: dict[str, _Check] = {}

    @contextmanager
    def running(self, request: pb.GenerateRequest) -> Iterator[None]:
        """Stand around the check of a request; one without an id cannot be aborted.

        Raises:
            RequestExistsError: a request with the same id is being checked.
            RequestAbortedError: it was aborted meanwhile.
        """
        request_id = request.request_id
        if not request_id:
            yield
            return
        if request_id in self._checks:
            raise RequestExistsError(request_id)
        check = self._checks[request_id] = _Check(request.tenant)
        try:
            yield
        finally:
            del self._checks[request_id]
        if check.is_aborted:
            raise RequestAbortedError(f"request {request_id!r} was aborted")

    def abort(self, request_id: str) -> bool:
        """End a request when its check is over; False: none of this id is being checked for the caller's tenant."""
        check = self._checks.get(request_id)
        if check is None or not current_identity().may_act_for(check.tenant):
            return False
        check.is_aborted = True
        return True

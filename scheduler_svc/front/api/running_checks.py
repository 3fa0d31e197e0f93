"""Requests that are being checked: the engine does not have them yet, but `Abort` finds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import RequestAbortedError, RequestExistsError
from scheduler_svc.front.access.identity import current_identity


@dataclass(slots=True)
class _Check:
    is_aborted: bool = False


class RunningChecks:
    """Remembers which of these requests were aborted."""

    def __init__(self) -> None:
        self._checks: dict[str, dict[str, _Check]] = {}  # by id and tenant

    @contextmanager
    def running(self, request: pb.GenerateRequest) -> Iterator[None]:
        """Register a request while it is checked; a request without an id cannot be aborted.

        Raises:
            RequestExistsError: a request of the tenant with the same id is being checked.
            RequestAbortedError: it was aborted meanwhile.
        """
        request_id = request.request_id
        if not request_id:
            yield
            return
        checks = self._checks.setdefault(request_id, {})
        if request.tenant in checks:
            raise RequestExistsError(request_id)
        check = checks[request.tenant] = _Check()
        try:
            yield
        finally:
            del checks[request.tenant]
            if not checks:
                del self._checks[request_id]
        if check.is_aborted:
            raise RequestAbortedError(f"request {request_id!r} was aborted")

    def abort(self, request_id: str) -> bool:
        """Abort requests once their check is over; False: no request of the caller with this id is being checked."""
        identity = current_identity()
        found = [check for tenant, check in self._checks.get(request_id, {}).items() if identity.may_act_for(tenant)]
        for check in found:
            check.is_aborted = True
        return bool(found)

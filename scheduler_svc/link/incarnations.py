"""The latest engine of each scheduler that a front has joined: it joins no older one."""

from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from octavo_shared.step_wire.incarnation import require_believable


class StaleEngineError(OctavoServiceError):
    """The engine that answers is an older one, or says nonsense of its place."""


class Incarnations:
    """The largest incarnation of each scheduler."""

    def __init__(self) -> None:
        self._latest_of: dict[str, int] = {}

    def latest_of(self, scheduler_id: str) -> int:
        """Return the incarnation of the latest engine of a scheduler; 0: none was joined."""
        return self._latest_of.get(scheduler_id, 0)

    def require_latest(self, scheduler_id: str, incarnation: int, unix_s: float) -> None:
        """Keep the incarnation of an engine that is joined. Raises StaleEngineError: a later engine was joined."""
        if not incarnation:  # it is new, and waits for its executors
            return
        try:
            require_believable(incarnation, unix_s)
        except InvalidFieldError as error:
            raise StaleEngineError(
                f"the engine of scheduler {scheduler_id!r} sent an invalid incarnation: {error}"
            ) from error
        if incarnation < (former := self.latest_of(scheduler_id)):
            raise StaleEngineError(
                f"the engine of scheduler {scheduler_id!r} has the incarnation {incarnation}; this front has joined a "
                f"later one, {former}"
            )
        self._latest_of[scheduler_id] = incarnation

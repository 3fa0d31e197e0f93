"""The responses of the last steps of an epoch, kept so that a broken stream can be resumed."""

from octavo.execution.v1 import step_pb2
from octavo_shared.errors import StepGapError

NUM_KEPT_RESPONSES = 16


class KeptResponses:
    """What was executed in this epoch. Steps are numbered from 1 without gaps.

    The thread that answers steps appends; any thread may read: the tuple is replaced in one piece.
    """

    def __init__(self) -> None:
        self._kept: tuple[step_pb2.ExecuteModelResponse, ...] = ()

    @property
    def last_step_id(self) -> int:
        """The last step with a response; 0: none."""
        return _last_step_id(self._kept)

    def append(self, response: step_pb2.ExecuteModelResponse) -> None:
        """Keep the response of the next step; the oldest one is forgotten."""
        assert response.step_id == self.last_step_id + 1, (response.step_id, self.last_step_id)
        self._kept = (*self._kept, response)[-NUM_KEPT_RESPONSES:]

    def find(self, step_id: int) -> step_pb2.ExecuteModelResponse | None:
        """Return the stored response of a step, or None if it is the next one to run.

        Raises: StepGapError: the step lies beyond the next one, or before the stored ones.
        """
        last_step_id = self.last_step_id
        if step_id == last_step_id + 1:
            return None
        if step_id > last_step_id:
            raise StepGapError(f"step {step_id} arrived after step {last_step_id}; step {last_step_id + 1} is missing")
        return self.since(step_id - 1)[0]

    def since(self, step_id: int) -> list[step_pb2.ExecuteModelResponse]:
        """Return the responses of all steps after `step_id`, in order.

        Raises: StepGapError: they are not all kept, or `step_id` was never executed.
        """
        kept = self._kept
        last_step_id = _last_step_id(kept)
        num_wanted = last_step_id - step_id
        if num_wanted < 0:
            raise StepGapError(f"step {step_id} was not executed in this epoch; the last one is {last_step_id}")
        if num_wanted > len(kept):
            first = last_step_id - len(kept) + 1
            raise StepGapError(f"the response of step {step_id + 1} is no longer kept; the first kept is {first}")
        return list(kept[len(kept) - num_wanted :])


def _last_step_id(kept: tuple[step_pb2.ExecuteModelResponse, ...]) -> int:
    return kept[-1].step_id if kept else 0
